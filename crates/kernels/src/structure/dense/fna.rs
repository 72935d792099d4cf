//! Fractional neural attention: a decay with the distance, rows normalised. "Fractional neural attention for efficient
//! multiscale sequence processing".
//!
//! With a density exponent `a` the affinities are divided by the degrees of both tokens (eq. 40 to 42). The query's
//! cancels in its row; the key's is a bias `-a lse0_j` on its scores, with `lse0` from a first pass that has no values.
//! Backward, `dlse0_j = -a sum_i dS_ij` has to be known before any score's gradient is complete: the first pass makes it, and
//! the gradient of the values; the second the rest.

use std::f64::consts::LN_2;

use super::{
    backward::{self, Sums, Targets, Terms},
    bf16,
    distance::{Density, Distances, Frame, Kernel, frames, is_direct},
    forward,
    head::positions,
    log_sum::{self, LogSums, row_terms},
    pairing::Pairing,
    plan::pairs,
};
use crate::{
    Parameter, Plan, Precision, Result, Shape, Strategy,
    call::{Call, GradientTargets, Saved, Target, View},
    mechanism::{DistanceKernel, Fna, Manifold},
    score::distance::Scale,
    scratch::{cut, scratch_len},
};

/// One call's heads, before the density is known.
struct Heads<'a> {
    call: &'a Call<'a>,
    m: &'a Fna,
    centres: &'a [f32],
    units: &'a [f32],
}

impl<'a> Heads<'a> {
    fn new(call: &'a Call<'a>, m: &'a Fna, centres: &'a mut [f32], units: &'a mut [f32]) -> Self {
        // The length scale is measured in the same unit. Gradients are divided by it, twice where the kernel has no kink: the
        // larger it is, the less f32 leaves of them; the smaller, the less of squares of distances.
        let most = if m.kernel == DistanceKernel::Levy && !m.is_gaussian() { 1e26 } else { 1e8 };
        let Shape { head_dim, heads, .. } = call.shape;
        let kappa = |slice: usize| m.of_head(&call.extras, head_dim, heads, slice % heads)[0];
        frames(call, |slice| most / kappa(slice), centres, units);
        Self { call, m, centres, units }
    }

    /// The length scale and the exponent of a slice.
    fn scale(&self, slice: usize) -> [f64; 2] {
        let Shape { head_dim, heads, .. } = self.call.shape;
        self.m.of_head(&self.call.extras, head_dim, heads, slice % heads)
    }

    fn kernel(&self) -> Kernel {
        match self.m.kernel {
            _ if self.m.is_gaussian() => Kernel::Gaussian,
            DistanceKernel::Levy => Kernel::Levy,
            DistanceKernel::Student => Kernel::Student,
        }
    }

