//! Stochastic depth.

use burn::{
    module::Module,
    tensor::{Distribution, Tensor},
};

/// Leaves out a residual branch at random, per sample, while training. "Deep Networks with Stochastic Depth".
#[derive(Module, Debug)]
pub struct DropPath {
    /// Probability of leaving a branch out.
    pub prob: f64,
}

impl DropPath {
    /// `branch [batch, seq, d_model]`, with whole samples zero and the others scaled to keep the mean. The identity
    /// outside of training (on a device without autodiff).
    pub fn forward(&self, branch: Tensor<3>) -> Tensor<3> {
        if self.prob == 0.0 || !branch.device().is_autodiff() {
            return branch;
        }
        let keep = 1.0 - self.prob;
        let [batch, _, _] = branch.dims();
        let chosen = Tensor::random([batch, 1, 1], Distribution::Bernoulli(keep), &branch.device());
        branch * (chosen / keep)
    }
}
