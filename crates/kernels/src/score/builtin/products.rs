//! Scores of products of two rows.

use std::f32::consts::LOG2_E;

use pulp::Simd;

use super::slopes;
use crate::{
    score::contract::{PairScore, Slopes, Term},
    simd::math::{exp2, normal},
};

/// `exp(scale q.k)`.
pub(super) struct Exp {
    pub scale: f32,
}

impl PairScore for Exp {
    const TERM: Term = Term::Product;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(self.scale), term)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s> {
        slopes(simd.splat_f32s(self.scale), term)
    }
}

/// `exp(cap tanh(scale q.k / cap))`.
pub(super) struct Capped {
    pub scale: f32,
    pub cap: f32,
}

impl Capped {
    /// The hyperbolic tangent of the logit over the cap, and its slope.
    #[inline(always)]
    fn tanh<S: Simd>(&self, simd: S, term: S::f32s) -> (S::f32s, S::f32s) {
        let (one, near) = (simd.splat_f32s(1.0), simd.splat_f32s(0.25));
        let x = simd.mul_f32s(simd.splat_f32s(self.scale / self.cap), term);
        let a = simd.abs_f32s(x);
        let e = exp2(simd, simd.mul_f32s(simd.splat_f32s(-2.0 * LOG2_E), a));
        let rate = simd.div_f32s(one, simd.add_f32s(one, e));
        let far = simd.mul_f32s(simd.sub_f32s(one, e), rate);
        // Near zero the quotient loses digits that the series has.
        let square = simd.mul_f32s(x, x);
        let mut series = simd.splat_f32s(62.0 / 2835.0);
        for term in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
            series = simd.mul_add_e_f32s(series, square, simd.splat_f32s(term));
        }
        let signed = simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(0.0)), simd.neg_f32s(far), far);
        let tanh = simd.select_f32s(simd.less_than_f32s(a, near), simd.mul_f32s(x, series), signed);
        // Not 1 - tanh^2, which has no digits where logits are far beyond the cap.
        (tanh, simd.mul_f32s(simd.mul_f32s(simd.splat_f32s(4.0), e), simd.mul_f32s(rate, rate)))
    }
}

impl PairScore for Capped {
    const TERM: Term = Term::Product;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(self.cap), self.tanh(simd, term).0)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s> {
        let (_, slope) = self.tanh(simd, term);
        slopes(simd.mul_f32s(simd.splat_f32s(self.scale), slope), simd.mul_f32s(slope, term))
    }
}

/// `exp(scale cos)`, the cosine from the squared chord: `1 - chord / 2`.
pub(super) struct Cosine {
    pub scale: f32,
}

impl Cosine {
    #[inline(always)]
    fn cosine<S: Simd>(simd: S, chord: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(chord, simd.splat_f32s(-0.5), simd.splat_f32s(1.0))
    }
}

impl PairScore for Cosine {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, chord: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(self.scale), Self::cosine(simd, chord))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, chord: S::f32s) -> Slopes<S::f32s> {
        slopes(simd.splat_f32s(-0.5 * self.scale), Self::cosine(simd, chord))
    }
}

