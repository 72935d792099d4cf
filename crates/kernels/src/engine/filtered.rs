//! SOFT with every token a landmark: the kernel of all pairs, and beside it the filter over the values, of which no pair knows.

use super::{backward, forward};
use crate::{
    Gradients, Mask, Mechanism, Parameter, Result,
    call::{Call, Saved, View},
    mechanism::Soft,
    structure::nystrom::values::Filter,
};

/// The same call with the queries masked as the keys that they are.
fn as_keys<'a>(call: &Call<'a>) -> Call<'a> {
    Call { mask: Mask { query: call.mask.key, ..call.mask }, ..*call }
}

/// Writes `out`; `values` are the four of `m`.
pub(crate) fn soft_forward(
    call: &Call<'_>,
    (m, values): (&Soft, &Mechanism),
    out: &mut [f32],
    stats: &mut [f32],
) -> Result<()> {
    let call = &as_keys(call);
    forward(call, values, out, stats, &mut [])?;
    Filter::of_soft(call, m).add_all(call.v.dense(), false, out);
    Ok(())
}

/// The gradients.
pub(crate) fn soft_backward(
    call: &Call<'_>,
    (m, values): (&Soft, &Mechanism),
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
) -> Result<()> {
    let call = &as_keys(call);
    let (filter, dout) = (Filter::of_soft(call, m), saved.dout.dense());
    let Gradients { dq, dk, dv, mut extras } = gradients;
    if let Some(dweight) = extras.get(Parameter::ValueWeight) {
        filter.gradient(dout, dweight);
    }
    // The kernel's part of the output is what the filter did not add.
    let filtered = m.value_conv > 0 && m.degree.is_some();
    let y = if filtered { filter.removed(saved.out.dense()) } else { Vec::new() };
    let sizes = [call.shape.seq_q, call.shape.value_dim];
    let out = if filtered { View::in_one_piece(&y, call.shape.slices(), sizes) } else { saved.out };
    let into = Gradients { dq, dk, dv: &mut *dv, extras };
    backward(call, values, &Saved { out, ..*saved }, into, &mut [])?;
    filter.add_all(dout, true, dv);
    Ok(())
}
