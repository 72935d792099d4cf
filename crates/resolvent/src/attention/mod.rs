//! Multi-head attention over any mechanism.

mod codebook;
mod config;
mod decoding;
mod gamma;
mod input;
mod kernel;
mod landmarks;
mod module;
mod observer;
mod orthogonal;
mod pool_first;
mod rotary;
mod sharing;
mod value_filter;

pub use codebook::{Codebook, CodebookConfig};
pub use config::{GammaSchedule, MultiHeadAttentionConfig};
pub use decoding::{KeyValues, Past, check_row_local};
pub use input::{MhaInput, MhaOutput};
pub use landmarks::LandmarkParameters;
pub use module::MultiHeadAttention;
pub use observer::{Observed, Observer};
pub use orthogonal::{OrthogonalMap, OrthogonalMaps};
pub use value_filter::{ValueConv, ValueFilter};

pub(crate) use config::field;
pub(crate) use landmarks::grid_of;

/// Tokens of a sequence of which everything is held at once without autodiff: 256 MiB of an MLP's hidden layer of 4096 channels.
pub(crate) const HELD_TOKENS: usize = 16_384;
