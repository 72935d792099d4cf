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

/// `2^x - 1` for `0 <= x <= 127`, within 1e-6 of itself, however small.
#[inline(always)]
pub(crate) fn exp2_m1<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (one, near) = (simd.splat_f32s(1.0), simd.splat_f32s(0.25));
    // Taylor's series of (2^x - 1) / x.
    #[allow(clippy::approx_constant)] // its first term is ln 2
    let series = [0.693_147_2, 0.240_226_5, 0.055_504_11, 0.009_618_129, 0.001_333_355_8, 0.000_154_035_3];
    let small = simd.mul_f32s(x, polynomial(simd, simd.min_f32s(x, near), series));
    simd.select_f32s(simd.less_than_f32s(x, near), small, simd.sub_f32s(exp2(simd, x), one))
}

/// `log2(1 + x)` for `x >= 0` (beyond `2^125`: of `2^125`), within 3e-7 of itself, however small.
#[inline(always)]
pub(crate) fn log2_1p<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (one, quarters) = (simd.splat_f32s(1.0), simd.splat_u32s(0x3f40_0000));
    let x = simd.min_f32s(x, simd.splat_f32s(f32::from_bits(0x7e00_0000)));
    // 1 + x = 2^k (1 + f) with f in [-1/4, 1/2). Only k is taken from the rounded sum; f is not, so that for k = 0 it is x.
    let sum = simd.transmute_u32s_f32s(simd.add_f32s(one, x));
    let exponent = simd.and_u32s(simd.sub_u32s(sum, quarters), simd.splat_u32s(0xff80_0000));
    let down = simd.transmute_f32s_u32s(simd.sub_u32s(simd.transmute_u32s_f32s(one), exponent));
    let f = simd.mul_add_e_f32s(x, down, simd.sub_f32s(down, one));
    // k as a float: the low bits of 2^23 + k.
    let integers = simd.splat_f32s(8_388_608.0);
    let k = simd.wrapping_dyn_shr_u32s(exponent, simd.splat_u32s(23));
    let k = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(integers), k));
    // Minimax polynomial of log2(1 + f) / f, relative error 1.7e-8.
    let p = polynomial(
        simd,
        f,
        [
            std::f32::consts::LOG2_E,
            -0.721_347_5,
            0.480_900_76,
            -0.360_674_86,
            0.288_384_05,
            -0.240_148_2,
            0.209_101,
            -0.190_278_55,
            0.150_667_15,
            -0.064_344_294,
        ],
    );
    simd.mul_add_e_f32s(f, p, simd.sub_f32s(k, integers))
}

/// `arccos(1 - x)` for `x` in `[0, 1]`, within 2e-7 of itself, however small.
#[inline(always)]
pub(crate) fn arc<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Minimax polynomial of arccos(1 - x) / sqrt(2 x), relative error 4.7e-9.
    let p = polynomial(
        simd,
        x,
        [
            1.0,
            0.083_333_01,
            0.018_758_241,
            0.005_500_511,
            0.002_281_879_8,
            -0.000_313_101_9,
            0.001_789_827_2,
            -0.001_131_100_6,
            0.000_501_464_5,
        ],
    );
    simd.mul_f32s(simd.sqrt_f32s(simd.add_f32s(x, x)), p)
}

/// The normal distribution at `x`: `(Phi(x), Phi'(x))`, within 1e-6 of the smaller tail.
#[inline(always)]
pub fn normal<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
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

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::*;
    use crate::simd::Level;

    /// Which function, applied in place.
    struct Apply<'a>(&'a str, &'a mut [f32]);

    impl WithSimd for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for x in S::as_mut_simd_f32s(self.1).0 {
                *x = match self.0 {
                    "exp2" => exp2(simd, *x),
                    "exp2_m1" => exp2_m1(simd, *x),
                    "log2_1p" => log2_1p(simd, *x),
                    _ => arc(simd, *x),
                };
            }
        }
    }

    /// The largest relative error over `inputs` at any level.
    fn error(name: &str, inputs: &[f32], exact: impl Fn(f64) -> f64) -> f64 {
        let of = |got: f32, x: f32| {
            let wanted = exact(x.into());
            if wanted == 0.0 { f64::from(got).abs() } else { (f64::from(got) / wanted - 1.0).abs() }
        };
        let errors = Level::available().into_iter().flat_map(|level| {
            let mut got = inputs.to_vec();
            level.dispatch(Apply(name, &mut got));
            got.into_iter().zip(inputs).map(|(got, &x)| of(got, x)).collect::<Vec<_>>()
        });
        errors.fold(0.0, |most, x| if x.is_nan() { f64::NAN } else { most.max(x) })
    }

    /// Floats spread evenly over the bit patterns from `from` to `to`, both among them.
    fn spread(from: f32, to: f32) -> Vec<f32> {
        let (from, to) = (u64::from(from.to_bits()), u64::from(to.to_bits()));
        (0..1 << 18).map(|n| f32::from_bits((from + (to - from) * n / ((1 << 18) - 1)) as u32)).collect()
    }

    #[test]
    fn powers_logarithms_and_arcs_keep_their_digits() {
        assert!(error("exp2", &spread(1e-9, 126.9), f64::exp2) < 2.4e-7);
        let falling: Vec<f32> = spread(1e-9, 125.9).iter().map(|x| -x).collect();
        assert!(error("exp2", &falling, f64::exp2) < 2.4e-7);
        let exp2_m1 = |x: f64| (x * std::f64::consts::LN_2).exp_m1();
        assert!(error("exp2_m1", &spread(1e-36, 126.9), exp2_m1) < 1e-6);
        let log2_1p = |x: f64| x.ln_1p() * std::f64::consts::LOG2_E;
        assert!(error("log2_1p", &spread(1e-36, 4e37), log2_1p) < 3e-7);
        assert!(error("log2_1p", &spread(1e-6, 8.0), log2_1p) < 3e-7);
        let arc = |x: f64| 2.0 * (x / 2.0).sqrt().asin();
        assert!(error("arc", &spread(1e-36, 1.0), arc) < 2e-7);
    }

    #[test]
    fn ends_of_the_ranges() {
        for (name, x, wanted) in [
            ("exp2", 0.0, 1.0),
            ("exp2", -127.0, 0.0),
            ("exp2", f32::NEG_INFINITY, 0.0),
            ("exp2_m1", 0.0, 0.0),
            ("log2_1p", 0.0, 0.0),
            ("log2_1p", f32::INFINITY, 125.0),
            ("arc", 0.0, 0.0),
        ] {
            assert_eq!(error(name, &[x; 16], |_| wanted), 0.0, "{name}({x})");
        }
    }
}
