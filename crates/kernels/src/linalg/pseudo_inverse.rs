//! The pseudo-inverse of a matrix that need be neither symmetric nor square, by Newton-Schulz from its transpose, in f64.

use faer::{Mat, MatRef};

/// An iterate is the limit where a step moves it by less than this part of it: later steps would double what rounding leaves in
/// the null space.
const CONVERGED: f64 = 1e-13;

/// `Z <- 2Z - Z A Z` from `1.8 A^T / (|A|_1 |A|_inf)`.
pub(crate) struct PseudoInverse {
    a: Mat<f64>,
    /// The factor on the start.
    factor: f64,
    /// Every iterate, the start first.
    iterates: Vec<Mat<f64>>,
}

impl PseudoInverse {
    /// Of `a`, by at most `steps` steps.
    pub fn new(a: Mat<f64>, steps: usize) -> Self {
        let norms = norm(a.as_ref()).1 * norm(a.transpose()).1;
        // The pseudo-inverse of nothing is nothing.
        let factor = if norms > 0.0 { 1.8 / norms } else { 0.0 };
        let mut iterates = vec![faer::Scale(factor) * a.transpose()];
        for _ in 0..steps {
            let z = &iterates[iterates.len() - 1];
            let zaz = z * (&a * z);
            let moved = (&zaz - z).norm_max() > CONVERGED * z.norm_max();
            if !moved {
                break;
            }
            let next = faer::Scale(2.0) * z - zaz;
            iterates.push(next);
        }
        Self { a, factor, iterates }
    }

    /// The last iterate.
    pub fn result(&self) -> MatRef<'_, f64> {
        self.iterates[self.iterates.len() - 1].as_ref()
    }

    /// The gradient of `a` from that of the result: back through the steps, or, `implicit`, of what they tend to.
    pub fn gradient(&self, dz: Mat<f64>, implicit: bool) -> Mat<f64> {
        if implicit {
            return self.of_limit(&dz);
        }
        let (mut dz, mut da) = (dz, Mat::zeros(self.a.nrows(), self.a.ncols()));
        for z in self.iterates[..self.iterates.len() - 1].iter().rev() {
            da -= z.transpose() * &dz * z.transpose();
            let through = &dz * (&self.a * z).transpose() + (z * &self.a).transpose() * &dz;
            dz = faer::Scale(2.0) * dz - through;
        }
        da + faer::Scale(self.factor) * dz.transpose() + self.of_factor(&dz)
    }

    /// The gradient of a pseudo-inverse of constant rank: `-Z^T dZ Z^T + (I - A Z) dZ^T Z Z^T + Z^T Z dZ^T (I - Z A)`. "The
    /// Differentiation of Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables Separate", eq. 4.12.
    fn of_limit(&self, dz: &Mat<f64>) -> Mat<f64> {
        let (z, zt, dzt) = (self.result(), self.result().transpose(), dz.transpose());
        let rest = |x: Mat<f64>| Mat::<f64>::identity(x.nrows(), x.ncols()) - x;
        let left = rest(&self.a * z) * dzt * (z * zt);
        let right = (zt * z) * dzt * rest(z * &self.a);
        left + right - zt * dz * zt
    }

    /// The gradient through the norms in the factor on the start.
    fn of_factor(&self, dstart: &Mat<f64>) -> Mat<f64> {
        let (rows, columns) = (self.a.nrows(), self.a.ncols());
        let mut norms = Mat::zeros(rows, columns);
        let product = |i: usize, j: usize| dstart[(j, i)] * self.a[(i, j)];
        let rate = -self.factor
            * (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| product(i, j)).sum::<f64>();
        let [(column, in_column), (row, in_row)] = [norm(self.a.as_ref()), norm(self.a.transpose())];
        if self.factor > 0.0 {
            (0..rows).for_each(|i| norms[(i, column)] += rate * self.a[(i, column)].signum() / in_column);
            (0..columns).for_each(|j| norms[(row, j)] += rate * self.a[(row, j)].signum() / in_row);
        }
        norms
    }
}

/// The first column of the largest absolute sum, and this.
fn norm(a: MatRef<'_, f64>) -> (usize, f64) {
    let sums = a.col_iter().map(|column| column.iter().map(|x| x.abs()).sum::<f64>()).enumerate();
    sums.fold((0, 0.0), |most, x| if x.1 > most.1 { x } else { most })
}
