//! Configuration of [`Pyramid`].

use serde::{Deserialize, Serialize};

use crate::{
    Error, Mechanism, Parameter, Precision, Result, Strategy,
    attention::{MultiHeadAttentionConfig, Trained, ValueConv, field},
    mechanism::{Landmarks, PoolWindows},
    models::{
        Activation, NormOrder, Pool,
        block::{BlockConfig, drop_path_at},
        config::{NORM_EPSILON, yes},
    },
};

/// How pixels and tokens become the tokens of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum EmbeddingKind {
    /// Overlapping: 3 x 3 convolutions without bias, each with batch norm and ReLU; three into the first stage, of which the
    /// first two have `stem` channels, then one between stages. "Softmax-free Linear Transformers", section 4.1.
    Convolutions {
        /// Channels inside the stem.
        stem: usize,
    },
    /// Patches side by side, projected and normalised by a layer norm. "LaplacianFormer", section 5.1, after "Pyramid Vision
    /// Transformer". A picture that they do not divide is padded with zeros on the right and below.
    Patches,
}

/// How tokens know where they are, beside what filters and windows tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// A learned vector per place and stage, interpolated bilinearly at other sizes.
    Learned,
    /// Queries and keys are turned by row and column.
    Rotary,
    /// Not at all.
    None,
}

/// One of the four stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageConfig {
    /// Channels of a token.
    pub dim: usize,
    /// Heads; they divide `dim`.
    pub heads: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Hidden channels of the MLP as a multiple of `dim`. Default 4.
    #[serde(default = "four")]
    pub mlp_ratio: usize,
    /// Side of the windows that landmarks are made of; it takes the place of the mechanism's own. 1, the default: none, the
    /// kernel itself. Without effect where [`PyramidConfig::landmark_count`] is used.
    #[serde(default = "one")]
    pub ratio: usize,
    /// The filter over the values. Default none.
    #[serde(default)]
    pub value_conv: ValueConv,
    /// Where the norms stand. Default pre.
    #[serde(default)]
    pub norm: NormOrder,
    /// Attention of this stage in place of the model's. Default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<Mechanism>,
}

/// Configuration of [`super::Pyramid`]: four stages, each on a grid half as high and wide as the one before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PyramidConfig {
    /// Height and width of the pictures that positions are learned for.
    pub image: [usize; 2],
    /// Colour channels.
    pub channels: usize,
    /// Number of classes.
    pub classes: usize,
    /// Attention of every stage that names no other. A mechanism with landmarks takes the stage's grid and `ratio`, and where
    /// the ratio is 1 the kernel whose approximation it is. One that pools a fixed number of landmarks keeps them, as if
    /// `landmark_count` said so.
    pub mechanism: Mechanism,
    /// Pool as many landmarks in every stage, whatever its `ratio` and the size of the pictures, so that the cost is linear in
    /// the pixels; it takes the place of windows of a side, learned filters among them. A stage has no more than tokens, and one
    /// with the class token, which has no place on a grid, the kernel itself. Without effect on mechanisms without such windows.
    /// At least 1; on a grid of more tokens a product of rows and columns of windows that it has room for, such as the papers' 49 at
    /// 224 x 224. Default null: the ratios decide.
    #[serde(default)]
    pub landmark_count: Option<usize>,
    /// How tokens are made.
    pub embedding: EmbeddingKind,
    /// Pixels per token of the first stage, in height and width: 1, 2 or 4 with convolutions.
    pub stride: usize,
    /// The stages.
    pub stages: [StageConfig; 4],
    /// How tokens know where they are.
    pub positions: Positions,
    /// What the head reads: the mean of the last stage, or a class token that joins its tokens.
    pub pool: Pool,
    /// One projection for queries and keys; null as in [`ProjectionConfig::tied`](crate::attention::ProjectionConfig::tied). Default null.
    #[serde(default)]
    pub tied: Option<bool>,
    /// Learn the decay per head and block, where the mechanism has one. Default true.
    #[serde(default = "yes")]
    pub gamma_trainable: bool,
    /// Learn the bandwidth of the Laplacian kernel per head and block. Default false.
    #[serde(default)]
    pub lambda_trainable: bool,
    /// Learn the scale of the Gaussian kernel per head and block. Default false.
    #[serde(default)]
    pub scale_trainable: bool,
    /// Dropout on embedded tokens, after the attention and after the MLP. Default 0.
    #[serde(default)]
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0.
    #[serde(default)]
    pub weight_dropout: f64,
    /// Stochastic depth of the last block; it rises linearly from 0 at the first. Default 0.
    #[serde(default)]
    pub drop_path: f64,
    /// Of the products in the blocks, see [`MultiHeadAttentionConfig::precision`]. Default full.
    #[serde(default)]
    pub precision: Precision,
    /// How the operators are applied. Default auto.
    #[serde(default)]
    pub strategy: Strategy,
}

