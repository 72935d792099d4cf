//! The exact GELU between the layers of an MLP, `x Phi(x)` and its gradient: without it a framework's scalar error
//! function costs a transformer block more than its attention.

use resolvent_kernels::simd::{Level, Simd, WithSimd, normal};

use crate::{Result, rows::written};

/// Elements that one task takes: input, gradient and result fit a 48 KiB first-level cache.
const CHUNK: usize = 4096;

/// `out = x Phi(x)`, element by element.
///
/// ```
/// let out = resolvent_layers::gelu(&[-30.0, 0.0, 1.0])?;
/// assert!(out[0] == 0.0 && out[1] == 0.0 && (out[2] - 0.841_344_7).abs() < 1e-6);
/// # Ok::<(), resolvent_layers::Error>(())
/// ```
///
/// # Errors
/// As [`Level::selected`].
pub fn gelu(x: &[f32]) -> Result<Vec<f32>> {
    let level = Level::selected()?;
    let part = |index: usize, out: &mut [f32]| {
        let x = &x[index * CHUNK..][..out.len()];
        level.dispatch(Forward { x, out });
    };
    Ok(written(x.len(), CHUNK, &[0.0; CHUNK], part).0)
}

/// `dx = dout (Phi(x) + x Phi'(x))`, the gradient of [`gelu`].
///
/// # Errors
/// As [`Level::selected`].
///
/// # Panics
/// If the lengths differ.
pub fn gelu_backward(x: &[f32], dout: &[f32]) -> Result<Vec<f32>> {
    assert_eq!(x.len(), dout.len(), "gelu_backward: x and dout differ in length");
    let level = Level::selected()?;
    let part = |index: usize, dx: &mut [f32]| {
        let [x, dout] = [x, dout].map(|all| &all[index * CHUNK..][..dx.len()]);
        level.dispatch(Backward { x, dout, dx });
    };
    Ok(written(x.len(), CHUNK, &[0.0; CHUNK], part).0)
}

struct Forward<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ((x, x_tail), (out, out_tail)) = (S::as_simd_f32s(self.x), S::as_mut_simd_f32s(self.out));
        for (out, x) in out.iter_mut().zip(x) {
            *out = value(simd, *x);
        }
        simd.partial_store_f32s(out_tail, value(simd, simd.partial_load_f32s(x_tail)));
    }
}

struct Backward<'a> {
    x: &'a [f32],
    dout: &'a [f32],
    dx: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (x, x_tail) = S::as_simd_f32s(self.x);
        let (dout, dout_tail) = S::as_simd_f32s(self.dout);
        let (dx, dx_tail) = S::as_mut_simd_f32s(self.dx);
        for ((dx, x), dout) in dx.iter_mut().zip(x).zip(dout) {
            *dx = chain(simd, *x, *dout);
        }
        let tail = chain(simd, simd.partial_load_f32s(x_tail), simd.partial_load_f32s(dout_tail));
        simd.partial_store_f32s(dx_tail, tail);
    }
}

/// `x Phi(x)`.
#[inline(always)]
pub(crate) fn value<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    simd.mul_f32s(x, normal(simd, x).0)
}

/// `x Phi(x)`, and its derivative.
#[inline(always)]
pub(crate) fn value_and_derivative<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let (cdf, density) = normal(simd, x);
    (simd.mul_f32s(x, cdf), simd.mul_add_e_f32s(x, density, cdf))
}

/// `dout` times the derivative at `x`. A function and no closure: a closure is compiled without the instruction set of
/// the function around it, and every operation in it becomes a call.
#[inline(always)]
fn chain<S: Simd>(simd: S, x: S::f32s, dout: S::f32s) -> S::f32s {
    simd.mul_f32s(dout, value_and_derivative(simd, x).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_gradients_are_those_of_the_normal_distribution() {
        for len in [0, 1, 7, 16, 33, CHUNK + 5] {
            let x: Vec<f32> = (0..len).map(|i| (i as f32 - len as f32 / 2.0) * 24.0 / len as f32).collect();
            let dout: Vec<f32> = (0..len).map(|i| 1.0 - (i % 5) as f32).collect();
            let (out, dx) = (gelu(&x).unwrap(), gelu_backward(&x, &dout).unwrap());
            for i in 0..len {
                let wide = f64::from(x[i]);
                let cdf = 0.5 * libm::erfc(-wide / std::f64::consts::SQRT_2);
                let density = (-0.5 * wide * wide).exp() / (2.0 * std::f64::consts::PI).sqrt();
                let close =
                    |got: f32, expected: f64| (f64::from(got) - expected).abs() <= 2e-6 * expected.abs().max(1e-6);
                assert!(close(out[i], wide * cdf), "gelu({wide}) = {}", out[i]);
                let slope = f64::from(dout[i]) * (cdf + wide * density);
                assert!(
                    (f64::from(dx[i]) - slope).abs() <= 2e-6 * f64::from(dout[i].abs()),
                    "gelu'({wide}) = {}",
                    dx[i]
                );
            }
        }
    }
}
