//! What a mechanism is: four choices (score, structure, normalisation, series), and the published presets of them.
//!
//! A preset is read from JSON, `{"mechanism": "infsa", "gamma": 0.9}`: a missing field has its default, an unknown field,
//! a wrong type or a value out of range is an [`Error`] that names the field.

mod choices;
mod fna;
mod parse;
mod presets;
mod ssa;
mod valid;

pub use choices::{Choices, Normalisation, Score, Series, Structure};
pub use fna::{DistanceKernel, Fna, Kappa, KappaRule, Manifold, Resolved};
pub use parse::check_distinct;
pub use presets::{Activation, Infsa, InfsaResolvent, LinearInfsa, NormBias, PowerOperator, Softmax, Uniform};

pub use ssa::{CausalClusters, ClusterOn, Estimator, GlobalTokens, Pairs, Sampler, Ssa};

use serde::Serialize;

use crate::{Error, Parameter, Result, Shape};

/// A preset with its parameters. The serialised form is the JSON configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "mechanism", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mechanism {
    /// Dense softmax.
    Softmax(Softmax),
    /// The mean of the values.
    Uniform(Uniform),
    /// Pure InfSA.
    Infsa(Infsa),
    /// The resolvent of Pure InfSA.
    InfsaResolvent(InfsaResolvent),
    /// Linear InfSA.
    LinearInfsa(LinearInfsa),
    /// Spectral sparse attention.
    Ssa(Ssa),
    /// Fractional neural attention.
    Fna(Fna),
}

impl Mechanism {
    /// Every id, in the order of the tables.
    pub const IDS: [&'static str; 7] = ["softmax", "uniform", "infsa", "infsa-resolvent", "linear-infsa", "fna", "ssa"];

    /// The preset `id` with its defaults.
    ///
    /// # Errors
    /// [`Error::Config`] listing the known ids.
    pub fn preset(id: &str) -> Result<Self> {
        Ok(match id {
            "softmax" => Self::Softmax(Softmax::default()),
            "uniform" => Self::Uniform(Uniform::default()),
            "infsa" => Self::Infsa(Infsa::default()),
            "infsa-resolvent" => Self::InfsaResolvent(InfsaResolvent::default()),
            "linear-infsa" => Self::LinearInfsa(LinearInfsa::default()),
            "ssa" => Self::Ssa(Ssa::default()),
            "fna" => Self::Fna(Fna::default()),
            _ => {
                let problem = format!("unknown mechanism `{id}`, expected one of: {}", Self::IDS.join(", "));
                return Err(Error::Config { field: "mechanism".into(), problem });
            }
        })
    }

    /// The id, as in the JSON configuration.
    pub const fn id(&self) -> &'static str {
        match self {
            Self::Softmax(_) => "softmax",
            Self::Uniform(_) => "uniform",
            Self::Infsa(_) => "infsa",
            Self::InfsaResolvent(_) => "infsa-resolvent",
            Self::LinearInfsa(_) => "linear-infsa",
            Self::Ssa(_) => "ssa",
            Self::Fna(_) => "fna",
        }
    }

    /// The four choices behind the preset.
    pub const fn choices(&self) -> Choices {
        use {Normalisation::*, Score::*, Series::*, Structure::*};
        let (score, structure, normalisation, series) = match self {
            Self::Softmax(_) => (DotExp, Dense, Row, OneHop),
            Self::Uniform(_) => (Constant, Pooled, Row, OneHop),
            Self::Infsa(_) => (DotActivation, Dense, Frobenius, OneHop),
            Self::InfsaResolvent(_) => (DotActivation, Dense, Frobenius, Resolvent),
            Self::LinearInfsa(_) => (DotActivation, Pooled, L1, Limit),
            Self::Ssa(_) => (DotExp, Clustered, Row, OneHop),
            Self::Fna(m) if m.is_gaussian() => (Gaussian, Dense, Row, OneHop),
            Self::Fna(_) => (PowerLaw, Dense, Row, OneHop),
        };
        Choices { score, structure, normalisation, series }
    }

    /// Whether the keys are the queries, so that a call has no `k`.
    pub const fn tied(&self) -> bool {
        match self {
            Self::Softmax(m) => m.tied,
            Self::Uniform(_) | Self::Ssa(_) => false,
            Self::Infsa(m) => m.tied,
            Self::InfsaResolvent(m) => m.tied,
            Self::LinearInfsa(m) => m.tied,
            Self::Fna(m) => m.tied,
        }
    }

    /// Whether the configuration asks for causality (a call's mask may add it).
    pub const fn causal(&self) -> bool {
        match self {
            Self::Softmax(m) => m.causal,
            Self::Uniform(m) => m.causal,
            Self::Infsa(m) => m.causal,
            Self::InfsaResolvent(m) => m.causal,
            Self::LinearInfsa(m) => m.causal,
            Self::Ssa(m) => m.causal,
            Self::Fna(m) => m.causal,
        }
    }

    /// The configured decay, where the mechanism has one.
    pub const fn gamma(&self) -> Option<f64> {
        match self {
            Self::Softmax(_) | Self::Uniform(_) | Self::Ssa(_) | Self::Fna(_) => None,
            Self::Infsa(m) => Some(m.gamma),
            Self::InfsaResolvent(m) => Some(m.gamma),
            Self::LinearInfsa(m) => Some(m.gamma),
        }
    }

    /// The tensors that a call may carry in [`crate::Extras`], and whose gradients it may ask for.
    pub const fn parameters(&self) -> &'static [Parameter] {
        match self {
            Self::Softmax(_) | Self::Uniform(_) | Self::Ssa(_) => &[],
            Self::Infsa(_) | Self::InfsaResolvent(_) | Self::LinearInfsa(_) => &[Parameter::Gamma],
            // At alpha = 2 the kernel jumps: there is no slope in alpha.
            Self::Fna(m) if m.is_gaussian() => &[Parameter::Kappa],
            Self::Fna(_) => &[Parameter::Alpha, Parameter::Kappa],
        }
    }

    /// The values that stand for one of [`Mechanism::parameters`] where a call does not give it, of
    /// [`Mechanism::parameter_shape`]; what a module starts from.
    pub fn parameter_default(&self, parameter: Parameter, shape: &Shape) -> Vec<f32> {
        let len = self.parameter_shape(parameter, shape).iter().product();
        let value = match parameter {
            Parameter::Gamma => self.gamma().unwrap_or(1.0),
            _ => match self {
                Self::Fna(m) => m.parameter(parameter, shape),
                _ => 0.0,
            },
        };
        vec![value as f32; len]
    }

    /// The shape of one of [`Mechanism::parameters`] in a call of sizes `shape`.
    pub fn parameter_shape(&self, parameter: Parameter, shape: &Shape) -> Vec<usize> {
        match parameter {
            Parameter::Gamma | Parameter::Alpha | Parameter::Kappa | Parameter::Lambda | Parameter::Scale => {
                vec![shape.heads]
            }
            _ => vec![0],
        }
    }

    /// Rows of `out` per head: `seq_q`, or 1 where the mechanism returns its pooled value once.
    pub const fn out_seq(&self, shape: &Shape) -> usize {
        match self {
            Self::LinearInfsa(m) if !m.broadcast => 1,
            _ => shape.seq_q,
        }
    }
}
