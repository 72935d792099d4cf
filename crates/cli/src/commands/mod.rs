//! One file per command.

pub mod attend;
pub mod completions;
