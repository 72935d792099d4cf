//! The transformer block.

use burn::{
    module::Module,
    nn::{self, DropoutConfig, Linear, LinearConfig},
    tensor::{Bool, Device, Tensor, activation::relu},
};
use resolvent_layers::TernaryMatrix;
use serde::{Deserialize, Serialize};

use super::{DropPath, LayerNorm};
use crate::{
    Dropout, Result, Sequences,
    attention::{HELD_TOKENS, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, Past},
    ops::{SharedClusters, gelu, mlp},
    ternary::{self, Products},
};

/// Where a block normalises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormOrder {
    /// What a branch reads: `x += branch(norm(x))`.
    #[default]
    Pre,
    /// What the residual stream becomes: `x = norm(x + branch(x))`. "Attention Is All You Need".
    Post,
}

/// The function between the two layers of an MLP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// The exact GELU.
    #[default]
    Gelu,
    /// `max(x, 0)`.
    Relu,
}

impl Activation {
    fn of<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Gelu => gelu(x),
            Self::Relu => relu(x),
        }
    }
}

/// Which tokens a block's self-attention sees, and how they lie.
#[derive(Debug, Clone, Default)]
pub struct Visible {
    /// `[batch, seq]`, true = padding: absent as keys and as queries.
    pub padding: Option<Tensor<2, Bool>>,
    /// `[batch, seq]`, true = hidden: absent as keys, but they still ask.
    pub hidden: Option<Tensor<2, Bool>>,
    /// No token sees a later one.
    pub causal: bool,
    /// Height and width of the tokens' grid, see [`MhaInput::grid`].
    pub grid: Option<[usize; 2]>,
    /// Pairs left out at random, see [`MhaInput::dropout`].
    pub dropout: Option<Dropout>,
    /// A plan of clusters that several blocks use, see [`MhaInput::share_clusters`].
    pub clusters: Option<SharedClusters>,
    /// Sequences end to end in a batch of one, see [`MhaInput::sequences`].
    pub sequences: Option<Sequences>,
}

impl Visible {
    /// What block number `index`, from 0, sees, where every `layers` blocks in turn use one plan of clusters.
    pub(super) fn sharing(mut self, index: usize, layers: usize) -> Self {
        if layers > 1 && index.is_multiple_of(layers) {
            self.clusters = Some(SharedClusters::default());
        }
        self
    }
}

/// Transformer block: attention and MLP, each around a residual connection and with a layer norm.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the attention, or after it.
    pub attention_norm: LayerNorm,
    /// The attention.
    pub attention: MultiHeadAttention,
    /// Before the MLP, or after it.
    pub mlp_norm: LayerNorm,
    /// `[dim, mlp_dim]`.
    pub mlp_in: Linear,
    /// `[mlp_dim, dim]`.
    pub mlp_out: Linear,
    /// Dropout after the MLP.
    pub dropout: nn::Dropout,
    /// Stochastic depth of both branches.
    pub drop_path: DropPath,
    /// Where it normalises.
    #[module(skip)]
    pub order: NormOrder,
    /// Inside the MLP.
    #[module(skip)]
    pub activation: Activation,
}

/// What a [`Block`] is made of beside its attention.
pub(crate) struct BlockConfig {
    pub mlp_dim: usize,
    pub order: NormOrder,
    pub activation: Activation,
    /// Of the layer norms.
    pub epsilon: f64,
    pub drop_path: f64,
}

impl BlockConfig {
    /// The block around `attention`, whose dropout and distribution of weights it shares.
    pub fn try_init(&self, attention: &MultiHeadAttentionConfig, device: &Device) -> Result<Block> {
        let dim = attention.d_model;
        let linear = |from: usize, to: usize| {
            LinearConfig::new(from, to).with_initializer(attention.projection.initializer.clone()).init(device)
        };
        let norm = || LayerNorm::new(dim, self.epsilon, device);
        Ok(Block {
            attention_norm: norm(),
            attention: attention.try_init(device)?,
            mlp_norm: norm(),
            mlp_in: linear(dim, self.mlp_dim),
            mlp_out: linear(self.mlp_dim, dim),
            dropout: DropoutConfig::new(attention.dropout.output).init(),
            drop_path: DropPath { prob: self.drop_path },
            order: self.order,
            activation: self.activation,
        })
    }

    /// Parameters of the block, without those of the decay and of the kernel's width.
    pub fn parameter_count(&self, attention: &MultiHeadAttentionConfig) -> usize {
        let (dim, hidden) = (attention.d_model, self.mlp_dim);
        attention.parameter_count() + 2 * dim * hidden + hidden + dim + 4 * dim
    }
}

/// Stochastic depth of block `index` of `depth`, counted from 0: it rises linearly from 0 to `last`.
pub(super) fn drop_path_at(last: f64, index: usize, depth: usize) -> f64 {
    last * index as f64 / (depth - 1).max(1) as f64
}

impl Block {
    /// `tokens [batch, seq, dim]` to the same shape, every token seeing every other.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::try_forward`].
    pub fn forward(&self, tokens: Tensor<3>) -> Result<Tensor<3>> {
        self.forward_visible(tokens, &Visible::default())
    }

