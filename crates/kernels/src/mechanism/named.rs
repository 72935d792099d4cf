//! Presets by their ids; those that are nothing but four values and a name stand here: what others attend with.

use super::{
    CausalClusters, ClusterOn, CosineExp, Dense, Dot, DotExp, DotSigmoid, Estimator, Factor, Factors, FeatureMap,
    Features, Form, InverseGradient, Landmarks, Mechanism, Nystrom, PoolWindows, Projected, RouteBy, Score, Ssa,
    Unnormalised,
};
use crate::{Error, Result};

/// A preset that is nothing but four values.
pub(super) struct Named {
    pub id: &'static str,
    /// The paper's title.
    pub paper: &'static str,
    /// What it is, in a sentence.
    pub summary: &'static str,
    pub values: fn() -> Mechanism,
}

/// Every such preset, in the order of the tables. A further one is a line here.
pub(super) const NAMED: [Named; 9] = [
    Named {
        id: "cosine",
        paper: "Swin Transformer V2: Scaling Up Capacity and Resolution",
        summary: "Softmax of the cosine of query and key, ten times as steep: lengths say nothing.",
        values: || Mechanism::new(CosineExp::default()),
    },
    Named {
        id: "sigmoid",
        paper: "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
        summary: "Every pair by itself, a sigmoid of its product less the logarithm of the number of keys: no row is normalised.",
        values: || Mechanism::new(DotSigmoid::default()).normalisation(Unnormalised::default()),
    },
    Named {
        id: "relu",
        paper: "Replacing softmax with ReLU in Vision Transformers",
        summary: "Rectified products over the number of keys: no row is normalised, and most weights are zero.",
        values: || Mechanism::new(Score::DotRelu(Dot::default())).normalisation(Unnormalised { factor: Factor::InvN }),
    },
    Named {
        id: "linear",
        paper: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        summary: "Products of positive features, elu + 1, rows normalised: sums over all keys, linear in the tokens.",
        values: || Mechanism::new(DotExp::default()).structure(Features::default()),
    },
    Named {
        id: "performer",
        paper: "Rethinking Attention with Performers",
        summary: "Softmax estimated by random features: sums over all keys, linear in the tokens.",
        values: || {
            Mechanism::new(DotExp::default()).structure(Features { map: FeatureMap::Favor, ..Features::default() })
        },
    },
    Named {
        id: "nystromformer",
        paper: "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        summary: "Softmax through landmarks of queries and of keys: three small softmaxes and a pseudo-inverse, linear in the tokens.",
        values: || {
            // Ten quadratic steps leave what the paper's six cubic ones do, of the same pseudo-inverse.
            let nystrom = Nystrom {
                landmarks: Landmarks::Pool(PoolWindows::Count(64)),
                newton_iterations: 10,
                ridge: 0.0,
                gradient: InverseGradient::Unrolled,
                ..Nystrom::default()
            };
            Mechanism::new(DotExp::default()).structure(nystrom).normalisation(Factors {})
        },
    },
    Named {
        id: "linformer",
        paper: "Linformer: Self-Attention with Linear Complexity",
        summary: "Softmax over a fixed number of learned combinations of all keys and values, linear in the tokens.",
        values: || Mechanism::new(DotExp::default()).structure(Projected::default()),
    },
    Named {
        id: "local",
        paper: "Longformer: The Long-Document Transformer",
        summary: "Softmax within a window of tokens around each.",
        values: || Mechanism::new(DotExp::default()).structure(Dense { window: Some(256), sinks: 0 }),
    },
    Named {
        id: "routed",
        paper: "Spectral Sparse Attention: Subquadratic Long-Context Modeling via Cluster-Based Sparsification with Provable Guarantees",
        summary: "Softmax over clusters of keys, of which each query sees those exactly that weigh most, and the means of the others.",
        values: || {
            let ssa = Ssa::default().with_cluster_on(ClusterOn::Keys).with_estimator(Estimator::Centroid);
            let ssa = ssa.with_causal_clusters(CausalClusters::Segment { size: 256 });
            Mechanism::new(DotExp::default()).structure(ssa.with_route_by(RouteBy::Query).with_routes(4))
        },
    },
];

