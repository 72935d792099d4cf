//! Random problems of spectral sparse attention: every option, and masks that are drawn apart.

use proptest::{option, prelude::*, sample::select};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_kernels::{Mechanism, Shape};
use serde_json::json;

use super::{problem::Problem, random::problem};

/// Any configuration, of clusters for queries, keys or both; causal ones have no choices that causality refuses.
pub fn any_ssa() -> impl Strategy<Value = Mechanism> {
    let clusters = (select(vec!["queries", "keys", "dual"]), 1..9_usize, option::of(select(vec![1.0, 1.5, 2.0])));
    let edges = (
        select(vec!["importance", "raw", "centroid"]),
        select(vec!["uniform", "degree-weighted", "row"]),
        0..6_usize,
        option::of(1..9_usize),
    );
    let globals = prop_oneof![Just(json!(null)), Just(json!(1)), Just(json!([3, 1]))];
    let rest = (1..4_usize, option::of(1..5_usize), 0..3_usize, any::<bool>(), 0..4_usize, 0..4_usize);
    let causal =
        prop_oneof![Just(None), Just(Some(json!({"kind": "prefix"}))), Just(Some(json!({"kind": "block", "size": 5})))];
    (clusters, edges, globals, rest, causal).prop_map(|(clusters, edges, globals, rest, causal)| {
        let ((cluster_on, clusters, balance), (estimator, sampler, samples, pairs)) = (clusters, edges);
        let (routes, jl_dim, kmeans_iterations, outliers, outlier_globals, outlier_queries) = rest;
        let is_causal = causal.is_some();
        let row = is_causal || sampler == "row";
        let outliers = outliers && !is_causal;
        let config = json!({
            "mechanism": "ssa", "clusters": clusters, "balance": balance, "seed": samples + 7 * clusters,
            "cluster_on": if is_causal && cluster_on == "dual" { "keys" } else { cluster_on },
            "estimator": estimator,
            "samples": if estimator == "centroid" { json!(null) } else { json!(samples) },
            "sampler": if row { "row" } else { sampler },
            "pairs": pairs.filter(|_| !row).map_or(json!("all"), |pairs| json!(pairs)),
            "global_tokens": globals, "routes": if is_causal { 1 } else { routes }, "jl_dim": jl_dim,
            "kmeans_iterations": 2 * kmeans_iterations,
            "outlier_globals": if outliers { outlier_globals } else { 0 },
            "outlier_queries": if outliers { outlier_queries } else { 0 },
            "causal": is_causal, "causal_clusters": causal.unwrap_or(json!({"kind": "prefix"})),
        });
        Mechanism::from_value(config).unwrap()
    })
}

/// A problem without masks or plan; half of those that can have a codebook have one.
pub fn any_clustered_problem() -> impl Strategy<Value = Problem> {
    (any_ssa(), 4..44_usize, 4..44_usize, any::<u64>(), any::<bool>()).prop_map(
        |(m, seq_q, seq_kv, seed, with_codebook)| {
            let mut p = problem(m, Shape { seq_q, seq_kv, batch: 2, heads: 2, head_dim: 4, value_dim: 3 }, seed);
            let m = p.mechanism.as_ssa().unwrap();
            if with_codebook && m.jl_dim.is_none() {
                let len = 2 * 4 * m.clusters.unwrap();
                p.codebook = Some((0..len).map(|n| 1.5 * ((n as u64 + seed % 1000) as f32 * 0.7).sin()).collect());
            }
            p
        },
    )
}

/// Masks that are drawn apart, each of which keeps a share of the tokens.
pub fn mask_apart(p: &mut Problem, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let shares: [f64; 2] = [0.8, 0.5].map(|share| if rng.random_bool(0.5) { share } else { 1.3 - share });
    let Shape { batch, seq_q, seq_kv, .. } = p.shape;
    let mut keep = |len: usize, share: f64| Some((0..batch * len).map(|_| rng.random_bool(share)).collect());
    (p.query_mask, p.key_mask) = (keep(seq_q, shares[0]), keep(seq_kv, shares[1]));
}
