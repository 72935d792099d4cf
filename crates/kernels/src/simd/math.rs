//! Elementary functions on vectors of f32.

use pulp::Simd;

/// `2^x` within 2 ulp for `x <= 127`; exactly 0 below -127 (and for `-inf`), exactly 1 at 0.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    let round = simd.splat_f32s(12_582_912.0);
    let x = simd.max_f32s(x, simd.splat_f32s(-127.0));
    let shifted = simd.add_f32s(x, round);
    let r = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
    // Minimax polynomial of 2^r on [-1/2, 1/2] with p(0) = 1 held, relative error 9.2e-8.
    #[allow(clippy::approx_constant)] // a minimax coefficient, near ln 2
    let p = polynomial(simd, r, [1.0, 0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_4]);
    // The integer goes into the exponent field. At x = -127 r is 0 and p is 1, so that the sum of the bits is exactly 0.
    let exponent = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), exponent))
}

/// The normal distribution at `x`: `(Phi(x), Phi'(x))`, within 1e-6 of the smaller tail.
#[inline(always)]
pub(crate) fn normal<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let (one, zero) = (simd.splat_f32s(1.0), simd.splat_f32s(0.0));
    let a = simd.abs_f32s(x);
    // exp(-a^2/2) as a power of two; beyond |x| = 14 the tail is below the smallest f32.
    let bounded = simd.min_f32s(a, simd.splat_f32s(14.0));
    let square = simd.mul_f32s(bounded, bounded);
    let bell = exp2(simd, simd.mul_f32s(square, simd.splat_f32s(-0.5 * std::f32::consts::LOG2_E)));
    let bell = simd.select_f32s(simd.less_than_f32s(a, simd.splat_f32s(14.0)), bell, zero);
    // Phi(-a) = exp(-a^2/2) t P(t), t = 1 / (1 + 0.35 a): minimax fit on [0, 13], relative error 3.2e-8 before rounding.
    let t = simd.div_f32s(one, simd.mul_add_e_f32s(bounded, simd.splat_f32s(0.35), one));
    let p = polynomial(
        simd,
        t,
        [
            0.139_621_84,
            0.139_854_74,
            0.119_883_52,
            0.105_313_97,
            -0.022_663_924,
            0.158_542_34,
            -0.255_173_41,
            0.143_715_2,
            -0.029_094_18,
        ],
    );
    let tail = simd.mul_f32s(bell, simd.mul_f32s(t, p));
    let cdf = simd.select_f32s(simd.less_than_f32s(x, zero), tail, simd.sub_f32s(one, tail));
    (cdf, simd.mul_f32s(bell, simd.splat_f32s(0.398_942_3)))
}

/// `sum c[n] x^n` by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::f32s, c: [f32; N]) -> S::f32s {
    let mut sum = simd.splat_f32s(c[N - 1]);
    for n in (0..N - 1).rev() {
        sum = simd.mul_add_e_f32s(sum, x, simd.splat_f32s(c[n]));
    }
    sum
}
