//! What makes a stage's tokens.

use burn::{
    module::Module,
    nn::{BatchNorm, Linear, conv::Conv2d},
    tensor::activation::relu,
};

use super::map::Map;
use crate::{Precision, models::LayerNorm, ops::linear_layer};

/// Tokens from pixels, or from the tokens of the stage before.
#[expect(clippy::large_enum_variant, reason = "a model has four")]
#[derive(Module, Debug)]
pub enum Embedding {
    /// Overlapping.
    Convolutions(ConvEmbedding),
    /// Side by side.
    Patches(PatchEmbedding),
}

impl Embedding {
    pub(super) fn forward(&self, map: Map) -> Map {
        match self {
            Self::Convolutions(embedding) => embedding.forward(map),
            Self::Patches(embedding) => embedding.forward(map),
        }
    }
}

/// 3 x 3 convolutions, each followed by its batch norm and ReLU.
#[derive(Module, Debug)]
pub struct ConvEmbedding {
    /// The convolutions, padded by 1.
    pub convs: Vec<Conv2d>,
    /// Their norms.
    pub norms: Vec<BatchNorm>,
}

impl ConvEmbedding {
    fn forward(&self, map: Map) -> Map {
        let layers = self.convs.iter().zip(&self.norms);
        Map::from_picture(layers.fold(map.picture(), |x, (conv, norm)| relu(norm.forward(conv.forward(x)))))
    }
}

/// Square patches, projected and normalised: a convolution whose stride is its size, as one matrix product.
#[derive(Module, Debug)]
pub struct PatchEmbedding {
    /// `[side * side * channels, dim]`; a patch lies row by row, its pixels' channels together.
    pub projection: Linear,
    /// After it.
    pub norm: LayerNorm,
    /// Side of a patch.
    pub side: usize,
}

impl PatchEmbedding {
    fn forward(&self, map: Map) -> Map {
        let side = self.side;
        let [batch, _, channels] = map.tokens.dims();
        let grid = map.grid.map(|n| n.div_ceil(side));
        let [missing_rows, missing_columns] = [0, 1].map(|i| grid[i] * side - map.grid[i]);
        let [height, width] = map.grid;
        let pixels = map.tokens.reshape([batch, height, width, channels]);
        let pixels = match missing_rows + missing_columns {
            0 => pixels,
            // The channels are the last axis: pad the two before it.
            _ => pixels.permute([0, 3, 1, 2]).pad((0, missing_columns, 0, missing_rows), 0.0).permute([0, 2, 3, 1]),
        };
        let patches = pixels
            .reshape([batch, grid[0], side, grid[1], side, channels])
            .permute([0, 1, 3, 2, 4, 5])
            .reshape([batch, grid[0] * grid[1], side * side * channels]);
        Map { tokens: self.norm.forward(linear_layer(Precision::Full, &self.projection, patches)), grid }
    }
}
