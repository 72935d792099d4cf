//! Configuration of the models of text.

use burn::{
    module::Initializer,
    nn::{DropoutConfig, EmbeddingConfig, LinearConfig},
    tensor::Device,
};
use serde::{Deserialize, Serialize};

use super::{TextClassifier, TextEncoder, TextMatcher};
use crate::{
    Mechanism, Parameter, Precision, Result, Strategy,
    attention::{CodebookConfig, GammaSchedule, MultiHeadAttentionConfig, Trained, field},
    models::{Activation, Block, LayerNorm, NormOrder, block::BlockConfig},
};

/// Of the layer norms of models of text.
const NORM_EPSILON: f64 = 1e-5;

/// Configuration of [`TextEncoder`] and of what is built on it. The defaults are those of the small classifiers of "Fractional
/// neural attention for efficient multiscale sequence processing": one block of one head, post-norm, ReLU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextConfig {
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Channels of a token. Default 8.
    pub dim: usize,
    /// Number of blocks. Default 1.
    pub depth: usize,
    /// Heads; they divide `dim`. Default 1.
    pub heads: usize,
    /// Hidden channels of the MLP. Default 256.
    pub mlp_dim: usize,
    /// The attention mechanism.
    pub mechanism: Mechanism,
    /// One projection for queries and keys; null as in [`ProjectionConfig::tied`](crate::attention::ProjectionConfig::tied). Default null.
    pub tied: Option<bool>,
    /// Biases of the query, key and value projections. Default false.
    pub qkv_bias: bool,
    /// Query and key maps that stay orthogonal. Default false.
    pub orthogonal: bool,
    /// Learn the decay per head and block, where the mechanism has one. Default true.
    pub gamma_trainable: bool,
    /// What the decay of a block is made of. Default constant.
    pub gamma_schedule: GammaSchedule,
    /// Learn the order of the Levy kernel, where the mechanism has one. Default false.
    pub alpha_trainable: bool,
    /// Learn the length scale of the kernel, where the mechanism has one. Default false.
    pub kappa_trainable: bool,
    /// Where blocks normalise. Default post.
    pub norm: NormOrder,
    /// Inside the MLP. Default ReLU.
    pub activation: Activation,
    /// Dropout on the embedded tokens, after the attention and after the MLP. Default 0.
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0.
    pub weight_dropout: f64,
    /// Centroids of clusters that follow the tokens, where the mechanism has clusters. Default null.
    pub codebook: Option<CodebookConfig>,
    /// Blocks of an encoder in turn that use one plan of clusters, that of the first of them. Default 1.
    pub plan_layers: usize,
    /// Weights of the blocks' projections in {-1, 0, 1} times a scale. Default false.
    pub ternary: bool,
    /// Of the products in the blocks, see [`MultiHeadAttentionConfig::precision`]. Default full.
    #[serde(default)]
    pub precision: Precision,
    /// How the operator is applied. Default auto.
    pub strategy: Strategy,
}

