//! The score: how two tokens relate. The first of the four values of a mechanism.

use std::sync::Arc;

use derive_setters::Setters;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    Activation, Fna, Kappa, Manifold,
    fna::DistanceKernel,
    parse::{fields_of, kind_of, unknown_kind},
    valid::{check, check_alpha, check_intrinsic_dim, check_kappa_rule, check_lambda, check_scale},
};
use crate::{
    Parameter, Result,
    score::{contract::PairScore, tiles::TileScore},
};

/// How two tokens relate: the affinity `g` of a pair. Log scores have `g = exp(l)`; linear scores are `phi(x)`, of any sign.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Score {
    /// `exp(scale q.k)`, or `exp(c tanh(scale q.k / c))` with a softcap `c`.
    DotExp(DotExp),
    /// `exp(scale qn.kn)` of rows at length one; a row shorter than 1e-12 is zero.
    CosineExp(CosineExp),
    /// `max(0, scale q.k)`.
    DotRelu(Dot),
    /// `|scale q.k|`.
    DotAbs(Dot),
    /// `gelu(scale q.k)`, exact.
    DotGelu(Dot),
    /// `max(0, scale q.k)^2`.
    DotSquaredRelu(Dot),
    /// `1 / (1 + exp(-(scale q.k + offset)))`.
    DotSigmoid(DotSigmoid),
    /// `exp(-scale |q - k|^2)`.
    Gaussian(Gaussian),
    /// `(1 + r / kappa)^-p` with `p = d_M + alpha`, and `exp(-(r / kappa)^2)` at `alpha = 2`. "Fractional neural attention for
    /// efficient multiscale sequence processing", eq. 9, 10 and 13.
    Levy(PowerLaw),
    /// `(1 + (r / kappa)^2)^(-p / 2)`.
    Student(PowerLaw),
    /// `exp(-|q - k|_1 / lambda)`. "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", eq. 3.
    Laplacian(Bandwidth),
    /// 1 for every pair.
    Constant(Constant),
    /// A score from outside; see [`Score::custom`].
    Custom(Custom),
}

/// A [`PairScore`] from outside, by name. It has no JSON, and the f64 reference does not know it.
#[derive(Clone, Serialize)]
pub struct Custom {
    name: &'static str,
    #[serde(skip)]
    score: Arc<dyn TileScore>,
}

impl Custom {
    pub(crate) fn tiles(&self) -> Arc<dyn TileScore> {
        self.score.clone()
    }

    /// The name that it was given.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl std::fmt::Debug for Custom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Custom({})", self.name)
    }
}

impl PartialEq for Custom {
    /// The same score, not one that computes the same.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.score, &other.score)
    }
}

/// Fields of [`Score::DotExp`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct DotExp {
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Bound on the logit. Default null = none; in [1e-3, 1e6].
    pub softcap: Option<f64>,
}

/// Fields of [`Score::CosineExp`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct CosineExp {
    /// Multiplies the cosine. Default 10; in [1e-18, 1e4].
    pub scale: f64,
}

impl Default for CosineExp {
    fn default() -> Self {
        Self { scale: 10.0 }
    }
}

/// Fields of the scores that are a function of `scale q.k`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Dot {
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
}

/// Fields of [`Score::DotSigmoid`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct DotSigmoid {
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Added to the logit. Default null = `-ln n`, `n` the keys that the query sees; at most 1e6 in magnitude.
    pub offset: Option<f64>,
}

/// Fields of [`Score::Gaussian`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Gaussian {
    /// Multiplies `|q - k|^2`. Default null = `0.5 head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
}

/// Fields of [`Score::Levy`] and [`Score::Student`], as [`Fna`] has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct PowerLaw {
    /// Order of the diffusion. Default 1.2, in [1, 2]; exactly 2 makes [`Score::Levy`] the Gaussian.
    pub alpha: f64,
    /// Length scale. Default null = `"text"` on the plane and `"sphere"` on the sphere; a rule or a number in [1e-30, 1e30].
    pub kappa: Option<Kappa>,
    /// Default euclidean.
    pub manifold: Manifold,
    /// `d_M`. Default null = `head_dim`, and on the sphere with a single head `head_dim - 1`; in [0.001, 10000].
    pub intrinsic_dim: Option<f64>,
}

impl Default for PowerLaw {
    fn default() -> Self {
        let Fna { alpha, kappa, manifold, intrinsic_dim, .. } = Fna::default();
        Self { alpha, kappa, manifold, intrinsic_dim }
    }
}

