//! Decoding: causal attention of new tokens to all that came before, without doing the past again.

use rayon::prelude::*;

use crate::{
    Error, Extras, Inputs, Mask, Mechanism, Parameter, Result, Shape, check, mechanism,
    score::gate,
    simd::{Level, rows},
    structure::dense::Decoder,
};

/// The past of a causal `softmax`, `fna`, `infsa` or `uniform`, whatever the configuration says of `causal`. Feeding a
/// sequence in steps of any length gives what one causal call on the whole of it gives.
///
/// Kept per head: for `softmax` and `fna` all keys and values; for `infsa` those and the squared prefix norm, one f64,
/// whose range holds the square of any product of two f32; for `uniform` only the sum of the values.
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
    room: Vec<f32>,
    /// `[slices, 1 + value_dim]`: the squared norm so far (`infsa`) and a sum of values.
    sums: Vec<f64>,
}

impl Cache {
    /// An empty cache with room for `capacity` tokens. It grows when more come, to at least twice its size; the tokens
    /// kept are then copied once.
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
        mechanism.check(&token, true)?;
        if let Mechanism::Ssa(_) = mechanism {
            let why = "its labels follow the whole sequence; call it on the sequence so far";
            return Err(Error::Unsupported { mechanism: "ssa", what: "decoding token by token", why });
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
            room: Vec::new(),
            sums: vec![0.0; token.slices() * (1 + value_dim)],
        };
        cache.grow(if cache.keeps_tokens() { capacity.max(1) } else { 0 });
        Ok(cache)
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
    }

    /// Takes `n >= 1` new tokens, `q, k [batch, heads, n, head_dim]`, `v [batch, heads, n, value_dim]` (no `k` if tied),
    /// and writes their rows `out [batch, heads, n, value_dim]`. `n` follows from the length of `q`.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Tensor`] for tensors that do not fit; the cache is then as before.
    pub fn step(&mut self, inputs: &Inputs<'_, f32>, out: &mut [f32]) -> Result<()> {
        const OP: &str = "step";
        let one = self.token.q_len();
        let new = inputs.q.len() / one;
        let remedy = "expected batch * heads * n * head_dim for n >= 1 new tokens";
        check::length(OP, "q", inputs.q.len(), new.max(1) * one, remedy)?;
        let shape = Shape { seq_q: new, seq_kv: new, ..self.token };
        check::inputs(OP, &self.mechanism, &shape, inputs, &Mask::NONE)?;
        if inputs.extras.dropout.is_some() {
            let (what, why) = ("dropout in a cache", "tokens are decoded with the whole operator");
            return Err(Error::Unsupported { mechanism: self.mechanism.id(), what, why });
        }
        check::length(OP, "out", out.len(), shape.out_len(), "expected batch * heads * n * value_dim")?;
        if self.keeps_tokens() {
            if self.len + new > self.capacity {
                self.grow((self.len + new).max(2 * self.capacity));
            }
            append(&mut self.keys, inputs.k.unwrap_or(inputs.q), self.token.head_dim, self.len, self.capacity, new);
            append(&mut self.values, inputs.v, self.token.value_dim, self.len, self.capacity, new);
        }
        self.attend(inputs, new, out);
        self.len += new;
        Ok(())
    }

    /// Whether keys and values are kept, rather than sums alone.
    fn keeps_tokens(&self) -> bool {
        !matches!(self.mechanism, Mechanism::Uniform(_))
    }

    fn attend(&mut self, inputs: &Inputs<'_, f32>, new: usize, out: &mut [f32]) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let Self { mechanism, level, len, capacity, keys, values, room, sums, .. } = self;
        let (mechanism, keys, values) = (&*mechanism, &*keys, &*values);
        let (level, len, capacity) = (*level, *len, *capacity);
        let rows = out.par_chunks_exact_mut(new * value_dim);
        let state = sums.par_chunks_exact_mut(1 + value_dim).zip(room.par_chunks_exact_mut(head_dim + capacity));
        rows.zip(state).enumerate().for_each(|(slice, (out, (sums, room)))| {
            let (scaled, scores) = room.split_at_mut(head_dim);
            let past = |n: usize, x, dim| part(x, slice * capacity * dim, (len + n + 1) * dim);
            for (n, out) in out.chunks_exact_mut(value_dim).enumerate() {
                let at = slice * new + n;
                let (q, v) = (part(inputs.q, at * head_dim, head_dim), part(inputs.v, at * value_dim, value_dim));
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
        let slices = self.token.slices();
        if self.keeps_tokens() {
            for (kept, dim) in [(&mut self.keys, head_dim), (&mut self.values, value_dim)] {
                let mut room = vec![0.0; slices * capacity * dim];
                for slice in 0..slices {
                    let past = part(kept, slice * self.capacity * dim, self.len * dim);
                    room[slice * capacity * dim..][..past.len()].copy_from_slice(past);
                }
                *kept = room;
            }
        }
        self.room = vec![0.0; slices * (head_dim + capacity)];
        self.capacity = capacity;
    }
}

/// The kernel of head `h`, as the configuration or the call has it.
fn decoder<'a>(m: &'a mechanism::Fna, extras: &Extras<'_>, head_dim: usize, heads: usize, h: usize) -> Decoder<'a> {
    let given = |parameter: Parameter| extras.get(parameter).map(|values| f64::from(values[h]));
    let resolved = m.resolve(head_dim, heads);
    let power = resolved.intrinsic_dim + given(Parameter::Alpha).unwrap_or(m.alpha);
    Decoder { m, kappa: given(Parameter::Kappa).unwrap_or(resolved.kappa), power }
}

fn part(x: &[f32], start: usize, len: usize) -> &[f32] {
    &x[start..start + len]
}

/// Puts `new` rows of every slice behind the `len` that are kept.
fn append(kept: &mut [f32], x: &[f32], dim: usize, len: usize, capacity: usize, new: usize) {
    for (kept, x) in kept.chunks_exact_mut(capacity * dim).zip(x.chunks_exact(new * dim)) {
        kept[len * dim..(len + new) * dim].copy_from_slice(x);
    }
}

/// `sum = sum_j exp(z_j - max z) v_j` over all keys; returns what it has to be multiplied by.
fn softmax(
    level: Level,
    m: &mechanism::Softmax,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    z: &mut [f32],
    sum: &mut [f64],
) -> f64 {
    rows::dots(level, k, q, z);
    let scale = m.scale.unwrap_or((q.len() as f64).powf(-0.5)) as f32;
    let most = z.iter().fold(f32::NEG_INFINITY, |most, z| most.max(*z));
    z.iter_mut().for_each(|z| *z = (scale * (*z - most)).exp());
    sum.fill(0.0);
    rows::accumulate(level, z, v, 1.0, sum);
    1.0 / z.iter().map(|z| f64::from(*z)).sum::<f64>()
}

/// `q` divided by a power of two, which makes its largest entry one, and that power.
fn scale_down<'s>(q: &[f32], scaled: &'s mut [f32]) -> (&'s [f32], f64) {
    let down = rows::power_of_two(q.iter().fold(0.0, |most: f32, x| most.max(x.abs())));
    scaled.iter_mut().zip(q).for_each(|(s, q)| *s = q / down);
    (scaled, down.into())
}

/// `sum = sum_j w_j v_j`, `w` the affinities of `down q` over a power of two; adds their energy to `norm`, the squared norm
/// of all rows so far, and returns what the sum has to be multiplied by, decay aside.
#[allow(clippy::too_many_arguments)] // one query, the past, and what is carried along
fn infsa(
    level: Level,
    m: &mechanism::Infsa,
    (q, down): (&[f32], f64),
    k: &[f32],
    v: &[f32],
    w: &mut [f32],
    norm: &mut f64,
    sum: &mut [f64],
) -> f64 {
    let gain = m.scale.unwrap_or((q.len() as f64).powf(-0.5)) * down;
    rows::dots(level, k, q, w);
    gate::activate(level, m.activation, gain as f32, w);
    let unit = gain * rows::normalise(level, w).factor;
    *norm += unit * unit * w.iter().map(|w| f64::from(w * w)).sum::<f64>();
    sum.fill(0.0);
    rows::accumulate(level, w, v, 1.0, sum);
    let over = norm.sqrt() + m.eps;
    if over > 0.0 { unit / over } else { 0.0 }
}
