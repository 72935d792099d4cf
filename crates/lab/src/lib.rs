//! Data sets, training, evaluation and reports for Resolvent.

pub mod data;
