//! The functional surface: [`attend`] and [`plan`].

mod autodiff;
mod bound;
mod calibration;
mod clusters;
mod composed;
mod depthwise;
mod fused;
mod gelu;
mod inputs;
mod layer_norm;
mod linear;
mod mlp;
mod packed;
mod plan;
mod rows;
mod sequences;
mod token_weights;

pub use calibration::{Calibration, Crossing, Timed};
pub use clusters::SharedClusters;
pub(crate) use clusters::plan_of_call;
pub use depthwise::depthwise;
pub use gelu::gelu;
pub use inputs::{Extras, Inputs, Mask, Output};
pub use layer_norm::layer_norm;
pub use linear::linear;
pub(crate) use linear::{linear_in, linear_layer};
pub(crate) use mlp::mlp;
pub(crate) use packed::{Projected, attend_packed, attend_packed_sequences, merge_heads, repeat_heads, split_heads};
pub use plan::{Plan, Strategy, plan};
pub(crate) use plan::{check_precision, is_flex};
pub use sequences::attend_sequences;
pub(crate) use sequences::{draws, map as map_sequences};
pub use token_weights::token_weights;

use crate::{Mechanism, Result};

/// Applies `mechanism` to `inputs`: `out = A(q, k) v`, differentiable in every input.
///
/// `out` is `[batch, heads, seq_q, value_dim]` (`[batch, heads, 1, value_dim]` for `linear-infsa` with `broadcast` off),
/// in the storage type of `q`; arithmetic is f32 or wider. Masked tokens are absent: they change no output and get
/// exactly zero gradient, and a masked query's row is zero.
///
/// # Errors
/// [`crate::Error`]: tensors that do not fit, a combination the mechanism is not defined for, a strategy that the device
/// does not have, a solver that reached the user's iteration limit.
pub fn attend(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, strategy: Strategy) -> Result<Output> {
    let decision = plan::decide(inputs, mechanism, mask, strategy)?;
    match decision.operator {
        Some(operator) => fused::attend(inputs, mask, operator),
        None => composed::attend(&inputs.repeated(), mechanism, mask, &decision.shape),
    }
}
