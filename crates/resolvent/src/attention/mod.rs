//! Multi-head attention over any mechanism.

mod config;
mod gamma;
mod input;
mod module;
mod pool_first;

pub use config::{GammaSchedule, MultiHeadAttentionConfig};
pub use input::{MhaInput, MhaOutput};
pub use module::MultiHeadAttention;

pub(crate) use config::field;
