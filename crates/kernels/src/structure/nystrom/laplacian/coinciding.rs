//! Landmarks that coincide, as those of padding do, count as one: `g` equal columns `c` of the kernel add as much to
//! `C p(W) C^T`, for every polynomial or inverse `p`, as the one column `g^1/2 c` with the others left out. The matrix that is inverted then
//! has none of the eigenvalues that would be those of the ridge alone, in which f32 drowns the gradient of the keys.

use super::Core;
use crate::linalg::Order;

/// Writes the factor on every landmark's column: `g^1/2` for the first of `g` rows of `u [.., dp]` that are equal, 0 for the others.
pub(super) fn column_factors(u: &[f32], dp: usize, weights: &mut [f32]) {
    let (row, n) = (|i: usize| &u[i * dp..][..dp], u.len() / dp);
    weights.fill(1.0);
    for i in 0..n {
        if weights[i] == 0.0 {
            continue;
        }
        let mut count = 1.0;
        for (_, weight) in weights[..n].iter_mut().enumerate().skip(i + 1).filter(|&(j, _)| row(i) == row(j)) {
            *weight = 0.0;
            count += 1.0;
        }
        weights[i] = f32::sqrt(count);
    }
}

/// Whether a landmark is left out.
fn any(weights: &[f32]) -> bool {
    weights.contains(&0.0)
}

/// Gives every landmark its share of `du [.., dp]`, the gradient of those that count for several.
pub(super) fn share_gradient(u: &[f32], dp: usize, weights: &[f32], du: &mut [f32]) {
    let n = u.len() / dp;
    for i in (0..n).filter(|&i| weights[i] > 1.0) {
        du[i * dp..][..dp].iter_mut().for_each(|x| *x /= weights[i] * weights[i]);
        for j in (i + 1..n).filter(|&j| weights[j] == 0.0 && u[i * dp..][..dp] == u[j * dp..][..dp]) {
            du.copy_within(i * dp..(i + 1) * dp, j * dp);
        }
    }
}

impl Core<'_> {
    /// The factors on the columns of a slice whose transposed landmarks are given, if one is not 1.
    pub(super) fn weights<'x>(&self, transposed: &'x [f32]) -> Option<&'x [f32]> {
        let weights = &transposed[self.call.shape.head_dim * self.sizes.mp..][..self.sizes.mp];
        any(weights).then_some(weights)
    }

    /// Turns the kernel among all landmarks into that of those which count. Returns the norm that it had with the ridge, which
    /// Newton-Schulz starts from, where that is another.
    pub(super) fn merge(&self, order: Order, transposed: &[f32], w: &mut [f32]) -> Option<f64> {
        let weights = self.weights(transposed)?;
        let norm = order.norm(w) + self.m.ridge;
        for (row, weight) in w.chunks_exact_mut(order.stride).zip(&weights[..order.n]) {
            row.iter_mut().zip(weights).for_each(|(x, other)| *x *= weight * other);
        }
        Some(norm)
    }
}
