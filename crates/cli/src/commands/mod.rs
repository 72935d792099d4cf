//! One file per command.

pub mod analyze;
pub mod attend;
pub mod bench;
mod bench_models;
pub mod classify;
pub mod compare;
pub mod completions;
pub mod devices;
pub mod eval;
pub mod explain;
pub mod generate;
mod material;
pub mod mechanisms;
pub mod recipe;
pub mod recipes;
pub mod report;
mod texts;
pub mod train;
pub mod translate;
