//! The affinity of a pair of rows, and its gradient.

use std::f64::consts::{FRAC_PI_2, PI};

use super::super::{
    head::Head,
    matrix::{inner, ratio},
};
use crate::{
    Parameter,
    mechanism::{Activation, Manifold, Score},
};

/// Rows that are no longer than this have no direction.
const NO_LENGTH: f64 = 1e-12;

/// A score with the parameters of one head.
pub(super) struct Affinity<'a> {
    score: &'a Score,
    pub parameters: &'static [Parameter],
    scale: f64,
    offset: f64,
    alpha: f64,
    kappa: f64,
    lambda: f64,
    /// Intrinsic dimension.
    dim: f64,
}

/// How a score is a function of one number per pair: the number, and the derivatives of the value in it, in the parameters and in the
/// bias.
struct Slopes {
    term: f64,
    parameters: [f64; 2],
    bias: f64,
}

/// What a pair's value depends on beside its rows: the keys that its query sees, and what is added to its logit.
#[derive(Clone, Copy)]
pub(super) struct PairContext {
    pub seen: f64,
    pub bias: f64,
}

impl PairContext {
    /// One key is seen, and nothing is added.
    pub const NONE: Self = Self { seen: 1.0, bias: 0.0 };
}

impl<'a> Affinity<'a> {
    pub fn of(head: &Head, score: &'a Score) -> Self {
        let (d, heads) = (head.q.cols, head.heads);
        let of = |parameter| head.given(parameter).unwrap_or(score.value(parameter, d, heads));
        Self {
            score,
            parameters: score.parameters(),
            scale: of(Parameter::Scale),
            offset: of(Parameter::Offset),
            alpha: of(Parameter::Alpha),
            kappa: of(Parameter::Kappa),
            lambda: of(Parameter::Lambda),
            dim: score.as_fna().resolve(d, heads).intrinsic_dim,
        }
    }

    pub fn scale(&self) -> f64 {
        self.scale
    }

    pub fn is_log(&self) -> bool {
        self.score.is_log()
    }

    /// The affinity itself.
    pub fn affinity(&self, x: &[f64], y: &[f64]) -> f64 {
        let value = self.value(x, y, PairContext::NONE);
        if self.is_log() { value.exp() } else { value }
    }

    /// The logarithm of the affinity, or of a linear score the affinity.
    pub fn value(&self, x: &[f64], y: &[f64], at: PairContext) -> f64 {
        let t = self.term(x, y);
        let z = self.scale * t + at.bias;
        let value = match self.score {
            Score::DotExp(m) => m.softcap.map_or(self.scale * t, |cap| cap * (self.scale * t / cap).tanh()),
            Score::CosineExp(_) => self.scale * t,
            Score::DotRelu(_) => return Activation::Relu.value(z),
            Score::DotAbs(_) => return Activation::Abs.value(z),
            Score::DotGelu(_) => return Activation::Gelu.value(z),
            Score::DotSquaredRelu(_) => return z.max(0.0).powi(2),
            Score::DotSigmoid(_) => return sigmoid(z + self.offset_of(at.seen)),
            Score::Gaussian(_) => -self.scale * t,
            Score::Levy(m) if m.alpha == 2.0 => -(t / self.kappa).powi(2),
            Score::Levy(_) => -self.power() * (t / self.kappa).ln_1p(),
            Score::Student(_) => -0.5 * self.power() * (t / self.kappa).powi(2).ln_1p(),
            Score::Laplacian(_) => -t / self.lambda,
            Score::Constant(_) | Score::Custom(_) => 0.0,
        };
        value + at.bias
    }

    /// Adds the gradients of `e` times the value; `dparameters` in the order of [`Affinity::parameters`]. Returns that of the bias.
    pub fn backward(
        &self,
        e: f64,
        [x, y]: [&[f64]; 2],
        at: PairContext,
        [dx, dy]: [&mut [f64]; 2],
        dparameters: &mut [f64],
    ) -> f64 {
        let slopes = self.slopes(self.term(x, y), at);
        dparameters.iter_mut().zip(slopes.parameters).for_each(|(sum, slope)| *sum += e * slope);
        self.pull_back(e * slopes.term, x, y, dx, dy);
        e * slopes.bias
    }

    fn power(&self) -> f64 {
        self.dim + self.alpha
    }

    fn offset_of(&self, seen: f64) -> f64 {
        match self.score {
            Score::DotSigmoid(m) if m.offset.is_none() => -seen.max(1.0).ln(),
            _ => self.offset,
        }
    }

    fn slopes(&self, t: f64, at: PairContext) -> Slopes {
        let one = |term: f64, parameter: f64| Slopes { term, parameters: [parameter, 0.0], bias: 1.0 };
        let z = self.scale * t + if self.is_log() { 0.0 } else { at.bias };
        let activated = |slope: f64| {
            let bias = if self.is_log() { 1.0 } else { slope };
            Slopes { bias, ..one(self.scale * slope, t * slope) }
        };
        match self.score {
            Score::DotExp(m) => activated(m.softcap.map_or(1.0, |cap| 1.0 - (z / cap).tanh().powi(2))),
            Score::CosineExp(_) => activated(1.0),
            Score::DotRelu(_) => activated(Activation::Relu.derivative(z)),
            Score::DotAbs(_) => activated(Activation::Abs.derivative(z)),
            Score::DotGelu(_) => activated(Activation::Gelu.derivative(z)),
            Score::DotSquaredRelu(_) => activated(2.0 * z.max(0.0)),
            Score::DotSigmoid(_) => {
                let g = sigmoid(z + self.offset_of(at.seen));
                let slope = g * (1.0 - g);
                Slopes { term: self.scale * slope, parameters: [t * slope, slope], bias: slope }
            }
            Score::Gaussian(_) => one(-self.scale, -t),
            Score::Levy(m) if m.alpha == 2.0 => {
                one(-2.0 * t / self.kappa.powi(2), 2.0 * t.powi(2) / self.kappa.powi(3))
            }
            Score::Levy(_) => {
                let slope = -self.power() / (self.kappa + t);
                Slopes { parameters: [-(t / self.kappa).ln_1p(), -slope * t / self.kappa], ..one(slope, 0.0) }
            }
            Score::Student(_) => {
                let slope = -self.power() * t / (self.kappa.powi(2) + t * t);
                let log = -0.5 * (t / self.kappa).powi(2).ln_1p();
                Slopes { parameters: [log, -slope * t / self.kappa], ..one(slope, 0.0) }
            }
            Score::Laplacian(_) => one(-1.0 / self.lambda, t / self.lambda.powi(2)),
            Score::Constant(_) | Score::Custom(_) => one(0.0, 0.0),
        }
    }

