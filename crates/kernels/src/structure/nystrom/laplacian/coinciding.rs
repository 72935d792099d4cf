//! Landmarks that coincide, as those of padding do, count as one: `g` equal columns `c` of the kernel add as much to
//! `C p(W) C^T`, for every polynomial or inverse `p`, as the one column `g^1/2 c` with the others left out. The matrix that is inverted then
//! has none of the eigenvalues that would be those of the ridge alone, in which f32 drowns the gradient of the keys.

use super::{Core, SavedSlice};
use crate::{Error, Result, linalg::Order};

/// The least by which similarities of landmarks are below one, together with the ridge: `out` has lost at most three digits to it.
const LEAST_FORWARD: f64 = 5e-4;
/// The same for gradients, which are divided by its square.
const LEAST_BACKWARD: f64 = 3e-3;

/// Which landmarks of a slice count, from the kernel among all of them.
pub(super) struct Counted<'s> {
    /// The factor on every landmark's column: `g^1/2` for the first of `g` that coincide, 0 for the others.
    pub factors: &'s mut [f32],
    /// The first of those that each coincides with.
    pub first: &'s mut [f32],
    /// By how much the largest similarity of two that count is below one.
    pub nearest: &'s mut f32,
}

impl Counted<'_> {
    /// `w` has the kernel among the landmarks `u`, rows of `dp`.
    pub fn write(self, order: Order, w: &[f32], u: &[f32], dp: usize) {
        let row = |i: usize| &u[i * dp..][..dp];
        self.factors.fill(1.0);
        *self.nearest = 1.0;
        for i in 0..order.n {
            if self.factors[i] == 0.0 {
                continue;
            }
            let mut count = 1.0;
            for j in i + 1..order.n {
                if self.factors[j] == 0.0 {
                    continue;
                }
                let apart = 1.0 - w[i * order.stride + j];
                if apart == 0.0 && row(i) == row(j) {
                    (self.factors[j], self.first[j]) = (0.0, i as f32);
                    count += 1.0;
                } else {
                    *self.nearest = self.nearest.min(apart);
                }
            }
            self.factors[i] = f32::sqrt(count);
        }
    }
}

/// Whether a landmark is left out.
fn any(factors: &[f32]) -> bool {
    factors.contains(&0.0)
}

impl Core<'_> {
    /// Whether the landmarks that count are far enough apart for f32.
    pub(super) fn check_apart(&self, nearest: f32, is_backward: bool) -> Result<()> {
        let (apart, ridge) = (f64::from(nearest), self.m.ridge);
        let least = if is_backward { LEAST_BACKWARD } else { LEAST_FORWARD };
        if apart + ridge >= least || apart.is_nan() {
            return Ok(());
        }
        let remedy = "similarities of landmarks are too near one: set a larger `ridge` or a smaller `lambda`";
        Err(Error::Close { tensor: "k", apart, limit: least - ridge, remedy })
    }

    /// The factors on the columns of a slice whose transposed landmarks are given, if one is not 1.
    pub(super) fn factors<'x>(&self, transposed: &'x [f32]) -> Option<&'x [f32]> {
        let factors = &transposed[self.call.shape.head_dim * self.sizes.mp..][..self.sizes.mp];
        any(factors).then_some(factors)
    }

    /// Turns the kernel among all landmarks into that of those which count. Returns the norm that it had with the ridge, which
    /// Newton-Schulz starts from, where that is another.
    pub(super) fn merge(&self, order: Order, factors: &[f32], w: &mut [f32]) -> Option<f64> {
        if !any(factors) {
            return None;
        }
        let norm = order.norm(w) + self.m.ridge;
        for (row, factor) in w.chunks_exact_mut(order.stride).zip(&factors[..order.n]) {
            row.iter_mut().zip(factors).for_each(|(x, other)| *x *= factor * other);
        }
        Some(norm)
    }

    /// Gives every landmark its share of `du`, the gradient of those that count for several.
    pub(super) fn share_gradient(&self, saved: &SavedSlice<'_>, n: usize, du: &mut [f32]) {
        let dp = self.sizes.dp;
        for i in (0..n).filter(|&i| saved.column_factors[i] > 1.0) {
            du[i * dp..][..dp].iter_mut().for_each(|x| *x /= saved.column_factors[i].powi(2));
        }
        for j in (0..n).filter(|&j| saved.column_factors[j] == 0.0) {
            let first = saved.first[j] as usize * dp;
            du.copy_within(first..first + dp, j * dp);
        }
    }
}
