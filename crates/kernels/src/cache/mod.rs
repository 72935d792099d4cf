//! Decoding: causal attention of new tokens to all that came before, without doing the past again.

mod clusters;
mod features;
mod paged;
mod reach;
mod routed;
mod rows;
mod store;
mod support;
mod tokens;
mod uniform;

pub use self::paged::{PagedCache, SequenceId};
use self::{
    reach::{keeps_rows, sums_over_rows},
    rows::{BucketTable, Queries, Rows},
    store::Store,
    support::{check_support, largest, map_of, new_tokens, store_of},
    tokens::Tokens,
};
use crate::{
    Error, Inputs, Mask, Mechanism, Parameter, Result, Shape, check,
    engine::check_row,
    mechanism::Form,
    memory::{self, check_memory},
    parallel, range,
    simd::{Level, rows::max_abs},
    structure::{
        clustered::{Past, Routed},
        features::Past as Sums,
    },
};

/// The past of a causal `softmax`, `fna`, `infsa`, `ssa`, `routed`, `uniform`, of one hop over `features`, or over pairs where each row
/// depends on its own query alone (any dense score with normalisation `row` or `none`, and a bias by distance), whatever the
/// configuration says of `causal`. Feeding a sequence in steps of any length gives what one causal call on the whole of it gives.
///
/// Kept per head: for `softmax`, `fna` and compositions all keys and values, or, with a window, those of the sinks and of the window, in
/// a ring: its memory is bounded, however long the decoding goes on ([`Cache::most_tokens`]). For `infsa` keys, values and the squared
/// prefix norm, one f64, whose range holds the square of any product of two f32; for `uniform` only the sum of the values; for
/// `features` the sums of features and of their products with values. `ssa` keeps keys and values by cluster, and the mean of every
/// cluster: a further token looks at its own cluster and at the means, about `sqrt(N)` of each, in place of `N` keys. `routed` keeps its
/// own segment as it comes, and those before by cluster.
///
/// Many sequences of different lengths, or with a common past, share memory in a [`PagedCache`].
///
/// ```
/// use resolvent_kernels::{Cache, Extras, Inputs, Mechanism};
/// let mut cache = Cache::new(&Mechanism::preset("uniform")?, 1, 1, 2, 2, 16)?;
/// let mut out = [0.0; 2];
/// for v in [[1.0, 3.0], [3.0, 5.0]] {
///     cache.step(&Inputs { q: &[0.0; 2], k: Some(&[0.0; 2]), v: &v, extras: Extras::default() }, &mut out)?;
/// }
/// assert_eq!((out, cache.len()), ([2.0, 4.0], 2)); // the mean of both values
/// # Ok::<(), resolvent_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cache {
    mechanism: Mechanism,
    /// What carries it out.
    form: Form,
    /// One token: both lengths are 1.
    token: Shape,
    level: Level,
    len: usize,
    capacity: usize,
    /// Keys and values, where rows are made from these.
    store: Store,
    /// `[slices]`: the squared norms so far (`infsa`).
    norms: Vec<f64>,
    /// `[batch, kv_heads]`: largest entries of keys so far, where the range of scores depends on them.
    largest: Vec<f32>,
    buckets: BucketTable,
    /// `[batch]`: unmasked keys so far.
    seen: Vec<usize>,
    /// `[slices, 1 + value_dim]`: a sum of values.
    sums: Vec<f64>,
    /// Heads of queries to one of keys and values.
    sharing: usize,
    /// Of every slice, once there is a token (`ssa`).
    clusters: Vec<Past>,
    /// The same of the structure `features`.
    features: Vec<Sums>,
    /// The same of causal segments, of every head of keys; of queries, once there is a codebook.
    routed: Vec<Routed>,
}

impl Cache {
    /// An empty cache with memory for `capacity` tokens. It grows when more come, to at least twice its size; the tokens
    /// kept are then copied once. For `ssa` the capacity is the length that the clusters are made for, as that of a call is, and
    /// there can be no more tokens.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a mechanism that has no causal form, or an empty axis; [`crate::Error::OutOfRange`]
    /// for an invalid field of the configuration; [`crate::Error::Memory`].
    pub fn new(
        mechanism: &Mechanism,
        batch: usize,
        heads: usize,
        head_dim: usize,
        value_dim: usize,
        capacity: usize,
    ) -> Result<Self> {
        let token = Shape { batch, heads, seq_q: 1, seq_kv: 1, head_dim, value_dim };
        check_support(mechanism, &token, capacity)?;
        let mut cache = Self {
            mechanism: mechanism.clone(),
            form: mechanism.form(),
            token,
            level: Level::selected()?,
            len: 0,
            capacity,
            store: store_of(mechanism, &token, heads),
            norms: vec![0.0; token.slices()],
            largest: vec![0.0; token.slices()],
            buckets: BucketTable::default(),
            seen: vec![0; batch],
            sums: vec![0.0; token.slices() * (1 + value_dim)],
            sharing: 1,
            clusters: Vec::new(),
            features: Vec::new(),
            routed: Vec::new(),
        };
        cache.reserve()?;
        Ok(cache)
    }

