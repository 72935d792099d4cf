//! Products that are called, panel by panel where the operands are larger than the first-level cache.

use pulp::{Simd, WithSimd};

use super::{Add, Left, Right, Sink, Size, Store, Term, combine, product, vectors, vectors_mut};
use crate::simd::Level;

/// [`product`] into rows of `data`, as a function that is called: where a kernel has many products, inlining each of them
/// would take the compiler minutes.
pub(crate) fn store_product<S: Simd>(simd: S, size: Size, left: Left<'_>, right: Right<'_>, into: Store<'_>) {
    let into = Target { data: into.data, stride: into.stride, how: How::Store };
    simd.vectorize(Called { size, left, right, into });
}

/// As [`store_product`], added to what is there.
pub(crate) fn add_product<S: Simd>(simd: S, size: Size, left: Left<'_>, right: Right<'_>, into: Add<'_>) {
    let into = Target { data: into.data, stride: into.stride, how: How::Add };
    simd.vectorize(Called { size, left, right, into });
}

/// [`store_product`] on the instruction set `level`.
pub(crate) fn multiply(level: Level, size: Size, left: Left<'_>, right: Right<'_>, into: Store<'_>) {
    let into = Target { data: into.data, stride: into.stride, how: How::Store };
    level.dispatch(Called { size, left, right, into });
}

/// [`add_product`] on the instruction set `level`.
pub(crate) fn multiply_add(level: Level, size: Size, left: Left<'_>, right: Right<'_>, into: Add<'_>) {
    let into = Target { data: into.data, stride: into.stride, how: How::Add };
    level.dispatch(Called { size, left, right, into });
}

/// [`multiply_add`] with the outer product of two vectors added to the same memory: of one over the rows and one over
/// the columns.
pub(crate) fn multiply_add_outer(
    level: Level,
    size: Size,
    left: Left<'_>,
    right: Right<'_>,
    into: Add<'_>,
    outer: [&[f32]; 2],
) {
    let into = Target { data: into.data, stride: into.stride, how: How::AddOuter(outer) };
    level.dispatch(Called { size, left, right, into });
}

/// Sums of a `term` into rows of `data`, as a function that is called. Unlike [`store_product`]'s they are never summed by panels, but channel
/// after channel as in [`combine`]: the same pair has the same bits, whichever of both made it.
pub(crate) fn store_sums<S: Simd>(simd: S, term: Term, size: Size, left: Left<'_>, right: Right<'_>, into: Store<'_>) {
    simd.vectorize(Sums { term, size, left, right, into });
}

/// [`store_sums`] on the instruction set `level`.
pub(crate) fn sum_terms(level: Level, term: Term, size: Size, left: Left<'_>, right: Right<'_>, into: Store<'_>) {
    level.dispatch(Sums { term, size, left, right, into });
}

struct Sums<'a> {
    term: Term,
    size: Size,
    left: Left<'a>,
    right: Right<'a>,
    into: Store<'a>,
}

impl WithSimd for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        combine(simd, self.term, self.size, self.left, self.right, &mut self.into);
    }
}

/// Depth and columns of a panel of the right operand, which stays in the first-level cache while rows pass by.
const PANEL: [usize; 2] = [128, 64];
/// Panels side by side, and rows that pass by all of them: with what becomes of these, they stay in the second-level cache.
const BLOCK: [usize; 2] = [4, 252];
/// Rows from which on packing panels is worth it.
const PANEL_ROWS: usize = 24;
/// f32 of the right operand beyond which it is, however shallow the product.
const PANEL_LEN: usize = 1 << 14;

/// A product with its sink.
struct Called<'a> {
    size: Size,
    left: Left<'a>,
    right: Right<'a>,
    into: Target<'a>,
}

impl WithSimd for Called<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Size { rows, cols, depth } = self.size;
        if (depth > PANEL[0] || depth * cols > PANEL_LEN) && rows >= PANEL_ROWS {
            self.by_panels(simd);
        } else {
            product(simd, self.size, self.left, self.right, &mut self.into);
        }
    }
}

