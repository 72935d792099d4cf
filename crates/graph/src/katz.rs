//! Katz centralities: how many discounted walks start and end at a token. "Infinite Self-Attention", section 3.3.

use crate::{LinearOperator, Result, Solver, Transposed};

/// Walk counts over all lengths, the empty walk included.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Katz {
    /// `(I - M)^-1 1`: weight of all walks that start at a token.
    pub c_out: Vec<f64>,
    /// `(I - M^T)^-1 1`: weight of all walks that end at a token, its importance.
    pub c_in: Vec<f64>,
}

impl Katz {
    /// `c_out - 1`, eq. 8: the row sums of `sum_{t >= 1} M^t`.
    pub fn discounted_row_sums(&self) -> Vec<f64> {
        self.c_out.iter().map(|c| c - 1.0).collect()
    }
}

/// The Katz centralities of `m` (decay included) by two solves.
///
/// # Errors
/// [`crate::Error::NotConverged`]; those of the operator.
pub fn katz(m: &impl LinearOperator, solver: &Solver) -> Result<Katz> {
    let ones = vec![1.0; m.len()];
    Ok(Katz { c_out: solver.resolvent(m, &ones)?, c_in: solver.resolvent(&Transposed(m), &ones)? })
}
