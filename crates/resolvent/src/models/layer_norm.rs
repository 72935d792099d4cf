//! The layer norm of the models.

use burn::{
    module::{Module, Param},
    nn::Initializer,
    tensor::{Device, Tensor},
};

use crate::ops::layer_norm;

/// Tokens with mean 0 and variance 1 over their channels, times a learned gain, plus a learned bias. "Layer Normalization";
/// `burn::nn::LayerNorm` by parameters and values, with a gradient in one pass.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// The gain, `[dim]`.
    pub gamma: Param<Tensor<1>>,
    /// The bias, `[dim]`.
    pub beta: Param<Tensor<1>>,
    /// Added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// Gain 1 and bias 0.
    pub fn new(dim: usize, epsilon: f64, device: &Device) -> Self {
        let [gamma, beta] = [Initializer::Ones, Initializer::Zeros].map(|values| values.init([dim], device));
        Self { gamma, beta, epsilon }
    }

    /// `x [.., dim]` to the same shape.
    ///
    /// # Panics
    /// As [`layer_norm`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        layer_norm(x, self.gamma.val(), self.beta.val(), self.epsilon)
    }
}
