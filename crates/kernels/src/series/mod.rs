//! How many hops.

pub(crate) mod resolvent;
mod solver;

/// How an iterative solver ended for one batch element and head.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Convergence {
    /// Products with the operator.
    pub iterations: usize,
    /// Guaranteed bound on the error of `V + out`, relative to the norm of `V`.
    pub bound: f64,
}
