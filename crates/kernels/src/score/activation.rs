//! The activated affinities of "Infinite Self-Attention" (eq. 11, table 4); derivative 0 at a kink.

use pulp::Simd;

use super::Score;
use crate::simd::math::normal;

/// `max(x, 0)`.
#[derive(Clone, Copy)]
pub(crate) struct Relu;

impl Score for Relu {
    const HOMOGENEOUS: bool = true;

    #[inline(always)]
    fn value<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd.max_f32s(x, simd.splat_f32s(0.0))
    }

    #[inline(always)]
    fn value_and_derivative<S: Simd>(self, simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
        let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
        (self.value(simd, x), simd.select_f32s(simd.less_than_f32s(zero, x), one, zero))
    }
}

/// `|x|`.
#[derive(Clone, Copy)]
pub(crate) struct Abs;

impl Score for Abs {
    const HOMOGENEOUS: bool = true;

    #[inline(always)]
    fn value<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd.abs_f32s(x)
    }

    #[inline(always)]
    fn value_and_derivative<S: Simd>(self, simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
        let zero = simd.splat_f32s(0.0);
        let falling = simd.select_f32s(simd.less_than_f32s(x, zero), simd.splat_f32s(-1.0), zero);
        let sign = simd.select_f32s(simd.less_than_f32s(zero, x), simd.splat_f32s(1.0), falling);
        (self.value(simd, x), sign)
    }
}

/// `x Phi(x)`, the exact erf form.
#[derive(Clone, Copy)]
pub(crate) struct Gelu;

impl Score for Gelu {
    const HOMOGENEOUS: bool = false;

    #[inline(always)]
    fn value<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd.mul_f32s(x, normal(simd, x).0)
    }

    #[inline(always)]
    fn value_and_derivative<S: Simd>(self, simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
        let (cdf, density) = normal(simd, x);
        (simd.mul_f32s(x, cdf), simd.mul_add_e_f32s(x, density, cdf))
    }
}
