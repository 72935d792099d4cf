//! Multi-head attention over any mechanism.
//!
//! What the module and the models take to mask tokens names what is absent, true = padding or hidden, as in Burn; [`crate::Mask`] and the
//! operators under it name what is present, true = keep.

mod bias;
mod codebook;
mod config;
mod decoding;
mod from_burn;
mod gamma;
mod head_groups;
mod input;
mod landmarks;
mod learned;
mod module;
mod observer;
mod orthogonal;
mod pool_first;
mod precision;
mod rotary;
mod sharing;
mod ternary;
mod value_filter;

pub use bias::BiasTable;
pub use codebook::{Codebook, CodebookConfig};
pub use config::{
    ClusterConfig, DecayConfig, DropoutRates, GammaSchedule, MultiHeadAttentionConfig, PositionConfig, ProjectionConfig,
};
pub use decoding::{KeyValues, Past, check_row_local};
pub use head_groups::HeadGroup;
pub use input::{MhaInput, MhaOutput};
pub use landmarks::LandmarkParameters;
pub use learned::{Learned, Trained};
pub use module::MultiHeadAttention;
pub use observer::{Observed, Observer};
pub use orthogonal::{OrthogonalMap, OrthogonalMaps};
pub use value_filter::{ValueConv, ValueFilter};

pub(crate) use config::field;

/// Tokens of a sequence of which everything is held at once without autodiff: 256 MiB of an MLP's hidden layer of 4096 channels.
pub(crate) const HELD_TOKENS: usize = 16_384;
