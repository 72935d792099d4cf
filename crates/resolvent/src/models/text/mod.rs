//! Models of text.

mod config;
mod encoder;
mod positions;
mod search;
mod translator;

pub use config::TextConfig;
pub use encoder::{TextClassifier, TextEncoder};
pub use search::Search;
pub use translator::{DecoderBlock, DecoderState, Translator};