impl TextConfig {
    /// The defaults.
    pub fn new(vocabulary: usize, mechanism: Mechanism) -> Self {
        Self {
            vocabulary,
            dim: 8,
            depth: 1,
            heads: 1,
            mlp_dim: 256,
            mechanism,
            tied: None,
            qkv_bias: false,
            orthogonal: false,
            gamma_trainable: true,
            gamma_schedule: GammaSchedule::Constant,
            alpha_trainable: false,
            kappa_trainable: false,
            norm: NormOrder::Post,
            activation: Activation::Relu,
            dropout: 0.0,
            weight_dropout: 0.0,
            codebook: None,
            plan_layers: 1,
            ternary: false,
            precision: Precision::Full,
            strategy: Strategy::Auto,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Field`], [`crate::Error::Heads`] or [`crate::Error::Mechanism`], naming the field.
    pub fn validate(&self) -> Result<()> {
        field("vocabulary", self.vocabulary, self.vocabulary >= 1, "at least 1")?;
        field("depth", self.depth, self.depth >= 1, "at least 1")?;
        field("mlp_dim", self.mlp_dim, self.mlp_dim >= 1, "at least 1")?;
        field("plan_layers", self.plan_layers, self.plan_layers >= 1, "at least 1")?;
        self.attention(&self.mechanism, 1).validate()
    }

    /// Builds the encoder on `device`.
    ///
    /// # Errors
    /// As [`TextConfig::validate`]; a causal mechanism, or one without an output per token.
    pub fn try_init(&self, device: &Device) -> Result<TextEncoder> {
        self.validate()?;
        field("mechanism.causal", true, !self.mechanism.causal, "false: an encoder reads whole texts")?;
        let embedding = EmbeddingConfig::new(self.vocabulary, self.dim);
        Ok(TextEncoder {
            embedding: embedding.with_initializer(Initializer::Normal { mean: 0.0, std: 1.0 }).init(device),
            blocks: (1..=self.depth).map(|layer| self.block(&self.mechanism, layer, device)).collect::<Result<_>>()?,
            norm: (self.norm == NormOrder::Pre).then(|| self.layer_norm(device)),
            dropout: DropoutConfig::new(self.dropout).init(),
            plan_layers: self.plan_layers,
        })
    }

    /// Builds a classifier of `classes` classes on `device`.
    ///
    /// # Errors
    /// As [`TextConfig::try_init`].
    pub fn try_init_classifier(&self, classes: usize, device: &Device) -> Result<TextClassifier> {
        field("classes", classes, classes >= 1, "at least 1")?;
        let encoder = self.try_init(device)?;
        Ok(TextClassifier { encoder, head: LinearConfig::new(self.dim, classes).init(device) })
    }

    /// Builds a classifier of pairs of texts, of `classes` classes, on `device`; the hidden layer of its head has `mlp_dim` channels.
    ///
    /// # Errors
    /// As [`TextConfig::try_init`].
    pub fn try_init_matcher(&self, classes: usize, device: &Device) -> Result<TextMatcher> {
        field("classes", classes, classes >= 1, "at least 1")?;
        let encoder = self.try_init(device)?;
        Ok(TextMatcher {
            encoder,
            hidden: LinearConfig::new(4 * self.dim, self.mlp_dim).init(device),
            head: LinearConfig::new(self.mlp_dim, classes).init(device),
        })
    }

    pub(super) fn block(&self, mechanism: &Mechanism, layer: usize, device: &Device) -> Result<Block> {
        self.block_config().try_init(&self.attention(mechanism, layer), device)
    }

    pub(super) fn block_config(&self) -> BlockConfig {
        BlockConfig {
            mlp_dim: self.mlp_dim,
            order: self.norm,
            activation: self.activation,
            epsilon: NORM_EPSILON,
            drop_path: 0.0,
        }
    }

    pub(super) fn layer_norm(&self, device: &Device) -> LayerNorm {
        LayerNorm::new(self.dim, NORM_EPSILON, device)
    }

    pub(super) fn attention(&self, mechanism: &Mechanism, layer: usize) -> MultiHeadAttentionConfig {
        let trained = Trained::default()
            .with(Parameter::Gamma, self.gamma_trainable)
            .with(Parameter::Alpha, self.alpha_trainable)
            .with(Parameter::Kappa, self.kappa_trainable);
        MultiHeadAttentionConfig::new(self.dim, self.heads, mechanism.clone())
            .with_tied(self.tied)
            .with_qkv_bias(self.qkv_bias)
            .with_orthogonal(self.orthogonal)
            .with_trained(trained)
            .with_gamma_schedule(self.gamma_schedule)
            .with_layer(layer)
            .with_codebook(self.codebook)
            .with_ternary(self.ternary)
            .with_dropout(self.dropout)
            .with_weight_dropout(self.weight_dropout)
            .with_precision(self.precision)
            .with_strategy(self.strategy)
    }
}
