//! Products of bf16: how far from f64, on every unit that the processor has, and what is told of them.

use crate::{naive, naive_features, support, threads};

use half::bf16;
use naive::Naive;
use resolvent_kernels::{
    Dropout, Element, Error, Extras, Inputs, Mask, Mechanism, Operator, Parameter, Plan, Precision, Scratch, Shape,
    Strategy, Tol,
    mechanism::{Bias, Normalisation, Structure},
    relative_distance,
    simd::{Bf16Unit, Level},
};
use support::{
    problem::{Problem, Solution, assert_solution},
    random::problem,
};
use threads::on_threads;

/// Every way to multiply bf16 that there is here.
fn units() -> Vec<(Level, Bf16Unit)> {
    let of = |level| Bf16Unit::available(level).into_iter().map(move |unit| (level, unit));
    Level::available().into_iter().flat_map(of).collect()
}

fn operator(p: &Problem, unit: (Level, Bf16Unit)) -> Operator {
    operator_in(Precision::Bf16, p, unit)
}

fn operator_in(precision: Precision, p: &Problem, (level, unit): (Level, Bf16Unit)) -> Operator {
    let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Auto).unwrap().with_level(level).unwrap();
    op.with_precision(precision).with_bf16_unit(unit).unwrap()
}

fn solve(p: &Problem, unit: (Level, Bf16Unit)) -> Solution {
    p.solve_by::<f32>(&operator(p, unit)).unwrap()
}

fn masked(mut p: Problem) -> Problem {
    p.key_mask = Some((0..p.shape.batch * p.shape.seq_kv).map(|i| i * i % 7 < 5).collect());
    p.query_mask = Some((0..p.shape.batch * p.shape.seq_q).map(|i| i * i % 11 < 6).collect());
    p
}

/// The relative distance; 0 where nothing but the rounding of f32 is left of terms that cancel, as of a single pair's gradient.
fn far(got: &[f64], expected: &[f64]) -> f64 {
    let error = got.iter().zip(expected).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
    if error < 1e-12 * got.len() as f64 { 0.0 } else { relative_distance(got, expected) }
}

/// A problem with a bias where its mechanism is given one.
fn biased(mechanism: Mechanism, shape: Shape, seed: u64) -> Problem {
    let mut p = problem(mechanism, shape, seed);
    if p.mechanism.requires(Parameter::Bias, &p.shape) {
        let bias =
            (0..p.mechanism.parameter_len(Parameter::Bias, &p.shape)).map(|n| (n * 37 % 101) as f32 / 64.0 - 0.8);
        let masks = matches!(p.mechanism.bias, Some(Bias::Tensor(_)));
        let absent = |(n, x)| if masks && n % 9 == 4 { f32::NEG_INFINITY } else { x };
        p.parameters.insert(Parameter::Bias, bias.enumerate().map(absent).collect());
    }
    p
}

/// What runs in bf16: of the presets, and of compositions by their engine.
const NAIVE: &[&str] = &[
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "softmax", "tied": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125}"#,
    r#"{"mechanism": "infsa", "causal": true}"#,
    r#"{"mechanism": "infsa", "causal": true, "activation": "abs"}"#,
    r#"{"mechanism": "infsa", "causal": true, "structure": {"kind": "dense", "window": 30}}"#,
    r#"{"mechanism": "fna"}"#,
    r#"{"mechanism": "fna", "causal": true}"#,
    r#"{"mechanism": "fna", "tied": true, "kappa": 8, "intrinsic_dim": 6}"#,
    r#"{"mechanism": "fna", "kernel": "student", "kappa": 3, "intrinsic_dim": 4}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "kappa": 2, "intrinsic_dim": 4}"#,
    r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#,
    r#"{"mechanism": "softmax", "bias": {"kind": "tensor", "heads": false, "queries": false}, "causal": true}"#,
    r#"{"mechanism": "local", "window": 20, "sinks": 3, "causal": true}"#,
    r#"{"mechanism": "cosine"}"#,
    r#"{"mechanism": "cosine", "tied": true}"#,
    r#"{"mechanism": "sigmoid"}"#,
    r#"{"mechanism": "sigmoid", "causal": true, "bias": {"kind": "tensor", "heads": false}}"#,
    r#"{"mechanism": "relu"}"#,
    r#"{"mechanism": "relu", "structure": {"kind": "dense", "window": 30}}"#,
    r#"{"mechanism": "composed"}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-abs"}, "normalisation": {"kind": "frobenius", "eps": 0.125}}"#,
    r#"{"mechanism": "performer"}"#,
    r#"{"mechanism": "performer", "causal": true}"#,
    r#"{"mechanism": "performer", "structure": {"kind": "features", "map": "favor", "count": 40}}"#,
];

