//! Scores so far apart that a row has all its weight at one key: no gradient goes back through it, and what rounding leaves of its
//! terms, times the scale of the scores, must not take its place.

use crate::support;

use resolvent_kernels::{Mechanism, Shape, Strategy, simd::Level};
use support::{problem::Problem, random::problem};

/// At each of them f32 had a gradient of up to 1e9 where f64 has none.
const SATURATED: &[&str] = &[
    r#"{"mechanism": "softmax", "scale": 1e5}"#,
    r#"{"mechanism": "softmax", "scale": 1e7, "causal": true}"#,
    r#"{"mechanism": "softmax", "scale": 1e8}"#,
    r#"{"mechanism": "fna", "alpha": 2, "kappa": 3e-4}"#,
    r#"{"mechanism": "fna", "alpha": 2, "kappa": 3e-4, "tied": true}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "samples": 3, "scale": 1e6}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "estimator": "centroid", "scale": 1e6}"#,
    r#"{"mechanism": "routed", "clusters": 4, "routes": 2, "scale": 1e6}"#,
    r#"{"mechanism": "composed", "score": {"kind": "gaussian", "scale": 1e8}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "gaussian", "scale": 1e8}, "series": {"kind": "one-hop", "gamma": 0.7}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "series": {"kind": "one-hop", "gamma": 0.7}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "laplacian", "lambda": 3e-4}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "laplacian", "lambda": 3e-4}, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "structure": {"kind": "dense", "window": 9}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "cosine-exp", "scale": 1e4}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "series": {"kind": "hops", "count": 3}}"#,
];

fn saturated(json: &str, seed: u64) -> Problem {
    let mechanism = Mechanism::from_json(json).unwrap_or_else(|e| panic!("{json}: {e}"));
    let mut p = problem(mechanism, Shape { value_dim: 20, ..Shape::square(2, 2, 70, 12) }, seed);
    p.key_mask = Some((0..140).map(|i| i * i % 7 < 5).collect());
    p.fix_plan();
    p
}

#[test]
fn rows_with_all_weight_at_one_key_have_no_gradient() {
    let mut wrong = Vec::new();
    for (seed, json) in SATURATED.iter().enumerate() {
        let p = saturated(json, seed as u64);
        let expected = p.reference();
        for level in Level::available() {
            let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap_or_else(|e| panic!("{json}: {e}"));
            for name in ["dq", "dk"].into_iter().filter(|name| expected.contains_key(name)) {
                let rows = got[name].chunks(p.shape.head_dim).zip(expected[name].chunks(p.shape.head_dim));
                let none: Vec<_> = rows.filter(|(_, expected)| expected.iter().all(|&x| x == 0.0)).collect();
                let worst = none.iter().flat_map(|(got, _)| *got).fold(0.0, |most: f64, x| most.max(x.abs()));
                if none.len() < 20 || worst != 0.0 {
                    wrong.push(format!("{json} on {}: {name}, {} rows, {worst:.1e}", level.name(), none.len()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
