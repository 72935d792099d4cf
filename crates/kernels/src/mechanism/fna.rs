//! Parameters of fractional neural attention. Equations are those of "Fractional neural attention for efficient
//! multiscale sequence processing".

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

use super::{Mechanism, Score, presets::is_false};
use crate::{Extras, Parameter};

/// Where the tokens of [`Fna`] live, and so what their distance is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Manifold {
    /// The plane: `|q - k|`.
    #[default]
    Euclidean,
    /// The unit sphere: the angle between `q` and `k`, in `[0, pi]`; `pi / 2` where either is no longer than 1e-12.
    Sphere,
}

/// How the affinity of [`Fna`] falls with the distance `r`; `p = d_M + alpha`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DistanceKernel {
    /// `(1 + r / kappa)^-p`, and at `alpha = 2` the Gaussian `exp(-(r / kappa)^2)`. Eq. 9, 10 and 13.
    #[default]
    Levy,
    /// `(1 + (r / kappa)^2)^(-p / 2)`: the same tail without the kink at `r = 0`. Not in the paper.
    Student,
}

/// The length scale of [`Fna`]: a number, or a rule that knows the head's width. JSON: a number, `"text"`, `"vision"` or
/// `"sphere"`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number > 0, \"text\", \"vision\" or \"sphere\"")]
pub enum Kappa {
    /// A number in [1e-30, 1e30].
    Value(f64),
    /// A rule.
    Rule(KappaRule),
}

/// Rules for [`Kappa`], from the width `d` of a head and the intrinsic dimension `d_M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KappaRule {
    /// `sqrt(d) / (2^(1/d) - 1)`; `sqrt(d)` at `alpha = 2`. On the plane.
    Text,
    /// `d`; `sqrt(d)` at `alpha = 2`. On the plane.
    Vision,
    /// `pi / (pi^(1/d_M) - 1)`; 1 at `alpha = 2`. On the sphere.
    Sphere,
}

/// Fractional neural attention: a power law of the distance, rows normalised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Fna {
    /// Order of the diffusion. Default 1.2, in [1, 2]; with the `levy` kernel exactly 2 selects the Gaussian. Eq. 9, 10
    /// and 13.
    pub alpha: f64,
    /// Length scale. Default null = `"text"` on the plane and `"sphere"` on the sphere; a rule or a number in
    /// [1e-30, 1e30]. Eq. 13 and A.1.
    pub kappa: Option<Kappa>,
    /// Default euclidean. A.1 for the sphere.
    pub manifold: Manifold,
    /// `d_M`. Default null = `head_dim`, and on the sphere with a single head `head_dim - 1`; in
    /// [0.001, 10000]. Eq. 14, A.1.
    pub intrinsic_dim: Option<f64>,
    /// The keys are the queries. Default false. Assumption 2.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// `a` in `D^-a C D^-a`, which divides the density of the tokens out of the affinities `C` before the rows are
    /// normalised. Default 0, in [-100, 100]; anything else needs as many queries as keys. Eq. 40 to 42.
    pub norm_exponent: f64,
    /// Query `i` sees keys `j <= i + seq_kv - seq_q`. Default false.
    pub causal: bool,
    /// Default levy.
    pub kernel: DistanceKernel,
}

impl Default for Fna {
    fn default() -> Self {
        Self {
            alpha: 1.2,
            kappa: None,
            manifold: Manifold::Euclidean,
            intrinsic_dim: None,
            tied: false,
            norm_exponent: 0.0,
            causal: false,
            kernel: DistanceKernel::Levy,
        }
    }
}

/// What the rules and defaults of [`Fna`] come to for one width and number of heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resolved {
    /// The length scale.
    pub kappa: f64,
    /// `d_M`.
    pub intrinsic_dim: f64,
}

impl Fna {
    /// Whether the affinity is the Gaussian.
    pub const fn is_gaussian(&self) -> bool {
        matches!(self.kernel, DistanceKernel::Levy) && self.alpha == 2.0
    }

    /// The length scale and the intrinsic dimension for `heads` heads of `head_dim` channels.
    pub fn resolve(&self, head_dim: usize, heads: usize) -> Resolved {
        let (width, sphere) = (head_dim as f64, self.manifold == Manifold::Sphere);
        let own = if sphere && heads == 1 { width - 1.0 } else { width };
        let dim = self.intrinsic_dim.unwrap_or(own);
        let rule = if sphere { KappaRule::Sphere } else { KappaRule::Text };
        // b^(1/d) - 1, without the cancellation.
        let root = |base: f64, dim: f64| (base.ln() / dim).exp_m1();
        let kappa = match self.kappa.unwrap_or(Kappa::Rule(rule)) {
            Kappa::Value(kappa) => kappa,
            Kappa::Rule(KappaRule::Sphere) if self.alpha == 2.0 => 1.0,
            Kappa::Rule(KappaRule::Sphere) => std::f64::consts::PI / root(std::f64::consts::PI, dim),
            Kappa::Rule(_) if self.alpha == 2.0 => width.sqrt(),
            Kappa::Rule(KappaRule::Text) => width.sqrt() / root(2.0, width),
            Kappa::Rule(KappaRule::Vision) => width,
        };
        Resolved { kappa, intrinsic_dim: dim }
    }

    /// The length scale and the exponent `d_M + alpha` of head `h`, as the call or the configuration has them.
    pub(crate) fn of_head(&self, extras: &Extras<'_>, head_dim: usize, heads: usize, h: usize) -> [f64; 2] {
        let given = |parameter: Parameter| extras.get(parameter).map(|values| f64::from(values[h]));
        let Resolved { kappa, intrinsic_dim } = self.resolve(head_dim, heads);
        [given(Parameter::Kappa).unwrap_or(kappa), intrinsic_dim + given(Parameter::Alpha).unwrap_or(self.alpha)]
    }
}

/// The length scale of whatever mechanism measures distances by one.
impl Mechanism {
    /// The length scale as it is configured (`None`: by the manifold's rule) and the manifold, where the score is a power law of the
    /// distance.
    pub const fn length_scale_mut(&mut self) -> Option<(&mut Option<Kappa>, Manifold)> {
        match &mut self.score {
            Score::Levy(m) | Score::Student(m) => Some((&mut m.kappa, m.manifold)),
            _ => None,
        }
    }

    /// The mechanism of one head by itself, which is what it is among `heads` heads of `head_dim` channels: rules of length scales know
    /// how many heads there are.
    #[must_use]
    pub fn of_one_head(mut self, head_dim: usize, heads: usize) -> Self {
        let Resolved { kappa, intrinsic_dim } = self.score.as_fna().resolve(head_dim, heads);
        if let Score::Levy(m) | Score::Student(m) = &mut self.score {
            (m.kappa, m.intrinsic_dim) = (Some(Kappa::Value(kappa)), Some(intrinsic_dim));
        }
        self
    }
}
