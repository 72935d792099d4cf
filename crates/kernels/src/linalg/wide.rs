//! Products with small matrices that are summed in f64.

use faer::{
    Accum, MatMut, MatRef, Par,
    linalg::matmul::{
        matmul,
        triangular::{self, BlockStructure},
    },
};
use pulp::{Simd, WithSimd};

use super::{Entries, Order};
use crate::{
    scratch::{cut, scratch_len},
    simd::Level,
};

/// f32 that hold one f64.
pub(crate) const WIDE: usize = size_of::<f64>() / size_of::<f32>();

/// f64 of the longest vector: rows are whole vectors.
const LANES: usize = 8;

/// Rows of `width` f64, without gaps.
pub(crate) fn rows(x: &[f64], width: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(x, x.len() / width.max(1), width)
}

/// `out = x y`, or `out += x y`, with as many columns as `y`.
pub(crate) fn product(out: &mut [f64], how: Accum, x: MatRef<'_, f64>, y: MatRef<'_, f64>) {
    matmul(MatMut::from_row_major_slice_mut(out, x.nrows(), y.ncols()), how, x, y, 1.0, Par::Seq);
}

/// Adds `x^T y`, which is symmetric, to the lower triangle of `out`: half the work of [`product`].
pub(crate) fn add_symmetric(out: &mut [f64], x: MatRef<'_, f64>, y: MatRef<'_, f64>) {
    let (n, whole) = (x.ncols(), BlockStructure::Rectangular);
    let out = MatMut::from_row_major_slice_mut(out, n, n);
    let (lower, x) = (BlockStructure::TriangularLower, x.transpose());
    triangular::matmul(out, lower, Accum::Add, x, whole, y, whole, 1.0, Par::Seq);
}

/// Writes the lower triangle of `x [n, n]` to the upper one.
pub(crate) fn mirror(x: &mut [f64], n: usize) {
    for i in 0..n {
        (0..i).for_each(|j| x[j * n + i] = x[i * n + j]);
    }
}

/// Reads `high + low` to `out [n, n]`; `low` may be empty.
pub(crate) fn read(Order { n, stride }: Order, [high, low]: [&[f32]; 2], out: &mut [f64]) {
    for (i, (out, high)) in out.chunks_exact_mut(n.max(1)).zip(high.chunks_exact(stride)).enumerate() {
        out.iter_mut().zip(high).for_each(|(out, &high)| *out = high.into());
        let low = low.get(i * stride..(i + 1) * stride).unwrap_or_default();
        out.iter_mut().zip(low).for_each(|(out, &low)| *out += f64::from(low));
    }
}

/// Reads `a + ridge I`.
pub(super) fn widen(order: Order, a: &[f32], ridge: f64, out: &mut [f64]) {
    read(order, [a, &[]], out);
    (0..order.n).for_each(|i| out[i * (order.n + 1)] += ridge);
}

/// Writes `x [n, n]`.
pub(crate) fn write(Order { n, stride }: Order, x: &[f64], out: &mut Entries<'_>) {
    for (i, row) in x.chunks_exact(n.max(1)).enumerate() {
        row.iter().enumerate().for_each(|(j, &x)| out.set(i * stride + j, x));
    }
}

fn product_sizes(n: usize, width: usize) -> [usize; 3] {
    [WIDE * n * n, WIDE * n * width, WIDE * n * width]
}

/// f32 of working memory of [`scaled_product`].
pub(crate) fn product_work(n: usize, width: usize) -> usize {
    scratch_len(product_sizes(n, width))
}

/// Writes `out = c Y c x` for `Y = high + low` and rows `x [n, width]`; `low` may be empty.
///
/// `Y` has entries of the size of one over the ridge, while its rows may sum to one over the number of landmarks: in f32 the sums
/// of landmarks that nearly coincide would keep three digits.
pub(crate) fn scaled_product(
    order: Order,
    y: [&[f32]; 2],
    c: &[f32],
    x: &[f32],
    width: usize,
    out: &mut [f32],
    work: &mut [f32],
) {
    if order.n == 0 {
        return;
    }
    let ([wide, scaled, sums], _) = cut(work, product_sizes(order.n, width));
    let [wide, scaled, sums]: [&mut [f64]; 3] = [wide, scaled, sums].map(bytemuck::cast_slice_mut);
    read(order, y, wide);
    scale_rows(c, x, [width, width], scaled);
    product(sums, Accum::Replace, rows(wide, order.n), rows(scaled, width));
    for ((out, product), &c) in out.chunks_exact_mut(width).zip(sums.chunks_exact(width)).zip(c) {
        out.iter_mut().zip(product).for_each(|(out, product)| *out = (f64::from(c) * product) as f32);
    }
}

