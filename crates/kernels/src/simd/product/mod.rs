//! The product of two tiles: one register-blocked micro-kernel, written once for every instruction set.
//!
//! `C[row][col] = sum_depth A[row, depth] * B[depth][col]`. The elements of `A` are broadcast, so that both its strides
//! are free and a transposed `A` costs nothing; the rows of `B` are read as vectors. With the scores of a tile held as
//! `[key][query]`, all five products of the backward pass have this form on the tensors as they lie in memory (only the
//! queries and output gradients are transposed, once per head). This is what a general GEMM cannot do: it repacks
//! both operands at every call, which for a depth of 64 costs as much time as a fifth of the product.

mod panels;
mod stored;

use std::mem::size_of;

use pulp::Simd;

pub(crate) use panels::{
    add_product, multiply, multiply_add, multiply_add_outer, store_product, store_sums, sum_terms,
};
pub(crate) use stored::{InPlace, take_rows};

/// Element `(row, depth)` is `data[row * row_stride + depth * depth_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub data: &'a [f32],
    pub row_stride: usize,
    pub depth_stride: usize,
}

/// Element `(depth, col)` is `data[depth * stride + col]`.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

/// What becomes of a block of the product while it is in registers.
pub(crate) trait Sink<S: Simd> {
    /// `block[m][n]` is the vector at row `row + m` and column `col + n * lanes`.
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]);
}

/// Sizes of a product: rows, columns (a multiple of the vector length) and depth.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub rows: usize,
    pub cols: usize,
    pub depth: usize,
}

/// What is summed over the depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Term {
    /// `A[row, depth] * B[depth][col]`.
    Product,
    /// `(B[depth][col] - A[row, depth])^2`.
    SquaredDifference,
    /// `|B[depth][col] - A[row, depth]|`.
    Difference,
    /// Of rows of length one: the squared difference, or, where they are nearly opposite, `-(B[depth][col] + A[row, depth])^2`, the
    /// square of the distance to the antipode. Each has the digits that the other rounds off.
    Chord,
}

/// Squared chords from here on are nearly those of opposite rows, 4.
pub(crate) const FAR: f32 = 3.5;

/// Gives every block of `left * right` to `sink`.
#[inline(always)]
pub(crate) fn product<S: Simd>(simd: S, size: Size, left: Left<'_>, right: Right<'_>, sink: &mut impl Sink<S>) {
    combine(simd, Term::Product, size, left, right, sink);
}

/// [`product`] with another `term` in the sum.
#[inline(always)]
pub(crate) fn combine<S: Simd>(
    simd: S,
    term: Term,
    size: Size,
    left: Left<'_>,
    right: Right<'_>,
    sink: &mut impl Sink<S>,
) {
    let Size { rows, cols, depth } = size;
    if rows == 0 || cols == 0 {
        return;
    }
    assert_eq!(cols % S::F32_LANES, 0, "panels are padded");
    if depth > 0 {
        assert!((rows - 1) * left.row_stride + (depth - 1) * left.depth_stride < left.data.len());
        assert!((depth - 1) * right.stride + cols <= right.data.len());
    }
    // Six rows of four vectors leave eight of 32 registers for operands; six of two leave four of 16. Every number of rows is a kernel of
    // its own for every sink, which takes its time to compile: two rows that are left over are with six before them twice four.
    let over = usize::from(matches!(rows % 6, 2 | 3));
    let sixes = (rows / 6).saturating_sub(over);
    let mut row = 0;
    while row < 6 * sixes {
        band::<S, 6>(simd, term, size, row, left, right, sink);
        row += 6;
    }
    while row + 4 <= rows {
        band::<S, 4>(simd, term, size, row, left, right, sink);
        row += 4;
    }
    while row < rows {
        band::<S, 1>(simd, term, size, row, left, right, sink);
        row += 1;
    }
}

