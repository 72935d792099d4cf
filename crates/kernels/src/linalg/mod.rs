//! Small symmetric matrices: their inverses, and the gradients of those.
//!
//! A matrix is a kernel among landmarks with a ridge: `n` rows of f32, `stride` (whole vectors) apart, zeros between.
//! Factorisations and eigenvalues are those of `faer`, in f64; Newton-Schulz takes steps in f32 where these keep their digits.

mod cg;
mod factor;
mod newton;
pub(crate) mod pseudo_inverse;
pub(crate) mod wide;

use crate::{
    Error, Result,
    mechanism::{Inverse, InverseGradient, NewtonInit},
    simd::{
        Level,
        product::{Left, Right, Size, Store, multiply},
    },
};

/// Pivots below this are rounding: the matrices have diagonals of order one and entries in f32.
pub(crate) const SMALLEST_PIVOT: f64 = f32::EPSILON as f64;

/// How a matrix `M = A + ridge I` is inverted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Method {
    /// For errors.
    pub mechanism: &'static str,
    pub inverse: Inverse,
    /// Newton-Schulz steps.
    pub steps: usize,
    /// Where Newton-Schulz starts; `None` is `I / |M|_1`.
    pub init: Option<NewtonInit>,
    /// The factor on Newton-Schulz's start, where the matrix stands for another; `None` is what `init` makes of its own.
    pub start: Option<f64>,
    pub ridge: f64,
    pub gradient: InverseGradient,
    /// Share of the largest eigenvalue up to which eigenvalues are dropped.
    pub cutoff: f64,
}

/// Side of the squares that a matrix and its transpose are worked through in.
const BLOCK: usize = 64;

/// A matrix to write to: each entry as an f32, and what that leaves off as another, unless there is no room for it.
pub(crate) struct Entries<'a> {
    pub high: &'a mut [f32],
    pub low: &'a mut [f32],
}

impl Entries<'_> {
    fn set(&mut self, at: usize, x: f64) {
        self.high[at] = x as f32;
        if let Some(low) = self.low.get_mut(at) {
            *low = (x - f64::from(self.high[at])) as f32;
        }
    }

    /// Writes a symmetric matrix, `f` of its row and column.
    fn write(&mut self, order: Order, f: impl Fn(usize, usize) -> f64) {
        order.pairs(|i, j| {
            let x = f(i, j);
            self.set(i * order.stride + j, x);
            self.set(j * order.stride + i, x);
        });
    }
}

/// Sizes of a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub n: usize,
    pub stride: usize,
}

impl Order {
    pub const fn len(self) -> usize {
        self.n * self.stride
    }

    /// The matrix product `left * right`, over all vectors of the rows.
    fn times(self, level: Level, left: &[f32], right: &[f32], out: &mut [f32]) {
        let Self { n, stride } = self;
        let left = Left { data: left, row_stride: stride, depth_stride: 1 };
        let size = Size { rows: n, cols: stride, depth: n };
        multiply(level, size, left, Right { data: right, stride }, Store { data: out, stride });
    }

    /// Calls `f` with every row and every column up to it.
    fn pairs(self, mut f: impl FnMut(usize, usize)) {
        // In squares: columns across lie in another line of the cache each.
        for rows in (0..self.n).step_by(BLOCK) {
            for columns in (0..=rows).step_by(BLOCK) {
                for i in rows..self.n.min(rows + BLOCK) {
                    (columns..(i + 1).min(columns + BLOCK)).for_each(|j| f(i, j));
                }
            }
        }
    }

    /// Every entry of `x` becomes `f` of its place and of the mean of `x` and its transpose, which makes `x` symmetric if `f` is.
    fn symmetrise(self, x: &mut [f32], f: impl Fn(usize, f32) -> f32) {
        self.pairs(|i, j| {
            let (at, across) = (i * self.stride + j, j * self.stride + i);
            let value = f(at, 0.5 * (x[at] + x[across]));
            (x[at], x[across]) = (value, value);
        });
    }

    /// Writes `a` with `ridge` on its diagonal.
    pub fn add_ridge(self, a: &[f32], ridge: f64, out: &mut [f32]) {
        out[..self.len()].copy_from_slice(&a[..self.len()]);
        (0..self.n).for_each(|i| out[i * (self.stride + 1)] += ridge as f32);
    }

    /// The largest absolute column sum of the symmetric `a`.
    pub fn norm(self, a: &[f32]) -> f64 {
        let sum = |row: &[f32]| row[..self.n].iter().map(|&x| f64::from(x.abs())).sum();
        a[..self.len()].chunks_exact(self.stride).map(sum).fold(0.0, f64::max)
    }
}

/// Whether the gradient of an inverse is `dA = -Y dY Y`, and not that of how it is computed.
pub(crate) fn is_implicit(inverse: Inverse, gradient: InverseGradient) -> bool {
    inverse != Inverse::Eigen && gradient == InverseGradient::Implicit
}

impl Method {
    /// f32 of working memory of [`Method::invert`], for matrices up to `order`.
    pub fn work(&self, order: Order) -> usize {
        match self.inverse {
            Inverse::NewtonSchulz => newton::work(self, order),
            Inverse::Cholesky => factor::cholesky_work(order.n),
            Inverse::Eigen => factor::eigen_work(order.n),
            Inverse::Cg => cg::work(order.n),
        }
    }

