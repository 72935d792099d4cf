//! Random problems of any mechanism with any option.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_kernels::{
    Mechanism, Parameter, Shape,
    mechanism::{Landmarks, Manifold, Normalisation, PoolWindows, Series, Structure},
};

use super::problem::Problem;

/// Every mechanism with every option. Where a gradient is what a projection leaves over, `eps` is large enough that
/// something is left even of a single token.
pub const VARIANTS: &[&str] = &[
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "scale": 0.75, "tied": true}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "uniform"}"#,
    r#"{"mechanism": "uniform", "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "tied": true, "gamma": 1}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "abs", "scale": 0.5}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "gelu"}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "causal": true, "tied": true, "activation": "gelu"}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125, "tied": true, "gamma": 0.9}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125, "activation": "gelu", "tied": true}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125, "activation": "abs", "gamma": 0.5, "scale": 2}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "tied": true, "norm_bias": "auto"}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "activation": "gelu", "broadcast": false}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "activation": "abs", "operator": "exact", "norm_bias": 0.5}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "iterations": 3, "norm_bias": 0.25}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "iterations": 3, "operator": "exact", "activation": "gelu"}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "iterations": 4, "tied": true, "activation": "abs"}"#,
    r#"{"mechanism": "fna", "kappa": "vision"}"#,
    r#"{"mechanism": "fna", "alpha": 2, "causal": true}"#,
    r#"{"mechanism": "fna", "alpha": 1, "tied": true, "norm_exponent": 1, "kappa": 1.5}"#,
    r#"{"mechanism": "fna", "alpha": 1.7, "causal": true, "norm_exponent": -0.5, "intrinsic_dim": 2, "kappa": 3}"#,
    r#"{"mechanism": "fna", "kernel": "student", "alpha": 2, "kappa": 2.5}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "intrinsic_dim": 4}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "intrinsic_dim": 2.5, "alpha": 2, "kappa": 0.5, "tied": true}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "intrinsic_dim": 3, "kernel": "student", "norm_exponent": 0.5}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "samples": 3}"#,
    r#"{"mechanism": "ssa", "clusters": 5, "samples": 2, "sampler": "row", "cluster_on": "keys", "scale": 0.75}"#,
    r#"{"mechanism": "ssa", "clusters": 5, "samples": 4, "sampler": "degree-weighted", "pairs": 7}"#,
    r#"{"mechanism": "ssa", "clusters": 3, "samples": 2, "estimator": "raw", "global_tokens": 1}"#,
    r#"{"mechanism": "ssa", "clusters": 5, "estimator": "centroid", "global_tokens": 1, "routes": 2}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "estimator": "centroid", "cluster_on": "dual", "routes": 2}"#,
    r#"{"mechanism": "ssa", "clusters": 3, "samples": 3, "cluster_on": "dual", "balance": null}"#,
    r#"{"mechanism": "ssa", "clusters": 3, "samples": 2, "causal": true, "balance": null}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "estimator": "centroid", "causal": true, "balance": null}"#,
    r#"{"mechanism": "soft", "ridge": 0.25}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "first", "count": 1}, "inverse": "cholesky", "scale": 0.5}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "pool", "ratio": 3}, "gradient": "unrolled", "newton_iterations": 5}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "conv", "ratio": 3}}"#,
    r#"{"mechanism": "soft", "ridge": 0.03125, "landmarks": {"kind": "first", "count": 1}, "newton_init": "official"}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "random", "count": 1, "seed": 3}, "landmark_act": true}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "newton_init": "identity", "gradient": "unrolled", "newton_iterations": 4}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "given", "count": 3}, "inverse": "eigen", "value_conv": 3}"#,
    r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#,
    r#"{"mechanism": "soft-pp", "ridge": 0.25, "inverse": "eigen", "value_conv": 5}"#,
    r#"{"mechanism": "soft-pp", "ridge": 0.25, "inverse": "cholesky", "degree": "token", "landmarks": {"kind": "pool", "ratio": 2}}"#,
    r#"{"mechanism": "soft-pp", "ridge": 0.25, "newton_init": "backtrack", "newton_iterations": 2, "landmarks": {"kind": "conv", "ratio": 2}, "landmark_act": true}"#,
    r#"{"mechanism": "soft-pp", "ridge": 0.25, "landmarks": {"kind": "pool", "count": 3}}"#,
    r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}, "value_conv": 3}"#,
    r#"{"mechanism": "soft", "landmarks": {"kind": "all"}, "value_conv": 1}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125, "tied": true, "landmarks": {"kind": "stride", "ratio": 3}, "inverse": "cg"}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125, "centering": "per-query", "landmarks": {"kind": "conv", "ratio": 2}, "lambda": 2}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "centering": "per-query", "whitening": "none", "weight_scale": "inv-n", "inverse": "cholesky"}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "centering": "none", "whitening": "none", "weight_scale": "inv-sqrt-n", "bias_one_over_n": false, "newton_iterations": 3}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "centering": "none", "whiten_eps": 0.125, "tied": true}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125, "landmarks": {"kind": "pool", "count": 4}}"#,
    r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.125}"#,
    r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.125, "centering": "per-query", "tied": true, "weight_scale": "inv-n"}"#,
    r#"{"mechanism": "laplacian-exact", "centering": "per-query", "whitening": "none", "causal": true, "lambda": 1.5}"#,
    r#"{"mechanism": "laplacian-exact", "centering": "none", "whitening": "none", "causal": true, "weight_scale": "inv-n", "bias_one_over_n": false}"#,
];

