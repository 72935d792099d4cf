//! The structures against the reference, and what holds of all of them.

#[path = "../support/mod.rs"]
mod support;
#[path = "../support/threads.rs"]
mod threads;

mod dense;
mod nystrom;
mod pooled;
mod properties;
