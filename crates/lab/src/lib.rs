//! Data sets, training, evaluation and reports for Resolvent.

pub mod augment;
pub mod data;
