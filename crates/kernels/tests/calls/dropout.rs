//! Pairs left out at random: the same everywhere, with their gradients.

use crate::{support, threads};

use resolvent_kernels::{
    Cache, Dropout, Error, Extras, Inputs, Mask, Mechanism, Operator, Shape, Strategy, Tol, simd::Level,
};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};
use threads::on_threads;

const MECHANISMS: [&str; 6] = [
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true, "tied": true}"#,
    r#"{"mechanism": "fna"}"#,
    r#"{"mechanism": "fna", "alpha": 2.0}"#,
    r#"{"mechanism": "fna", "manifold": "sphere", "kernel": "student"}"#,
    r#"{"mechanism": "fna", "causal": true}"#,
];

fn mechanism(json: &str) -> Mechanism {
    Mechanism::from_json(json).unwrap()
}

fn kinds(probability: f64, seed: u64) -> [Dropout; 2] {
    [Dropout::weights(probability, seed).unwrap(), Dropout::pairs(probability, seed).unwrap()]
}

fn with(dropout: Dropout, json: &str, shape: Shape) -> Problem {
    Problem { dropout: Some(dropout), ..problem(mechanism(json), shape, 4) }
}

/// Sizes within a panel, across panels and tiles, and few channels, which `fna` treats apart.
#[test]
fn fused_is_the_reference_at_every_level() {
    for json in MECHANISMS {
        for dropout in kinds(0.3, 17) {
            for (n, d) in [(5, 4), (70, 12), (150, 64)] {
                let mut p = with(dropout, json, Shape::square(2, 2, n, d));
                for masked in [false, true] {
                    if masked {
                        p.key_mask = Some((0..2 * n).map(|i| i * i % 7 < 5).collect());
                        p.query_mask = Some((0..2 * n).map(|i| i * i % 11 < 6).collect());
                    }
                    let expected = p.reference();
                    for level in Level::available() {
                        let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
                        let what = format!("{json} {dropout:?} {n} x {d}, masked {masked}, {}", level.name());
                        assert_solution(&what, &got, &expected, &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
                    }
                }
            }
        }
    }
}

/// The reference's gradients against differences of its output.
#[test]
fn gradients_are_slopes() {
    for json in MECHANISMS {
        for dropout in kinds(0.4, 3) {
            let p = with(dropout, json, Shape::square(1, 2, 6, 4));
            let solution = p.reference();
            let loss = |p: &Problem| -> f64 { p.reference()["out"].iter().zip(&p.dout).map(|(x, y)| x * y).sum() };
            for (name, at) in [("dq", 5), ("dv", 11)] {
                let moved = |by: f64| {
                    let mut p = p.clone();
                    let tensor = if name == "dq" { &mut p.q } else { &mut p.v };
                    tensor[at] += by;
                    loss(&p)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let gradient = solution[name][at];
                assert!((slope - gradient).abs() < 1e-6, "{json} {dropout:?} {name}: {gradient}, slope {slope}");
            }
        }
    }
}

#[test]
fn dropped_pairs_are_a_mask_and_dropped_weights_a_scaled_one() {
    let shape = Shape::square(1, 1, 9, 4);
    let plain = problem(mechanism(MECHANISMS[0]), shape, 4);
    let [weights, pairs] = kinds(0.5, 8);
    let matrix = |dropout: Option<Dropout>| {
        let op = Operator::new(&plain.mechanism, shape, false, Strategy::Reference).unwrap();
        let mut extras = Extras::default();
        extras.dropout = dropout;
        let inputs = Inputs { q: &plain.q, k: plain.k.as_deref(), v: &plain.v, extras };
        resolvent_kernels::reference::forward(op.mechanism(), &shape, &inputs, &Mask::NONE).unwrap().weights().to_vec()
    };
    let (whole, thinned, pruned) = (matrix(None), matrix(Some(weights)), matrix(Some(pairs)));
    for i in 0..9 {
        let row = i * 9..(i + 1) * 9;
        let kept: f64 = row.clone().filter(|at| pairs.keeps(0, i, at % 9)).map(|at| whole[at]).sum();
        for at in row {
            let factor = if weights.keeps(0, i, at % 9) { 2.0 } else { 0.0 };
            assert!((thinned[at] - factor * whole[at]).abs() < 1e-12);
            let expected = if pairs.keeps(0, i, at % 9) { whole[at] / kept } else { 0.0 };
            assert!((pruned[at] - expected).abs() < 1e-12);
        }
    }
}

#[test]
fn nothing_dropped_changes_nothing_and_everything_leaves_zeros() {
    for json in MECHANISMS {
        let shape = Shape::square(1, 2, 70, 12);
        let plain = problem(mechanism(json), shape, 4).fused();
        for dropout in kinds(0.0, 5) {
            let got = with(dropout, json, shape).fused();
            let tol = Tol::f32(&mechanism(json));
            assert_solution(&format!("{json} {dropout:?}"), &got, &plain, &shape, tol);
        }
        let nothing = with(Dropout::pairs(1.0, 5).unwrap(), json, shape).fused();
        for (name, values) in &nothing {
            let empty = if *name == "lse" { f64::NEG_INFINITY } else { 0.0 };
            assert!(values.iter().all(|&x| x == empty), "{json} {name}");
        }
    }
}

#[test]
fn the_mean_over_draws_is_the_operator() {
    let shape = Shape::square(1, 1, 40, 8);
    let plain = problem(mechanism(MECHANISMS[0]), shape, 4).fused();
    let mut mean = vec![0.0; plain["out"].len()];
    for seed in 0..400 {
        let got = with(Dropout::weights(0.2, seed).unwrap(), MECHANISMS[0], shape).fused();
        mean.iter_mut().zip(&got["out"]).for_each(|(mean, x)| *mean += x / 400.0);
    }
    let most = mean.iter().zip(&plain["out"]).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    assert!(most > 0.0 && most < 0.05, "{most}");
}

#[test]
fn threads_and_halves_draw_the_same() {
    let p = with(Dropout::weights(0.3, 2).unwrap(), MECHANISMS[2], Shape::square(2, 2, 300, 16));
    assert_eq!(on_threads(1, || p.fused()), on_threads(3, || p.fused()));
}

#[test]
fn what_has_no_pairs_of_its_own_refuses() {
    let dropout = Dropout::weights(0.1, 0).unwrap();
    for json in [
        r#"{"mechanism": "uniform"}"#,
        r#"{"mechanism": "infsa"}"#,
        r#"{"mechanism": "soft"}"#,
        r#"{"mechanism": "ssa"}"#,
        r#"{"mechanism": "fna", "norm_exponent": 0.5}"#,
    ] {
        let p = with(dropout, json, Shape::square(1, 1, 8, 4));
        let refused = p.solve::<f32>(Strategy::Auto, None);
        assert!(matches!(refused, Err(Error::Unsupported { what: "dropout", .. })), "{json}: {refused:?}");
    }

    let mut cache = Cache::new(&mechanism(r#"{"mechanism": "softmax", "causal": true}"#), 1, 1, 4, 4, 1).unwrap();
    let x = [0.5; 4];
    let inputs = Inputs { q: &x, k: Some(&x), v: &x, extras: Extras::default().with_dropout(dropout) };
    let refused = cache.step(&inputs, &mut [0.0; 4]);
    assert!(matches!(refused, Err(Error::Unsupported { what: "dropout in a cache", .. })), "{refused:?}");
}

/// A seed keeps its meaning: the same pairs stay in every version, or runs would not be repeated.
#[test]
fn a_seed_means_what_it_meant() {
    let sum = |dropout: Dropout| {
        let stays =
            (0..3_usize).flat_map(|slice| (0..40).flat_map(move |query| (0..40).map(move |key| (slice, query, key))));
        stays.fold(0u64, |sum, (slice, query, key)| sum.rotate_left(5) ^ u64::from(dropout.keeps(slice, query, key)))
    };
    let half = Dropout::pairs(0.5, 3).unwrap();
    let sums = [sum(half), sum(half.reseeded(1)), sum(half.reseeded(2)), sum(Dropout::weights(0.1, u64::MAX).unwrap())];
    assert_eq!(
        sums,
        [2_885_274_077_311_147_244, 4_338_544_429_950_307_978, 11_255_745_205_597_238_930, 15_175_647_880_918_181_143]
    );
}
