//! Models of text.

mod config;
mod encoder;
mod language;
mod language_config;
mod matcher;
mod positions;
mod sampling;
mod search;
mod translator;

pub use config::TextConfig;
pub use encoder::{TextClassifier, TextEncoder};
pub use language::{LanguageModel, LanguageState};
pub use language_config::{LanguageConfig, Positions};
pub use matcher::TextMatcher;
pub use sampling::Sampling;
pub use search::Search;
pub use translator::{DecoderBlock, DecoderState, Translator};
