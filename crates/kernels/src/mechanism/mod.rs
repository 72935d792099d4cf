//! What a mechanism is: four values (score, structure, normalisation, series), and the published presets of them.
//!
//! A preset is read from JSON, `{"mechanism": "infsa", "gamma": 0.9}`: a missing field has its default, an unknown field,
//! a wrong type or a value out of range is an [`Error`] that names the field.

mod bias;
mod builder;
mod fna;
mod form;
mod landmarks;
mod laplacian;
mod named;
mod normalisation;
mod parameters;
mod parse;
mod parts;
mod presets;
mod product;
mod properties;
mod score;
mod series;
mod soft;
mod ssa;
mod structure;
mod support;
mod valid;
mod window;

pub use bias::{Alibi, Bias, BiasGrid, BiasTensor, Buckets};
pub use fna::{DistanceKernel, Fna, Kappa, KappaRule, Manifold, Resolved};
pub(crate) use form::Form;
pub use landmarks::{Inverse, InverseGradient, Landmarks, NewtonInit, PoolWindows};
pub use laplacian::{Centering, Laplacian, LaplacianExact, WeightScale, Whitening};
pub use normalisation::{Factor, Factors, Frobenius, Normalisation, Row, Symmetric, Unnormalised, Whitened};
pub use parse::check_distinct;
pub use presets::{Activation, Infsa, InfsaResolvent, LinearInfsa, NormBias, PowerOperator, Softmax, Uniform};
pub use score::{Bandwidth, Constant, CosineExp, Custom, Dot, DotExp, DotSigmoid, Gaussian, PowerLaw, Score};
pub use series::{Hops, Limit, OneHop, Resolvent, Series};
pub use soft::{Degree, Soft};
pub(crate) use ssa::Segments;
pub use ssa::{CausalClusters, ClusterMetric, ClusterOn, Estimator, GlobalTokens, Pairs, RouteBy, Sampler, Ssa};
pub use structure::{Clustered, Dense, FeatureMap, Features, Nystrom, Pooled, Projected, Structure};
pub(crate) use window::Windows;

use crate::{Error, Result};

/// Four values, and how they are called. The serialised form is the JSON configuration: of a preset its own fields, else a field for each
/// of the values, of which one that is missing is `dot-exp`, `dense`, `row`, `one-hop`.
///
/// Presets are constructors, here and in JSON. One with fields of its own is that preset as long as its values are: with another value
/// than it can have it is a composition like any other.
///
/// ```
/// use resolvent_kernels::mechanism::*;
/// let levy = Score::Levy(PowerLaw::default().with_alpha(1.5));
/// let over_clusters = Mechanism::new(levy).structure(Ssa::default().with_clusters(Some(16)));
/// let diffused = Mechanism::ssa().series(Resolvent::default().with_gamma(0.8));
/// assert_eq!(over_clusters.to_string(), "levy x clustered x row x one-hop");
/// assert_eq!(diffused.to_string(), "dot-exp x clustered x row x resolvent");
/// assert_eq!(Mechanism::from(Infsa::default().with_gamma(0.9)).series.gamma(), 0.9);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Mechanism {
    /// How two tokens relate.
    pub score: Score,
    /// How the operator is held.
    pub structure: Structure,
    /// What makes weights of affinities.
    pub normalisation: Normalisation,
    /// How many hops.
    pub series: Series,
    /// What is added to the logits of pairs for where their tokens are; none for nothing.
    pub bias: Option<Bias>,
    /// Whether the keys are the queries, so that a call has no `k`.
    pub tied: bool,
    /// Whether query `i` sees keys `j <= i + seq_kv - seq_q` alone (a call's mask may add it).
    pub causal: bool,
    /// The preset that it was made as.
    name: Option<&'static str>,
}

impl std::fmt::Display for Mechanism {
    /// The id; of a composition that is no preset the kinds of its four values, and of the bias: `dot-exp x dense x row x one-hop + alibi`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = self.id();
        if id != Self::COMPOSED {
            return f.write_str(id);
        }
        let score = if let Score::Custom(custom) = &self.score { custom.name() } else { self.score.kind() };
        let structure = self.structure.kind();
        write!(f, "{score} x {structure} x {} x {}", self.normalisation.kind(), self.series.kind())?;
        self.bias.map_or(Ok(()), |bias| write!(f, " + {}", bias.kind()))
    }
}

impl std::str::FromStr for Mechanism {
    type Err = Error;

    /// A preset by its id, or a configuration in JSON.
    fn from_str(text: &str) -> Result<Self> {
        if text.trim_start().starts_with('{') { Self::from_json(text) } else { Self::preset(text) }
    }
}

impl Mechanism {
    /// The id of what is no preset.
    pub(super) const COMPOSED: &'static str = "composed";

    /// The id, as in the JSON configuration: of the preset, or `composed`.
    pub fn id(&self) -> &'static str {
        match self.name {
            Some(name) if !named::has_fields(name) || self.own().is_some() => name,
            _ => Self::COMPOSED,
        }
    }

    /// The title of the paper that the values are of, where the preset is nothing but values.
    pub fn paper(&self) -> Option<&'static str> {
        named::paper(self.name?)
    }
}