    /// f32 of working memory of [`Method::start`] and [`Method::gradient`], for matrices up to `order`.
    pub fn gradient_work(&self, order: Order) -> usize {
        let start = 2 * order.len();
        if self.is_implicit() { start } else { factor::eigen_work(order.n).max(start) }
    }

    /// Operations of an inverse of order `n` as it is defined: of Newton-Schulz all steps by products, of conjugate gradients one.
    pub fn flops(&self, n: usize) -> u64 {
        let per_cube = match self.inverse {
            Inverse::NewtonSchulz => 4 * self.steps as u64,
            Inverse::Cholesky => 1,
            Inverse::Eigen => 9,
            Inverse::Cg => 2,
        };
        per_cube * (n as u64).pow(3)
    }

    /// The factor on Newton-Schulz's start from `a + ridge I`; none for other methods. `work` is that of [`Method::invert`].
    pub fn start(&self, level: Level, order: Order, a: &[f32], work: &mut [f32]) -> Option<f64> {
        (self.inverse == Inverse::NewtonSchulz && order.n > 0).then(|| newton::factor(self, level, order, a, work))
    }

    /// Writes the inverse of `a + ridge I` to `y`, which is all zeros.
    /// Returns whether its gradient is that of the exact inverse: Newton-Schulz may stop short of it.
    ///
    /// # Errors
    /// [`Error::Singular`] where the method needs a positive definite matrix and has none; [`Error::Diverged`].
    pub fn invert(&self, level: Level, order: Order, a: &[f32], mut y: Entries<'_>, work: &mut [f32]) -> Result<bool> {
        if order.n == 0 {
            return Ok(true);
        }
        let mut settled = self.inverse != Inverse::Eigen;
        match self.inverse {
            Inverse::NewtonSchulz => settled = newton::invert(self, level, order, a, &mut y, work),
            Inverse::Cholesky => factor::cholesky(self, level, order, a, &mut y, work)?,
            Inverse::Eigen => factor::eigen(self, order, a, &mut y, work),
            Inverse::Cg => cg::invert(self, order, a, &mut y, work)?,
        }
        if !y.high[..order.len()].iter().all(|y| y.is_finite()) {
            return Err(Error::Diverged { mechanism: self.mechanism });
        }
        // The entries of `a` are f32: of what an inverse has made more of than that tells, nothing is right.
        let lost = |i: usize| f64::from(y.high[i * (order.stride + 1)]) * SMALLEST_PIVOT > 1.0;
        match (0..order.n).find(|&i| self.inverse != Inverse::Eigen && lost(i)) {
            Some(landmark) => Err(Error::Singular { mechanism: self.mechanism, landmark }),
            None => Ok(settled),
        }
    }

    /// Whether the gradient is that of the exact inverse, `dA = -Y dY Y`, as far as it can be told beforehand.
    pub fn is_implicit(&self) -> bool {
        is_implicit(self.inverse, self.gradient)
    }

    /// Turns `dy = high + low`, the gradient of the inverse of `a + ridge I`, into that of `a`, which `high` then has, where it is not that of
    /// the exact inverse.
    pub fn gradient(&self, level: Level, order: Order, a: &[f32], dy: [&mut [f32]; 2], work: &mut [f32]) {
        match self.inverse {
            _ if order.n == 0 => {}
            Inverse::Eigen => factor::eigen_gradient(self, order, a, dy, work),
            _ => newton::unrolled(self, level, order, a, dy, work),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a direction that rounding of the matrix may have made, whichever way it is inverted.
    #[test]
    fn what_f32_does_not_tell_is_singular() {
        let order = Order { n: 3, stride: 16 };
        let (mut a, level) = (vec![0.0; order.len()], Level::selected().unwrap());
        [1.0, 1e-8, 1.0].into_iter().enumerate().for_each(|(i, x)| a[i * (order.stride + 1)] = x);
        let (init, gradient) = (Some(NewtonInit::Identity), InverseGradient::Implicit);
        for inverse in [Inverse::NewtonSchulz, Inverse::Cholesky] {
            for (ridge, singular) in [(1e-10, true), (1e-4, false)] {
                let method =
                    Method { mechanism: "soft", inverse, steps: 60, init, start: None, ridge, gradient, cutoff: 0.0 };
                let (mut high, mut low) = (vec![0.0; order.len()], vec![0.0; order.len()]);
                let y = Entries { high: &mut high, low: &mut low };
                let inverted = method.invert(level, order, &a, y, &mut vec![0.0; method.work(order)]);
                assert_eq!(matches!(inverted, Err(Error::Singular { landmark: 1, .. })), singular, "{inverted:?}");
                assert_eq!(inverted.is_ok(), !singular);
            }
        }
    }

    /// In every square that a matrix is worked through in, at its edges too.
    #[test]
    fn a_matrix_and_its_transpose_have_one_mean() {
        for n in [1, BLOCK, BLOCK + 1, 2 * BLOCK + 7] {
            let order = Order { n, stride: n.next_multiple_of(16) };
            let mut x: Vec<f32> = (0..order.len()).map(|at| (at as f32 * 0.7).sin()).collect();
            let before = x.clone();
            order.symmetrise(&mut x, |_, x| x);
            for i in 0..n {
                for j in 0..n {
                    let (at, across) = (i * order.stride + j, j * order.stride + i);
                    assert_eq!(x[at], 0.5 * (before[at] + before[across]), "{n}: {i}, {j}");
                }
            }
        }
    }
}
