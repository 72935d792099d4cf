//! Decoding: causal attention of new tokens to all that came before, without doing the past again.

mod clusters;
mod features;
mod routed;
mod rows;

use rayon::prelude::*;

use self::rows::{decoder, infsa, scale_down, softmax};
use crate::{
    Error, Inputs, Mechanism, Parameter, Result, Shape, check, range,
    simd::Level,
    structure::{
        clustered::{Past, Routed},
        features::Past as Sums,
    },
};

/// The past of a causal `softmax`, `fna`, `infsa`, `ssa`, `routed`, `uniform`, or of one hop over `features`, whatever the configuration
/// says of `causal`. Feeding a sequence in steps of any length gives what one causal call on the whole of it gives.
///
/// Kept per head: for `softmax` and `fna` all keys and values; for `infsa` those and the squared prefix norm, one f64, whose range
/// holds the square of any product of two f32; for `uniform` only the sum of the values; for `features` the sums of features and of
/// their products with values. `ssa` keeps keys and values by cluster, and the mean of every cluster: a further token looks at its
/// own cluster and at the means, about `sqrt(N)` of each, in place of `N` keys. `routed` keeps its own segment as it comes, and those
/// before by cluster.
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
    /// One token: both lengths are 1.
    token: Shape,
    level: Level,
    len: usize,
    capacity: usize,
    /// `[slices, capacity, head_dim]` and `[slices, capacity, value_dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// One scaled query and its scores, `[slices, head_dim + capacity]`.
    buffer: Vec<f32>,
    /// `[slices, 1 + value_dim]`: the squared norm so far (`infsa`) and a sum of values.
    sums: Vec<f64>,
    /// Heads of queries to one of keys and values.
    sharing: usize,
    /// Of every slice, once there is a token (`ssa`).
    clusters: Vec<Past>,
    /// The same of the structure `features`.
    features: Vec<Sums>,
    /// The same of causal segments.
    routed: Vec<Routed>,
}

impl Cache {
    /// An empty cache with room for `capacity` tokens. It grows when more come, to at least twice its size; the tokens
    /// kept are then copied once. For `ssa` the capacity is the length that the clusters are made for, as that of a call is, and
    /// there can be no more tokens.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a mechanism that has no causal form, or an empty axis; [`crate::Error::OutOfRange`]
    /// for an invalid field of the configuration.
    pub fn new(
        mechanism: &Mechanism,
        batch: usize,
        heads: usize,
        head_dim: usize,
        value_dim: usize,
        capacity: usize,
    ) -> Result<Self> {
        let token = Shape { batch, heads, seq_q: 1, seq_kv: 1, head_dim, value_dim };
        if let Mechanism::Composed(m) = mechanism
            && routed::clusters(m).is_none()
        {
            features::structure(m)?;
        }
        if let Mechanism::Ssa(m) = mechanism {
            mechanism.check(&Shape { seq_q: capacity, seq_kv: capacity, ..token }, true)?;
            if m.causal_clusters.block() > 1 {
                let (what, why) = ("decoding with causal_clusters = block", "tokens see later ones; use prefix");
                return Err(Error::Unsupported { mechanism: "ssa", what, why });
            }
        } else {
            mechanism.check(&token, true)?;
        }
        Shape { seq_kv: capacity, ..token }.check()?;
        if let Mechanism::LaplacianExact(_) = mechanism {
            let (what, why) = ("decoding token by token", "call it on the sequence so far, and take the last row");
            return Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
        }
        if matches!(mechanism, Mechanism::Fna(m) if m.norm_exponent != 0.0) {
            let why =
                "the degrees of all past rows would be needed; set norm_exponent to 0, or attend to the whole sequence";
            return Err(Error::Unsupported {
                mechanism: mechanism.id(),
                what: "decoding with norm_exponent != 0",
                why,
            });
        }
        let mut cache = Self {
            mechanism: mechanism.clone(),
            token,
            level: Level::selected()?,
            len: 0,
            capacity: 0,
            keys: Vec::new(),
            values: Vec::new(),
            buffer: Vec::new(),
            sums: vec![0.0; token.slices() * (1 + value_dim)],
            sharing: 1,
            clusters: Vec::new(),
            features: Vec::new(),
            routed: Vec::new(),
        };
        match mechanism {
            Mechanism::Ssa(_) => cache.capacity = capacity,
            Mechanism::Uniform(_) | Mechanism::Composed(_) => cache.grow(0),
            _ => cache.grow(capacity.max(1)),
        }
        Ok(cache)
    }

