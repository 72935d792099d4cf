//! The fused path of compositions that are no preset.

use crate::{
    Gradients, Plan, Result, Shape,
    call::{Call, Saved},
    mechanism::Composed,
};

/// What a call does and needs; none where there is no fused path.
pub(crate) fn plan(_: &Composed, _: &Shape, _: bool) -> Option<Plan> {
    None
}

/// Writes `out` and what the backward pass needs.
pub(crate) fn forward(_: &Call<'_>, _: &Composed, _: &mut [f32], _: &mut [f32], _: &mut [f32]) -> Result<()> {
    Ok(())
}

/// The gradients.
pub(crate) fn backward(_: &Call<'_>, _: &Composed, _: &Saved<'_>, _: Gradients<'_, f32>, _: &mut [f32]) -> Result<()> {
    Ok(())
}