/// All columns of the `M` rows from `row`.
#[inline(always)]
fn band<S: Simd, const M: usize>(
    simd: S,
    term: Term,
    size: Size,
    row: usize,
    left: Left<'_>,
    right: Right<'_>,
    sink: &mut impl Sink<S>,
) {
    let lanes = S::F32_LANES;
    let mut col = 0;
    // Conditions in `const` are not even compiled where they are false.
    if const { S::REGISTER_COUNT >= 32 } {
        while col + 4 * lanes <= size.cols {
            // SAFETY: row + M <= rows and col + 4 vectors <= cols; `combine` checked the bounds of both operands.
            let block = unsafe { block::<S, M, 4>(simd, term, size.depth, row, col, left, right) };
            sink.take(simd, row, col, block);
            col += 4 * lanes;
        }
    }
    if const { S::F32_LANES > 1 } {
        while col + 2 * lanes <= size.cols {
            // SAFETY: as above, with two vectors.
            let block = unsafe { block::<S, M, 2>(simd, term, size.depth, row, col, left, right) };
            sink.take(simd, row, col, block);
            col += 2 * lanes;
        }
    }
    while col < size.cols {
        // SAFETY: as above, with one vector.
        let block = unsafe { block::<S, M, 1>(simd, term, size.depth, row, col, left, right) };
        sink.take(simd, row, col, block);
        col += lanes;
    }
}

/// One term more in a sum, `x` from the left and `y` from the right operand.
trait Fold {
    fn fold<S: Simd>(simd: S, x: S::f32s, y: S::f32s, sum: S::f32s) -> S::f32s;
}

struct Products;

impl Fold for Products {
    #[inline(always)]
    fn fold<S: Simd>(simd: S, x: S::f32s, y: S::f32s, sum: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(x, y, sum)
    }
}

struct SquaredDifferences;

impl Fold for SquaredDifferences {
    #[inline(always)]
    fn fold<S: Simd>(simd: S, x: S::f32s, y: S::f32s, sum: S::f32s) -> S::f32s {
        let base = simd.sub_f32s(y, x);
        simd.mul_add_e_f32s(base, base, sum)
    }
}

struct Differences;

impl Fold for Differences {
    #[inline(always)]
    fn fold<S: Simd>(simd: S, x: S::f32s, y: S::f32s, sum: S::f32s) -> S::f32s {
        simd.add_f32s(sum, simd.abs_f32s(simd.sub_f32s(x, y)))
    }
}

struct SquaredSums;

impl Fold for SquaredSums {
    #[inline(always)]
    fn fold<S: Simd>(simd: S, x: S::f32s, y: S::f32s, sum: S::f32s) -> S::f32s {
        let base = simd.add_f32s(y, x);
        simd.mul_add_e_f32s(base, base, sum)
    }
}

/// The micro-kernel: `M x N` vectors of the product, in registers.
///
/// # Safety
/// Rows `row..row + M` of `left` and columns `col..col + N * lanes` of `right` must lie in their slices for every
/// depth below `depth`.
#[inline(always)]
unsafe fn block<S: Simd, const M: usize, const N: usize>(
    simd: S,
    term: Term,
    depth: usize,
    row: usize,
    col: usize,
    left: Left<'_>,
    right: Right<'_>,
) -> [[S::f32s; N]; M] {
    // SAFETY: by this function's contract.
    unsafe {
        match term {
            Term::Product => sum::<S, Products, M, N>(simd, depth, row, col, left, right),
            Term::SquaredDifference => sum::<S, SquaredDifferences, M, N>(simd, depth, row, col, left, right),
            Term::Difference => sum::<S, Differences, M, N>(simd, depth, row, col, left, right),
            Term::Chord => {
                let mut chords = sum::<S, SquaredDifferences, M, N>(simd, depth, row, col, left, right);
                if any_far(simd, &chords) {
                    let opposite = sum::<S, SquaredSums, M, N>(simd, depth, row, col, left, right);
                    to_antipodes(simd, &mut chords, &opposite);
                }
                chords
            }
        }
    }
}

#[inline(always)]
fn any_far<S: Simd, const M: usize, const N: usize>(simd: S, chords: &[[S::f32s; N]; M]) -> bool {
    let mut most = simd.splat_f32s(0.0);
    for &chord in chords.as_flattened() {
        most = simd.max_f32s(most, chord);
    }
    simd.reduce_max_f32s(most) > FAR
}

