//! Data sets, training, evaluation, prediction and reports for Resolvent.

pub mod augment;
pub mod bench;
pub mod bleu;
pub mod budget;
pub mod calibration;
pub mod candidate;
pub mod checkpoint;
pub mod compare;
pub mod data;
pub mod device;
pub mod disk;
pub mod energy;
pub mod environment;
mod error;
pub mod eval;
pub mod evaluation;
pub mod exchange;
pub mod fit;
pub mod folder;
pub mod generate;
pub mod memory;
pub mod metrics;
pub mod page;
pub mod predict;
pub mod progress;
pub mod recipe;
pub mod report;
pub mod schedule;
pub mod source;
pub mod stats;
pub mod stop;
pub mod tensors;
pub mod train;

pub use error::{Error, Result};
pub use recipe::Recipe;
