//! Configuration and presets of [`Vit`].

use burn::{
    module::Initializer,
    nn::{DropoutConfig, LinearConfig},
    tensor::Device,
};
use serde::{Deserialize, Serialize};

use super::{
    Activation, LayerNorm, NormOrder, Vit,
    block::{BlockConfig, drop_path_at},
};
use crate::{
    Error, Mechanism, Parameter, Precision, Result, Strategy,
    attention::{CodebookConfig, GammaSchedule, MultiHeadAttentionConfig, Trained, field},
};

/// Of the layer norms of vision transformers.
pub(super) const NORM_EPSILON: f64 = 1e-6;

/// What the head reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pool {
    /// A learned token beside the patches.
    Cls,
    /// The mean of the patches.
    #[default]
    Mean,
}

/// Configuration of [`Vit`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
    /// Height and width of a picture, multiples of `patch`.
    pub image: [usize; 2],
    /// Colour channels.
    pub channels: usize,
    /// Side of a square patch.
    pub patch: usize,
    /// Channels of a token. Default 64.
    pub dim: usize,
    /// Number of blocks. Default 4.
    pub depth: usize,
    /// Heads; they divide `dim`. Default 4.
    pub heads: usize,
    /// Hidden channels of the MLP. Default 128.
    pub mlp_dim: usize,
    /// Number of classes.
    pub classes: usize,
    /// The attention mechanism.
    pub mechanism: Mechanism,
    /// What the head reads. Default mean.
    #[serde(default)]
    pub pool: Pool,
    /// One projection for queries and keys; null as in [`ProjectionConfig::tied`](crate::attention::ProjectionConfig::tied). Default null.
    #[serde(default)]
    pub tied: Option<bool>,
    /// Biases of the query, key and value projections. Default true.
    #[serde(default = "yes")]
    pub qkv_bias: bool,
    /// Learn the decay per head and block. Default true.
    #[serde(default = "yes")]
    pub gamma_trainable: bool,
    /// What the decay of a block is made of. Default constant.
    #[serde(default)]
    pub gamma_schedule: GammaSchedule,
    /// A further `dim x dim` projection after the output projection. Default false.
    #[serde(default)]
    pub extra_proj: bool,
    /// A `dim x dim` layer with tanh before the head. Default false.
    #[serde(default)]
    pub pre_logits: bool,
    /// Dropout after the attention and after the MLP. Default 0.
    #[serde(default)]
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0.
    #[serde(default)]
    pub weight_dropout: f64,
    /// Stochastic depth of the last block; it rises linearly from 0 at the first. Default 0.
    #[serde(default)]
    pub drop_path: f64,
    /// Centroids of clusters that follow the tokens, where the mechanism has clusters. Default null.
    #[serde(default)]
    pub codebook: Option<CodebookConfig>,
    /// Blocks in turn that use one plan of clusters, that of the first of them. Default 1.
    #[serde(default = "one")]
    pub plan_layers: usize,
    /// Weights of the blocks' projections in {-1, 0, 1} times a scale. Default false.
    #[serde(default)]
    pub ternary: bool,
    /// Of the products in the blocks, see [`MultiHeadAttentionConfig::precision`]. Default full.
    #[serde(default)]
    pub precision: Precision,
    /// How the operator is applied. Default auto.
    #[serde(default)]
    pub strategy: Strategy,
}

/// The default of a number that changes nothing.
fn one() -> usize {
    1
}

/// The default of a field that is on.
pub(super) fn yes() -> bool {
    true
}

impl VitConfig {
    /// Names that [`VitConfig::preset`] knows.
    pub const PRESETS: [&'static str; 8] = [
        "infvit-linear-4",
        "infvit-pure-4",
        "vit-4",
        "infvit-linear-24",
        "infvit-pure-24",
        "vit-24",
        "vit-tiny-28",
        "vit-tiny-32",
    ];

