//! `linear-infsa` with the exact operator: true power steps with `phi(scale Q K^T)^T`, O(N^2 d) time and O(N) memory. No
//! matrix is stored: every pass streams all tokens of one side past each token of the other.
//!
//! As in the factored form, queries and keys are divided by powers of two of their largest norms, scores stay in units
//! of the `gain` that this leaves, and `eps / gain` stands for `eps`.

use super::{
    backward::HeadGradients,
    linear::{Head, Scores, UNITS, finite, inner, inverse, part, shift, token_rows, token_rows_mut},
    tiles::{Buffers, blocks, parallel, partial_len, runs, sum_tiles},
};
use crate::{
    Shape,
    score::gate,
    simd::rows::{self, Store},
};

/// Tokens that one task streams the others past.
const OWN: usize = 32;

/// f32 that [`forward`] saves of one head: the inverse energy, the pooled value, for every step `1 / (sum |w| + eps /
/// gain)`, the start weights `[seq_q]`, and for every step `w [seq_kv]`: the scores over the gain, 0 at masked keys.
pub(super) const fn stats_len(shape: &Shape, iterations: usize) -> usize {
    1 + shape.value_dim + iterations + shape.seq_q + iterations * shape.seq_kv + UNITS
}

/// f64 of scratch of one head.
pub(super) fn wide_len(shape: &Shape) -> usize {
    (longest(shape).div_ceil(OWN) * own_len(shape.head_dim)).max(partial_len(longest(shape), shape.value_dim))
}

/// f32 of scratch of one head, see [`Room`].
pub(super) const fn narrow_len(shape: &Shape) -> usize {
    shape.seq_q + 2 * shape.seq_kv + 2 * longest(shape)
}

const fn longest(shape: &Shape) -> usize {
    if shape.seq_q > shape.seq_kv { shape.seq_q } else { shape.seq_kv }
}

/// f64 of one task: a row's gradient, that of its norm, and the scaled row as f32.
const fn own_len(dim: usize) -> usize {
    1 + dim + dim.div_ceil(2)
}

/// Working memory of one head.
struct Room<'a> {
    norms_q: &'a mut [f32],
    norms_k: &'a mut [f32],
    /// Gradient of the scores, `[seq_kv]`.
    ds: &'a mut [f32],
    /// Weights that go into a step, and their gradient.
    u: &'a mut [f32],
    du: &'a mut [f32],
}

impl<'a> Room<'a> {
    fn cut(memory: &'a mut [f32], shape: &Shape) -> Self {
        let (norms_q, memory) = memory.split_at_mut(shape.seq_q);
        let (norms_k, memory) = memory.split_at_mut(shape.seq_kv);
        let (ds, memory) = memory.split_at_mut(shape.seq_kv);
        let (u, du) = memory.split_at_mut(longest(shape));
        Self { norms_q, norms_k, ds, u, du }
    }
}

/// Parts of what is saved behind the inverse energy and the pooled value.
fn saved_parts<'s>(stats: &'s [f32], head: &Head<'_>) -> (&'s [f32], &'s [f32], &'s [f32]) {
    let (inverses, rest) = stats[1 + head.shape.value_dim..].split_at(head.m.iterations);
    let (alpha, scores) = rest.split_at(head.shape.seq_q);
    (inverses, alpha, scores)
}

/// The tokens of one side, with their weights.
#[derive(Clone, Copy)]
struct Side<'a> {
    x: &'a [f32],
    norms: &'a [f32],
    weights: &'a [f32],
    queries: bool,
    /// A power of two of the order of the largest norm.
    down: f32,
}

impl<'a> Side<'a> {
    fn row(&self, token: usize) -> &'a [f32] {
        part(self.x, token, self.x.len() / self.norms.len())
    }
}

/// Both sides' norms and scales.
struct Pair<'a> {
    head: &'a Head<'a>,
    q: Side<'a>,
    k: Side<'a>,
    gain: f64,
}