    /// Takes memory for as many tokens as were asked for.
    fn reserve(&mut self) -> Result<()> {
        if keeps_rows(&self.mechanism) {
            let tokens = self.capacity.min(self.store.most().unwrap_or(usize::MAX)).max(1);
            let channels = self.kv_slices().saturating_mul(self.token.head_dim + self.token.value_dim);
            check_memory("a cache", memory::bytes(tokens.saturating_mul(channels), size_of::<f32>()))?;
            self.store.grow(self.token.batch, 0, self.capacity.max(1));
        }
        Ok(())
    }

    /// The same cache, still empty, with fewer heads of keys and values, each shared by as many neighbouring heads of queries:
    /// steps then take `k` and `v` of `kv_heads`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless `kv_heads` divides the heads; [`Error::Unsupported`] for fewer where queries are keys; [`Error::Memory`].
    pub fn with_kv_heads(mut self, kv_heads: usize) -> Result<Self> {
        self.sharing = check::sharing(&self.mechanism, self.token.heads, kv_heads)?;
        self.store = store_of(&self.mechanism, &self.token, kv_heads);
        self.largest = vec![0.0; self.kv_slices()];
        self.clear();
        self.reserve()?;
        Ok(self)
    }

    /// Tokens taken so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was taken yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens whose keys and values are held, however many are taken: with a window, it and the sinks in whole chunks of 16.
    /// `None` where there is no such number, or no keys are kept.
    pub fn most_tokens(&self) -> Option<usize> {
        self.store.most()
    }

    /// Bytes of what is kept, with memory for tokens to come.
    pub fn bytes(&self) -> usize {
        let sums = size_of::<f64>() * (self.norms.len() + self.sums.len());
        let clusters: usize = self.clusters.iter().map(Past::bytes).sum();
        let features: usize = self.features.iter().map(Sums::bytes).sum();
        let routed: usize = self.routed.iter().map(Routed::bytes).sum();
        self.store.bytes() + sums + clusters + features + routed
    }

