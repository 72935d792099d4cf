//! Softmax attention: dot + exp, rows normalised.

use super::{
    backward::{self, Sums, Targets, Terms},
    bf16, forward,
    head::positions,
    log_sum::{self, LogSums, row_terms},
    normalise::Row,
    pairing::Dot,
};
use crate::{
    Precision, Result, Shape,
    call::{Call, GradientTargets, Saved, Target},
    mechanism,
    score::Exp,
    scratch::{cut, scratch_len},
};

fn scale(m: &mechanism::Softmax, shape: &Shape) -> f64 {
    m.scale.unwrap_or((shape.head_dim as f64).powf(-0.5))
}

fn pairing(m: &mechanism::Softmax, shape: &Shape) -> Dot<'static, Row<Exp>> {
    let scale = scale(m, shape);
    Dot { norm: Row(Exp), logit: (scale * std::f64::consts::LOG2_E) as f32, rows: &[], chain: scale as f32 }
}

/// Writes `out` and, as `stats`, [`log_sum::SAVED`] numbers per row.
pub(crate) fn softmax_forward(
    call: &Call<'_>,
    m: &mechanism::Softmax,
    out: &Target<'_>,
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let ([lse, slices], work) = cut(work, forward_sizes(&call.shape));
    let slices = positions(0..call.shape.slices(), None, slices);
    let lse: &mut [f64] = bytemuck::cast_slice_mut(lse);
    forward::Stream { call, pairing: |_| pairing(m, &call.shape), slices }.run_products(out, lse, work);
    log_sum::save(lse, stats);
    Ok(())
}

/// Log-sum-exp (f64); slices.
fn forward_sizes(shape: &Shape) -> [usize; 2] {
    [2 * shape.slices() * shape.seq_q, shape.slices()]
}

/// f32 of working memory of [`softmax_forward`].
pub(super) fn forward_work(shape: &Shape, precision: Precision) -> usize {
    scratch_len(forward_sizes(shape)) + bf16::forward_work::<Dot<'_, Row<Exp>>>(shape, precision)
}

/// `dS = P (dP - delta)` with `delta = <dout, out>` per row.
pub(crate) fn softmax_backward(
    call: &Call<'_>,
    m: &mechanism::Softmax,
    saved: &Saved<'_>,
    gradients: GradientTargets<'_>,
    work: &mut [f32],
) -> Result<()> {
    let ([value, shift, delta, factor], work) = cut(work, backward_sizes(&call.shape));
    value.fill(1.0);
    row_terms(call, saved, LogSums::of(saved.stats), [&mut *shift, &mut *delta, &mut *factor]);
    let terms = Terms { shift, delta, factor };
    let GradientTargets { dq, dk, dv, .. } = gradients;
    let stream = backward::Stream { call, pairing: |_| pairing(m, &call.shape), value, dout: saved.dout, terms };
    stream.run_products(Targets { dq, dk, dv: Some(dv) }, Sums::default(), work);
    Ok(())
}

/// Factors on the gradients of the values; shift, delta and factor per row.
fn backward_sizes(shape: &Shape) -> [usize; 4] {
    let (slices, rows) = (shape.slices(), shape.slices() * shape.seq_q);
    [slices, rows, rows, rows]
}

/// f32 of working memory of [`softmax_backward`].
pub(super) fn backward_work(shape: &Shape, tied: bool, precision: Precision) -> usize {
    scratch_len(backward_sizes(shape)) + bf16::backward_work::<Dot<'_, Row<Exp>>>(shape, tied, precision)
}
