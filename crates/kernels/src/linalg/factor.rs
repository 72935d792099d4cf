//! Inverses by factorisation, in f64.

use std::mem::MaybeUninit;

use faer::{
    MatMut, MatRef, Par,
    diag::DiagMut,
    dyn_stack::{MemStack, StackReq},
    linalg::{cholesky::llt, evd},
};

use super::{
    Entries, Method, Order, SMALLEST_PIVOT,
    wide::{self, WIDE},
};
use crate::{
    Error, Result,
    scratch::{cut, room},
    simd::Level,
};

/// Up to this order rows are made of rows: `faer` splits triangles in halves down to 2 x 2, which then takes most of the time.
const BY_ROWS: usize = 96;

/// f32 of working memory of [`cholesky`].
pub(super) fn cholesky_work(n: usize) -> usize {
    let factor = llt::factor::cholesky_in_place_scratch::<f64>(n, Par::Seq, Default::default());
    let inverse = llt::inverse::inverse_scratch::<f64>(n, Par::Seq);
    room([WIDE * n * n, WIDE * n * n]) + floats(factor.or(inverse)).max(wide::inverse_work(n))
}

/// f32 of working memory of [`eigen`] and [`eigen_gradient`].
pub(super) fn eigen_work(n: usize) -> usize {
    let vectors = evd::ComputeEigenvectors::Yes;
    let stack = evd::self_adjoint_evd_scratch::<f64>(n, vectors, Par::Seq, Default::default());
    room([WIDE * n * n; 4]) + room([WIDE * n]) + floats(stack)
}

/// f32 that a stack of `request` takes.
fn floats(request: StackReq) -> usize {
    (request.size_bytes() + request.align_bytes()).div_ceil(size_of::<f32>())
}

/// `faer`'s temporary memory.
fn stack(memory: &mut [f32]) -> &mut MemStack {
    let bytes = size_of_val(memory);
    // SAFETY: the same memory for the same time, of an alignment that suits; what is written to it are numbers, so that it
    // holds valid f32 afterwards whatever they are.
    MemStack::new(unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<MaybeUninit<u8>>(), bytes) })
}

/// Writes `a + ridge I` as rows without gaps.
fn widen(order: Order, a: &[f32], ridge: f64, out: &mut [f64]) {
    let Order { n, stride } = order;
    for (row, a) in out.chunks_exact_mut(n).zip(a.chunks_exact(stride)) {
        row.iter_mut().zip(a).for_each(|(x, &a)| *x = a.into());
    }
    (0..n).for_each(|i| out[i * (n + 1)] += ridge);
}

/// The inverse by the Cholesky factor.
pub(super) fn cholesky(
    method: &Method,
    level: Level,
    order: Order,
    a: &[f32],
    y: &mut Entries<'_>,
    work: &mut [f32],
) -> Result<()> {
    let Order { n, stride } = order;
    let ([factor, inverse], rest) = cut(work, [WIDE * n * n, WIDE * n * n]);
    let (factor, inverse): (&mut [f64], &mut [f64]) =
        (bytemuck::cast_slice_mut(factor), bytemuck::cast_slice_mut(inverse));
    widen(order, a, method.ridge, factor);
    let singular = |landmark| Error::Singular { mechanism: method.mechanism, landmark };
    // The matrix is symmetric: its rows may pass for columns.
    let mut l = MatMut::from_column_major_slice_mut(factor, n, n);
    let done =
        llt::factor::cholesky_in_place(l.as_mut(), Default::default(), Par::Seq, stack(rest), Default::default());
    if let Err(faer::linalg::solvers::LltError::NonPositivePivot { index }) = done {
        return Err(singular(index));
    }
    if let Some(landmark) = (0..n).find(|&i| l[(i, i)] * l[(i, i)] < SMALLEST_PIVOT) {
        return Err(singular(landmark));
    }
    if n <= BY_ROWS {
        wide::invert_factor(level, n, factor, inverse, rest);
    } else {
        // Written below the diagonal of columns, which is above the diagonal of rows.
        let out = MatMut::from_column_major_slice_mut(inverse, n, n);
        llt::inverse::inverse(out, l.as_ref(), Par::Seq, stack(rest));
    }
    for i in 0..n {
        for j in i..n {
            y.set(i * stride + j, inverse[i * n + j]);
            y.set(j * stride + i, inverse[i * n + j]);
        }
    }
    Ok(())
}