/// Puts the negated squares of the distances to the antipodes in the place of far chords.
#[inline(always)]
fn to_antipodes<S: Simd, const M: usize, const N: usize>(
    simd: S,
    chords: &mut [[S::f32s; N]; M],
    opposite: &[[S::f32s; N]; M],
) {
    for (chord, &opposite) in chords.as_flattened_mut().iter_mut().zip(opposite.as_flattened()) {
        let far = simd.less_than_f32s(simd.splat_f32s(FAR), *chord);
        *chord = simd.select_f32s(far, simd.neg_f32s(opposite), *chord);
    }
}

/// [`block`] of one kind of term.
///
/// # Safety
/// That of [`block`].
#[inline(always)]
unsafe fn sum<S: Simd, F: Fold, const M: usize, const N: usize>(
    simd: S,
    depth: usize,
    row: usize,
    col: usize,
    left: Left<'_>,
    right: Right<'_>,
) -> [[S::f32s; N]; M] {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let mut a = left.data.as_ptr().wrapping_add(row * left.row_stride);
    let mut b = right.data.as_ptr().wrapping_add(col);
    for _ in 0..depth {
        let mut vectors = [simd.splat_f32s(0.0); N];
        for (n, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: in bounds by this function's contract; every bit pattern is a vector of f32.
            *vector = unsafe { b.add(n * S::F32_LANES).cast::<S::f32s>().read_unaligned() };
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: in bounds by this function's contract.
            let x = simd.splat_f32s(unsafe { *a.add(m * left.row_stride) });
            for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                *sum = F::fold(simd, x, vector, *sum);
            }
        }
        a = a.wrapping_add(left.depth_stride);
        b = b.wrapping_add(right.stride);
    }
    sums
}

/// `N` vectors of a row of squared differences, or of squared sums, of the operands.
#[inline(always)]
pub(crate) fn squares<S: Simd, const SUMS: bool, const N: usize>(
    simd: S,
    depth: usize,
    (row, col): (usize, usize),
    left: Left<'_>,
    right: Right<'_>,
) -> [S::f32s; N] {
    if depth > 0 {
        assert!(row * left.row_stride + (depth - 1) * left.depth_stride < left.data.len());
        assert!((depth - 1) * right.stride + col + N * S::F32_LANES <= right.data.len());
    }
    // SAFETY: the row and the columns lie in their slices at the last depth, hence at every depth.
    let [squares] = unsafe {
        if SUMS {
            sum::<S, SquaredSums, 1, N>(simd, depth, row, col, left, right)
        } else {
            sum::<S, SquaredDifferences, 1, N>(simd, depth, row, col, left, right)
        }
    };
    squares
}

/// The `N` vectors at `at` of `data`.
#[inline(always)]
pub(crate) fn vectors<S: Simd, const N: usize>(data: &[f32], at: usize) -> &[S::f32s] {
    &S::as_simd_f32s(&data[at..at + N * size_of::<S::f32s>() / size_of::<f32>()]).0[..N]
}

/// The `N` vectors at `at` of `data`, to be written.
#[inline(always)]
pub(crate) fn vectors_mut<S: Simd, const N: usize>(data: &mut [f32], at: usize) -> &mut [S::f32s] {
    &mut S::as_mut_simd_f32s(&mut data[at..at + N * size_of::<S::f32s>() / size_of::<f32>()]).0[..N]
}

/// Stores the product as rows of `data`.
pub(crate) struct Store<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
}

impl<S: Simd> Sink<S> for Store<'_> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, _: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        for (m, block) in block.iter().enumerate() {
            vectors_mut::<S, N>(self.data, (row + m) * self.stride + col).copy_from_slice(block);
        }
    }
}

/// Adds the product to rows of `data`.
pub(crate) struct Add<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
}

impl<S: Simd> Sink<S> for Add<'_> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        for (m, block) in block.iter().enumerate() {
            let sums = vectors_mut::<S, N>(self.data, (row + m) * self.stride + col);
            for (sum, &x) in sums.iter_mut().zip(block) {
                *sum = simd.add_f32s(*sum, x);
            }
        }
    }
}
