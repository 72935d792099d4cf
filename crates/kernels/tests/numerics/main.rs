//! Numbers at the ends of what f32 holds: digits that are kept, and calls that are refused.

#[path = "../support/ends.rs"]
mod ends;
#[path = "../support/mod.rs"]
mod support;

mod close_tokens;
mod derivatives;
mod distance;
mod extremes;
mod magnitudes;
mod ranges;
mod saturated;
mod vanishing;