/// Writes `(c x) (c y)^T` for rows `x` and `y`, `[n, width]`, of which `channels` count. As the gradient of an inverse it is divided by two
/// eigenvalues: rounded to f32 its small parts would drown. `work` is that of [`product_work`].
pub(crate) fn scaled_outer(
    order: Order,
    c: &[f32],
    [x, y]: [&[f32]; 2],
    [width, channels]: [usize; 2],
    out: &mut Entries<'_>,
    work: &mut [f32],
) {
    if order.n == 0 {
        return;
    }
    let ([sums, left, right], _) = cut(work, product_sizes(order.n, channels));
    let [sums, left, right]: [&mut [f64]; 3] = [sums, left, right].map(bytemuck::cast_slice_mut);
    scale_rows(c, x, [width, channels], left);
    scale_rows(c, y, [width, channels], right);
    product(sums, Accum::Replace, rows(left, channels), rows(right, channels).transpose());
    write(order, sums, out);
}

/// Writes `c_i x_i` for the first `channels` of rows of `width`, without gaps.
fn scale_rows(c: &[f32], x: &[f32], [width, channels]: [usize; 2], out: &mut [f64]) {
    for ((out, x), &c) in out.chunks_exact_mut(channels).zip(x.chunks_exact(width)).zip(c) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = f64::from(c) * f64::from(x));
    }
}

fn inverse_sizes(n: usize) -> [usize; 2] {
    [WIDE * n * n.next_multiple_of(LANES); 2]
}

/// f32 of working memory of [`invert_factor`].
pub(super) fn inverse_work(n: usize) -> usize {
    scratch_len(inverse_sizes(n))
}

/// Writes `(L L^T)^-1` on and above the diagonal of the rows of `out`; column `k` of `L` is at `k * n` of `factor`.
pub(super) fn invert_factor(level: Level, n: usize, factor: &[f64], out: &mut [f64], work: &mut [f32]) {
    let ([rows, sums], _) = cut(work, inverse_sizes(n));
    let [rows, sums]: [&mut [f64]; 2] = [rows, sums].map(bytemuck::cast_slice_mut);
    level.dispatch(InvertFactor { n, factor, rows, sums });
    let stride = n.next_multiple_of(LANES);
    for (i, out) in out.chunks_exact_mut(n).enumerate() {
        (i..n).for_each(|j| out[j] = sums[j * stride + i]);
    }
}

/// `rows = L^-1`, a row at a time, then `sums = L^-T L^-1`, on and below the diagonal.
struct InvertFactor<'a> {
    n: usize,
    factor: &'a [f64],
    rows: &'a mut [f64],
    sums: &'a mut [f64],
}

impl WithSimd for InvertFactor<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { n, factor, rows, sums } = self;
        let stride = n.next_multiple_of(LANES);
        rows.fill(0.0);
        sums.fill(0.0);
        for k in 0..n {
            let (done, rest) = rows.split_at_mut((k + 1) * stride);
            let row = &mut done[k * stride..][..(k + 1).next_multiple_of(LANES)];
            let l = &factor[k * n..][..n];
            row[k] = 1.0;
            row.iter_mut().for_each(|x| *x /= l[k]);
            for (below, &l) in rest.chunks_exact_mut(stride).zip(&l[k + 1..]) {
                add_scaled(simd, -l, row, below);
            }
            for (i, sums) in sums.chunks_exact_mut(stride).enumerate().take(k + 1) {
                add_scaled(simd, row[i], &row[..(i + 1).next_multiple_of(LANES)], sums);
            }
        }
    }
}

/// `out += factor x`, over the length of `x`: whole vectors.
#[inline(always)]
fn add_scaled<S: Simd>(simd: S, factor: f64, x: &[f64], out: &mut [f64]) {
    let factor = simd.splat_f64s(factor);
    let (x, out) = (S::as_simd_f64s(x).0, S::as_mut_simd_f64s(out).0);
    for (out, &x) in out.iter_mut().zip(x) {
        *out = simd.mul_add_e_f64s(factor, x, *out);
    }
}

#[cfg(test)]
mod tests {
    use super::{inverse_work, invert_factor};
    use crate::{scratch::Scratch, simd::Level};

    /// Lower triangles of ones on a diagonal of twos, by columns.
    #[test]
    fn an_inverse_times_its_matrix_is_the_identity() {
        for level in Level::available() {
            for n in [1, 2, 7, 8, 9, 49, 64, 96] {
                let entry = |i: usize, k: usize| if i < k { f64::NAN } else { 1.0 + f64::from(u8::from(i == k)) };
                let factor: Vec<f64> = (0..n * n).map(|at| entry(at % n, at / n)).collect();
                let mut out = vec![f64::NAN; n * n];
                let mut work = Scratch::new(inverse_work(n));
                work.take(inverse_work(n)).fill(f32::NAN);
                invert_factor(level, n, &factor, &mut out, work.take(inverse_work(n)));
                let matrix = |i: usize, j: usize| (0..=i.min(j)).map(|k| entry(i, k) * entry(j, k)).sum::<f64>();
                let inverse = |i: usize, j: usize| out[i.min(j) * n + i.max(j)];
                for i in 0..n {
                    for j in 0..n {
                        let sum: f64 = (0..n).map(|k| matrix(i, k) * inverse(k, j)).sum();
                        let expected = f64::from(u8::from(i == j));
                        assert!((sum - expected).abs() < 1e-11, "{}, {n}: {i}, {j}: {sum}", level.name());
                    }
                }
            }
        }
    }
}
