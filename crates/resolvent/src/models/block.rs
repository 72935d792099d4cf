//! The transformer block.

use burn::{
    module::Module,
    nn::{Dropout, LayerNorm, Linear},
    tensor::Tensor,
};

use super::DropPath;
use crate::{
    Result,
    attention::{MhaInput, MultiHeadAttention},
    ops::gelu,
};

/// Pre-norm transformer block: `x += attention(norm(x)); x += mlp(norm(x))`, the MLP with the exact GELU.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the attention.
    pub attention_norm: LayerNorm,
    /// The attention.
    pub attention: MultiHeadAttention,
    /// Before the MLP.
    pub mlp_norm: LayerNorm,
    /// `[dim, mlp_dim]`.
    pub mlp_in: Linear,
    /// `[mlp_dim, dim]`.
    pub mlp_out: Linear,
    /// Dropout after the MLP.
    pub dropout: Dropout,
    /// Stochastic depth of both branches.
    pub drop_path: DropPath,
}

impl Block {
    /// `tokens [batch, seq, dim]` to the same shape.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::try_forward`].
    pub fn forward(&self, tokens: Tensor<3>) -> Result<Tensor<3>> {
        let normed = self.attention_norm.forward(tokens.clone());
        let attended = self.attention.try_forward(MhaInput::self_attn(normed))?.context;
        let tokens = tokens + self.drop_path.forward(attended);
        let hidden = gelu(self.mlp_in.forward(self.mlp_norm.forward(tokens.clone())));
        let changed = self.dropout.forward(self.mlp_out.forward(hidden));
        Ok(tokens + self.drop_path.forward(changed))
    }
}
