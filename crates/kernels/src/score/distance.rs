//! Affinities that fall with a distance: what "Fractional neural attention for efficient multiscale sequence processing"
//! (eq. 9, 10, 13 and A.1) makes of two tokens on the plane or on the sphere.
//!
//! A [`Metric`] says how a logit, as the structure makes it, encodes the distance `r`; a [`Decay`] what becomes of it. The
//! logit is `r^2` on the plane. On the sphere it is `1 - |c|` with the sign of the cosine `c`, so that angles near 0 and near
//! `pi` have all their digits.

use std::f32::consts::{LN_2, LOG2_E, PI};

use pulp::Simd;

use crate::simd::math::{arc, exp2_m1, log2_1p};

/// A distance and its square.
#[derive(Clone, Copy)]
pub(crate) struct Distance<V> {
    pub r: V,
    pub square: V,
}

/// How a logit encodes a distance.
pub(crate) trait Metric: Copy + Send + Sync {
    /// The distance at a logit.
    fn distance<S: Simd>(self, simd: S, logit: S::f32s) -> Distance<S::f32s>;
    /// `ds/dc` from `g = ds/dr / r`, with `c` the product of the tokens that the structure differentiates: `-|q - k|^2 / 2`
    /// on the plane and the cosine on the sphere. 0 at a distance of 0 or `pi`.
    fn chain<S: Simd>(self, simd: S, logit: S::f32s, r: S::f32s, g: S::f32s) -> S::f32s;
}

/// The plane.
#[derive(Clone, Copy)]
pub(crate) struct Plane;

/// The unit sphere.
#[derive(Clone, Copy)]
pub(crate) struct Sphere;

/// Squares of distances up to this are those of coinciding tokens: far below a rounding of the tokens themselves.
const COINCIDING: f32 = 1e-34;

impl Metric for Plane {
    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, logit: S::f32s) -> Distance<S::f32s> {
        Distance { r: simd.sqrt_f32s(logit), square: logit }
    }

    #[inline(always)]
    fn chain<S: Simd>(self, simd: S, logit: S::f32s, _: S::f32s, g: S::f32s) -> S::f32s {
        let (zero, apart) = (simd.splat_f32s(0.0), simd.less_than_f32s(simd.splat_f32s(COINCIDING), logit));
        simd.select_f32s(apart, simd.sub_f32s(zero, g), zero)
    }
}

impl Metric for Sphere {
    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, logit: S::f32s) -> Distance<S::f32s> {
        let (zero, pi) = (simd.splat_f32s(0.0), simd.splat_f32s(PI));
        let arc = arc(simd, simd.abs_f32s(logit));
        // -0.0 is the antipode: look at the sign bit, not at the number.
        let sign = simd.transmute_u32s_f32s(logit);
        let far = simd.less_than_u32s(simd.splat_u32s(0x7fff_ffff), sign);
        let r = simd.max_f32s(simd.select_f32s(far, simd.sub_f32s(pi, arc), arc), zero);
        Distance { r, square: simd.mul_f32s(r, r) }
    }

    #[inline(always)]
    fn chain<S: Simd>(self, simd: S, logit: S::f32s, r: S::f32s, g: S::f32s) -> S::f32s {
        // sin r = sqrt(1 - c^2), and 1 - c^2 = a (2 - a) with a = 1 - |c|.
        let a = simd.abs_f32s(logit);
        let square = simd.mul_f32s(a, simd.sub_f32s(simd.splat_f32s(2.0), a));
        let inside = simd.less_than_f32s(simd.splat_f32s(COINCIDING), square);
        let slope = simd.div_f32s(simd.mul_f32s(g, r), simd.sqrt_f32s(square));
        let zero = simd.splat_f32s(0.0);
        simd.select_f32s(inside, simd.sub_f32s(zero, slope), zero)
    }
}

/// The length scale and the exponent of one head.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub kappa: f32,
    /// `d_M + alpha`.
    pub power: f32,
}

