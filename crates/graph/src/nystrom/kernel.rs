//! Kernels between tokens, and what is lost by going through landmarks.

use crate::{Dense, Error, Result, error::check_len, symmetric_eigen};

/// A kernel between two tokens, 1 where they are equal.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum Kernel {
    /// `exp(-scale |x - y|_2^2)`: SOFT, with `scale = 1 / (2 sqrt(dim))`.
    Gaussian {
        /// The factor on the squared distance.
        scale: f64,
    },
    /// `exp(-|x - y|_1 / lambda)`: LaplacianFormer, with `lambda = 4`.
    Laplacian {
        /// The bandwidth.
        lambda: f64,
    },
}

impl Kernel {
    /// The kernel of `x` and `y`.
    pub fn of(self, x: &[f64], y: &[f64]) -> f64 {
        let differences = x.iter().zip(y).map(|(x, y)| x - y);
        match self {
            Self::Gaussian { scale } => (-scale * differences.map(|d| d * d).sum::<f64>()).exp(),
            Self::Laplacian { lambda } => (-differences.map(f64::abs).sum::<f64>() / lambda).exp(),
        }
    }

    /// The matrix of the kernel among the tokens `x [n, dim]`.
    ///
    /// # Errors
    /// [`Error::Length`] unless `x` has whole rows.
    pub fn gram(self, x: &[f64], dim: usize) -> Result<Dense> {
        let n = rows("x", x, dim)?;
        Ok(Dense::from_fn(n, |i, j| self.of(&x[i * dim..][..dim], &x[j * dim..][..dim])))
    }
}

fn rows(what: &'static str, x: &[f64], dim: usize) -> Result<usize> {
    let n = x.len() / dim.max(1);
    check_len(what, x.len(), n * dim)?;
    Ok(n)
}

/// How the kernel between queries and keys differs from its approximation through landmarks.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct NystromError {
    /// `|G - K|_F / |K|_F`, `K` the kernel and `G` its approximation.
    pub frobenius: f64,
    /// The largest difference of an entry.
    pub largest: f64,
    /// `sum_i x_i / (x_i + ridge)` over the eigenvalues among the landmarks: how many of them count.
    pub effective_rank: f64,
}

/// Compares `k(Q, K)` with `k(Q, L) (k(L, L) + ridge I)^-1 k(L, K)` for queries `q [n, dim]`, keys `k [m, dim]` and
/// landmarks `l`, in `O(n m + n l + m l)` kernels.
///
/// # Errors
/// [`Error::Length`] unless all have whole rows; [`Error::Singular`] where an eigenvalue among the landmarks, plus the ridge,
/// is not positive; [`Error::Decomposition`].
pub fn nystrom_error(kernel: Kernel, q: &[f64], k: &[f64], l: &[f64], dim: usize, ridge: f64) -> Result<NystromError> {
    let [queries, keys, marks] = [rows("q", q, dim)?, rows("k", k, dim)?, rows("landmarks", l, dim)?];
    let row = |x: &[f64], i: usize| x[i * dim..][..dim].to_vec();
    let eigen = symmetric_eigen(&kernel.gram(l, dim)?)?;
    if let Some(&value) = eigen.values.iter().find(|&&x| x + ridge <= 0.0) {
        return Err(Error::Singular { value, ridge });
    }
    // In the eigenbasis the inverse is a factor on each coordinate.
    let coordinates = |x: &[f64]| -> Vec<f64> {
        let c: Vec<f64> = (0..marks).map(|m| kernel.of(x, &l[m * dim..][..dim])).collect();
        eigen.vectors.iter().map(|v| v.iter().zip(&c).map(|(v, c)| v * c).sum()).collect()
    };
    let of_keys: Vec<Vec<f64>> = (0..keys).map(|j| coordinates(&row(k, j))).collect();
    let (mut squares, mut all, mut largest) = (0.0, 0.0, 0.0_f64);
    for i in 0..queries {
        let x = row(q, i);
        let weighed: Vec<f64> =
            coordinates(&x).iter().zip(&eigen.values).map(|(c, value)| c / (value + ridge)).collect();
        for (j, of_key) in of_keys.iter().enumerate() {
            let exact = kernel.of(&x, &k[j * dim..][..dim]);
            let error = weighed.iter().zip(of_key).map(|(x, y)| x * y).sum::<f64>() - exact;
            squares += error * error;
            all += exact * exact;
            largest = largest.max(error.abs());
        }
    }
    let effective_rank = eigen.values.iter().map(|x| x / (x + ridge)).sum();
    Ok(NystromError { frobenius: if all > 0.0 { (squares / all).sqrt() } else { 0.0 }, largest, effective_rank })
}
