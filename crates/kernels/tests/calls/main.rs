//! What a call may ask for beside its mechanism: layouts, shared heads, masks, biases, dropout, sequences, precisions.

#[path = "../support/naive.rs"]
mod naive;
#[path = "../support/naive_features.rs"]
mod naive_features;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/threads.rs"]
mod threads;

mod bias;
mod dropout;
mod inner;
mod kv_heads;
mod levels;
mod plans;
mod precision;
mod sizes;
mod strided;
mod two_masks;
mod uneven;
mod varlen;
mod varlen_errors;
