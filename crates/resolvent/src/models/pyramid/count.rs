//! What a pyramid weighs and costs, without building it.

use super::{EmbeddingKind, Positions, PyramidConfig};
use crate::{Result, Shape, models::count::attention_multiply_adds};

impl PyramidConfig {
    /// Learned parameters of the model, without those of decays and kernels' widths (one per head and block, where they are
    /// learned).
    pub fn parameter_count(&self) -> usize {
        let grids = self.grids(self.image);
        let stage = |index: usize| {
            let stage = &self.stages[index];
            let block = self.block(index, 0).parameter_count(&self.attention(index));
            let positions = if self.positions == Positions::Learned { self.tokens(index, grids[index]) } else { 0 };
            let places = positions + usize::from(self.has_cls(index));
            self.embedding_weights(index) + 2 * self.normed_channels(index) + places * stage.dim + stage.depth * block
        };
        let last = self.stages[3].dim;
        (0..4).map(stage).sum::<usize>() + 2 * last + (last + 1) * self.classes
    }

    /// Multiply-adds of the logits of one picture of `image`: convolutions, projections, filters over the values, and the
    /// attention. Norms, activations, biases and sums are left out, and of landmarks their inverse and statistics: as the
    /// papers count.
    ///
    /// # Errors
    /// As [`PyramidConfig::validate`], for pictures of that size.
    pub fn multiply_adds(&self, image: [usize; 2]) -> Result<u64> {
        let config = Self { image, ..self.clone() };
        config.validate()?;
        let stages = (0..4).map(|index| config.stage_multiply_adds(index));
        let head = (self.stages[3].dim * self.classes) as u64;
        Ok(stages.sum::<Result<u64>>()? + head)
    }

    fn stage_multiply_adds(&self, index: usize) -> Result<u64> {
        let (stage, operator) = (&self.stages[index], self.attention(index).operator());
        let grid = self.grids(self.image)[index];
        let (tokens, dim) = (self.tokens(index, grid), stage.dim);
        let matrices = operator.projections() + 1 + 2 * stage.mlp_ratio;
        let taps = stage.value_conv.side().map_or(0, |side| side * side);
        let layers = tokens * (matrices * dim * dim + taps * dim);
        let shape = Shape::square(1, stage.heads, tokens, dim / stage.heads);
        let block = layers as u64 + attention_multiply_adds(&operator, &shape)?;
        Ok(self.embedding_multiply_adds(index) + stage.depth as u64 * block)
    }

    /// Weights and biases of the convolutions or the projection of stage `index`.
    fn embedding_weights(&self, index: usize) -> usize {
        match self.embedding {
            EmbeddingKind::Convolutions { stem } => {
                self.convolutions(index, stem).iter().map(|([from, to], _)| 9 * from * to).sum()
            }
            EmbeddingKind::Patches => {
                (self.strides()[index].pow(2) * self.channels_into(index) + 1) * self.stages[index].dim
            }
        }
    }

    /// Channels of the norms of the embedding.
    fn normed_channels(&self, index: usize) -> usize {
        match self.embedding {
            EmbeddingKind::Convolutions { stem } => self.convolutions(index, stem).iter().map(|([_, to], _)| to).sum(),
            EmbeddingKind::Patches => self.stages[index].dim,
        }
    }

    fn embedding_multiply_adds(&self, index: usize) -> u64 {
        let grids = self.grids(self.image);
        let mut grid = if index == 0 { self.image } else { grids[index - 1] };
        match self.embedding {
            EmbeddingKind::Convolutions { stem } => {
                let layers = self.convolutions(index, stem).into_iter().map(|([from, to], stride)| {
                    grid = grid.map(|side| side.div_ceil(stride));
                    (grid[0] * grid[1] * 9 * from * to) as u64
                });
                layers.sum()
            }
            EmbeddingKind::Patches => {
                let [height, width] = grids[index];
                let patch = self.strides()[index].pow(2) * self.channels_into(index);
                (height * width * patch * self.stages[index].dim) as u64
            }
        }
    }
}
