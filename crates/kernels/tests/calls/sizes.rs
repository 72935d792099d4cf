//! The fused kernels against the reference on the sizes at which tiles, vectors and loops end.

use crate::support;

use resolvent_kernels::{Cache, Error, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy, Tol};
use support::{
    problem::{Problem, assert_solution},
    random::{problem, takes_cross},
};

/// One preset per kernel; `eps` leaves a single token something of its gradient.
const KERNELS: &[&str] = &[
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true, "tied": true}"#,
    r#"{"mechanism": "uniform", "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "abs"}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "gelu"}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125}"#,
    r#"{"mechanism": "infsa-resolvent", "eps": 0.125, "tied": true}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125}"#,
    r#"{"mechanism": "linear-infsa", "eps": 0.125, "operator": "exact", "iterations": 2}"#,
    r#"{"mechanism": "fna", "kappa": "vision"}"#,
    r#"{"mechanism": "fna", "kappa": 3, "tied": true, "norm_exponent": 1}"#,
    r#"{"mechanism": "ssa", "global_tokens": 1}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "clusters": 2, "balance": null}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "causal": true}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "cluster_on": "dual", "routes": 3}"#,
    r#"{"mechanism": "soft", "ridge": 0.25, "landmarks": {"kind": "pool", "ratio": 9}}"#,
    r#"{"mechanism": "soft-pp", "ridge": 0.25, "degree": "token", "inverse": "cholesky", "landmarks": {"kind": "pool", "ratio": 15}}"#,
    r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}}"#,
    r#"{"mechanism": "laplacian", "ridge": 0.25, "whiten_eps": 0.25, "inverse": "cholesky"}"#,
    r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.25}"#,
    r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "per-query", "causal": true}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "fna", "kappa": 3, "causal": true}"#,
];

/// More than any system gives is an error before any of it is taken, by whichever path.
#[test]
fn memory_that_nobody_has_is_refused() {
    let json = r#"{"mechanism": "composed", "structure": {"kind": "projected", "count": 65536, "per_head": true, "max_tokens": 16777216}}"#;
    let (mechanism, shape) = (Mechanism::from_json(json).unwrap(), Shape::square(1, 64, 3, 2));
    let x = vec![0.5_f32; shape.q_len()];
    let inputs = Inputs { q: &x[..], k: Some(&x[..]), v: &x[..], extras: Default::default() };
    for strategy in [Strategy::Fused, Strategy::Reference] {
        let op = Operator::new(&mechanism, shape, false, strategy).unwrap();
        let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        let told = op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut Scratch::default()).unwrap_err();
        assert!(matches!(told, Error::Memory { .. }), "{strategy:?}: {told}");
    }
    for id in ["softmax", "fna"] {
        let told = Cache::new(&Mechanism::preset(id).unwrap(), 1, 64, 64, 64, 1 << 27).unwrap_err();
        assert!(matches!(told, Error::Memory { .. }), "{id}: {told}");
    }
}

fn each_kernel(check: impl Fn(Mechanism)) {
    KERNELS.iter().for_each(|json| check(Mechanism::from_json(json).unwrap()));
}

fn check(p: &Problem, size: f64) {
    let what = format!("{:?} on {:?}", p.mechanism, p.shape);
    assert_solution(&what, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(size));
}

#[test]
fn sequences_and_channels() {
    for (n, seq) in [1, 2, 7, 8, 9, 63, 64, 65, 257].into_iter().enumerate() {
        for head_dim in [1, 8, 12, 32, 64] {
            let shape = Shape { value_dim: head_dim + n % 3, ..Shape::square(1, 1, seq, head_dim) };
            each_kernel(|mechanism| check(&problem(mechanism, shape, seq as u64), 1.0));
        }
    }
}

#[test]
fn keys_of_another_length() {
    for (seq_q, seq_kv) in [(1, 130), (130, 1), (5, 64), (65, 33), (257, 40), (40, 300)] {
        let shape = Shape { batch: 1, heads: 2, seq_q, seq_kv, head_dim: 12, value_dim: 20 };
        each_kernel(|mechanism| {
            if takes_cross(&mechanism) {
                check(&problem(mechanism, shape, 3), 1.0);
            }
        });
    }
}

/// So many tokens that a task goes through several panels with the same buffers.
#[test]
fn causal_mean_tokens_of_many_panels() {
    let json = r#"{"mechanism": "ssa", "estimator": "centroid", "causal": true, "clusters": 6, "balance": null}"#;
    let shape = Shape { value_dim: 3, ..Shape::square(1, 1, 2200, 4) };
    check(&problem(Mechanism::from_json(json).unwrap(), shape, 5), 1.0);
}

/// Tokens that are zero, and tokens ten thousand times as long as the others.
#[test]
fn zero_and_long_tokens() {
    each_kernel(|mechanism| {
        let mut p = problem(mechanism, Shape::square(1, 2, 70, 16), 4);
        for (factor, row) in [(0.0, 3), (1e4, 17), (0.0, 69)] {
            let tensors = [Some(&mut p.q), p.k.as_mut()];
            tensors.into_iter().flatten().for_each(|x| x[row * 16..][..16].iter_mut().for_each(|x| *x *= factor));
        }
        // Clusters of such tokens hang on the digits of their distances.
        p.fix_plan();
        check(&p, 1e4);
    });
}
