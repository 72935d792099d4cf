//! Inverses by factorisation, in f64.

use std::mem::MaybeUninit;

use faer::{
    Accum, MatMut, MatRef, Par,
    diag::DiagMut,
    dyn_stack::{MemStack, StackReq},
    linalg::{
        cholesky::llt,
        evd,
        matmul::{
            matmul,
            triangular::{self, BlockStructure},
        },
    },
};

use super::{
    Entries, Method, Order, SMALLEST_PIVOT,
    wide::{self, WIDE},
};
use crate::{
    Error, Result,
    scratch::{cut, scratch_len},
    simd::Level,
};

/// Up to this order rows are made of rows: `faer` splits triangles in halves down to 2 x 2, which then takes most of the time.
const BY_ROWS: usize = 96;

/// f32 of working memory of [`cholesky`].
pub(super) fn cholesky_work(n: usize) -> usize {
    let factor = llt::factor::cholesky_in_place_scratch::<f64>(n, Par::Seq, Default::default());
    let inverse = llt::inverse::inverse_scratch::<f64>(n, Par::Seq);
    scratch_len([WIDE * n * n, WIDE * n * n]) + floats(factor.or(inverse)).max(wide::inverse_work(n))
}

/// f32 of working memory of [`eigen`], [`of_eigenvalues`] and [`eigen_gradient`].
pub(super) fn eigen_work(n: usize) -> usize {
    let vectors = evd::ComputeEigenvectors::Yes;
    let stack = evd::self_adjoint_evd_scratch::<f64>(n, vectors, Par::Seq, Default::default());
    scratch_len([WIDE * n * n, WIDE * n, WIDE * n * n]) + floats(stack).max(scratch_len([WIDE * n * n]))
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

/// The inverse by the Cholesky factor.
pub(super) fn cholesky(
    method: &Method,
    level: Level,
    order: Order,
    a: &[f32],
    y: &mut Entries<'_>,
    work: &mut [f32],
) -> Result<()> {
    let n = order.n;
    let ([factor, inverse], rest) = cut(work, [WIDE * n * n, WIDE * n * n]);
    let (factor, inverse): (&mut [f64], &mut [f64]) =
        (bytemuck::cast_slice_mut(factor), bytemuck::cast_slice_mut(inverse));
    wide::widen(order, a, method.ridge, factor);
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
    y.write(order, |i, j| inverse[j * n + i]);
    Ok(())
}

/// `a + ridge I = U^T diag(x) U`: the rows of `vectors` are eigenvectors, `values` ascend. `buffer` is for two matrices.
struct Spectrum<'a> {
    n: usize,
    vectors: &'a mut [f64],
    values: &'a mut [f64],
    buffer: [&'a mut [f64]; 2],
}

fn spectrum<'a>(order: Order, a: &[f32], ridge: f64, work: &'a mut [f32]) -> Spectrum<'a> {
    let n = order.n;
    let ([vectors, values, matrix], rest) = cut(work, [WIDE * n * n, WIDE * n, WIDE * n * n]);
    let [vectors, values, matrix]: [&mut [f64]; 3] = [vectors, values, matrix].map(bytemuck::cast_slice_mut);
    wide::widen(order, a, ridge, matrix);
    // With entries that are not numbers it would search for minutes before it gave up.
    let finite = matrix.iter().all(|x| x.is_finite());
    let done = finite
        && evd::self_adjoint_evd(
            MatRef::from_column_major_slice(matrix, n, n),
            DiagMut::from_slice_mut(values),
            Some(MatMut::from_column_major_slice_mut(vectors, n, n)),
            Par::Seq,
            stack(rest),
            Default::default(),
        )
        .is_ok();
    if !done {
        values.fill(f64::NAN);
    }
    let ([second], _) = cut(rest, [WIDE * n * n]);
    Spectrum { n, vectors, values, buffer: [matrix, bytemuck::cast_slice_mut(second)] }
}

