//! Eigenvalues of largest modulus of an operator without symmetry.

use faer::Mat;

use super::dense::Complex;
use crate::{
    Error, LinearOperator, Result,
    vector::{axpy, dot, norm, scaled},
};

/// How the eigenvalues of largest modulus are sought: Arnoldi's iteration, all vectors kept.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Arnoldi {
    /// Eigenvalues wanted. Default 2.
    pub wanted: usize,
    /// Residual `|A x - theta x|` of a unit `x`, relative to the largest modulus, at which a value is done. Default 1e-8;
    /// 1e-6 suits operators in f32.
    pub tol: f64,
    /// Products allowed, and vectors kept. Default 200.
    pub max_products: usize,
}

impl Default for Arnoldi {
    fn default() -> Self {
        Self { wanted: 2, tol: 1e-8, max_products: 200 }
    }
}

/// An eigenvalue with its residual.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RitzValue {
    /// The eigenvalue.
    pub value: Complex,
    /// `|A x - theta x|` of its unit vector, measured, relative to the largest modulus.
    pub residual: f64,
}

impl Arnoldi {
    /// The eigenvalues of largest modulus, descending; all of them where there are fewer tokens than wanted. One copy of
    /// a multiple eigenvalue is found.
    ///
    /// # Errors
    /// [`Error::Eigen`] when the products run out, [`Error::Decomposition`]; those of the operator.
    pub fn eigenvalues(&self, operator: &impl LinearOperator) -> Result<Vec<RitzValue>> {
        let n = operator.len();
        if n == 0 {
            return Ok(Vec::new());
        }
        // Without symmetry, so that it has a part in every eigenvector.
        let start: Vec<f64> = (0..n).map(|i| 1.0 + (i as f64 + 1.0).sin()).collect();
        let mut basis = vec![scaled(&start, 1.0 / norm(&start))];
        let mut columns: Vec<Vec<f64>> = Vec::new();
        loop {
            let mut next = operator.apply(&basis[basis.len() - 1])?;
            let size = norm(&next);
            let mut column = vec![0.0; basis.len()];
            for _ in 0..2 {
                for (overlap, direction) in column.iter_mut().zip(&basis) {
                    let part = dot(direction, &next);
                    axpy(-part, direction, &mut next);
                    *overlap += part;
                }
            }
            let outside = norm(&next);
            column.push(outside);
            columns.push(column);
            let products = columns.len();
            // An invariant space (or all of it) holds exact eigenvalues.
            let closed = outside <= 1e-14 * size || products == n;
            let (values, coordinates) = ritz(&columns, if closed { 0.0 } else { outside })?;
            let wanted = &values[..self.wanted.min(values.len())];
            if closed || (values.len() >= self.wanted && wanted.iter().all(|v| v.residual <= self.tol)) {
                let size = values[0].value.modulus().max(f64::MIN_POSITIVE);
                let pairs = wanted.iter().zip(&coordinates);
                let measured = pairs.map(|(found, x)| {
                    Ok(RitzValue { residual: residual(operator, found.value, &basis, x)? / size, ..*found })
                });
                return measured.collect();
            }
            if products >= self.max_products || !outside.is_finite() {
                let converged = wanted.iter().filter(|v| v.residual <= self.tol).count();
                let residual = wanted.iter().map(|v| v.residual).fold(0.0, f64::max);
                return Err(Error::Eigen { converged, wanted: self.wanted, products, residual, tol: self.tol });
            }
            basis.push(scaled(&next, 1.0 / outside));
        }
    }
}

/// Coordinates of a vector in a basis, real and imaginary parts.
type Coordinates = [Vec<f64>; 2];

/// The eigenvalues of the Hessenberg matrix of `columns`, with the residuals that `outside`, its last subdiagonal, leaves,
/// and their unit vectors.
fn ritz(columns: &[Vec<f64>], outside: f64) -> Result<(Vec<RitzValue>, Vec<Coordinates>)> {
    let m = columns.len();
    let h = Mat::from_fn(m, m, |i, j| columns[j].get(i).copied().unwrap_or(0.0));
    let failed = |_| Error::Decomposition { what: "eigenvalues of a Krylov space", tokens: m };
    let found = h.eigen().map_err(failed)?;
    let (vectors, values) = (found.U(), found.S().column_vector());
    let pair = |j: usize| {
        let length = (0..m).map(|i| vectors[(i, j)].re.powi(2) + vectors[(i, j)].im.powi(2)).sum::<f64>().sqrt();
        let re: Vec<f64> = (0..m).map(|i| vectors[(i, j)].re / length).collect();
        let im: Vec<f64> = (0..m).map(|i| vectors[(i, j)].im / length).collect();
        let residual = outside * re[m - 1].hypot(im[m - 1]);
        (RitzValue { value: Complex { re: values[j].re, im: values[j].im }, residual }, [re, im])
    };
    let mut pairs: Vec<_> = (0..m).map(pair).collect();
    pairs.sort_by(|a, b| b.0.value.modulus().total_cmp(&a.0.value.modulus()));
    let size = pairs[0].0.value.modulus().max(f64::MIN_POSITIVE);
    pairs.iter_mut().for_each(|(v, _)| v.residual /= size);
    Ok(pairs.into_iter().unzip())
}

/// `|A x - theta x|`, by two products.
fn residual(operator: &impl LinearOperator, theta: Complex, basis: &[Vec<f64>], x: &Coordinates) -> Result<f64> {
    let [re, im] = x.each_ref().map(|x| combined(basis, x));
    let (mut rest_re, mut rest_im) = (operator.apply(&re)?, operator.apply(&im)?);
    axpy(-theta.re, &re, &mut rest_re);
    axpy(theta.im, &im, &mut rest_re);
    axpy(-theta.re, &im, &mut rest_im);
    axpy(-theta.im, &re, &mut rest_im);
    Ok(norm(&rest_re).hypot(norm(&rest_im)))
}

/// `sum_i weights_i vectors_i`.
fn combined(vectors: &[Vec<f64>], weights: &[f64]) -> Vec<f64> {
    let mut sum = vec![0.0; vectors.first().map_or(0, Vec::len)];
    vectors.iter().zip(weights).for_each(|(x, &weight)| axpy(weight, x, &mut sum));
    sum
}
