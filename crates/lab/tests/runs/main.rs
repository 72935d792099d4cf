//! Training, from end to end. One binary, because every other would compile Burn's training once more.

#[path = "../support/mod.rs"]
mod support;

mod checkpoints;
mod comparing;
mod corpus;
mod ending;
mod long_range;
mod optimisers;
mod own;
mod pairs;
mod pictures;
mod texts;
mod tokenizers;
