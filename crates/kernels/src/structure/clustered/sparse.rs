//! Arithmetic on single rows, for sampled edges.

use pulp::Simd;

/// `x . y`
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let ((x, x_tail), (y, y_tail)) = (S::as_simd_f32s(x), S::as_simd_f32s(y));
    let mut sum = simd.mul_f32s(simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail));
    for (x, y) in x.iter().zip(y) {
        sum = simd.mul_add_e_f32s(*x, *y, sum);
    }
    simd.reduce_sum_f32s(sum)
}

/// `out += w x`
#[inline(always)]
pub(super) fn axpy<S: Simd>(simd: S, w: f32, x: &[f32], out: &mut [f32]) {
    let w = simd.splat_f32s(w);
    let ((x, x_tail), (out, out_tail)) = (S::as_simd_f32s(x), S::as_mut_simd_f32s(out));
    for (out, x) in out.iter_mut().zip(x) {
        *out = simd.mul_add_e_f32s(w, *x, *out);
    }
    let tail = simd.mul_f32s(w, simd.partial_load_f32s(x_tail));
    let tail = simd.add_f32s(tail, simd.partial_load_f32s(out_tail));
    simd.partial_store_f32s(out_tail, tail);
}