impl<'a> Pair<'a> {
    fn new(head: &'a Head<'a>, norms_q: &'a mut [f32], norms_k: &'a mut [f32]) -> Self {
        let dim = head.shape.head_dim;
        norms_q.fill(0.0);
        norms_k.fill(0.0);
        for run in runs(0..norms_q.len(), |i| head.keeps_query(i)) {
            rows::norms(head.level, head.q_rows(run.clone()), dim, &mut norms_q[run]);
        }
        for run in runs(0..norms_k.len(), |j| head.keeps_key(j)) {
            rows::norms(head.level, head.k_rows(run.clone()), dim, &mut norms_k[run]);
        }
        let side = |x, norms: &'a [f32], queries| {
            let down = rows::power_of_two(norms.iter().fold(0.0, |most: f32, e| most.max(*e)));
            Side { x, norms, weights: &[], queries, down }
        };
        let (q, k) = (side(head.q, norms_q, true), side(head.k, norms_k, false));
        Self { head, q, k, gain: head.scale * f64::from(q.down) * f64::from(k.down) }
    }

    /// Streams the kept tokens of `others` past `token` of `own`, `z_b` its logits: `sum w_b phi(z_b)`, and with slopes also
    /// `grad = [sum w_b phi'(z_b) |x_b|, sum w_b phi'(z_b) x_b]`. `scaled`: room for one row.
    fn stream(
        &self,
        own: &Side<'_>,
        token: usize,
        others: &Side<'_>,
        scaled: &mut [f32],
        mut grad: Option<&mut [f64]>,
    ) -> f64 {
        let head = self.head;
        let (dim, gain) = (scaled.len(), finite(self.gain));
        let down = |x: f32| x / own.down / others.down;
        scaled.iter_mut().zip(own.row(token)).for_each(|(s, x)| *s = down(*x));
        let bias = down(own.norms[token]) * head.bias as f32;
        let (mut scores, mut value) = (Scores::NEW, 0.0);
        for block in blocks(0..others.norms.len(), dim) {
            for run in runs(block.clone(), |b| self.keeps(others, b)) {
                let tokens = shift(&run, block.start);
                let (x, w) = (token_rows(others.x, dim, tokens.clone()), &others.weights[tokens.clone()]);
                let (z, slopes) = (&mut scores.values[..run.len()], &mut scores.slopes[..run.len()]);
                rows::dots(head.level, x, scaled, z);
                z.iter_mut().zip(&others.norms[tokens.clone()]).for_each(|(z, norm)| *z += bias * norm);
                if let Some(grad) = &mut grad {
                    gate::slopes(head.level, head.m.activation, gain, z, slopes);
                    slopes.iter_mut().zip(w).for_each(|(s, w)| *s *= w);
                    grad[0] += inner(slopes, &others.norms[tokens]);
                    rows::accumulate(head.level, slopes, x, 1.0, &mut grad[1..]);
                }
                gate::activate(head.level, head.m.activation, gain, z);
                let mut sum = [0.0];
                rows::dots(head.level, z, w, &mut sum);
                value += f64::from(sum[0]);
            }
        }
        value
    }

    /// `into = w (grad of the row, and of its norm along the row)`, or `+=`, `w` the weight of the token.
    fn write_gradient(&self, own: &Side<'_>, token: usize, grad: &[f64], into: &mut [f32], add: bool) {
        let factor = f64::from(own.weights[token]) / f64::from(self.q.down) / f64::from(self.k.down);
        let along = self.head.bias * grad[0] * inverse(own.norms[token].into());
        for ((into, grad), x) in into.iter_mut().zip(&grad[1..]).zip(own.row(token)) {
            let d = (factor * (grad + along * f64::from(*x))) as f32;
            *into = if add { *into + d } else { d };
        }
    }

    fn keeps(&self, side: &Side<'_>, token: usize) -> bool {
        if side.queries { self.head.keeps_query(token) } else { self.head.keeps_key(token) }
    }

    /// The weights that go into step `t`, after the last step if `t` is their number.
    fn weights(&self, stats: &[f32], t: usize, u: &mut [f32]) {
        let (inverses, alpha, scores) = saved_parts(stats, self.head);
        if t == 0 {
            return u[..alpha.len()].copy_from_slice(alpha);
        }
        let scores = part(scores, t - 1, self.head.shape.seq_kv);
        for (j, (u, w)) in u.iter_mut().zip(scores).enumerate() {
            *u = if self.head.carries_weight(j) { w * inverses[t - 1] } else { 0.0 };
        }
    }

    /// Streams `others` past every token of `own`. Writes its value to `values` (if not empty) and its gradient, times
    /// its weight, to the rows of `into` (if not empty), or adds it. A masked token has value 0 and gradient 0.
    fn sweep(
        &self,
        own: &Side<'_>,
        others: &Side<'_>,
        add: bool,
        wide: &mut [f64],
        into: &mut [f32],
        values: &mut [f32],
    ) {
        let dim = self.head.shape.head_dim;
        let buffers = Buffers { wide: (own_len(dim), wide), rows: [(dim, into), (1, values)] };
        parallel(0..own.norms.len(), OWN, buffers, &|tokens, task| {
            let [(_, into), (_, values)] = task.rows;
            let (grad, scaled) = task.wide.1.split_at_mut(1 + dim);
            let scaled = &mut bytemuck::cast_slice_mut(scaled)[..dim];
            for (n, j) in tokens.enumerate() {
                let row = into.chunks_exact_mut(dim).nth(n);
                let kept = self.keeps(own, j);
                grad.fill(0.0);
                let wanted = row.is_some().then_some(&mut *grad);
                let value = if kept { self.stream(own, j, others, scaled, wanted) } else { 0.0 };
                if let Some(at) = values.get_mut(n) {
                    *at = value as f32;
                }
                match row {
                    Some(row) if kept => self.write_gradient(own, j, grad, row, add),
                    Some(row) if !add => row.fill(0.0),
                    _ => {}
                }
            }
        });
    }
}

