//! A [`Pyramid`] from its configuration.

use burn::{
    module::Initializer,
    nn::{BatchNormConfig, DropoutConfig, LinearConfig, PaddingConfig2d, conv::Conv2dConfig},
    tensor::Device,
};

use super::{ConvEmbedding, Embedding, EmbeddingKind, PatchEmbedding, Positions, Pyramid, PyramidConfig, Stage};
use crate::{
    Result,
    models::{LayerNorm, config::NORM_EPSILON},
};

/// Weights of linear layers, positions and the class token.
pub(super) const WEIGHTS: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

impl PyramidConfig {
    /// Builds the model on `device`.
    ///
    /// # Panics
    /// Where [`PyramidConfig::try_init`] returns an error, with its message.
    pub fn init(&self, device: &Device) -> Pyramid {
        self.try_init(device).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Builds the model on `device`.
    ///
    /// # Errors
    /// As [`PyramidConfig::validate`].
    pub fn try_init(&self, device: &Device) -> Result<Pyramid> {
        self.validate()?;
        let last = self.stages[3].dim;
        Ok(Pyramid {
            stages: (0..4).map(|index| self.stage(index, device)).collect::<Result<_>>()?,
            norm: norm(last, device),
            head: LinearConfig::new(last, self.classes).with_initializer(WEIGHTS).init(device),
            channels: self.channels,
        })
    }

    fn stage(&self, index: usize, device: &Device) -> Result<Stage> {
        let (stage, attention) = (&self.stages[index], self.attention(index));
        let grid = self.grids(self.image)[index];
        let block = |i: usize| self.block(index, i).try_init(&attention, device);
        let learned = self.positions == Positions::Learned;
        Ok(Stage {
            embedding: self.embedding(index, device),
            cls: self.has_cls(index).then(|| WEIGHTS.init([1, 1, stage.dim], device)),
            positions: learned.then(|| WEIGHTS.init([1, self.tokens(index, grid), stage.dim], device)),
            dropout: DropoutConfig::new(self.dropout).init(),
            blocks: (0..stage.depth).map(block).collect::<Result<_>>()?,
            grid,
        })
    }

    /// Channels and strides of the convolutions into stage `index`, the first stage's input first.
    pub(super) fn convolutions(&self, index: usize, stem: usize) -> Vec<([usize; 2], usize)> {
        let dim = self.stages[index].dim;
        if index > 0 {
            return vec![([self.channels_into(index), dim], 2)];
        }
        let [first, last] = [self.stride.min(2), self.stride.div_ceil(2)];
        vec![([self.channels, stem], first), ([stem, stem], 1), ([stem, dim], last)]
    }

    /// Channels that stage `index` reads.
    pub(super) fn channels_into(&self, index: usize) -> usize {
        if index == 0 { self.channels } else { self.stages[index - 1].dim }
    }

    fn embedding(&self, index: usize, device: &Device) -> Embedding {
        let dim = self.stages[index].dim;
        match self.embedding {
            EmbeddingKind::Convolutions { stem } => {
                let conv = |(channels, stride): ([usize; 2], usize)| {
                    Conv2dConfig::new(channels, [3, 3])
                        .with_stride([stride, stride])
                        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                        // The batch norm after it has its own.
                        .with_bias(false)
                        .with_initializer(Initializer::KaimingNormal { gain: 2f64.sqrt(), fan_out_only: true })
                        .init(device)
                };
                let sizes = self.convolutions(index, stem);
                Embedding::Convolutions(ConvEmbedding {
                    norms: sizes.iter().map(|&([_, out], _)| BatchNormConfig::new(out).init(device)).collect(),
                    convs: sizes.into_iter().map(conv).collect(),
                })
            }
            EmbeddingKind::Patches => {
                let side = self.strides()[index];
                let fan_in = side * side * self.channels_into(index);
                Embedding::Patches(PatchEmbedding {
                    projection: LinearConfig::new(fan_in, dim).init(device),
                    norm: norm(dim, device),
                    side,
                })
            }
        }
    }
}

fn norm(dim: usize, device: &Device) -> LayerNorm {
    LayerNorm::new(dim, NORM_EPSILON, device)
}
