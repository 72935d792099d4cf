//! Mechanisms whose past is keys and values, and problems of them.
#![allow(dead_code)] // each test binary uses its part

use resolvent_kernels::{Mechanism, Parameter, Shape};

use super::support::{problem::Problem, random};

/// Dense compositions whose rows depend on their own query alone: every score, both normalisations, biases by distance.
pub const DENSE: [&str; 17] = [
    r#"{"mechanism": "cosine", "causal": true}"#,
    r#"{"mechanism": "cosine", "causal": true, "tied": true, "score": {"scale": 3}}"#,
    r#"{"mechanism": "sigmoid", "causal": true}"#,
    r#"{"mechanism": "sigmoid", "causal": true, "score": {"offset": -1.5}, "bias": "alibi"}"#,
    r#"{"mechanism": "relu", "causal": true}"#,
    r#"{"mechanism": "softmax", "causal": true, "bias": "alibi"}"#,
    r#"{"mechanism": "composed", "causal": true, "score": {"kind": "dot-exp", "softcap": 3}, "bias": {"kind": "buckets", "count": 8, "max_distance": 20}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "dot-exp", "normalisation": {"kind": "none", "factor": "inv-n"}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "dot-abs", "series": {"kind": "one-hop", "gamma": 0.5}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "dot-gelu"}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "dot-squared-relu", "normalisation": "none"}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "gaussian"}"#,
    r#"{"mechanism": "composed", "causal": true, "score": {"kind": "levy", "kappa": 3}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": {"kind": "student", "manifold": "sphere", "intrinsic_dim": 4}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": {"kind": "student", "kappa": 2}}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "laplacian"}"#,
    r#"{"mechanism": "composed", "causal": true, "score": "constant"}"#,
];

/// Windows, with and without sinks, and what depends on where keys are or how many are seen.
pub const WINDOWS: [&str; 8] = [
    r#"{"mechanism": "local", "causal": true, "window": 1}"#,
    r#"{"mechanism": "local", "causal": true, "window": 1, "sinks": 3}"#,
    r#"{"mechanism": "local", "causal": true, "window": 16, "sinks": 1}"#,
    r#"{"mechanism": "local", "causal": true, "window": 23, "sinks": 20}"#,
    r#"{"mechanism": "local", "causal": true, "window": 5, "sinks": 2, "bias": "alibi"}"#,
    r#"{"mechanism": "local", "causal": true, "window": 40, "sinks": 4, "bias": {"kind": "buckets", "count": 8, "max_distance": 20}}"#,
    r#"{"mechanism": "sigmoid", "causal": true, "structure": {"kind": "dense", "window": 9, "sinks": 2}}"#,
    r#"{"mechanism": "cosine", "causal": true, "structure": {"kind": "dense", "window": 100000000000000}}"#,
];

/// Of mechanisms with parts of their own.
const OWN: [&str; 6] = [
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "infsa", "causal": true}"#,
    r#"{"mechanism": "infsa", "causal": true, "tied": true, "activation": "gelu"}"#,
    r#"{"mechanism": "fna", "causal": true, "kappa": 3}"#,
    r#"{"mechanism": "fna", "causal": true, "manifold": "sphere", "intrinsic_dim": 4}"#,
    r#"{"mechanism": "fna", "causal": true, "kernel": "student", "kappa": 2}"#,
];

/// All of them.
pub fn of_rows() -> impl Iterator<Item = Mechanism> {
    OWN.into_iter().chain(DENSE).chain(WINDOWS).map(|json| Mechanism::from_json(json).unwrap())
}

/// A random problem, with the numbers of a bias where the mechanism has one.
pub fn problem(mechanism: Mechanism, shape: Shape, seed: u64) -> Problem {
    let mut p = random::problem(mechanism, shape, seed);
    if p.mechanism.bias.is_some() {
        let len: usize = p.mechanism.parameter_shape(Parameter::Bias, &p.shape).iter().product();
        p.parameters.insert(Parameter::Bias, (0..len).map(|n| 0.3 * ((n + 1) as f32).sin()).collect());
    }
    p
}

pub fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// Rows `from..to` of every slice of `x [slices, seq, dim]`.
pub fn tokens(x: &[f64], seq: usize, dim: usize, from: usize, to: usize) -> Vec<f32> {
    x.chunks(seq * dim).flat_map(|slice| narrow(&slice[from * dim..to * dim])).collect()
}
