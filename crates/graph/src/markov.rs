//! The graph as a Markov chain with absorption. "Infinite Self-Attention", section 3.3, eq. 13.

use crate::{Error, LinearOperator, Result, error::check_len};

/// How far `M` is from a chain whose walkers are absorbed.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Markov {
    /// `sigma_i = sum_j M_ij`, the mass that leaves token `i` for another, decay included.
    pub row_sums: Vec<f64>,
    /// `R_i = 1 - sigma_i`, the mass that is absorbed at `i`. Negative where the rows of `M` are no distribution: a
    /// Frobenius norm of one bounds a row sum by `sqrt(N)` only. Never clamped.
    pub absorption: Vec<f64>,
    /// Whether no absorption is negative: for non-negative scores, whether `M` is the transition matrix of an absorbing
    /// chain.
    pub substochastic: bool,
    /// The smallest absorption; 1 without tokens, NaN where one is (and the chain then is not substochastic).
    pub min_absorption: f64,
    /// Number of tokens with negative absorption.
    pub negative: usize,
}

/// Row sums and absorption of `m`, by one product.
///
/// # Errors
/// Those of the operator.
pub fn markov(m: &impl LinearOperator) -> Result<Markov> {
    let row_sums = m.apply(&vec![1.0; m.len()])?;
    let absorption: Vec<f64> = row_sums.iter().map(|s| 1.0 - s).collect();
    let negative = absorption.iter().filter(|&&r| r < 0.0).count();
    let substochastic = absorption.iter().all(|&r| r >= 0.0);
    let min_absorption = absorption.iter().copied().fold(1.0, |least: f64, r| match r.is_nan() || least.is_nan() {
        true => f64::NAN,
        false => least.min(r),
    });
    Ok(Markov { row_sums, absorption, substochastic, min_absorption, negative })
}

/// The h-transformed chain `D^-1 M D`, `D = diag(u)` with the walk counts `u = (I - M)^-1 1` ([`crate::Katz::c_out`]).
///
/// Its row sums are `(u_i - 1) / u_i < 1`, so that it is substochastic whatever the row sums of `M`: the absorption is
/// `1 / u_i`, and a walker from `i` visits `j` on average `((I - M)^-1)_ij u_j / u_i` times.
#[derive(Debug, Clone)]
pub struct HTransform<'a, O> {
    m: &'a O,
    u: &'a [f64],
}

impl<'a, O: LinearOperator> HTransform<'a, O> {
    /// The transform of `m` by its walk counts.
    ///
    /// # Errors
    /// [`Error::NotPositive`] where a count is not (signed scores); [`Error::Length`].
    pub fn new(m: &'a O, c_out: &'a [f64]) -> Result<Self> {
        check_len("c_out", c_out.len(), m.len())?;
        match c_out.iter().position(|&u| u.is_nan() || u <= 0.0) {
            Some(index) => Err(Error::NotPositive { index, value: c_out[index] }),
            None => Ok(Self { m, u: c_out }),
        }
    }
}

impl<O: LinearOperator> LinearOperator for HTransform<'_, O> {
    fn len(&self) -> usize {
        self.m.len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        let scaled: Vec<f64> = x.iter().zip(self.u).map(|(x, u)| x * u).collect();
        Ok(self.m.apply(&scaled)?.iter().zip(self.u).map(|(y, u)| y / u).collect())
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        let scaled: Vec<f64> = x.iter().zip(self.u).map(|(x, u)| x / u).collect();
        Ok(self.m.apply_transpose(&scaled)?.iter().zip(self.u).map(|(y, u)| y * u).collect())
    }
}
