//! Models built from the attention module.

mod block;
mod config;
mod count;
mod drop_path;
mod layer_norm;
mod positions;
pub mod pyramid;
mod text;
mod vit;

pub use block::{Activation, Block, NormOrder, Visible};
pub use config::{Pool, VitConfig};
pub use drop_path::DropPath;
pub use layer_norm::LayerNorm;
pub use pyramid::{Pyramid, PyramidConfig};
pub use text::{
    DecoderBlock, DecoderState, LanguageConfig, LanguageModel, LanguageState, Positions, Sampling, Search,
    TextClassifier, TextConfig, TextEncoder, TextMatcher, Translator,
};
pub use vit::Vit;