    /// As [`Block::forward`], with some tokens hidden from others.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::try_forward`].
    pub fn forward_visible(&self, tokens: Tensor<3>, visible: &Visible) -> Result<Tensor<3>> {
        self.mlp(self.attend(tokens, visible)?)
    }

    /// The attention and its residual connection.
    pub(super) fn attend(&self, tokens: Tensor<3>, visible: &Visible) -> Result<Tensor<3>> {
        residual(self.order, &self.attention_norm, tokens, |tokens| {
            let mut input = MhaInput::self_attn(tokens);
            if let Some(padding) = &visible.padding {
                input = input.mask_pad(padding.clone());
            }
            if let Some(grid) = visible.grid {
                input = input.grid(grid);
            }
            if let Some(hidden) = &visible.hidden {
                input = input.hide_keys(hidden.clone());
            }
            if let Some(dropout) = visible.dropout {
                input = input.dropout(dropout);
            }
            if let Some(clusters) = &visible.clusters {
                input = input.share_clusters(clusters.clone());
            }
            if let Some(sequences) = &visible.sequences {
                input = input.sequences(sequences.clone());
            }
            let input = if visible.causal { input.causal() } else { input };
            Ok(self.drop_path.forward(self.attention.try_forward(input)?.context))
        })
    }

    /// The ternary matrices of attention and MLP; none where weights are real.
    ///
    /// # Errors
    /// [`crate::Error::Mechanism`] for weights that are not finite.
    pub fn ternary_matrices(&self) -> Result<Vec<TernaryMatrix>> {
        let mut matrices = self.attention.ternary_matrices()?;
        for layer in [&self.mlp_in, &self.mlp_out].into_iter().filter(|_| self.attention.ternary) {
            let [_, width] = layer.weight.dims();
            matrices.extend(self.attention.packed.matrices(&layer.weight.val(), &[width])?.to_vec());
        }
        Ok(matrices)
    }

    /// The block for running alone, without the real values of ternary weights: see [`MultiHeadAttention::into_packed`].
    ///
    /// # Errors
    /// As [`MultiHeadAttention::into_packed`].
    pub fn into_packed(mut self) -> Result<Self> {
        self.attention = self.attention.into_packed()?;
        if let Some(packed) = self.attention.packed() {
            let alone = |layer: Linear| {
                let [_, width] = layer.weight.dims();
                ternary::only_packed(layer, &[width], packed)
            };
            (self.mlp_in, self.mlp_out) = (alone(self.mlp_in)?, alone(self.mlp_out)?);
        }
        Ok(self)
    }

    /// The next `tokens [batch, seq, dim]`, no token seeing a later one, and those so far in `past` (`None` before the first).
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend_next`].
    pub fn forward_next(&self, tokens: Tensor<3>, past: &mut Option<Past>) -> Result<Tensor<3>> {
        self.mlp(self.attend_next(tokens, past)?)
    }

    /// The attention of the next tokens and its residual connection.
    pub(super) fn attend_next(&self, tokens: Tensor<3>, past: &mut Option<Past>) -> Result<Tensor<3>> {
        residual(self.order, &self.attention_norm, tokens, |tokens| {
            Ok(self.drop_path.forward(self.attention.attend_next(tokens, past)?))
        })
    }

    /// The MLP and its residual connection. It acts on tokens one by one: where nothing is learned, the hidden layer of a long
    /// sequence is never held as a whole.
    pub(super) fn mlp(&self, tokens: Tensor<3>) -> Result<Tensor<3>> {
        let [batch, seq, dim] = tokens.dims();
        if seq <= HELD_TOKENS || tokens.device().is_autodiff() {
            return self.mlp_of(tokens);
        }
        // Into the same memory: the tokens are the largest tensor there is.
        (0..seq).step_by(HELD_TOKENS).try_fold(tokens, |tokens, from| {
            let to = seq.min(from + HELD_TOKENS);
            let part = self.mlp_of(tokens.clone().narrow(1, from, to - from))?;
            Ok(tokens.slice_assign([0..batch, from..to, 0..dim], part))
        })
    }

    fn mlp_of(&self, tokens: Tensor<3>) -> Result<Tensor<3>> {
        residual(self.order, &self.mlp_norm, tokens, |tokens| {
            self.attention.check_precision(&tokens)?;
            let mapped = match (self.activation, self.attention.products()) {
                (Activation::Gelu, Products::Real(precision)) => mlp(precision, tokens, [&self.mlp_in, &self.mlp_out]),
                (activation, products) => {
                    let hidden = activation.of(ternary::layer(&self.mlp_in, tokens, products));
                    ternary::layer(&self.mlp_out, hidden, products)
                }
            };
            Ok(self.drop_path.forward(self.dropout.forward(mapped)))
        })
    }
}

/// `tokens` with what `branch` adds to them, normalised before or after.
pub(super) fn residual(
    order: NormOrder,
    norm: &LayerNorm,
    tokens: Tensor<3>,
    branch: impl FnOnce(Tensor<3>) -> Result<Tensor<3>>,
) -> Result<Tensor<3>> {
    match order {
        NormOrder::Pre => Ok(tokens.clone() + branch(norm.forward(tokens))?),
        NormOrder::Post => Ok(norm.forward(tokens.clone() + branch(tokens)?)),
    }
}
