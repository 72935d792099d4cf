//! Affinities that f32 has no room for: what they make is right, or an error says so.

use crate::support;

use resolvent_kernels::{Cache, Error, Inputs, Mechanism, Parameter, Shape, Strategy, Tol};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

fn of_size(json: &str, shape: Shape, size: f64) -> Problem {
    let mut p = problem(Mechanism::from_json(json).unwrap_or_else(|e| panic!("{json}: {e}")), shape, 1);
    for x in [Some(&mut p.q), p.k.as_mut()].into_iter().flatten() {
        x.iter_mut().for_each(|x| *x = f64::from((*x * size) as f32));
    }
    p
}

fn error(p: &Problem) -> Error {
    p.solve::<f32>(Strategy::Fused, None).expect_err("has no room in f32")
}

/// They are of rows that sum to one: what all have in common is taken out before it can leave f32.
#[test]
fn densities_of_any_exponent_leave_weights() {
    let mut held = 0;
    for causal in [false, true] {
        for (exponent, size) in
            [(-100.0, 1.0), (-100.0, 1e-3), (-10.0, 1e-3), (-10.0, 3e-7), (10.0, 1e-3), (100.0, 1.0)]
        {
            let json = format!(
                r#"{{"mechanism": "composed", "score": "dot-relu", "causal": {causal},
                    "normalisation": {{"kind": "row", "density_exponent": {exponent}}}}}"#
            );
            let p = of_size(&json, Shape::square(1, 1, 16, 8), size);
            let what = format!("{exponent}, tokens of {size}, causal: {causal}");
            let got = match p.solve::<f32>(Strategy::Fused, None) {
                // Without a largest of all columns some rows may have nothing but what lies beyond.
                Err(Error::Overflow { .. }) if causal => continue,
                got => got.unwrap_or_else(|e| panic!("{what}: {e}")),
            };
            let [got, expected] = [got, p.reference()]
                .map(|solution| solution.into_iter().filter(|(name, _)| matches!(*name, "out" | "dv")).collect());
            // The logarithms of the densities, a hundred times those of sums, are rounded as scores are.
            assert_solution(&what, &got, &expected, &p.shape, Tol::f32(&p.mechanism).with_scores(1000.0));
            held += 1;
        }
    }
    assert!(held >= 9, "{held} of 12");
}

