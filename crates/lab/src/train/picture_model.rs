//! The models that classify pictures.

use burn::{module::Module, tensor::Tensor};
use resolvent::{
    attention::MultiHeadAttention,
    models::{Pyramid, Vit},
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
        })
    }

    /// What analyses call the attention of every block, in their order.
    pub fn attention_names(&self) -> Vec<String> {
        match self {
            Self::Vit(model) => (0..model.blocks.len()).map(block_name).collect(),
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
            Self::Pyramid(model) => {
                model.stages.iter_mut().flat_map(|stage| &mut stage.blocks).map(|block| &mut block.attention).collect()
            }
        }
    }
}

/// What analyses call the attention of block `index`.
pub(crate) fn block_name(index: usize) -> String {
    format!("blocks.{index}")
}
