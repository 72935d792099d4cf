//! How two tokens relate. [`PairScore`] is the contract that anyone may implement; [`crate::mechanism::Score::custom`] takes a score from
//! outside into a mechanism.
//!
//! The streams of single presets have scores of their own: each is written once, as its value and derivative on a vector of logits.
//!
//! A structure multiplies queries and keys (already scaled); streams hand the products over while they are in registers, the engine of
//! compositions in a tile. A new score is a [`PairScore`] in `builtin`, named in [`crate::mechanism::Score`].

mod activation;
pub(crate) mod builtin;
pub(crate) mod contract;
pub(crate) mod distance;
mod exp;
pub(crate) mod gate;
pub(crate) mod map;
mod metric;
pub(crate) mod tiles;

pub use contract::{MOST_PARAMETERS, PairScore, Simd, Slopes, Term};

pub(crate) use activation::{Abs, Gelu, Relu};
pub(crate) use exp::Exp;
pub(crate) use metric::{Manhattan, Metric, Pairs, Squared, gradients};

/// The affinity of a pair as a function of its logit.
pub(crate) trait Score: Copy + Send + Sync {
    /// Whether `value(c x) = c value(x)` for every `c > 0`, so that logits may be rescaled at will.
    const HOMOGENEOUS: bool;

    /// The affinity at logit `x`. (Base-2 logarithm of it, for a score that a row normalisation exponentiates.)
    fn value<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s;

    /// `(value, derivative)` at logit `x`.
    fn value_and_derivative<S: Simd>(self, simd: S, x: S::f32s) -> (S::f32s, S::f32s);
}
