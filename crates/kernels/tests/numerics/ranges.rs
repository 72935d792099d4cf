//! Inputs and fields at the ends of f32 and beyond: every call is right, or a typed error says what is too large or too small.

use crate::{ends, support};

use ends::{Tally, largest, resize, resized};
use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Strategy, mechanism::Score};
use support::{
    problem::Problem,
    random::{COMPOSITIONS, VARIANTS, every_mechanism, is_composed, mechanisms, problem},
};

/// Denormal, tiny, large, and up to the largest numbers.
const SIZES: [f64; 9] = [1e-40, 1e-30, 1e-20, 1e-10, 1e4, 1e8, 1e15, 1e30, 1e37];

/// A problem whose plan is no part of the question.
fn ordinary(mechanism: Mechanism) -> Problem {
    problem(mechanism, Shape::square(1, 2, 17, 8), 7)
}

#[test]
fn tensors_of_any_size_are_right_or_refused() {
    let mut tally = Tally::default();
    for (mechanism, json) in every_mechanism().into_iter().zip(VARIANTS.iter().chain(COMPOSITIONS)) {
        let mut p = ordinary(mechanism);
        // Which clusters equal or far tokens fall into is no question of a composition.
        if is_composed(&p.mechanism) {
            p.fix_plan();
        }
        for what in ["q k", "q", "k", "v", "dout", "v dout", "all", "token", "value"] {
            for size in SIZES {
                // A query and a key as near each other count as one place for the distance: its direction is nobody's.
                let of_distances = matches!(p.mechanism.score, Score::Levy(_) | Score::Student(_));
                if what == "token" && size < 1e-16 && of_distances {
                    continue;
                }
                tally.take(&format!("{json}, {what} {size:e}"), &resized(&p, what, size));
            }
        }
    }
    let (right, refused) = tally.report();
    assert!(right > 3 * refused, "{right} right, {refused} refused");
}

