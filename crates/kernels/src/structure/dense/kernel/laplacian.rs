//! The whitened Laplacian kernel of every pair. "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", eq. 3
//! to 6, all options but full whitening: means and deviations of its columns, or means of its rows, are what the weights are made with.

use super::{
    affine::{self, Distance, Kernel, TILE, Weights},
    affine_backward::{self, Back, Buffers},
    compact::{BLOCK, Compact, spread},
};
use crate::{
    Gradients, Parameter, Plan, Result, Shape, Strategy,
    call::{Call, Saved},
    mechanism::{Centering, LaplacianExact, Whitening},
    scratch::{cut, parts, scratch_len},
    structure::{
        dense::{dot, padded},
        nystrom::pass::TOKENS,
    },
};

/// What is saved of similarities, `[slices, seq]` each, by kept token.
#[derive(Clone, Copy)]
struct Statistics<'a> {
    /// Per key: the mean of its column, and one over its standard deviation (1 without whitening).
    mean: &'a [f32],
    inverse: &'a [f32],
    /// Per query: the mean of its row.
    row_mean: &'a [f32],
}

impl<'a> Statistics<'a> {
    /// The weights, with the factors of the rows and what is added to them.
    fn weights(&self, m: &LaplacianExact, scale: &'a [f32], bias: &'a [f32]) -> Weights<'a> {
        let Self { mean, inverse, row_mean } = *self;
        let [centre, row_centre]: [&[f32]; 2] = match m.centering {
            Centering::PerKey => [mean, &[]],
            Centering::PerQuery => [&[], row_mean],
            Centering::None => [&[], &[]],
        };
        Weights { scale, row_centre, bias, factor: inverse, centre }
    }
}

/// The sizes of the three parts of the statistics.
fn stats_sizes(s: &Shape) -> [usize; 3] {
    [s.slices() * s.seq_kv, s.slices() * s.seq_kv, s.slices() * s.seq_q]
}

/// Factors of rows, and what is added to them.
fn row_sizes(s: &Shape) -> [usize; 2] {
    [s.slices() * s.seq_q; 2]
}

/// f32 of the outputs by kept query.
fn sums_len(s: &Shape) -> usize {
    s.slices() * s.seq_q * padded(s.value_dim)
}

/// Writes the factors of the weights of every query, and what is added to each.
fn fill_rows(kernel: &Kernel<'_>, m: &LaplacianExact, scale: &mut [f32], bias: &mut [f32]) {
    kernel.fill_rows(scale, |seen| m.weight_scale.value(seen.max(1)) as f32);
    kernel.fill_rows(bias, |seen| if m.bias_one_over_n { 1.0 / seen.max(1) as f32 } else { 0.0 });
}

/// Writes `out`, and the means and deviations.
pub(crate) fn laplacian_exact_forward(
    call: &Call<'_>,
    m: &LaplacianExact,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let s = &call.shape;
    let ([scale, bias], work) = cut(work, row_sizes(s));
    let ([sums], work) = cut(work, [sums_len(s)]);
    let (kernel, v, work) = Kernel::load(call, Distance::Manhattan, m.lambda, work);
    fill_rows(&kernel, m, scale, bias);
    let ([mean, inverse, row_mean], _) = cut(stats, stats_sizes(s));
    mean.fill(0.0);
    inverse.fill(1.0);
    row_mean.fill(0.0);
    if m.whitening == Whitening::Diagonal {
        kernel.turned().moments(mean, inverse, work);
        for (slice, inverse) in inverse.chunks_exact_mut(s.seq_kv).enumerate() {
            let queries = kernel.queries.count(slice).max(1) as f64;
            inverse.iter_mut().for_each(|x| *x = (f64::from(*x) / queries + m.whiten_eps).powf(-0.5) as f32);
        }
    } else if m.centering == Centering::PerKey {
        kernel.turned().moments(mean, &mut [], work);
    }
    if m.centering == Centering::PerQuery {
        kernel.moments(row_mean, &mut [], work);
    }
    let weights = Statistics { mean, inverse, row_mean }.weights(m, scale, bias);
    kernel.apply(&weights, v, sums, work);
    spread(sums, v.stride(), kernel.queries, s.value_dim, out);
    Ok(())
}

/// Writes the gradients.
pub(crate) fn laplacian_exact_backward(
    call: &Call<'_>,
    m: &LaplacianExact,
    saved: &Saved<'_>,
    mut gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let s = &call.shape;
    let ([scale, bias], work) = cut(work, row_sizes(s));
    let (Buffers { g, h, row, curve, mut sums }, work) = Buffers::cut(s, m.tied, work);
    let (kernel, v, work) = Kernel::load(call, Distance::Manhattan, m.lambda, work);
    fill_rows(&kernel, m, scale, bias);
    let g = Compact::of(saved.dout, kernel.queries, g);
    let [mean, inverse, row_mean] = parts(saved.stats, stats_sizes(s));
    let statistics = Statistics { mean, inverse, row_mean };
    let weights = statistics.weights(m, scale, bias);
    sums.values(&kernel, &weights, g, work);
    spread(sums.dv, v.stride(), kernel.keys, s.value_dim, gradients.dv);
    row_terms(&kernel, m, &weights, (g, v), h, row);
    curve.fill(0.0);
    if m.whitening == Whitening::Diagonal {
        variances(&kernel, &weights, (g, v), sums.dv, curve);
    }
    let back = Back { h, row, factor: inverse, curve, mean };
    sums.tokens(&kernel, &back, v, gradients.extras.get(Parameter::Lambda), work);
    sums.write(&kernel, gradients);
    Ok(())
}

