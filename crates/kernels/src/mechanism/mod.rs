//! What a mechanism is: four values (score, structure, normalisation, series), and the published presets of them.
//!
//! A preset is read from JSON, `{"mechanism": "infsa", "gamma": 0.9}`: a missing field has its default, an unknown field,
//! a wrong type or a value out of range is an [`Error`] that names the field.

mod bias;
mod builder;
mod composed;
mod fna;
mod landmarks;
mod laplacian;
mod named;
mod normalisation;
mod parameters;
mod parse;
mod presets;
mod product;
mod score;
mod series;
mod soft;
mod ssa;
mod structure;
mod support;
mod valid;
mod values;
mod window;

pub use bias::{Alibi, Bias, BiasGrid, BiasTensor, Buckets};
pub use composed::Composed;
pub use fna::{DistanceKernel, Fna, Kappa, KappaRule, Manifold, Resolved};
pub use landmarks::{Inverse, InverseGradient, Landmarks, NewtonInit, PoolWindows};
pub use laplacian::{Centering, Laplacian, LaplacianExact, WeightScale, Whitening};
pub use normalisation::{Factor, Factors, Frobenius, Normalisation, Row, Symmetric, Unnormalised, Whitened};
pub use parse::check_distinct;
pub use presets::{Activation, Infsa, InfsaResolvent, LinearInfsa, NormBias, PowerOperator, Softmax, Uniform};
pub use score::{Bandwidth, Constant, CosineExp, Custom, Dot, DotExp, DotSigmoid, Gaussian, PowerLaw, Score};
pub use series::{Hops, Limit, OneHop, Resolvent, Series};
pub use soft::{Degree, Soft};
pub(crate) use window::Windows;

pub(crate) use ssa::Segments;
pub use ssa::{CausalClusters, ClusterMetric, ClusterOn, Estimator, GlobalTokens, Pairs, RouteBy, Sampler, Ssa};
pub use structure::{Clustered, Dense, FeatureMap, Features, Nystrom, Pooled, Projected, Structure};

use std::borrow::Cow;

use crate::{Error, Result, Shape};

/// A preset with its parameters. The serialised form is the JSON configuration.
#[derive(Debug, Clone, PartialEq)]
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
    /// SOFT: a Gaussian kernel through landmarks.
    Soft(Soft),
    /// SOFT++: the same with symmetric degrees.
    SoftPp(Soft),
    /// LaplacianFormer: a whitened Laplacian kernel through landmarks.
    Laplacian(Laplacian),
    /// The kernel of LaplacianFormer, every pair of it.
    LaplacianExact(LaplacianExact),
    /// Spectral sparse attention.
    Ssa(Ssa),
    /// Fractional neural attention.
    Fna(Fna),
    /// Four values, composed: those of a preset that is nothing else, or one's own.
    Composed(Box<Composed>),
}

