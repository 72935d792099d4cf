//! Katz centralities: how many discounted walks start and end at a token. "Infinite Self-Attention", section 3.3.

use crate::{Arnoldi, Error, LinearOperator, Result, Solver, Transposed};

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
/// [`Error::NotConverged`]; [`Error::Diverges`] where the spectral radius is one or more, so that the solutions count
/// nothing; those of the operator.
pub fn katz(m: &impl LinearOperator, solver: &Solver) -> Result<Katz> {
    let ones = vec![1.0; m.len()];
    let found = Katz { c_out: solver.resolvent(m, &ones)?, c_in: solver.resolvent(&Transposed(m), &ones)? };
    // Counts without sign solve c = 1 + M c only where the radius of a non-negative M is below one.
    if found.c_out.iter().chain(&found.c_in).any(|&count| count < 0.0) {
        let largest = Arnoldi { wanted: 1, tol: 1e-4, ..Arnoldi::default() }.eigenvalues(m)?;
        if let Some(radius) = largest.first().map(|found| found.value.modulus()).filter(|&radius| radius >= 1.0) {
            return Err(Error::Diverges { radius });
        }
    }
    Ok(found)
}
