//! The scores of [`mechanism::Score`], as members of the contract that anyone may implement.

use std::{
    f32::consts::{LN_2, LOG2_E, PI},
    sync::Arc,
};

use pulp::Simd;

use super::{
    contract::{MOST_PARAMETERS, PairScore, Slopes, Term},
    tiles::TileScore,
};
use crate::{
    Parameter,
    mechanism::{self, Manifold},
    simd::math::{arc, exp2, log2_1p, normal},
};

/// What is done with a score, whichever it is.
pub(crate) trait Visitor {
    type Output;
    fn visit<T: PairScore + 'static>(self, score: T) -> Self::Output;
    /// One from outside.
    fn shared(self, score: Arc<dyn TileScore>) -> Self::Output;
}

/// Keeps the score.
struct Keep;

impl Visitor for Keep {
    type Output = Arc<dyn TileScore>;

    fn visit<T: PairScore + 'static>(self, score: T) -> Self::Output {
        Arc::new(score)
    }

    fn shared(self, score: Arc<dyn TileScore>) -> Self::Output {
        score
    }
}

/// Lends the score to a function.
struct Lend<F>(F);

impl<R, F: FnOnce(&dyn TileScore) -> R> Visitor for Lend<F> {
    type Output = R;

    fn visit<T: PairScore + 'static>(self, score: T) -> R {
        (self.0)(&score)
    }

    fn shared(self, score: Arc<dyn TileScore>) -> R {
        (self.0)(&*score)
    }
}

/// The score of one head, see [`visit`].
pub(crate) fn of_head(
    score: &mechanism::Score,
    head_dim: usize,
    heads: usize,
    value: impl Fn(Parameter) -> f64,
) -> Arc<dyn TileScore> {
    visit(score, head_dim, heads, value, Keep)
}

/// Calls `f` with the score of one head, for which nothing is allocated; see [`visit`].
pub(crate) fn with_head<R>(
    score: &mechanism::Score,
    head_dim: usize,
    heads: usize,
    value: impl Fn(Parameter) -> f64,
    f: impl FnOnce(&dyn TileScore) -> R,
) -> R {
    visit(score, head_dim, heads, value, Lend(f))
}

/// The score of one head; `value` says what a parameter is. Cosines and angles are those of rows at length one, and a row
/// without length has to be at a right angle to all others.
fn visit<V: Visitor>(
    score: &mechanism::Score,
    head_dim: usize,
    heads: usize,
    value: impl Fn(Parameter) -> f64,
    visitor: V,
) -> V::Output {
    use mechanism::Score;
    let of = |parameter| value(parameter) as f32;
    let scale = of(Parameter::Scale);
    match score {
        Score::DotExp(m) => match m.softcap {
            Some(cap) => visitor.visit(Capped { scale, cap: cap as f32 }),
            None => visitor.visit(Exp { scale }),
        },
        // |u - w|^2 = 2 - 2 u.w of rows at length one.
        Score::CosineExp(_) => visitor.visit(Cosine { scale }),
        Score::DotRelu(_) => visitor.visit(Relu { scale }),
        Score::DotAbs(_) => visitor.visit(Abs { scale }),
        Score::DotGelu(_) => visitor.visit(Gelu { scale }),
        Score::DotSquaredRelu(_) => visitor.visit(SquaredRelu { scale }),
        Score::DotSigmoid(_) => visitor.visit(Sigmoid { scale, offset: of(Parameter::Offset) }),
        Score::Gaussian(_) => visitor.visit(Gaussian { scale }),
        Score::Levy(m) | Score::Student(m) => {
            let fna = score.as_fna();
            let dim = fna.resolve(head_dim, heads).intrinsic_dim;
            let law = Law { kappa: of(Parameter::Kappa), power: (dim + value(Parameter::Alpha)) as f32 };
            let decay = match score {
                Score::Student(_) => Decay::Student,
                _ if fna.is_gaussian() => Decay::Gaussian,
                _ => Decay::Levy,
            };
            match m.manifold {
                Manifold::Euclidean => visitor.visit(Plane { law, decay }),
                Manifold::Sphere => visitor.visit(Sphere { law, decay }),
            }
        }
        Score::Laplacian(_) => visitor.visit(Laplacian { lambda: of(Parameter::Lambda) }),
        Score::Constant(_) => visitor.visit(Constant),
        Score::Custom(custom) => visitor.shared(custom.tiles()),
    }
}

/// One derivative in the term, and at most one in a parameter.
fn slopes<V: Copy>(term: V, parameter: V) -> Slopes<V> {
    Slopes { term, parameters: [parameter; MOST_PARAMETERS] }
}