fn one() -> usize {
    1
}

fn four() -> usize {
    4
}

impl PyramidConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Field`], naming the field; [`Error::Stage`], with the stage.
    pub fn validate(&self) -> Result<()> {
        let Self { image: [height, width], stride, drop_path, .. } = *self;
        field("image", format!("{height} x {width}"), height >= 1 && width >= 1, "at least 1 x 1")?;
        field("channels", self.channels, self.channels >= 1, "at least 1")?;
        field("classes", self.classes, self.classes >= 1, "at least 1")?;
        field("drop_path", drop_path, (0.0..1.0).contains(&drop_path), "in [0, 1)")?;
        field("stride", stride, stride >= 1, "at least 1")?;
        let count = self.landmark_count.unwrap_or(1);
        field("landmark_count", count, count >= 1, "null or at least 1")?;
        if let EmbeddingKind::Convolutions { stem } = self.embedding {
            field("embedding.stem", stem, stem >= 1, "at least 1")?;
            field("stride", stride, [1, 2, 4].contains(&stride), "1, 2 or 4 with convolutions")?;
        }
        if self.pool == Pool::Cls {
            let last = &self.stages[3];
            let alone = last.ratio == 1 && last.value_conv == ValueConv::None;
            field("stages.4", "on a grid", alone, "ratio 1 without value_conv: a class token has no place on a grid")?;
            let turned = self.positions == Positions::Rotary;
            field("positions", "rotary", !turned, "learned or none with a class token, which has no place to turn by")?;
        }
        (0..self.stages.len()).try_for_each(|index| {
            self.validate_stage(index).map_err(|error| Error::Stage { stage: index + 1, error: error.into() })
        })
    }

    fn validate_stage(&self, index: usize) -> Result<()> {
        let stage = &self.stages[index];
        field("depth", stage.depth, stage.depth >= 1, "at least 1")?;
        field("mlp_ratio", stage.mlp_ratio, stage.mlp_ratio >= 1, "at least 1")?;
        field("ratio", stage.ratio, stage.ratio >= 1, "at least 1")?;
        let attention = self.attention(index);
        let filter = attention.mechanism.value_conv();
        if let Some(grid) = attention.mechanism.grid() {
            field("mechanism.grid", format!("{grid:?}"), false, "absent: every stage has its own grid")?;
        }
        field("mechanism.value_conv", filter, filter == 0, "0: a stage's `value_conv` filters the values")?;
        attention.validate()?;
        field("mechanism.causal", true, !attention.mechanism.causal, "false: places of a picture have no order")
    }

    /// The same model for pictures of other sizes, colours and classes.
    #[must_use]
    pub fn for_pictures(self, image: [usize; 2], channels: usize, classes: usize) -> Self {
        Self { image, channels, classes, ..self }
    }

    /// How many landmarks each stage has on pictures of `image`; `None` where it has none.
    pub fn landmarks(&self, image: [usize; 2]) -> [Option<usize>; 4] {
        let config = Self { image, ..self.clone() };
        let grids = config.grids(image);
        std::array::from_fn(|index| config.attention(index).landmarks(config.tokens(index, grids[index])))
    }

    /// Height and width of every stage's grid for pictures of `image`: what the strides leave, rounded up.
    pub fn grids(&self, image: [usize; 2]) -> [[usize; 2]; 4] {
        let mut grid = image;
        self.strides().map(|stride| {
            grid = grid.map(|side| side.div_ceil(stride));
            grid
        })
    }

    /// What each stage divides its input's sides by.
    pub(super) fn strides(&self) -> [usize; 4] {
        [self.stride, 2, 2, 2]
    }

    /// Blocks of all stages.
    fn depth(&self) -> usize {
        self.stages.iter().map(|stage| stage.depth).sum()
    }

    /// Whether stage `index` has the class token.
    pub(super) fn has_cls(&self, index: usize) -> bool {
        index == 3 && self.pool == Pool::Cls
    }

    /// Tokens of stage `index` on `grid`.
    pub(super) fn tokens(&self, index: usize, [height, width]: [usize; 2]) -> usize {
        height * width + usize::from(self.has_cls(index))
    }

    /// Block `i` of stage `index`, but for its attention.
    pub(super) fn block(&self, index: usize, i: usize) -> BlockConfig {
        let stage = &self.stages[index];
        let before: usize = self.stages[..index].iter().map(|stage| stage.depth).sum();
        BlockConfig {
            mlp_dim: stage.mlp_ratio * stage.dim,
            order: stage.norm,
            activation: Activation::Gelu,
            epsilon: NORM_EPSILON,
            drop_path: drop_path_at(self.drop_path, before + i, self.depth()),
        }
    }

    /// Attention of stage `index`.
    pub(super) fn attention(&self, index: usize) -> MultiHeadAttentionConfig {
        let stage = &self.stages[index];
        let mechanism = stage.mechanism.as_ref().unwrap_or(&self.mechanism).clone();
        let grid = (!self.has_cls(index)).then(|| self.grids(self.image)[index]);
        let trained = Trained::default()
            .with(Parameter::Gamma, self.gamma_trainable)
            .with(Parameter::Lambda, self.lambda_trainable)
            .with(Parameter::Scale, self.scale_trainable);
        let count = grid.and(self.landmark_count.or(pooled_count(&mechanism)));
        let mechanism = with_windows(mechanism, stage.ratio, count);
        let tokens = self.tokens(index, self.grids(self.image)[index]);
        MultiHeadAttentionConfig::new(stage.dim, stage.heads, mechanism.with_max_tokens(tokens))
            .with_tied(self.tied)
            .with_trained(trained)
            .with_grid(grid)
            .with_rotary(self.positions == Positions::Rotary)
            .with_value_conv(stage.value_conv)
            .with_dropout(self.dropout)
            .with_weight_dropout(self.weight_dropout)
            .with_precision(self.precision)
            .with_strategy(self.strategy)
            .with_initializer(super::build::WEIGHTS)
    }
}

/// How many landmarks the mechanism pools, where it says so.
fn pooled_count(mechanism: &Mechanism) -> Option<usize> {
    match mechanism.landmark_kind() {
        Some(Landmarks::Pool(PoolWindows::Count(count))) => Some(count),
        _ => None,
    }
}

/// The mechanism with `count` windows, or with windows of `ratio`, or, for a ratio of 1, without landmarks.
fn with_windows(mechanism: Mechanism, ratio: usize, count: Option<usize>) -> Mechanism {
    if ratio == 1 && count.is_none() {
        return mechanism.without_landmarks();
    }
    mechanism.with_landmarks(|landmarks| match (landmarks, count) {
        (Landmarks::Pool(_) | Landmarks::Conv { .. } | Landmarks::Stride { .. }, Some(count)) => {
            Landmarks::Pool(PoolWindows::Count(count))
        }
        (Landmarks::Pool(_), None) => Landmarks::Pool(PoolWindows::Ratio(ratio)),
        (Landmarks::Conv { .. }, None) => Landmarks::Conv { ratio },
        (Landmarks::Stride { .. }, None) => Landmarks::Stride { ratio },
        (counted, _) => counted,
    })
}
