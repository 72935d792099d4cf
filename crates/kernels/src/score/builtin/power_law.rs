//! Scores that fall with a power of the distance of two rows, on the plane or on the sphere.

use std::f32::consts::{LN_2, PI};

use pulp::Simd;

use super::slopes;
use crate::{
    score::contract::{MOST_PARAMETERS, PairScore, Slopes, Term},
    simd::math::{arc, log2_1p},
};

/// The length scale and the exponent `d_M + alpha` of a power law.
#[derive(Clone, Copy)]
pub(super) struct Law {
    pub kappa: f32,
    pub power: f32,
}

/// How the logarithm of an affinity falls with the distance `r`.
#[derive(Clone, Copy)]
pub(super) enum Decay {
    /// `-p ln(1 + r / kappa)`.
    Levy,
    /// `-p / 2 ln(1 + (r / kappa)^2)`.
    Student,
    /// `-(r / kappa)^2`.
    Gaussian,
}

impl Decay {
    /// `ln(1 + z)`, `z` the distance, or its square, in length scales.
    #[inline(always)]
    fn log<S: Simd>(simd: S, z: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(LN_2), log2_1p(simd, z))
    }

    /// The distance in length scales.
    #[inline(always)]
    fn ratio<S: Simd>(simd: S, law: Law, r: S::f32s) -> S::f32s {
        simd.mul_f32s(r, simd.splat_f32s(1.0 / law.kappa))
    }

    #[inline(always)]
    fn value<S: Simd>(self, simd: S, law: Law, r: S::f32s) -> S::f32s {
        let z = Self::ratio(simd, law, r);
        let square = simd.mul_f32s(z, z);
        match self {
            Self::Levy => simd.mul_f32s(simd.splat_f32s(-law.power), Self::log(simd, z)),
            Self::Student => simd.mul_f32s(simd.splat_f32s(-0.5 * law.power), Self::log(simd, square)),
            Self::Gaussian => simd.neg_f32s(square),
        }
    }

    /// What the derivative in the length scale falls with: the distance in length scales, or its square.
    #[inline(always)]
    fn argument<S: Simd>(self, simd: S, law: Law, r: S::f32s) -> S::f32s {
        let z = Self::ratio(simd, law, r);
        if matches!(self, Self::Levy) { z } else { simd.mul_f32s(z, z) }
    }

    /// The logarithm and the argument of a pair from which others are taken.
    #[inline(always)]
    fn centre<S: Simd>(self, simd: S, law: Law, r: S::f32s) -> [S::f32s; MOST_PARAMETERS] {
        [self.slopes(simd, law, r).parameters[0], self.argument(simd, law, r)]
    }

    /// The derivatives in the order and the length scale less those at `centre`. That in the length scale grows as `z / (1 + z)`, nearly the
    /// same of all pairs that are far: `z / (1 + z) - t / (1 + t) = (z - t) / ((1 + z) (1 + t))`.
    #[inline(always)]
    fn less_centre<S: Simd>(
        self,
        simd: S,
        law: Law,
        (r, slopes): (S::f32s, &Slopes<S::f32s>),
        [log, t]: [S::f32s; MOST_PARAMETERS],
    ) -> [S::f32s; MOST_PARAMETERS] {
        let (one, z) = (simd.splat_f32s(1.0), self.argument(simd, law, r));
        let ahead = simd.sub_f32s(z, t);
        let by_kappa = match self {
            Self::Gaussian => simd.mul_f32s(simd.splat_f32s(2.0 / law.kappa), ahead),
            _ => {
                let share = simd.div_f32s(ahead, simd.add_f32s(one, z));
                let share = simd.div_f32s(share, simd.add_f32s(one, t));
                simd.mul_f32s(simd.splat_f32s(law.power / law.kappa), share)
            }
        };
        [simd.sub_f32s(slopes.parameters[0], log), by_kappa]
    }

    /// The derivative in `r` over `r`, and those in the order and the length scale.
    #[inline(always)]
    fn slopes<S: Simd>(self, simd: S, law: Law, r: S::f32s) -> Slopes<S::f32s> {
        let Law { kappa, power } = law;
        let (one, z) = (simd.splat_f32s(1.0), Self::ratio(simd, law, r));
        let square = simd.mul_f32s(z, z);
        let rate = simd.splat_f32s(power / kappa);
        match self {
            Self::Levy => {
                // The bound keeps the quotient finite at r = 0, where no difference is left to multiply.
                let near = simd.max_f32s(r, simd.splat_f32s(1e-18));
                let product = simd.mul_f32s(near, simd.add_f32s(r, simd.splat_f32s(kappa)));
                let by_kappa = simd.mul_f32s(rate, simd.div_f32s(z, simd.add_f32s(one, z)));
                let term = simd.div_f32s(simd.splat_f32s(-power), product);
                Slopes { term, parameters: [simd.neg_f32s(Self::log(simd, z)), by_kappa] }
            }
            Self::Student => {
                let sum = simd.add_f32s(one, square);
                let term = simd.div_f32s(simd.splat_f32s(-power / (kappa * kappa)), sum);
                let log = simd.mul_f32s(simd.splat_f32s(-0.5), Self::log(simd, square));
                Slopes { term, parameters: [log, simd.mul_f32s(rate, simd.div_f32s(square, sum))] }
            }
            Self::Gaussian => {
                let by_kappa = simd.mul_f32s(simd.splat_f32s(2.0 / kappa), square);
                slopes(simd.splat_f32s(-2.0 / (kappa * kappa)), by_kappa)
            }
        }
    }
}

