//! Spectral sparse attention: its parameters.

mod check;
mod segments;

pub(crate) use self::segments::Segments;

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

/// Softmax attention on a clustered graph: every edge within a cluster, and a few edges, or one mean token, for each
/// cluster beyond. "Spectral Sparse Attention: Subquadratic Long-Context Modeling via Cluster-Based Sparsification with
/// Provable Guarantees".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Ssa {
    /// Clusters asked for. Default null = `round(sqrt(seq_kv))`, twice as many where queries choose for themselves; 1 to 2^31, at most
    /// one per token is made. Algorithm 1. With causal segments it is the number in each; null then makes `round(4 sqrt(n))`
    /// in the first `n` tokens, whatever `n`.
    pub clusters: Option<usize>,
    /// Sampled edges per remote pair of clusters, for the `row` sampler per row. Default null = `ceil(ln seq_kv)`, at least
    /// 1, and 0 with the `centroid` estimator; at most `seq_kv`, or 16384 where that is less. Proposition 4.
    pub samples: Option<usize>,
    /// Remote pairs of clusters that are sampled. Default `"all"`; or a number, 1 to 2^31. Algorithm 1, step 9a.
    pub pairs: Pairs,
    /// Seed of the plan. Default 0.
    pub seed: u64,
    /// Rounds of Lloyd's algorithm after k-means++. Default 4, at most a million: they end when no label changes.
    pub kmeans_iterations: usize,
    /// Which tokens are clustered. Default queries. Algorithm 1, step 1; remark 8.
    pub cluster_on: ClusterOn,
    /// How the edges of a pair are drawn. Default null = uniform, and row if causal. Remarks 2 and 25.
    pub sampler: Option<Sampler>,
    /// Tokens outside the clusters, seen by all and (but for `dual`) seeing all. Default null; a number (the first of the
    /// sequence) or a list of positions. Remarks 8 and 25.
    pub global_tokens: Option<GlobalTokens>,
    /// What stands for the clusters beyond. Default importance. Section 2.3.
    pub estimator: Estimator,
    /// Queries see no later key; see `causal_clusters`. Default false. Remark 3.
    pub causal: bool,
    /// What a causal query sees. Default prefix; read only when causal. Remark 3.
    pub causal_clusters: CausalClusters,
    /// Channels of a random projection before clustering. Default null; in [1, 4096]. Section 3.12.
    pub jl_dim: Option<usize>,
    /// No cluster has more than `ceil(balance * tokens / clusters)` members. Default 2; null (no limit) or in [1, 1e6].
    pub balance: Option<f64>,
    /// Key clusters that a query cluster, or each query, sees exactly. Default 1; 1 to 2^31.
    pub routes: usize,
    /// Who chooses routes. Default cluster. Ours.
    pub route_by: RouteBy,
    /// What makes tokens near each other. Default euclidean. Ours.
    pub cluster_metric: ClusterMetric,
    /// So many keys, the farthest from the means of their clusters, leave these and are seen by every query, as no mean
    /// speaks for them. Default 0; not if causal. Ours.
    pub outlier_globals: usize,
    /// So many queries, the farthest from the mean of the others of their clusters (alone in one: the farthest), also see exactly the `routes` clusters whose mean
    /// keys have the largest product with them, not with the mean of their cluster. Default 0; not if causal. Ours.
    pub outlier_queries: usize,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
}

impl Default for Ssa {
    fn default() -> Self {
        Self {
            clusters: None,
            samples: None,
            pairs: Pairs::All,
            seed: 0,
            kmeans_iterations: 4,
            cluster_on: ClusterOn::Queries,
            sampler: None,
            global_tokens: None,
            estimator: Estimator::Importance,
            causal: false,
            causal_clusters: CausalClusters::Prefix,
            jl_dim: None,
            balance: Some(2.0),
            routes: 1,
            route_by: RouteBy::Cluster,
            cluster_metric: ClusterMetric::Euclidean,
            outlier_globals: 0,
            outlier_queries: 0,
            scale: None,
        }
    }
}

