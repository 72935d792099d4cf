//! What is tried on every head where nobody says what.

use resolvent_kernels::{Mechanism, Shape};
use resolvent_lab::candidate::Candidate;
use serde_json::{Value, json};

/// Softmax, and what could take its place on heads of this shape, from mechanisms that see every pair to one that looks at none:
/// routed clusters of several numbers, windows, one row of means for all, and what is linear in the tokens.
pub(super) fn standard(shape: &Shape, causal: bool) -> Vec<Candidate> {
    let tokens = shape.seq_kv;
    let mut found = vec![Candidate::from(Mechanism::default())];
    let mut add = |name: String, config: Value| {
        let known = |candidate: &Candidate| candidate.name == name;
        if let (Ok(mechanism), false) = (Mechanism::from_value(config), found.iter().any(known)) {
            found.push(Candidate { name, mechanism });
        }
    };
    if causal {
        for (size, clusters, routes) in segmented(tokens) {
            let config = json!({
                "mechanism": "routed", "clusters": clusters, "routes": routes, "global_tokens": SINKS.min(tokens),
                "causal_clusters": {"kind": "segment", "size": size},
            });
            add(format!("routed-{clusters}/{size}-{routes}"), config);
        }
    } else {
        for (clusters, routes, outliers) in routed(tokens) {
            let config =
                json!({"mechanism": "routed", "clusters": clusters, "routes": routes, "outlier_globals": outliers});
            add(format!("routed-{clusters}-{routes}-{outliers}"), config);
        }
    }
    for window in [tokens / 64, tokens / 16, tokens / 4].map(|window| window.max(8)) {
        add(format!("local-{window}"), json!({"mechanism": "local", "window": window}));
    }
    add("ssa-centroid".into(), json!({"mechanism": "ssa", "estimator": "centroid"}));
    for id in ["nystromformer", "performer", "linear-infsa", "uniform"] {
        add(id.into(), json!({"mechanism": id}));
    }
    found
}

/// First tokens that all see: much of a language model's attention rests there.
const SINKS: usize = 4;

/// Tokens of a causal segment, its clusters, and routes.
fn segmented(tokens: usize) -> Vec<(usize, usize, usize)> {
    let mut all = Vec::new();
    for size in [64, 128, 256].into_iter().filter(|size| 2 * size < tokens) {
        for of_cluster in [8, 16, 32] {
            for routes in [2, 4, 8, 16] {
                // Beyond half of the clusters nothing is saved.
                if 2 * routes <= tokens / of_cluster {
                    all.push((size, size / of_cluster, routes));
                }
            }
        }
    }
    all
}

/// Clusters, routes and outlier keys: half of twice the root of the tokens, that number, twice and three times as many, with few routes
/// and many.
fn routed(tokens: usize) -> Vec<(usize, usize, usize)> {
    let middle = (2.0 * (tokens as f64).sqrt()).round() as usize;
    let outliers = (tokens / 64).clamp(1, 32);
    let mut all = Vec::new();
    for clusters in [middle / 2, middle, 2 * middle, 3 * middle] {
        for routes in [1, 2, 4, 8, 16] {
            // Beyond half of the clusters nothing is saved.
            if 2 * routes <= clusters && clusters + outliers < tokens {
                all.push((clusters, routes, outliers));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_softmax_is_first() {
        for tokens in [1, 2, 17, 512, 16_384] {
            for causal in [false, true] {
                let all = standard(&Shape::square(1, 2, tokens, 32), causal);
                assert_eq!(all[0].mechanism.id(), "softmax");
                for (at, one) in all.iter().enumerate() {
                    assert!(all[..at].iter().all(|other| other.name != one.name), "{}", one.name);
                }
                assert_eq!(all.iter().filter(|one| one.mechanism.id() == "routed").count() > 10, tokens >= 512);
                assert!(
                    all.iter()
                        .filter(|one| one.mechanism.id() == "routed")
                        .all(|one| { one.mechanism.check(&Shape::square(1, 2, tokens, 32), causal).is_ok() })
                );
            }
        }
        let count = |tokens| standard(&Shape::square(1, 2, tokens, 32), false).len();
        assert!(count(512) > 20 && count(1) < 10, "{} and {}", count(512), count(1));
    }
}
