//! What is told of one head's token graph.

use resolvent_graph::{Alignment, ClusterFit, HopSummary, PerronReport};
use serde::Serialize;

use super::{landmarks::LandmarkReport, paths::PathReport, walks::WalkReport};

/// The token graph `M` of one head; what a graph does not have is absent, and `notes` say why. With `--full` alone are there: what `full` holds,
/// `walk_gap` of more than 512 tokens, `asymmetry`, `degree_ratio`, `mixing`, `distortion`, `dominant`, `walks`, `diffusion` and `diffusion_map`.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct GraphReport {
    /// Least, mean and largest row sum; null where they are not numbers.
    pub row_sums: [f64; 3],
    /// Whether no row sum exceeds one by more than rounding.
    pub substochastic: bool,
    /// The share of the weight, by size, that is negative.
    pub negative: Option<f64>,
    /// How many rows that share and the perplexity are of, where not of all.
    pub negative_rows: Option<usize>,
    /// Mean over the rows of the number of tokens attended to, `exp` of the entropy.
    pub perplexity: Option<f64>,
    /// Eigenvalues of the walk on the symmetrised graph, descending, the first of them.
    pub eigenvalues: Vec<f64>,
    /// One minus the second of them.
    pub gap: Option<f64>,
    /// One minus the second largest modulus of the eigenvalues of `M` itself over the largest: how fast its walkers forget where
    /// they started. "Fractional neural attention for efficient multiscale sequence processing", Fig. 5a.
    pub walk_gap: Option<f64>,
    /// `exp` of the entropy of all of them by size: how many directions the graph has.
    pub effective_rank: Option<f64>,
    /// Conductance of the best sweep cut.
    pub cheeger: Option<f64>,
    /// Lower and upper bound on the steps until a walker has forgotten where it started (within 0.25).
    pub mixing: Option<[f64; 2]>,
    /// Largest over least degree.
    pub degree_ratio: Option<f64>,
    /// `|W - W^T| / |W|`.
    pub asymmetry: Option<f64>,
    /// Hops of shortest paths along strong edges.
    pub hops: Option<HopSummary>,
    /// The paths that were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
    /// Hops `[from][to]` of the shortest paths between all tokens, where they were asked for; absent without a path, 0 from a token to
    /// itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hop_matrix: Vec<Vec<Option<u32>>>,
    /// The tokens with the largest share of a walker's time (PageRank), with the share.
    pub central: Vec<(usize, f64)>,
    /// How well the shares of time agree with those on the softmax graph.
    pub centrality: Option<Alignment>,
    /// How far the span of the leading eigenvectors is from softmax's.
    pub subspace: Option<Subspace>,
    /// How well the mechanism's clusters fit the softmax graph.
    pub clusters: Option<ClusterFit>,
    /// Of `ssa`: by how much drawing edges in two stages, clusters by their means and then tokens of them, misses an edge's
    /// share, as the largest factor.
    pub distortion: Option<f64>,
    /// How well the token weights of `linear-infsa` stand in for the dominant direction of the queries' affinities.
    pub dominant: Option<PerronReport>,
    /// Discounted walks of all lengths.
    pub walks: Option<WalkReport>,
    /// Root mean square diffusion distances after 1, 2 and 4 steps.
    pub diffusion: Option<[f64; 3]>,
    /// The tokens on the first two coordinates of the diffusion map after one step, of the heads that are drawn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub diffusion_map: Vec<[f64; 2]>,
    /// Of `soft`, `soft-pp` and `laplacian` with pooled landmarks: the matrix among them.
    pub landmarks: Option<LandmarkReport>,
    /// Of `fna`: the length scale at which its rows attend to as many tokens as softmax's, over its own.
    pub matched_kappa: Option<f64>,
    /// What `--full` adds.
    pub full: Option<FullReport>,
    /// Why something is absent.
    pub notes: Vec<String>,
}

impl GraphReport {
    /// Of a head whose mechanism was refused.
    pub(super) fn none(why: String) -> Self {
        Self { row_sums: [f64::NAN; 3], notes: vec![why], ..Self::default() }
    }
}

/// Two spans of leading eigenvectors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Subspace {
    /// How many vectors: the most up to eight whose eigenvalues are clear of the next in both graphs.
    pub directions: usize,
    /// Root mean square of the sines of the angles between them: 0 the same, 1 orthogonal.
    pub sine: f64,
}

/// Dense diagnostics that take long.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FullReport {
    /// Moduli of the eigenvalues of `M` itself, descending.
    pub moduli: Vec<f64>,
    /// Singular values of `M`, descending.
    pub singular_values: Vec<f64>,
    /// Their effective rank.
    pub effective_rank: f64,
    /// Steps until a walker has forgotten where it started; absent beyond 2^20 and for graphs without a walk.
    pub mixing_time: Option<u64>,
}
