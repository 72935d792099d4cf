//! The normalisation: what makes affinities weights. The third of the four values of a mechanism.

use derive_setters::Setters;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    Centering, Degree, LaplacianExact, WeightScale, Whitening,
    parse::{fields_of, kind_of, unknown_kind},
    valid::{check, check_eps},
};
use crate::Result;

/// What makes weights `W` of affinities `G`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Normalisation {
    /// `g_ij / sum_j |g_ij|`.
    Row(Row),
    /// `G / (|G|_F + eps)`; causal: by the norm of the rows so far.
    Frobenius(Frobenius),
    /// `R^-1/2 G C^-1/2` with row and column sums, or with the degrees of landmarks.
    Symmetric(Symmetric),
    /// Centred, divided by deviations, scaled and shifted. "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel",
    /// eq. 4 to 6.
    Whitened(Whitened),
    /// Through landmarks of the queries and of the keys, each of the three factors by its rows: `F A^+ B` with the rows of `F`
    /// (queries to landmarks), `A` (landmarks to landmarks) and `B` (landmarks to keys) divided by their sums, and the
    /// pseudo-inverse of `A` as Newton-Schulz finds it. "Nyströmformer: A Nyström-Based Algorithm for Approximating
    /// Self-Attention", eq. 13.
    Factors(Factors),
    /// `factor G`.
    None(Unnormalised),
}

/// Fields of [`Normalisation::Factors`]: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Factors {}

/// Fields of [`Normalisation::Row`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Row {
    /// `a`: affinities are first divided by `(n_i n_j)^a`, `n` the sums of the rows. Default 0, in [-100, 100]; anything else
    /// needs as many queries as keys. "Fractional neural attention for efficient multiscale sequence processing", eq. 40 to 42.
    pub density_exponent: f64,
}

/// Fields of [`Normalisation::Frobenius`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Frobenius {
    /// Added to the norm. Default 1e-6; 0 or in [1e-30, 1e30].
    pub eps: f64,
}

impl Default for Frobenius {
    fn default() -> Self {
        Self { eps: 1e-6 }
    }
}

/// Fields of [`Normalisation::Symmetric`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Symmetric {
    /// Whose degrees divide. Default null = those of landmarks where there are any, else of tokens.
    pub degree: Option<Degree>,
}

/// Fields of [`Normalisation::Whitened`], as [`LaplacianExact`] has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Whitened {
    /// Default per-key.
    pub centering: Centering,
    /// Default diagonal.
    pub whitening: Whitening,
    /// Added to variances. Default 1e-5.
    pub whiten_eps: f64,
    /// Default unit.
    pub weight_scale: WeightScale,
    /// Adds `1 / n`, `n` the keys that a query sees. Default true.
    pub bias_one_over_n: bool,
}

impl Default for Whitened {
    fn default() -> Self {
        Self::from(LaplacianExact::default())
    }
}

impl From<LaplacianExact> for Whitened {
    fn from(m: LaplacianExact) -> Self {
        let LaplacianExact { centering, whitening, whiten_eps, weight_scale, bias_one_over_n, .. } = m;
        Self { centering, whitening, whiten_eps, weight_scale, bias_one_over_n }
    }
}

impl Whitened {
    /// The same fields of [`LaplacianExact`].
    pub(crate) fn exact(&self) -> LaplacianExact {
        let Self { centering, whitening, whiten_eps, weight_scale, bias_one_over_n } = *self;
        LaplacianExact { centering, whitening, whiten_eps, weight_scale, bias_one_over_n, ..LaplacianExact::default() }
    }
}

/// Fields of [`Normalisation::None`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Unnormalised {
    /// Default unit.
    pub factor: Factor,
}

/// What multiplies affinities that are not normalised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Factor {
    /// 1.
    #[default]
    Unit,
    /// `1 / n`, `n` the keys that the query sees.
    InvN,
}

impl Default for Normalisation {
    fn default() -> Self {
        Self::Row(Row::default())
    }
}

impl Normalisation {
    /// Every kind, in the order of the tables.
    pub const KINDS: [&'static str; 6] = ["row", "frobenius", "symmetric", "whitened", "factors", "none"];

    /// The kind, as in the JSON configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Row(_) => "row",
            Self::Frobenius(_) => "frobenius",
            Self::Symmetric(_) => "symmetric",
            Self::Whitened(_) => "whitened",
            Self::Factors(_) => "factors",
            Self::None(_) => "none",
        }
    }

    /// Reads `{"kind": "<kind>", ...fields}`.
    pub(super) fn from_fields(mut fields: Map<String, Value>) -> Result<Self> {
        const PART: &str = "normalisation";
        Ok(match &*kind_of(PART, &mut fields)? {
            "row" => Self::Row(fields_of(PART, fields)?),
            "frobenius" => Self::Frobenius(fields_of(PART, fields)?),
            "symmetric" => Self::Symmetric(fields_of(PART, fields)?),
            "whitened" => Self::Whitened(fields_of(PART, fields)?),
            "factors" => Self::Factors(fields_of(PART, fields)?),
            "none" => Self::None(fields_of(PART, fields)?),
            other => return Err(unknown_kind(PART, other, &Self::KINDS)),
        })
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::Row(m) => {
                let a = m.density_exponent;
                check("normalisation.density_exponent", a, a.abs() <= 100.0, "in [-100, 100]")
            }
            Self::Frobenius(m) => check_eps(m.eps),
            Self::Whitened(m) => m.exact().validate(),
            Self::Symmetric(_) | Self::Factors(_) | Self::None(_) => Ok(()),
        }
    }
}
