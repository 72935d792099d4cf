//! One head of `linear-infsa`: its tensors, what is saved of it, and the passes that forward and backward share.
//!
//! Scaling. A step forms `z_j = scale (y.k_j + norm_bias r |k_j|)` from `y = sum u_i q_i` and `r = sum u_i |q_i|`. Here
//! `y` and `r` are first divided by a power of two `down`, so that they are of order one, and the scores stay in units
//! of `gain = scale down`: `s_j = gain w_j` with `w_j = z'_j gate(gain z'_j)`. The weights `u_j = s_j / (sum |s| + eps)`
//! are then `w_j / (sum |w| + eps / gain)`, and no product of a query and a key norm is ever formed.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use super::tiles::{PerToken, runs};
use crate::{
    Error, Parameter, Result, Shape,
    call::Call,
    call::magnitude,
    mechanism::{Activation, LinearInfsa, PowerOperator},
    range,
    rescale::is_comfortable,
    score::gate,
    simd::{Level, rows},
};

/// One head of one sequence.
pub(super) struct Head<'a> {
    pub m: &'a LinearInfsa,
    pub shape: Shape,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    key: Option<&'a [bool]>,
    query: Option<&'a [bool]>,
    pub gamma: f32,
    pub scale: f64,
    /// `eps` of the start weights and of the steps, in units of the queries and of the scores.
    pub eps: [f64; 2],
    pub bias: f64,
    pub level: Level,
    /// Whether a factor on a row left f32: then the row is to be looked at.
    overflowed: AtomicBool,
}

impl<'a> Head<'a> {
    pub fn of(call: &Call<'a>, m: &'a LinearInfsa, slice: usize) -> Self {
        let shape = call.shape;
        let Shape { heads, seq_q, seq_kv, head_dim, value_dim, .. } = shape;
        let (batch, head) = (slice / heads, slice % heads);
        let scale = m.scale.unwrap_or((head_dim as f64).powf(-0.5));
        let [q_unit, k_unit] = call.units(slice).map(|unit| 2f64.powi(unit));
        // Scores of divided vectors are in another unit, unless the activation has one of its own.
        let (scale, eps) = match m.activation {
            Activation::Gelu => (scale * q_unit * k_unit, [m.eps / q_unit, m.eps]),
            Activation::Relu | Activation::Abs => (scale, [m.eps / q_unit, m.eps / q_unit / k_unit]),
        };
        Self {
            m,
            shape,
            q: part(call.q.dense(), slice, seq_q * head_dim),
            k: part(call.k.dense(), slice, seq_kv * head_dim),
            v: part(call.v.dense(), slice, seq_kv * value_dim),
            key: call.mask.key.map(|keep| part(keep, batch, seq_kv)),
            query: call.mask.query.map(|keep| part(keep, batch, seq_q)),
            gamma: call.extras.get(Parameter::Gamma).map_or(m.gamma as f32, |gamma| gamma[head]),
            scale,
            eps,
            bias: m.norm_bias.value(head_dim),
            level: call.level,
            overflowed: AtomicBool::new(false),
        }
    }

    /// `x`, a factor on a row of a gradient.
    pub fn factor(&self, x: f32) -> f32 {
        if !x.is_finite() {
            self.overflowed.store(true, Ordering::Relaxed);
        }
        x
    }

