//! Landmarks that coincide, as those of padding do, count as one: `g` equal columns `c` of the affinities add as much to
//! `C p(A) C^T`, for every polynomial or inverse `p`, as the one column `g^1/2 c` with the others left out. The matrix that is inverted then
//! has none of the eigenvalues that would be those of the ridge alone, in which f32 drowns the gradient of the keys.

use super::{layout::Saved, operator::Core};
use crate::{Error, Result, linalg::Order, mechanism::Inverse};

/// The least by which similarities of landmarks are below one, together with the ridge: gradients are divided by its square.
const LEAST_APART: f64 = 3e-3;

/// Which landmarks of a slice count, from the affinities among all of them.
pub(super) struct Counted<'s> {
    /// The factor on every landmark's column: `g^1/2` for the first of `g` that coincide, 0 for the others.
    pub factors: &'s mut [f32],
    /// The first of those that each coincides with.
    pub first: &'s mut [f32],
    /// By how much the largest similarity of two that count is below that of one to itself.
    pub nearest: &'s mut f32,
}

impl Counted<'_> {
    /// `a` has the affinities among the landmarks `u`, rows of `dp`.
    pub fn write(self, order: Order, a: &[f32], u: &[f32], dp: usize) {
        let row = |i: usize| &u[i * dp..][..dp];
        self.factors.fill(1.0);
        *self.nearest = 1.0;
        for i in 0..order.n {
            if self.factors[i] == 0.0 {
                continue;
            }
            let (mut count, own) = (1.0, a[i * (order.stride + 1)]);
            for j in i + 1..order.n {
                if self.factors[j] == 0.0 {
                    continue;
                }
                let apart = 1.0 - a[i * order.stride + j] / own;
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

impl Core<'_> {
    /// Whether the landmarks that count are far enough apart for gradients in f32. Eigenvalues that are dropped, and the papers' own
    /// settings of `soft`, are the caller's to choose.
    pub(super) fn check_apart(&self, nearest: f32) -> Result<()> {
        let (apart, ridge) = (f64::from(nearest), self.structure.ridge);
        let matters = self.preset.refuses_close && self.structure.inverse != Inverse::Eigen;
        if !matters || apart + ridge >= LEAST_APART || apart.is_nan() {
            return Ok(());
        }
        let remedy = "similarities of landmarks are too near one: set a larger `ridge`, or let the score fall faster";
        Err(Error::Close { tensor: "k", apart, limit: LEAST_APART - ridge, remedy })
    }

    /// Turns the affinities among all landmarks into those of the ones that count. Returns the factor on the inverse's start that they
    /// had before, where they had another.
    pub(super) fn merge(&self, order: Order, factors: &[f32], a: &mut [f32], work: &mut [f32]) -> Option<f64> {
        if !factors.contains(&0.0) {
            return None;
        }
        let start = self.method().start(self.call.level, order, a, work);
        for (row, factor) in a.chunks_exact_mut(order.stride).zip(&factors[..order.n]) {
            row.iter_mut().zip(factors).for_each(|(x, other)| *x *= factor * other);
        }
        start
    }

    /// Gives every landmark its share of `du`, the gradient of those that count for several.
    pub(super) fn share_gradient(&self, saved: &Saved<&[f32]>, n: usize, du: &mut [f32]) {
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