/// How many remote pairs of clusters [`Ssa`] samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "AllOr<usize>", into = "AllOr<usize>")]
pub enum Pairs {
    /// Every one; JSON `"all"`.
    #[default]
    All,
    /// So many, drawn by their estimated mass.
    Count(usize),
}

/// Which tokens [`Ssa`] clusters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterOn {
    /// The queries; a token's key has the label of its query.
    #[default]
    Queries,
    /// The keys; a token's query has the label of its key.
    Keys,
    /// Both, apart; clusters of queries are routed to clusters of keys. The one choice for cross-attention.
    Dual,
}

/// Who chooses the clusters of keys that are seen exactly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouteBy {
    /// A cluster of queries, by the products of its mean with the clusters' mean keys.
    #[default]
    Cluster,
    /// Every query for itself, by what the clusters' mean keys would weigh: `scale q_i . mean_c + ln n_c`. Keys alone are clustered.
    Query,
}

/// What makes tokens near each other when they are clustered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterMetric {
    /// The squared distance.
    #[default]
    Euclidean,
    /// That of rows of unit length; rows of zeros stay.
    Cosine,
}

/// How [`Ssa`] draws remote edges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sampler {
    /// Distinct edges of a pair of clusters, all equally likely.
    #[default]
    Uniform,
    /// Edges of a pair with a probability of `(D_i C_j)^-1/2`, `D` and `C` the estimated degrees of row and column.
    DegreeWeighted,
    /// Every row draws its own: a cluster by its estimated mass, then one of its tokens.
    Row,
}

/// What stands for the clusters that [`Ssa`] does not evaluate exactly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Sampled edges with the inverse of their probability for weight: the operator before normalisation is unbiased.
    #[default]
    Importance,
    /// Sampled edges as they are.
    Raw,
    /// One mean token per cluster, with the weight of all its tokens.
    Centroid,
}

/// What a causal query of [`Ssa`] sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", try_from = "Tagged")]
pub enum CausalClusters {
    /// No later token.
    #[default]
    Prefix,
    /// No later block of `size` tokens; within a block, every token.
    Block {
        /// Tokens of a block, 1 to 2^31.
        size: usize,
    },
    /// No later token. The sequence is cut into segments of `size` tokens, each clustered by itself once all of its tokens have come. A
    /// query sees the earlier tokens of its own segment exactly, and chooses among the clusters of the segments before. Only with
    /// [`RouteBy::Query`]. Ours.
    Segment {
        /// Tokens of a segment, 1 to 2^31.
        size: usize,
    },
}

impl CausalClusters {
    /// Tokens that become visible together.
    pub const fn block(self) -> usize {
        match self {
            Self::Prefix | Self::Segment { .. } => 1,
            Self::Block { size } => size,
        }
    }

    /// Tokens of a block or segment; 1 where there are none.
    const fn size(self) -> usize {
        match self {
            Self::Prefix => 1,
            Self::Block { size } | Self::Segment { size } => size,
        }
    }
}

/// [`CausalClusters`] as it is written: a derived tagged enum would let a superfluous `size` pass.
#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = r#"`{"kind": "prefix"}`, `{"kind": "block", "size": 64}` or `{"kind": "segment", "size": 256}`"#
)]
struct Tagged {
    kind: Kind,
    size: Option<usize>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Prefix,
    Block,
    Segment,
}

impl TryFrom<Tagged> for CausalClusters {
    type Error = &'static str;