    /// Whether a factor has been no number.
    pub fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed)
    }

    pub fn keeps_key(&self, j: usize) -> bool {
        self.key.is_none_or(|keep| keep[j])
    }

    pub fn keeps_query(&self, i: usize) -> bool {
        self.query.is_none_or(|keep| keep[i])
    }

    /// Whether token `j` carries weight after a step. Where a further step may follow, tokens are queries as well.
    pub fn carries_weight(&self, j: usize) -> bool {
        self.keeps_key(j) && (self.m.iterations == 1 || self.keeps_query(j))
    }

    pub fn query_mask(&self) -> Option<&'a [bool]> {
        self.query
    }

    pub fn q_rows(&self, tokens: Range<usize>) -> &'a [f32] {
        token_rows(self.q, self.shape.head_dim, tokens)
    }

    pub fn k_rows(&self, tokens: Range<usize>) -> &'a [f32] {
        token_rows(self.k, self.shape.head_dim, tokens)
    }

    pub fn v_rows(&self, tokens: Range<usize>) -> &'a [f32] {
        token_rows(self.v, self.shape.value_dim, tokens)
    }

    /// Channels of the widest row: what blocks are cut by.
    pub fn widest(&self) -> usize {
        self.shape.head_dim.max(self.shape.value_dim)
    }

    /// Norms of the kept queries of `block`, 0 for the others.
    pub fn query_norms(&self, block: Range<usize>, norms: &mut [f32]) {
        norms.fill(0.0);
        for run in runs(block.clone(), |i| self.keeps_query(i)) {
            let q = self.q_rows(shift(&run, block.start));
            rows::norms(self.level, q, self.shape.head_dim, &mut norms[run]);
        }
    }

    /// The scores of `step` on `block`: values, and on demand slopes. 0 at masked keys.
    pub fn scores(&self, step: &Step<'_>, block: Range<usize>, scores: &mut Scores, want_slopes: bool) {
        let gain = step.gain(self.scale);
        let len = block.len();
        scores.values[..len].fill(0.0);
        scores.slopes[..len].fill(0.0);
        for run in runs(block.clone(), |j| self.keeps_key(j)) {
            let k = self.k_rows(shift(&run, block.start));
            let values = &mut scores.values[run.clone()];
            rows::dots(self.level, k, step.y, values);
            if self.bias != 0.0 {
                let norms = &mut scores.norms[run.clone()];
                rows::norms(self.level, k, self.shape.head_dim, norms);
                values.iter_mut().zip(norms).for_each(|(z, norm)| *z += step.bias * *norm);
            }
            if want_slopes {
                gate::slopes(self.level, self.m.activation, gain, values, &mut scores.slopes[run]);
            }
            gate::activate(self.level, self.m.activation, gain, values);
        }
    }
}

/// The scores of one block of tokens.
pub(super) struct Scores {
    /// `w_j`, the score over the gain.
    pub values: PerToken,
    /// `phi'` at the logit.
    pub slopes: PerToken,
    /// `|k_j|`; filled where there is a norm bias.
    pub norms: PerToken,
}

impl Scores {
    pub const NEW: Self = Self { values: [0.0; _], slopes: [0.0; _], norms: [0.0; _] };
}

/// One factored step, as saved.
pub(super) struct Step<'s> {
    /// `sum u_i q_i / down`.
    pub y: &'s [f32],
    /// `norm_bias sum u_i |q_i| / down`.
    pub bias: f32,
    /// `1 / (sum |w| + eps / gain)`.
    pub inverse: f32,
    /// A power of two.
    pub down: f32,
}

impl<'s> Step<'s> {
    /// f32 saved for one step.
    pub const fn len(head_dim: usize) -> usize {
        head_dim + 3
    }

    pub fn load(saved: &'s [f32]) -> Self {
        let (y, rest) = saved.split_at(saved.len() - 3);
        Self { y, bias: rest[0], inverse: rest[1], down: rest[2] }
    }

    /// What the logits `z'` are multiplied by.
    pub fn gain(&self, scale: f64) -> f32 {
        finite(scale * f64::from(self.down))
    }
}

/// f32 at the end of what one head saves, whatever the operator: the exponents that its queries and its keys were divided
/// by.
pub(super) const UNITS: usize = 2;

/// Below this, one over the sum of the queries' lengths, in units of the largest, leaves nothing of their gradients.
const LEAST_INVERSE: f32 = 1e-20;

/// Below this, one over the weights of a step leaves less than the digits of f32 to what it is multiplied by.
const LEAST_STEP: f32 = 1e-29;

/// Whether pooled values are numbers.
pub(super) fn check_pooled(call: &Call<'_>, stats: &[f32]) -> Result<()> {
    let slices = stats.chunks_exact(stats.len() / call.shape.slices());
    range::check_results(call, None, slices.map(|stats| ("out", &stats[1..1 + call.shape.value_dim])))
}

