//! The f64 reference as a composition: presets are their values, series are made of hops, and nothing that is masked, hidden or
//! later enters.

use crate::support;

use resolvent_kernels::{
    Error, Mechanism, Shape,
    mechanism::{Constant, Dense, Series, Structure},
    reference::{self, Forward},
};
use support::{
    problem::Problem,
    random::{mechanisms, problem},
};

fn forward(p: &Problem) -> Forward {
    reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap()
}

fn parsed(parts: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {parts}}}"#)).unwrap()
}

/// The largest difference, relative to the largest entry.
fn apart(x: &[f64], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    let size = x.iter().chain(y).fold(1e-300, |most: f64, x| most.max(x.abs()));
    x.iter().zip(y).map(|(x, y)| (x - y).abs() / size).fold(0.0, f64::max)
}

const SCORES: &[&str] = &[
    r#"{"kind": "dot-exp", "softcap": 2.0}"#,
    r#"{"kind": "cosine-exp", "scale": 2.0}"#,
    r#"{"kind": "dot-relu"}"#,
    r#"{"kind": "dot-gelu"}"#,
    r#"{"kind": "dot-sigmoid"}"#,
    r#"{"kind": "gaussian"}"#,
    r#"{"kind": "levy", "kappa": 3.0}"#,
    r#"{"kind": "dot-exp"}"#,
];

const STRUCTURES: &[&str] = &[
    r#"{"kind": "dense"}"#,
    r#"{"kind": "dense", "window": 3, "sinks": 1}"#,
    r#"{"kind": "clustered", "clusters": 3, "estimator": "centroid", "balance": null}"#,
    r#"{"kind": "clustered", "clusters": 3, "samples": 2, "balance": null}"#,
    r#"{"kind": "clustered", "clusters": 3, "samples": 2, "causal_clusters": {"kind": "block", "size": 4}, "balance": null}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 3}, "inverse": "cholesky", "ridge": 0.25}"#,
    r#"{"kind": "features"}"#,
    r#"{"kind": "features", "map": "favor", "count": 5}"#,
];

const NORMALISATIONS: &[&str] = &[
    r#"{"kind": "row"}"#,
    r#"{"kind": "row", "density_exponent": 0.5}"#,
    r#"{"kind": "frobenius", "eps": 0.125}"#,
    r#"{"kind": "symmetric"}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25}"#,
    r#"{"kind": "whitened", "whitening": "none", "centering": "per-query"}"#,
    r#"{"kind": "none", "factor": "inv-n"}"#,
];

/// A problem of every score, structure and normalisation that go together with `rest`, with masks of keys and queries apart.
fn problems(rest: &str, causal: bool) -> Vec<(String, Problem)> {
    let mut problems = Vec::new();
    let parts = |score, structure, normalisation| {
        format!(
            r#"{{"mechanism": "composed", "causal": {causal}, "score": {score}, "structure": {structure},
                "normalisation": {normalisation}, {rest}}}"#
        )
    };
    for (n, score) in SCORES.iter().enumerate() {
        for structure in STRUCTURES {
            for normalisation in NORMALISATIONS {
                let json = parts(score, structure, normalisation);
                let mechanism = match Mechanism::from_json(&json) {
                    Ok(mechanism) => mechanism,
                    Err(Error::Unsupported { .. }) => continue,
                    Err(other) => panic!("{json}: {other}"),
                };
                let shape = Shape { value_dim: 3, ..Shape::square(1, 2, 9, 4) };
                if mechanism.check(&shape, false).is_err() {
                    continue;
                }
                let mut p = problem(mechanism, shape, n as u64);
                p.key_mask = Some((0..9).map(|n| n % 6 != 2).collect());
                p.query_mask = Some((0..9).map(|n| n % 5 != 3).collect());
                p.fix_plan();
                problems.push((json, p));
            }
        }
    }
    problems
}

const ONE_HOP: &str = r#""series": {"kind": "one-hop"}"#;