    /// A head, with the logarithms of the degrees that its affinities are divided by.
    fn pairing(&self, slice: usize, density: Option<Density<'a>>) -> Distances<'a> {
        let dim = self.call.shape.head_dim;
        let frame = Frame { centre: &self.centres[slice * dim..][..dim], inverse_unit: self.units[slice] };
        let [kappa, power] = self.scale(slice);
        let unit = if self.m.manifold == Manifold::Sphere { 1.0 } else { f64::from(frame.inverse_unit) };
        let scale = Scale { kappa: (kappa * unit).clamp(1e-30, 1e30) as f32, power: power as f32 };
        let (manifold, rounded) = (self.m.manifold, self.call.bf16.is_some());
        Distances { manifold, kernel: self.kernel(), scale, frame, density, columns_only: false, rounded }
    }
}

/// Writes `out` and, as `stats`, [`log_sum::SAVED`] numbers per row; with a density exponent, also those without it.
pub(crate) fn fna_forward(
    call: &Call<'_>,
    m: &Fna,
    out: &Target<'_>,
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let shape = call.shape;
    let ([centres, units, lse, slices, bias], work) = cut(work, forward_sizes(&shape, m));
    let slices = positions(0..shape.slices(), None, slices);
    let heads = Heads::new(call, m, centres, units);
    let lse: &mut [f64] = bytemuck::cast_slice_mut(lse);
    let (final_sums, plain_sums) = stats.split_at_mut(log_sum::SAVED * shape.slices() * shape.seq_q);
    if m.norm_exponent == 0.0 {
        forward::Stream { call, pairing: |n| heads.pairing(n, None), slices }.run_products(out, lse, work);
    } else {
        let v = View::in_one_piece(&[], shape.slices(), [shape.seq_kv, 0]);
        let degrees = Call { shape: Shape { value_dim: 0, ..shape }, v, ..*call };
        let pairing = |n| heads.pairing(n, None);
        let nothing = Target::in_one_piece(&mut [], shape.slices(), [shape.seq_q, 0]);
        forward::Stream { call: &degrees, pairing, slices }.run_products(&nothing, lse, work);
        log_sum::save(lse, plain_sums);
        key_bias(m, LogSums::of(plain_sums), bias);
        let density = |n: usize| Density { bias: &bias[n * shape.seq_kv..][..shape.seq_kv], shift: &[], gradient: &[] };
        let pairing = |n| heads.pairing(n, Some(density(n)));
        forward::Stream { call, pairing, slices }.run_products(out, lse, work);
    }
    log_sum::save(lse, final_sums);
    Ok(())
}

/// `-a lse0`, base 2; a token without keys has no degree.
fn key_bias(m: &Fna, logs: LogSums<'_>, bias: &mut [f32]) {
    for (row, bias) in bias.iter_mut().enumerate() {
        *bias = logs.base_two(row).map_or(0.0, |log| (-m.norm_exponent * log) as f32);
    }
}

/// Rows of tokens whose density is divided out.
fn density_rows(shape: &Shape, m: &Fna) -> usize {
    if m.norm_exponent == 0.0 { 0 } else { shape.slices() * shape.seq_q }
}

/// Centres; units; log-sum-exp (f64); slices; biases.
fn forward_sizes(shape: &Shape, m: &Fna) -> [usize; 5] {
    let (slices, rows) = (shape.slices(), shape.slices() * shape.seq_q);
    [slices * shape.head_dim, slices, 2 * rows, slices, density_rows(shape, m)]
}

/// `dS = P (dP - delta)` with `delta = <dout, out>` per row, then down to the tokens, `alpha` and `kappa`.
pub(crate) fn fna_backward(
    call: &Call<'_>,
    m: &Fna,
    saved: &Saved<'_>,
    gradients: GradientTargets<'_>,
    work: &mut [f32],
) -> Result<()> {
    let shape = call.shape;
    let (parts, work) = cut(work, backward_sizes(&shape, m));
    let [centres, units, value, shift, delta, factor, parameters, mut density @ ..] = parts;
    let heads = Heads::new(call, m, centres, units);
    let parameters: &mut [f64] = bytemuck::cast_slice_mut(parameters);
    value.fill(1.0);
    let (sums, plain_sums) = saved.stats.split_at(log_sum::SAVED * shape.slices() * shape.seq_q);
    row_terms(call, saved, LogSums::of(sums), [&mut *shift, &mut *delta, &mut *factor]);
    let rows = Rows { value, dout: saved.dout, shift, delta, factor };
    let GradientTargets { dq, dk, dv, mut extras } = gradients;
    let targets = Targets { dq, dk, dv: Some(dv) };
    if m.norm_exponent == 0.0 {
        let sums = Sums { columns: None, parameters: &mut *parameters };
        rows.stream(call, |n| heads.pairing(n, None)).run_products(targets, sums, work);
    } else {
        through_density(&heads, &rows, LogSums::of(plain_sums), targets, parameters, &mut density, work);
    }
    for h in 0..shape.heads {
        let [mut radial, mut values] = [0.0; 2];
        if m.norm_exponent != 0.0 {
            [radial, values] = typical_sums(&heads, LogSums::of(plain_sums), density[2], h);
        }
        for slice in parameters.chunks_exact(2 * backward::splits(&shape)).skip(h).step_by(shape.heads) {
            for sums in slice.chunks_exact(2) {
                radial += sums[0];
                values += sums[1];
            }
        }
        let [kappa, power] = heads.scale(h);
        // s depends on r / kappa, and is proportional to d_M + alpha.
        for (parameter, sum) in [(Parameter::Kappa, -radial / kappa), (Parameter::Alpha, values * LN_2 / power)] {
            if let Some(to) = extras.get(parameter) {
                to[h] = sum as f32;
            }
        }
    }
    Ok(())
}

/// What a typical pair of every row was short of in the sums for the parameters: with a density, the gradients of a row's
/// log-affinities add up to that of `lse0`, `-a` times the sum of the token's column. The columns of a batch element and head
/// add up to 0, so the mean of what they are multiplied with is taken out: it would multiply nothing but their rounding.
/// Columns of tokens without a degree add nothing themselves, and leave the mean times what the others then add up to.
fn typical_sums(heads: &Heads<'_>, logs: LogSums<'_>, columns: &[f32], h: usize) -> [f64; 2] {
    let (shape, [_, power]) = (heads.call.shape, heads.scale(h));
    let factors = |row: usize| {
        let value = f64::from(logs.split(row)?.0).min(0.0);
        let slope = match heads.kernel() {
            Kernel::Levy => power * (LN_2 * value / power).exp_m1(),
            Kernel::Student => power * (LN_2 * 2.0 * value / power).exp_m1(),
            Kernel::Gaussian => 2.0 * LN_2 * value,
        };
        Some([slope, value])
    };
    let mut sums = [0.0; 2];
    for slice in (h..shape.slices()).step_by(shape.heads) {
        let rows = slice * shape.seq_q..(slice + 1) * shape.seq_q;
        let with_degree = rows.clone().filter_map(factors);
        let (count, total) = with_degree.fold((0, [0.0; 2]), |(n, sum), of| (n + 1, [sum[0] + of[0], sum[1] + of[1]]));
        let mean = total.map(|total| total / f64::from(count.max(1)));
        for row in rows {
            let back = -heads.m.norm_exponent * f64::from(columns[row]);
            let [slope, value] = factors(row).map_or(mean.map(|mean| -mean), |of| [of[0] - mean[0], of[1] - mean[1]]);
            sums = [sums[0] + back * slope, sums[1] + back * value];
        }
    }
    sums
}

/// What both passes of the backward pass take per row.
struct Rows<'a> {
    value: &'a [f32],
    dout: View<'a>,
    shift: &'a [f32],
    delta: &'a [f32],
    factor: &'a [f32],
}