/// Writes what [`stats_len`] says of one head.
pub(super) fn forward(head: &Head<'_>, stats: &mut [f32], narrow: &mut [f32], wide: &mut [f64]) {
    let Shape { seq_q, seq_kv, value_dim, .. } = head.shape;
    let Room { norms_q, norms_k, u, .. } = Room::cut(narrow, &head.shape);
    let pair = Pair::new(head, norms_q, norms_k);
    let iterations = head.m.iterations;
    let over = inverse(pair.q.norms.iter().map(|&e| f64::from(e)).sum::<f64>() + head.eps[0]);
    stats[0] = finite(over);
    let alpha = 1 + value_dim + iterations;
    let scores = alpha + seq_q;
    stats[alpha..scores].iter_mut().zip(pair.q.norms).for_each(|(a, e)| *a = (f64::from(*e) * over) as f32);
    for t in 0..iterations {
        pair.weights(stats, t, u);
        let w = &mut stats[scores + t * seq_kv..scores + (t + 1) * seq_kv];
        pair.sweep(&pair.k, &Side { weights: u, ..pair.q }, false, wide, &mut [], w);
        let sum = w.iter().map(|w| f64::from(w.abs())).sum::<f64>();
        stats[1 + value_dim + t] = finite(inverse(sum + head.eps[1] / pair.gain));
    }
    pair.weights(stats, iterations, u);
    let sums = sum_tiles(seq_kv, value_dim, wide, [], &|tile, sums, []| {
        for block in blocks(tile, value_dim) {
            for run in runs(block.clone(), |j| head.carries_weight(j)) {
                let tokens = shift(&run, block.start);
                rows::accumulate(head.level, &u[tokens.clone()], head.v_rows(tokens), 1.0, sums);
            }
        }
    });
    stats[1..].iter_mut().zip(sums).for_each(|(p, sum)| *p = *sum as f32);
}

/// Writes one head's gradients; `g [value_dim]` is that of the pooled value.
pub(super) fn backward(
    head: &Head<'_>,
    stats: &[f32],
    g: &[f32],
    narrow: &mut [f32],
    wide: &mut [f64],
    into: HeadGradients<'_>,
) {
    let Shape { seq_q, seq_kv, head_dim, .. } = head.shape;
    let (iterations, tied) = (head.m.iterations, head.m.tied);
    let Room { norms_q, norms_k, ds, u, du } = Room::cut(narrow, &head.shape);
    let pair = Pair::new(head, norms_q, norms_k);
    let (inverses, _, scores) = saved_parts(stats, head);
    let HeadGradients { query, key, value } = into;
    pair.weights(stats, iterations, u);
    values_backward(head, u, g, value, du);
    for t in (0..iterations).rev() {
        let first = t + 1 == iterations;
        let along = inner(&u[..seq_kv], &du[..seq_kv]) as f32;
        for (j, (ds, w)) in ds.iter_mut().zip(part(scores, t, seq_kv)).enumerate() {
            let through = if head.carries_weight(j) { du[j] } else { 0.0 };
            let sign = f32::from(*w > 0.0) - f32::from(*w < 0.0);
            *ds = if head.keeps_key(j) { (through - sign * along) * inverses[t] } else { 0.0 };
        }
        pair.weights(stats, t, u);
        let (queries, keys) = (Side { weights: u, ..pair.q }, Side { weights: ds, ..pair.k });
        pair.sweep(&keys, &queries, !first, wide, if tied { &mut *query } else { &mut *key }, &mut []);
        pair.sweep(&queries, &keys, tied || !first, wide, query, &mut du[..seq_q]);
    }
    let along = inner(&u[..seq_q], &du[..seq_q]) as f32;
    for run in runs(0..seq_q, |i| head.keeps_query(i)) {
        for i in run.clone() {
            let norm = pair.q.norms[i];
            du[i] = if norm > 0.0 { (du[i] - along) * stats[0] / norm } else { 0.0 };
        }
        let into = token_rows_mut(query, head_dim, run.clone());
        rows::add_scaled(head.level, &du[run.clone()], head.q_rows(run), head_dim, into);
    }
}

/// `dv_j = u_j g` and `du_j = v_j.g`, 0 where a token carries no weight.
fn values_backward(head: &Head<'_>, u: &[f32], g: &[f32], value: &mut [f32], du: &mut [f32]) {
    let tokens = 0..head.shape.seq_kv;
    for gap in runs(tokens.clone(), |j| !head.carries_weight(j)) {
        token_rows_mut(value, g.len(), gap).fill(0.0);
    }
    du.fill(0.0);
    for run in runs(tokens, |j| head.carries_weight(j)) {
        rows::dots(head.level, head.v_rows(run.clone()), g, &mut du[run.clone()]);
        rows::outer(head.level, &u[run.clone()], g, token_rows_mut(value, g.len(), run), Store::Overwrite);
    }
}

/// The token weights `a [seq_kv]` of one head.
pub(super) fn token_weights(head: &Head<'_>, stats: &[f32], a: &mut [f32]) {
    let (inverses, _, scores) = saved_parts(stats, head);
    let last = head.m.iterations - 1;
    for (j, (a, w)) in a.iter_mut().zip(part(scores, last, head.shape.seq_kv)).enumerate() {
        *a = if head.carries_weight(j) { w * inverses[last] } else { 0.0 };
    }
}