impl Called<'_> {
    /// Panel after panel. Read in place, a right operand that is larger than the first-level cache would come from the second
    /// for every few rows, and from few of its sets where its rows are a power of two apart.
    #[inline(always)]
    fn by_panels<S: Simd>(&mut self, simd: S) {
        let Self { size, left, right, into } = self;
        let mut panels = [[0.0; PANEL[0] * PANEL[1]]; BLOCK[0]];
        let starts = |from: usize, to: usize, step: usize| (from..to).step_by(step).map(move |n| (n, step.min(to - n)));
        for (first, cols) in starts(0, size.cols, BLOCK[0] * PANEL[1]) {
            for (deep, depth) in starts(0, size.depth, PANEL[0]) {
                for (panel, (col, cols)) in panels.iter_mut().zip(starts(first, first + cols, PANEL[1])) {
                    for (n, row) in panel.chunks_exact_mut(PANEL[1]).enumerate().take(depth) {
                        row[..cols].copy_from_slice(&right.data[(deep + n) * right.stride + col..][..cols]);
                    }
                }
                for (row, rows) in starts(0, size.rows, BLOCK[1]) {
                    let data = &left.data[row * left.row_stride + deep * left.depth_stride..];
                    let left = Left { data, ..*left };
                    for (panel, (col, cols)) in panels.iter().zip(starts(first, first + cols, PANEL[1])) {
                        let right = Right { data: panel, stride: PANEL[1] };
                        product(simd, Size { rows, cols, depth }, left, right, &mut into.part(row, col, deep == 0));
                    }
                }
            }
        }
    }
}

/// Rows that a product goes to, and how.
struct Target<'a> {
    data: &'a mut [f32],
    stride: usize,
    how: How<'a>,
}

#[derive(Clone, Copy)]
enum How<'a> {
    Store,
    Add,
    /// Added, and the outer product of two vectors with it.
    AddOuter([&'a [f32]; 2]),
}

impl Target<'_> {
    /// What the product of a panel goes to, from `row` and `col` on: all panels but the `first` of a column are added alone.
    #[inline(always)]
    fn part(&mut self, row: usize, col: usize, first: bool) -> Target<'_> {
        let how = match self.how {
            How::AddOuter([x, y]) if first => How::AddOuter([&x[row..], &y[col..]]),
            how if first => how,
            _ => How::Add,
        };
        Target { data: &mut self.data[row * self.stride + col..], stride: self.stride, how }
    }
}

impl<S: Simd> Sink<S> for Target<'_> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let Self { data, stride, how } = self;
        let stride = *stride;
        match how {
            How::Store => Store { data, stride }.take(simd, row, col, block),
            How::Add => Add { data, stride }.take(simd, row, col, block),
            How::AddOuter([x, y]) => {
                let y = vectors::<S, N>(y, col);
                for (m, block) in block.iter().enumerate() {
                    let factor = simd.splat_f32s(x[row + m]);
                    let sums = vectors_mut::<S, N>(data, (row + m) * stride + col);
                    for ((sum, &x), &y) in sums.iter_mut().zip(block).zip(y) {
                        *sum = simd.mul_add_e_f32s(factor, y, simd.add_f32s(*sum, x));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, columns and depth on both sides of a panel's, stored, added, and added with an outer product.
    #[test]
    fn panels_are_the_product() {
        for [rows, cols, depth] in
            [[5, 32, 300], [24, 16, 129], [31, 80, 128], [50, 144, 257], [64, 256, 640], [64, 320, 64]]
        {
            let numbers = |len: usize, step: usize| (0..len).map(move |i| ((i * step % 97) as f32 - 48.0) / 64.0);
            let (a, b) = (numbers(rows * depth, 31).collect::<Vec<_>>(), numbers(depth * cols, 57).collect::<Vec<_>>());
            let expected = |i: usize, j: usize| -> f64 {
                (0..depth).map(|d| f64::from(a[i * depth + d]) * f64::from(b[d * cols + j])).sum()
            };
            for level in Level::available() {
                let size = Size { rows, cols, depth };
                let left = Left { data: &a, row_stride: depth, depth_stride: 1 };
                let (right, stride) = (Right { data: &b, stride: cols }, cols);
                let mut out = vec![f32::NAN; rows * cols];
                multiply(level, size, left, right, Store { data: &mut out, stride });
                multiply_add(level, size, left, right, Add { data: &mut out, stride });
                let outer = [&a[..rows], &b[..cols]];
                multiply_add_outer(level, size, left, right, Add { data: &mut out, stride }, outer);
                for (at, got) in out.iter().enumerate() {
                    let (row, col) = (at / cols, at % cols);
                    let expected = 3.0 * expected(row, col) + f64::from(a[row]) * f64::from(b[col]);
                    assert!(
                        (f64::from(*got) - expected).abs() < 1e-3,
                        "{rows}x{cols}x{depth} at {at}: {got}, not {expected}"
                    );
                }
            }
        }
    }
}
