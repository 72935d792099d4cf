//! `linear-infsa` backward with the factored operator: one pass over the keys per step, last step first, each recomputing
//! its scores, and one over the queries for the start weights.

use std::ops::Range;

use super::{
    linear::{Head, Scores, Stats, Step, inner, shift, token_rows_mut},
    tiles::{BLOCK, Buffers, PerToken, TILE, blocks, parallel, runs, sum_tiles, write_outer},
};
use crate::simd::rows::{self, Store};

/// Where one head's gradients go. When tied, `key` is empty and `query` takes both paths.
pub(super) struct HeadGradients<'a> {
    pub query: &'a mut [f32],
    pub key: &'a mut [f32],
    pub value: &'a mut [f32],
}

/// The gradient of a pooled row `sum u_i x_i` and of `sum u_i |x_i|`, from which that of the weights is
/// `du_i = x_i.y + r |x_i|`; `along = sum u_i du_i`.
struct Incoming<'a> {
    y: &'a [f32],
    r: f32,
    along: f32,
}

/// Writes one head's gradients. `g [value_dim]`: the gradient of the pooled value; `scratch`: at least
/// `head_dim`.
pub(super) fn backward(
    head: &Head<'_>,
    stats: &[f32],
    g: &[f32],
    scratch: &mut [f32],
    partial: &mut [f64],
    mut into: HeadGradients<'_>,
) {
    let (dim, iterations) = (head.shape.head_dim, head.m.iterations);
    let stats = Stats::load(stats, &head.shape);
    let dy = &mut scratch[..dim];
    // The rows of the queries are written first by the last step if tied, else by the first pass over the queries.
    let query_store = |written: bool| if head.m.tied || written { Store::Add } else { Store::Overwrite };
    let mut r = 0.0;
    let mut along = inner(g, stats.pooled) as f32;
    for t in (0..iterations).rev() {
        let step = stats.step(t, dim);
        let sums = if t + 1 == iterations {
            values_step(head, &step, &Incoming { y: g, r, along }, partial, &mut into)
        } else {
            queries_step(
                head,
                &step,
                &Incoming { y: dy, r, along },
                query_store(t + 2 < iterations),
                partial,
                &mut into,
            )
        };
        let down = f64::from(step.down);
        along = (f64::from(step.bias) * sums[0]
            + step.y.iter().zip(&sums[1..]).map(|(y, dy)| f64::from(*y) * dy).sum::<f64>()) as f32;
        r = head.factor((head.bias * sums[0] / down) as f32);
        head.factor(along);
        dy.iter_mut().zip(&sums[1..]).for_each(|(dy, sum)| *dy = head.factor((sum / down) as f32));
    }
    let incoming = Incoming { y: dy, r, along };
    let store = query_store(iterations > 1);
    let buffers = Buffers { wide: (0, &mut []), rows: [(dim, into.query)] };
    parallel(0..head.shape.seq_q, TILE, buffers, &|tile, part| {
        let [(_, queries)] = part.rows;
        start_tile(head, stats.inverse_energy, &incoming, store, tile, queries);
    });
}

/// f64 that [`backward`] sums per tile, at most.
pub(super) const fn width(head_dim: usize) -> usize {
    1 + head_dim
}

/// The last step: its weights pool the values.
fn values_step<'p>(
    head: &Head<'_>,
    step: &Step<'_>,
    incoming: &Incoming<'_>,
    partial: &'p mut [f64],
    into: &mut HeadGradients<'_>,
) -> &'p [f64] {
    let (dim, value_dim) = (head.shape.head_dim, head.shape.value_dim);
    let keys = if head.m.tied { &mut *into.query } else { &mut *into.key };
    // Tied rows are added to in the pass over the queries, and a norm bias is added in place.
    let store_key = if head.m.tied || head.bias != 0.0 { Store::Overwrite } else { Store::fresh(keys.len()) };
    let store_value = Store::fresh(into.value.len());
    let rows = [(dim, keys), (value_dim, &mut *into.value)];
    sum_tiles(head.shape.seq_kv, 1 + dim, partial, rows, &|tile: Range<usize>, sums, [keys, values]| {
        let mut scores = Scores::NEW;
        for block in blocks(tile.clone(), head.widest()) {
            head.scores(step, block.clone(), &mut scores, true);
            let local = block.start - tile.start..block.end - tile.start;
            let a = weights(&scores, step);
            let values = token_rows_mut(values, value_dim, local.clone());
            write_outer(head.level, &block, |j| head.carries_weight(j), &a, incoming.y, values, store_value);
            let mut du = [0.0; BLOCK];
            for run in runs(block.clone(), |j| head.carries_weight(j)) {
                rows::dots(head.level, head.v_rows(shift(&run, block.start)), incoming.y, &mut du[run]);
            }
            through_scores(head, step, &scores, incoming.along, &mut du);
            key_block(head, step, block, &scores, &du, token_rows_mut(keys, dim, local), store_key, sums);
        }
    })
}