/// What a naive implementation makes of a problem.
fn naively(p: &Problem, stored: bool, parts: usize) -> Solution {
    match p.mechanism.values().structure {
        Structure::Features(_) => naive_features::solution(p, stored, parts),
        _ => Naive::of(p, stored, parts).solution(),
    }
}

/// Lengths and channels on both sides of tiles, panels and vectors; masks; keys that are the queries, or others.
fn problems() -> Vec<(String, Problem)> {
    let mut all = Vec::new();
    for (n, m, d, dv) in
        [(1, 1, 4, 4), (7, 9, 8, 5), (63, 65, 12, 20), (64, 64, 64, 64), (130, 70, 40, 72), (197, 197, 64, 64)]
    {
        let shape = Shape { batch: 2, heads: 1, seq_q: n, seq_kv: m, head_dim: d, value_dim: dv };
        for json in NAIVE {
            let mechanism = Mechanism::from_json(json).unwrap();
            // What the norm leaves of a single affinity's gradient is smaller than its rounding.
            let by_norm = matches!(mechanism.normalisation, Normalisation::Frobenius(_));
            // Likewise of a single pair's features. Causal, every query sees a key, and norms are of rows from the first on.
            let of_features = matches!(mechanism.values().structure, Structure::Features(_));
            let hidden = mechanism.causal && (of_features && n > m || by_norm && n != m);
            if mechanism.tied && n != m || n == 1 && (by_norm || of_features) || hidden {
                continue;
            }
            let p = biased(mechanism, shape, n as u64);
            let what = format!("{json} on {n} x {m}, {d} and {dv} channels");
            all.push((format!("{what}, masked"), masked(p.clone())));
            all.push((what, p));
        }
    }
    all
}

#[test]
fn errors_are_at_most_twice_those_of_a_naive_computation() {
    for (what, p) in problems() {
        let (exact, naive) = (p.reference(), [false, true].map(|stored| naively(&p, stored, 1)));
        for unit in units() {
            let op = operator(&p, unit);
            let halves = p.solve_by::<bf16>(&op).unwrap();
            for ((stored, got), naive) in
                [("f32", p.solve_by::<f32>(&op).unwrap()), ("bf16", halves)].iter().zip(&naive)
            {
                for (name, naive) in naive {
                    let [got, naive] = [&got[name], naive].map(|x| far(x, &exact[name]));
                    let most = Tol::OF_NAIVE_BF16 * naive + 1e-5;
                    assert!(got <= most, "{what}, {stored}, {unit:?}, {name}: {got:.2e}, naively {naive:.2e}");
                }
            }
        }
    }
}

/// Whether distances are multiplied, which three products do not keep.
fn of_distances(json: &str) -> bool {
    json.contains(r#""fna""#)
}

#[test]
fn three_products_are_as_exact_as_operands_of_sixteen_bits() {
    for (what, p) in problems() {
        if of_distances(&what) {
            continue;
        }
        let (exact, naive) = (p.reference(), naively(&p, false, 2));
        for unit in units() {
            let op = operator_in(Precision::Bf16x3, &p, unit);
            let got = p.solve_by::<f32>(&op).unwrap();
            let full = p.solve_by::<f32>(&op.with_precision(Precision::Full)).unwrap();
            for (name, naive) in &naive {
                let (got, exact) = (&got[name], &exact[name]);
                // The gradient of a row's only pair is nothing: what is taken out of it is rounded as it is.
                if exact.iter().all(|x| x.abs() < 1e-12) {
                    assert!(got.iter().all(|x| x.abs() < 3e-6), "{what}, {unit:?}, {name}");
                    continue;
                }
                let [got, naive, full] = [got, naive, &full[name]].map(|x| relative_distance(x, exact));
                let most = Tol::OF_NAIVE_BF16 * (naive + full) + 1e-5;
                assert!(got <= most, "{what}, {unit:?}, {name}: {got:.2e}, naively {naive:.2e}, in f32 {full:.2e}");
            }
        }
    }
}

/// What no naive form above is of: other activations and decays, rows with norms of their own, densities, structured biases, pairs left
/// out at random.
const OTHERS: &[&str] = &[
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "relu"}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "abs"}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "gelu"}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "relu", "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "abs", "causal": true}"#,
    r#"{"mechanism": "infsa", "eps": 0.125, "activation": "gelu", "causal": true}"#,
    r#"{"mechanism": "fna", "alpha": 2, "kappa": 6}"#,
    r#"{"mechanism": "fna", "kappa": 4, "intrinsic_dim": 4, "norm_exponent": 0.5}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "alpha": 2, "causal": true}"#,
    r#"{"mechanism": "softmax", "bias": {"kind": "alibi"}}"#,
    r#"{"mechanism": "softmax", "bias": {"kind": "buckets"}, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "softcap": 3}, "structure": {"kind": "dense", "window": 20}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-gelu"}, "normalisation": {"kind": "none", "factor": "inv-n"}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-squared-relu"}, "normalisation": {"kind": "none"}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid", "offset": -1}, "normalisation": {"kind": "row"}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius", "eps": 0.125}, "causal": true}"#,
];

