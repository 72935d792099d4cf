//! Adds running mean tokens to rows that hold their exact and sampled entries.

use pulp::{Simd, WithSimd};

use super::{
    Chunk, chunks,
    panel::{Panel, Room, row, row_mut},
};
use crate::{
    call::Call,
    parallel,
    simd::{
        math::exp2,
        product::{Add, Size, add_product},
    },
    structure::{
        clustered::{Case, graph::Graph},
        dense::{Head, PANEL, padded},
    },
};

/// Completes `out` and the log-sum-exps `lse`.
pub(in crate::structure::clustered) fn forward(call: &Call<'_>, case: &Case, out: &mut [f32], lse: &mut [f64]) {
    let shape = call.shape;
    let slices = out.chunks_mut(shape.seq_q * shape.value_dim).zip(lse.chunks_mut(shape.seq_q));
    parallel::each(case.graphs.iter().zip(slices).enumerate(), |(slice, (graph, (out, lse)))| {
        let head = Head::of(call, slice);
        let chunks = chunks(graph, &head);
        let rows: Vec<usize> = chunks.iter().map(Chunk::len).collect();
        let out = parallel::split(out, rows.iter().map(|rows| rows * shape.value_dim));
        let lse = parallel::split(lse, rows.iter().copied());
        parallel::each(chunks.into_iter().zip(out.zip(lse)), |(chunk, (out, lse))| {
            let buffer = Room::new(graph, &head);
            call.level.dispatch(Pass { chunk, head, graph, logit: case.logit, out, lse, buffer });
        });
    });
}

struct Pass<'a> {
    chunk: Chunk,
    head: Head<'a>,
    graph: &'a Graph,
    logit: f32,
    /// Of the positions of the chunk.
    out: &'a mut [f32],
    lse: &'a mut [f64],
    buffer: Room,
}

impl WithSimd for Pass<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { chunk: Chunk { panels, mut sums }, head, graph, logit, out, lse, mut buffer } = self;
        let dv = head.value_dim;
        let start = panels[0].start;
        let mut values = vec![0.0; PANEL * padded(dv)];
        for positions in panels {
            sums.extend(graph, &head, graph.window.limit(positions.start));
            let mut panel = Panel::new(simd, &head, graph, logit, positions, &sums, &mut buffer);
            let (peaks, totals) = exponentiate(simd, &mut panel);
            weighted_values(simd, &mut panel, dv, &mut values);
            for (m, &i) in panel.queries.iter().enumerate() {
                let n = i as usize - start;
                let values = &values[m * padded(dv)..][..dv];
                merge(&mut out[n * dv..][..dv], &mut lse[n], values, peaks[m], totals[m]);
            }
        }
    }
}

/// Turns logits into `exp2(logit - peak)` over the number of keys; returns the peaks and the sums of the former.
#[inline(always)]
fn exponentiate<S: Simd>(simd: S, panel: &mut Panel<'_>) -> ([f32; PANEL], [f32; PANEL]) {
    let (mut peaks, mut totals) = ([f32::MIN; PANEL], [0.0; PANEL]);
    for c in 0..panel.clusters {
        let peaks = S::as_mut_simd_f32s(&mut peaks[..panel.width]).0;
        for (peak, logit) in peaks.iter_mut().zip(row::<S>(panel.logits, c, panel.width)) {
            *peak = simd.max_f32s(*peak, *logit);
        }
    }
    for c in 0..panel.clusters {
        let peaks = S::as_simd_f32s(&peaks[..panel.width]).0;
        let totals = S::as_mut_simd_f32s(&mut totals[..panel.width]).0;
        let shares = row::<S>(panel.shares, c, panel.width);
        let logits = row_mut::<S>(panel.logits, c, panel.width);
        for (((logit, share), peak), total) in logits.iter_mut().zip(shares).zip(peaks).zip(totals) {
            let weight = exp2(simd, simd.sub_f32s(*logit, *peak));
            *total = simd.add_f32s(*total, weight);
            *logit = simd.mul_f32s(weight, *share);
        }
    }
    (peaks, totals)
}

/// The sum of the values that each query sees, with the weights that its logits have become.
#[inline(always)]
fn weighted_values<S: Simd>(simd: S, panel: &mut Panel<'_>, dv: usize, values: &mut [f32]) {
    let (stride, queries) = (padded(dv), panel.queries.len());
    values[..queries * stride].fill(0.0);
    let size = |depth| Size { rows: queries, cols: stride, depth };
    let clusters = panel.clusters;
    let add = Add { data: &mut *values, stride };
    add_product(simd, size(clusters), Panel::by_query(panel.logits), panel.values.as_right(0..clusters), add);
    let weights = std::mem::take(&mut panel.logits);
    panel.spread(weights);
    let local = panel.local.len();
    let add = Add { data: values, stride };
    add_product(simd, size(local), Panel::by_query(panel.products), panel.local_values.as_right(0..local), add);
}

/// Adds entries with weights relative to `2^peak`, which sum to `total`, to a normalised row.
fn merge(out: &mut [f32], lse: &mut f64, values: &[f32], peak: f32, total: f32) {
    if total == 0.0 {
        return;
    }
    let (near, far) = (*lse * std::f64::consts::LOG2_E, f64::from(peak) + f64::from(total).log2());
    let most = near.max(far);
    let sum = (near - most).exp2() + (far - most).exp2();
    let (keep, take) = ((near - most).exp2() / sum, (f64::from(peak) - most).exp2() / sum);
    out.iter_mut().zip(values).for_each(|(out, &x)| *out = *out * keep as f32 + x * take as f32);
    *lse = (most + sum.log2()) * std::f64::consts::LN_2;
}
