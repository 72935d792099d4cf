//! What calls of compositions do and need, before they are made.

use super::{
    factored, factors, features, graph, graph::TASKS, hops, landmarks, normalise, normalise::saved_len, rounded, sight,
    tile,
};
use crate::{
    Mechanism, Plan, Precision, Shape, Strategy,
    mechanism::{Centering, Clustered, Dense, Form, Normalisation, Score, Series, Softmax, Structure, Whitening},
    parallel::workers,
    score::{builtin, contract::Term},
    structure::{
        clustered,
        dense::{self, padded},
    },
};

/// f32 that a row or column takes in positions, statistics and weights.
const NUMBERS: usize = 8;

/// What a call does and needs; none where there is no fused path.
pub(crate) fn plan(m: &Mechanism, shape: &Shape, causal: bool, precision: Precision) -> Option<Plan> {
    if let Structure::Features(structure) = &m.structure {
        return Some(features::plan((m, structure), shape, causal, hops(m), precision));
    }
    if let Some(structure) = factored(m) {
        return Some(factors::plan(structure, shape, of_pairs(m, shape, causal, 1, precision), hops(m)));
    }
    if let Structure::Nystrom(structure) = &m.structure {
        return Some(landmarks::plan(m, structure, shape, hops(m)));
    }
    if !graph::is_fused(m, causal) {
        return None;
    }
    Some(match &m.structure {
        Structure::Clustered(structure) => of_clusters(m, structure, shape, causal),
        _ => of_pairs(m, shape, causal, hops(m), precision),
    })
}

/// The plan of all pairs that are within the window.
fn of_pairs(m: &Mechanism, shape: &Shape, causal: bool, hops: u64, precision: Precision) -> Plan {
    let (pairs, [sums, before]) = (seen(m, shape, causal), sweeps_beside(m));
    let [d, dv] = [shape.head_dim as u64, shape.value_dim as u64];
    let scores = pairs * per_channel(m, shape) * d;
    let hop = scores + pairs * 2 * dv;
    let exponential = m.score.is_log() || matches!(m.score, Score::DotSigmoid(_));
    let exps = |sweeps| if exponential { pairs * sweeps } else { 0 };
    let [allocated_forward, allocated_backward] = held(m, shape, precision);
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "pairs are scored in tiles and never stored",
        tile: (tile::QUERIES.min(shape.seq_q), tile::KEYS.min(shape.seq_kv)),
        flops_forward: hop * hops + scores * sums,
        // Every hop but the last is repeated; then each is swept back.
        flops_backward: hop * hops.saturating_sub(1) + (scores + 2 * hop) * hops + scores * before,
        exps_forward: exps(hops + sums),
        exps_backward: exps(hops + before),
        scratch_forward: 0,
        scratch_backward: 0,
        stats: saved_len(&m.normalisation, shape) + 2 * shape.slices(),
        allocated_forward,
        allocated_backward,
        ..nearest(m, shape, causal)
    }
}

/// Bytes that the two passes hold at once, where masked tokens or channels that are no whole vectors have all rows copied.
fn held(m: &Mechanism, s: &Shape, precision: Precision) -> [usize; 2] {
    let Shape { seq_q, seq_kv, .. } = *s;
    let ([d, dv], slices) = ([s.head_dim, s.value_dim].map(padded), s.slices());
    let (at_once, threads) = (workers(slices), workers(usize::MAX));
    let streamed = normalise::is_streamed(&m.normalisation);
    // Images, positions and weights of all slices; a tile's values, their gradients and rows of each thread.
    let images = slices * (seq_q + seq_kv) * (d + NUMBERS);
    let [terms, rows] = [tile::KEYS * tile::STRIDE, tile::QUERIES * (d + dv)];
    // Operands of a tile, and of what its slice shares, where products are of bf16.
    let (dims, parts) = ([s.head_dim, s.value_dim], precision.parts());
    let operands = if parts > 0 { rounded::operands_len(dims, parts) } else { 0 };
    let shared = rounded::shared_len(seq_kv, dims).map(|len| parts * len);
    let forward = images + at_once * ((seq_q + seq_kv) * dv + shared[0]) + threads * (terms + rows + operands);
    let tasks = of_tasks(s, d + if streamed { dv } else { 0 });
    let of_slice = (seq_q + seq_kv) * d + 2 * (seq_q + seq_kv) * dv;
    let own = [(s.k_len(), m.tied), (s.v_len() + s.out_len(), true)];
    let own: usize = own.into_iter().filter(|(_, held)| *held).map(|(len, _)| len).sum();
    let of_thread = 3 * terms + rows + tile::KEYS * d + tile::QUERIES * d + operands;
    let backward = images + own + at_once * (of_slice + shared[1]) + tasks + threads * of_thread;
    [forward + kept_by_series(m, s)[0], backward + kept_by_series(m, s)[1]].map(|len| 4 * len)
}

/// Numbers of the gradients of keys that the tasks of the slices at work hold, each for itself, where slices are split: `stride` for a key.
fn of_tasks(s: &Shape, stride: usize) -> usize {
    let slices = s.slices();
    if slices < TASKS { workers(slices) * TASKS.div_ceil(slices) * s.seq_kv * stride } else { 0 }
}

