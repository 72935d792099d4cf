//! The models that classify pictures.

use burn::{
    module::Module,
    tensor::{Int, Tensor},
};
use resolvent::{
    attention::MultiHeadAttention,
    models::{Block, Pyramid, TextClassifier, Vit},
};

use crate::Result;

/// A model of pictures, by the recipe's `model.kind`.
#[expect(clippy::large_enum_variant, reason = "a run has two or three")]
#[derive(Module, Debug)]
pub enum PictureModel {
    /// A vision transformer.
    Vit(Vit),
    /// A pyramid.
    Pyramid(Pyramid),
    /// A model of texts that reads the pixels row by row, as 256 grey levels.
    Pixels(TextClassifier),
}

impl PictureModel {
    /// Class logits `[batch, classes]` of `images [batch, channels, height, width]`.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for pictures that the model cannot be shown.
    pub fn try_forward(&self, images: Tensor<4>) -> Result<Tensor<2>> {
        Ok(match self {
            Self::Vit(model) => model.try_forward(images)?,
            Self::Pyramid(model) => model.try_forward(images)?,
            Self::Pixels(model) => model.try_forward(grey_levels(images), None)?,
        })
    }

    /// What analyses call the attention of every block, in their order.
    pub fn attention_names(&self) -> Vec<String> {
        match self {
            Self::Vit(model) => (0..model.blocks.len()).map(block_name).collect(),
            Self::Pixels(model) => (0..model.encoder.blocks.len()).map(block_name).collect(),
            Self::Pyramid(model) => {
                let stages = model.stages.iter().enumerate();
                let of = |(stage, blocks): (usize, usize)| {
                    (0..blocks).map(move |block| format!("stages.{stage}.{}", block_name(block)))
                };
                stages.map(|(at, stage)| (at, stage.blocks.len())).flat_map(of).collect()
            }
        }
    }

    /// The attention of every block, in their order.
    pub fn attentions_mut(&mut self) -> Vec<&mut MultiHeadAttention> {
        match self {
            Self::Vit(model) => model.blocks.iter_mut().map(|block| &mut block.attention).collect(),
            Self::Pixels(model) => model.encoder.blocks.iter_mut().map(|block| &mut block.attention).collect(),
            Self::Pyramid(model) => {
                model.stages.iter_mut().flat_map(|stage| &mut stage.blocks).map(|block| &mut block.attention).collect()
            }
        }
    }
}

/// Tokens of a model that reads pixels.
pub(super) const LEVELS: usize = 256;

/// Pixels `[batch, 1 or 3, height, width]` of values 0 to 255 as tokens `[batch, height * width]`, colours by the luminance of ITU-R BT.601. "Long Range
/// Arena", section 2.2.4.
fn grey_levels(images: Tensor<4>) -> Tensor<2, Int> {
    let [batch, channels, height, width] = images.dims();
    let pixels = images.reshape([batch, channels, height * width]);
    let grey = if channels == 3 {
        let weights = Tensor::<1>::from_floats([0.299, 0.587, 0.114], &pixels.device());
        pixels.mul(weights.reshape([1, 3, 1])).sum_dim(1)
    } else {
        pixels
    };
    grey.squeeze_dim::<2>(1).round().clamp(0, LEVELS as i32 - 1).int()
}

/// What analyses call the attention of block `index`.
pub fn block_name(index: usize) -> String {
    format!("blocks.{index}")
}

/// The attention of every block, by its name.
pub(super) fn block_attentions(blocks: &mut [Block]) -> Vec<(String, &mut MultiHeadAttention)> {
    blocks.iter_mut().enumerate().map(|(index, block)| (block_name(index), &mut block.attention)).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn pixels_are_their_grey_levels_row_by_row() {
        let device = Device::flex();
        let grey = Tensor::<4>::from_floats([[[[0.0, 7.0000005], [254.9999, 255.0]]]], &device);
        grey_levels(grey).into_data().convert::<i64>().assert_eq(&TensorData::from([[0_i64, 7, 255, 255]]), true);
        let colour = Tensor::<4>::from_floats([[[[255.0, 0.0]], [[0.0, 0.0]], [[0.0, 255.0]]]], &device);
        grey_levels(colour).into_data().convert::<i64>().assert_eq(&TensorData::from([[76_i64, 29]]), true);
    }
}
