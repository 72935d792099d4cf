//! Distances of token rows to one point.

use pulp::{Simd, WithSimd};

use super::{Level, rows::prefetch};

/// `out_j = |x_j - y|^2` for every row `x_j` of `x [out.len(), y.len()]`, without the cancellation of expanding the square.
pub(crate) fn squares(level: Level, x: &[f32], y: &[f32], out: &mut [f32]) {
    debug_assert_eq!(x.len(), y.len() * out.len());
    level.dispatch(Apart::<true> { x, y, out });
}

/// `out_j = |x_j - y|_1` for every row `x_j` of `x [out.len(), y.len()]`.
pub(crate) fn absolutes(level: Level, x: &[f32], y: &[f32], out: &mut [f32]) {
    debug_assert_eq!(x.len(), y.len() * out.len());
    level.dispatch(Apart::<false> { x, y, out });
}

/// Sums of differences, or of their squares.
struct Apart<'a, const SQUARED: bool> {
    x: &'a [f32],
    y: &'a [f32],
    out: &'a mut [f32],
}

impl<const SQUARED: bool> WithSimd for Apart<'_, SQUARED> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, y, out } = self;
        let (y_head, y_tail) = S::as_simd_f32s(y);
        let last = simd.partial_load_f32s(y_tail);
        for (o, x) in out.iter_mut().zip(x.chunks_exact(y.len())) {
            let (head, tail) = S::as_simd_f32s(x);
            let apart = simd.sub_f32s(simd.partial_load_f32s(tail), last);
            let mut sum = if SQUARED { simd.mul_f32s(apart, apart) } else { simd.abs_f32s(apart) };
            for (x, y) in head.iter().zip(y_head) {
                prefetch(x);
                let apart = simd.sub_f32s(*x, *y);
                sum = if SQUARED {
                    simd.mul_add_e_f32s(apart, apart, sum)
                } else {
                    simd.add_f32s(sum, simd.abs_f32s(apart))
                };
            }
            *o = simd.reduce_sum_f32s(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_agree_with_their_definition_at_every_level() {
        for level in Level::available() {
            for dim in [1, 2, 7, 8, 9, 16, 17, 64] {
                let number = |n: usize| 1000.0 + (n as f32 * 0.7311).sin();
                let (x, y): (Vec<f32>, Vec<f32>) =
                    ((0..5 * dim).map(number).collect(), (90..90 + dim).map(number).collect());
                let mut out = [f32::NAN; 5];
                squares(level, &x, &y, &mut out);
                for (j, out) in out.iter().enumerate() {
                    let terms = x[j * dim..].iter().zip(&y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2));
                    let want: f64 = terms.sum();
                    assert!((f64::from(*out) - want).abs() <= 1e-5 * want, "{out} instead of {want}");
                }
            }
        }
    }
}