/// Whether `eps` leaves something of the gradients of tokens far smaller.
pub(super) fn check_drowned(call: &Call<'_>, m: &LinearInfsa, stats: &[f32]) -> Result<()> {
    let shape = &call.shape;
    for (slice, stats) in stats.chunks_exact(stats.len() / shape.slices()).enumerate() {
        let (head, steps) = stats.split_at(1 + shape.value_dim);
        let lost = |t: usize| match m.operator {
            PowerOperator::Factored => {
                let step = Step::load(part(steps, t, Step::len(shape.head_dim)));
                step.inverse < LEAST_STEP && step.y.iter().any(|&y| y != 0.0)
            }
            PowerOperator::Exact => steps[t] < LEAST_STEP,
        };
        if head[0] >= LEAST_INVERSE && !(0..m.iterations).any(lost) {
            continue;
        }
        let [q, k] = magnitude::largest(call, slice).map(f64::from);
        if q * k > 0.0 && (q * k).is_finite() {
            let (tensor, largest, other) = if q <= k { ("q", q, k) } else { ("k", k, q) };
            let limit = m.eps * f64::from(LEAST_INVERSE) / other.min(1.0);
            let remedy = "no gradient is left of it beside `eps`: scale the tokens, or set a smaller `eps`";
            return Err(Error::Range { tensor, largest, bound: "from", limit, remedy });
        }
    }
    Ok(())
}

/// Saves the exponents that queries and keys were divided by.
pub(super) fn save_units(saved: &mut [f32], units: [i32; 2]) {
    let at = saved.len() - UNITS;
    saved[at..].copy_from_slice(&units.map(|unit| unit as f32));
}

/// The exponents that queries and keys were divided by.
pub(super) fn saved_units(saved: &[f32]) -> [i32; 2] {
    let at = saved.len() - UNITS;
    [saved[at] as i32, saved[at + 1] as i32]
}

/// What one head leaves for the backward pass of the factored operator.
pub(super) struct Stats<'s> {
    /// `1 / (sum |q_i| + eps)`.
    pub inverse_energy: f32,
    /// `sum a_j v_j`.
    pub pooled: &'s [f32],
    steps: &'s [f32],
}

impl<'s> Stats<'s> {
    pub const fn len(shape: &Shape, iterations: usize) -> usize {
        1 + shape.value_dim + iterations * Step::len(shape.head_dim) + UNITS
    }

    /// Whether the sums of the factored passes say that no magnitude has left f32 or comes near.
    pub fn is_comfortable(&self, m: &LinearInfsa) -> bool {
        let dim = self.steps.len() / m.iterations - 3;
        let in_range = |x: f32| x > 0.0 && is_comfortable(x.log2() as i32);
        let steps = || (0..m.iterations).map(|t| self.step(t, dim));
        in_range(self.inverse_energy) && steps().all(|step| in_range(step.down) && in_range(step.inverse))
    }

    pub fn load(saved: &'s [f32], shape: &Shape) -> Self {
        let (head, steps) = saved[..saved.len() - UNITS].split_at(1 + shape.value_dim);
        Self { inverse_energy: head[0], pooled: &head[1..], steps }
    }

    pub fn step(&self, t: usize, head_dim: usize) -> Step<'s> {
        Step::load(part(self.steps, t, Step::len(head_dim)))
    }
}

/// Part `n` of `x` cut into parts of `len`.
pub(super) fn part<T>(x: &[T], n: usize, len: usize) -> &[T] {
    &x[n * len..(n + 1) * len]
}

pub(super) fn token_rows(x: &[f32], dim: usize, tokens: Range<usize>) -> &[f32] {
    &x[tokens.start * dim..tokens.end * dim]
}

pub(super) fn token_rows_mut(x: &mut [f32], dim: usize, tokens: Range<usize>) -> &mut [f32] {
    &mut x[tokens.start * dim..tokens.end * dim]
}

pub(super) fn shift(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// `1 / x`, or 0 for `x = 0`: sums that are divided by vanish only together with what is divided.
pub(super) fn inverse(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// `x` as f32, the largest finite number in place of an infinity: 0 times it must stay 0.
pub(super) fn finite(x: f64) -> f32 {
    (x as f32).clamp(-f32::MAX, f32::MAX)
}

/// `x . y`, in f64.
pub(super) fn inner(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