fn rows_by_landmarks(score: &str, landmarks: &str) -> String {
    let structure = format!(r#"{{"kind": "nystrom", "landmarks": {landmarks}}}"#);
    format!(r#"{{"mechanism": "composed", "score": {score}, "structure": {structure}, "normalisation": "row"}}"#)
}

/// Keys that are have nothing in common by which all could be multiplied.
#[test]
fn keys_far_from_all_landmarks_are_no_rows_of_zeros() {
    let json = rows_by_landmarks(r#"{"kind": "levy", "kappa": 3}"#, r#"{"kind": "pool", "ratio": 4}"#);
    for size in [2.0, 3.0, 4.0] {
        let error = error(&of_size(&json, Shape::square(1, 1, 32, 64), size));
        assert!(matches!(error, Error::Overflow { tensor: "out", .. }), "{error}");
    }
}

/// A factor on all affinities of a query changes nothing of a row that is divided by its sum.
#[test]
fn queries_far_from_all_landmarks_are_right() {
    for score in [r#"{"kind": "gaussian", "scale": 0.5}"#, r#"{"kind": "levy", "kappa": 0.1}"#, r#""laplacian""#] {
        for tied in [false, true] {
            let json = rows_by_landmarks(score, r#"{"kind": "pool", "ratio": 4}"#);
            let mut p =
                of_size(&json.replacen('{', &format!(r#"{{"tied": {tied}, "#), 1), Shape::square(1, 1, 32, 8), 1.0);
            // The mean of four keys is as far away.
            for (n, far) in [(3, 4.0), (17, 9.0), (18, -14.0)] {
                p.q[n * 8] = far;
            }
            assert_solution(&json, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_scores(100.0));
        }
    }
}

/// A row sum that is rounding is replaced by the least that it may be, and its gradient by that of what this is made of.
#[test]
fn row_sums_at_their_floor_have_its_gradients() {
    for (score, size) in
        [(r#"{"kind": "gaussian", "scale": 2.0}"#, 2.0), (r#"{"kind": "gaussian", "scale": 1.0}"#, 3.0)]
    {
        for (tied, inverse) in [(false, "cholesky"), (true, "newton-schulz")] {
            let json = rows_by_landmarks(score, r#"{"kind": "pool", "ratio": 4}"#)
                .replace(r#""nystrom""#, &format!(r#""nystrom", "inverse": "{inverse}""#))
                .replacen('{', &format!(r#"{{"tied": {tied}, "#), 1);
            let p = of_size(&json, Shape::square(1, 1, 64, 16), size);
            let (got, expected) = (p.fused(), p.reference());
            assert_solution(&json, &got, &expected, &p.shape, Tol::f32(&p.mechanism).with_scores(30.0));
        }
    }
}

/// There is nothing to divide by then; a mean of the values, where one is added, stays.
#[test]
fn rows_without_landmarks_are_zeros() {
    let json = rows_by_landmarks(r#""gaussian""#, r#"{"kind": "first", "count": 3}"#);
    for normalisation in ["row", "none", "symmetric", "whitened"] {
        let json = json.replace(r#""row""#, &format!(r#""{normalisation}""#));
        let mut p = of_size(&json, Shape::square(1, 1, 12, 4), 1.0);
        p.key_mask = Some((0..12).map(|n| n >= 3).collect());
        let got = p.fused();
        let zeros = got.values().all(|x| x.iter().all(|&x| x == 0.0));
        assert_eq!(zeros, normalisation != "whitened", "{json}");
        assert_solution(&json, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism));
    }
}

#[test]
fn cosines_through_landmarks_have_a_range() {
    let of = |scale: f64, inverse: &str| {
        let structure =
            format!(r#"{{"kind": "nystrom", "landmarks": {{"kind": "pool", "ratio": 4}}, "inverse": "{inverse}"}}"#);
        format!(
            r#"{{"mechanism": "composed", "score": {{"kind": "cosine-exp", "scale": {scale}}}, "structure": {structure}, "normalisation": "row"}}"#
        )
    };
    for (scale, inverse) in [(40.0, "newton-schulz"), (80.0, "cholesky")] {
        let mut p = of_size(&of(scale, inverse), Shape::square(1, 1, 32, 64), 1.0);
        // The inverse multiplies what rounding leaves of scores of 40 and 80.
        assert_solution(inverse, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_scores(400.0));
        p.parameters.insert(Parameter::Scale, vec![2.0 * scale as f32]);
        assert!(matches!(error(&p), Error::OutOfRange { field: "score.scale", .. }));
        let error = Mechanism::from_json(&of(1.25 * scale, inverse)).unwrap_err();
        assert!(error.to_string().contains("score.scale"), "{error}");
    }
    // By itself it is taken relative to the largest; a call's scale has the range of the configuration's.
    let mut p = of_size(r#"{"mechanism": "cosine"}"#, Shape::square(1, 1, 9, 4), 1.0);
    p.parameters.insert(Parameter::Scale, vec![1e5]);
    assert!(matches!(error(&p), Error::OutOfRange { field: "score.scale", .. }));
}

/// A score whose logits are all far below zero: `-size` times what lies between 1 and 9.
fn far_below(score: &str, normalisation: &str, size: f64) -> Problem {
    let json = format!(r#"{{"mechanism": "composed", "score": "{score}", "normalisation": {normalisation}}}"#);
    let mut p = of_size(&json, Shape::square(1, 1, 8, 4), 1.0);
    p.parameters.insert(Parameter::Scale, vec![size as f32]);
    p.q.iter_mut().for_each(|x| *x = -x.abs() - 0.5);
    p.k.as_mut().unwrap().iter_mut().for_each(|x| *x = x.abs() + 0.5);
    p
}

#[test]
fn affinities_that_vanish_are_no_rows_of_zeros() {
    for normalisation in [r#""row""#, r#""symmetric""#, r#"{"kind": "frobenius", "eps": 1e-12}"#] {
        for (score, size) in [("dot-sigmoid", 1e4), ("dot-gelu", 30.0)] {
            let what = format!("{score}, {normalisation}");
            let mut p = far_below(score, normalisation, size);
            let told = error(&p);
            assert!(matches!(told, Error::Overflow { tensor: "row sums", .. }), "{what}: {told}");
            // Between what is lost and what has all its digits nothing is wrong in silence.
            for size in [5.0, 10.0, 20.0, 40.0, 80.0, 160.0] {
                p.parameters.insert(Parameter::Scale, vec![size / 8.0]);
                if let Ok(got) = p.solve::<f32>(Strategy::Fused, None) {
                    let [got, expected] = [got, p.reference()].map(|mut x| x.remove("out").unwrap());
                    support::assert_close(&what, &got, &expected, 1, 1e-3, 1e-6);
                }
            }
        }
    }
}

/// A key at a right angle to a query has no affinity to it by itself; what vanishes beside it is told of all the same.
#[test]
fn a_right_angle_excuses_no_other_key() {
    let mut p = far_below("dot-gelu", r#""row""#, 30.0);
    p.k.as_mut().unwrap()[..4].fill(0.0);
    let told = error(&p);
    assert!(matches!(told, Error::Overflow { tensor: "row sums", .. }), "{told}");
}

/// A query at a right angle to all keys that it sees has no affinity, in f64 too: whatever other queries have, and whatever keys
/// lie behind it.
#[test]
fn queries_at_a_right_angle_are_rows_of_zeros() {
    let (along, across) = ([2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]);
    for (causal, q, k, nothing) in
        [(false, [along, along, across, along], [along; 4], 2), (true, [along; 4], [across, along, along, along], 0)]
    {
        let json =
            format!(r#"{{"mechanism": "composed", "score": "dot-gelu", "normalisation": "row", "causal": {causal}}}"#);
        let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 1, 4, 4), 1);
        (p.q, p.k) = (q.concat(), Some(k.concat()));
        let got = p.fused();
        assert!(got["out"][4 * nothing..][..4].iter().all(|&x| x == 0.0), "{json}");
        assert_solution(&json, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
    }
}

/// Token by token as in the whole sequence.
#[test]
fn affinities_that_vanish_in_a_cache_are_told_of() {
    for (score, size) in [("dot-sigmoid", 1e4), ("dot-gelu", 30.0)] {
        let p = far_below(score, r#""row""#, size);
        let json = serde_json::to_string(&p.mechanism).unwrap().replace(r#""causal":false"#, r#""causal":true"#);
        let mut cache = Cache::new(&Mechanism::from_json(&json).unwrap(), 1, 1, 4, 4, 8).unwrap();
        let first = |x: &[f64]| x[..4].iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k, v) = (first(&p.q), first(p.k.as_ref().unwrap()), first(&p.v));
        let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: p.extras() };
        let told = cache.step(&inputs, &mut [0.0; 4]).unwrap_err();
        assert!(matches!(told, Error::Overflow { tensor: "out", .. }), "{score}: {told}");
        let near: Vec<_> = q.iter().map(|x| -x).collect();
        cache.step(&Inputs { q: &near, ..inputs }, &mut [0.0; 4]).unwrap();
    }
}

/// What is nothing in f64 too is no error: tokens of zeros, and logits that a rectifier leaves nothing of.
#[test]
fn rows_without_affinities_are_zeros() {
    for score in ["dot-gelu", "dot-relu", "dot-squared-relu"] {
        let mut p = far_below(score, r#""row""#, 1.0);
        if score == "dot-gelu" {
            p.q.fill(0.0);
        }
        assert!(p.fused()["out"].iter().all(|&x| x == 0.0), "{score}");
    }
}

/// In a cache too, until a token comes that has an affinity.
#[test]
fn rows_without_affinities_are_zeros_in_a_cache() {
    for score in ["dot-relu", "dot-squared-relu"] {
        let json =
            format!(r#"{{"mechanism": "composed", "score": "{score}", "normalisation": "row", "causal": true}}"#);
        let mut cache = Cache::new(&Mechanism::from_json(&json).unwrap(), 1, 1, 4, 4, 8).unwrap();
        let mut step = |q: f32| {
            let (k, v, mut row) = ([1.0; 4], [2.0; 4], [f32::NAN; 4]);
            let inputs = Inputs { q: &[q; 4][..], k: Some(&k[..]), v: &v[..], extras: Default::default() };
            cache.step(&inputs, &mut row).unwrap();
            row
        };
        assert_eq!([step(-1.0), step(1.0)], [[0.0; 4], [2.0; 4]], "{score}");
    }
}

/// Where an affinity of zero has a slope, a row of them has none all the same: it is zero whatever changes.
#[test]
fn rows_without_affinities_have_no_gradient() {
    for causal in [false, true] {
        let json = format!(r#"{{"mechanism": "composed", "score": "dot-gelu", "causal": {causal}}}"#);
        let mut p = of_size(&json, Shape::square(1, 2, 6, 4), 1.0);
        p.q[..4].fill(0.0);
        p.k.as_mut().unwrap()[16..20].fill(0.0);
        let tol = Tol::f32(&p.mechanism).with_noise(1.0);
        assert_solution(&json, &p.fused(), &p.reference(), &p.shape, tol);
    }
}

/// Distances from a query that is far from all keys are rounded until they are all the same: no key would be nearer.
#[test]
fn queries_far_from_all_keys_are_refused() {
    let of = |score| format!(r#"{{"mechanism": "composed", "score": "{score}", "causal": true}}"#);
    let sizes =
        [("laplacian", 1e2, true), ("laplacian", 1e4, true), ("laplacian", 1e6, false), ("laplacian", 1e11, false)];
    for (score, size, is_right) in sizes.into_iter().chain([("gaussian", 3e3, true), ("gaussian", 1e6, false)]) {
        let mut p = of_size(&of(score), Shape::square(1, 1, 8, 4), 1.0);
        p.q[24..28].fill(size);
        let mut cache = Cache::new(&p.mechanism, 1, 1, 4, 4, 8).unwrap();
        let [q, k, v] = [&p.q, p.k.as_ref().unwrap(), &p.v].map(|x| x.iter().map(|&x| x as f32).collect::<Vec<_>>());
        let mut rows = [0.0; 32];
        let told = cache.step(&Inputs { q: &q, k: Some(&k), v: &v, extras: p.extras() }, &mut rows);
        if is_right {
            let [got, expected] = [p.fused(), p.reference()].map(|mut x| x.remove("out").unwrap());
            support::assert_close(&format!("{score}, {size:e}"), &got, &expected, 8, 2e-3, 0.0);
            let rows: Vec<f64> = told.map(|()| rows.iter().map(|&x| x.into()).collect()).unwrap();
            support::assert_close(&format!("{score}, {size:e}, in a cache"), &rows, &expected, 8, 2e-3, 0.0);
        } else {
            let called = error(&p);
            assert!(matches!(called, Error::Overflow { tensor: "row sums", .. }), "{called}");
            assert!(matches!(told, Err(Error::Overflow { tensor: "out", .. })), "{told:?}");
        }
    }
}

/// Up to 65,536 times lambda, where f32 still has a hundredth of what two keys differ by.
#[test]
fn how_far_a_query_may_be_is_told() {
    let score = r#"{"kind": "laplacian", "lambda": 0.5}"#;
    for (distance, is_right) in [(3.2e4, true), (3.4e4, false)] {
        let json = format!(r#"{{"mechanism": "composed", "score": {score}}}"#);
        let mut p = of_size(&json, Shape::square(1, 1, 8, 4), 1.0);
        p.q[12..16].copy_from_slice(&[distance, 0.0, 0.0, 0.0]);
        assert_eq!(p.solve::<f32>(Strategy::Fused, None).is_ok(), is_right, "{distance}");
    }
}

/// A column of a symmetric normalisation is divided by its own sum too.
#[test]
fn columns_that_vanish_are_told_of() {
    let mut p = of_size(
        r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid", "scale": 1}, "normalisation": "symmetric"}"#,
        Shape::square(1, 1, 8, 4),
        1.0,
    );
    p.q.iter_mut().for_each(|x| *x = x.abs() + 0.5);
    p.k.as_mut().unwrap()[8..12].fill(-60.0);
    assert!(matches!(error(&p), Error::Overflow { tensor: "row sums", .. }));
}

/// Of the halves f16 ends before f32 does.
#[test]
fn results_beyond_f16_are_told_of() {
    let mut p = of_size(r#"{"mechanism": "softmax"}"#, Shape::square(1, 2, 8, 4), 1.0);
    p.v[5] = 60000.0;
    p.dout.iter_mut().for_each(|x| *x = 1.0);
    p.solve::<half::f16>(Strategy::Fused, None).unwrap();
    p.dout.iter_mut().for_each(|x| *x = 60000.0);
    p.v.fill(1.0);
    // Every value gets what all rows of its head give it.
    let told = p.solve::<half::f16>(Strategy::Fused, None).unwrap_err();
    assert!(matches!(told, Error::Overflow { tensor: "dv", .. }), "{told}");
    let mut p = of_size(r#"{"mechanism": "composed", "normalisation": "none"}"#, Shape::square(1, 2, 8, 4), 1.0);
    p.v.fill(30000.0);
    let told = p.solve::<half::f16>(Strategy::Fused, None).unwrap_err();
    assert!(matches!(told, Error::Overflow { tensor: "out", index: 0 }), "{told}");
    p.solve::<half::bf16>(Strategy::Fused, None).unwrap();
}

/// Each row is taken in units of its own largest: what comes later, or is masked, may be far larger.
#[test]
fn features_of_large_tokens_leave_the_first_rows() {
    for size in [1.0, 10.0, 30.0] {
        let p = of_size(r#"{"mechanism": "performer", "causal": true}"#, Shape::square(1, 2, 12, 8), size);
        let expected = p.reference();
        let first = |x: &[f64]| x[..p.shape.value_dim].to_vec();
        assert_eq!(first(&expected["out"]), first(&p.v), "{size}: the first row sees one value");
        if let Ok(got) = p.solve::<f32>(Strategy::Fused, None) {
            let tol = Tol::f32(&p.mechanism).with_scores(size * size);
            assert_solution(&format!("{size}"), &got, &expected, &p.shape, tol);
        }
    }
}

/// The offset of a query stands beside the products, in units of the scale.
#[test]
fn gradients_of_small_scales_keep_their_digits() {
    for scale in [1e-2, 1e-4, 1e-6] {
        let json = format!(r#"{{"mechanism": "sigmoid", "scale": {scale}}}"#);
        let p = of_size(&json, Shape::square(1, 2, 40, 8), 1.0);
        assert_solution(&json, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism));
    }
}

/// `1 - tanh^2` has no digits there.
#[test]
fn softcaps_far_below_the_logits_keep_their_slopes() {
    for cap in [1e-1, 1e-3] {
        let json = format!(r#"{{"mechanism": "composed", "score": {{"kind": "dot-exp", "softcap": {cap}}}}}"#);
        let mut p = of_size(&json, Shape::square(1, 1, 24, 1), 1.0);
        p.q.iter_mut().for_each(|x| *x = 6.0 * cap);
        p.k.as_mut().unwrap().iter_mut().enumerate().for_each(|(n, x)| *x = 1.0 + 0.01 * n as f64);
        let (got, expected) = (p.fused(), p.reference());
        support::assert_close(&json, &got["dq"], &expected["dq"], 1, 1e-3, 0.0);
    }
}

/// What columns are divided by has to stand in f32 beside the logits.
#[test]
fn logits_that_columns_are_divided_beside_have_a_range() {
    for normalisation in [r#"{"kind": "row", "density_exponent": 0.5}"#, r#""symmetric""#] {
        let json = format!(r#"{{"mechanism": "composed", "score": "dot-exp", "normalisation": {normalisation}}}"#);
        let p = of_size(&json, Shape::square(1, 2, 16, 8), 5.0);
        let [got, expected] = [p.fused(), p.reference()].map(|mut x| x.remove("out").unwrap());
        support::assert_close(&json, &got, &expected, 2, 1e-4, 0.0);
        let told = error(&of_size(&json, Shape::square(1, 2, 16, 8), 5000.0));
        assert!(matches!(told, Error::Overflow { tensor: "row sums", .. }), "{json}: {told}");
        // Tokens that are all alike, with logits of 15500 and of 20000.
        let alike = |entry: f64| {
            let mut p = of_size(&json, Shape::square(1, 2, 16, 8), 1.0);
            p.q.fill(entry);
            p.k.iter_mut().for_each(|k| k.fill(entry));
            p
        };
        let [got, expected] = [alike(74.0).fused(), alike(74.0).reference()].map(|mut x| x.remove("out").unwrap());
        support::assert_close(&json, &got, &expected, 2, 1e-2, 0.0);
        let told = error(&alike(84.0));
        assert!(matches!(told, Error::Overflow { tensor: "row sums", .. }), "{json}: {told}");
    }
}

/// A pair that is absent takes nothing of the check that results are numbers.
#[test]
fn results_beyond_f32_are_told_of_under_absent_pairs() {
    let p = of_size(
        r#"{"mechanism": "composed", "normalisation": "none", "bias": "tensor"}"#,
        Shape::square(1, 1, 8, 16),
        10.0,
    );
    for absent in [None, Some(7)] {
        let mut p = p.clone();
        let mut bias = vec![0.0; 64];
        absent.into_iter().for_each(|n: usize| bias[n] = f32::NEG_INFINITY);
        p.parameters.insert(Parameter::Bias, bias);
        assert!(matches!(error(&p), Error::Overflow { .. }), "{absent:?}");
    }
}

/// `elu + 1` is an exponential below zero, of which nothing cancels.
#[test]
fn features_far_below_zero_keep_their_digits() {
    let mechanism = Mechanism::from_json(r#"{"mechanism": "linear", "score": {"scale": 1}}"#).unwrap();
    let mut p = problem(mechanism, Shape { seq_kv: 2, value_dim: 1, ..Shape::square(1, 1, 1, 1) }, 1);
    (p.q, p.v) = (vec![0.5], vec![1.0, 0.0]);
    for far in [-36.0, -40.0, -60.0] {
        p.k = Some(vec![far, far - 1.0]);
        let exact = 1.0 / (1.0 + (-1.0_f64).exp());
        for out in [p.reference()["out"][0], p.fused()["out"][0]] {
            assert!((out - exact).abs() < 1e-6, "{far}: {out}");
        }
    }
}