/// `exp(scale q.k)`.
struct Exp {
    scale: f32,
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
struct Capped {
    scale: f32,
    cap: f32,
}

impl Capped {
    #[inline(always)]
    fn tanh<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
        let (one, near) = (simd.splat_f32s(1.0), simd.splat_f32s(0.25));
        let x = simd.mul_f32s(simd.splat_f32s(self.scale / self.cap), term);
        let a = simd.abs_f32s(x);
        let e = exp2(simd, simd.mul_f32s(simd.splat_f32s(-2.0 * LOG2_E), a));
        let far = simd.div_f32s(simd.sub_f32s(one, e), simd.add_f32s(one, e));
        // Near zero the quotient loses digits that the series has.
        let square = simd.mul_f32s(x, x);
        let mut series = simd.splat_f32s(62.0 / 2835.0);
        for term in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
            series = simd.mul_add_e_f32s(series, square, simd.splat_f32s(term));
        }
        let signed = simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(0.0)), simd.neg_f32s(far), far);
        simd.select_f32s(simd.less_than_f32s(a, near), simd.mul_f32s(x, series), signed)
    }
}

impl PairScore for Capped {
    const TERM: Term = Term::Product;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(self.cap), self.tanh(simd, term))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s> {
        let tanh = self.tanh(simd, term);
        let slope = simd.sub_f32s(simd.splat_f32s(1.0), simd.mul_f32s(tanh, tanh));
        slopes(simd.mul_f32s(simd.splat_f32s(self.scale), slope), simd.mul_f32s(slope, term))
    }
}

/// `exp(scale cos)`, the cosine from the squared chord: `1 - chord / 2`.
struct Cosine {
    scale: f32,
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
        struct $name {
            scale: f32,
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
struct Sigmoid {
    scale: f32,
    offset: f32,
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

/// `exp(-scale |q - k|^2)`.
struct Gaussian {
    scale: f32,
}

impl PairScore for Gaussian {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, square: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(-self.scale), square)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, square: S::f32s) -> Slopes<S::f32s> {
        slopes(simd.splat_f32s(-self.scale), simd.neg_f32s(square))
    }
}

/// `exp(-|q - k|_1 / lambda)`.
struct Laplacian {
    lambda: f32,
}

impl PairScore for Laplacian {
    const TERM: Term = Term::Difference;
    const LOG: bool = true;
    const PARAMETERS: usize = 1;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, distance: S::f32s) -> S::f32s {
        simd.mul_f32s(simd.splat_f32s(-1.0 / self.lambda), distance)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, distance: S::f32s) -> Slopes<S::f32s> {
        let rate = 1.0 / self.lambda;
        slopes(simd.splat_f32s(-rate), simd.mul_f32s(simd.splat_f32s(rate * rate), distance))
    }
}

/// 1.
struct Constant;

impl PairScore for Constant {
    const TERM: Term = Term::Product;
    const LOG: bool = true;
    const PARAMETERS: usize = 0;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, _: S::f32s) -> S::f32s {
        simd.splat_f32s(0.0)
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, _: S::f32s) -> Slopes<S::f32s> {
        slopes(simd.splat_f32s(0.0), simd.splat_f32s(0.0))
    }
}

/// The length scale and the exponent `d_M + alpha` of a power law.
#[derive(Clone, Copy)]
struct Law {
    kappa: f32,
    power: f32,
}

/// How the logarithm of an affinity falls with the distance `r`.
#[derive(Clone, Copy)]
enum Decay {
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
                let near = simd.max_f32s(r, simd.splat_f32s(1e-17));
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
struct Plane {
    law: Law,
    decay: Decay,
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
}

/// A decay with the angle between rows at length one, from the square of the chord.
struct Sphere {
    law: Law,
    decay: Decay,
}

impl Sphere {
    /// One minus the magnitude of the cosine, and the angle.
    #[inline(always)]
    fn angle<S: Simd>(simd: S, chord: S::f32s) -> (S::f32s, S::f32s) {
        let (half, two) = (simd.mul_f32s(simd.splat_f32s(0.5), chord), simd.splat_f32s(2.0));
        let a = simd.max_f32s(simd.min_f32s(half, simd.sub_f32s(two, half)), simd.splat_f32s(0.0));
        let arc = arc(simd, a);
        let far = simd.less_than_f32s(simd.splat_f32s(1.0), half);
        (a, simd.select_f32s(far, simd.sub_f32s(simd.splat_f32s(PI), arc), arc))
    }
}

impl PairScore for Sphere {
    const TERM: Term = Term::SquaredDifference;
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
}
