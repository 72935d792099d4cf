//! `exp(x)`, held by its logarithm.

use pulp::Simd;

use super::Score;

/// `exp` of the scaled product: `value` is its base-2 logarithm, for which the logits carry a factor `log2(e)`.
#[derive(Clone, Copy)]
pub(crate) struct Exp;

impl Score for Exp {
    const HOMOGENEOUS: bool = false;

    #[inline(always)]
    fn value<S: Simd>(self, _: S, x: S::f32s) -> S::f32s {
        x
    }

    #[inline(always)]
    fn value_and_derivative<S: Simd>(self, simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
        (x, simd.splat_f32s(1.0))
    }
}