    /// The same cache, still empty, with fewer heads of keys and values, each shared by as many neighbouring heads of queries:
    /// steps then take `k` and `v` of `kv_heads`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless `kv_heads` divides the heads.
    pub fn with_kv_heads(mut self, kv_heads: usize) -> Result<Self> {
        let heads = self.token.heads;
        let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        if !divides || (self.mechanism.tied() && kv_heads != heads) {
            let expected = "a divisor of the number of heads, and that number where the mechanism is tied";
            return Err(Error::OutOfRange { field: "kv_heads", got: kv_heads.to_string(), expected });
        }
        self.clear();
        self.sharing = heads / kv_heads;
        if self.keeps_rows() {
            self.grow(self.capacity);
        }
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

    /// Forgets all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
        self.sums.fill(0.0);
        self.clusters.clear();
        self.features.clear();
        self.routed.clear();
    }

    /// The cache of the sequences at `rows` of the batch, which may repeat. Each goes on with the draws of the place where it began.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn select(&self, rows: &[usize]) -> Self {
        let chosen = |x: &[f32]| chosen(x, self.token.batch, rows);
        let heads = self.token.heads;
        let clusters = rows.iter().flat_map(|row| self.clusters.chunks(heads).nth(*row).unwrap_or_default().to_vec());
        let routed = rows.iter().flat_map(|row| self.routed.chunks(heads).nth(*row).unwrap_or_default().to_vec());
        let features = rows.iter().flat_map(|row| self.features.chunks(heads).nth(*row).unwrap_or_default().to_vec());
        Self {
            mechanism: self.mechanism.clone(),
            token: Shape { batch: rows.len(), ..self.token },
            keys: chosen(&self.keys),
            values: chosen(&self.values),
            buffer: chosen(&self.buffer),
            sums: self::chosen(&self.sums, self.token.batch, rows),
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
    /// [`crate::Error::Length`], [`crate::Error::Tensor`] for tensors that do not fit; the cache is then as before.
    /// [`crate::Error::Overflow`] where rows leave f32 although no token does.
    pub fn step(&mut self, inputs: &Inputs<'_, f32>, out: &mut [f32]) -> Result<()> {
        let new = self.take("step", inputs)?;
        let expected = new * self.token.out_len();
        check::length("step", "out", out.len(), expected, "expected batch * heads * n * value_dim")?;
        self.keep(inputs, new);
        self.attend(inputs, new, out);
        self.len += new;
        let tokens = [inputs.q, inputs.k.unwrap_or_default(), inputs.v, &self.keys, &self.values];
        range::check_finite(self.level, "out", out, || tokens.iter().all(|x| x.iter().all(|x| x.is_finite())))
    }

    /// As [`Cache::step`], of tokens whose rows are known: those of a prompt, which one causal call gives faster than steps. For
    /// `infsa`, whose norm is a sum over all rows, no faster than a step.
    ///
    /// # Errors
    /// As [`Cache::step`].
    pub fn append(&mut self, inputs: &Inputs<'_, f32>) -> Result<()> {
        let new = self.take("append", inputs)?;
        self.keep(inputs, new);
        match self.mechanism {
            Mechanism::Softmax(_) | Mechanism::Fna(_) => {}
            Mechanism::Ssa(_) => self.attend_clusters(inputs, new, None),
            Mechanism::Composed(_) => self.attend_composed(inputs, new, None),
            _ => self.attend(inputs, new, &mut vec![0.0; new * self.token.out_len()]),
        }
        self.len += new;
        Ok(())
    }

    /// The number of new tokens, which are checked.
    fn take(&self, op: &'static str, inputs: &Inputs<'_, f32>) -> Result<usize> {
        let Shape { head_dim, value_dim, .. } = self.token;
        let one = self.token.q_len();
        let new = inputs.q.len() / one;
        let remedy = "expected batch * heads * n * head_dim for n >= 1 new tokens";
        check::length(op, "q", inputs.q.len(), new.max(1) * one, remedy)?;
        let kv_slices = self.kv_slices();
        check::tensors(
            op,
            &self.mechanism,
            inputs,
            [one, kv_slices * head_dim, kv_slices * value_dim].map(|x| new * x),
        )?;
        check::extras(op, &self.mechanism, &Shape { seq_q: new, seq_kv: new, ..self.token }, &inputs.extras)?;
        if inputs.extras.dropout.is_some() {
            let (what, why) = ("dropout in a cache", "tokens are decoded with the whole operator");
            return Err(Error::Unsupported { mechanism: self.mechanism.id(), what, why });
        }
        if matches!(self.mechanism, Mechanism::Ssa(_)) && self.len + new > self.capacity {
            let (got, expected) =
                ((self.len + new).to_string(), "at most the capacity, for which the clusters are made");
            return Err(Error::OutOfRange { field: "tokens", got, expected });
        }
        if let Some((decoder, _)) = self.decoder(inputs) {
            decoder.check(inputs.q, inputs.k.unwrap_or(inputs.q))?;
        }
        Ok(new)
    }

    /// Heads of keys and values of the whole batch.
    fn kv_slices(&self) -> usize {
        self.token.slices() / self.sharing
    }

    /// Keeps keys and values where rows are made from all of them.
    fn keep(&mut self, inputs: &Inputs<'_, f32>, new: usize) {
        if !self.keeps_rows() {
            return;
        }
        if self.len + new > self.capacity {
            self.grow((self.len + new).max(2 * self.capacity));
        }
        append(&mut self.keys, inputs.k.unwrap_or(inputs.q), self.token.head_dim, self.len, self.capacity, new);
        append(&mut self.values, inputs.v, self.token.value_dim, self.len, self.capacity, new);
    }

    fn attend_composed(&mut self, inputs: &Inputs<'_, f32>, new: usize, out: Option<&mut [f32]>) {
        let clusters = if let Mechanism::Composed(m) = &self.mechanism { routed::clusters(m) } else { None };
        match clusters {
            Some(m) => self.attend_routed(&m, inputs, new, out),
            None => self.attend_features(inputs, new, out),
        }
    }

    /// Takes `new` tokens of every slice into what is kept of it, one after the other, and writes their rows where they are asked for:
    /// `take` is given a slice's past, its number and the token's, and, for a row, room for a sum of values, of which it returns the
    /// factor.
    fn go_on<P: Send>(
        (pasts, sums): (&mut [P], &mut [f64]),
        new: usize,
        out: Option<&mut [f32]>,
        take: impl Fn(&mut P, [usize; 2], Option<&mut [f64]>) -> f64 + Sync,
    ) {
        let dim = sums.len() / pasts.len() - 1;
        let mut rows: Vec<Option<&mut [f32]>> = match out {
            Some(out) => out.chunks_exact_mut(new * dim).map(Some).collect(),
            None => pasts.iter().map(|_| None).collect(),
        };
        let slices = pasts.par_iter_mut().zip(&mut rows).zip(sums.par_chunks_exact_mut(1 + dim)).enumerate();
        slices.for_each(|(slice, ((past, out), sums))| {
            for n in 0..new {
                let factor = take(past, [slice, n], out.is_some().then_some(&mut sums[1..]));
                if let Some(out) = out {
                    let row = out[n * dim..].iter_mut().zip(&sums[1..]);
                    row.for_each(|(out, sum)| *out = (factor * sum) as f32);
                }
            }
        });
    }

    /// Whether all keys and values are kept as they come, rather than sums alone, or by cluster.
    fn keeps_rows(&self) -> bool {
        !matches!(self.mechanism, Mechanism::Uniform(_) | Mechanism::Ssa(_) | Mechanism::Composed(_))
    }

    fn attend(&mut self, inputs: &Inputs<'_, f32>, new: usize, out: &mut [f32]) {
        match self.mechanism {
            Mechanism::Ssa(_) => return self.attend_clusters(inputs, new, Some(out)),
            Mechanism::Composed(_) => return self.attend_composed(inputs, new, Some(out)),
            _ => {}
        }
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let Self { mechanism, level, len, capacity, keys, values, buffer, sums, sharing, .. } = self;
        let sharing = *sharing;
        let (mechanism, keys, values) = (&*mechanism, &*keys, &*values);
        let (level, len, capacity) = (*level, *len, *capacity);
        let rows = out.par_chunks_exact_mut(new * value_dim);
        let state = sums.par_chunks_exact_mut(1 + value_dim).zip(buffer.par_chunks_exact_mut(head_dim + capacity));
        rows.zip(state).enumerate().for_each(|(slice, (out, (sums, buffer)))| {
            let (scaled, scores) = buffer.split_at_mut(head_dim);
            let past = |n: usize, x, dim| part(x, slice / sharing * capacity * dim, (len + n + 1) * dim);
            for (n, out) in out.chunks_exact_mut(value_dim).enumerate() {
                let (at, kv) = (slice * new + n, slice / sharing * new + n);
                let (q, v) = (part(inputs.q, at * head_dim, head_dim), part(inputs.v, kv * value_dim, value_dim));
                let (norm, sum) = sums.split_at_mut(1);
                let factor = match mechanism {
                    Mechanism::Uniform(_) => {
                        sum.iter_mut().zip(v).for_each(|(sum, v)| *sum += f64::from(*v));
                        1.0 / (len + n + 1) as f64
                    }
                    Mechanism::Softmax(m) => {
                        let (k, v) = (past(n, keys, head_dim), past(n, values, value_dim));
                        softmax(level, m, q, k, v, &mut scores[..len + n + 1], sum)
                    }
                    Mechanism::Fna(m) => {
                        let (k, v) = (past(n, keys, head_dim), past(n, values, value_dim));
                        let decoder = decoder(m, &inputs.extras, head_dim, heads, slice % heads);
                        decoder.step(level, q, k, v, &mut scores[..len + n + 1], sum)
                    }
                    Mechanism::Infsa(m) => {
                        let (k, v) = (past(n, keys, head_dim), past(n, values, value_dim));
                        let gamma =
                            inputs.extras.get(Parameter::Gamma).map_or(m.gamma, |gamma| gamma[slice % heads].into());
                        gamma
                            * infsa(
                                level,
                                m,
                                scale_down(q, scaled),
                                k,
                                v,
                                &mut scores[..len + n + 1],
                                &mut norm[0],
                                sum,
                            )
                    }
                    _ => unreachable!("refused by `Cache::new`"),
                };
                out.iter_mut().zip(&*sum).for_each(|(out, sum)| *out = (factor * sum) as f32);
            }
        });
    }

    fn grow(&mut self, capacity: usize) {
        let Shape { head_dim, value_dim, .. } = self.token;
        if self.keeps_rows() {
            let kv_slices = self.kv_slices();
            for (kept, dim) in [(&mut self.keys, head_dim), (&mut self.values, value_dim)] {
                let mut buffer = vec![0.0; kv_slices * capacity * dim];
                for slice in 0..kv_slices {
                    let past = part(kept, slice * self.capacity * dim, self.len * dim);
                    buffer[slice * capacity * dim..][..past.len()].copy_from_slice(past);
                }
                *kept = buffer;
            }
        }
        self.buffer = vec![0.0; self.token.slices() * (head_dim + capacity)];
        self.capacity = capacity;
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

/// Puts `new` rows of every slice behind the `len` that are kept.
fn append(kept: &mut [f32], x: &[f32], dim: usize, len: usize, capacity: usize, new: usize) {
    for (kept, x) in kept.chunks_exact_mut(capacity * dim).zip(x.chunks_exact(new * dim)) {
        kept[len * dim..(len + new) * dim].copy_from_slice(x);
    }
}