/// Compositions: every score, structure, normalisation and series at least once, by itself and with others.
pub const COMPOSITIONS: &[&str] = &[
    r#"{"mechanism": "cosine", "causal": true}"#,
    r#"{"mechanism": "sigmoid"}"#,
    r#"{"mechanism": "relu", "tied": true}"#,
    r#"{"mechanism": "local", "window": 3, "sinks": 2, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 2.5}, "structure": {"kind": "dense", "window": 4}}"#,
    r#"{"mechanism": "linear", "causal": true}"#,
    r#"{"mechanism": "performer", "count": 16, "seed": 3}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "features", "map": "elu"}, "series": {"kind": "hops", "count": 2}}"#,
    r#"{"mechanism": "routed", "clusters": 4, "routes": 2}"#,
    r#"{"mechanism": "routed", "clusters": 3, "routes": 1, "causal": true}"#,
    r#"{"mechanism": "nystromformer", "landmarks": {"kind": "pool", "count": 3}, "ridge": 0.25}"#,
    r#"{"mechanism": "composed", "score": {"kind": "student", "kappa": 2}, "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 0.25}, "normalisation": {"kind": "symmetric"}, "tied": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "gaussian"}, "normalisation": {"kind": "symmetric"}, "tied": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "laplacian"}, "normalisation": {"kind": "whitened", "whiten_eps": 0.25}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-squared-relu"}, "normalisation": {"kind": "frobenius", "eps": 0.125}, "series": {"kind": "hops", "count": 3, "gamma": 0.5}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid"}, "normalisation": {"kind": "none", "factor": "inv-n"}, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-gelu"}, "normalisation": {"kind": "none"}, "structure": {"kind": "dense", "window": 5, "sinks": 1}}"#,
    r#"{"mechanism": "composed", "series": {"kind": "resolvent", "gamma": 0.5, "tol": 1e-7}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 2}, "series": {"kind": "resolvent", "gamma": 0.5, "tol": 1e-7}, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 2}, "normalisation": {"kind": "row", "density_exponent": 0.5}, "tied": true}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "clustered", "clusters": 3, "estimator": "centroid"}, "series": {"kind": "hops", "count": 2, "gamma": 0.75}}"#,
];

/// Variants and compositions, parsed.
pub fn every_mechanism() -> Vec<Mechanism> {
    let compositions =
        COMPOSITIONS.iter().map(|json| Mechanism::from_json(json).unwrap_or_else(|e| panic!("{json}: {e}")));
    mechanisms().into_iter().chain(compositions).collect()
}

/// Whether it is written by its four values: no preset with fields of its own.
pub fn is_composed(mechanism: &Mechanism) -> bool {
    serde_json::to_value(mechanism).unwrap().get("score").is_some()
}

/// The variants, parsed.
pub fn mechanisms() -> Vec<Mechanism> {
    VARIANTS.iter().map(|json| Mechanism::from_json(json).unwrap()).collect()
}

/// Whether the mechanism takes keys of another length than the queries, if not always fewer.
pub fn takes_cross(mechanism: &Mechanism) -> bool {
    let m = mechanism;
    let by_degrees = matches!(&m.normalisation, Normalisation::Row(row) if row.density_exponent != 0.0);
    let shared = m.clustering().is_some_and(|clusters| clusters.shared());
    let prefix_norm = m.id() == "infsa" && m.causal;
    let steps = m.pooling().map_or(1, |pooling| pooling.iterations);
    let several = matches!(m.series, Series::Hops(_) | Series::Resolvent(_));
    !(m.tied || by_degrees || shared || prefix_norm || several || steps > 1)
}

/// Whether every query must see a key, so that causal there are no fewer keys than queries.
fn needs_a_key_per_query(mechanism: &Mechanism) -> bool {
    mechanism.causal && (is_composed(mechanism) || ["fna", "laplacian-exact"].contains(&mechanism.id()))
}

/// Whether the order of the tokens matters.
pub fn orders_tokens(mechanism: &Mechanism) -> bool {
    let Structure::Nystrom(m) = &mechanism.structure else { return aligns_tokens(mechanism) };
    let of_all = matches!(m.landmarks, Landmarks::All | Landmarks::Given { .. });
    is_composed(mechanism) || m.value_conv > 0 || !of_all
}

/// Whether queries and keys of other numbers have other positions to each other: the last ones lie at each other.
pub fn aligns_tokens(mechanism: &Mechanism) -> bool {
    let windowed = matches!(&mechanism.structure, Structure::Dense(m) if m.window.is_some());
    mechanism.causal || windowed
}

