//! The range of every field, and what each mechanism is defined for.

use super::{Fna, Form, Kappa, KappaRule, Manifold, Mechanism, NormBias, Score, Series};
use crate::{Dropout, Error, Parameter, Result, Shape};

impl Mechanism {
    /// Whether the mechanism is valid, and defined for these sizes and for causality (OR-ed with its own).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a field, [`Error::Unsupported`] for the combination.
    pub fn check(&self, shape: &Shape, causal: bool) -> Result<()> {
        self.validate()?;
        check_support(self, shape, causal || self.causal)
    }

    /// Checks values that replace a configured one, as those of [`crate::Extras`] do.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn check_parameter(&self, parameter: Parameter, values: &[f32]) -> Result<()> {
        if let (Parameter::Bias, Some(bias)) = (parameter, self.bias) {
            return bias.check_values(values);
        }
        let one_allowed = !matches!(self.series, Series::Resolvent(_));
        values.iter().try_for_each(|&x| match parameter {
            Parameter::Gamma => check_gamma(x.into(), one_allowed),
            // An order of 2 of the Levy kernel is where it jumps to the Gaussian.
            Parameter::Alpha => check_alpha(x.into(), !matches!(self.score, Score::Levy(_))),
            Parameter::Kappa => check_kappa(x.into()),
            Parameter::Scale => self.check_scale(x.into()),
            Parameter::Lambda => check_lambda(x.into()),
            // What landmarks and values are filtered by; the landmarks themselves are judged as tokens.
            Parameter::GivenLandmarks => Ok(()),
            _ => check(parameter.name(), x, x.is_nan() || x.abs() <= 1e6, "at most 1e6 in magnitude"),
        })
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first field outside its range.
    pub fn validate(&self) -> Result<()> {
        self.form().validate()
    }
}

impl Form {
    /// [`Mechanism::validate`].
    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::Softmax(m) => check_scale(m.scale),
            Self::Uniform(_) => Ok(()),
            Self::Infsa(m) => check_affinity(m.gamma, true, m.scale, m.eps),
            Self::InfsaResolvent(m) => {
                check_affinity(m.gamma, false, m.scale, m.eps)?;
                check_solver(m.tol, m.max_iter)
            }
            Self::LinearInfsa(m) => {
                check_affinity(m.gamma, true, m.scale, m.eps)?;
                check("iterations", m.iterations, (1..=64).contains(&m.iterations), "1 to 64")?;
                let bias = if let NormBias::Value(x) = m.norm_bias { x } else { 0.0 };
                let fits = bias == 0.0 || (1e-12..=1e3).contains(&bias);
                check("norm_bias", bias, fits, "0, in [1e-12, 1e3] or \"auto\"")
            }
            Self::Ssa(m) => {
                check("route_by", "query", !m.routes_queries(), "cluster; the mechanism `routed` routes by query")?;
                m.validate()
            }
            Self::Fna(m) => check_fna(m),
            Self::Soft(m) => m.validate(false),
            Self::SoftPp(m) => m.validate(true),
            Self::Laplacian(m) => m.validate(),
            Self::LaplacianExact(m) => m.validate(),
            Self::Composed(m) => m.check_values(),
        }
    }
}

impl Dropout {
    /// Whether `mechanism` has weights of single pairs whose rows sum to one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it has not.
    pub fn check(&self, mechanism: &Mechanism) -> Result<()> {
        let why = match mechanism.own() {
            Some(Form::Softmax(_)) => return Ok(()),
            Some(Form::Fna(m)) if m.norm_exponent == 0.0 => return Ok(()),
            Some(Form::Fna(_)) => "the density of a key is a sum over all pairs; set norm_exponent to 0",
            _ => "it is for operators that weigh pair by pair in rows that sum to one: softmax and fna",
        };
        Err(Error::Unsupported { mechanism: mechanism.id(), what: "dropout", why })
    }
}

/// The largest decay of a series.
const MOST_DECAY: f64 = 0.99999;
/// The most iterations of a solver.
const MAX_ITER: usize = 1_000_000;

pub(super) fn check(field: &'static str, got: impl std::fmt::Display, ok: bool, expected: &'static str) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::OutOfRange { field, got: got.to_string(), expected }) }
}

/// Beyond these, products with tokens of any size that a call may have leave f32.
pub(super) fn check_scale(scale: Option<f64>) -> Result<()> {
    let x = scale.unwrap_or(1.0);
    check("scale", x, (1e-18..=1e18).contains(&x), "null or in [1e-18, 1e18]")
}

pub(super) fn check_lambda(lambda: f64) -> Result<()> {
    check("lambda", lambda, (1e-18..=1e18).contains(&lambda), "in [1e-18, 1e18]")
}

/// `gamma` up to 1, or, where the series of hops has to converge and what rounding leaves grows with `1 / (1 - gamma)`, below.
pub(super) fn check_gamma(gamma: f64, one_allowed: bool) -> Result<()> {
    let (most, expected) = if one_allowed { (1.0, "in [1e-12, 1]") } else { (MOST_DECAY, "in [1e-12, 0.99999]") };
    check("gamma", gamma, (1e-12..=most).contains(&gamma), expected)
}

fn check_affinity(gamma: f64, one_allowed: bool, scale: Option<f64>, eps: f64) -> Result<()> {
    check_gamma(gamma, one_allowed)?;
    check_scale(scale)?;
    check_eps(eps)
}

pub(super) fn check_eps(eps: f64) -> Result<()> {
    check("eps", eps, eps == 0.0 || (1e-30..=1e30).contains(&eps), "0 or in [1e-30, 1e30]")
}

