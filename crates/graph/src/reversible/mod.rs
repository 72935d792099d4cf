//! The symmetrised token graph and its normalised Laplacian. "Spectral Sparse Attention" section 2 and "Fractional neural
//! attention for efficient multiscale sequence processing" eqs. 18-37.

mod cheeger;
mod diffusion;
mod entries;
mod mixing;
mod streamed;

pub use cheeger::{Sweep, sweep_cut};
pub use diffusion::{diffusion_distances, diffusion_map, generator};
pub use mixing::{mixing_bounds, mixing_time};
pub use streamed::StreamedReversible;

use cheeger::component;

use crate::{Dense, Error, LinearOperator, Result, SymmetricEigen, dense::check_finite, symmetric_eigen};

/// A stored graph of symmetric non-negative weights `W`, held as `N = D^-1/2 W D^-1/2` and the logarithms of its degrees
/// `D`: no weight is ever exponentiated before it is normalised, so that scores of any size do.
///
/// As a [`LinearOperator`] it is `N`, whose eigenvalues are one minus those of the Laplacian `L_sym`. A token without
/// edges is a component of its own, that a walker never leaves: `N_ii = 1`, and it has no share of the stationary
/// distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Reversible {
    log_degree: Vec<f64>,
    adjacency: Dense,
}

impl Reversible {
    /// The graph of `(W + W^T) / 2`, `log_weights [n, n]` being `log W` row by row; `-inf` is no edge.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for NaN and `+inf`; [`Error::Length`].
    pub fn from_log_weights(n: usize, log_weights: &[f64]) -> Result<Self> {
        crate::error::check_len("log_weights", log_weights.len(), n * n)?;
        if let Some(at) = log_weights.iter().position(|x| x.is_nan() || *x == f64::INFINITY) {
            return Err(Error::NotFinite { row: at / n, column: at % n, value: log_weights[at] });
        }
        let half =
            |i: usize, j: usize| log_add(log_weights[i * n + j], log_weights[j * n + i]) - std::f64::consts::LN_2;
        let symmetric = Dense::from_fn(n, half);
        let log_degree: Vec<f64> = symmetric.rows().map(log_sum).collect();
        let adjacency = Dense::from_fn(n, |i, j| match log_degree[i] {
            f64::NEG_INFINITY => f64::from(u8::from(i == j)),
            _ if symmetric.row(i)[j] == f64::NEG_INFINITY => 0.0,
            degree => (symmetric.row(i)[j] - 0.5 * (degree + log_degree[j])).exp(),
        });
        Ok(Self { log_degree, adjacency })
    }

    /// The graph of `(W + W^T) / 2`.
    ///
    /// # Errors
    /// [`Error::NotFinite`], [`Error::Negative`].
    pub fn from_weights(weights: &Dense) -> Result<Self> {
        check_non_negative(weights, "a symmetric graph with degrees")?;
        let logs: Vec<f64> = weights.entries().iter().map(|w| w.ln()).collect();
        Self::from_log_weights(weights.len(), &logs)
    }

    /// The logarithms of the degrees; `-inf` for a token without edges.
    pub fn log_degree(&self) -> &[f64] {
        &self.log_degree
    }

    /// `N = I - L_sym`.
    pub fn adjacency(&self) -> &Dense {
        &self.adjacency
    }

    /// The stationary distribution: each token's share of all degrees.
    pub fn stationary(&self) -> Vec<f64> {
        shares(&self.log_degree)
    }

    /// Whether a walker comes from every token to every other. A token without edges is reached from none.
    pub fn is_connected(&self) -> bool {
        self.len() > 0 && component(self, 0).iter().all(|&joined| joined)
    }

    /// The walk `P = D^-1 W`: `P_ij = N_ij sqrt(D_j / D_i)`.
    pub fn transition(&self) -> Dense {
        Dense::from_fn(self.len(), |i, j| match self.adjacency.row(i)[j] {
            0.0 => 0.0,
            _ if i == j => self.adjacency.row(i)[i],
            weight => weight * (0.5 * (self.log_degree[j] - self.log_degree[i])).exp(),
        })
    }

    /// The spectrum of `L_sym`, all of it.
    ///
    /// # Errors
    /// [`Error::Decomposition`].
    pub fn spectrum(&self) -> Result<Spectrum> {
        let SymmetricEigen { mut values, mut vectors } = symmetric_eigen(&self.adjacency)?;
        values.reverse();
        vectors.reverse();
        vectors.iter_mut().for_each(|v| orient(v));
        Ok(Spectrum { values: values.into_iter().map(|eta| 1.0 - eta).collect(), vectors })
    }

