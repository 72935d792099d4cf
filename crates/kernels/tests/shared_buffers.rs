//! Threads that share a buffer, at the smallest sizes at which they do: small enough for the interpreter Miri, which finds
//! overlapping parts, reads of memory that nothing wrote and pointers out of bounds (`scripts/miri.sh`).

mod support;
#[path = "support/threads.rs"]
mod threads;

use resolvent_kernels::{Mechanism, Shape, Strategy, Tol, simd::Level};
use support::{
    problem::assert_solution,
    random::{VARIANTS, problem},
};
use threads::on_threads;

/// Solves on the portable path by two threads, and compares with the reference.
fn check(json: &str, shape: Shape) {
    let mut p = problem(Mechanism::from_json(json).unwrap(), shape, 3);
    p.fix_plan();
    let got = on_threads(2, || p.solve::<f32>(Strategy::Fused, Some(Level::Portable)).unwrap());
    assert_solution(json, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
}

/// Two heads for two threads.
#[test]
fn heads() {
    let shape = Shape { batch: 1, heads: 2, seq_q: 9, seq_kv: 11, head_dim: 3, value_dim: 2 };
    VARIANTS.iter().for_each(|json| check(json, shape));
}

/// One head of so many tokens.
fn alone(tokens: usize) -> Shape {
    Shape { batch: 1, heads: 1, seq_q: tokens, seq_kv: tokens, head_dim: 2, value_dim: 2 }
}

/// More queries than a tile of the dense structure has, whose partial sums are shared.
#[test]
fn tiles_of_pairs() {
    for json in [
        r#"{"mechanism": "softmax"}"#,
        r#"{"mechanism": "infsa", "eps": 0.125, "causal": true}"#,
        r#"{"mechanism": "fna", "kappa": "vision"}"#,
    ] {
        check(json, alone(260));
    }
}

/// Two tasks of tokens, and a rest.
#[test]
fn tasks_of_clusters() {
    for json in [
        r#"{"mechanism": "ssa", "clusters": 6, "samples": 3}"#,
        r#"{"mechanism": "ssa", "clusters": 6, "estimator": "centroid", "causal": true, "balance": null}"#,
    ] {
        check(json, alone(130));
    }
}

/// The same of landmarks, and of pairs whose columns have statistics.
#[test]
fn tasks_of_landmarks() {
    for json in [
        r#"{"mechanism": "soft-pp", "ridge": 0.25, "landmarks": {"kind": "pool", "ratio": 16}}"#,
        r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125, "landmarks": {"kind": "pool", "ratio": 16}}"#,
        r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.125}"#,
        r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#,
    ] {
        check(json, alone(130));
    }
}

/// More tokens than a task of pooling has.
#[test]
fn tasks_of_pooling() {
    check(r#"{"mechanism": "linear-infsa", "eps": 0.125}"#, alone(1030));
}