#[test]
fn presets_are_their_values() {
    let mut same = 0;
    for (n, mechanism) in mechanisms().into_iter().enumerate() {
        let values = mechanism.values();
        let shape = Shape { value_dim: 3, ..Shape::square(2, 2, 8, 4) };
        if values.check(&shape, false).is_err() || values.parameters().iter().any(|p| p.required()) {
            continue; // pooled weights, degrees of landmarks where there are none, and filters, which presets lay out as papers do
        }
        let mut p = problem(mechanism, shape, n as u64);
        if p.mechanism.parameters().iter().any(|p| p.required()) {
            continue; // a filter of the values beside the whole kernel
        }
        p.key_mask = Some((0..16).map(|n| n % 5 != 1).collect());
        p.query_mask = p.key_mask.clone();
        p.fix_plan();
        let q = Problem { mechanism: values, ..p.clone() };
        assert!(apart(forward(&p).weights(), forward(&q).weights()) <= 1e-12, "{:?}", p.mechanism);
        let (preset, values) = (p.reference(), q.reference());
        for (name, gradient) in &preset {
            if *name != "lse" {
                assert!(apart(gradient, &values[name]) <= 1e-12, "{:?}, {name}", p.mechanism);
            }
        }
        same += 1;
    }
    println!("{same} presets are their values");
    assert!(same >= 45);
}

