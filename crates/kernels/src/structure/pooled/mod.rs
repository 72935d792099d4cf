//! One weight per token and one pooled value per head: rank one, O(N d). `uniform` gives every token the same weight,
//! `linear-infsa` the limit of a power iteration.
//!
//! A head is streamed in tiles of tokens that all threads share; a masked token is never read.

mod backward;
mod exact;
mod forward;
mod linear;
mod plan;
mod tiles;
mod uniform;

pub(crate) use plan::plan;
pub(crate) use uniform::{uniform_backward, uniform_forward};

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{
    Gradients, Parameter, Result, Shape,
    call::{Call, Saved},
    mechanism::{LinearInfsa, PowerOperator},
    range,
    rescale::{self, Rescaled},
    simd::{
        Level,
        rows::{self, Store},
    },
};
use backward::HeadGradients;
use linear::Head;
use tiles::{Buffers, ONES, TILE, blocks, parallel, runs, sum_tiles};

/// Saves what the backward pass needs of every head (its [`linear::Stats`]) and writes the pooled values.
///
/// Whether queries and keys have to be rescaled is read off what a factored pass saved, as looking for it first would
/// cost as much as the pass.
pub(crate) fn linear_forward(
    call: &Call<'_>,
    m: &LinearInfsa,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let each = plan::sizes(m, &call.shape).stats;
    let mut rescaled = match m.operator {
        PowerOperator::Factored => None,
        PowerOperator::Exact => Rescaled::needed(call, m.tied),
    };
    forward_pass(&rescaled.as_ref().map_or(*call, |r| r.call(call)), m, out, stats, work);
    let leaves_f32 =
        || stats.chunks_exact(each).any(|saved| !linear::Stats::load(saved, &call.shape).is_comfortable(m));
    if m.operator == PowerOperator::Factored && leaves_f32() {
        let by = Rescaled::measured(call, m.tied);
        forward_pass(&by.call(call), m, out, stats, work);
        rescaled = Some(by);
    }
    linear::check_pooled(call, stats)?;
    for (slice, saved) in stats.chunks_exact_mut(each).enumerate() {
        linear::save_units(saved, rescaled.as_ref().map_or([0; 2], |r| r.units()[slice]));
    }
    Ok(())
}

/// The call as the forward pass that left `stats` computed it, `None` for as it is.
fn rescaled_as_saved(call: &Call<'_>, m: &LinearInfsa, stats: &[f32]) -> Option<Rescaled> {
    let units = || stats.chunks_exact(plan::sizes(m, &call.shape).stats).map(linear::saved_units);
    units().any(|units| units != [0; 2]).then(|| Rescaled::by(call, m.tied, units().collect()))
}

fn forward_pass(call: &Call<'_>, m: &LinearInfsa, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) {
    let shape = call.shape;
    let sizes = plan::sizes(m, &shape);
    let out_len = out_rows(m, &shape) * shape.value_dim;
    let (narrow, wide) = cut_work(work, shape.slices() * sizes.narrow);
    let rows = [(out_len, out), (sizes.stats, stats), (sizes.narrow, narrow)];
    parallel(0..shape.slices(), 1, Buffers { wide: (sizes.wide, wide), rows }, &|slice, part| {
        let [(_, out), (_, stats), (_, narrow)] = part.rows;
        let head = Head::of(call, m, slice.start);
        match m.operator {
            PowerOperator::Factored => forward::forward(&head, stats, part.wide.1),
            PowerOperator::Exact => exact::forward(&head, stats, narrow, part.wide.1),
        }
        let row = &mut narrow[..shape.value_dim];
        row.iter_mut().zip(&stats[1..]).for_each(|(row, p)| *row = head.gamma * p);
        if m.broadcast {
            broadcast(head.level, row, head.query_mask(), out);
        } else {
            out.copy_from_slice(row);
        }
    });
}