/// The composition that a preset names.
pub(super) fn named(id: &str) -> Option<Mechanism> {
    let Named { id, values, .. } = NAMED.into_iter().find(|preset| preset.id == id)?;
    Some(Mechanism { name: Some(id), ..values() })
}

/// The title of the paper of a preset that is nothing but four values.
pub(super) fn paper(id: &str) -> Option<&'static str> {
    NAMED.into_iter().find(|preset| preset.id == id).map(|preset| preset.paper)
}

/// Whether a preset has fields of its own.
pub(super) fn has_fields(id: &str) -> bool {
    OWN.iter().any(|(own, _)| *own == id)
}

/// Presets that have a struct of their own, in the order of the tables, and what they are in a sentence.
const OWN: [(&str, &str); 11] = [
    ("softmax", "The baseline: each token averages all values with the softmax of its scaled dot products."),
    ("uniform", "The control: the plain mean of all values. What it reaches, no attention is needed for."),
    (
        "infsa",
        "Rectified dot products over their Frobenius norm, times a learned decay: one hop of a discounted diffusion on the token graph.",
    ),
    (
        "infsa-resolvent",
        "The same operator with all its hops at once, (I - gamma A)^-1 - I, solved without forming the matrix.",
    ),
    (
        "linear-infsa",
        "One weight per token, a surrogate of the dominant direction of the token graph, and one pooled value per head for all tokens: linear in their number.",
    ),
    (
        "soft",
        "A Gaussian kernel of tied queries and keys, held through landmarks: linear in the tokens at a fixed number of them.",
    ),
    ("soft-pp", "SOFT with its symmetric degree normalisation, which keeps the operator's norm bounded."),
    (
        "fna",
        "A power law of the distance between tokens (Levy flights), normalised per row: many short steps and a few long ones.",
    ),
    (
        "laplacian",
        "A Laplacian (L1) kernel, centred and whitened, held through pooled landmark keys: linear in the tokens at a fixed number of them; weights may be negative.",
    ),
    ("laplacian-exact", "The same kernel, whole: streamed in tiles, no landmarks."),
    (
        "ssa",
        "Softmax within clusters of tokens, exact there, and through sampled edges or cluster means elsewhere: a sparse graph in place of the dense one.",
    ),
];

/// The ids of all presets.
const fn ids() -> [&'static str; OWN.len() + NAMED.len()] {
    let mut ids = [""; OWN.len() + NAMED.len()];
    let mut n = 0;
    while n < ids.len() {
        ids[n] = if n < OWN.len() { OWN[n].0 } else { NAMED[n - OWN.len()].id };
        n += 1;
    }
    ids
}

impl Mechanism {
    /// Every id, in the order of the tables.
    pub const IDS: [&'static str; OWN.len() + NAMED.len()] = ids();

    /// What the preset `id` is, in a sentence.
    pub fn summary(id: &str) -> Option<&'static str> {
        let own = OWN.into_iter().find(|(own, _)| *own == id).map(|(_, summary)| summary);
        own.or_else(|| NAMED.into_iter().find(|preset| preset.id == id).map(|preset| preset.summary))
    }

    /// The preset `id` with its defaults.
    ///
    /// # Errors
    /// [`Error::Config`] listing the known ids.
    pub fn preset(id: &str) -> Result<Self> {
        let preset = Form::preset(id).map(Self::from).or_else(|| named(id));
        let problem = || format!("unknown mechanism `{id}`, expected one of: {}", Self::IDS.join(", "));
        preset.ok_or_else(|| Error::Config { field: "mechanism".into(), problem: problem() })
    }
}