#[test]
fn everything_else_is_within_the_tolerance_of_halves() {
    let dropouts = [None, Some(Dropout::weights(0.3, 17).unwrap()), Some(Dropout::pairs(0.3, 17).unwrap())];
    let dropped = ["softmax", "fna"].map(|id| format!(r#"{{"mechanism": "{id}", "causal": true}}"#));
    let dropped = dropped.iter().flat_map(|json| dropouts.iter().map(|&dropout| (json.as_str(), dropout)));
    for (json, dropout) in OTHERS.iter().map(|&json| (json, None)).chain(dropped) {
        for (n, d) in [(70, 12), (150, 64)] {
            // On the same bits: else products near 0 may change sides, and slopes with them.
            let p = biased(Mechanism::from_json(json).unwrap(), Shape::square(2, 2, n, d), 4);
            let p = p.rounded::<bf16>().unwrap();
            for p in [masked(p.clone()), p] {
                // A density is of the tokens that are queries and keys.
                let query_mask = if json.contains("norm_exponent") { p.key_mask.clone() } else { p.query_mask.clone() };
                let p = Problem { dropout, query_mask, ..p };
                let expected = p.reference();
                for unit in units() {
                    let what = format!("{json} {dropout:?} {n} x {d}, {unit:?}");
                    let tol = Tol::HALF.with_noise(0.1);
                    let (mut got, mut expected) = (solve(&p, unit), expected.clone());
                    // A sum over all tokens that mostly cancels.
                    for solution in [&mut got, &mut expected] {
                        solution.remove("dgamma");
                    }
                    assert_solution(&what, &got, &expected, &p.shape, tol);
                }
            }
        }
    }
}

/// Units differ in the order of their sums alone.
#[test]
fn units_agree() {
    for (what, p) in problems() {
        let first = solve(&p, (Level::Portable, Bf16Unit::Widened));
        // Of features what is left of terms a thousand times as large.
        let cancels = |name: &str| name == "dscale" && matches!(p.mechanism.values().structure, Structure::Features(_));
        for unit in units() {
            for (name, got) in solve(&p, unit).into_iter().filter(|(name, _)| !cancels(name)) {
                let finite = |x: &[f64]| x.iter().map(|x| x.max(-1e30)).collect::<Vec<_>>();
                let distance = far(&finite(&got), &finite(&first[name]));
                // Sums over all pairs that mostly cancel.
                let most = if matches!(name, "dalpha" | "dkappa") { Tol::HALF.backward } else { 2e-3 };
                assert!(distance < most, "{what}, {unit:?}, {name}: {distance:.1e}");
            }
        }
    }
}

#[test]
fn masked_content_and_threads_change_no_bit() {
    for json in [
        r#"{"mechanism": "softmax"}"#,
        r#"{"mechanism": "infsa", "causal": true}"#,
        r#"{"mechanism": "fna"}"#,
        r#"{"mechanism": "local", "window": 90, "sinks": 2}"#,
        r#"{"mechanism": "sigmoid", "causal": true}"#,
        r#"{"mechanism": "performer"}"#,
        r#"{"mechanism": "performer", "causal": true}"#,
    ] {
        let mut p = masked(problem(Mechanism::from_json(json).unwrap(), Shape::square(2, 2, 300, 24), 9));
        let precisions = [Precision::Bf16, Precision::Bf16x3].into_iter().take(if of_distances(json) { 1 } else { 2 });
        let all = units().into_iter().flat_map(|unit| precisions.clone().map(move |precision| (unit, precision)));
        for (unit, precision) in all {
            let solve = |p: &Problem| p.solve_by::<f32>(&operator_in(precision, p, unit)).unwrap();
            let clean = on_threads(1, || solve(&p));
            assert_eq!(clean, on_threads(3, || solve(&p)), "{json}, {unit:?}, {precision:?}");
            let whole = p.clone();
            let (keys, queries) = (p.key_mask.clone().unwrap(), p.query_mask.clone().unwrap());
            for (x, keep) in
                [(&mut p.q, &queries), (&mut p.dout, &queries), (p.k.as_mut().unwrap(), &keys), (&mut p.v, &keys)]
            {
                for (n, row) in x.chunks_mut(24).enumerate() {
                    if !keep[n / 600 * 300 + n % 300] {
                        row.fill(f64::NAN);
                    }
                }
            }
            assert_eq!(clean, solve(&p), "{json}, {unit:?}, {precision:?}");
            p = whole;
        }
    }
}

#[test]
fn plans_tell_what_runs_and_why() {
    let op = |json: &str, strategy| {
        Operator::new(&Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 9, 8), false, strategy).unwrap()
    };
    let softmax = op(r#"{"mechanism": "softmax"}"#, Strategy::Auto);
    let plan = *softmax.plan();
    assert_eq!((plan.arithmetic.asked, plan.arithmetic.runs), (Precision::Full, Precision::Full));
    assert_eq!(plan.arithmetic.instructions, Level::selected().unwrap().name());
    for (level, unit) in units() {
        let op = softmax.clone().with_level(level).unwrap().with_precision(Precision::Bf16);
        let best = Bf16Unit::available(level).last().copied().unwrap();
        assert_eq!(op.plan().arithmetic.instructions, best.name());
        assert_eq!(op.plan().arithmetic.runs, Precision::Bf16);
        // Three products are for tiles, unless a unit is named.
        let thrice = softmax.clone().with_level(level).unwrap().with_precision(Precision::Bf16x3);
        let runs = if best == Bf16Unit::Amx { Precision::Bf16x3 } else { Precision::Full };
        assert_eq!((thrice.plan().arithmetic.asked, thrice.plan().arithmetic.runs), (Precision::Bf16x3, runs));
        let thrice = *thrice.with_bf16_unit(unit).unwrap().plan();
        assert_eq!((thrice.arithmetic.runs, thrice.arithmetic.instructions), (Precision::Bf16x3, unit.name()));
        assert!(thrice.scratch_backward > op.plan().scratch_backward);
        let op = op.with_bf16_unit(unit).unwrap();
        assert_eq!(op.plan().arithmetic.instructions, unit.name());
        // The level has the last word.
        let portable = op.with_level(Level::Portable).unwrap();
        assert_eq!(portable.plan().arithmetic.instructions, "widened");
        assert_eq!(
            *portable.with_level(Level::selected().unwrap()).unwrap().with_precision(Precision::Full).plan(),
            plan
        );
    }
    // What is rounded is held where it is rounded, and not otherwise.
    for json in NAIVE {
        let full = op(json, Strategy::Fused);
        let rounded = full.clone().with_precision(Precision::Bf16);
        let held = |plan: &Plan| {
            4 * (plan.scratch_forward + plan.scratch_backward) + plan.allocated_forward + plan.allocated_backward
        };
        assert!(held(rounded.plan()) > held(full.plan()), "{json}");
        // Backward rounds what forward does, and gradients.
        let [forward, backward] = [
            rounded.plan().allocated_forward - full.plan().allocated_forward,
            rounded.plan().allocated_backward - full.plan().allocated_backward,
        ];
        assert!(backward >= forward, "{json}: {forward}, {backward}");
        assert_eq!(rounded.with_precision(Precision::Full).plan(), full.plan(), "{json}");
    }
    for (json, strategy, why) in [
        (r#"{"mechanism": "softmax"}"#, Strategy::Reference, "f64"),
        (r#"{"mechanism": "laplacian-exact"}"#, Strategy::Auto, "f32"),
        (r#"{"mechanism": "uniform"}"#, Strategy::Auto, "f32"),
        (r#"{"mechanism": "nystromformer"}"#, Strategy::Auto, "of structures"),
        (r#"{"mechanism": "linear"}"#, Strategy::Auto, "as many features"),
        (r#"{"mechanism": "performer", "series": {"kind": "hops", "count": 2}}"#, Strategy::Auto, "one hop"),
        (r#"{"mechanism": "composed", "series": {"kind": "hops", "count": 2}}"#, Strategy::Auto, "one hop"),
        (r#"{"mechanism": "composed", "normalisation": {"kind": "symmetric"}}"#, Strategy::Auto, "sums of columns"),
        (r#"{"mechanism": "composed", "score": {"kind": "gaussian"}}"#, Strategy::Auto, "no product"),
        (r#"{"mechanism": "local"}"#, Strategy::Reference, "f64"),
        (r#"{"mechanism": "fna"}"#, Strategy::Auto, "cancel"),
    ] {
        let distances = why == "cancel";
        for precision in [Precision::Bf16, Precision::Bf16x3].into_iter().skip(usize::from(distances)) {
            let op = op(json, strategy).with_precision(precision);
            let arithmetic = op.plan().arithmetic;
            assert_eq!((arithmetic.asked, arithmetic.runs), (precision, Precision::Full), "{json}");
            assert!(arithmetic.reason.contains(why), "{json}: {}", arithmetic.reason);
            assert!(matches!(op.with_bf16_unit(Bf16Unit::Widened), Err(Error::Unsupported { .. })), "{json}");
        }
    }
    assert!(
        softmax
            .with_level(Level::Portable)
            .unwrap()
            .with_precision(Precision::Bf16)
            .with_bf16_unit(Bf16Unit::Amx)
            .is_err()
    );
}

/// A composition that is a preset runs as it does, and is refused what its engine would have to serve in f32.
#[test]
fn compositions_run_as_their_presets_or_are_refused() {
    let json = r#"{"mechanism": "composed", "score": {"kind": "levy"}, "normalisation": {"kind": "row"}}"#;
    let p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 40, 8), 3);
    let preset = Problem { mechanism: Mechanism::preset("fna").unwrap(), ..p.clone() };
    let unit = units().last().copied().unwrap();
    let outputs = [&p, &preset].map(|p| forward(p, &operator(p, unit)));
    assert_eq!(outputs[0], outputs[1]);
    // The gradient of the decay, which the preset has not.
    assert!(matches!(p.solve_by::<f32>(&operator(&p, unit)), Err(Error::Unsupported { .. })));
}

/// The output of a call with just the scratch that is planned, which does not grow.
fn forward(p: &Problem, op: &Operator) -> Vec<f32> {
    let narrow = |x: &[f64]| x.iter().map(|&x| f32::narrow(x as f32)).collect::<Vec<_>>();
    let (q, k, v) = (narrow(&p.q), narrow(p.k.as_ref().unwrap()), narrow(&p.v));
    let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
    let mut scratch = Scratch::new(op.plan().scratch_forward);
    let before = scratch.len();
    let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
    op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut scratch).unwrap();
    assert_eq!(scratch.len(), before);
    out
}

#[test]
fn scratch_is_as_planned() {
    for (n, m) in [(5, 300), (300, 5), (257, 129)] {
        let shape = Shape { batch: 1, heads: 2, seq_q: n, seq_kv: m, head_dim: 20, value_dim: 33 };
        for id in ["softmax", "fna", "performer"] {
            let p = problem(Mechanism::preset(id).unwrap(), shape, 1);
            let unit = units().last().copied().unwrap();
            forward(&p, &operator(&p, unit));
            if id != "fna" {
                forward(&p, &operator_in(Precision::Bf16x3, &p, unit));
            }
        }
    }
}

/// A token is at no distance from itself, however it rounds: its own weight is the largest, and exactly that of a distance of zero.
#[test]
fn tokens_are_at_no_distance_from_themselves() {
    for json in [
        r#"{"mechanism": "fna", "kappa": 1e-3, "tied": true}"#,
        r#"{"mechanism": "fna", "kappa": 1e-3, "tied": true, "manifold": "sphere"}"#,
    ] {
        let p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 90, 40), 5);
        for unit in units() {
            // Nothing but the token itself is near at such a length scale: the output is its value, as the product reads it.
            let got = solve(&p, unit);
            for (got, v) in got["out"].iter().zip(&p.v) {
                assert_eq!(*got, bf16::from_f64(*v).to_f64(), "{json}, {unit:?}");
            }
        }
    }
}
