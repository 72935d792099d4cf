//! Conjugate gradients for every column of the inverse, in f64, and a step of Newton's. "LaplacianFormer", table 3 and fig. 6.

use faer::Accum;

use super::{
    Entries, Method, Order, SMALLEST_PIVOT,
    wide::{self, WIDE, product, rows},
};
use crate::{
    Error, Result,
    scratch::{cut, scratch_len},
};

/// Relative residual at which a column is done. It leaves the inverse as many times further off as the condition is large, which the step
/// after it, that squares residuals, takes away.
const TOLERANCE: f64 = 1e-7;

/// Steps per landmark after which a column will not come to it: in exact arithmetic one is enough, rounding takes some more.
const MOST_STEPS: usize = 10;

fn sizes(n: usize) -> [usize; 7] {
    // The matrix, the inverse and two products; a column's residual and direction, and the matrix times the direction; in f64.
    let [square, column] = [WIDE * n * n, WIDE * n];
    [square, square, square, square, column, column, column]
}

/// f32 of working memory.
pub(super) fn work(n: usize) -> usize {
    scratch_len(sizes(n))
}

/// Writes the inverse of `a + ridge I`.
pub(super) fn invert(method: &Method, order: Order, a: &[f32], y: &mut Entries<'_>, work: &mut [f32]) -> Result<()> {
    let n = order.n;
    let (buffers, _) = cut(work, sizes(n));
    let [m, inverse, first, second, r, p, mp]: [&mut [f64]; 7] = buffers.map(bytemuck::cast_slice_mut);
    wide::widen(order, a, method.ridge, m);
    inverse.fill(0.0);
    for (column, x) in inverse.chunks_exact_mut(n).enumerate() {
        r.fill(0.0);
        r[column] = 1.0;
        p.copy_from_slice(r);
        let (mut rr, mut steps) = (1.0, 0);
        while rr > TOLERANCE * TOLERANCE {
            for (mp, row) in mp.iter_mut().zip(m.chunks_exact(n)) {
                *mp = inner(row, p);
            }
            let curvature = inner(p, mp);
            if curvature < SMALLEST_PIVOT * inner(p, p) || steps == MOST_STEPS * n {
                return Err(Error::Singular { mechanism: method.mechanism, landmark: column });
            }
            let alpha = rr / curvature;
            (0..n).for_each(|i| x[i] += alpha * p[i]);
            (0..n).for_each(|i| r[i] -= alpha * mp[i]);
            let next = inner(r, r);
            (0..n).for_each(|i| p[i] = r[i] + next / rr * p[i]);
            (rr, steps) = (next, steps + 1);
        }
    }
    product(first, Accum::Replace, rows(m, n), rows(inverse, n));
    product(second, Accum::Replace, rows(inverse, n), rows(first, n));
    let refined = |i: usize, j: usize| 2.0 * inverse[i * n + j] - second[i * n + j];
    y.write(order, |i, j| 0.5 * (refined(i, j) + refined(j, i)));
    Ok(())
}

/// `<x, y>` in eight interleaved sums.
fn inner(x: &[f64], y: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let ((x, x_tail), (y, y_tail)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in x.iter().zip(y) {
        (0..8).for_each(|n| sums[n] += x[n] * y[n]);
    }
    sums.iter().sum::<f64>() + x_tail.iter().zip(y_tail).map(|(x, y)| x * y).sum::<f64>()
}
