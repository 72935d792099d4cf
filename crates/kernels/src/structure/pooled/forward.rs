//! `linear-infsa` forward with the factored operator: one pass over the queries for the start weights, then one over the
//! keys per step, the last of which pools the values. "Infinite Self-Attention", eq. 16 to 21.

use std::ops::Range;

use super::{
    linear::{Head, Scores, Stats, Step, finite, inverse, shift},
    tiles::{BLOCK, blocks, runs, sum_tiles},
};
use crate::simd::rows;

/// Writes the [`Stats`] of one head, the pooled value among them.
pub(super) fn forward(head: &Head<'_>, stats: &mut [f32], partial: &mut [f64]) {
    let (dim, value_dim) = (head.shape.head_dim, head.shape.value_dim);
    let (iterations, [start_eps, eps]) = (head.m.iterations, head.eps);
    let (first, steps) = stats.split_at_mut(1 + value_dim);
    let mut sums = sum_tiles(head.shape.seq_q, 2 + dim, partial, [], &|tile, sums, []| sum_queries(head, tile, sums));
    let mut over = inverse(sums[0] + start_eps);
    first[0] = finite(over);
    for (t, saved) in steps.chunks_exact_mut(Step::len(dim)).enumerate() {
        let gain = begin_step(head, &sums[1..], over, saved);
        let step = Step::load(saved);
        let last = t + 1 == iterations;
        let width = 2 + if last { value_dim } else { dim };
        sums =
            sum_tiles(head.shape.seq_kv, width, partial, [], &|tile, sums, []| sum_step(head, &step, last, tile, sums));
        over = inverse(sums[0] + eps / gain);
        saved[dim + 1] = finite(over);
    }
    first[1..].iter_mut().zip(&sums[2..]).for_each(|(p, s)| *p = (s * over) as f32);
}

/// f64 that [`forward`] sums per tile, at most.
pub(super) const fn width(widest: usize) -> usize {
    2 + widest
}

/// `sum e`, `sum e^2` and `sum e_i q_i` over the kept queries of a tile, `e_i = |q_i|`.
fn sum_queries(head: &Head<'_>, tile: Range<usize>, sums: &mut [f64]) {
    let mut energies = [0.0; BLOCK];
    for block in blocks(tile, head.widest()) {
        let e = &mut energies[..block.len()];
        head.query_norms(block.clone(), e);
        let unit = rows::normalise(head.level, e);
        sums[0] += unit.factor * unit.sum;
        if head.bias != 0.0 {
            sums[1] += unit.factor * unit.factor * e.iter().map(|e| f64::from(e * e)).sum::<f64>();
        }
        for run in runs(block.clone(), |i| head.keeps_query(i)) {
            let q = head.q_rows(shift(&run, block.start));
            rows::accumulate(head.level, &e[run], q, unit.factor, &mut sums[2..]);
        }
    }
}

/// Saves `y`, the bias and the power of two of a step from `sums = [sum w_i |q_i|, sum w_i q_i]` and `over`, the inverse
/// of the weights' norm. Returns the gain.
fn begin_step(head: &Head<'_>, sums: &[f64], over: f64, saved: &mut [f32]) -> f64 {
    let bias = head.bias * sums[0] * over;
    let most = sums[1..].iter().fold(bias, |most, y| most.max((y * over).abs()));
    let down = rows::power_of_two((most as f32).max(f32::MIN_POSITIVE));
    let dim = head.shape.head_dim;
    saved.iter_mut().zip(&sums[1..]).for_each(|(y, sum)| *y = (sum * over / f64::from(down)) as f32);
    saved[dim] = (bias / f64::from(down)) as f32;
    saved[dim + 1] = 0.0;
    saved[dim + 2] = down;
    head.scale * f64::from(down)
}

/// `sum |w|` over the kept keys of a tile, and, weighted by `w`, the sum of the values (last step), or of the queries
/// and of their norms.
fn sum_step(head: &Head<'_>, step: &Step<'_>, last: bool, tile: Range<usize>, sums: &mut [f64]) {
    let mut scores = Scores::NEW;
    let mut energies = [0.0; BLOCK];
    for block in blocks(tile, head.widest()) {
        head.scores(step, block.clone(), &mut scores, false);
        let w = &mut scores.values[..block.len()];
        let unit = rows::normalise(head.level, w);
        sums[0] += unit.factor * unit.sum;
        if !last && head.bias != 0.0 {
            let e = &mut energies[..block.len()];
            head.query_norms(block.clone(), e);
            sums[1] += unit.factor * w.iter().zip(e).map(|(w, e)| f64::from(*w) * f64::from(*e)).sum::<f64>();
        }
        for run in runs(block.clone(), |j| head.carries_weight(j)) {
            let tokens = shift(&run, block.start);
            let x = if last { head.v_rows(tokens) } else { head.q_rows(tokens) };
            rows::accumulate(head.level, &w[run], x, unit.factor, &mut sums[2..]);
        }
    }
}

/// The token weights `a [seq_kv]` of one head, `0` where a token carries none.
pub(super) fn token_weights(head: &Head<'_>, stats: &[f32], a: &mut [f32]) {
    let stats = Stats::load(stats, &head.shape);
    let step = stats.step(head.m.iterations - 1, head.shape.head_dim);
    let mut scores = Scores::NEW;
    for block in blocks(0..head.shape.seq_kv, head.widest()) {
        head.scores(&step, block.clone(), &mut scores, false);
        for (j, w) in block.zip(scores.values) {
            a[j] = if head.carries_weight(j) { w * step.inverse } else { 0.0 };
        }
    }
}