/// Whether the number of tokens matters beside the kept ones: to a draw, to a filter that only takes whole windows, and to a
/// number of windows.
pub fn counts_masked_tokens(mechanism: &Mechanism) -> bool {
    match mechanism.landmark_kind() {
        Some(Landmarks::Random { .. } | Landmarks::Conv { .. }) => mechanism.as_soft().is_some(),
        Some(landmarks) => matches!(landmarks, Landmarks::Pool(PoolWindows::Count(_))),
        None => false,
    }
}

/// The mechanism with no wider windows than there are tokens.
fn fitted(mechanism: Mechanism, tokens: usize) -> Mechanism {
    if mechanism.as_soft().is_none() {
        return mechanism;
    }
    mechanism.with_landmarks(|landmarks| match landmarks {
        Landmarks::Conv { ratio } => Landmarks::Conv { ratio: tokens.min(ratio) },
        other => other,
    })
}

/// The mechanism and the shape changed as little as fits: lengths that differ are made equal where the mechanism asks for it,
/// or for as many keys as queries, and a single channel becomes two on a sphere.
pub fn fitting(mechanism: Mechanism, shape: Shape) -> (Mechanism, Shape) {
    let seq_kv = match takes_cross(&mechanism) {
        true if needs_a_key_per_query(&mechanism) => shape.seq_kv.max(shape.seq_q),
        true => shape.seq_kv,
        false => shape.seq_q,
    };
    let on_sphere = mechanism.id() == "fna" && mechanism.as_fna().is_some_and(|m| m.manifold == Manifold::Sphere);
    let head_dim = shape.head_dim.max(if on_sphere { 2 } else { 1 });
    (fitted(mechanism, seq_kv), Shape { seq_kv, head_dim, ..shape })
}

/// A problem with entries of order one and without masks, of what is [`fitting`].
pub fn problem(mechanism: Mechanism, shape: Shape, seed: u64) -> Problem {
    let (mechanism, shape) = fitting(mechanism, shape);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut entries = |len: usize| (0..len).map(|_| rng.random_range(-1.5_f32..2.0).into()).collect::<Vec<f64>>();
    let out_len = shape.slices() * mechanism.out_seq(&shape) * shape.value_dim;
    let (q, k, v) = (entries(shape.q_len()), entries(shape.k_len()), entries(shape.v_len()));
    let dout = entries(out_len);
    let k = (!mechanism.tied).then_some(k);
    let required = mechanism.parameters().into_iter().filter(|parameter| parameter.required());
    let parameters = required.map(|parameter| {
        let len = mechanism.parameter_shape(parameter, &shape).iter().product();
        (parameter, entries(len).into_iter().map(|x| 0.5 * x as f32).collect())
    });
    let parameters = parameters.collect::<BTreeMap<_, _>>();
    Problem {
        mechanism,
        shape,
        q,
        k,
        v,
        parameters,
        codebook: None,
        clusters: None,
        landmark_indices: None,
        dropout: None,
        key_mask: None,
        query_mask: None,
        dout,
    }
}

/// Any mechanism on any small shape, unmasked; half of them with a decay per head.
pub fn any_problem() -> impl Strategy<Value = Problem> {
    let shape = (1..3_usize, 1..4_usize, 1..24_usize, 1..24_usize, 1..20_usize, 1..20_usize);
    (0..VARIANTS.len() + COMPOSITIONS.len(), shape, any::<u64>(), any::<bool>()).prop_map(
        |(variant, sizes, seed, per_head)| {
            let (batch, heads, seq_q, seq_kv, head_dim, value_dim) = sizes;
            let shape = Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim };
            let mut problem = problem(every_mechanism().swap_remove(variant), shape, seed);
            if per_head && problem.mechanism.gamma().is_some() {
                let gamma = (0..heads).map(|h| 0.3 + 0.2 * h as f32).collect();
                problem.set_gamma(gamma);
            }
            for (parameter, first) in [(Parameter::Alpha, 1.1), (Parameter::Kappa, 2.0)] {
                if per_head && problem.mechanism.parameters().contains(&parameter) {
                    problem.parameters.insert(parameter, (0..heads).map(|h| first + 0.3 * h as f32).collect());
                }
            }
            problem.fix_plan();
            problem
        },
    )
}

/// As [`any_problem`], with random masks; tokens of self-attention are masked as queries and keys alike.
pub fn any_masked_problem() -> impl Strategy<Value = Problem> {
    (any_problem(), any::<u64>()).prop_map(|(mut problem, seed)| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut keep = |len: usize| (0..len).map(|_| rng.random_bool(0.7)).collect::<Vec<_>>();
        let Shape { batch, seq_q, seq_kv, .. } = problem.shape;
        let key_mask = keep(batch * seq_kv);
        problem.query_mask = Some(if seq_q == seq_kv { key_mask.clone() } else { keep(batch * seq_q) });
        problem.key_mask = Some(key_mask);
        problem.fix_plan();
        problem
    })
}
