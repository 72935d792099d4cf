//! Dense decompositions, by `faer`, in f64.

use faer::{Mat, MatRef, Side};

use super::parts::strongly_connected;
use crate::{Dense, Error, LinearOperator, Result};

/// A complex number.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Complex {
    /// Its real part.
    pub re: f64,
    /// Its imaginary part.
    pub im: f64,
}

impl Complex {
    /// Its absolute value.
    pub fn modulus(self) -> f64 {
        self.re.hypot(self.im)
    }
}

/// All eigenpairs of a symmetric matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct SymmetricEigen {
    /// The eigenvalues, ascending.
    pub values: Vec<f64>,
    /// Their unit vectors, in the same order.
    pub vectors: Vec<Vec<f64>>,
}

pub(crate) fn view(m: &Dense) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(m.entries(), m.len(), m.len())
}

/// [`Error::NotFinite`] unless every entry is a number.
pub(crate) fn check_finite(m: &Dense) -> Result<()> {
    match m.entries().iter().position(|x| !x.is_finite()) {
        Some(at) => Err(Error::NotFinite { row: at / m.len(), column: at % m.len(), value: m.entries()[at] }),
        None => Ok(()),
    }
}

/// All eigenvalues and vectors of a symmetric matrix, of which the lower triangle is read.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Decomposition`].
pub fn symmetric_eigen(m: &Dense) -> Result<SymmetricEigen> {
    check_finite(m)?;
    let failed = |_| Error::Decomposition { what: "symmetric eigendecomposition", tokens: m.len() };
    let found = view(m).self_adjoint_eigen(Side::Lower).map_err(failed)?;
    let vectors = found.U().col_iter().map(|column| column.iter().copied().collect()).collect();
    Ok(SymmetricEigen { values: found.S().column_vector().iter().copied().collect(), vectors })
}

/// All eigenvalues of any matrix, by descending modulus: part by strongly connected part, so that those of a triangular matrix, as causal
/// weights are, are its diagonal, however far it is from normal.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Decomposition`].
pub fn eigenvalues(m: &Dense) -> Result<Vec<Complex>> {
    check_finite(m)?;
    let mut values = Vec::with_capacity(m.len());
    for part in strongly_connected(m) {
        match part[..] {
            [token] => values.push(Complex { re: m.row(token)[token], im: 0.0 }),
            _ => {
                let own = Dense::from_fn(part.len(), |i, j| m.row(part[i])[part[j]]);
                let failed = |_| Error::Decomposition { what: "eigenvalues", tokens: m.len() };
                let found = view(&own).eigenvalues().map_err(failed)?;
                values.extend(found.into_iter().map(|x| Complex { re: x.re, im: x.im }));
            }
        }
    }
    values.sort_by(|a, b| b.modulus().total_cmp(&a.modulus()));
    Ok(values)
}

/// All singular values of any matrix, descending.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Decomposition`].
pub fn singular_values(m: &Dense) -> Result<Vec<f64>> {
    check_finite(m)?;
    let failed = |_| Error::Decomposition { what: "singular values", tokens: m.len() };
    view(m).singular_values().map_err(failed)
}

/// `1 - |eta_1|`, `eta_1` the eigenvalue of second largest modulus: how fast a row-stochastic matrix, symmetrisable or
/// not, forgets where a walker started. 1 for a single token, as for uniform weights. "Fractional neural attention for
/// efficient multiscale sequence processing", fig. 5a.
///
/// # Errors
/// As [`eigenvalues`].
pub fn spectral_gap(m: &Dense) -> Result<f64> {
    Ok(1.0 - eigenvalues(m)?.get(1).map_or(0.0, |eta| eta.modulus()))
}

/// `a b`.
pub(crate) fn product(a: &Dense, b: &Dense) -> Dense {
    let mut entries = vec![0.0; a.entries().len()];
    let out = faer::MatMut::from_row_major_slice_mut(&mut entries, a.len(), a.len());
    faer::linalg::matmul::matmul(out, faer::Accum::Replace, view(a), view(b), 1.0, faer::Par::Seq);
    Dense::from_entries(a.len(), entries)
}

/// Singular values of the tall or wide matrix whose columns (all of one length) are given.
pub(crate) fn column_singular_values(columns: &[Vec<f64>]) -> Result<Vec<f64>> {
    let rows = columns.first().map_or(0, Vec::len);
    let failed = |_| Error::Decomposition { what: "singular values", tokens: rows };
    Mat::from_fn(rows, columns.len(), |i, j| columns[j][i]).singular_values().map_err(failed)
}
