//! The whole product of scores, structures, normalisations and series: every combination runs as the reference says, or is refused
//! with a reason. There is no third outcome.

use crate::support;

use resolvent_kernels::{Error, Mask, Mechanism, Operator, Parameter, Shape, Strategy, Tol, reference};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

const SCORES: &[&str] = &[
    r#"{"kind": "dot-exp"}"#,
    r#"{"kind": "dot-exp", "softcap": 2.0, "scale": 0.75}"#,
    r#"{"kind": "cosine-exp", "scale": 3.0}"#,
    r#"{"kind": "dot-relu"}"#,
    r#"{"kind": "dot-abs"}"#,
    r#"{"kind": "dot-gelu"}"#,
    r#"{"kind": "dot-squared-relu"}"#,
    r#"{"kind": "dot-sigmoid"}"#,
    r#"{"kind": "dot-sigmoid", "offset": -0.5}"#,
    r#"{"kind": "gaussian"}"#,
    r#"{"kind": "levy", "kappa": 3.0}"#,
    r#"{"kind": "levy", "alpha": 2.0}"#,
    r#"{"kind": "levy", "manifold": "sphere", "intrinsic_dim": 3}"#,
    r#"{"kind": "student", "kappa": 2.0, "alpha": 1.5}"#,
    r#"{"kind": "laplacian"}"#,
    r#"{"kind": "constant"}"#,
];

const STRUCTURES: &[&str] = &[
    r#"{"kind": "dense"}"#,
    r#"{"kind": "dense", "window": 3, "sinks": 1}"#,
    r#"{"kind": "clustered", "clusters": 3, "estimator": "centroid", "balance": null}"#,
    r#"{"kind": "clustered", "clusters": 3, "samples": 2, "balance": null}"#,
    r#"{"kind": "clustered", "clusters": 3, "samples": 2, "cluster_on": "dual", "global_tokens": 1}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 3}, "inverse": "cholesky", "ridge": 0.25}"#,
    r#"{"kind": "features"}"#,
    r#"{"kind": "features", "map": "favor", "count": 7}"#,
    r#"{"kind": "pooled"}"#,
];

/// Every query for itself. Its combinations come last: numbers of combinations are seeds.
const ROUTED: &str = r#"{"kind": "clustered", "clusters": 4, "routes": 2, "route_by": "query", "cluster_on": "keys", "estimator": "centroid"}"#;

/// Maps that are as wide as the tokens and those that are wider, shared and of each head. They come last too.
const PROJECTED: &[&str] = &[
    r#"{"kind": "projected", "count": 3}"#,
    r#"{"kind": "projected", "count": 5, "per_head": true, "max_tokens": 12, "seed": 3}"#,
];

/// What `factors` takes: an inverse of a matrix that is not symmetric, which as it is no other normalisation of the walk has digits of.
const FACTORED: &[&str] = &[
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "count": 3}, "ridge": 0.0, "newton_iterations": 5, "gradient": "unrolled"}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 1.0}"#,
];

const NORMALISATIONS: &[&str] = &[
    r#"{"kind": "row"}"#,
    r#"{"kind": "row", "density_exponent": 0.5}"#,
    r#"{"kind": "frobenius", "eps": 0.125}"#,
    r#"{"kind": "symmetric"}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25}"#,
    r#"{"kind": "whitened", "whitening": "none", "centering": "per-query", "weight_scale": "inv-n"}"#,
    r#"{"kind": "none"}"#,
    r#"{"kind": "none", "factor": "inv-n"}"#,
];

const SERIES: &[&str] = &[
    r#"{"kind": "one-hop", "gamma": 0.75}"#,
    r#"{"kind": "hops", "count": 3, "gamma": 0.5}"#,
    r#"{"kind": "resolvent", "gamma": 0.5, "tol": 1e-7}"#,
    r#"{"kind": "limit"}"#,
];