impl Spectrum<'_> {
    /// Writes `U^T diag(f) U`, `f` of every eigenvalue and the largest.
    fn assemble(self, order: Order, f: impl Fn(f64, f64) -> f64, y: &mut Entries<'_>) {
        let n = self.n;
        for i in 0..n {
            let factor = f(self.values[i], self.values[n - 1]);
            let rows = i * n..(i + 1) * n;
            let vector = &self.vectors[rows.clone()];
            self.buffer[0][rows].iter_mut().zip(vector).for_each(|(scaled, x)| *scaled = factor * x);
        }
        let [scaled, product] = self.buffer;
        let [left, right] = [&*self.vectors, &*scaled].map(|x| MatRef::from_row_major_slice(x, n, n));
        triangular::matmul(
            MatMut::from_row_major_slice_mut(product, n, n),
            BlockStructure::TriangularLower,
            Accum::Replace,
            left.transpose(),
            BlockStructure::Rectangular,
            right,
            BlockStructure::Rectangular,
            1.0,
            Par::Seq,
        );
        y.write(order, |i, j| product[i * n + j]);
    }
}

/// `1/x`, or 0 where it is dropped beside the largest eigenvalue.
fn inverse(method: &Method, x: f64, most: f64) -> f64 {
    if x <= method.cutoff * most { 0.0 } else { 1.0 / x }
}

/// The pseudo-inverse by eigenvalues.
pub(super) fn eigen(method: &Method, order: Order, a: &[f32], y: &mut Entries<'_>, work: &mut [f32]) {
    spectrum(order, a, method.ridge, work).assemble(order, |x, most| inverse(method, x, most), y);
}

/// What `f` of every eigenvalue and the largest makes of `a + ridge I`.
pub(super) fn of_eigenvalues(
    order: Order,
    a: &[f32],
    ridge: f64,
    f: impl Fn(f64, f64) -> f64,
    y: &mut Entries<'_>,
    work: &mut [f32],
) {
    spectrum(order, a, ridge, work).assemble(order, f, y);
}

/// Turns `dy` into `da` by the divided differences of the cut-off `1/x`: the formula of an inverse lacks what passes
/// between kept and dropped directions.
pub(super) fn eigen_gradient(method: &Method, order: Order, a: &[f32], dy: [&mut [f32]; 2], work: &mut [f32]) {
    let divided = |x: f64, y: f64, most: f64| {
        let [f, g] = [x, y].map(|x| inverse(method, x, most));
        match (f != 0.0, g != 0.0) {
            (true, true) => -f * g,
            (false, false) => 0.0,
            _ => (f - g) / (x - y),
        }
    };
    gradient_of_eigenvalues(order, a, method.ridge, divided, dy, work);
}

/// Turns `dy + low` into `da`, in `dy`, by the divided differences of what was made of two eigenvalues, which may depend on the largest.
pub(super) fn gradient_of_eigenvalues(
    order: Order,
    a: &[f32],
    ridge: f64,
    divided: impl Fn(f64, f64, f64) -> f64,
    [dy, low]: [&mut [f32]; 2],
    work: &mut [f32],
) {
    let Order { n, stride } = order;
    let mut spectrum = spectrum(order, a, ridge, work);
    for i in 0..n {
        let entry = |at: usize| f64::from(dy[at]) + f64::from(low[at]);
        let symmetric = |j: usize| 0.5 * (entry(i * stride + j) + entry(j * stride + i));
        (0..n).for_each(|j| spectrum.buffer[0][i * n + j] = symmetric(j));
    }
    let Spectrum { vectors, buffer: [first, second], .. } = &mut spectrum;
    let u = MatRef::from_row_major_slice(vectors, n, n);
    multiply(u, MatRef::from_row_major_slice(first, n, n), second);
    multiply(MatRef::from_row_major_slice(second, n, n), u.transpose(), first);
    for i in 0..n {
        for j in 0..n {
            let [x, y, most] = [i, j, n - 1].map(|i| spectrum.values[i]);
            spectrum.buffer[0][i * n + j] *= divided(x, y, most);
        }
    }
    let Spectrum { vectors, buffer: [first, second], .. } = spectrum;
    let u = MatRef::from_row_major_slice(vectors, n, n);
    multiply(u.transpose(), MatRef::from_row_major_slice(first, n, n), second);
    multiply(MatRef::from_row_major_slice(second, n, n), u, first);
    for (dy, first) in dy.chunks_exact_mut(stride).zip(first.chunks_exact(n)) {
        dy.iter_mut().zip(first).for_each(|(dy, &x)| *dy = x as f32);
    }
}

/// `out = a b`, row-major.
fn multiply(a: MatRef<'_, f64>, b: MatRef<'_, f64>, out: &mut [f64]) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::Seq);
}
