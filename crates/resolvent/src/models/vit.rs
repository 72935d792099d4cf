//! The vision transformer.

use burn::{
    module::{Module, Param},
    nn::{Dropout, Linear},
    tensor::{Tensor, ops::InterpolateMode},
};
use resolvent_kernels as kernels;

use super::{Block, LayerNorm, Visible, positions::positions_at};
use crate::{Precision, Result, ops::linear_layer};

/// Vision transformer with any attention mechanism: patches, learned positions, pre-norm blocks, a linear head. Built by
/// [`super::VitConfig`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use resolvent::models::VitConfig;
/// let device = Device::flex();
/// let model = VitConfig::preset("vit-tiny-28")?.init(&device);
/// let logits = model.forward(Tensor::zeros([2, 1, 28, 28], &device));
/// assert_eq!(logits.dims(), [2, 10]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Vit {
    /// Patch embedding, `[channels * patch * patch, dim]`: a convolution whose stride is its size.
    pub patch: Linear,
    /// Class token, `[1, 1, dim]`, if the head reads one.
    pub cls: Option<Param<Tensor<3>>>,
    /// Position embeddings, `[1, tokens, dim]`, the class token's first.
    pub positions: Param<Tensor<3>>,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// After the last block.
    pub norm: LayerNorm,
    /// Layer with tanh before the head, if configured.
    pub pre_logits: Option<Linear>,
    /// `[dim, classes]`.
    pub head: Linear,
    /// Dropout on the embedded tokens.
    pub dropout: Dropout,
    /// Side of a patch.
    pub patch_side: usize,
    /// Height and width the positions were learned at.
    pub image: [usize; 2],
    /// Colour channels.
    pub channels: usize,
    /// Blocks in turn that use one plan of clusters.
    pub plan_layers: usize,
}

impl Vit {
    /// Class logits `[batch, classes]` of `images [batch, channels, height, width]`. At another size than the configured
    /// one (multiples of the patch) the positions are interpolated bicubically.
    ///
    /// # Panics
    /// Where [`Vit::try_forward`] returns an error, with its message.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        self.try_forward(images).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`Vit::forward`], with errors as values.
    ///
    /// # Errors
    /// Pictures of another number of channels or not divisible into patches; whatever the attention refuses.
    pub fn try_forward(&self, images: Tensor<4>) -> Result<Tensor<2>> {
        let features = self.features(images)?;
        Ok(self.head.forward(match &self.pre_logits {
            Some(layer) => layer.forward(features).tanh(),
            None => features,
        }))
    }

    /// What the head reads, `[batch, dim]`: the class token, or the mean of the patches, after the last norm.
    ///
    /// # Errors
    /// As [`Vit::try_forward`].
    pub fn features(&self, images: Tensor<4>) -> Result<Tensor<2>> {
        let [.., height, width] = images.dims();
        let mut tokens = self.embed(images)?;
        let grid = self.cls.is_none().then(|| [height, width].map(|side| side / self.patch_side));
        let mut visible = Visible { grid, ..Visible::default() };
        for (index, block) in self.blocks.iter().enumerate() {
            visible = visible.sharing(index, self.plan_layers);
            tokens = block.forward_visible(tokens, &visible)?;
        }
        Ok(match self.cls {
            // The norm acts on tokens one by one: only the one that is read needs it.
            Some(_) => self.norm.forward(tokens.narrow(1, 0, 1)).squeeze_dim(1),
            None => self.norm.forward(tokens).mean_dim(1).squeeze_dim(1),
        })
    }

    /// Tokens with their positions, `[batch, tokens, dim]`.
    fn embed(&self, images: Tensor<4>) -> Result<Tensor<3>> {
        let side = self.patch_side;
        let [batch, channels, height, width] = images.dims();
        if channels != self.channels || height % side != 0 || width % side != 0 || height * width == 0 {
            let remedy = "expected [batch, channels, height, width] with sides that are multiples of the patch";
            return Err(kernels::Error::Shape {
                op: "vit",
                left: "images",
                left_shape: vec![batch, channels, height, width],
                right: "patch",
                right_shape: vec![self.channels, side, side],
                remedy,
            }
            .into());
        }
        let [rows, columns] = [height / side, width / side];
        let patches = images
            .reshape([batch, channels, rows, side, columns, side])
            .permute([0, 2, 4, 1, 3, 5])
            .reshape([batch, rows * columns, channels * side * side]);
        let tokens = linear_layer(Precision::Full, &self.patch, patches);
        let tokens = match &self.cls {
            Some(cls) => {
                let [_, _, dim] = tokens.dims();
                Tensor::cat(vec![cls.val().expand([batch, 1, dim]), tokens], 1)
            }
            None => tokens,
        };
        Ok(self.dropout.forward(tokens + self.positions_at([rows, columns])))
    }

    /// The positions for a grid of patches, `[1, tokens, dim]`.
    fn positions_at(&self, grid: [usize; 2]) -> Tensor<3> {
        let learned = self.image.map(|side| side / self.patch_side);
        positions_at(self.positions.val(), learned, grid, InterpolateMode::Bicubic)
    }
}
