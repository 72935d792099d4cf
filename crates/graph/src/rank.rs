//! How many directions an operator has, and how far two spaces are apart.

use crate::{Result, dense::column_singular_values, vector::dot};

/// Measures of rank of a spectrum (singular values, or eigenvalues of a positive operator).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Rank {
    /// `exp` of the entropy of the values as shares of their sum: the number of equal values that are as spread out.
    pub effective: f64,
    /// `sum x^2 / max x^2`.
    pub stable: f64,
    /// Values above a thousandth of the largest.
    pub numerical: usize,
}

impl Rank {
    /// Of non-negative `values` in any order (what is below 0 by rounding counts as 0); zeros for a zero operator. Where a
    /// value is not finite, neither are the measures, and none is counted.
    pub fn of(values: &[f64]) -> Self {
        if values.iter().any(|x| !x.is_finite()) {
            return Self { effective: f64::NAN, stable: f64::NAN, numerical: 0 };
        }
        let most = values.iter().copied().fold(0.0, f64::max);
        if most == 0.0 {
            return Self { effective: 0.0, stable: 0.0, numerical: 0 };
        }
        let shares: Vec<f64> = values.iter().map(|x| (x / most).max(0.0)).collect();
        let total: f64 = shares.iter().sum();
        let entropy = |x: &f64| if *x > 0.0 { -(x / total) * (x / total).ln() } else { 0.0 };
        Self {
            effective: shares.iter().map(entropy).sum::<f64>().exp(),
            stable: dot(&shares, &shares),
            numerical: shares.iter().filter(|x| **x > 1e-3).count(),
        }
    }
}

/// The sines of the angles between the spans of two orthonormal sets of as many vectors, as one number:
/// `sqrt(sum_i (1 - sigma_i^2))`, `sigma_i` the singular values of `U^T W`. 0 for the same span, `sqrt(r)` for orthogonal
/// ones. "Spectral Sparse Attention", theorem 34.
///
/// # Errors
/// [`crate::Error::Length`] where the vectors or their numbers differ; [`crate::Error::Decomposition`].
pub fn sin_theta(u: &[Vec<f64>], w: &[Vec<f64>]) -> Result<f64> {
    crate::error::check_len("w", w.len(), u.len())?;
    let length = u.first().map_or(0, Vec::len);
    u.iter().chain(w).try_for_each(|x| crate::error::check_len("vector", x.len(), length))?;
    // What is left of W outside the span of U: small angles keep their digits, as 1 - sigma^2 would not.
    let outside = |x: &Vec<f64>| {
        let mut rest = x.clone();
        u.iter().for_each(|direction| crate::vector::axpy(-dot(direction, x), direction, &mut rest));
        rest
    };
    let sines = column_singular_values(&w.iter().map(outside).collect::<Vec<_>>())?;
    Ok(dot(&sines, &sines).sqrt())
}
