//! The linear layer: products of the `gemm` crate, block by block of tokens.

use std::mem::MaybeUninit;

use faer::MatRef;
use gemm::Parallelism;
use rayon::prelude::*;

use crate::rows::{area, sums};

/// Tokens of a block: few enough for its results to lie in the second-level cache when the bias is added, enough to make the
/// packing of the weights a small part of the work.
pub(crate) const ROWS: usize = 512;
/// Multiplications that are worth waking a second thread for.
const WORTH_A_THREAD: usize = 1 << 22;

/// The gradients of [`linear`] that were asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearGradients {
    /// `[rows, inputs]`.
    pub dx: Option<Vec<f32>>,
    /// `[inputs, outputs]`.
    pub dweight: Option<Vec<f32>>,
    /// `[outputs]`.
    pub dbias: Option<Vec<f32>>,
}

/// `y = x W + b`, `[rows, outputs]`, for `x [rows, inputs]`, `weight [inputs, outputs]` and `bias [outputs]`.
///
/// ```
/// let y = resolvent_layers::linear(2, &[1.0, 2.0, 3.0, 4.0], &[10.0, 100.0], &[0.5]);
/// assert_eq!(y, [210.5, 430.5]);
/// ```
///
/// # Panics
/// If the lengths do not fit.
pub fn linear(rows: usize, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    let outputs = bias.len();
    let inputs = inputs(rows, x, weight, outputs);
    // Of few rows one block, whose product is shared among the threads instead.
    let one = rows < 2 * ROWS;
    let block = if one { rows } else { block(rows) };
    let len = area(rows, outputs);
    let weight = MatRef::from_row_major_slice(weight, inputs, outputs);
    let mut out = Vec::with_capacity(len);
    let parts = out.spare_capacity_mut()[..len].par_chunks_mut((block * outputs).max(1));
    parts.enumerate().for_each(|(index, out)| {
        let rows = out.len() / outputs;
        let x = MatRef::from_row_major_slice(&x[index * block * inputs..][..rows * inputs], rows, inputs);
        for out in product(out, x, weight, one).chunks_exact_mut(outputs) {
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
    });
    // SAFETY: the parts are the first `len` elements of the capacity, all of them written by `product`.
    unsafe { out.set_len(len) };
    out
}

/// Rows of a block: up to [`ROWS`], in even shares.
pub(crate) fn block(rows: usize) -> usize {
    even(rows, ROWS)
}

/// Rows of a block of up to `most`: of a multiple of four blocks, for two or four threads to have as many each.
pub(crate) fn even(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).next_multiple_of(4).max(1))
}

/// The gradients of [`linear`], of x, weight and bias as `wanted` says: `dx = dout W^T`, `dW = x^T dout`, `db` the sum of
/// `dout [rows, outputs]` over the rows.
///
/// # Panics
/// If the lengths do not fit.
pub fn linear_backward(
    rows: usize,
    x: &[f32],
    weight: &[f32],
    dout: &[f32],
    outputs: usize,
    wanted: [bool; 3],
) -> LinearGradients {
    let inputs = inputs(rows, x, weight, outputs);
    assert_eq!(dout.len(), area(rows, outputs), "linear_backward: dout must be [rows, outputs]");
    let weight = MatRef::from_row_major_slice(weight, inputs, outputs);
    let [dx, dweight, dbias] = wanted;
    let [left, right] = [(x, inputs), (dout, outputs)].map(|(x, width)| MatRef::from_row_major_slice(x, rows, width));
    LinearGradients {
        dx: dx.then(|| whole(right, weight.transpose())),
        dweight: dweight.then(|| whole(left.transpose(), right)),
        dbias: dbias.then(|| column_sums(dout, outputs)),
    }
}

/// The sums of `x [rows, width]` over its rows.
pub(crate) fn column_sums(x: &[f32], width: usize) -> Vec<f32> {
    let sum_of = |block: &[f32]| {
        let mut sum = vec![0.0; width];
        let rows = block.chunks_exact(width);
        rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
        sum
    };
    sums(&x.par_chunks((ROWS * width).max(1)).map(sum_of).collect::<Vec<_>>(), width)
}

pub(crate) fn inputs(rows: usize, x: &[f32], weight: &[f32], outputs: usize) -> usize {
    let inputs = x.len().checked_div(rows).or(weight.len().checked_div(outputs)).unwrap_or(0);
    assert!(x.len() == area(rows, inputs), "linear: x must be [rows, inputs]");
    assert!(weight.len() == area(inputs, outputs), "linear: weight must be [inputs, outputs]");
    inputs
}

/// `left right`, shared among the threads.
fn whole(left: MatRef<'_, f32>, right: MatRef<'_, f32>) -> Vec<f32> {
    let len = left.nrows() * right.ncols();
    let mut out = Vec::with_capacity(len);
    product(&mut out.spare_capacity_mut()[..len], left, right, true);
    // SAFETY: `product` has written the first `len` elements.
    unsafe { out.set_len(len) };
    out
}