/// Later rows are in units of all tokens before them, of which one is far larger than they are, and meets them or not.
#[test]
fn rows_behind_a_huge_token_are_right_or_refused() {
    let (mut right, mut refused) = (0, 0);
    for seed in 0..40 {
        for size in [3e11, 1e14, 1e17] {
            let infsa = Mechanism::from_json(r#"{"mechanism": "infsa", "causal": true}"#).unwrap();
            let mut p = problem(infsa, Shape::square(1, 1, 6, 4), seed);
            let token = 4..8;
            resize(&mut p.q[token.clone()], size);
            resize(&mut p.k.as_mut().unwrap()[token], size);
            match p.solve::<f32>(Strategy::Fused, None) {
                Ok(got) => {
                    right += 1;
                    for (got, expected) in got["out"].chunks(4).zip(p.reference()["out"].chunks(4)) {
                        let near = |(got, x): (&f64, &f64)| (got - x).abs() <= 1e-4 * largest(expected);
                        let all = got.iter().zip(expected).all(near);
                        assert!(all, "seed {seed}, {size:e}: {got:?} is not {expected:?}");
                    }
                }
                Err(Error::Range { limit, largest, .. }) if limit < largest => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(right > refused && refused > 0, "{right} right, {refused} refused");
}

#[test]
fn small_tokens_beside_an_eps_are_right_or_refused() {
    let mut tally = Tally::default();
    for (mechanism, json) in mechanisms().into_iter().zip(VARIANTS) {
        let p = ordinary(mechanism);
        if p.mechanism.pooling().is_some() {
            for size in [1e-12, 1e-15, 1e-17, 1e-18, 3e-19, 1e-19, 3e-20] {
                tally.take(&format!("{json}, {size:e}"), &resized(&p, "q k", size));
            }
        }
    }
    let (right, refused) = tally.report();
    assert!(right > 0 && refused > 0, "{right} right, {refused} refused");
}

/// The mechanism with a field set to `value`, as JSON.
fn with_field(json: &str, field: &str, value: &str) -> String {
    let mut fields: serde_json::Value = serde_json::from_str(json).unwrap();
    fields[field] = serde_json::from_str(value).unwrap();
    fields.to_string()
}

#[test]
fn fields_of_any_size_are_right_or_refused() {
    let fields = [
        "scale",
        "gamma",
        "eps",
        "norm_bias",
        "tol",
        "alpha",
        "kappa",
        "intrinsic_dim",
        "norm_exponent",
        "lambda",
        "whiten_eps",
        "ridge",
        "eigen_cutoff",
        "balance",
    ];
    let values = [
        "0",
        "-1",
        "1e-320",
        "1e-300",
        "1e-39",
        "1e-30",
        "1e-18",
        "1e-9",
        "1e-3",
        "0.999999999",
        "1e3",
        "1e6",
        "1e12",
        "1e18",
        "1e30",
        "1e38",
        "1e39",
        "1e300",
    ];
    let mut tally = Tally::default();
    for json in VARIANTS {
        for field in fields {
            for value in values {
                // A loose tolerance is asked for, and given.
                if field == "tol" && (1e-7..1.0).contains(&value.parse::<f64>().unwrap()) {
                    continue;
                }
                let json = with_field(json, field, value);
                match Mechanism::from_json(&json) {
                    // Another mechanism's field, or a value out of its range.
                    Err(Error::Config { field: named, .. }) => assert_eq!(named, field, "{json}"),
                    Err(error) => {
                        assert!(
                            matches!(error, Error::OutOfRange { .. } | Error::Unsupported { .. }),
                            "{json}: {error}"
                        );
                        tally.refused += 1;
                    }
                    Ok(mechanism) => tally.take(&json, &ordinary(mechanism)),
                }
            }
        }
    }
    tally.report();
}

#[test]
fn counts_are_bounded_before_anything_is_planned() {
    for (json, field) in [
        (r#"{"mechanism": "soft", "landmarks": {"kind": "given", "count": COUNT}}"#, "landmarks.count"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "first", "count": COUNT}}"#, "landmarks.count"),
        (r#"{"mechanism": "soft-pp", "landmarks": {"kind": "random", "count": COUNT, "seed": 1}}"#, "landmarks.count"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "pool", "ratio": COUNT}}"#, "landmarks.ratio"),
        (r#"{"mechanism": "laplacian", "landmarks": {"kind": "conv", "ratio": COUNT}}"#, "landmarks.ratio"),
        (r#"{"mechanism": "soft", "value_conv": COUNT}"#, "value_conv"),
        (r#"{"mechanism": "soft", "newton_iterations": COUNT}"#, "newton_iterations"),
        (r#"{"mechanism": "linear-infsa", "iterations": COUNT}"#, "iterations"),
        (r#"{"mechanism": "infsa-resolvent", "max_iter": COUNT}"#, "max_iter"),
        (r#"{"mechanism": "ssa", "clusters": COUNT}"#, "clusters"),
        (r#"{"mechanism": "ssa", "samples": COUNT}"#, "samples"),
        (r#"{"mechanism": "ssa", "pairs": COUNT}"#, "pairs"),
        (r#"{"mechanism": "ssa", "routes": COUNT}"#, "routes"),
        (r#"{"mechanism": "ssa", "jl_dim": COUNT}"#, "jl_dim"),
        (r#"{"mechanism": "ssa", "kmeans_iterations": COUNT}"#, "kmeans_iterations"),
        (r#"{"mechanism": "ssa", "outlier_globals": COUNT}"#, "outlier_globals"),
        (r#"{"mechanism": "ssa", "outlier_queries": COUNT}"#, "outlier_queries"),
        (
            r#"{"mechanism": "ssa", "causal": true, "causal_clusters": {"kind": "block", "size": COUNT}}"#,
            "causal_clusters.size",
        ),
        (r#"{"mechanism": "ssa", "global_tokens": COUNT}"#, "global_tokens"),
        (r#"{"mechanism": "ssa", "global_tokens": [COUNT]}"#, "global_tokens"),
    ] {
        for count in ["1000001", "2147483648", "4611686018427387904", "18446744073709551615"] {
            let json = json.replace("COUNT", count);
            let planned = Mechanism::from_json(&json)
                .and_then(|m| resolvent_kernels::plan(&m, &Shape::square(2, 2, 19, 8), false, Strategy::Auto));
            match planned {
                // What bounds a number from above is bounded by the tokens in turn.
                Ok(plan) => assert!(plan.allocated_forward < 1 << 30 && plan.scratch_forward < 1 << 30, "{json}"),
                Err(Error::OutOfRange { field: named, .. }) => assert_eq!(named, field, "{json}"),
                Err(error) => panic!("{json}: {error}"),
            }
        }
    }
}

/// Sizes whose products wrap, to something small or to nothing.
#[test]
fn shapes_are_counted_before_they_are_multiplied() {
    let half = 1 << 32;
    for shape in [
        Shape::square(half, half, 1, 1),
        Shape::square(1, 1, half, half),
        Shape { seq_q: half, ..Shape::square(half, 1, 4, 4) },
        Shape { value_dim: usize::MAX, ..Shape::square(1, 1, 4, 4) },
        Shape::square(1 << 20, 1 << 20, 1 << 20, 16),
    ] {
        for mechanism in mechanisms() {
            for strategy in [Strategy::Auto, Strategy::Reference] {
                let error = resolvent_kernels::plan(&mechanism, &shape, false, strategy).unwrap_err();
                assert!(matches!(error, Error::OutOfRange { .. } | Error::Unsupported { .. }), "{shape:?}: {error}");
            }
        }
        let lengths = [shape.q_len(), shape.k_len(), shape.v_len(), shape.out_len()];
        assert!(lengths.into_iter().any(|len| len == usize::MAX || len >= 1 << 40), "{shape:?}: {lengths:?}");
    }
    let tensors = resolvent_kernels::PlanTensors::default();
    let shape = Shape { seq_q: half, seq_kv: half, ..Shape::square(half, 1, 1, 1) };
    let error = resolvent_kernels::ClusterPlan::from_tensors(&tensors, &shape).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { field: "shape", .. }), "{error}");
}

/// A later token, however large, changes no bit of earlier rows, or the call as a whole is refused.
#[test]
fn the_past_does_not_know_of_larger_tokens() {
    for mechanism in mechanisms().into_iter().filter(|m| m.causal) {
        let mut p = ordinary(mechanism);
        p.fix_plan();
        let row = p.shape.value_dim;
        let earlier = |p: &Problem| p.solve::<f32>(Strategy::Fused, None).map(|s| s["out"][..11 * row].to_vec());
        let before = earlier(&p).unwrap();
        for size in [1e-30, 1e-6, 300.0, 3e5, 3e11, 1e14, 1e25] {
            match earlier(&resized(&p, "token", size)) {
                Ok(after) => assert_eq!(after, before, "{:?}, {size:e}", p.mechanism),
                Err(error) => {
                    assert!(matches!(error, Error::Range { .. }) && size > 1e4, "{:?}, {size:e}: {error}", p.mechanism)
                }
            }
        }
    }
}

/// What a masked token holds is no part of the call.
#[test]
fn masked_tokens_are_not_judged() {
    for mechanism in mechanisms() {
        let mut p = ordinary(mechanism);
        let keep: Vec<bool> = (0..17).map(|i| i != 11).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        p.fix_plan();
        let solve = |p: &Problem| p.solve::<f32>(Strategy::Fused, None).unwrap();
        let expected = solve(&p);
        for content in [f64::NAN, f64::INFINITY, 1e30] {
            let mut p = p.clone();
            let rows = |x: &mut Vec<f64>, dim: usize| {
                let seq = 17 * dim;
                for head in x.chunks_mut(seq) {
                    head[11 * dim..12 * dim].fill(f64::from(content as f32));
                }
            };
            rows(&mut p.q, 8);
            p.k.iter_mut().for_each(|k| rows(k, 8));
            rows(&mut p.v, 8);
            assert_eq!(solve(&p), expected, "{:?}, {content}", p.mechanism);
        }
    }
}

/// The error of a call that is refused.
fn range_error(p: &Problem) -> (&'static str, f64) {
    match p.solve::<f32>(Strategy::Fused, None) {
        Err(Error::Range { tensor, limit, .. }) => (tensor, limit),
        got => panic!("{got:?}"),
    }
}

/// What the tokens of `fna` may be at most falls with the root of their width, as distances grow with it.
#[test]
fn limits_know_the_width() {
    let limits = [4, 64].map(|dim| {
        let fna = Mechanism::from_json(r#"{"mechanism": "fna", "kappa": 2}"#).unwrap();
        let p = problem(fna, Shape::square(1, 1, 9, dim), 7);
        range_error(&resized(&p, "q", 1e37)).1
    });
    assert!((limits[0] / limits[1] - 4.0).abs() < 1e-9, "{limits:?}");
    // Two tokens may be as far apart as both are long, in all of 4 channels.
    let score = r#"{"kind": "laplacian", "lambda": 3}"#;
    let json = format!(r#"{{"mechanism": "composed", "score": {score}}}"#);
    let p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 1, 9, 4), 7);
    let limit = range_error(&resized(&p, "q", 1e37)).1;
    assert!((limit / (1e30 * 3.0 / 8.0) - 1.0).abs() < 1e-6, "{limit:e}");
}

/// Pairs that are all near each other are all alike to a Gaussian.
#[test]
fn small_tokens_of_a_gaussian_are_right() {
    let gaussian = r#"{"mechanism": "composed", "score": {"kind": "gaussian"}}"#;
    let p = resized(&ordinary(Mechanism::from_json(gaussian).unwrap()), "q k", 1e-4);
    let (got, expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
    support::assert_close("out", &got["out"], &expected["out"], 2, 1e-5, 0.0);
}

/// The side of the token that drowns all others is named, and a size at which it does not.
#[test]
fn what_drowns_a_norm_is_named() {
    for side in ["q", "k"] {
        let mut p = ordinary(Mechanism::from_json(r#"{"mechanism": "infsa"}"#).unwrap());
        let q = p.q.clone();
        let k = p.k.as_mut().unwrap();
        // The first tokens meet nothing.
        let row = 0..p.shape.head_dim;
        let of_head = p.shape.seq_q * p.shape.head_dim;
        for head in 0..p.shape.heads {
            let row = head * of_head + row.start..head * of_head + row.end;
            k[row.clone()].iter_mut().zip(&q[row.clone()]).for_each(|(k, q)| *k = -q);
            resize(&mut p.q[row.clone()], if side == "q" { 1e26 } else { 1e20 });
            resize(&mut k[row], if side == "k" { 1e26 } else { 1e20 });
        }
        let largest = largest(if side == "q" { &p.q } else { p.k.as_ref().unwrap() });
        let (tensor, limit) = range_error(&p);
        assert!(tensor == side && limit < largest, "{side}: {tensor} up to {limit:e} of {largest:e}");
        // All other tokens are near one.
        assert!((1e7..1e9).contains(&limit), "{side}: {limit:e}");
    }
}

/// The slope of `levy` in a distance grows as that is less: down to the least tokens that are taken it is right.
#[test]
fn small_distances_have_their_slopes() {
    let parts = r#""structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "count": 5}, "ridge": 0.1}, "normalisation": "whitened""#;
    let mut taken = 0;
    for more in [r#""normalisation": "none""#, parts] {
        for power in 50..64 {
            let size = f64::exp2(f64::from(-power));
            let score = format!(r#"{{"kind": "levy", "alpha": 1.2, "kappa": {:e}}}"#, 4.0 * size);
            let json = format!(r#"{{"mechanism": "composed", "score": {score}, {more}}}"#);
            let Ok(mechanism) = Mechanism::from_json(&json) else { continue };
            let mut p = ordinary(mechanism);
            p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| *x *= size);
            let got = match p.solve::<f32>(Strategy::Fused, None) {
                Ok(got) => got,
                Err(Error::Range { bound: "from", .. }) => continue,
                Err(other) => panic!("{json}: {other}"),
            };
            taken += 1;
            for (name, expected) in &p.reference() {
                support::assert_close(&format!("{json}, {name}"), &got[name], expected, 1, 2e-4, 0.0);
            }
        }
    }
    assert!(taken > 8, "{taken}");
}

/// Landmarks that a call gives are judged as tokens are.
#[test]
fn given_landmarks_have_a_range() {
    let structure = r#""structure": {"kind": "nystrom", "landmarks": {"kind": "given", "count": 3}, "ridge": 0.1}"#;
    for (score, size) in [("levy", 1e19), ("student", 1e19), ("laplacian", 1e36), ("gaussian", 1e12)] {
        let json =
            format!(r#"{{"mechanism": "composed", "score": "{score}", {structure}, "normalisation": "whitened"}}"#);
        let mut p = ordinary(Mechanism::from_json(&json).unwrap());
        p.parameters.get_mut(&Parameter::GivenLandmarks).unwrap()[7] = size;
        let (tensor, limit) = range_error(&p);
        assert!(tensor == "given_landmarks" && limit < f64::from(size), "{score}: {tensor} up to {limit:e}");
    }
}