    /// The Dirichlet energy `sum_ij P_ij |x_i - x_j|^2` of features `x [tokens, channels]`.
    ///
    /// # Errors
    /// [`Error::Length`] where `x` does not have whole rows.
    pub fn dirichlet_energy(&self, x: &[f64]) -> Result<f64> {
        let (n, walk) = (self.len(), self.transition());
        let channels = x.len() / n.max(1);
        crate::error::check_len("x", x.len(), n * channels)?;
        let far = |i: usize, j: usize| -> f64 {
            (0..channels).map(|c| (x[i * channels + c] - x[j * channels + c]).powi(2)).sum()
        };
        Ok((0..n).map(|i| (0..n).map(|j| walk.row(i)[j] * far(i, j)).sum::<f64>()).sum())
    }
}

impl LinearOperator for Reversible {
    fn len(&self) -> usize {
        self.log_degree.len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        self.adjacency.apply(x)
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        self.adjacency.apply(x)
    }
}

/// The spectrum of a normalised Laplacian `L_sym`.
#[derive(Debug, Clone, PartialEq)]
pub struct Spectrum {
    /// The eigenvalues, ascending, in [0, 2]; as many zeros as the graph has components.
    pub values: Vec<f64>,
    /// Their unit vectors, each with its component of largest modulus positive.
    pub vectors: Vec<Vec<f64>>,
}

impl Spectrum {
    /// The spectral gap, the second eigenvalue: 0 for a disconnected graph, and 1 for a single token.
    pub fn gap(&self) -> f64 {
        self.values.get(1).map_or(1.0, |value| value.max(0.0))
    }

    /// `min(lambda_2, 2 - lambda_N)`: what the walk's convergence hangs on, which a nearly two-sided graph spoils too.
    pub fn absolute_gap(&self) -> f64 {
        self.values.get(1).map_or(1.0, |low| low.min(2.0 - self.values[self.values.len() - 1]).max(0.0))
    }

    /// `lambda_(r+1) - lambda_r`: how clearly the graph has `r` clusters. `None` unless `1 <= r < tokens`.
    pub fn gap_at(&self, r: usize) -> Option<f64> {
        Some(self.values.get(r)? - self.values.get(r.checked_sub(1)?)?)
    }

    /// The eigenvalues `eta = 1 - lambda` of the walk, descending.
    pub fn walk(&self) -> Vec<f64> {
        self.values.iter().map(|lambda| 1.0 - lambda).collect()
    }

    /// The vectors of the `r` smallest eigenvalues.
    pub fn subspace(&self, r: usize) -> &[Vec<f64>] {
        &self.vectors[..r.min(self.vectors.len())]
    }
}

/// Turns a vector so that its component of largest modulus is positive.
fn orient(vector: &mut [f64]) {
    let largest = vector.iter().copied().fold(0.0_f64, |most, x| if x.abs() > most.abs() { x } else { most });
    if largest < 0.0 {
        vector.iter_mut().for_each(|x| *x = -*x);
    }
}

/// [`Error::NotFinite`] or [`Error::Negative`] unless every weight is a number and none is below zero.
pub(crate) fn check_non_negative(weights: &Dense, what: &'static str) -> Result<()> {
    check_finite(weights)?;
    let n = weights.len();
    match weights.entries().iter().position(|&w| w < 0.0) {
        Some(at) => Err(Error::Negative { what, row: at / n, column: at % n, value: weights.entries()[at] }),
        None => Ok(()),
    }
}

/// `log(e^a + e^b)`.
pub(crate) fn log_add(a: f64, b: f64) -> f64 {
    let (high, low) = if a > b { (a, b) } else { (b, a) };
    if high == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// `log sum_i e^(x_i)`; `-inf` of nothing.
pub(crate) fn log_sum(x: &[f64]) -> f64 {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY { most } else { most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln() }
}

/// The softmax of logarithms; zeros where all are `-inf`.
pub(crate) fn shares(logs: &[f64]) -> Vec<f64> {
    match log_sum(logs) {
        f64::NEG_INFINITY => vec![0.0; logs.len()],
        total => logs.iter().map(|x| (x - total).exp()).collect(),
    }
}