/// The derivatives of the logarithm `s` of an affinity.
pub(crate) struct Slopes<V> {
    /// Its base-2 logarithm.
    pub value: V,
    /// `ds/dr / r`; anything at `r = 0`.
    pub g: V,
    /// `r ds/dr`, less that of a [`Typical`] pair, over the pair's share: it multiplies their sum.
    pub radial: V,
}

/// A pair that others are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Typical<V> {
    /// Its base-2 logarithm.
    pub value: V,
    /// Its distance, or the square of it, as the decay falls with.
    at: V,
    /// What the affinity's slope is there in units of its limit near by.
    pub share: V,
}

/// How an affinity falls with the distance.
pub(crate) trait Decay: Copy + Send + Sync {
    /// The base-2 logarithm of the affinity.
    fn value<S: Simd>(self, simd: S, scale: Scale, at: Distance<S::f32s>) -> S::f32s;
    /// The same with its derivatives. The difference to the typical pair is taken before anything is rounded: near by as far
    /// away it has all its digits.
    fn slopes<S: Simd>(
        self,
        simd: S,
        scale: Scale,
        at: Distance<S::f32s>,
        typical: &Typical<S::f32s>,
    ) -> Slopes<S::f32s>;
    /// The pair at which the base-2 logarithm of the affinity is `value`, at most 0.
    fn typical<S: Simd>(self, simd: S, scale: Scale, value: S::f32s) -> Typical<S::f32s>;
}

/// `(1 + r/kappa)^-p`.
#[derive(Clone, Copy)]
pub(crate) struct Levy;

/// `(1 + (r/kappa)^2)^(-p/2)`.
#[derive(Clone, Copy)]
pub(crate) struct Student;

/// `exp(-(r/kappa)^2)`.
#[derive(Clone, Copy)]
pub(crate) struct Gaussian;

/// The base-2 logarithm of a Gaussian from some 1e18 length scales on, where the square leaves the range of f32: all that is
/// farther is as far.
const FARTHEST: f32 = -1e36;

impl Decay for Levy {
    #[inline(always)]
    fn value<S: Simd>(self, simd: S, scale: Scale, at: Distance<S::f32s>) -> S::f32s {
        let z = simd.mul_f32s(at.r, simd.splat_f32s(1.0 / scale.kappa));
        simd.mul_f32s(simd.splat_f32s(-scale.power), log2_1p(simd, z))
    }

    #[inline(always)]
    fn slopes<S: Simd>(
        self,
        simd: S,
        scale: Scale,
        at: Distance<S::f32s>,
        typical: &Typical<S::f32s>,
    ) -> Slopes<S::f32s> {
        // ds/dr = -p / (kappa + r). The bounds keep the quotient finite at r = 0.
        let r = simd.max_f32s(at.r, simd.splat_f32s(1e-17));
        let product = simd.mul_f32s(r, simd.add_f32s(at.r, simd.splat_f32s(scale.kappa)));
        let g = simd.div_f32s(simd.splat_f32s(-scale.power), simd.max_f32s(product, simd.splat_f32s(1e-32)));
        // r ds/dr - t ds/dt = -p kappa (r - t) / ((kappa + r) (kappa + t))
        let radial = simd.mul_f32s(simd.mul_f32s(g, r), typical.ahead(simd, at.r));
        Slopes { value: self.value(simd, scale, at), g, radial }
    }

    #[inline(always)]
    fn typical<S: Simd>(self, simd: S, scale: Scale, value: S::f32s) -> Typical<S::f32s> {
        let inverse = -1.0 / scale.power;
        Typical::of_power(simd, scale.kappa, value, simd.mul_f32s(value, simd.splat_f32s(inverse)))
    }
}

