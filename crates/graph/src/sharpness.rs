//! How many tokens a row attends to, and kernels compared at equal sharpness.

use crate::{Dense, Error, Result, reversible::check_non_negative};

/// The perplexity `exp(-sum_j p_j ln p_j)` of every row, as shares of its sum: 1 for a row with one edge, the number of
/// tokens for a uniform one, 0 for a row without any.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Negative`].
pub fn row_perplexity(weights: &Dense) -> Result<Vec<f64>> {
    check_non_negative(weights, "the perplexity of a row")?;
    Ok(weights.rows().map(perplexity).collect())
}

/// That of one row of weights that are not negative.
pub fn perplexity(row: &[f64]) -> f64 {
    let total: f64 = row.iter().sum();
    if total == 0.0 {
        return 0.0;
    }
    let entropy = |w: &f64| if *w > 0.0 { -(w / total) * (w / total).ln() } else { 0.0 };
    row.iter().map(entropy).sum::<f64>().exp()
}

/// The bandwidth at which `perplexity`, which grows with it, meets `target`: bisection of its logarithm over `range`, to
/// a relative 1e-6. The end of the range where the target is not within it.
///
/// # Errors
/// [`Error::Range`] for an empty range or one that is not positive; those of `perplexity`.
pub fn matched_bandwidth(
    target: f64,
    range: (f64, f64),
    mut perplexity: impl FnMut(f64) -> Result<f64>,
) -> Result<f64> {
    let (mut low, mut high) = range;
    let valid = low > 0.0 && high >= low && high.is_finite();
    if !valid {
        return Err(Error::Range { what: "range", value: low, expected: "two positive numbers, the lower first" });
    }
    while high / low > 1.0 + 1e-6 {
        let middle = (low * high).sqrt();
        if perplexity(middle)? < target {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok((low * high).sqrt())
}

/// The intrinsic dimension of tokens `x [n, head_dim]` by the ratio of the distances to their two nearest others, the
/// maximum-likelihood estimate `n / sum ln(r_2 / r_1)`; duplicates are left out. `None` with fewer than three tokens that
/// have two different neighbours. The effective order of `fna` on them is its tail exponent less this.
///
/// # Errors
/// [`Error::Length`] where `x` does not have whole rows.
pub fn neighbour_dimension(n: usize, x: &[f64]) -> Result<Option<f64>> {
    let head_dim = x.len() / n.max(1);
    crate::error::check_len("x", x.len(), n * head_dim)?;
    let row = |i: usize| &x[i * head_dim..][..head_dim];
    let ratio = |i: usize| {
        let (mut first, mut second) = (f64::INFINITY, f64::INFINITY);
        for j in (0..n).filter(|&j| j != i) {
            let far: f64 = row(i).iter().zip(row(j)).map(|(x, y)| (x - y).powi(2)).sum();
            if far > 0.0 && far < first {
                (first, second) = (far, first);
            } else if far > 0.0 && far < second {
                second = far;
            }
        }
        (second.is_finite() && second > first).then(|| 0.5 * (second / first).ln())
    };
    let ratios: Vec<f64> = (0..n).filter_map(ratio).collect();
    Ok((ratios.len() >= 3).then(|| ratios.len() as f64 / ratios.iter().sum::<f64>()))
}
