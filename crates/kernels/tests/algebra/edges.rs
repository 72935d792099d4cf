//! Compositions where few tokens see few: rows without a cluster beside rows that see everything, queries far from all landmarks, keys that
//! nobody sees, tokens that are nearly parallel.

use crate::support;

use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Tol};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

fn composed(parts: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {parts}}}"#)).unwrap()
}

#[track_caller]
fn check(what: &str, p: &Problem) {
    // Where a common factor on affinities changes nothing, the gradient of their scale is the rounding of what adds up to nothing.
    let tol = Tol::f32(&p.mechanism).with_noise(1.0);
    assert_solution(what, &p.fused(), &p.reference(), &p.shape, tol);
}

/// A query whose own key is masked has no cluster; a global one sees all, and comes after it in the order of the rows.
#[test]
fn queries_without_a_cluster_stand_beside_global_ones() {
    let clustered = |fields: &str| format!(r#""structure": {{"kind": "clustered", "global_tokens": 1{fields}}}"#);
    let (plain, causal) = (clustered(""), r#""causal": true"#);
    let of_ssa = r#"{"mechanism": "ssa", "global_tokens": [1], "causal": true, "score": "gaussian"}"#;
    let mechanisms = [
        composed(&plain),
        composed(&format!(r#"{plain}, "series": "hops""#)),
        composed(&format!(r#"{plain}, "series": "resolvent""#)),
        composed(&format!(r#"{plain}, {causal}, "score": "gaussian""#)),
        composed(&format!(r#"{}, {causal}, "series": "resolvent""#, clustered(r#", "samples": 2"#))),
        composed(&format!(r#"{plain}, {causal}, "series": "resolvent", "bias": "tensor""#)),
        Mechanism::from_json(of_ssa).unwrap(),
    ];
    for mechanism in mechanisms {
        for (seq, masked) in [(2, 1), (6, 2), (40, 11)] {
            let mut p = problem(mechanism.clone(), Shape::square(1, 2, seq, 4), seq as u64);
            if mechanism.bias.is_some() {
                p.parameters.insert(Parameter::Bias, (0..2 * seq * seq).map(|n| (n % 7) as f32 / 8.0).collect());
            }
            for from_the_end in [false, true] {
                let is_masked = |n: usize| if from_the_end { n + masked >= seq } else { n < masked };
                p.key_mask = Some((0..seq).map(|n| !is_masked(n)).collect());
                p.clusters = None;
                p.fix_plan();
                check(&format!("{mechanism}, {seq} tokens"), &p);
            }
        }
    }
}

/// Beyond the landmarks a row has places for whole vectors, which take part in nothing.
#[test]
fn parameters_of_queries_far_from_all_landmarks_have_their_gradients() {
    let scores = [
        r#"{"kind": "gaussian", "scale": 40}"#,
        r#"{"kind": "laplacian", "lambda": 0.02}"#,
        r#"{"kind": "levy", "alpha": 2.0, "kappa": 0.16}"#,
        r#"{"kind": "student", "kappa": 0.1}"#,
    ];
    for score in scores {
        let structure = r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "count": 2}}"#;
        let mechanism = composed(&format!(r#""score": {score}, "structure": {structure}, "normalisation": "row""#));
        let shape = Shape::square(1, 1, 3, 1);
        let mut p = problem(mechanism, shape, 1);
        p.q = vec![-0.5, -0.125, 0.75];
        p.k = Some(vec![-1.25, 0.375, -1.5]);
        let (got, expected) = (p.fused(), p.reference());
        for parameter in p.mechanism.parameters() {
            let name = parameter.gradient_name();
            let (got, expected) = (got[name][0], expected[name][0]);
            let size = expected.abs().max(1e-3);
            assert!((got - expected).abs() < 1e-2 * size, "{score}, {name}: {got:e} and {expected:e}");
        }
    }
}

/// Keys for rows, as for the sums of columns, have the bias of their pairs all the same.
#[test]
fn absent_pairs_of_keys_that_nobody_sees_are_those_of_the_bias() {
    for score in ["dot-abs", "dot-relu", "dot-gelu", "dot-squared-relu", "dot-sigmoid"] {
        for (seq_q, seq_kv) in [(2, 5), (3, 3), (5, 2)] {
            let structure = r#"{"kind": "dense", "window": 2}"#;
            let parts = format!(
                r#""score": "{score}", "bias": "tensor", "structure": {structure}, "normalisation": "symmetric""#
            );
            let shape = Shape { seq_q, seq_kv, ..Shape::square(1, 1, seq_q, 2) };
            let mut p = problem(composed(&parts), shape, 3);
            let bias = p.parameters.entry(Parameter::Bias).or_insert_with(|| vec![0.0; seq_q * seq_kv]);
            bias.fill(0.0);
            bias[0] = f32::NEG_INFINITY;
            bias[(seq_q - 1) * seq_kv] = f32::NEG_INFINITY;
            check(&parts, &p);
        }
    }
}

/// What is left of affinities without their mean is rounding.
#[test]
fn whitened_similarities_of_nearly_parallel_tokens_are_refused() {
    let mechanism = composed(r#""score": "cosine-exp", "normalisation": "whitened""#);
    let mut p = problem(mechanism, Shape::square(1, 2, 16, 8), 7);
    p.fused();
    for x in [&mut p.q, p.k.as_mut().unwrap()] {
        x.iter_mut().for_each(|x| *x = f64::from((*x + 3000.0) as f32));
    }
    let refused = p.solve::<f32>(resolvent_kernels::Strategy::Fused, None).unwrap_err();
    assert!(matches!(refused, Error::Close { .. }), "{refused}");
    // All the same is no matter: nothing is left of them.
    for x in [&mut p.q, p.k.as_mut().unwrap()] {
        x.fill(1.0);
    }
    p.fused();
}
