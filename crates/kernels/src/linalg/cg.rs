//! Conjugate gradients for every column of the inverse, in f64. "LaplacianFormer", table 3 and fig. 6.

use super::{Method, Order, SMALLEST_PIVOT};
use crate::{
    Error, Result,
    scratch::{cut, scratch_len},
};

/// Relative residual at which a column is done: what f32 can hold of it.
const TOLERANCE: f64 = 1e-7;

fn sizes(n: usize) -> [usize; 5] {
    // The matrix, a column's solution, residual and direction, and the matrix times the direction; in f64.
    [2 * n * n, 2 * n, 2 * n, 2 * n, 2 * n]
}

/// f32 of working memory.
pub(super) fn work(n: usize) -> usize {
    scratch_len(sizes(n))
}

/// Writes the inverse of `a + ridge I`.
pub(super) fn invert(method: &Method, order: Order, a: &[f32], y: &mut [f32], work: &mut [f32]) -> Result<()> {
    let Order { n, stride } = order;
    let ([m, x, r, p, mp], _) = cut(work, sizes(n));
    let [m, x, r, p, mp]: [&mut [f64]; 5] = [m, x, r, p, mp].map(bytemuck::cast_slice_mut);
    for (row, a) in m.chunks_exact_mut(n).zip(a.chunks_exact(stride)) {
        row.iter_mut().zip(a).for_each(|(x, &a)| *x = a.into());
    }
    (0..n).for_each(|i| m[i * (n + 1)] += method.ridge);
    y[..order.len()].fill(0.0);
    for column in 0..n {
        x.fill(0.0);
        r.fill(0.0);
        r[column] = 1.0;
        p.copy_from_slice(r);
        let mut rr = 1.0;
        for _ in 0..2 * n {
            for (mp, row) in mp.iter_mut().zip(m.chunks_exact(n)) {
                *mp = inner(row, p);
            }
            let curvature = inner(p, mp);
            if curvature < SMALLEST_PIVOT * inner(p, p) {
                return Err(Error::Singular { mechanism: method.mechanism, landmark: column });
            }
            let alpha = rr / curvature;
            (0..n).for_each(|i| x[i] += alpha * p[i]);
            (0..n).for_each(|i| r[i] -= alpha * mp[i]);
            let next = inner(r, r);
            if next <= TOLERANCE * TOLERANCE {
                break;
            }
            (0..n).for_each(|i| p[i] = r[i] + next / rr * p[i]);
            rr = next;
        }
        (0..n).for_each(|i| y[i * stride + column] = x[i] as f32);
    }
    order.symmetrise(y, |_, mean| mean);
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
