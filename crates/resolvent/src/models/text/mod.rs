//! Models of text.

mod config;
mod encoder;
mod positions;

pub use config::TextConfig;
pub use encoder::{TextClassifier, TextEncoder};