/// When a solver ends.
pub(super) fn check_solver(tol: f64, max_iter: Option<usize>) -> Result<()> {
    check("tol", tol, tol > 0.0 && tol < 1.0, "in (0, 1)")?;
    let limit = max_iter.unwrap_or(1);
    check("max_iter", limit, (1..=MAX_ITER).contains(&limit), "null or 1 to 1000000")
}

/// What is added to a diagonal or to a variance, of which more would drown it and less is lost in rounding.
pub(super) fn check_added(field: &'static str, got: f64, ok_at_zero: bool) -> Result<()> {
    let expected = if ok_at_zero { "0 or in [1e-12, 1e12]" } else { "in [1e-12, 1e12] unless whitening is none" };
    check(field, got, ok_at_zero && got == 0.0 || (1e-12..=1e12).contains(&got), expected)
}

/// `alpha` within [1, 2], or [1, 2) where it varies per head: at 2 the Levy kernel jumps to the Gaussian.
pub(super) fn check_alpha(alpha: f64, two_allowed: bool) -> Result<()> {
    let expected = if two_allowed { "in [1, 2]" } else { "in [1, 2); set the field to 2 for the Gaussian" };
    check("alpha", alpha, (1.0..2.0).contains(&alpha) || two_allowed && alpha == 2.0, expected)
}

pub(super) fn check_kappa(kappa: f64) -> Result<()> {
    check("kappa", kappa, (1e-30..=1e30).contains(&kappa), "in [1e-30, 1e30], or a rule")
}

fn check_fna(m: &Fna) -> Result<()> {
    check_alpha(m.alpha, true)?;
    check_kappa_rule(m.kappa, m.manifold)?;
    check_intrinsic_dim(m.intrinsic_dim)?;
    check("norm_exponent", m.norm_exponent, m.norm_exponent.abs() <= 100.0, "in [-100, 100]")
}

/// A length scale, and whether its rule is for the manifold.
pub(super) fn check_kappa_rule(kappa: Option<Kappa>, manifold: Manifold) -> Result<()> {
    match (kappa, manifold) {
        (Some(Kappa::Value(kappa)), _) => check_kappa(kappa),
        (Some(Kappa::Rule(rule)), manifold) => {
            let expected = match manifold {
                Manifold::Euclidean => "text, vision or a number on the euclidean manifold",
                Manifold::Sphere => "sphere or a number on the sphere",
            };
            let fits = (rule == KappaRule::Sphere) == (manifold == Manifold::Sphere);
            check("kappa", format!("{rule:?}").to_lowercase(), fits, expected)
        }
        (None, _) => Ok(()),
    }
}

pub(super) fn check_intrinsic_dim(dim: Option<f64>) -> Result<()> {
    let dim = dim.unwrap_or(1.0);
    check("intrinsic_dim", dim, (1e-3..=1e4).contains(&dim), "null or in [0.001, 10000]")
}

/// Whether `mechanism` is defined for these sizes and for causality.
fn check_support(mechanism: &Mechanism, shape: &Shape, causal: bool) -> Result<()> {
    let Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim } = *shape;
    let axes = [batch, heads, seq_q, seq_kv, head_dim, value_dim];
    let unsupported = |what, why| Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
    if axes.contains(&0) {
        return unsupported("an empty axis", "batch, heads, sequence lengths and channels must all be at least 1");
    }
    shape.check()?;
    let cross = seq_q != seq_kv;
    if cross && mechanism.tied {
        return unsupported(
            "tied = true with seq_q != seq_kv",
            "tied keys are the queries; pass k and set tied to false",
        );
    }
    match mechanism.form() {
        Form::Soft(m) | Form::SoftPp(m) => m.check_support(mechanism.id(), shape, causal),
        Form::Laplacian(m) => m.check_support(shape, causal),
        Form::LaplacianExact(m) => m.check_support(shape, causal),
        Form::Infsa(_) if causal && cross => {
            unsupported("causal with seq_q != seq_kv", "the prefix norm needs every earlier row; decode with a `Cache`")
        }
        Form::InfsaResolvent(_) if causal => unsupported(
            "causal",
            "the Frobenius norm and the series are global; use `infsa` with causal, which has a prefix norm",
        ),
        Form::InfsaResolvent(_) if cross => {
            unsupported("cross-attention", "the series repeats a square operator; use `infsa`, which takes one hop")
        }
        Form::LinearInfsa(_) if causal => unsupported(
            "causal",
            "every position would need the pooled query and all scores anew; use `infsa` with causal",
        ),
        Form::LinearInfsa(m) if cross && m.iterations > 1 => unsupported(
            "cross-attention with iterations > 1",
            "a further power step needs queries and keys over one token set; set iterations to 1",
        ),
        Form::Ssa(m) => m.check_support(shape, causal),
        Form::Composed(m) => m.check_values_at(shape, causal),
        Form::Fna(m) if m.manifold == Manifold::Sphere && head_dim < 2 => {
            unsupported("the sphere with head_dim < 2", "two points are no sphere; use more channels or the plane")
        }
        Form::Fna(m) if m.norm_exponent != 0.0 && cross => unsupported(
            "norm_exponent != 0 with seq_q != seq_kv",
            "it divides by the degrees of the keys as queries; set norm_exponent to 0",
        ),
        Form::Fna(_) if causal && seq_q > seq_kv => {
            unsupported("causal with seq_q > seq_kv", "the first queries would see no key; pass only the last seq_kv")
        }
        // What a rule makes of the sizes.
        Form::Fna(m) => check_kappa(m.resolve(head_dim, heads).kappa),
        _ => Ok(()),
    }
}
