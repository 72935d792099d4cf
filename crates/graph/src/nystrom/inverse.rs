//! Iterations for the inverse of a symmetric matrix, step by step, and the size of the inverse.

use crate::{
    Dense, Error, LinearOperator, Result, SymmetricEigen,
    eigen::dense::product,
    symmetric_eigen,
    vector::{axpy, dot, norm},
};

/// Where Newton-Schulz starts, for a symmetric `A`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum Start {
    /// `X_0 = factor A`. SOFT: `2 / |A|_1^2` as printed, `1.8 / |A|_1^2` so that it converges. LaplacianFormer's
    /// algorithm 2: `2 / |A|_2`.
    Matrix(f64),
    /// `X_0 = factor I`, for a positive definite `A`: converges by half as many steps. `1 / |A|_1`.
    Identity(f64),
}

/// How far one iterate is from the inverse.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct InverseStep {
    /// `|A X A - A|_2 / |A|_2`, the metric of "Softmax-free Linear Transformers", Fig. 5.
    pub residual: f64,
    /// `|X - A^-1|_F / |A^-1|_F`.
    pub error: f64,
}

/// The largest absolute column sum.
pub fn one_norm(a: &Dense) -> f64 {
    let mut sums = vec![0.0; a.len()];
    a.rows().for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.abs()));
    sums.into_iter().fold(0.0, f64::max)
}

/// What the residual of step `step` of Newton-Schulz from [`Start::Matrix`]`(1.8 / |A|_1^2)` cannot exceed, whatever the
/// spectrum of a positive semidefinite `A` of one-norm `one` and largest eigenvalue `largest`:
/// `one / (largest sqrt(3.6 e 2^step))`. A matrix may be singular and still "converge".
pub fn residual_bound(one: f64, largest: f64, step: usize) -> f64 {
    one / (largest * (3.6 * std::f64::consts::E * 2_f64.powi(step as i32)).sqrt())
}

/// Newton-Schulz, `X <- 2 X - X A X`, from `start` through `steps` steps; entry 0 is the start. Where it diverges, both
/// figures are infinite from the step at which numbers leave f64.
///
/// # Errors
/// [`Error::Singular`] where an eigenvalue is 0, and there is no inverse to compare with; [`Error::Decomposition`].
pub fn newton_curve(a: &Dense, start: Start, steps: usize) -> Result<Vec<InverseStep>> {
    let exact = inverse(a)?;
    let size = largest(a)?;
    let mut x = match start {
        Start::Matrix(factor) => a.clone().scaled(factor),
        Start::Identity(factor) => Dense::from_fn(a.len(), |i, j| if i == j { factor } else { 0.0 }),
    };
    let mut curve = Vec::with_capacity(steps + 1);
    for step in 0..=steps {
        if step > 0 {
            let xax = product(&product(&x, a), &x);
            x = Dense::from_fn(a.len(), |i, j| 2.0 * x.row(i)[j] - xax.row(i)[j]);
        }
        let left = product(&product(a, &x), a);
        let left = difference(&left, a);
        let finite = left.entries().iter().all(|x| x.is_finite());
        let (residual, error) = (if finite { largest(&left)? / size } else { f64::INFINITY }, difference(&x, &exact));
        let error = error.frobenius() / exact.frobenius();
        curve.push(InverseStep { residual, error: if finite && error.is_finite() { error } else { f64::INFINITY } });
    }
    Ok(curve)
}

/// Conjugate gradients on `A x = b`: `|x_k - x| / |x|` for `k` from 0 through `steps`.
///
/// # Errors
/// As [`newton_curve`]; [`Error::Length`].
pub fn conjugate_gradient_curve(a: &Dense, b: &[f64], steps: usize) -> Result<Vec<f64>> {
    let exact = inverse(a)?.apply(b)?;
    let (mut x, mut r) = (vec![0.0; b.len()], b.to_vec());
    let mut p = r.clone();
    let mut curve = vec![1.0];
    for _ in 0..steps {
        let (ap, rr) = (a.apply(&p)?, dot(&r, &r));
        if rr > 0.0 {
            let length = rr / dot(&p, &ap);
            axpy(length, &p, &mut x);
            axpy(-length, &ap, &mut r);
            let keep = dot(&r, &r) / rr;
            p.iter_mut().zip(&r).for_each(|(p, r)| *p = r + keep * *p);
        }
        let rest: Vec<f64> = x.iter().zip(&exact).map(|(x, y)| x - y).collect();
        curve.push(norm(&rest) / norm(&exact));
    }
    Ok(curve)
}

/// The size of a kernel matrix and of its inverse.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct InverseNorms {
    /// The eigenvalues, ascending.
    pub eigenvalues: Vec<f64>,
    /// `|A^-1|_2`: "Softmax-free Linear Transformers", proposition 5.
    pub inverse: f64,
    /// `|D^-1/2 A^-1 D^-1/2|_2` with `D = diag(A 1)`: proposition 6.
    pub normalised: f64,
}

impl InverseNorms {
    /// Of a symmetric positive definite matrix.
    ///
    /// # Errors
    /// [`Error::Singular`] where an eigenvalue is not positive; [`Error::Decomposition`].
    pub fn of(a: &Dense) -> Result<Self> {
        let eigen = symmetric_eigen(a)?;
        let least = eigen.values.first().copied().unwrap_or(1.0);
        if least <= 0.0 {
            return Err(Error::Singular { value: least, ridge: 0.0 });
        }
        let scale: Vec<f64> = a.rows().map(|row| row.iter().sum::<f64>().powf(-0.5)).collect();
        let inverse = from_spectrum(&eigen);
        let normalised = Dense::from_fn(a.len(), |i, j| scale[i] * inverse.row(i)[j] * scale[j]);
        Ok(Self { inverse: 1.0 / least, normalised: largest(&normalised)?, eigenvalues: eigen.values })
    }

    /// The largest over the smallest eigenvalue.
    pub fn condition(&self) -> f64 {
        self.eigenvalues.last().map_or(1.0, |most| most * self.inverse)
    }

    /// How many eigenvalues lie below `threshold`. Twenty steps from `1.8 / |A|_1^2` do not invert those below
    /// `|A|_1 / 1400`.
    pub fn below(&self, threshold: f64) -> usize {
        self.eigenvalues.partition_point(|&x| x < threshold)
    }
}

fn difference(a: &Dense, b: &Dense) -> Dense {
    Dense::from_fn(a.len(), |i, j| a.row(i)[j] - b.row(i)[j])
}

/// The largest absolute eigenvalue of a symmetric matrix.
fn largest(a: &Dense) -> Result<f64> {
    Ok(symmetric_eigen(a)?.values.iter().fold(0.0, |most, x| x.abs().max(most)))
}

fn inverse(a: &Dense) -> Result<Dense> {
    let eigen = symmetric_eigen(a)?;
    match eigen.values.contains(&0.0) {
        true => Err(Error::Singular { value: 0.0, ridge: 0.0 }),
        false => Ok(from_spectrum(&eigen)),
    }
}

/// `sum_i v_i v_i^T / x_i`.
fn from_spectrum(eigen: &SymmetricEigen) -> Dense {
    let n = eigen.values.len();
    Dense::from_fn(n, |i, j| eigen.vectors.iter().zip(&eigen.values).map(|(v, x)| v[i] * v[j] / x).sum())
}
