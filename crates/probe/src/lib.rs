#![doc = include_str!("../README.md")]

pub mod analyze;
pub mod explain;
pub mod report;
pub mod subject;
