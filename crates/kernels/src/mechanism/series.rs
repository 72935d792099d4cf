//! The series: how many hops over the graph of tokens. The last of the four values of a mechanism.

use derive_setters::Setters;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    InfsaResolvent, LinearInfsa,
    parse::{fields_of, kind_of, unknown_kind},
    valid::{check, check_gamma, check_solver},
};
use crate::Result;

/// How many hops over the token graph one layer takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Series {
    /// `gamma W v`.
    OneHop(OneHop),
    /// `sum of gamma^t W^t v` for `t = 1..count`.
    Hops(Hops),
    /// All of them: `((I - gamma W)^-1 - I) v`. "Infinite Self-Attention", eq. 7, 10 and 15.
    Resolvent(Resolvent),
    /// The dominant direction that many hops tend to, of the pooled structure. "Infinite Self-Attention", eq. 16 to 19.
    Limit(Limit),
}

/// Fields of [`Series::OneHop`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct OneHop {
    /// The decay. Default 1; in [1e-12, 1].
    pub gamma: f64,
}

impl Default for OneHop {
    fn default() -> Self {
        Self { gamma: 1.0 }
    }
}

/// Fields of [`Series::Hops`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Hops {
    /// How many. Default 2; 1 to 64.
    pub count: usize,
    /// The decay of every hop. Default 1; in [1e-12, 1].
    pub gamma: f64,
}

impl Default for Hops {
    fn default() -> Self {
        Self { count: 2, gamma: 1.0 }
    }
}

/// Fields of [`Series::Resolvent`], as [`InfsaResolvent`] has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Resolvent {
    /// The decay of every hop. Default 0.7; in [1e-12, 0.99999].
    pub gamma: f64,
    /// Bound on the relative error at which the solver stops. Default 1e-6, in (0, 1).
    pub tol: f64,
    /// Most iterations. Default null: enough for `tol`.
    pub max_iter: Option<usize>,
}

impl Default for Resolvent {
    fn default() -> Self {
        let InfsaResolvent { gamma, tol, max_iter, .. } = InfsaResolvent::default();
        Self { gamma, tol, max_iter }
    }
}

/// Fields of [`Series::Limit`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Limit {
    /// The decay. Default 0.7; in [1e-12, 1].
    pub gamma: f64,
}

impl Default for Limit {
    fn default() -> Self {
        Self { gamma: LinearInfsa::default().gamma }
    }
}

impl Default for Series {
    fn default() -> Self {
        Self::OneHop(OneHop::default())
    }
}

impl Series {
    /// Every kind, in the order of the tables.
    pub const KINDS: [&'static str; 4] = ["one-hop", "hops", "resolvent", "limit"];

    /// The kind, as in the JSON configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::OneHop(_) => "one-hop",
            Self::Hops(_) => "hops",
            Self::Resolvent(_) => "resolvent",
            Self::Limit(_) => "limit",
        }
    }

    /// The decay.
    pub const fn gamma(&self) -> f64 {
        match self {
            Self::OneHop(OneHop { gamma })
            | Self::Hops(Hops { gamma, .. })
            | Self::Resolvent(Resolvent { gamma, .. })
            | Self::Limit(Limit { gamma }) => *gamma,
        }
    }

    pub(super) const fn gamma_mut(&mut self) -> &mut f64 {
        match self {
            Self::OneHop(OneHop { gamma })
            | Self::Hops(Hops { gamma, .. })
            | Self::Resolvent(Resolvent { gamma, .. })
            | Self::Limit(Limit { gamma }) => gamma,
        }
    }

    /// Reads `{"kind": "<kind>", ...fields}`.
    pub(super) fn from_fields(mut fields: Map<String, Value>) -> Result<Self> {
        const PART: &str = "series";
        Ok(match &*kind_of(PART, &mut fields)? {
            "one-hop" => Self::OneHop(fields_of(PART, fields)?),
            "hops" => Self::Hops(fields_of(PART, fields)?),
            "resolvent" => Self::Resolvent(fields_of(PART, fields)?),
            "limit" => Self::Limit(fields_of(PART, fields)?),
            other => return Err(unknown_kind(PART, other, &Self::KINDS)),
        })
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::OneHop(m) => check_gamma(m.gamma, true),
            Self::Hops(m) => {
                check("series.count", m.count, (1..=64).contains(&m.count), "1 to 64")?;
                check_gamma(m.gamma, true)
            }
            Self::Resolvent(m) => {
                check_gamma(m.gamma, false)?;
                check_solver(m.tol, m.max_iter)
            }
            Self::Limit(m) => check_gamma(m.gamma, true),
        }
    }
}