/// A score that is a function `phi` of `x = scale q.k`, to which a bias may be added, with its derivative.
macro_rules! activation {
    ($(#[$doc:meta])* $name:ident, $simd:ident, $x:ident, $value:expr, $slope:expr) => {
        $(#[$doc])*
        pub(super) struct $name {
            pub scale: f32,
        }

        impl PairScore for $name {
            const TERM: Term = Term::Product;
            const LOG: bool = false;
            const PARAMETERS: usize = 1;

            #[inline(always)]
            fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
                self.biased_value(simd, term, simd.splat_f32s(0.0))
            }

            #[inline(always)]
            fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s> {
                self.biased_slopes(simd, term, simd.splat_f32s(0.0)).0
            }

            #[inline(always)]
            fn biased_value<S: Simd>(&self, $simd: S, term: S::f32s, bias: S::f32s) -> S::f32s {
                let $x = $simd.mul_add_e_f32s($simd.splat_f32s(self.scale), term, bias);
                $value
            }

            #[inline(always)]
            fn biased_slopes<S: Simd>(&self, $simd: S, term: S::f32s, bias: S::f32s) -> (Slopes<S::f32s>, S::f32s) {
                let scale = $simd.splat_f32s(self.scale);
                let $x = $simd.mul_add_e_f32s(scale, term, bias);
                let slope = $slope;
                (slopes($simd.mul_f32s(scale, slope), $simd.mul_f32s(slope, term)), slope)
            }
        }
    };
}

activation!(
    /// `max(0, x)`.
    Relu,
    simd,
    x,
    simd.max_f32s(x, simd.splat_f32s(0.0)),
    {
        let zero = simd.splat_f32s(0.0);
        simd.select_f32s(simd.less_than_f32s(zero, x), simd.splat_f32s(1.0), zero)
    }
);

activation!(
    /// `|x|`.
    Abs,
    simd,
    x,
    simd.abs_f32s(x),
    {
        let zero = simd.splat_f32s(0.0);
        let falling = simd.select_f32s(simd.less_than_f32s(x, zero), simd.splat_f32s(-1.0), zero);
        simd.select_f32s(simd.less_than_f32s(zero, x), simd.splat_f32s(1.0), falling)
    }
);

activation!(
    /// `x Phi(x)`, the exact GELU.
    Gelu,
    simd,
    x,
    simd.mul_f32s(x, normal(simd, x).0),
    {
        let (cdf, density) = normal(simd, x);
        simd.mul_add_e_f32s(x, density, cdf)
    }
);

activation!(
    /// `max(0, x)^2`.
    SquaredRelu,
    simd,
    x,
    {
        let x = simd.max_f32s(x, simd.splat_f32s(0.0));
        simd.mul_f32s(x, x)
    },
    {
        let x = simd.max_f32s(x, simd.splat_f32s(0.0));
        simd.add_f32s(x, x)
    }
);

/// `1 / (1 + exp(-(scale q.k + offset)))`.
pub(super) struct Sigmoid {
    pub scale: f32,
    pub offset: f32,
}

impl Sigmoid {
    /// `exp(-|z|)`, and whether `z` is negative, as a vector of the logits.
    #[inline(always)]
    fn tail<S: Simd>(&self, simd: S, term: S::f32s, bias: S::f32s) -> (S::f32s, S::f32s) {
        let offset = simd.add_f32s(simd.splat_f32s(self.offset), bias);
        let z = simd.mul_add_e_f32s(simd.splat_f32s(self.scale), term, offset);
        (exp2(simd, simd.mul_f32s(simd.splat_f32s(-LOG2_E), simd.abs_f32s(z))), z)
    }
}

impl PairScore for Sigmoid {
    const TERM: Term = Term::Product;
    const LOG: bool = false;
    const PARAMETERS: usize = 2;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
        self.biased_value(simd, term, simd.splat_f32s(0.0))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s> {
        self.biased_slopes(simd, term, simd.splat_f32s(0.0)).0
    }

    #[inline(always)]
    fn biased_value<S: Simd>(&self, simd: S, term: S::f32s, bias: S::f32s) -> S::f32s {
        let (one, (e, z)) = (simd.splat_f32s(1.0), self.tail(simd, term, bias));
        let negative = simd.less_than_f32s(z, simd.splat_f32s(0.0));
        simd.div_f32s(simd.select_f32s(negative, e, one), simd.add_f32s(one, e))
    }

    #[inline(always)]
    fn biased_slopes<S: Simd>(&self, simd: S, term: S::f32s, bias: S::f32s) -> (Slopes<S::f32s>, S::f32s) {
        let (e, _) = self.tail(simd, term, bias);
        let sum = simd.add_f32s(simd.splat_f32s(1.0), e);
        let slope = simd.div_f32s(simd.div_f32s(e, sum), sum);
        let scale = simd.mul_f32s(simd.splat_f32s(self.scale), slope);
        (Slopes { term: scale, parameters: [simd.mul_f32s(slope, term), slope] }, slope)
    }
}