    fn try_from(Tagged { kind, size }: Tagged) -> std::result::Result<Self, Self::Error> {
        match (kind, size) {
            (Kind::Prefix, None) => Ok(Self::Prefix),
            (Kind::Prefix, Some(_)) => Err("kind `prefix` has no size"),
            (Kind::Block, Some(size)) => Ok(Self::Block { size }),
            (Kind::Segment, Some(size)) => Ok(Self::Segment { size }),
            (Kind::Block, None) => Err("kind `block` needs a size"),
            (Kind::Segment, None) => Err("kind `segment` needs a size"),
        }
    }
}

/// Tokens outside the clusters of [`Ssa`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected null, a number of tokens or a list of positions")]
pub enum GlobalTokens {
    /// The first so many.
    First(usize),
    /// These.
    At(Vec<usize>),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"all\" or a number >= 1")]
enum AllOr<T> {
    All(All),
    Value(T),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum All {
    All,
}

impl From<AllOr<usize>> for Pairs {
    fn from(x: AllOr<usize>) -> Self {
        match x {
            AllOr::All(_) => Self::All,
            AllOr::Value(n) => Self::Count(n),
        }
    }
}

impl From<Pairs> for AllOr<usize> {
    fn from(x: Pairs) -> Self {
        match x {
            Pairs::All => Self::All(All::All),
            Pairs::Count(n) => Self::Value(n),
        }
    }
}

impl Ssa {
    /// Clusters asked for, among `seq_kv` keys.
    pub fn clusters(&self, seq_kv: usize) -> usize {
        let times = if self.routes_queries() { 2.0 } else { 1.0 };
        self.clusters.unwrap_or(((times * (seq_kv as f64).sqrt()).round() as usize).clamp(1, seq_kv.max(1)))
    }

    /// Whether every query chooses for itself what it sees.
    pub const fn routes_queries(&self) -> bool {
        matches!(self.route_by, RouteBy::Query)
    }

    /// What the draws of head `h` depend on beside the seed and the batch entry. Nothing where queries choose among clusters of keys: heads
    /// that share keys share their clusters.
    pub(crate) const fn draws_of(&self, h: usize) -> u64 {
        if self.routes_queries() { 0 } else { h as u64 }
    }

    /// Most members of a cluster, of `tokens` that are clustered among `seq_kv`.
    pub(crate) fn cap(&self, seq_kv: usize, tokens: usize) -> usize {
        self.cap_of(self.clusters(seq_kv), tokens)
    }

    /// The same where so many clusters are asked for.
    pub(crate) fn cap_of(&self, asked: usize, tokens: usize) -> usize {
        let asked = asked.min(tokens).max(1);
        self.balance.map_or(tokens, |balance| (balance * tokens as f64 / asked as f64).ceil() as usize)
    }

    /// Edges per remote pair of clusters, or per row.
    pub fn samples(&self, seq_kv: usize) -> usize {
        match self.estimator {
            Estimator::Centroid => 0,
            _ => self.samples.unwrap_or(((seq_kv as f64).ln().ceil() as usize).max(1)),
        }
    }

    /// How edges are drawn.
    pub fn sampler(&self, causal: bool) -> Sampler {
        self.sampler.unwrap_or(if causal { Sampler::Row } else { Sampler::Uniform })
    }

    /// The tokens outside the clusters, among `seq_kv`.
    pub fn globals(&self, seq_kv: usize) -> Vec<usize> {
        match &self.global_tokens {
            None => Vec::new(),
            Some(GlobalTokens::First(count)) => (0..seq_kv.min(*count)).collect(),
            Some(GlobalTokens::At(positions)) => positions.clone(),
        }
    }

    /// Whether token `n` is outside the clusters.
    pub(crate) fn is_global(&self, n: usize) -> bool {
        match &self.global_tokens {
            None => false,
            Some(GlobalTokens::First(count)) => n < *count,
            Some(GlobalTokens::At(positions)) => positions.contains(&n),
        }
    }

    /// Whether queries and keys are one set of tokens with one label each.
    pub fn shared(&self) -> bool {
        self.cluster_on != ClusterOn::Dual && !self.routes_queries()
    }
}
