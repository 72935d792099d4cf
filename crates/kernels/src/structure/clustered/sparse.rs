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

/// `x . y`, summed channel by channel as the product of a tile sums: slower.
#[inline(always)]
pub(super) fn dot_in_order<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let mut sum = simd.splat_f32s(0.0);
    for (&x, &y) in x.iter().zip(y) {
        sum = simd.mul_add_e_f32s(simd.splat_f32s(x), simd.splat_f32s(y), sum);
    }
    // Every lane holds the same.
    bytemuck::cast_slice::<S::f32s, f32>(std::slice::from_ref(&sum))[0]
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
