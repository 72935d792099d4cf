//! Tokens one by one.

#[path = "../support/cached.rs"]
mod cached;
#[path = "../support/mod.rs"]
mod support;

mod paged;
mod ranges;
mod rows;
mod windows;
