//! Gradients of clustered attention at large scores: rows of one entry that has nearly all weight, whose logarithms need more
//! digits than one f32 has.

use crate::support;

use resolvent_kernels::{Mechanism, Shape, Tol, relative_distance};
use support::{problem::Problem, random::problem};

const MECHANISMS: [&str; 7] = [
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "samples": 6}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "samples": 6, "estimator": "raw", "sampler": "row", "global_tokens": 2}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "cluster_on": "dual", "routes": 2, "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "causal": true, "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "clusters": 8, "causal": true, "samples": 5}"#,
];

/// A problem whose largest scores are about `size`.
fn sharp(json: &str, size: f64) -> Problem {
    let mut p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 150, 16), 3);
    let factor = (size / 10.0).sqrt();
    for x in p.q.iter_mut().chain(p.k.as_mut().unwrap()) {
        *x = f64::from((*x * factor) as f32);
    }
    p.fix_plan();
    p
}

/// Errors of output and gradients; those of queries and keys in units of what would come of weights that are off by one.
fn errors(p: &Problem) -> [f64; 4] {
    let (got, want) = (p.fused(), p.reference());
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let terms = |x: &[f64]| 0.25 * norm(x) * norm(&p.dout) / (p.dout.len() as f64).sqrt();
    let error = |name: &str, size: f64| {
        let difference: Vec<f64> = got[name].iter().zip(&want[name]).map(|(a, b)| a - b).collect();
        norm(&difference) / size
    };
    let relative = |name: &str| relative_distance(&got[name], &want[name]);
    [relative("out"), relative("dv"), error("dq", terms(p.k.as_ref().unwrap())), error("dk", terms(&p.q))]
}

/// Errors at scores of 1e8 are those at scores of 10: within what f32 attention is allowed anywhere.
#[test]
fn gradients_keep_their_digits() {
    for json in MECHANISMS {
        for size in [1e1, 1e3, 1e5, 1e8] {
            let p = sharp(json, size);
            let errors = errors(&p);
            println!("{size:e} {errors:?} {json}");
            let tol = Tol::f32(&p.mechanism).backward;
            assert!(errors.iter().all(|&error| error < tol), "scores of {size:e}: {errors:?} of {json}");
        }
    }
}
