//! Configuration of the language model.

use burn::{
    module::Initializer,
    nn::{DropoutConfig, EmbeddingConfig, Linear, LinearConfig},
    tensor::Device,
};
use resolvent_kernels as kernels;
use serde::{Deserialize, Serialize};

use super::{LanguageModel, TextConfig};
use crate::{
    Error, Mechanism, Result, Shape,
    attention::{MultiHeadAttentionConfig, field},
    mechanism::CausalClusters,
    models::{Activation, Block, NormOrder},
};

/// Standard deviation of the initial weights, as in GPT-2.
const STD: f64 = 0.02;

/// How a language model knows the order of its tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// An embedding per place.
    #[default]
    Learned,
    /// Queries and keys are turned by their places; where a mechanism has neither, it knows no order.
    Rotary,
}

/// Configuration of [`LanguageModel`].
///
/// `ssa` makes its clusters over the whole context, however many tokens there are, so that what a token's row is does not depend on
/// how many follow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageConfig {
    /// Sizes, projections, norms and dropout. Its mechanism counts where `layers` is empty.
    pub text: TextConfig,
    /// Most tokens that are read at once.
    pub context: usize,
    /// Heads of keys and values, see [`ProjectionConfig::kv_heads`](crate::attention::ProjectionConfig::kv_heads). Default null.
    pub kv_heads: Option<usize>,
    /// Default learned.
    pub positions: Positions,
    /// The mechanism of each block, in turn and again from the first: `[ssa, softmax]` alternates, as in "Spectral Sparse Attention",
    /// section 4.2. Empty: `text.mechanism` everywhere.
    pub layers: Vec<Mechanism>,
}

impl LanguageConfig {
    /// The names of [`LanguageConfig::preset`].
    pub const PRESETS: [&str; 2] = ["gpt2-small", "gpt2-medium"];

    /// A small model with the choices of GPT-2 (pre-norm, exact GELU, biases): width 128, 4 blocks of 4 heads, MLP 512.
    pub fn new(vocabulary: usize, context: usize, layers: Vec<Mechanism>) -> Self {
        let mechanism = layers.first().cloned().unwrap_or_default();
        let text = TextConfig {
            dim: 128,
            depth: 4,
            heads: 4,
            mlp_dim: 512,
            qkv_bias: true,
            norm: NormOrder::Pre,
            activation: Activation::Gelu,
            ..TextConfig::new(vocabulary, mechanism)
        };
        Self { text, context, kv_heads: None, positions: Positions::Learned, layers }
    }

    /// The published shapes, 50,257 tokens and a context of 1024: `gpt2-small` (124M weights) and `gpt2-medium` (355M).
    ///
    /// # Errors
    /// [`Error::Field`] listing the names.
    pub fn preset(name: &str, layers: Vec<Mechanism>) -> Result<Self> {
        let (dim, depth, heads) = match name {
            "gpt2-small" => (768, 12, 12),
            "gpt2-medium" => (1024, 24, 16),
            _ => {
                let expected = "one of: gpt2-small, gpt2-medium";
                return Err(Error::Field { field: "model", got: format!("`{name}`"), expected });
            }
        };
        let base = Self::new(50_257, 1024, layers);
        Ok(Self { text: TextConfig { dim, depth, heads, mlp_dim: 4 * dim, dropout: 0.1, ..base.text }, ..base })
    }

    /// Checks every field, and that every mechanism is strictly causal.
    ///
    /// # Errors
    /// [`Error::Field`], [`Error::Heads`] or [`Error::Mechanism`], naming the field or the mechanism.
    pub fn validate(&self) -> Result<()> {
        field("context", self.context, self.context >= 1, "at least 1")?;
        self.text.validate()?;
        let expected = "1: decoding makes the plan of every block anew";
        field("plan_layers", self.text.plan_layers, self.text.plan_layers == 1, expected)?;
        for layer in 1..=self.text.depth.min(self.layers.len().max(1)) {
            let attention = self.attention(layer);
            attention.validate()?;
            let mechanism = attention.operator();
            if let Some(m) = mechanism.clustering()
                && matches!(m.causal_clusters, CausalClusters::Block { .. })
            {
                let (what, why) = (
                    "causal_clusters = block",
                    "its tokens see later ones of their block, which a language model would only have to copy; use prefix",
                );
                return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
            }
            let (heads, dim) = (self.text.heads, self.text.dim);
            mechanism.check(&Shape::square(1, heads, self.context, dim / heads), true)?;
        }
        Ok(())
    }

    /// Builds the model on `device`: weights normal with a standard deviation of 0.02, those that write to the residual stream
    /// divided by the root of their number, biases zero.
    ///
    /// # Errors
    /// As [`LanguageConfig::validate`].
    pub fn try_init(&self, device: &Device) -> Result<LanguageModel> {
        self.validate()?;
        let text = &self.text;
        let normal = || Initializer::Normal { mean: 0.0, std: STD };
        let embedding = EmbeddingConfig::new(text.vocabulary, text.dim);
        let learned = self.positions == Positions::Learned;
        Ok(LanguageModel {
            embedding: embedding.with_initializer(normal()).init(device),
            positions: learned.then(|| normal().init([self.context, text.dim], device)),
            blocks: (1..=text.depth).map(|layer| self.block(layer, device)).collect::<Result<_>>()?,
            norm: (text.norm == NormOrder::Pre).then(|| text.layer_norm(device)),
            dropout: DropoutConfig::new(text.dropout).init(),
            context: self.context,
        })
    }

    /// Parameters of the model, without those of decays and of kernels' widths.
    pub fn parameter_count(&self) -> usize {
        let text = &self.text;
        let positions = if self.positions == Positions::Learned { self.context } else { 0 };
        let blocks = (1..=text.depth).map(|layer| text.block_config().parameter_count(&self.attention(layer)));
        let norm = if text.norm == NormOrder::Pre { 2 } else { 0 };
        (text.vocabulary + positions + norm) * text.dim + blocks.sum::<usize>()
    }

    /// The mechanism of block `layer`, counted from 1.
    pub fn mechanism(&self, layer: usize) -> &Mechanism {
        match self.layers.len() {
            0 => &self.text.mechanism,
            period => &self.layers[(layer - 1) % period],
        }
    }

    fn attention(&self, layer: usize) -> MultiHeadAttentionConfig {
        self.text
            .attention(self.mechanism(layer), layer)
            .with_kv_heads(self.kv_heads)
            .with_rotary(self.positions == Positions::Rotary)
            .with_causal_span(Some(self.context))
            .with_initializer(Initializer::Normal { mean: 0.0, std: STD })
    }

    fn block(&self, layer: usize, device: &Device) -> Result<Block> {
        let TextConfig { dim, depth, mlp_dim, .. } = self.text;
        let mut block = self.text.block_config().try_init(&self.attention(layer), device)?;
        let linear = |from, to, std| -> Linear {
            let linear = LinearConfig::new(from, to).with_initializer(Initializer::Normal { mean: 0.0, std });
            Linear { bias: Some(Initializer::Zeros.init([to], device)), ..linear.init(device) }
        };
        let residual = STD / (2.0 * depth as f64).sqrt();
        block.mlp_in = linear(dim, mlp_dim, STD);
        block.mlp_out = linear(mlp_dim, dim, residual);
        block.attention.output = linear(dim, dim, residual);
        let projection = &mut block.attention.projection;
        projection.bias = projection.bias.as_ref().map(|bias| Initializer::Zeros.init(bias.dims(), device));
        Ok(block)
    }
}
