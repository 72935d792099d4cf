//! What a kernel of distances learns: the order of `fna`, and every kernel's width.

use burn::{
    module::Param,
    tensor::{Device, Tensor, activation::sigmoid},
};

use super::MultiHeadAttention;

/// Logits of what starts at `alpha` per head, `[heads]`: `alpha = 1 + sigmoid(logit)` stays inside (1, 2), where the kernel
/// is one family.
pub(super) fn alpha_logits(alpha: &[f32], device: &Device) -> Param<Tensor<1>> {
    let alpha = Tensor::<1>::from_floats(alpha, device);
    Param::from_tensor((alpha.clone() - 1.0).div(-alpha + 2.0).log())
}

/// Logarithms of what starts at `width` per head, `[heads]`: a step changes it by a part of itself, whatever its size.
pub(super) fn logs(width: &[f32], device: &Device) -> Param<Tensor<1>> {
    Param::from_tensor(Tensor::<1>::from_floats(width, device).log())
}

impl MultiHeadAttention {
    /// The learned order of the Levy kernel per head, `[heads]`, in (1, 2); `None` where it is fixed.
    pub fn alpha(&self) -> Option<Tensor<1>> {
        Some(sigmoid(self.alpha_logit.as_ref()?.val()) + 1.0)
    }

    /// The learned length scale of `fna` per head, `[heads]`; `None` where it is fixed.
    pub fn kappa(&self) -> Option<Tensor<1>> {
        exponential(&self.kappa_log)
    }

    /// The learned bandwidth of the Laplacian kernel per head, `[heads]`; `None` where it is fixed.
    pub fn lambda(&self) -> Option<Tensor<1>> {
        exponential(&self.lambda_log)
    }

    /// The learned factor on squared distances of the Gaussian kernel per head, `[heads]`; `None` where it is fixed.
    pub fn scale(&self) -> Option<Tensor<1>> {
        exponential(&self.scale_log)
    }
}

fn exponential(log: &Option<Param<Tensor<1>>>) -> Option<Tensor<1>> {
    Some(log.as_ref()?.val().exp())
}