    /// Whether the term is of rows at length one.
    fn on_sphere(&self) -> bool {
        matches!(self.score, Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Sphere)
    }

    /// The product, the cosine, the distance, its square, or the sum of absolute differences.
    fn term(&self, x: &[f64], y: &[f64]) -> f64 {
        let squares =
            |x: &[f64], y: &[f64], sign: f64| -> f64 { x.iter().zip(y).map(|(x, y)| (x + sign * y).powi(2)).sum() };
        match self.score {
            Score::Gaussian(_) => squares(x, y, -1.0),
            Score::Levy(_) | Score::Student(_) if self.on_sphere() => {
                let (u, w) = (unit(x), unit(y));
                if norm(&u) == 0.0 || norm(&w) == 0.0 {
                    return FRAC_PI_2;
                }
                2.0 * squares(&u, &w, -1.0).sqrt().atan2(squares(&u, &w, 1.0).sqrt())
            }
            Score::Levy(_) | Score::Student(_) => squares(x, y, -1.0).sqrt(),
            Score::Laplacian(_) => x.iter().zip(y).map(|(x, y)| (x - y).abs()).sum(),
            Score::CosineExp(_) => inner(&unit(x), &unit(y)),
            _ => inner(x, y),
        }
    }

    /// Adds the gradients of `g` times the term; 0 where the term has a kink.
    fn pull_back(&self, g: f64, x: &[f64], y: &[f64], dx: &mut [f64], dy: &mut [f64]) {
        match self.score {
            Score::Gaussian(_) => add(dx, dy, |c| (2.0 * g * (x[c] - y[c]), -2.0 * g * (x[c] - y[c]))),
            Score::Laplacian(_) => add(dx, dy, |c| {
                let t = x[c] - y[c];
                let sign = if t == 0.0 { 0.0 } else { t.signum() };
                (g * sign, -g * sign)
            }),
            Score::Levy(_) | Score::Student(_) if !self.on_sphere() => {
                let g = ratio(g, self.term(x, y));
                add(dx, dy, |c| (g * (x[c] - y[c]), -g * (x[c] - y[c])));
            }
            Score::Levy(_) | Score::Student(_) => {
                let r = self.term(x, y);
                let inside = r > 0.0 && r < PI && r.sin() > 1e-14;
                let g = if inside { -g / r.sin() } else { 0.0 };
                let (a, b) = (through_unit(x, &unit(y)), through_unit(y, &unit(x)));
                add(dx, dy, |c| (g * a[c], g * b[c]));
            }
            Score::CosineExp(_) => {
                let (a, b) = (through_unit(x, &unit(y)), through_unit(y, &unit(x)));
                add(dx, dy, |c| (g * a[c], g * b[c]));
            }
            _ => add(dx, dy, |c| (g * y[c], g * x[c])),
        }
    }
}

/// Adds to every channel of two rows.
fn add(dx: &mut [f64], dy: &mut [f64], of: impl Fn(usize) -> (f64, f64)) {
    for c in 0..dx.len() {
        let (a, b) = of(c);
        dx[c] += a;
        dy[c] += b;
    }
}

fn sigmoid(z: f64) -> f64 {
    if z < 0.0 { z.exp() / (1.0 + z.exp()) } else { 1.0 / (1.0 + (-z).exp()) }
}

fn norm(x: &[f64]) -> f64 {
    inner(x, x).sqrt()
}

/// The row at length one.
fn unit(x: &[f64]) -> Vec<f64> {
    let length = norm(x);
    x.iter().map(|x| if length > NO_LENGTH { x / length } else { 0.0 }).collect()
}

/// `(du - <du, u> u) / |x|`; 0 for a row without length.
fn through_unit(x: &[f64], du: &[f64]) -> Vec<f64> {
    let (length, u) = (norm(x), unit(x));
    let along = inner(du, &u);
    du.iter().zip(&u).map(|(du, u)| if length > NO_LENGTH { (du - along * u) / length } else { 0.0 }).collect()
}

impl Activation {
    /// `phi(x)` in f64.
    pub(in super::super) fn value(self, x: f64) -> f64 {
        match self {
            Self::Relu => x.max(0.0),
            Self::Abs => x.abs(),
            Self::Gelu => x * normal_cdf(x),
        }
    }

    /// `phi'(x)` in f64; 0 at a kink.
    pub(in super::super) fn derivative(self, x: f64) -> f64 {
        match self {
            Self::Relu => f64::from(u8::from(x > 0.0)),
            Self::Abs if x == 0.0 => 0.0,
            Self::Abs => x.signum(),
            Self::Gelu => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        }
    }
}

/// The standard normal distribution function.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}