/// Writes `h_i = scale_i g_i`, less the mean over the queries where columns are centred; and, where rows are,
/// `row_i = scale_i g_i . (mean of factor_j v_j over the keys that query i sees)`.
fn row_terms(
    kernel: &Kernel<'_>,
    m: &LaplacianExact,
    weights: &Weights<'_>,
    (g, v): (Compact<'_>, Compact<'_>),
    h: &mut [f32],
    row: &mut [f32],
) {
    let (s, width) = (&kernel.call.shape, g.stride());
    h.fill(0.0);
    row.fill(0.0);
    for slice in 0..s.slices() {
        let count = kernel.queries.count(slice);
        let at = slice * s.seq_q;
        let (h, row) = (&mut h[at * width..][..count * width], &mut row[at..][..count]);
        let g = g.part(slice, 0..count);
        for ((h, g), scale) in h.chunks_exact_mut(width).zip(g.data.chunks_exact(width)).zip(&weights.scale[at..]) {
            h.iter_mut().zip(g).for_each(|(h, g)| *h = scale * g);
        }
        match m.centering {
            Centering::PerKey => {
                for c in 0..width {
                    let mean =
                        h.iter().skip(c).step_by(width).map(|&x| f64::from(x)).sum::<f64>() / count.max(1) as f64;
                    h.iter_mut().skip(c).step_by(width).for_each(|x| *x -= mean as f32);
                }
            }
            Centering::PerQuery => running_means(kernel, weights, slice, v, h, row),
            Centering::None => {}
        }
    }
}

/// Writes `row_i = h_i . (1/n_i) sum over j < n_i of factor_j v_j`; the numbers of keys only grow.
fn running_means(kernel: &Kernel<'_>, weights: &Weights<'_>, slice: usize, v: Compact<'_>, h: &[f32], row: &mut [f32]) {
    let (seq, width, all) = (v.seq, v.stride(), 0..kernel.keys.count(slice));
    let factor = &weights.factor[slice * seq..][..seq];
    let rows = v.part(slice, 0..seq).data;
    // One channel at a time, so that the running sum needs no room.
    for c in 0..v.dim {
        let (mut sum, mut next) = (0.0, 0);
        for (i, (row, h)) in row.iter_mut().zip(h.chunks_exact(width)).enumerate() {
            let seen = kernel.seen(slice, i, &all);
            while next < seen {
                sum += f64::from(factor[next]) * f64::from(rows[next * width + c]);
                next += 1;
            }
            *row += h[c] * (sum / seen.max(1) as f64) as f32;
        }
    }
}

/// Writes `curve_j = (2 / queries) gamma_j`, with `gamma_j` the gradient of the variance of column `j`: from `dv_j`, less what
/// the bias has in it.
fn variances(
    kernel: &Kernel<'_>,
    weights: &Weights<'_>,
    (g, v): (Compact<'_>, Compact<'_>),
    dv: &[f32],
    curve: &mut [f32],
) {
    let (s, width) = (&kernel.call.shape, v.stride());
    for slice in 0..s.slices() {
        let (queries, keys) = (kernel.queries.count(slice), kernel.keys.count(slice));
        // Columns that have variances are seen by all queries alike.
        let bias = f64::from(weights.bias[slice * s.seq_q]);
        let (g, rows) = (g.part(slice, 0..queries).data, v.part(slice, 0..keys).data);
        let dv = &dv[slice * s.seq_kv * width..][..keys * width];
        let at = slice * s.seq_kv..slice * s.seq_kv + keys;
        let (curve, factors) = (&mut curve[at.clone()], &weights.factor[at]);
        let of_variance = |factor: f32| f64::from(factor).powi(2) / queries.max(1) as f64;
        for ((curve, &factor), (v, dv)) in
            curve.iter_mut().zip(factors).zip(rows.chunks_exact(width).zip(dv.chunks_exact(width)))
        {
            *curve = (-of_variance(factor) * dot(v, dv)) as f32;
        }
        for c in 0..v.dim {
            let sum = bias * g.iter().skip(c).step_by(width).map(|&x| f64::from(x)).sum::<f64>();
            for ((curve, &factor), v) in curve.iter_mut().zip(factors).zip(rows.chunks_exact(width)) {
                *curve += (of_variance(factor) * sum * f64::from(v[c])) as f32;
            }
        }
    }
}

/// What a call costs and needs.
pub(crate) fn laplacian_exact_plan(m: &LaplacianExact, s: &Shape) -> Plan {
    let pairs = (s.slices() * s.seq_q * s.seq_kv) as u64;
    let [d, dv] = [s.head_dim, s.value_dim].map(|n| n as u64);
    let columns = m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal;
    let sweeps = 1 + u64::from(columns) + u64::from(m.centering == Centering::PerQuery);
    let kernel = 3 * d;
    let rows = (s.q_len() + s.k_len() + s.v_len()) as u64;
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "every pair, streamed in tiles and never stored",
        tile: (TOKENS.min(s.seq_q), BLOCK.min(s.seq_kv)),
        flops_forward: pairs * (sweeps * kernel + 2 * dv),
        flops_backward: pairs * (2 * kernel + 4 * dv + 6 * d),
        exps_forward: pairs * sweeps,
        exps_backward: pairs * 2,
        bytes_forward: 4 * (4 * rows + s.out_len() as u64),
        bytes_backward: 4 * (6 * rows + 3 * s.out_len() as u64),
        scratch_forward: scratch_len(row_sizes(s)) + scratch_len([sums_len(s)]) + affine::work(s, TILE),
        scratch_backward: scratch_len(row_sizes(s)) + affine_backward::work(s, m.tied),
        stats: scratch_len(stats_sizes(s)),
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