impl Decay for Student {
    #[inline(always)]
    fn value<S: Simd>(self, simd: S, scale: Scale, at: Distance<S::f32s>) -> S::f32s {
        let z = simd.mul_f32s(at.r, simd.splat_f32s(1.0 / scale.kappa));
        let square = simd.mul_f32s(z, z);
        // Beyond 2^40 the one is lost, and the square may leave the range of f32: twice the logarithm of z + 1 is the same.
        let far = simd.less_than_f32s(simd.splat_f32s(1.1e12), z);
        let log = log2_1p(simd, simd.select_f32s(far, z, square));
        let log = simd.select_f32s(far, simd.add_f32s(log, log), log);
        simd.mul_f32s(simd.splat_f32s(-0.5 * scale.power), log)
    }

    #[inline(always)]
    fn slopes<S: Simd>(
        self,
        simd: S,
        scale: Scale,
        at: Distance<S::f32s>,
        typical: &Typical<S::f32s>,
    ) -> Slopes<S::f32s> {
        // ds/dr / r = -p / (kappa^2 + r^2), and of r ds/dr as for `Levy`, with squares.
        let sum = simd.add_f32s(at.square, simd.splat_f32s(self.square(scale)));
        let g = simd.div_f32s(simd.splat_f32s(-scale.power), sum);
        Slopes { value: self.value(simd, scale, at), g, radial: simd.mul_f32s(g, typical.ahead(simd, at.square)) }
    }

    #[inline(always)]
    fn typical<S: Simd>(self, simd: S, scale: Scale, value: S::f32s) -> Typical<S::f32s> {
        let inverse = -2.0 / scale.power;
        Typical::of_power(simd, self.square(scale), value, simd.mul_f32s(value, simd.splat_f32s(inverse)))
    }
}

impl Student {
    /// `kappa^2`, within bounds that keep quotients and products numbers.
    fn square(self, scale: Scale) -> f32 {
        (scale.kappa * scale.kappa).clamp(1e-35, 1e37)
    }
}

impl<V: Copy> Typical<V> {
    /// The pair where an affinity `(1 + x / unit)^-power` has the logarithm `value`, and the sum the logarithm `log`.
    #[inline(always)]
    fn of_power<S: Simd<f32s = V>>(simd: S, unit: f32, value: V, log: V) -> Self {
        let (unit, most) = (simd.splat_f32s(unit), simd.splat_f32s(FARTHEST.abs()));
        let ratio = exp2_m1(simd, simd.min_f32s(log, simd.splat_f32s(126.0)));
        let at = simd.min_f32s(simd.mul_f32s(unit, ratio), most);
        Self { value, at, share: simd.div_f32s(unit, simd.add_f32s(unit, at)) }
    }

    /// How much farther than this pair another is.
    #[inline(always)]
    fn ahead<S: Simd<f32s = V>>(&self, simd: S, at: V) -> V {
        simd.sub_f32s(at, self.at)
    }
}

impl Decay for Gaussian {
    #[inline(always)]
    fn value<S: Simd>(self, simd: S, scale: Scale, at: Distance<S::f32s>) -> S::f32s {
        let value = simd.mul_f32s(at.square, simd.splat_f32s(((-LOG2_E / scale.kappa) / scale.kappa).max(f32::MIN)));
        simd.max_f32s(value, simd.splat_f32s(FARTHEST))
    }

    #[inline(always)]
    fn slopes<S: Simd>(
        self,
        simd: S,
        scale: Scale,
        at: Distance<S::f32s>,
        typical: &Typical<S::f32s>,
    ) -> Slopes<S::f32s> {
        let value = self.value(simd, scale, at);
        let g = simd.splat_f32s(((-2.0 / scale.kappa) / scale.kappa).max(FARTHEST));
        Slopes { value, g, radial: typical.ahead(simd, value) }
    }

    #[inline(always)]
    fn typical<S: Simd>(self, simd: S, _: Scale, value: S::f32s) -> Typical<S::f32s> {
        Typical { value, at: value, share: simd.splat_f32s(2.0 * LN_2) }
    }
}