/// A decay with the distance on the plane.
pub(super) struct Plane {
    pub law: Law,
    pub decay: Decay,
}

impl PairScore for Plane {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = true;
    const PARAMETERS: usize = 2;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, square: S::f32s) -> S::f32s {
        self.decay.value(simd, self.law, simd.sqrt_f32s(square))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, square: S::f32s) -> Slopes<S::f32s> {
        let slopes = self.decay.slopes(simd, self.law, simd.sqrt_f32s(square));
        Slopes { term: simd.mul_f32s(simd.splat_f32s(0.5), slopes.term), ..slopes }
    }

    #[inline(always)]
    fn centre<S: Simd>(&self, simd: S, term: S::f32s) -> [S::f32s; MOST_PARAMETERS] {
        self.decay.centre(simd, self.law, simd.sqrt_f32s(term))
    }

    #[inline(always)]
    fn less_centre<S: Simd>(
        &self,
        simd: S,
        term: S::f32s,
        slopes: &Slopes<S::f32s>,
        centre: [S::f32s; MOST_PARAMETERS],
    ) -> [S::f32s; MOST_PARAMETERS] {
        self.decay.less_centre(simd, self.law, (simd.sqrt_f32s(term), slopes), centre)
    }
}

/// A decay with the angle between rows at length one, from [`Term::Chord`].
pub(super) struct Sphere {
    pub law: Law,
    pub decay: Decay,
}

impl Sphere {
    /// One minus the magnitude of the cosine, and the angle.
    #[inline(always)]
    fn angle<S: Simd>(simd: S, chord: S::f32s) -> (S::f32s, S::f32s) {
        // One minus the magnitude is half the square of the distance to the row or to its antipode, whichever is nearer.
        let half = simd.mul_f32s(simd.splat_f32s(0.5), chord);
        let beyond = simd.less_than_f32s(simd.splat_f32s(1.0), half);
        let a = simd.select_f32s(beyond, simd.sub_f32s(simd.splat_f32s(2.0), half), simd.abs_f32s(half));
        let arc = arc(simd, a);
        // -0.0 is the antipode: the sign bit tells, not the number.
        let sign = simd.transmute_u32s_f32s(chord);
        let opposite = simd.less_than_u32s(simd.splat_u32s(0x7fff_ffff), sign);
        let far = simd.or_m32s(beyond, opposite);
        (a, simd.select_f32s(far, simd.sub_f32s(simd.splat_f32s(PI), arc), arc))
    }
}

impl PairScore for Sphere {
    const TERM: Term = Term::Chord;
    const LOG: bool = true;
    const PARAMETERS: usize = 2;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, chord: S::f32s) -> S::f32s {
        self.decay.value(simd, self.law, Self::angle(simd, chord).1)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, chord: S::f32s) -> Slopes<S::f32s> {
        let (a, angle) = Self::angle(simd, chord);
        let slopes = self.decay.slopes(simd, self.law, angle);
        // d(chord / 2) = sin(angle) d(angle), and sin^2 = a (2 - a).
        let square = simd.mul_f32s(a, simd.sub_f32s(simd.splat_f32s(2.0), a));
        let zero = simd.splat_f32s(0.0);
        let by_angle = simd.mul_f32s(simd.mul_f32s(slopes.term, angle), simd.splat_f32s(0.5));
        let by_chord = simd.div_f32s(by_angle, simd.sqrt_f32s(square));
        let inside = simd.less_than_f32s(simd.splat_f32s(1e-30), square);
        Slopes { term: simd.select_f32s(inside, by_chord, zero), ..slopes }
    }

    #[inline(always)]
    fn centre<S: Simd>(&self, simd: S, term: S::f32s) -> [S::f32s; MOST_PARAMETERS] {
        self.decay.centre(simd, self.law, Self::angle(simd, term).1)
    }

    #[inline(always)]
    fn less_centre<S: Simd>(
        &self,
        simd: S,
        term: S::f32s,
        slopes: &Slopes<S::f32s>,
        centre: [S::f32s; MOST_PARAMETERS],
    ) -> [S::f32s; MOST_PARAMETERS] {
        self.decay.less_centre(simd, self.law, (Self::angle(simd, term).1, slopes), centre)
    }
}