/// `a + ridge I = U diag(x) U^T` and what is kept of `1/x`: the rows of `vectors` are eigenvectors.
struct Spectrum<'a> {
    vectors: &'a mut [f64],
    values: &'a mut [f64],
}

fn spectrum<'a>(method: &Method, order: Order, a: &[f32], work: &'a mut [f32]) -> Spectrum<'a> {
    let n = order.n;
    let ([matrix, vectors, values], rest) = cut(work, [WIDE * n * n, WIDE * n * n, WIDE * n]);
    let matrix: &mut [f64] = bytemuck::cast_slice_mut(matrix);
    let vectors: &mut [f64] = bytemuck::cast_slice_mut(vectors);
    let values: &mut [f64] = bytemuck::cast_slice_mut(values);
    widen(order, a, method.ridge, matrix);
    let done = evd::self_adjoint_evd(
        MatRef::from_column_major_slice(matrix, n, n),
        DiagMut::from_slice_mut(values),
        Some(MatMut::from_column_major_slice_mut(vectors, n, n)),
        Par::Seq,
        stack(rest),
        Default::default(),
    );
    if done.is_err() {
        // Only entries that are not numbers keep it from converging.
        values.fill(f64::NAN);
    }
    Spectrum { vectors, values }
}

impl Spectrum<'_> {
    /// `1/x_i`, or 0 where it is dropped.
    fn inverse(&self, method: &Method, i: usize) -> f64 {
        // Ascending.
        let most = self.values[self.values.len() - 1];
        if self.values[i] <= method.cutoff * most { 0.0 } else { 1.0 / self.values[i] }
    }
}

/// The pseudo-inverse by eigenvalues.
pub(super) fn eigen(method: &Method, order: Order, a: &[f32], y: &mut Entries<'_>, work: &mut [f32]) {
    let Order { n, stride } = order;
    let spectrum = spectrum(method, order, a, work);
    let u = &*spectrum.vectors;
    for i in 0..n {
        for j in 0..=i {
            let term = |k: usize| u[k * n + i] * spectrum.inverse(method, k) * u[k * n + j];
            let x = (0..n).map(term).sum::<f64>();
            y.set(i * stride + j, x);
            y.set(j * stride + i, x);
        }
    }
}

/// Turns `dy` into `da` by the divided differences of the cut-off `1/x`: the formula of an inverse lacks what passes
/// between kept and dropped directions.
pub(super) fn eigen_gradient(method: &Method, order: Order, a: &[f32], dy: &mut [f32], work: &mut [f32]) {
    let Order { n, stride } = order;
    let ([first, second], work) = cut(work, [WIDE * n * n, WIDE * n * n]);
    let (first, second): (&mut [f64], &mut [f64]) = (bytemuck::cast_slice_mut(first), bytemuck::cast_slice_mut(second));
    let spectrum = spectrum(method, order, a, work);
    let (u, x) = (&*spectrum.vectors, &*spectrum.values);
    let symmetric = |i: usize, j: usize| 0.5 * f64::from(dy[i * stride + j] + dy[j * stride + i]);
    multiply(n, |i, k| u[i * n + k], symmetric, first);
    multiply(n, |i, k| first[i * n + k], |k, j| u[j * n + k], second);
    for i in 0..n {
        for j in 0..n {
            let (f, g) = (spectrum.inverse(method, i), spectrum.inverse(method, j));
            second[i * n + j] *= match (f != 0.0, g != 0.0) {
                (true, true) => -f * g,
                (false, false) => 0.0,
                _ => (f - g) / (x[i] - x[j]),
            };
        }
    }
    multiply(n, |i, k| u[k * n + i], |k, j| second[k * n + j], first);
    multiply(n, |i, k| first[i * n + k], |k, j| u[k * n + j], second);
    for (dy, second) in dy.chunks_exact_mut(stride).zip(second.chunks_exact(n)) {
        dy.iter_mut().zip(second).for_each(|(dy, &x)| *dy = x as f32);
    }
}

/// `out = a b`.
fn multiply(n: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64, out: &mut [f64]) {
    for i in 0..n {
        for j in 0..n {
            out[i * n + j] = (0..n).map(|k| a(i, k) * b(k, j)).sum();
        }
    }
}
