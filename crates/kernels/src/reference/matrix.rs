//! The dense f64 matrix that the references are written in: plain loops, nothing clever.

/// A row-major matrix.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Matrix {
    pub fn from_fn(rows: usize, cols: usize, mut entry: impl FnMut(usize, usize) -> f64) -> Self {
        let mut data = Vec::with_capacity(rows * cols);
        for i in 0..rows {
            data.extend((0..cols).map(|j| entry(i, j)));
        }
        Self { rows, cols, data }
    }

    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn row(&self, i: usize) -> &[f64] {
        &self.data[i * self.cols..][..self.cols]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f64] {
        &mut self.data[i * self.cols..][..self.cols]
    }

    pub fn at(&self, i: usize, j: usize) -> f64 {
        self.data[i * self.cols + j]
    }

    /// Every entry changed by `f(i, j, entry)`.
    pub fn map(&self, mut f: impl FnMut(usize, usize, f64) -> f64) -> Self {
        Self::from_fn(self.rows, self.cols, |i, j| f(i, j, self.at(i, j)))
    }

    pub fn transpose(&self) -> Self {
        Self::from_fn(self.cols, self.rows, |i, j| self.at(j, i))
    }

    /// `self * other`.
    pub fn times(&self, other: &Self) -> Self {
        debug_assert_eq!(self.cols, other.rows);
        let mut product = Self::zeros(self.rows, other.cols);
        for i in 0..self.rows {
            for (n, &x) in self.row(i).iter().enumerate() {
                axpy(x, other.row(n), product.row_mut(i));
            }
        }
        product
    }

    /// `self * other^T`: the inner products of the rows.
    pub fn times_transposed(&self, other: &Self) -> Self {
        self.times(&other.transpose())
    }

    /// `self + other`.
    pub fn plus(&self, other: &Self) -> Self {
        self.map(|i, j, x| x + other.at(i, j))
    }

    /// The inner product of two rows of equal length, summed over all rows.
    pub fn inner(&self, other: &Self) -> f64 {
        inner(&self.data, &other.data)
    }

    /// The inverse of a well-conditioned square matrix, by Gauss-Jordan elimination with partial pivoting.
    pub fn inverse(mut self) -> Self {
        let n = self.rows;
        let mut inverse = Self::from_fn(n, n, |i, j| f64::from(u8::from(i == j)));
        for col in 0..n {
            let pivot = (col..n).max_by(|&a, &b| self.at(a, col).abs().total_cmp(&self.at(b, col).abs()));
            let pivot = pivot.unwrap_or(col);
            for m in [&mut self, &mut inverse] {
                (0..n).for_each(|j| m.data.swap(col * n + j, pivot * n + j));
            }
            let diagonal = self.at(col, col);
            for m in [&mut self, &mut inverse] {
                m.row_mut(col).iter_mut().for_each(|x| *x /= diagonal);
            }
            let (left, right) = (self.row(col).to_vec(), inverse.row(col).to_vec());
            for i in (0..n).filter(|&i| i != col) {
                let factor = -self.at(i, col);
                axpy(factor, &left, self.row_mut(i));
                axpy(factor, &right, inverse.row_mut(i));
            }
        }
        inverse
    }
}

/// `y += a x`.
fn axpy(a: f64, x: &[f64], y: &mut [f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// The inner product of two vectors.
pub(super) fn inner(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// `x / y`, and 0 where `y` is 0: an empty sum is divided by nothing.
pub(super) fn ratio(x: f64, y: f64) -> f64 {
    if y == 0.0 { 0.0 } else { x / y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverse_needs_the_pivot_and_undoes_the_matrix() {
        let m = Matrix { rows: 3, cols: 3, data: vec![0.0, 2.0, 1.0, 1.0, 1e-3, -1.0, 4.0, 0.5, 3.0] };
        let product = m.clone().inverse().times(&m);
        for i in 0..3 {
            for j in 0..3 {
                let identity = f64::from(u8::from(i == j));
                assert!((product.at(i, j) - identity).abs() < 1e-14, "[{i}, {j}] = {}", product.at(i, j));
            }
        }
    }
}