/// The gradients of [`linear_forward`].
pub(crate) fn linear_backward(
    call: &Call<'_>,
    m: &LinearInfsa,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    linear::check_drowned(call, m, saved.stats)?;
    let Gradients { dq, mut dk, dv, extras } = gradients;
    let rescaled = rescaled_as_saved(call, m, saved.stats);
    let into = Gradients { dq: &mut *dq, dk: dk.as_deref_mut(), dv: &mut *dv, extras };
    let (dgamma, to_check) = backward_pass(&rescaled.as_ref().map_or(*call, |r| r.call(call)), m, saved, into, work);
    if let Some(rescaled) = &rescaled {
        rescaled.restore(dq, dk.as_deref_mut());
    }
    // The gradient of one value that all rows share has no masked rows.
    if !m.broadcast && !saved.dout.dense().iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    range::check_results(call, Some(saved.dout), [("dgamma", &dgamma[..])])?;
    // Gradients are as far from the ends of f32 as what they are made of, unless that was brought there and back.
    let tokens = [("dq", &*dq), ("dk", dk.as_deref().unwrap_or_default()), ("dv", &*dv)];
    let moved = rescaled.is_some() || to_check || m.operator == PowerOperator::Exact;
    if moved { range::check_results(call, Some(saved.dout), tokens) } else { Ok(()) }
}

