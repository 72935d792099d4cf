//! The scores of [`mechanism::Score`], as members of the contract that anyone may implement.

mod power_law;
mod products;

use std::sync::Arc;

use pulp::Simd;

use self::{
    power_law::{Decay, Law, Plane, Sphere},
    products::{Abs, Capped, Cosine, Exp, Gelu, Relu, Sigmoid, SquaredRelu},
};
use super::{
    contract::{MOST_PARAMETERS, PairScore, Slopes, Term},
    tiles::TileScore,
};
use crate::{
    Parameter,
    mechanism::{self, Manifold},
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