/// Fields of [`Score::Laplacian`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Bandwidth {
    /// Divides the distance. Default 4; in [1e-18, 1e18].
    pub lambda: f64,
}

impl Default for Bandwidth {
    fn default() -> Self {
        Self { lambda: 4.0 }
    }
}

/// [`Score::Constant`] has no fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constant {}

impl Default for Score {
    fn default() -> Self {
        Self::DotExp(DotExp::default())
    }
}

/// Scores that are an activation of `scale q.k`.
impl From<(Activation, Option<f64>)> for Score {
    fn from((activation, scale): (Activation, Option<f64>)) -> Self {
        let dot = Dot { scale };
        match activation {
            Activation::Relu => Self::DotRelu(dot),
            Activation::Abs => Self::DotAbs(dot),
            Activation::Gelu => Self::DotGelu(dot),
        }
    }
}

impl Score {
    /// Every kind, in the order of the tables.
    pub const KINDS: [&'static str; 12] = [
        "dot-exp",
        "cosine-exp",
        "dot-relu",
        "dot-abs",
        "dot-gelu",
        "dot-squared-relu",
        "dot-sigmoid",
        "gaussian",
        "levy",
        "student",
        "laplacian",
        "constant",
    ];

    /// The kind, as in the JSON configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::DotExp(_) => "dot-exp",
            Self::CosineExp(_) => "cosine-exp",
            Self::DotRelu(_) => "dot-relu",
            Self::DotAbs(_) => "dot-abs",
            Self::DotGelu(_) => "dot-gelu",
            Self::DotSquaredRelu(_) => "dot-squared-relu",
            Self::DotSigmoid(_) => "dot-sigmoid",
            Self::Gaussian(_) => "gaussian",
            Self::Levy(_) => "levy",
            Self::Student(_) => "student",
            Self::Laplacian(_) => "laplacian",
            Self::Constant(_) => "constant",
            Self::Custom(_) => "custom",
        }
    }

    /// Reads `{"kind": "<kind>", ...fields}`.
    pub(super) fn from_fields(mut fields: Map<String, Value>) -> Result<Self> {
        const PART: &str = "score";
        Ok(match &*kind_of(PART, &mut fields)? {
            "dot-exp" => Self::DotExp(fields_of(PART, fields)?),
            "cosine-exp" => Self::CosineExp(fields_of(PART, fields)?),
            "dot-relu" => Self::DotRelu(fields_of(PART, fields)?),
            "dot-abs" => Self::DotAbs(fields_of(PART, fields)?),
            "dot-gelu" => Self::DotGelu(fields_of(PART, fields)?),
            "dot-squared-relu" => Self::DotSquaredRelu(fields_of(PART, fields)?),
            "dot-sigmoid" => Self::DotSigmoid(fields_of(PART, fields)?),
            "gaussian" => Self::Gaussian(fields_of(PART, fields)?),
            "levy" => Self::Levy(fields_of(PART, fields)?),
            "student" => Self::Student(fields_of(PART, fields)?),
            "laplacian" => Self::Laplacian(fields_of(PART, fields)?),
            "constant" => Self::Constant(fields_of(PART, fields)?),
            other => return Err(unknown_kind(PART, other, &Self::KINDS)),
        })
    }

    /// A score from outside, under a name for messages and reports.
    pub fn custom(name: &'static str, score: impl PairScore + 'static) -> Self {
        Self::Custom(Custom { name, score: Arc::new(score) })
    }

    /// Whether `g = exp(l)`: positive, and held by its logarithm.
    pub fn is_log(&self) -> bool {
        if let Self::Custom(custom) = self {
            return custom.score.is_log();
        }
        !matches!(
            self,
            Self::DotRelu(_) | Self::DotAbs(_) | Self::DotGelu(_) | Self::DotSquaredRelu(_) | Self::DotSigmoid(_)
        )
    }

    /// Whether no affinity is negative.
    pub fn is_non_negative(&self) -> bool {
        if let Self::Custom(custom) = self { custom.score.is_non_negative() } else { !matches!(self, Self::DotGelu(_)) }
    }

    /// Whether the affinities are those of a Gaussian of the distance, by whichever name.
    pub(crate) fn is_gaussian(&self) -> bool {
        match self {
            Self::Gaussian(_) => true,
            Self::Levy(m) => m.alpha == 2.0,
            _ => false,
        }
    }

    /// Whether the affinities among any tokens are a positive definite matrix, so that landmarks may stand for tokens.
    pub fn is_positive_definite(&self) -> bool {
        match self {
            Self::DotExp(m) => m.softcap.is_none(),
            Self::CosineExp(_) | Self::Gaussian(_) | Self::Laplacian(_) | Self::Constant(_) => true,
            Self::Custom(custom) => custom.score.is_positive_definite(),
            // A mixture of kernels of the plane that are positive definite; of angles it is not known.
            Self::Levy(m) | Self::Student(m) => m.manifold == Manifold::Euclidean,
            _ => false,
        }
    }

    /// Whether affinities have a bound that does not depend on the tokens.
    pub fn is_bounded(&self) -> bool {
        if let Self::Custom(custom) = self {
            return custom.score.is_positive_definite();
        }
        !matches!(
            self,
            Self::DotExp(DotExp { softcap: None, .. })
                | Self::DotRelu(_)
                | Self::DotAbs(_)
                | Self::DotGelu(_)
                | Self::DotSquaredRelu(_)
        )
    }

    /// The learnable tensors that the score has, one value per head each.
    pub fn parameters(&self) -> &'static [Parameter] {
        match self {
            Self::DotSigmoid(m) if m.offset.is_some() => &[Parameter::Scale, Parameter::Offset],
            Self::Levy(m) if m.alpha == 2.0 => &[Parameter::Kappa],
            Self::Levy(_) | Self::Student(_) => &[Parameter::Alpha, Parameter::Kappa],
            Self::Laplacian(_) => &[Parameter::Lambda],
            Self::Constant(_) | Self::Custom(_) => &[],
            _ => &[Parameter::Scale],
        }
    }

    /// The configured value of one of [`Score::parameters`], for `heads` heads of `head_dim` channels.
    pub fn value(&self, parameter: Parameter, head_dim: usize, heads: usize) -> f64 {
        let root = (head_dim as f64).sqrt();
        match (self, parameter) {
            (Self::DotExp(DotExp { scale, .. }) | Self::DotSigmoid(DotSigmoid { scale, .. }), Parameter::Scale)
            | (
                Self::DotRelu(Dot { scale })
                | Self::DotAbs(Dot { scale })
                | Self::DotGelu(Dot { scale })
                | Self::DotSquaredRelu(Dot { scale }),
                Parameter::Scale,
            ) => scale.unwrap_or((head_dim as f64).powf(-0.5)),
            (Self::CosineExp(m), Parameter::Scale) => m.scale,
            (Self::Gaussian(m), Parameter::Scale) => m.scale.unwrap_or(0.5 / root),
            (Self::DotSigmoid(m), Parameter::Offset) => m.offset.unwrap_or(0.0),
            (Self::Levy(m) | Self::Student(m), Parameter::Alpha) => m.alpha,
            (Self::Levy(_) | Self::Student(_), Parameter::Kappa) => self.as_fna().resolve(head_dim, heads).kappa,
            (Self::Laplacian(m), Parameter::Lambda) => m.lambda,
            _ => 0.0,
        }
    }

    /// The same power law as fields of [`Fna`], which knows the rules of its length scale. The default for other scores.
    pub(crate) fn as_fna(&self) -> Fna {
        let kernel = if let Self::Student(_) = self { DistanceKernel::Student } else { DistanceKernel::Levy };
        match self.clone() {
            Self::Levy(m) | Self::Student(m) => {
                let PowerLaw { alpha, kappa, manifold, intrinsic_dim } = m;
                Fna { alpha, kappa, manifold, intrinsic_dim, kernel, ..Fna::default() }
            }
            _ => Fna::default(),
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::DotExp(m) => {
                let cap = m.softcap.unwrap_or(1.0);
                check("score.softcap", cap, (1e-3..=1e6).contains(&cap), "null or in [0.001, 1e6]")?;
                check_scale(m.scale)
            }
            // Its range is of the structure too.
            Self::CosineExp(_) => Ok(()),
            Self::DotRelu(m) | Self::DotAbs(m) | Self::DotGelu(m) | Self::DotSquaredRelu(m) => check_scale(m.scale),
            Self::DotSigmoid(m) => {
                let offset = m.offset.unwrap_or(0.0);
                check("score.offset", offset, offset.abs() <= 1e6, "null or at most 1e6 in magnitude")?;
                check_scale(m.scale)
            }
            Self::Gaussian(m) => check_scale(m.scale),
            Self::Levy(m) | Self::Student(m) => {
                check_alpha(m.alpha, true)?;
                check_kappa_rule(m.kappa, m.manifold)?;
                check_intrinsic_dim(m.intrinsic_dim)
            }
            Self::Laplacian(m) => check_lambda(m.lambda),
            Self::Constant(_) | Self::Custom(_) => Ok(()),
        }
    }
}