    /// The defaults, for pictures of `image` height and width and `channels` colours.
    pub fn new(image: [usize; 2], channels: usize, patch: usize, classes: usize, mechanism: Mechanism) -> Self {
        Self {
            image,
            channels,
            patch,
            dim: 64,
            depth: 4,
            heads: 4,
            mlp_dim: 128,
            classes,
            mechanism,
            pool: Pool::default(),
            tied: None,
            qkv_bias: true,
            gamma_trainable: true,
            gamma_schedule: GammaSchedule::Constant,
            extra_proj: false,
            pre_logits: false,
            dropout: 0.0,
            weight_dropout: 0.0,
            drop_path: 0.0,
            codebook: None,
            plan_layers: 1,
            ternary: false,
            precision: Precision::Full,
            strategy: Strategy::Auto,
        }
    }

    /// A model by name: those of "Infinite Self-Attention", table 2 (224 x 224 x 3, 1000 classes, without the extra
    /// projections that reproduce its parameter counts: set `extra_proj` and `pre_logits`), and small ones for small
    /// pictures with softmax attention: `vit-tiny-28` (28 x 28 x 1, patch 4, 10 classes) and `vit-tiny-32` (32 x 32 x 3).
    ///
    /// # Errors
    /// [`Error::Field`] listing the names.
    pub fn preset(name: &str) -> Result<Self> {
        let published = |mechanism: &str, depth: usize, heads: usize| -> Result<Self> {
            let base = Self::new([224, 224], 3, 16, 1000, Mechanism::preset(mechanism)?);
            Ok(Self { dim: 1024, depth, heads, mlp_dim: 4096, pool: Pool::Cls, ..base })
        };
        let tiny = |image, channels| -> Result<Self> {
            let base = Self::new(image, channels, 4, 10, Mechanism::preset("softmax")?);
            Ok(Self { dim: 96, mlp_dim: 192, ..base })
        };
        match name {
            "infvit-linear-4" => published("linear-infsa", 4, 64),
            "infvit-pure-4" => published("infsa", 4, 64),
            "vit-4" => published("softmax", 4, 16),
            "infvit-linear-24" => published("linear-infsa", 24, 16),
            "infvit-pure-24" => published("infsa", 24, 16),
            "vit-24" => published("softmax", 24, 16),
            "vit-tiny-28" => tiny([28, 28], 1),
            "vit-tiny-32" => tiny([32, 32], 3),
            _ => {
                let expected = "one of: infvit-linear-4, infvit-pure-4, vit-4, infvit-linear-24, infvit-pure-24, vit-24, \
                                vit-tiny-28, vit-tiny-32";
                Err(Error::Field { field: "model", got: format!("`{name}`"), expected })
            }
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Field`], [`Error::Heads`] or [`Error::Mechanism`], naming the field.
    pub fn validate(&self) -> Result<()> {
        let Self { image: [height, width], patch, drop_path, .. } = *self;
        field("patch", patch, patch >= 1, "at least 1")?;
        let whole = |side: usize| side >= patch && side.is_multiple_of(patch);
        field("image", format!("{height} x {width}"), whole(height) && whole(width), "positive multiples of `patch`")?;
        field("channels", self.channels, self.channels >= 1, "at least 1")?;
        field("depth", self.depth, self.depth >= 1, "at least 1")?;
        field("mlp_dim", self.mlp_dim, self.mlp_dim >= 1, "at least 1")?;
        field("classes", self.classes, self.classes >= 1, "at least 1")?;
        field("plan_layers", self.plan_layers, self.plan_layers >= 1, "at least 1")?;
        field("drop_path", drop_path, (0.0..1.0).contains(&drop_path), "in [0, 1)")?;
        self.attention(1).validate()?;
        let sizes = crate::Shape::square(1, self.heads, self.tokens(), self.dim / self.heads);
        self.attention(1).mechanism.check(&sizes, false)?;
        let (grid, own) = (self.mechanism.grid(), self.grid());
        let expected = "absent: the patches are the grid";
        field("mechanism.grid", format!("{grid:?}"), own.is_none() || grid.is_none() || grid == own, expected)?;
        field("mechanism.causal", true, !self.mechanism.causal, "false: patches have no order")
    }

    /// Patches of a picture.
    pub fn patches(&self) -> usize {
        let [height, width] = self.image;
        (height / self.patch) * (width / self.patch)
    }

    /// Height and width of the patches' grid, on which landmarks are windows; with a class token, which has no place on it, the
    /// tokens are a sequence.
    fn grid(&self) -> Option<[usize; 2]> {
        (self.pool == Pool::Mean).then(|| self.image.map(|side| side / self.patch))
    }

    /// Tokens of a picture: its patches, and the class token where there is one.
    pub fn tokens(&self) -> usize {
        self.patches() + usize::from(self.pool == Pool::Cls)
    }

    /// How many landmarks a block has, where its mechanism has landmarks.
    pub fn landmarks(&self) -> Option<usize> {
        self.attention(1).landmarks(self.tokens())
    }

    /// Parameters of the model, without the logits of the decays (`depth * heads`, where they are learned).
    pub fn parameter_count(&self) -> usize {
        let Self { dim, depth, classes, .. } = *self;
        let linear = |from: usize, to: usize| from * to + to;
        let block = self.block(1).parameter_count(&self.attention(1));
        let cls = if self.pool == Pool::Cls { dim } else { 0 };
        let pre_logits = if self.pre_logits { linear(dim, dim) } else { 0 };
        linear(self.patch_len(), dim)
            + cls
            + self.tokens() * dim
            + depth * block
            + 2 * dim
            + pre_logits
            + linear(dim, classes)
    }

    /// Builds the model on `device`.
    ///
    /// # Panics
    /// Where [`VitConfig::try_init`] returns an error, with its message.
    pub fn init(&self, device: &Device) -> Vit {
        self.try_init(device).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Builds the model on `device`.
    ///
    /// # Errors
    /// As [`VitConfig::validate`].
    pub fn try_init(&self, device: &Device) -> Result<Vit> {
        self.validate()?;
        let Self { dim, depth, .. } = *self;
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        let blocks = (1..=depth).map(|layer| self.block(layer).try_init(&self.attention(layer), device));
        Ok(Vit {
            patch: LinearConfig::new(self.patch_len(), dim).init(device),
            cls: (self.pool == Pool::Cls).then(|| normal.init([1, 1, dim], device)),
            positions: normal.init([1, self.tokens(), dim], device),
            blocks: blocks.collect::<Result<_>>()?,
            norm: LayerNorm::new(dim, NORM_EPSILON, device),
            pre_logits: self.pre_logits.then(|| LinearConfig::new(dim, dim).init(device)),
            head: LinearConfig::new(dim, self.classes).init(device),
            dropout: DropoutConfig::new(self.dropout).init(),
            patch_side: self.patch,
            image: self.image,
            channels: self.channels,
            plan_layers: self.plan_layers,
        })
    }

    fn block(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            mlp_dim: self.mlp_dim,
            order: NormOrder::Pre,
            activation: Activation::Gelu,
            epsilon: NORM_EPSILON,
            drop_path: drop_path_at(self.drop_path, layer - 1, self.depth),
        }
    }

    pub(super) fn attention(&self, layer: usize) -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(self.dim, self.heads, self.mechanism.clone().with_max_tokens(self.tokens()))
            .with_tied(self.tied)
            .with_qkv_bias(self.qkv_bias)
            .with_extra_proj(self.extra_proj)
            .with_trained(Trained::default().with(Parameter::Gamma, self.gamma_trainable))
            .with_gamma_schedule(self.gamma_schedule)
            .with_layer(layer)
            .with_codebook(self.codebook)
            .with_ternary(self.ternary)
            .with_dropout(self.dropout)
            .with_weight_dropout(self.weight_dropout)
            .with_grid(self.grid())
            .with_precision(self.precision)
            .with_strategy(self.strategy)
    }

    pub(super) fn patch_len(&self) -> usize {
        self.channels * self.patch * self.patch
    }
}
