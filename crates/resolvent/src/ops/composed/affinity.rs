//! Activated affinities whose sums cannot overflow.

use burn::tensor::{Tensor, activation};

use super::{super::gelu::composed_gelu, Call, magnitude};
use crate::mechanism::Activation;

/// `phi`, "Infinite Self-Attention", eq. 11.
pub(super) fn activate(x: Tensor<4>, activation: Activation) -> Tensor<4> {
    match activation {
        Activation::Relu => activation::relu(x),
        Activation::Abs => x.abs(),
        Activation::Gelu => composed_gelu(x),
    }
}

/// Queries and keys divided by their largest magnitude, and what that does to a sum of affinities.
///
/// relu and abs are positively homogeneous, so that a constant factor on the logits cancels between an affinity and its
/// norm if `eps` is divided by it: nothing of size `|q| |k|` is ever formed.
pub(super) struct Scaled {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    /// The largest magnitude of q, `[batch, heads, 1, 1]`.
    pub q_unit: Tensor<4>,
    /// Multiplies `q.k` of the divided vectors before the activation.
    pub factor: Option<Tensor<4>>,
    /// Added to norms of affinities, `[batch, heads, 1, 1]`.
    pub eps: Tensor<4>,
}

impl Scaled {
    pub(super) fn new(call: &Call, activation: Activation, scale: Option<f64>, eps: f64) -> Self {
        let (q_unit, k_unit) = (magnitude(&call.q), magnitude(&call.k));
        let scale = scale.unwrap_or_else(|| (call.shape.head_dim as f64).powf(-0.5));
        let (q, k) = (call.q.clone() / q_unit.clone(), call.k.clone() / k_unit.clone());
        let same = q_unit.zeros_like() + eps;
        let (factor, eps) = match activation {
            Activation::Gelu => (Some(q_unit.clone() * k_unit * scale), same),
            Activation::Relu | Activation::Abs if eps == 0.0 => (None, same),
            Activation::Relu | Activation::Abs => (None, same / q_unit.clone() / k_unit / scale),
        };
        Self { q, k, q_unit, factor, eps }
    }

    /// Logits of the divided vectors' products.
    pub(super) fn logits(&self, products: Tensor<4>) -> Tensor<4> {
        match &self.factor {
            Some(factor) => products * factor.clone(),
            None => products,
        }
    }
}
