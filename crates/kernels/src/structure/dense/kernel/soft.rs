//! The Gaussian kernel of SOFT itself, every token a landmark of its own: `S V`, or `D^-1/2 S D^-1/2 V` with `D = diag(S 1)`.

use super::{
    affine::{self, Distance, Kernel, TILE, Weights},
    affine_backward::{self, Back, Buffers},
    compact::{BLOCK, Compact, spread},
};
use crate::{
    Gradients, Mask, Parameter, Plan, Result, Shape, Strategy,
    call::{Call, Saved},
    mechanism::Soft,
    scratch::{cut, scratch_len},
    structure::{
        dense::{dot, padded},
        nystrom::{pass::TOKENS, values::Filter},
    },
};

/// The same call with the queries masked as the keys that they are.
fn as_keys<'a>(call: &Call<'a>) -> Call<'a> {
    Call { mask: Mask { query: call.mask.key, ..call.mask }, ..*call }
}

/// The weights, whose factors on rows and columns are the inverse roots of the degrees.
fn weights(roots: &[f32]) -> Weights<'_> {
    Weights { scale: roots, factor: roots, row_centre: &[], bias: &[], centre: &[] }
}

/// Writes `out`, and the inverse roots of the degrees as `stats [slices, seq]`, by kept token.
pub(crate) fn soft_all_forward(
    call: &Call<'_>,
    m: &Soft,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let s = &call.shape;
    let ([sums], work) = cut(work, [s.slices() * s.seq_q * padded(s.value_dim)]);
    let call = &as_keys(call);
    let (kernel, v, work) = Kernel::load(call, Distance::Squared, m.scale_for(s.head_dim), work);
    if m.degree.is_some() {
        kernel.row_sums(stats, work);
        stats.iter_mut().for_each(|x| *x = f64::from(*x).max(f64::from(f32::MIN_POSITIVE)).powf(-0.5) as f32);
    } else {
        stats.fill(1.0);
    }
    kernel.apply(&weights(stats), v, sums, work);
    spread(sums, v.stride(), kernel.queries, s.value_dim, out);
    Filter::of_soft(call, m).add_all(call.v.dense(), false, out, work);
    Ok(())
}

/// Elements of the filter's part of the outputs.
fn filtered_len(m: &Soft, s: &Shape) -> usize {
    if m.value_conv > 0 { s.v_len() } else { 0 }
}

/// Writes the gradients.
pub(crate) fn soft_all_backward(
    call: &Call<'_>,
    m: &Soft,
    saved: &Saved<'_>,
    mut gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let (s, roots, filter) = (&call.shape, saved.stats, Filter::of_soft(call, m));
    let ([filtered], work) = cut(work, [filtered_len(m, s)]);
    let (Buffers { g, h, row, mut sums, .. }, work) = Buffers::cut(s, true, work);
    let call = &as_keys(call);
    let (kernel, v, work) = Kernel::load(call, Distance::Squared, m.scale_for(s.head_dim), work);
    let g = Compact::of(saved.dout, kernel.queries, g);
    sums.values(&kernel, &weights(roots), g, work);
    spread(sums.dv, v.stride(), kernel.keys, s.value_dim, gradients.dv);
    row.fill(0.0);
    if m.degree.is_some() {
        // The kernel's part of the output is what the filter did not add.
        filtered.fill(0.0);
        filter.add_all(call.v.dense(), false, filtered, work);
        degree_gradients(&kernel, (saved, filtered), gradients.dv, row);
    }
    filter.add_all(saved.dout.dense(), true, gradients.dv, work);
    for ((h, g), root) in h.chunks_exact_mut(g.stride()).zip(g.rows.chunks_exact(g.stride())).zip(roots) {
        h.iter_mut().zip(g).for_each(|(h, g)| *h = root * g);
    }
    let back = Back { h, row, factor: roots, curve: &[], mean: &[] };
    sums.tokens(&kernel, &back, v, gradients.extras.get(Parameter::Scale), work);
    if let Some(dweight) = gradients.extras.get(Parameter::ValueWeight) {
        filter.gradient(saved.dout.dense(), dweight);
    }
    sums.write(&kernel, gradients);
    Ok(())
}

/// Writes minus the gradient of every token's degree, from the parts that the kernel has of outputs and of the values' gradients.
fn degree_gradients(kernel: &Kernel<'_>, (saved, filtered): (&Saved<'_>, &[f32]), dv: &[f32], out: &mut [f32]) {
    let (s, dout) = (&kernel.call.shape, saved.dout.dense());
    for (slice, out) in out.chunks_exact_mut(s.seq_q).enumerate() {
        let roots = &saved.stats[slice * s.seq_q..];
        for ((out, &root), token) in out.iter_mut().zip(roots).zip(kernel.queries.tokens(slice)) {
            let at = (slice * s.seq_q + token) * s.value_dim..(slice * s.seq_q + token + 1) * s.value_dim;
            let product = |x: &[f32], y: &[f32]| dot(&x[at.clone()], &y[at.clone()]);
            let of_filter = if filtered.is_empty() { 0.0 } else { product(dout, filtered) };
            let total = product(dout, saved.out.dense()) - of_filter + product(kernel.call.v.dense(), dv);
            *out = (0.5 * f64::from(root).powi(2) * total) as f32;
        }
    }
}

/// What a call costs and needs.
pub(crate) fn soft_all_plan(m: &Soft, s: &Shape) -> Plan {
    let pairs = (s.slices() * s.seq_q * s.seq_q) as u64;
    let [d, dv] = [s.head_dim, s.value_dim].map(|n| n as u64);
    let (kernel, degrees) = (3 * d, u64::from(m.degree.is_some()));
    let rows = (s.q_len() + s.v_len()) as u64;
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "every pair, streamed in tiles and never stored",
        tile: (TOKENS.min(s.seq_q), BLOCK.min(s.seq_q)),
        flops_forward: pairs * ((1 + degrees) * kernel + 2 * dv),
        flops_backward: pairs * (2 * kernel + 4 * dv + 6 * d),
        exps_forward: pairs * (1 + degrees),
        exps_backward: pairs * 2,
        bytes_forward: 4 * (4 * rows + s.v_len() as u64),
        bytes_backward: 4 * (5 * rows + 3 * s.v_len() as u64),
        scratch_forward: scratch_len([s.slices() * s.seq_q * padded(s.value_dim)]) + affine::work(s, TILE),
        scratch_backward: scratch_len([filtered_len(m, s)]) + affine_backward::work(s, true),
        stats: s.slices() * s.seq_q,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