    /// Forgets all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
        self.store.clear();
        self.norms.fill(0.0);
        self.largest.fill(0.0);
        self.seen.fill(0);
        self.sums.fill(0.0);
        self.clusters.clear();
        self.features.clear();
        self.routed.clear();
    }

    /// The cache of the sequences at `rows` of the batch, which may repeat. Each goes on with the draws of the place where it began.
    ///
    /// # Panics
    /// If there is no such sequence, or none is chosen.
    pub fn select(&self, rows: &[usize]) -> Self {
        assert!(!rows.is_empty(), "a cache is of one sequence at least");
        let (batch, heads) = (self.token.batch, self.token.heads);
        let clusters = rows.iter().flat_map(|row| self.clusters.chunks(heads).nth(*row).unwrap_or_default().to_vec());
        let pasts = (self.routed.len() / batch).max(1);
        let routed = rows.iter().flat_map(|row| self.routed.chunks(pasts).nth(*row).unwrap_or_default().to_vec());
        let features = rows.iter().flat_map(|row| self.features.chunks(heads).nth(*row).unwrap_or_default().to_vec());
        Self {
            mechanism: self.mechanism.clone(),
            form: self.form.clone(),
            token: Shape { batch: rows.len(), ..self.token },
            store: self.store.select(batch, rows),
            norms: chosen(&self.norms, batch, rows),
            largest: chosen(&self.largest, batch, rows),
            buckets: self.buckets.clone(),
            seen: chosen(&self.seen, batch, rows),
            sums: chosen(&self.sums, batch, rows),
            clusters: clusters.collect(),
            features: features.collect(),
            routed: routed.collect(),
            ..*self
        }
    }

    /// Takes `n >= 1` new tokens, `q, k [batch, heads, n, head_dim]`, `v [batch, heads, n, value_dim]` (no `k` if tied),
    /// and writes their rows `out [batch, heads, n, value_dim]`. `n` follows from the length of `q`.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Tensor`] for tensors that do not fit, [`crate::Error::Range`] for scores that leave f32; the
    /// cache is then as before. [`crate::Error::Overflow`] where rows leave f32 although no token does.
    pub fn step(&mut self, inputs: &Inputs<'_, f32>, out: &mut [f32]) -> Result<()> {
        self.step_masked(inputs, &Mask::default(), out)
    }

    /// As [`Cache::step`], of tokens some of which are masked, such as the padding of sequences of different lengths: masks are of the
    /// new tokens, `[batch, n]`, and it is causal whatever they say of that. No later row sees a masked key, and the row of a masked query
    /// is zero. Masked tokens have their place all the same: what follows is as far from what comes before as in the whole sequence.
    ///
    /// # Errors
    /// As [`Cache::step`]; [`Error::Unsupported`] for `ssa`, whose clusters are made as tokens come.
    pub fn step_masked(&mut self, inputs: &Inputs<'_, f32>, mask: &Mask<'_>, out: &mut [f32]) -> Result<()> {
        let tokens = self.take("step", inputs, mask, Some(out.len()))?;
        self.attend(&tokens, Some(out));
        let finite = || tokens.is_finite() && self.store.is_finite();
        range::check_finite(self.level, "out", out, finite)
    }

    /// As [`Cache::step`], of tokens whose rows are known: those of a prompt, which one causal call gives faster than steps. For
    /// `infsa`, whose norm is a sum over all rows, no faster than a step.
    ///
    /// # Errors
    /// As [`Cache::step`].
    pub fn append(&mut self, inputs: &Inputs<'_, f32>) -> Result<()> {
        self.append_masked(inputs, &Mask::default())
    }

    /// As [`Cache::append`], of tokens some of which are masked.
    ///
    /// # Errors
    /// As [`Cache::step_masked`].
    pub fn append_masked(&mut self, inputs: &Inputs<'_, f32>, mask: &Mask<'_>) -> Result<()> {
        let tokens = self.take("append", inputs, mask, None)?;
        if sums_over_rows(&self.mechanism) {
            let mut rows = vec![0.0; tokens.new * self.token.out_len()];
            self.attend(&tokens, Some(&mut rows));
        } else {
            self.attend(&tokens, None);
        }
        Ok(())
    }

    /// The new tokens, which are checked.
    fn take<'a>(
        &mut self,
        op: &'static str,
        inputs: &Inputs<'a, f32>,
        mask: &Mask<'a>,
        out: Option<usize>,
    ) -> Result<Tokens<'a>> {
        let new = new_tokens(op, &self.mechanism, &self.token, self.sharing, inputs)?;
        let shape = Shape { seq_q: new, seq_kv: new, ..self.token };
        check::beside_tokens(op, &self.mechanism, &shape, &inputs.extras, mask)?;
        let expected = new * self.token.out_len();
        check::length(op, "out", out.unwrap_or(expected), expected, "expected batch * heads * n * value_dim")?;
        self.check_masks(mask)?;
        if matches!(self.form, Form::Ssa(_)) && self.len + new > self.capacity {
            let (got, expected) =
                ((self.len + new).to_string(), "at most the capacity, for which the clusters are made");
            return Err(Error::OutOfRange { field: "tokens", got, expected });
        }
        let tokens = Tokens::new(inputs, *mask, &self.token, new, &self.seen);
        if let Some((decoder, _)) = self.decoder(&tokens.extras) {
            decoder.check(&tokens.q, &tokens.k)?;
        }
        let largest = largest(self.level, &tokens.k, &self.largest);
        self.check_range(&tokens, &largest)?;
        if keeps_rows(&self.mechanism) {
            check_memory("a cache", self.store.growth(self.token.batch, self.len + new))?;
        }
        self.largest = largest;
        Ok(tokens)
    }

    /// Whether f32 has room for what rows are made of, beside keys so far with entries up to `largest`.
    fn check_range(&self, tokens: &Tokens<'_>, largest: &[f32]) -> Result<()> {
        let Shape { heads, head_dim, .. } = self.token;
        let slices = tokens
            .q
            .chunks_exact(tokens.new * head_dim)
            .zip(largest.iter().flat_map(|&k| std::iter::repeat_n(k, self.sharing)));
        let mut slices = slices.map(|(q, k)| [max_abs(self.level, q), k]).enumerate();
        match &self.form {
            _ if keeps_rows(&self.mechanism) => self.rows(tokens).check(&tokens.q, tokens.new, largest),
            Form::Ssa(m) => slices.try_for_each(|(_, largest)| range::check_decoded(m, head_dim, largest)),
            Form::Composed(m) => {
                let Some(clusters) = routed::clusters(m) else { return Ok(()) };
                slices.try_for_each(|(slice, largest)| {
                    let configured = |p| m.score.value(p, head_dim, heads);
                    let of = |p: Parameter| rows::given(&tokens.extras, p, slice % heads, configured(p));
                    check_row(&m.score, head_dim, of, largest)?;
                    range::check_decoded(&clusters, head_dim, largest)
                })
            }
            _ => Ok(()),
        }
    }

    /// Whether the mechanism can leave masked tokens out.
    fn check_masks(&self, mask: &Mask<'_>) -> Result<()> {
        let masked = [mask.key, mask.query].iter().flatten().any(|keep| keep.contains(&false));
        if !masked || !matches!(self.form, Form::Ssa(_)) {
            return Ok(());
        }
        let why = "tokens are clustered as they come; leave masked tokens out of the steps";
        Err(Error::Unsupported { mechanism: self.mechanism.id(), what: "masks in a cache", why })
    }

    /// Heads of keys and values of the whole batch.
    fn kv_slices(&self) -> usize {
        self.token.slices() / self.sharing
    }

    /// What makes rows of keys and values.
    fn rows<'a>(&'a self, tokens: &Tokens<'a>) -> Rows<'a> {
        Rows::new((&self.mechanism, &self.form), tokens.extras, self.token, self.level, &self.buckets)
    }

    /// Takes the tokens in, and writes their rows where they are asked for.
    fn attend(&mut self, tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        match &self.form {
            Form::Ssa(_) => self.attend_clusters(tokens, out),
            Form::Uniform(_) => self.attend_uniform(tokens, out),
            _ if keeps_rows(&self.mechanism) => self.attend_rows(tokens, out),
            _ => match routed::clusters(&self.mechanism) {
                Some(m) => self.attend_routed(&m, tokens, out),
                None => self.attend_features(tokens, out),
            },
        }
        self.len += tokens.new;
        self.seen.iter_mut().enumerate().for_each(|(sequence, seen)| *seen = tokens.seen(sequence, tokens.new - 1));
    }

    /// Keeps keys and values, and makes the rows of them: as many at a time as a ring holds.
    fn attend_rows(&mut self, tokens: &Tokens<'_>, mut out: Option<&mut [f32]>) {
        let (batch, len, new, sharing) = (self.token.batch, self.len, tokens.new, self.sharing);
        let map = map_of(&self.mechanism);
        self.buckets.extend(&self.mechanism, len + new);
        let mut done = 0;
        while done < new {
            let at_once = if out.is_some() { self.store.at_once(len + done) } else { new };
            let next = done..new.min(done.saturating_add(at_once));
            self.store.push(map, tokens, next.clone(), batch, len);
            done = next.end;
            if let Some(out) = &mut out {
                let mut norms = std::mem::take(&mut self.norms);
                let queries = Queries { q: &tokens.q, tokens: next, all: new, keep: tokens.mask.query };
                let past = |slice: usize| (self.store.head(slice / sharing), len);
                self.rows(tokens).attend(&queries, out, &mut norms, past);
                self.norms = norms;
            }
        }
    }

    /// Takes the tokens of every slice into what is kept of it, one after the other, and writes their rows where they are asked for:
    /// `take` is given a slice's past, its number and the token's, and, for a row, where to add a sum of values, of which it returns the
    /// factor.
    fn go_on<P: Send>(
        (pasts, sums): (&mut [P], &mut [f64]),
        (tokens, heads): (&Tokens<'_>, usize),
        out: Option<&mut [f32]>,
        take: impl Fn(&mut P, [usize; 2], Option<&mut [f64]>) -> f64 + Sync,
    ) {
        let (dim, new) = (sums.len() / pasts.len() - 1, tokens.new);
        let mut rows: Vec<Option<&mut [f32]>> = match out {
            Some(out) => out.chunks_exact_mut(new * dim).map(Some).collect(),
            None => pasts.iter().map(|_| None).collect(),
        };
        let slices = pasts.iter_mut().zip(&mut rows).zip(sums.chunks_exact_mut(1 + dim)).enumerate();
        parallel::each(slices, |(slice, ((past, out), sums))| {
            for n in 0..new {
                let wanted = out.is_some() && tokens.keeps_query(slice / heads, n);
                sums.fill(0.0);
                let factor = take(past, [slice, n], wanted.then_some(&mut sums[1..]));
                if let Some(out) = out {
                    let row = out[n * dim..].iter_mut().zip(&sums[1..]);
                    row.for_each(|(out, sum)| *out = (factor * sum) as f32);
                }
            }
        });
    }
}

fn part(x: &[f32], start: usize, len: usize) -> &[f32] {
    &x[start..start + len]
}

/// Parts `rows` of the `batch` that `x` is made of.
fn chosen<T: Copy>(x: &[T], batch: usize, rows: &[usize]) -> Vec<T> {
    let len = x.len() / batch;
    rows.iter().flat_map(|row| &x[row * len..][..len]).copied().collect()
}
