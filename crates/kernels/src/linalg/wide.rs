//! Small products that are summed in f64.

use faer::{Accum, MatMut, MatRef, Par, linalg::matmul::matmul};
use pulp::{Simd, WithSimd};

use super::{Entries, Order};
use crate::{
    scratch::{cut, scratch_len},
    simd::Level,
};

/// f32 that hold one f64.
pub(super) const WIDE: usize = size_of::<f64>() / size_of::<f32>();

/// f64 of the longest vector: rows are whole vectors.
const LANES: usize = 8;

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
    Order { n, stride }: Order,
    [high, low]: [&[f32]; 2],
    c: &[f32],
    x: &[f32],
    width: usize,
    out: &mut [f32],
    work: &mut [f32],
) {
    if n == 0 {
        return;
    }
    let ([y, scaled, product], _) = cut(work, product_sizes(n, width));
    let [y, scaled, product]: [&mut [f64]; 3] = [y, scaled, product].map(bytemuck::cast_slice_mut);
    for (i, (y, high)) in y.chunks_exact_mut(n).zip(high.chunks_exact(stride)).enumerate() {
        match low.get(i * stride..(i + 1) * stride) {
            Some(low) => y.iter_mut().zip(high).zip(low).for_each(|((y, &h), &l)| *y = f64::from(h) + f64::from(l)),
            None => y.iter_mut().zip(high).for_each(|(y, &high)| *y = high.into()),
        }
    }
    scale_rows(c, x, [width, width], scaled);
    matmul(
        MatMut::from_row_major_slice_mut(product, n, width),
        Accum::Replace,
        MatRef::from_row_major_slice(y, n, n),
        MatRef::from_row_major_slice(scaled, n, width),
        1.0,
        Par::Seq,
    );
    for ((out, product), &c) in out.chunks_exact_mut(width).zip(product.chunks_exact(width)).zip(c) {
        out.iter_mut().zip(product).for_each(|(out, product)| *out = (f64::from(c) * product) as f32);
    }
}

/// Writes `(c x) (c y)^T` for rows `x` and `y`, `[n, width]`, of which `channels` count. As the gradient of an inverse it is divided by two
/// eigenvalues: rounded to f32 its small parts would drown. `work` is that of [`product_work`].
pub(crate) fn scaled_outer(
    Order { n, stride }: Order,
    c: &[f32],
    [x, y]: [&[f32]; 2],
    [width, channels]: [usize; 2],
    out: &mut Entries<'_>,
    work: &mut [f32],
) {
    if n == 0 {
        return;
    }
    let ([product, left, right], _) = cut(work, product_sizes(n, channels));
    let [product, left, right]: [&mut [f64]; 3] = [product, left, right].map(bytemuck::cast_slice_mut);
    scale_rows(c, x, [width, channels], left);
    scale_rows(c, y, [width, channels], right);
    matmul(
        MatMut::from_row_major_slice_mut(product, n, n),
        Accum::Replace,
        MatRef::from_row_major_slice(left, n, channels),
        MatRef::from_row_major_slice(right, n, channels).transpose(),
        1.0,
        Par::Seq,
    );
    for (i, product) in product.chunks_exact(n).enumerate() {
        product.iter().enumerate().for_each(|(j, &x)| out.set(i * stride + j, x));
    }
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