impl std::fmt::Display for Mechanism {
    /// The id; of a composition that is no preset the kinds of its four values.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Composed(composed) if composed.name.is_none() => composed.fmt(f),
            _ => f.write_str(self.id()),
        }
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
    /// The id, as in the JSON configuration.
    pub const fn id(&self) -> &'static str {
        match self {
            Self::Softmax(_) => "softmax",
            Self::Uniform(_) => "uniform",
            Self::Infsa(_) => "infsa",
            Self::InfsaResolvent(_) => "infsa-resolvent",
            Self::LinearInfsa(_) => "linear-infsa",
            Self::Soft(_) => "soft",
            Self::SoftPp(_) => "soft-pp",
            Self::Laplacian(_) => "laplacian",
            Self::LaplacianExact(_) => "laplacian-exact",
            Self::Ssa(_) => "ssa",
            Self::Fna(_) => "fna",
            Self::Composed(m) => m.id(),
        }
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
            Self::Soft(_) | Self::SoftPp(_) => true,
            Self::Laplacian(m) => m.tied,
            Self::LaplacianExact(m) => m.tied,
            Self::Composed(m) => m.tied,
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
            Self::Soft(m) | Self::SoftPp(m) => m.causal,
            Self::Laplacian(m) => m.causal,
            Self::LaplacianExact(m) => m.causal,
            Self::Ssa(m) => m.causal,
            Self::Fna(m) => m.causal,
            Self::Composed(m) => m.causal,
        }
    }

    /// The configured decay, where the mechanism has one.
    pub const fn gamma(&self) -> Option<f64> {
        match self {
            Self::Infsa(m) => Some(m.gamma),
            Self::InfsaResolvent(m) => Some(m.gamma),
            Self::LinearInfsa(m) => Some(m.gamma),
            Self::Composed(m) if !m.is_undamped() => Some(m.series.gamma()),
            _ => None,
        }
    }

    /// The same mechanism with `change` applied to its decay, where it has one.
    #[must_use]
    pub fn with_gamma(mut self, change: impl FnOnce(f64) -> f64) -> Self {
        let gamma = match &mut self {
            Self::Infsa(m) => &mut m.gamma,
            Self::InfsaResolvent(m) => &mut m.gamma,
            Self::LinearInfsa(m) => &mut m.gamma,
            Self::Composed(m) => m.series.gamma_mut(),
            _ => return self,
        };
        *gamma = change(*gamma);
        self
    }

    /// What is added to the logits of pairs for where their tokens are.
    pub fn bias(&self) -> Option<Bias> {
        if let Self::Composed(m) = self { m.bias } else { None }
    }

    /// The same mechanism, told how many tokens a sequence has at most, where learned maps have a column for each; one whose configuration
    /// says how many is unchanged.
    #[must_use]
    pub fn with_max_tokens(mut self, number: usize) -> Self {
        if let Self::Composed(m) = &mut self
            && let Structure::Projected(m) = &mut m.structure
        {
            m.max_tokens.get_or_insert(number);
        }
        self
    }

    /// The same mechanism with so many combinations of all keys standing for these, where the structure is [`Structure::Projected`].
    #[must_use]
    pub fn with_projected(mut self, count: usize) -> Self {
        if let Self::Composed(m) = &mut self
            && let Structure::Projected(m) = &mut m.structure
        {
            m.count = count;
        }
        self
    }

    /// The same mechanism with another seed for what it draws: landmarks, clusters and sampled edges, random features, maps.
    #[must_use]
    pub fn with_seed(mut self, number: u64) -> Self {
        match &mut self {
            Self::Ssa(m) => m.seed = number,
            Self::Composed(m) => match &mut m.structure {
                Structure::Features(Features { seed, .. }) | Structure::Projected(Projected { seed, .. }) => {
                    *seed = number
                }
                Structure::Clustered(m) => m.set_seed(number),
                _ => {}
            },
            _ => {}
        }
        self.with_landmarks(|landmarks| match landmarks {
            Landmarks::Random { count, .. } => Landmarks::Random { count, seed: number },
            other => other,
        })
    }

    /// Whether it ends an iteration early where that has converged: a plan counts operations for the most steps that it may take.
    pub fn iterates(&self) -> bool {
        match self {
            Self::InfsaResolvent(_) => true,
            Self::Soft(m) | Self::SoftPp(m) => m.landmarks != Landmarks::All && m.inverse.iterates(),
            Self::Laplacian(m) => m.inverse.iterates(),
            Self::Composed(m) => m.iterates(),
            _ => false,
        }
    }

    /// How tokens are clustered, where they are: of `ssa` and of every composition on clusters.
    pub fn clustering(&self) -> Option<Cow<'_, Ssa>> {
        match self {
            Self::Ssa(m) => Some(Cow::Borrowed(m)),
            Self::Composed(m) => match &m.structure {
                Structure::Clustered(structure) => Some(Cow::Owned(structure.ssa(m.planned_scale(), m.causal))),
                _ => None,
            },
            _ => None,
        }
    }

    /// The clusters of what is softmax over these: of `ssa` and of compositions that are the same.
    pub(crate) fn softmax_over_clusters(&self) -> Option<Ssa> {
        self.values().ssa()
    }

    /// [`Mechanism::clustering`], or a refusal.
    pub(crate) fn clusters(&self) -> Result<Cow<'_, Ssa>> {
        let why = "only clustered mechanisms attend along clusters";
        self.clustering().ok_or(Error::Unsupported { mechanism: self.id(), what: "a plan of clusters", why })
    }

    /// Whether the score comes from outside.
    pub(crate) fn is_custom(&self) -> bool {
        matches!(self, Self::Composed(m) if matches!(m.score, Score::Custom(_)))
    }

    /// The window of a dense structure.
    pub(crate) fn window(&self) -> Dense {
        match self {
            Self::Composed(m) => match &m.structure {
                Structure::Dense(dense) => dense.clone(),
                _ => Dense::default(),
            },
            _ => Dense::default(),
        }
    }

    /// Whether one mask is for queries and keys alike.
    pub const fn masks_tokens_once(&self) -> bool {
        matches!(self, Self::Soft(_) | Self::SoftPp(_))
    }

    /// Whether each row depends on its own query alone, and on the keys that this sees.
    pub fn is_row_local(&self) -> bool {
        // What has one map for queries and keys has neither a causal form nor one for other keys.
        self.projections() == 1 || !self.masks_tokens_once() && self.values().is_row_local()
    }

    /// How many rows of a token it reads, of queries, keys and values: all three, two where the keys are the queries, and values alone
    /// where all pairs have one score.
    pub const fn projections(&self) -> usize {
        match self {
            Self::Uniform(_) => 1,
            _ if self.tied() => 2,
            _ => 3,
        }
    }

    /// Whether landmarks are filtered channel by channel and not by full matrices, as in "LaplacianFormer: Rethinking Linear Attention
    /// with Laplacian Kernel".
    pub const fn filters_by_channel(&self) -> bool {
        matches!(self, Self::Laplacian(_))
    }

    /// How tokens are weighed that are pooled to one value for all queries, where they are.
    pub const fn pooling(&self) -> Option<&LinearInfsa> {
        if let Self::LinearInfsa(m) = self { Some(m) } else { None }
    }

    /// The same mechanism with a row for every query, also where it would return a common one once.
    #[must_use]
    pub fn with_every_row(self) -> Self {
        match self {
            Self::LinearInfsa(m) => Self::LinearInfsa(m.with_broadcast(true)),
            other => other,
        }
    }

    /// Whether all queries get one pooled value.
    pub(crate) const fn is_pooled(&self) -> bool {
        matches!(self, Self::Uniform(_) | Self::LinearInfsa(_))
    }

    /// What is allowed and likely a mistake, with the remedy. See [`Mechanism::caution_at`].
    pub fn caution(&self) -> Option<&'static str> {
        match self {
            Self::Soft(m) | Self::SoftPp(m) => m.caution(),
            Self::Composed(m) => m.caution(),
            _ => None,
        }
    }

    /// How many combinations of all keys stand for these, where the structure is [`Structure::Projected`].
    pub fn projected(&self) -> Option<&Projected> {
        let Self::Composed(m) = self else { return None };
        if let Structure::Projected(m) = &m.structure { Some(m) } else { None }
    }

    /// What is likely a mistake in calls of sizes `shape`, beside [`Mechanism::caution`]: a single landmark for several tokens,
    /// more than 256 landmarks of a kind whose number grows with the tokens, and more projected keys than keys.
    pub fn caution_at(&self, shape: &Shape) -> Option<&'static str> {
        if self.projected().is_some_and(|m| m.count > shape.seq_kv) {
            return Some(
                "there are more projected keys than keys, so that every pair of tokens would cost less; set `count` to fewer",
            );
        }
        let landmarks = self.landmark_kind()?;
        match self.landmarks(shape)? {
            1 if shape.seq_kv > 1 => Some(
                "a single landmark stands for all tokens, which then differ only by how near they are to it; set `landmarks` to \
                 more, as {\"kind\": \"pool\", \"count\": 4} does",
            ),
            count if count > MANY_LANDMARKS && landmarks.grow() => Some(
                "there are more landmarks for more tokens, and the cost is not linear in the tokens; set `landmarks` to a fixed \
                 number, as {\"kind\": \"pool\", \"count\": 49} does",
            ),
            _ => None,
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

/// Beyond this the cost of landmarks whose number grows is worth a word: five times the papers' 49.
const MANY_LANDMARKS: usize = 256;
