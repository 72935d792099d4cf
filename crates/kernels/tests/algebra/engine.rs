//! The engine of compositions against the presets' references, on compositions that are the same operator but no preset.

use crate::support;

use resolvent_kernels::{Error, Extras, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy, Tol};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

/// A preset, and the score, structure, normalisation and decay of it; one hop as `hops` of one, which no preset has.
const SAME: &[(&str, &str)] = &[
    (r#""mechanism": "softmax""#, r#""score": {"kind": "dot-exp"}"#),
    (r#""mechanism": "softmax", "causal": true"#, r#""score": {"kind": "dot-exp"}, "causal": true"#),
    (r#""mechanism": "softmax", "tied": true"#, r#""score": {"kind": "dot-exp"}, "tied": true"#),
    (
        r#""mechanism": "infsa", "gamma": 1, "eps": 0.125"#,
        r#""score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius", "eps": 0.125}"#,
    ),
    (
        r#""mechanism": "infsa", "gamma": 1, "eps": 0.125, "activation": "gelu", "causal": true"#,
        r#""score": {"kind": "dot-gelu"}, "normalisation": {"kind": "frobenius", "eps": 0.125}, "causal": true"#,
    ),
    (
        r#""mechanism": "infsa", "gamma": 1, "eps": 0.125, "activation": "abs", "tied": true"#,
        r#""score": {"kind": "dot-abs"}, "normalisation": {"kind": "frobenius", "eps": 0.125}, "tied": true"#,
    ),
    (r#""mechanism": "fna", "kappa": 3"#, r#""score": {"kind": "levy", "kappa": 3}"#),
    (r#""mechanism": "fna", "alpha": 2, "causal": true"#, r#""score": {"kind": "levy", "alpha": 2}, "causal": true"#),
    (
        r#""mechanism": "fna", "kernel": "student", "kappa": 2.5, "tied": true"#,
        r#""score": {"kind": "student", "kappa": 2.5}, "tied": true"#,
    ),
    (
        r#""mechanism": "fna", "manifold": "sphere", "intrinsic_dim": 4"#,
        r#""score": {"kind": "levy", "manifold": "sphere", "intrinsic_dim": 4}"#,
    ),
    (
        r#""mechanism": "fna", "norm_exponent": 0.75"#,
        r#""score": {"kind": "levy"}, "normalisation": {"kind": "row", "density_exponent": 0.75}"#,
    ),
    (
        r#""mechanism": "fna", "norm_exponent": -1, "causal": true"#,
        r#""score": {"kind": "levy"}, "normalisation": {"kind": "row", "density_exponent": -1}, "causal": true"#,
    ),
    (
        r#""mechanism": "laplacian-exact", "whitening": "none", "centering": "none", "bias_one_over_n": false"#,
        r#""score": {"kind": "laplacian"}, "normalisation": {"kind": "none"}"#,
    ),
    (
        r#""mechanism": "laplacian-exact", "whitening": "none", "centering": "none", "bias_one_over_n": false, "weight_scale": "inv-n", "causal": true"#,
        r#""score": {"kind": "laplacian"}, "normalisation": {"kind": "none", "factor": "inv-n"}, "causal": true"#,
    ),
    (
        r#""mechanism": "soft", "landmarks": {"kind": "all"}"#,
        r#""score": {"kind": "gaussian"}, "normalisation": {"kind": "none"}, "tied": true"#,
    ),
    (
        r#""mechanism": "soft-pp", "landmarks": {"kind": "all"}"#,
        r#""score": {"kind": "gaussian"}, "normalisation": {"kind": "symmetric"}, "tied": true"#,
    ),
    (
        r#""mechanism": "ssa", "clusters": 4, "samples": 3"#,
        r#""structure": {"kind": "clustered", "clusters": 4, "samples": 3}"#,
    ),
    (
        r#""mechanism": "ssa", "clusters": 5, "estimator": "centroid", "global_tokens": 1, "routes": 2"#,
        r#""structure": {"kind": "clustered", "clusters": 5, "estimator": "centroid", "global_tokens": 1, "routes": 2}"#,
    ),
    (
        r#""mechanism": "ssa", "clusters": 3, "samples": 2, "causal": true, "balance": null"#,
        r#""structure": {"kind": "clustered", "clusters": 3, "samples": 2, "balance": null}, "causal": true"#,
    ),
];

fn check(preset: &str, composed: &str, shape: Shape, seed: u64) {
    let preset = Mechanism::from_json(&format!("{{{preset}}}")).unwrap();
    let composed = Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {composed}}}"#)).unwrap();
    let mut p = problem(preset, shape, seed);
    if seed.is_multiple_of(2) {
        p.key_mask = Some((0..shape.batch * shape.seq_kv).map(|n| n % 5 != 3).collect());
        p.query_mask = p.key_mask.clone();
    }
    p.fix_plan();
    let expected = p.reference();
    let p = Problem { mechanism: composed, ..p };
    let mut got = p.fused();
    got.retain(|name, _| expected.contains_key(name));
    let mut expected = expected;
    expected.remove("lse");
    got.remove("lse");
    expected.retain(|name, _| got.contains_key(name));
    let what = format!("{:?} on {shape:?}", p.mechanism);
    assert_solution(&what, &got, &expected, &shape, Tol::f32(&p.mechanism).with_noise(1.0));
}

#[test]
fn compositions_are_the_presets_that_they_equal() {
    for (n, (preset, composed)) in SAME.iter().enumerate() {
        for (seq, dim) in [(6, 4), (33, 5), (70, 8), (150, 16)] {
            let shape = Shape { value_dim: dim + 1, ..Shape::square(2, 2, seq, dim) };
            let composed = format!(r#"{composed}, "series": {{"kind": "hops", "count": 1}}"#);
            check(preset, &composed, shape, (n + seq) as u64);
        }
    }
}

#[test]
fn the_resolvent_of_a_wide_window_is_that_of_all() {
    let preset = r#""mechanism": "infsa-resolvent", "eps": 0.125, "gamma": 0.8"#;
    let composed = r#""score": {"kind": "dot-relu"}, "structure": {"kind": "dense", "window": 1000},
        "normalisation": {"kind": "frobenius", "eps": 0.125}, "series": {"kind": "resolvent", "gamma": 0.8}"#;
    for (seq, seed) in [(5, 1), (40, 2), (66, 3), (66, 4)] {
        check(preset, composed, Shape { value_dim: 6, ..Shape::square(2, 2, seq, 4) }, seed);
    }
}

/// What a fused call saved.
fn saved(json: &str, p: &Problem) -> (Operator, Vec<f32>) {
    let mechanism = Mechanism::from_json(&format!("{{{json}}}")).unwrap();
    let op = Operator::new(&mechanism, p.shape, false, Strategy::Fused).unwrap();
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let [q, k, v] = [&p.q, p.k.as_ref().unwrap(), &p.v].map(|x| narrow(x));
    let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
    let mask = Mask { key: p.key_mask.as_deref(), query: p.query_mask.as_deref(), ..Mask::NONE };
    let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
    op.forward(&inputs, &mask, &mut out, &mut stats, &mut Scratch::default()).unwrap();
    (op, stats)
}

/// The sums of rows that a fused call saved.
fn lse(json: &str, p: &Problem) -> Option<Vec<f32>> {
    let (op, stats) = saved(json, p);
    op.lse(&stats).map(<[f32]>::to_vec)
}

/// Of every structure that a resolvent goes over.
#[test]
fn solvers_of_compositions_tell_how_they_ended() {
    let p = problem(Mechanism::from_json(r#"{"mechanism": "softmax"}"#).unwrap(), Shape::square(2, 2, 40, 5), 3);
    for structure in [r#""dense""#, r#"{"kind": "clustered", "clusters": 3, "estimator": "centroid"}"#, r#""features""#]
    {
        let ended = |series: &str| {
            let json = format!(r#""mechanism": "composed", "structure": {structure}, "series": {series}"#);
            let (op, stats) = saved(&json, &p);
            op.convergence(&stats)
        };
        assert_eq!(ended(r#""one-hop""#), None, "{structure}");
        let [short, long] =
            [0.3, 0.95].map(|gamma| ended(&format!(r#"{{"kind": "resolvent", "gamma": {gamma}}}"#)).unwrap());
        assert_eq!((short.len(), long.len()), (4, 4), "{structure}");
        for (short, long) in short.iter().zip(&long) {
            assert!((1..long.iterations).contains(&short.iterations), "{structure}: {short:?}, {long:?}");
            assert!(short.bound <= 1e-5 && long.bound <= 1e-4, "{structure}: {short:?}, {long:?}");
        }
    }
}

/// Heads end by themselves, and a limit that is reached ends the call.
#[test]
fn every_head_is_solved_until_it_is() {
    let series =
        |more: &str| format!(r#""mechanism": "composed", "series": {{"kind": "resolvent", "gamma": 0.9{more}}}"#);
    let mut p = problem(Mechanism::from_json(r#"{"mechanism": "softmax"}"#).unwrap(), Shape::square(1, 2, 40, 5), 3);
    p.v[40 * 5..].fill(0.0);
    let (op, stats) = saved(&series(""), &p);
    let [first, second] = op.convergence(&stats).unwrap()[..] else { panic!("two heads") };
    assert_eq!(second.iterations, 1);
    assert!(first.iterations > 3, "{first:?}");

    let mut limited = |iterations: usize| {
        p.mechanism =
            Mechanism::from_json(&format!("{{{}}}", series(&format!(r#", "max_iter": {iterations}"#)))).unwrap();
        p.solve::<f32>(Strategy::Fused, None)
    };
    let Err(Error::NotConverged { iterations, residual, tol, .. }) = limited(3) else { panic!("a limit of three") };
    assert!(iterations == 3 && residual > tol, "{iterations}, {residual}");
    // Backward goes from other gradients and may need another step or two.
    limited(first.iterations + 10).unwrap();
}

/// A head without a decay stands beside one with it.
#[test]
fn every_head_has_its_own_decay() {
    for score in ["dot-exp", "dot-relu", "levy"] {
        let json = format!(
            r#"{{"mechanism": "composed", "score": "{score}", "normalisation": "row", "series": {{"kind": "one-hop", "gamma": 0.5}},
                "structure": {{"kind": "dense", "window": 9}}}}"#
        );
        // Of one token and channel a head is a single number.
        for shape in [Shape::square(1, 2, 20, 6), Shape { value_dim: 1, ..Shape::square(1, 2, 1, 6) }] {
            let mut p = problem(Mechanism::from_json(&json).unwrap(), shape, 5);
            for gamma in [[1.0, 0.25], [0.25, 1.0], [1.0, 1.0]] {
                p.set_gamma(gamma.to_vec());
                assert_solution(&json, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
            }
        }
    }
}

#[test]
fn rows_tell_their_sums() {
    let softmax = Mechanism::from_json(r#"{"mechanism": "softmax"}"#).unwrap();
    let mut p = problem(softmax, Shape::square(2, 2, 70, 5), 3);
    p.key_mask = Some((0..140).map(|n| n % 5 != 3).collect());
    p.query_mask = Some((0..140).map(|n| n % 7 != 2).collect());
    let wanted = lse(r#""mechanism": "softmax""#, &p).unwrap();
    // A window that holds all tokens: no preset, but the same rows.
    let wide = r#""mechanism": "composed", "score": {"kind": "dot-exp"}, "structure": {"kind": "dense", "window": 70}"#;
    for (n, (got, wanted)) in lse(wide, &p).unwrap().iter().zip(&wanted).enumerate() {
        assert!(got == wanted || (got - wanted).abs() < 1e-5, "row {n}: {got}, not {wanted}");
    }
    assert_eq!(lse(&format!(r#"{wide}, "series": {{"kind": "hops", "count": 2}}"#), &p), None, "several hops");
    let linear = r#""mechanism": "composed", "score": {"kind": "dot-relu"}"#;
    assert_eq!(lse(linear, &p), None, "sums of affinities are no log-sum-exp");
}

/// More columns than are worked on at a time, and more blocks than a task has.
#[test]
fn long_rows_are_summed_in_parts() {
    let compositions = [
        r#""score": {"kind": "dot-exp"}, "structure": {"kind": "dense", "window": 600, "sinks": 3}, "causal": true"#,
        r#""score": {"kind": "dot-squared-relu"}, "normalisation": {"kind": "frobenius"}"#,
        r#""score": {"kind": "cosine-exp"}, "normalisation": {"kind": "symmetric"}"#,
        r#""score": {"kind": "gaussian"}, "normalisation": {"kind": "row", "density_exponent": 0.5}"#,
        r#""structure": {"kind": "clustered", "clusters": 5, "samples": 9}, "score": {"kind": "levy", "kappa": 4}"#,
    ];
    for (seed, composed) in compositions.into_iter().enumerate() {
        let mechanism = Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {composed}}}"#)).unwrap();
        let shape = Shape { value_dim: 48, ..Shape::square(1, 1, 1100, 64) };
        let mut p = problem(mechanism, shape, seed as u64);
        p.key_mask = Some((0..1100).map(|n| n % 11 != 3).collect());
        p.query_mask = p.key_mask.clone();
        p.fix_plan();
        let got = p.solve::<f32>(Strategy::Fused, None).unwrap();
        let tol = Tol::f32(&p.mechanism).with_noise(1.0);
        assert_solution(composed, &got, &p.reference(), &shape, tol);
    }
}

/// Affinities that nothing is divided by while they are summed, times values that have no room beside them in f32, or no digits.
#[test]
fn large_and_small_affinities_and_values_keep_their_digits() {
    let compositions = [
        r#""score": {"kind": "dot-relu"}"#,
        r#""score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius", "eps": 1e-30}, "causal": true"#,
        r#""score": {"kind": "dot-abs"}, "normalisation": {"kind": "frobenius", "eps": 1e-30}"#,
    ];
    for (tokens, values) in [(1e6, 1e28), (1e-6, 1e-20)] {
        for (seed, composed) in compositions.into_iter().enumerate() {
            let mechanism = Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {composed}}}"#)).unwrap();
            let mut p = problem(mechanism, Shape::square(1, 2, 70, 8), seed as u64);
            p.q.iter_mut().chain(p.k.as_mut().unwrap()).for_each(|x| *x *= tokens);
            p.v.iter_mut().for_each(|x| *x *= values);
            let p = p.rounded::<f32>().unwrap();
            let got = p.solve::<f32>(Strategy::Fused, None).unwrap();
            let only_out = |mut solution: support::problem::Solution| {
                solution.retain(|name, _| *name == "out");
                solution
            };
            assert_solution(composed, &only_out(got), &only_out(p.reference()), &p.shape, Tol::f32(&p.mechanism));
        }
    }
}

/// Many queries of a single key, whose gradients are summed over tasks.
#[test]
fn a_single_key_takes_gradients_of_all_queries() {
    let shape = Shape { batch: 1, heads: 1, seq_q: 3000, seq_kv: 1, head_dim: 4, value_dim: 3 };
    let p = problem(Mechanism::preset("sigmoid").unwrap(), shape, 2);
    assert_solution("sigmoid", &p.fused(), &p.reference(), &shape, Tol::f32(&p.mechanism));
}

/// How long a solver goes on for later rows, and how large these are, is nothing to earlier ones.
#[test]
fn a_solver_of_causal_rows_knows_no_future() {
    let (shape, known) = (Shape::square(1, 2, 40, 8), 12);
    for (score, structure) in [
        (r#"{"kind": "constant"}"#, r#"{"kind": "dense"}"#),
        (r#"{"kind": "dot-exp"}"#, r#"{"kind": "dense", "window": 7}"#),
        (r#"{"kind": "levy", "kappa": 1}"#, r#"{"kind": "dense"}"#),
        (r#"{"kind": "dot-exp"}"#, r#"{"kind": "features", "map": "elu"}"#),
    ] {
        let json = format!(
            r#"{{"mechanism": "composed", "score": {score}, "structure": {structure}, "series": {{"kind": "resolvent", "gamma": 0.9}}, "causal": true}}"#
        );
        let mut p = problem(Mechanism::from_json(&json).unwrap(), shape, 5);
        let past = |p: &Problem| -> Vec<f64> {
            let of_head = shape.seq_q * shape.value_dim;
            p.fused()["out"].chunks(of_head).flat_map(|head| head[..known * shape.value_dim].to_vec()).collect()
        };
        let before = past(&p);
        for (x, size) in [(&mut p.q, -1.0), (p.k.as_mut().unwrap(), 0.5), (&mut p.v, 1e5)] {
            let later = x.iter_mut().enumerate().filter(|(n, _)| n / shape.head_dim % shape.seq_q >= known);
            later.for_each(|(_, x)| *x *= size);
        }
        assert_eq!(past(&p), before, "{json}");
    }
}