/// The gradient of the decay, and whether gradients of tokens may have left f32: those of a head that were made in a unit of their
/// own, or of which a factor did.
fn backward_pass(
    call: &Call<'_>,
    m: &LinearInfsa,
    saved: &Saved<'_>,
    mut gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> (Vec<f32>, bool) {
    let shape = call.shape;
    let Shape { heads, seq_q, seq_kv, head_dim, value_dim, .. } = shape;
    let (sizes, to_check) = (plan::sizes(m, &shape), AtomicBool::new(false));
    let (narrow, wide) = cut_work(work, shape.slices() * sizes.narrow);
    let keys = gradients.dk.unwrap_or_default();
    let rows = [
        (seq_q * head_dim, gradients.dq),
        (seq_kv * head_dim, keys),
        (seq_kv * value_dim, gradients.dv),
        (sizes.narrow, &mut *narrow),
    ];
    parallel(0..shape.slices(), 1, Buffers { wide: (sizes.wide, wide), rows }, &|slice, buffers| {
        let [(_, query), (_, key), (_, value), (_, narrow)] = buffers.rows;
        let head = Head::of(call, m, slice.start);
        let stats = linear::part(saved.stats, slice.start, sizes.stats);
        let (dgamma, narrow) = narrow.split_at_mut(1);
        let (g, narrow) = narrow.split_at_mut(value_dim);
        let pooled = &stats[1..1 + value_dim];
        let dout = linear::part(saved.dout.dense(), slice.start, out_rows(m, &shape) * value_dim);
        let exponent = pooled_gradient(&head, dout, pooled, buffers.wide.1, g);
        dgamma[0] = (linear::inner(g, pooled) * 2f64.powi(exponent)) as f32;
        g.iter_mut().for_each(|g| *g *= head.gamma);
        let into = HeadGradients { query: &mut *query, key: &mut *key, value: &mut *value };
        match m.operator {
            PowerOperator::Factored => backward::backward(&head, stats, g, narrow, buffers.wide.1, into),
            PowerOperator::Exact => exact::backward(&head, stats, g, narrow, buffers.wide.1, into),
        }
        if head.overflowed() {
            to_check.store(true, Ordering::Relaxed);
        }
        if exponent != 0 {
            to_check.store(true, Ordering::Relaxed);
            [query, key, value].into_iter().for_each(|x| rescale::multiply(x, 1, |_| 2f64.powi(exponent)));
        }
    });
    let Some(dgamma) = gradients.extras.get(Parameter::Gamma) else { return (Vec::new(), to_check.into_inner()) };
    for (head, dgamma) in dgamma.iter_mut().enumerate() {
        *dgamma = narrow.chunks_exact(sizes.narrow).skip(head).step_by(heads).map(|slice| slice[0]).sum();
    }
    (dgamma.to_vec(), to_check.into_inner())
}

/// Rows per head of `out`.
const fn out_rows(m: &LinearInfsa, shape: &Shape) -> usize {
    if m.broadcast { shape.seq_q } else { 1 }
}

/// The gradient of what is broadcast, the sum of `dout` over the kept queries, divided by a power of two, whose exponent is
/// returned: 0 but where products with values would not fit f32.
fn pooled_gradient(head: &Head<'_>, dout: &[f32], pooled: &[f32], partial: &mut [f64], g: &mut [f32]) -> i32 {
    let exponent = |most: f64| {
        let pooled = pooled.iter().fold(0_f32, |most, x| most.max(x.abs()));
        rescale::product_exponent(most, pooled.into())
    };
    if !head.m.broadcast {
        let exponent = exponent(rows::max_abs(head.level, dout).into());
        g.iter_mut().zip(dout).for_each(|(g, &x)| *g = (f64::from(x) * 2f64.powi(-exponent)) as f32);
        return exponent;
    }
    let dim = g.len();
    let sums = sum_tiles(head.shape.seq_q, dim, partial, [], &|tile, sums, []| {
        for block in blocks(tile, dim) {
            for run in runs(block.clone(), |i| head.keeps_query(i)) {
                let rows = linear::token_rows(dout, dim, linear::shift(&run, block.start));
                rows::accumulate(head.level, &ONES[..run.len()], rows, 1.0, sums);
            }
        }
    });
    let exponent = exponent(sums.iter().fold(0.0, |most: f64, sum| most.max(sum.abs())));
    g.iter_mut().zip(sums).for_each(|(g, sum)| *g = (*sum * 2f64.powi(-exponent)) as f32);
    exponent
}

/// Replaces the pooled value in what forward saved of one head.
pub(crate) fn set_pooled(stats: &mut [f32], pooled: &[f32]) {
    stats[1..=pooled.len()].copy_from_slice(pooled);
}

/// The token weights `a [batch, heads, seq_kv]` of `linear-infsa`, before the decay, from what forward saved.
pub(crate) fn token_weights(call: &Call<'_>, m: &LinearInfsa, stats: &[f32], a: &mut [f32]) {
    let sizes = plan::sizes(m, &call.shape);
    let rescaled = rescaled_as_saved(call, m, stats);
    let call = &rescaled.as_ref().map_or(*call, |r| r.call(call));
    let rows = [(call.shape.seq_kv, a)];
    parallel(0..call.shape.slices(), 1, Buffers { wide: (0, &mut []), rows }, &|slice, part| {
        let [(_, a)] = part.rows;
        let head = Head::of(call, m, slice.start);
        let stats = linear::part(stats, slice.start, sizes.stats);
        match m.operator {
            PowerOperator::Factored => forward::token_weights(&head, stats, a),
            PowerOperator::Exact => exact::token_weights(&head, stats, a),
        }
    });
}

/// `row` for every kept token of `out`, 0 for the others.
fn broadcast(level: Level, row: &[f32], keep: Option<&[bool]>, out: &mut [f32]) {
    let dim = row.len();
    let store = Store::fresh(out.len());
    parallel(0..out.len() / dim, TILE, Buffers { wide: (0, &mut []), rows: [(dim, out)] }, &|tile, part| {
        let [(_, out)] = part.rows;
        for block in blocks(tile.clone(), dim) {
            let out = linear::token_rows_mut(out, dim, block.start - tile.start..block.end - tile.start);
            let keeps = |j: usize| keep.is_none_or(|keep| keep[j]);
            tiles::write_outer(level, &block, keeps, &ONES, row, out, store);
        }
    });
}

/// The first `narrow` f32 of `work`, and the rest as f64.
fn cut_work(work: &mut [f32], narrow: usize) -> (&mut [f32], &mut [f64]) {
    let (narrow, rest) = work.split_at_mut(narrow);
    (narrow, bytemuck::pod_align_to_mut(rest).1)
}

/// f32 that [`cut_work`] cuts into `narrow` f32 and `wide` f64, wherever they begin.
const fn work_len(narrow: usize, wide: usize) -> usize {
    narrow + 2 * wide + 1
}