/// Every combination as a configuration.
fn product() -> impl Iterator<Item = String> {
    let parts = |score, structure, normalisation, series| {
        format!(
            r#"{{"mechanism": "composed", "score": {score}, "structure": {structure}, "normalisation": {normalisation}, "series": {series}}}"#
        )
    };
    let two = move |score, structure| {
        NORMALISATIONS.iter().flat_map(move |n| SERIES.iter().map(move |s| parts(score, structure, *n, *s)))
    };
    let all = SCORES.iter().flat_map(move |score| STRUCTURES.iter().flat_map(move |structure| two(*score, *structure)));
    let factored = SCORES.iter().flat_map(move |score| {
        FACTORED
            .iter()
            .chain(STRUCTURES)
            .flat_map(move |f| SERIES.iter().map(move |s| parts(*score, *f, r#"{"kind": "factors"}"#, *s)))
    });
    let late = move |structure: &'static str| SCORES.iter().flat_map(move |score| two(*score, structure));
    all.chain(factored).chain(late(ROUTED)).chain(PROJECTED.iter().flat_map(move |structure| late(structure)))
}

/// A call of a combination: sizes, causality, tied keys, masks.
#[derive(Debug, Clone, Copy)]
struct Call {
    seq_q: usize,
    seq_kv: usize,
    causal: bool,
    tied: bool,
    masks: bool,
}

const CALLS: &[Call] = &[
    Call { seq_q: 9, seq_kv: 9, causal: false, tied: false, masks: true },
    Call { seq_q: 9, seq_kv: 9, causal: true, tied: false, masks: true },
    Call { seq_q: 8, seq_kv: 8, causal: false, tied: true, masks: false },
    Call { seq_q: 5, seq_kv: 11, causal: false, tied: false, masks: false },
    Call { seq_q: 4, seq_kv: 10, causal: true, tied: false, masks: true },
];

/// The problem of a call, or nothing where it is refused with a reason.
fn problem_of(json: &str, call: Call, seed: u64) -> Option<Problem> {
    let json = json.replacen("{", &format!(r#"{{"tied": {}, "causal": {}, "#, call.tied, call.causal), 1);
    let refused = |error: Error| match error {
        Error::Unsupported { what, why, .. } => assert!(!what.is_empty() && !why.is_empty(), "{json}"),
        other => panic!("{json}: {other}"),
    };
    let mechanism = Mechanism::from_json(&json).map_err(refused).ok()?;
    let Call { seq_q, seq_kv, .. } = call;
    let shape = Shape { batch: 2, heads: 2, seq_q, seq_kv, head_dim: 4, value_dim: 3 };
    mechanism.check(&shape, false).map_err(refused).ok()?;
    let mut p = problem(mechanism, shape, seed);
    if call.masks {
        p.key_mask = Some((0..2 * seq_kv).map(|n| n % 6 != 2).collect());
        p.query_mask = Some((0..2 * seq_q).map(|n| n % 7 != 3).collect());
    }
    p.fix_plan();
    Some(p)
}

#[test]
fn every_combination_runs_or_is_refused() {
    let (mut fused, mut by_reference, mut refused) = (0, 0, 0);
    for (n, json) in product().enumerate() {
        for &call in CALLS {
            let Some(p) = problem_of(&json, call, n as u64) else {
                refused += 1;
                continue;
            };
            let what = format!("{json} on {call:?}");
            let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Auto).unwrap();
            if op.plan().strategy == Strategy::Fused {
                fused += 1
            } else {
                by_reference += 1
            }
            let mut got = p.solve::<f32>(Strategy::Auto, None).unwrap_or_else(|e| panic!("{what}: {e}"));
            got.remove("lse");
            let tol = Tol::f32(&p.mechanism).with_noise(1.0);
            let mut expected = p.reference();
            expected.remove("lse");
            assert_solution(&what, &got, &expected, &p.shape, tol);
        }
    }
    println!("{fused} fused, {by_reference} by the reference, {refused} refused");
    assert!(fused > 1000 && refused > 1000);
}

/// `<dout, out>`.
fn loss(p: &Problem) -> f64 {
    let out = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
    out.iter().zip(&p.dout).map(|(x, y)| x * y).sum()
}

/// Whether `gradient` is the slope of the loss along a direction that meets every entry of a tensor.
fn check(what: &str, p: &Problem, gradient: &[f64], shift: impl Fn(&mut Problem, usize, f64)) {
    let direction = |i: usize| ((i * i + 3 * i + 1) as f64).sin();
    let at = |step: f64| {
        let mut p = p.clone();
        (0..gradient.len()).for_each(|i| shift(&mut p, i, step * direction(i)));
        loss(&p)
    };
    let measured = (at(1e-6) - at(-1e-6)) / 2e-6;
    let got: f64 = gradient.iter().enumerate().map(|(i, g)| g * direction(i)).sum();
    let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt() + 1e-3;
    assert!((measured - got).abs() < 2e-6 * size * (gradient.len() as f64).sqrt(), "{what}: {measured}, got {got}");
}

#[test]
fn gradients_of_the_reference_are_slopes() {
    let (mut all, mut refused) = (0, 0);
    for (n, json) in product().enumerate() {
        for &call in CALLS {
            match problem_of(&json, call, n as u64) {
                Some(p) => check_gradients(&format!("{json} on {call:?}"), &p),
                None => refused += 1,
            }
            all += 1;
        }
    }
    println!("{} run, {refused} refused", all - refused);
    assert!(all - refused > 3000 && refused > 1000);
}

/// Every gradient of the reference.
fn check_gradients(what: &str, p: &Problem) {
    let b = reference::backward(&p.mechanism, &p.shape, &p.inputs(), &p.mask(), &p.dout).unwrap();
    let what = |name: &str| format!("{what}, {name}");
    check(&what("dq"), p, &b.dq, |p, i, step| p.q[i] += step);
    check(&what("dv"), p, &b.dv, |p, i, step| p.v[i] += step);
    if let Some(dk) = &b.dk {
        check(&what("dk"), p, dk, |p, i, step| p.k.as_mut().unwrap()[i] += step);
    }
    let mut listed = p.mechanism.parameters();
    listed.sort();
    assert!(b.parameters.keys().copied().eq(listed), "{}", what("parameters"));
    for (&parameter, gradient) in &b.parameters {
        check_parameter(&what(parameter.name()), p, parameter, gradient);
    }
}

/// A parameter's gradient, at the f32 nearest to its default and with steps that f32 holds.
fn check_parameter(what: &str, p: &Problem, parameter: Parameter, gradient: &[f64]) {
    const STEP: f32 = 1.0 / 1024.0;
    let values = p.mechanism.parameter_default(parameter, &p.shape);
    if parameter.is_map() {
        return check_map(what, p, parameter, &values);
    }
    let at = |step: f32| {
        let mut p = p.clone();
        p.parameters.insert(parameter, values.iter().map(|x| x + step).collect());
        loss(&p)
    };
    let exact = |step: f32| values.iter().map(|x| f64::from(x + step)).sum::<f64>();
    let [near, far] = [1.0, 2.0].map(|n| at(n * STEP) - at(-n * STEP));
    let unit = (exact(STEP) - exact(-STEP)) / values.len() as f64;
    let measured = (8.0 * near - far) / (6.0 * unit);
    let got: f64 = gradient.iter().sum();
    assert!((measured - got).abs() < 2e-6 * (1.0 + got.abs() + near.abs() / unit), "{what}: {measured}, got {got}");
}

/// A map's gradient along a direction that meets its entries, near those of `values`: there and by steps that f32 holds.
fn check_map(what: &str, p: &Problem, parameter: Parameter, values: &[f32]) {
    const STEP: f32 = 1.0 / (1 << 20) as f32;
    let direction = |i: usize| ((i * i + 3 * i + 1) % 7) as f32 - 3.0;
    let at = |step: f32| {
        let entry = |(i, x): (usize, &f32)| (x * 1024.0).round() / 1024.0 + step * direction(i);
        let mut p = p.clone();
        p.parameters.insert(parameter, values.iter().enumerate().map(entry).collect());
        p
    };
    let here = at(0.0);
    let b = reference::backward(&p.mechanism, &p.shape, &here.inputs(), &p.mask(), &p.dout).unwrap();
    let gradient = &b.parameters[&parameter];
    let measured = (loss(&at(STEP)) - loss(&at(-STEP))) / f64::from(2.0 * STEP);
    let got: f64 = gradient.iter().enumerate().map(|(i, g)| g * f64::from(direction(i))).sum();
    let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt() + 1e-3;
    assert!((measured - got).abs() < 2e-6 * size * (gradient.len() as f64).sqrt(), "{what}: {measured}, got {got}");
}

#[test]
fn a_mask_that_adds_causality_is_judged_like_a_configuration_that_has_it() {
    let json = r#"{"mechanism": "composed", "normalisation": {"kind": "symmetric"}}"#;
    let mechanism = Mechanism::from_json(json).unwrap();
    let p = problem(mechanism.clone(), Shape::square(1, 1, 4, 4), 1);
    let mask = Mask { causal: true, ..Mask::NONE };
    let error = reference::forward(&mechanism, &p.shape, &p.inputs(), &mask).unwrap_err();
    assert!(matches!(error, Error::Unsupported { what: "causal with symmetric", .. }), "{error}");
}
