//! Pyramids: four stages of attention on ever coarser grids, with any mechanism. "Softmax-free Linear Transformers",
//! "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel".

mod build;
mod config;
mod count;
mod embedding;
mod map;
mod presets;

use burn::{
    module::{Module, Param},
    nn::{Dropout, Linear},
    tensor::{Tensor, ops::InterpolateMode},
};
use resolvent_kernels as kernels;

pub use config::{EmbeddingKind, Positions, PyramidConfig, StageConfig};
pub use embedding::{ConvEmbedding, Embedding, PatchEmbedding};

use map::Map;

use super::{Block, LayerNorm, Visible, positions::positions_at};
use crate::{Error, Result};

/// Pyramid of attention blocks. Built by [`PyramidConfig`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use resolvent::models::PyramidConfig;
/// let device = Device::flex();
/// let model = PyramidConfig::preset("soft-mini")?.init(&device);
/// let pictures = Tensor::zeros([2, 3, 32, 32], &device);
/// assert_eq!(model.forward(pictures.clone()).dims(), [2, 10]);
/// let [finest, .., coarsest] = model.feature_maps(pictures)?;
/// assert_eq!((finest.dims(), coarsest.dims()), ([2, 32, 16, 16], [2, 128, 2, 2]));
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Pyramid {
    /// The four stages.
    pub stages: Vec<Stage>,
    /// After the last stage.
    pub norm: LayerNorm,
    /// `[dim, classes]`.
    pub head: Linear,
    /// Colour channels.
    pub channels: usize,
}

/// One stage: what makes its tokens, and its blocks.
#[derive(Module, Debug)]
pub struct Stage {
    /// What makes the tokens.
    pub embedding: Embedding,
    /// Class token, `[1, 1, dim]`, if it joins here.
    pub cls: Option<Param<Tensor<3>>>,
    /// Learned positions, `[1, tokens, dim]`, the class token's first.
    pub positions: Option<Param<Tensor<3>>>,
    /// Dropout on the embedded tokens.
    pub dropout: Dropout,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Height and width of the grid that positions were learned on.
    pub grid: [usize; 2],
}

impl Stage {
    /// The class token, if the stage has one, and the tokens.
    fn forward(&self, input: Map) -> Result<(Option<Tensor<3>>, Map)> {
        let Map { tokens, grid } = self.embedding.forward(input);
        let [batch, places, dim] = tokens.dims();
        let mut tokens = match &self.cls {
            Some(cls) => Tensor::cat(vec![cls.val().expand([batch, 1, dim]), tokens], 1),
            None => tokens,
        };
        if let Some(positions) = &self.positions {
            tokens = tokens + positions_at(positions.val(), self.grid, grid, InterpolateMode::Bilinear);
        }
        tokens = self.dropout.forward(tokens);
        // Beside a class token they are no grid.
        let visible = Visible { grid: self.cls.is_none().then_some(grid), ..Visible::default() };
        for block in &self.blocks {
            tokens = block.forward_visible(tokens, &visible)?;
        }
        Ok(match self.cls {
            Some(_) => (Some(tokens.clone().narrow(1, 0, 1)), Map { tokens: tokens.narrow(1, 1, places), grid }),
            None => (None, Map { tokens, grid }),
        })
    }
}

impl Pyramid {
    /// Class logits `[batch, classes]` of `images [batch, channels, height, width]` of any size: sides that the strides do not
    /// divide are rounded up.
    ///
    /// # Panics
    /// Where [`Pyramid::try_forward`] returns an error, with its message.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        self.try_forward(images).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`Pyramid::forward`], with errors as values.
    ///
    /// # Errors
    /// Pictures of another number of channels or without pixels; whatever the attention refuses, such as a picture whose grid
    /// is smaller than a filter's window.
    pub fn try_forward(&self, images: Tensor<4>) -> Result<Tensor<2>> {
        Ok(self.head.forward(self.features(images)?))
    }

    /// What the head reads, `[batch, dim]`: the class token or the mean of the last stage, after the last norm.
    ///
    /// # Errors
    /// As [`Pyramid::try_forward`].
    pub fn features(&self, images: Tensor<4>) -> Result<Tensor<2>> {
        let mut cls = None;
        let last = self.run(images, |token, _| cls = token)?;
        Ok(match cls {
            Some(cls) => self.norm.forward(cls).squeeze_dim(1),
            None => self.norm.forward(last.tokens).mean_dim(1).squeeze_dim(1),
        })
    }

    /// The outputs of the four stages for dense prediction, `[batch, dim, height, width]` each: at strides 4, 8, 16 and 32 for
    /// the published models. Without the class token and the last norm.
    ///
    /// # Errors
    /// As [`Pyramid::try_forward`].
    pub fn feature_maps(&self, images: Tensor<4>) -> Result<[Tensor<4>; 4]> {
        let mut maps = Vec::with_capacity(4);
        self.run(images, |_, map| maps.push(Map { tokens: map.tokens.clone(), grid: map.grid }.picture()))?;
        Ok(maps.try_into().unwrap_or_else(|_| unreachable!("a pyramid has four stages")))
    }

    /// Runs all stages, shows each result to `visit`, and returns the last.
    fn run(&self, images: Tensor<4>, mut visit: impl FnMut(Option<Tensor<3>>, &Map)) -> Result<Map> {
        let shape = images.dims();
        if shape[1] != self.channels || shape.contains(&0) {
            return Err(kernels::Error::Shape {
                op: "pyramid",
                left: "images",
                left_shape: shape.to_vec(),
                right: "channels",
                right_shape: vec![self.channels],
                remedy: "expected [batch, channels, height, width] with the model's channels and no empty axis",
            }
            .into());
        }
        let mut map = Map::from_picture(images);
        for (index, stage) in self.stages.iter().enumerate() {
            let (cls, next) =
                stage.forward(map).map_err(|error| Error::Stage { stage: index + 1, error: error.into() })?;
            visit(cls, &next);
            map = next;
        }
        Ok(map)
    }
}