#[test]
fn the_mean_is_a_row_of_equal_affinities() {
    for causal in [false, true] {
        let uniform = Mechanism::from_json(&format!(r#"{{"mechanism": "uniform", "causal": {causal}}}"#)).unwrap();
        let p = problem(uniform, Shape::square(1, 2, 7, 3), 1);
        let equal = Mechanism::new(Constant {}).structure(Dense::default()).with_causal(causal);
        let q = Problem { mechanism: equal, ..p.clone() };
        assert_eq!(forward(&p).out, forward(&q).out);
        assert_eq!(forward(&p).lse, None);
    }
}

/// `sum of (gamma W)^t`, and `T = gamma W (I + T)`, with the weights `W` of one hop.
#[test]
fn series_are_sums_of_hops() {
    let times = |x: &[f64], y: &[f64], n: usize| -> Vec<f64> {
        let entry = |i: usize, j: usize| (0..n).map(|l| x[i * n + l] * y[l * n + j]).sum();
        (0..n * n).map(|at| entry(at / n, at % n)).collect()
    };
    let (gamma, mut resolvents, mut hops) = (0.5, 0, 0);
    for causal in [false, true] {
        for (json, p) in problems(ONE_HOP, causal) {
            let hop = forward(&p);
            for series in [r#"{"kind": "hops", "count": 3, "gamma": 0.5}"#, r#"{"kind": "resolvent", "gamma": 0.5}"#] {
                let of = parsed(&format!(r#""series": {series}"#));
                let mechanism = p.mechanism.clone().series(of.series.clone());
                if mechanism.check(&p.shape, false).is_err() {
                    continue;
                }
                let all = forward(&Problem { mechanism, ..p.clone() });
                for (w, t) in hop.weights().chunks(81).zip(all.weights().chunks(81)) {
                    let hop: Vec<f64> = w.iter().map(|w| gamma * w).collect();
                    let plus = |x: &[f64]| x.iter().zip(&hop).map(|(x, w)| x + w).collect::<Vec<f64>>();
                    let expected = match &of.series {
                        Series::Hops(_) => plus(&times(&hop, &plus(&times(&hop, &hop, 9)), 9)),
                        _ => plus(&times(&hop, t, 9)),
                    };
                    assert!(apart(t, &expected) < 1e-12, "{json} with {series}");
                }
                *(if let Series::Hops(_) = of.series { &mut hops } else { &mut resolvents }) += 1;
            }
        }
    }
    println!("{hops} hops, {resolvents} resolvents");
    assert!(hops > 300 && resolvents > 100);
}

#[test]
fn what_is_masked_changes_nothing() {
    for series in [ONE_HOP, r#""series": {"kind": "hops"}"#, r#""series": {"kind": "resolvent"}"#] {
        for (json, p) in problems(series, false).into_iter().chain(problems(series, true)) {
            let mut poisoned = p.clone();
            let (keep_key, keep_query) = (p.key_mask.clone().unwrap(), p.query_mask.clone().unwrap());
            let poison = |x: &mut [f64], keep: &[bool], dim: usize| {
                for (row, _) in x.chunks_mut(dim).zip(keep.iter().cycle()).filter(|(_, keep)| !**keep) {
                    row.fill(f64::NAN);
                }
            };
            poison(&mut poisoned.q, &keep_query, 4);
            poison(poisoned.k.as_mut().unwrap(), &keep_key, 4);
            poison(&mut poisoned.v, &keep_key, 3);
            poison(&mut poisoned.dout, &keep_query, 3);
            assert_eq!(p.reference(), poisoned.reference(), "{json}");
        }
    }
}

#[test]
fn the_future_changes_nothing() {
    let (now, mut met) = (5, 0);
    for series in [ONE_HOP, r#""series": {"kind": "hops"}"#, r#""series": {"kind": "resolvent"}"#] {
        // Tokens of a block see each other.
        for (json, p) in problems(series, true).into_iter().filter(|(json, _)| !json.contains("block")) {
            let mut other = p.clone();
            let later = |x: &mut [f64], dim: usize| {
                x.chunks_mut(9 * dim).for_each(|slice| slice[now * dim..].iter_mut().for_each(|x| *x = 1.5 - 2.0 * *x));
            };
            later(&mut other.q, 4);
            later(other.k.as_mut().unwrap(), 4);
            later(&mut other.v, 3);
            let past = |p: &Problem| -> Vec<f64> {
                forward(p).out.chunks(9 * 3).flat_map(|slice| slice[..now * 3].to_vec()).collect()
            };
            assert!(apart(&past(&p), &past(&other)) < 1e-12, "{json}");
            met += 1;
        }
    }
    assert!(met > 100);
}

/// A hidden pair is absent from the statistics of its key: where all that are seen are equal, nothing is left but the bias.
#[test]
fn statistics_are_over_pairs_that_meet() {
    let json = r#""score": {"kind": "constant"}, "structure": {"kind": "dense", "window": 2},
        "normalisation": {"kind": "whitened"}"#;
    let p = problem(parsed(json), Shape::square(1, 1, 6, 2), 1);
    for (i, row) in forward(&p).weights().chunks(6).enumerate() {
        let seen = if i == 0 || i == 5 { 2.0 } else { 3.0 };
        for (j, &w) in row.iter().enumerate() {
            let expected = if i.abs_diff(j) < 2 { 1.0 / seen } else { 0.0 };
            assert!((w - expected).abs() < 1e-15, "{i}, {j}: {w}");
        }
    }
}

/// The filter over the values is added to the weights of a hop, and decays with it.
#[test]
fn a_filter_over_the_values_is_part_of_a_hop() {
    let with = |width: usize, gamma: f64| {
        let json = format!(
            r#""score": {{"kind": "gaussian"}}, "structure": {{"kind": "nystrom", "ridge": 0.25, "value_conv": {width}}},
            "normalisation": {{"kind": "row"}}, "series": {{"kind": "one-hop", "gamma": {gamma}}}"#
        );
        let mut p = problem(parsed(&json), Shape::square(1, 1, 8, 3), 2);
        p.key_mask = Some((0..8).map(|n| n != 3).collect());
        p.query_mask = Some((0..8).map(|n| n != 5).collect());
        p
    };
    let added = |gamma: f64| {
        let (filtered, plain) = (forward(&with(3, gamma)), forward(&with(0, gamma)));
        filtered.weights().iter().zip(plain.weights()).map(|(x, y)| x - y).collect::<Vec<f64>>()
    };
    let once = added(1.0);
    assert!(once.iter().any(|x| x.abs() > 0.1));
    assert!((0..8).all(|n| once[n * 8 + 3] == 0.0 && once[5 * 8 + n] == 0.0));
    let half: Vec<f64> = once.iter().map(|x| 0.5 * x).collect();
    assert!(apart(&half, &added(0.5)) < 1e-13);
}

/// A signed row sum that cancels divides by its floor, through which gradients flow too.
#[test]
fn a_row_sum_at_its_floor_has_the_gradient_of_the_floor() {
    let json = r#""score": {"kind": "gaussian", "scale": 1.0}, "normalisation": {"kind": "row"},
        "structure": {"kind": "nystrom", "landmarks": {"kind": "first", "count": 2}, "inverse": "cholesky", "ridge": 0}"#;
    let shape = Shape { seq_q: 1, ..Shape::square(1, 1, 4, 1) };
    let mut p = problem(parsed(json), shape, 1);
    assert!(matches!(p.mechanism.values().structure, Structure::Nystrom(_)));
    // Two near landmarks, and keys beyond the first: the second has a negative weight.
    (p.k, p.v, p.dout) = (Some(vec![0.0, 0.5, -0.5, -1.0]), vec![1.0, -0.5, 0.25, 2.0], vec![1.0]);
    let weight = |q: f64| forward(&Problem { q: vec![q], ..p.clone() }).weights()[0];
    // The sum changes its sign between these.
    let (mut low, mut high) = (0.0, 6.0);
    assert!(weight(low) * weight(high) < 0.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if weight(middle) * weight(low) > 0.0 { low = middle } else { high = middle }
    }
    // On one side of the jump.
    let q = high + 1e-5;
    assert!((weight(q + 1e-6) / weight(q) - 1.0).abs() < 1e-3, "it is at the floor");
    p.q = vec![q];
    let b = reference::backward(&p.mechanism, &p.shape, &p.inputs(), &p.mask(), &p.dout).unwrap();
    let out = |shift: &dyn Fn(&mut Problem, f64), step: f64| {
        let mut p = p.clone();
        shift(&mut p, step);
        forward(&p).out[0]
    };
    let check = |what: &str, got: f64, shift: &dyn Fn(&mut Problem, f64)| {
        let step = 1e-8;
        let measured = (out(shift, step) - out(shift, -step)) / (2.0 * step);
        let size = out(shift, 0.0).abs() + got.abs();
        assert!((measured - got).abs() < 1e-5 * size, "{what}: {measured}, got {got}");
    };
    check("dq", b.dq[0], &|p, step| p.q[0] += step);
    for (j, &got) in b.dk.unwrap().iter().enumerate() {
        check("dk", got, &|p, step| p.k.as_mut().unwrap()[j] += step);
    }
}

#[test]
fn a_length_scale_that_a_rule_leaves_out_of_range_is_refused() {
    let m = parsed(r#""score": {"kind": "levy", "manifold": "sphere", "intrinsic_dim": 0.001}"#);
    let error = m.check(&Shape::square(1, 1, 4, 3), false).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { field: "kappa", .. }), "{error}");
}

#[test]
fn degrees_of_all_tokens_are_values_that_compose() {
    let preset = Mechanism::from_json(r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}}"#).unwrap();
    let p = problem(preset, Shape::square(1, 2, 7, 3), 3);
    let values = Problem { mechanism: p.mechanism.values(), ..p.clone() };
    values.mechanism.check(&p.shape, false).unwrap();
    assert!(apart(forward(&p).weights(), forward(&values).weights()) <= 1e-12);
}

/// What differs between landmarks that coincide nobody sees, and every step would double what rounding leaves in it.
#[test]
fn landmarks_that_coincide_are_as_one_after_any_steps() {
    for (init, gradient) in [("null", "implicit"), ("null", "unrolled"), (r#""scaled""#, "unrolled")] {
        let of = |count: usize, inverse: &str| {
            parsed(&format!(
                r#""score": "gaussian", "structure": {{"kind": "nystrom", "landmarks": {{"kind": "first", "count": {count}}},
                    "ridge": 0.0, {inverse}}}"#
            ))
        };
        let steps = format!(r#""newton_iterations": 60, "newton_init": {init}, "gradient": "{gradient}""#);
        let mut p = problem(of(3, &steps), Shape::square(1, 1, 9, 4), 2);
        let k = p.k.as_mut().unwrap();
        k.copy_within(0..4, 4);
        let expected = {
            // The one that coincides goes behind the other, where it is no landmark.
            let mut p = problem(of(2, r#""inverse": "cholesky""#), p.shape, 2);
            let swap = |x: &mut [f64]| (4..8).for_each(|at| x.swap(at, at + 4));
            p.k.as_mut().unwrap().copy_within(0..4, 4);
            swap(p.k.as_mut().unwrap());
            swap(&mut p.v);
            let mut solution = p.reference();
            swap(solution.get_mut("dv").unwrap());
            solution
        };
        let got = p.reference();
        for name in ["out", "dq", "dv"] {
            assert!(apart(&got[name], &expected[name]) < 1e-9, "{init}, {gradient}, {name}");
        }
    }
}