impl<'a> Rows<'a> {
    fn stream<F>(&self, call: &'a Call<'a>, pairing: F) -> backward::Stream<'a, F> {
        let terms = Terms { shift: self.shift, delta: self.delta, factor: self.factor };
        backward::Stream { call, pairing, value: self.value, dout: self.dout, terms }
    }
}

/// The two passes of the backward pass with a density exponent.
fn through_density(
    heads: &Heads<'_>,
    rows: &Rows<'_>,
    logs: LogSums<'_>,
    targets: Targets<'_>,
    parameters: &mut [f64],
    [bias, shift, columns, gradient]: &mut [&mut [f32]; 4],
    work: &mut [f32],
) {
    let (call, m, seq) = (heads.call, heads.m, heads.call.shape.seq_q);
    key_bias(m, logs, bias);
    shift.iter_mut().enumerate().for_each(|(row, shift)| *shift = logs.split(row).map_or(0.0, |(shift, _)| shift));
    let (bias, shift) = (&*bias, &*shift);
    let density = |n: usize| {
        let row = n * seq..(n + 1) * seq;
        Density { bias: &bias[row.clone()], shift: &shift[row], gradient: &[] }
    };
    let Targets { mut dq, mut dk, dv } = targets;
    let first = Targets { dq: dq.reborrow(), dk: dk.as_mut().map(Target::reborrow), dv };
    let sums = Sums { columns: Some(&mut *columns), parameters: &mut *parameters };
    let pairing = |n| Distances { columns_only: true, ..heads.pairing(n, Some(density(n))) };
    rows.stream(call, pairing).run_products(first, sums, work);
    for (row, (gradient, &column)) in gradient.iter_mut().zip(&**columns).enumerate() {
        *gradient = logs.split(row).map_or(0.0, |(_, factor)| -m.norm_exponent as f32 * column * factor);
    }
    let gradient = &*gradient;
    let pairing = |n| heads.pairing(n, Some(Density { gradient: &gradient[n * seq..][..seq], ..density(n) }));
    rows.stream(call, pairing).run_products(Targets { dq, dk, dv: None }, Sums { columns: None, parameters }, work);
}