/// Writes `left right` to `out`, row-major, and returns it. The order of summation does not depend on the threads, among which
/// the work is `shared`.
pub(crate) fn product<'a>(
    out: &'a mut [MaybeUninit<f32>],
    left: MatRef<'_, f32>,
    right: MatRef<'_, f32>,
    shared: bool,
) -> &'a mut [f32] {
    let (to, len) = (out.as_mut_ptr().cast::<f32>(), out.len());
    assert!(len == left.nrows() * right.ncols(), "the result of a product must fit");
    // SAFETY: `to` points at as many elements as the product has, borrowed mutably, and with `Sum::Alone` all of them are written
    // and none is read.
    unsafe {
        multiply(to, Sum::Alone, left, right, shared);
        std::slice::from_raw_parts_mut(to, len)
    }
}

/// Adds `left right` to `out`, otherwise as [`product`].
pub(crate) fn add_product(out: &mut [f32], left: MatRef<'_, f32>, right: MatRef<'_, f32>, shared: bool) {
    assert!(out.len() == left.nrows() * right.ncols(), "the result of a product must fit");
    // SAFETY: `out` has as many elements as the product, and they are initialised.
    unsafe { multiply(out.as_mut_ptr(), Sum::Added, left, right, shared) };
}

/// What becomes of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sum {
    /// It is written.
    Alone,
    /// It is added to what is there.
    Added,
}

/// # Safety
/// `to` must point at `left.nrows() * right.ncols()` elements that nobody else uses, initialised if they are to be added to.
unsafe fn multiply(to: *mut f32, sum: Sum, left: MatRef<'_, f32>, right: MatRef<'_, f32>, shared: bool) {
    let (m, n, k) = (left.nrows(), right.ncols(), left.ncols());
    assert!(right.nrows() == k, "the matrices of a product must fit");
    let shared = shared && m * n * k >= WORTH_A_THREAD;
    let parallelism = if shared { Parallelism::Rayon(0) } else { Parallelism::None };
    // SAFETY: pointers, sizes and strides are those of views that borrow their memory, and of the result, `m` rows of `n`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to,
            1,
            n.cast_signed(),
            sum == Sum::Added,
            left.as_ptr(),
            left.col_stride(),
            left.row_stride(),
            right.as_ptr(),
            right.col_stride(),
            right.row_stride(),
            if sum == Sum::Added { 1.0 } else { 0.0 },
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: f32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed) * 0.7311).sin()).collect()
    }

    /// `left [rows, depth]` times `right [depth, columns]`, with either one's indices by `at`.
    fn product(
        [rows, depth, columns]: [usize; 3],
        left: impl Fn(usize, usize) -> f32,
        right: impl Fn(usize, usize) -> f32,
    ) -> Vec<f64> {
        let entry = |i, j| (0..depth).map(|c| f64::from(left(i, c)) * f64::from(right(c, j))).sum();
        (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| entry(i, j)).collect()
    }

    fn assert_close(got: &[f32], expected: &[f64], of: &str) {
        assert_eq!(got.len(), expected.len(), "{of}");
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() <= 1e-4 * (1.0 + expected.abs()), "{of}: {got}, not {expected}");
        }
    }

    #[test]
    fn values_and_gradients_are_products() {
        for [rows, inputs, outputs] in [
            [1, 1, 1],
            [3, 5, 7],
            [ROWS + 1, 4, 3],
            [2 * ROWS + 3, 17, 33],
            [300, 130, 120],
            [2, 0, 3],
            [0, 4, 2],
            [4, 2, 0],
        ] {
            let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
            let (weight, bias) = (numbers(inputs * outputs, 0.3), numbers(outputs, 0.4));
            let [xs, ws, ds] = [(&x, inputs), (&weight, outputs), (&dout, outputs)]
                .map(|(data, columns)| move |i: usize, j: usize| data[i * columns + j]);
            let y = linear(rows, &x, &weight, &bias);
            let without = product([rows, inputs, outputs], xs, ws);
            let expected: Vec<f64> =
                without.iter().enumerate().map(|(i, y)| y + f64::from(bias[i % outputs])).collect();
            assert_close(&y, &expected, "y");
            let gradients = linear_backward(rows, &x, &weight, &dout, outputs, [true; 3]);
            let dx = product([rows, outputs, inputs], ds, |i, j| ws(j, i));
            assert_close(&gradients.dx.unwrap(), &dx, "dx");
            let dweight = product([inputs, rows, outputs], |i, j| xs(j, i), ds);
            assert_close(&gradients.dweight.unwrap(), &dweight, "dweight");
            assert_close(&gradients.dbias.unwrap(), &product([1, rows, outputs], |_, _| 1.0, ds), "dbias");
            let none = linear_backward(rows, &x, &weight, &dout, outputs, [false, true, false]);
            assert!(none.dx.is_none() && none.dbias.is_none() && none.dweight.is_some());
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_threads() {
        let [rows, inputs, outputs] = [2 * ROWS + 5, 96, 80];
        let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
        let (weight, bias) = (numbers(inputs * outputs, 0.3), numbers(outputs, 0.4));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                (linear(rows, &x, &weight, &bias), linear_backward(rows, &x, &weight, &dout, outputs, [true; 3]))
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }
}
