//! The learned order and length scale of `fna`.

use burn::{
    module::Param,
    tensor::{Device, Tensor, activation::sigmoid},
};

use super::MultiHeadAttention;
use crate::{Mechanism, Parameter, Shape};

/// One logit per head, `[heads]`: `alpha = 1 + sigmoid(logit)` stays inside (1, 2), where the kernel is one family.
pub(super) fn alpha_logits(alpha: f64, heads: usize, device: &Device) -> Param<Tensor<1>> {
    Param::from_tensor(Tensor::full([heads], ((alpha - 1.0) / (2.0 - alpha)).ln(), device))
}

/// One logarithm per head, `[heads]`: a step changes `kappa` by a part of itself, whatever its size.
pub(super) fn kappa_logs(mechanism: &Mechanism, heads: usize, head_dim: usize, device: &Device) -> Param<Tensor<1>> {
    let start = mechanism.parameter_default(Parameter::Kappa, &Shape::square(1, heads, 1, head_dim));
    Param::from_tensor(Tensor::<1>::from_floats(start.as_slice(), device).log())
}

impl MultiHeadAttention {
    /// The learned order of the Levy kernel per head, `[heads]`, in (1, 2); `None` where it is fixed.
    pub fn alpha(&self) -> Option<Tensor<1>> {
        Some(sigmoid(self.alpha_logit.as_ref()?.val()) + 1.0)
    }

    /// The learned length scale per head, `[heads]`; `None` where it is fixed.
    pub fn kappa(&self) -> Option<Tensor<1>> {
        Some(self.kappa_log.as_ref()?.val().exp())
    }
}