/// Centres; units; factors on the gradients of the values; shift, delta and factor per row; sums for the parameters (f64);
/// biases, log-sum-exps, sums of columns and gradients of the log-sum-exps where a density is divided out.
fn backward_sizes(shape: &Shape, m: &Fna) -> [usize; 11] {
    let (slices, rows, dense) = (shape.slices(), shape.slices() * shape.seq_q, density_rows(shape, m));
    let parameters = 2 * Distances::PARAMETERS * slices * backward::splits(shape);
    [slices * shape.head_dim, slices, slices, rows, rows, rows, parameters, dense, dense, dense, dense]
}

/// f32 of working memory of both passes.
pub(super) fn scratch(m: &Fna, s: &Shape, precision: Precision) -> [usize; 2] {
    [
        scratch_len(forward_sizes(s, m)) + bf16::forward_work::<Distances<'_>>(s, precision),
        scratch_len(backward_sizes(s, m)) + bf16::backward_work::<Distances<'_>>(s, m.tied, precision),
    ]
}

/// What a call costs and needs.
pub(crate) fn fna_plan(m: &Fna, s: &Shape, causal: bool, precision: Precision) -> Plan {
    let (passes, pairs) = (if m.norm_exponent == 0.0 { 1 } else { 2 }, pairs(s, causal));
    let [d, dv] = [s.head_dim as u64, s.value_dim as u64];
    let rows = s.slices() * s.seq_q;
    // A squared difference takes a subtraction more per channel than a product.
    let distance = if is_direct(m.manifold, s.head_dim) { 3 * d } else { 2 * d };
    // A root, a logarithm and an exponential.
    let exps = if m.is_gaussian() { 1 } else { 3 };
    let tensors = (s.q_len() + if m.tied { 0 } else { s.k_len() } + s.v_len()) as u64;
    let streamed = s.seq_q.div_ceil(forward::QUERIES) as u64 * (s.k_len() + s.v_len()) as u64;
    let out = s.out_len() as u64;
    let [scratch_forward, scratch_backward] = scratch(m, s, precision);
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "distances are streamed in tiles and never stored",
        tile: (forward::QUERIES.min(s.seq_q), forward::KEYS.min(s.seq_kv)),
        flops_forward: pairs * (passes * distance + 2 * dv),
        flops_backward: pairs * (passes * (distance + 2 * dv) + 4 * d + 2 * dv),
        exps_forward: pairs * passes * exps,
        exps_backward: pairs * passes * exps,
        bytes_forward: 4 * passes * (s.q_len() as u64 + streamed + out),
        bytes_backward: 4 * passes * (2 * tensors + 2 * out),
        scratch_forward,
        scratch_backward,
        stats: log_sum::SAVED * (rows + density_rows(s, m)),
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