/// Numbers that a series keeps in each pass: a sum of hops every hop, and what comes back to one; a solver the values of kept tokens, what
/// it applies the operator to and the result, and then, of its adjoint, five tensors of the hop that is swept back.
pub(super) fn kept_by_series(m: &Mechanism, s: &Shape) -> [usize; 2] {
    let kept = match &m.series {
        Series::Hops(m) => [m.count, m.count + 1],
        Series::Resolvent(_) => [3, 5],
        _ => [0; 2],
    };
    kept.map(|tensors| tensors.saturating_mul(s.out_len()))
}

/// The plan of softmax, whose bytes are those of all pairs, and whose costs are nearest to those of values that nothing fused holds.
pub(crate) fn nearest(m: &Mechanism, shape: &Shape, causal: bool) -> Plan {
    let softmax = Form::Softmax(Softmax::default().with_tied(m.tied));
    dense::plan(&softmax, shape, causal, Precision::Full)
}

/// Operations per channel of a pair's term: a distance has one more than a product.
fn per_channel(m: &Mechanism, shape: &Shape) -> u64 {
    let value = |parameter| m.score.value(parameter, shape.head_dim, shape.heads);
    let term = builtin::with_head(&m.score, shape.head_dim, shape.heads, value, |score| score.term());
    if term == Term::Product { 2 } else { 3 }
}

/// Pairs of a query and a key that it may see, without masks.
fn seen(m: &Mechanism, shape: &Shape, causal: bool) -> u64 {
    let dense = if let Structure::Dense(dense) = &m.structure { dense.clone() } else { Dense::default() };
    let sight = sight::Sight::dense(&dense, shape, causal);
    let row = |i: usize| {
        let sees = sight.of(i as u32);
        let high = sees.high.min(shape.seq_kv as u32);
        let low = sees.low.min(high);
        u64::from(high - low + sees.sinks.min(low))
    };
    shape.slices() as u64 * (0..shape.seq_q).map(row).sum::<u64>()
}

/// Sweeps over the pairs beside those of the hops: forward for sums without which no value can be weighed; backward for these, where
/// they are not saved, and for gradients of the values, which those of such sums come from.
fn sweeps_beside(m: &Mechanism) -> [u64; 2] {
    match &m.normalisation {
        m if normalise::is_streamed(m) => [0, 0],
        Normalisation::Symmetric(_) => [if m.tied { 1 } else { 2 }, 1],
        Normalisation::Whitened(m) => {
            let columns = m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal;
            [u64::from(columns) + u64::from(m.centering == Centering::PerQuery), 1]
        }
        _ => [2, 4],
    }
}

/// Bytes that the forward and the backward pass of a clustered graph hold where queries have `rows` in all: images and outputs, or
/// images, outputs, gradients of both; of keys and values as many as `shape` has, and gradients of these for every task.
fn rows(shape: &Shape, rows: usize) -> [usize; 2] {
    let ([d, dv], queries) = ([shape.head_dim + 16, shape.value_dim + 16], shape.seq_q);
    let (forward, backward) = (queries * d + rows * dv, queries * (d + 2 * dv) + rows * d);
    let columns = shape.seq_kv * (d + dv);
    let of_slices = [forward + 2 * columns, backward + 2 * columns].map(|len| shape.slices() * len);
    [of_slices[0], of_slices[1] + of_tasks(shape, d + dv)].map(|len| 4 * len)
}

/// The plan of a clustered graph, whose clusters are of equal size.
fn of_clusters(m: &Mechanism, structure: &Clustered, shape: &Shape, causal: bool) -> Plan {
    let ssa = structure.ssa(m.planned_scale(), causal);
    let one = clustered::plan(&ssa, shape, causal);
    // A query that chooses for itself has a row for each cluster beside its own.
    let routes = if ssa.routes_queries() { ssa.routes.min(ssa.clusters(shape.seq_kv)) } else { 0 };
    let queries = shape.seq_q.saturating_mul(1 + routes);
    // What a causal query sees of its own segment lies by itself.
    let times = if causal && ssa.routes_queries() { 2 } else { 1 };
    let columns = &Shape { seq_kv: shape.seq_kv.saturating_mul(times), ..*shape };
    let ([forward, backward], hops) = (rows(columns, queries), hops(m));
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "exact entries and means in gathered tiles, by clusters; no score is stored",
        tile: (tile::QUERIES.min(shape.seq_q), tile::KEYS.min(shape.seq_kv)),
        flops_forward: one.flops_forward.saturating_mul(hops),
        flops_backward: one.flops_backward.saturating_mul(hops),
        scratch_forward: 0,
        scratch_backward: 0,
        stats: saved_len(&m.normalisation, shape) + 2 * shape.slices(),
        allocated_forward: one.allocated_forward + forward + 4 * kept_by_series(m, shape)[0],
        allocated_backward: one.allocated_backward + backward + 4 * kept_by_series(m, shape)[1],
        ..one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slices that are tasks enough are not split, and hold no parts.
    #[test]
    fn fewer_slices_than_tasks_are_split() {
        let held = |slices| of_tasks(&Shape::square(1, slices, 32, 4), 8);
        assert_eq!(held(1), workers(1) * TASKS * 32 * 8);
        assert!(held(TASKS - 1) > 0);
        assert_eq!([held(TASKS), held(TASKS + 1)], [0; 2]);
    }
}