/// An earlier step: its weights pool the queries of the next one.
fn queries_step<'p>(
    head: &Head<'_>,
    step: &Step<'_>,
    incoming: &Incoming<'_>,
    store: Store,
    partial: &'p mut [f64],
    into: &mut HeadGradients<'_>,
) -> &'p [f64] {
    let dim = head.shape.head_dim;
    let rows = [(dim, &mut *into.query), (dim, &mut *into.key)];
    sum_tiles(head.shape.seq_kv, 1 + dim, partial, rows, &|tile: Range<usize>, sums, [queries, keys]| {
        let mut scores = Scores::NEW;
        for block in blocks(tile.clone(), head.widest()) {
            head.scores(step, block.clone(), &mut scores, true);
            let local = block.start - tile.start..block.end - tile.start;
            let u = weights(&scores, step);
            let into = token_rows_mut(queries, dim, local.clone());
            let mut du = query_block(head, incoming, &block, &u, |j| head.carries_weight(j), store, into);
            through_scores(head, step, &scores, incoming.along, &mut du);
            let keys = if head.m.tied { &mut *queries } else { &mut *keys };
            key_block(head, step, block, &scores, &du, token_rows_mut(keys, dim, local), Store::Add, sums);
        }
    })
}

/// The start weights `alpha_i = |q_i| / (sum |q| + eps)`: their own gradient and that of the norms.
fn start_tile(
    head: &Head<'_>,
    inverse_energy: f32,
    incoming: &Incoming<'_>,
    store: Store,
    tile: Range<usize>,
    queries: &mut [f32],
) {
    let dim = head.shape.head_dim;
    for block in blocks(tile.clone(), head.widest()) {
        let mut norms = [0.0; BLOCK];
        head.query_norms(block.clone(), &mut norms[..block.len()]);
        let alpha = norms.map(|e| e * inverse_energy);
        let into = token_rows_mut(queries, dim, block.start - tile.start..block.end - tile.start);
        let du = query_block(head, incoming, &block, &alpha, |i| head.keeps_query(i), store, into);
        let mut along_q = [0.0; BLOCK];
        for (c, (du, e)) in along_q.iter_mut().zip(du.iter().zip(norms)) {
            *c = if e > 0.0 { head.factor((du - incoming.along) * inverse_energy / e) } else { 0.0 };
        }
        for run in runs(block.clone(), |i| head.keeps_query(i)) {
            let q = head.q_rows(shift(&run, block.start));
            rows::add_scaled(head.level, &along_q[run.clone()], q, dim, token_rows_mut(into, dim, run));
        }
    }
}

/// Queries pooled with weights `u`: writes `u_i y + u_i r q_i / |q_i|` and returns `du_i`, 0 where `keep` does not keep.
fn query_block(
    head: &Head<'_>,
    incoming: &Incoming<'_>,
    block: &Range<usize>,
    u: &PerToken,
    keep: impl Fn(usize) -> bool + Copy,
    store: Store,
    into: &mut [f32],
) -> PerToken {
    let dim = head.shape.head_dim;
    write_outer(head.level, block, keep, u, incoming.y, into, store);
    let (mut du, mut norms) = ([0.0; BLOCK], [0.0; BLOCK]);
    for run in runs(block.clone(), keep) {
        let q = head.q_rows(shift(&run, block.start));
        let du = &mut du[run.clone()];
        rows::dots(head.level, q, incoming.y, du);
        if head.bias != 0.0 {
            let norms = &mut norms[run.clone()];
            rows::norms(head.level, q, dim, norms);
            for ((du, e), u) in du.iter_mut().zip(norms.iter_mut()).zip(&u[run.clone()]) {
                *du += incoming.r * *e;
                *e = if *e > 0.0 { head.factor(u * incoming.r / *e) } else { 0.0 };
            }
            rows::add_scaled(head.level, norms, q, dim, token_rows_mut(into, dim, run));
        }
    }
    du
}

/// The weights `u_j` that a step gave, before masks.
fn weights(scores: &Scores, step: &Step<'_>) -> PerToken {
    scores.values.map(|w| w * step.inverse)
}

/// From the gradient of the weights to that of the logits, in place: `u = w / (sum |w| + ..)`, `w = phi(z)`.
fn through_scores(head: &Head<'_>, step: &Step<'_>, scores: &Scores, along: f32, du: &mut PerToken) {
    head.level.dispatch(|| {
        for (d, (w, slope)) in du.iter_mut().zip(scores.values.iter().zip(&scores.slopes)) {
            let sign = f32::from(*w > 0.0) - f32::from(*w < 0.0);
            *d = slope * ((*d - sign * along) * step.inverse);
        }
    });
}

/// `z_j = y.k_j + bias |k_j|`: writes the keys' gradients and adds up those of `bias` (first) and `y`.
#[allow(clippy::too_many_arguments)] // one block's view of a step
fn key_block(
    head: &Head<'_>,
    step: &Step<'_>,
    block: Range<usize>,
    scores: &Scores,
    dz: &PerToken,
    into: &mut [f32],
    store: Store,
    sums: &mut [f64],
) {
    let dim = head.shape.head_dim;
    write_outer(head.level, &block, |j| head.keeps_key(j), dz, step.y, into, store);
    for run in runs(block.clone(), |j| head.keeps_key(j)) {
        let k = head.k_rows(shift(&run, block.start));
        let dz = &dz[run.clone()];
        rows::accumulate(head.level, dz, k, 1.0, &mut sums[1..]);
        if head.bias != 0.0 {
            let mut along_k = [0.0; BLOCK];
            for (c, (dz, e)) in along_k.iter_mut().zip(dz.iter().zip(&scores.norms[run.clone()])) {
                sums[0] += f64::from(*dz) * f64::from(*e);
                *c = if *e > 0.0 { head.factor(dz * step.bias / e) } else { 0.0 };
            }
            rows::add_scaled(head.level, &along_k[..dz.len()], k, dim, token_rows_mut(into, dim, run));
        }
    }
}
