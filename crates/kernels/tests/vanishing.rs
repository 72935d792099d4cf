//! Affinities that f32 has no room for: what they make is right, or an error says so.

mod support;

use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Strategy, Tol};
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

#[test]
fn tokens_far_from_all_landmarks_are_no_rows_of_zeros() {
    let structure = r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 4}}"#;
    let json = format!(
        r#"{{"mechanism": "composed", "score": {{"kind": "levy", "kappa": 3}}, "structure": {structure}, "normalisation": "row"}}"#
    );
    for size in [2.0, 3.0, 4.0] {
        let error = error(&of_size(&json, Shape::square(1, 1, 32, 64), size));
        assert!(matches!(error, Error::Overflow { tensor: "out", .. }), "{error}");
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

#[test]
fn sigmoids_that_vanish_are_no_rows_of_zeros() {
    for normalisation in [r#""row""#, r#"{"kind": "frobenius", "eps": 1e-12}"#] {
        let json = format!(
            r#"{{"mechanism": "composed", "score": {{"kind": "dot-sigmoid", "scale": 1e4}}, "normalisation": {normalisation}}}"#
        );
        let mut p = of_size(&json, Shape::square(1, 1, 8, 4), 1.0);
        p.q.iter_mut().for_each(|x| *x = -x.abs() - 0.5);
        p.k.as_mut().unwrap().iter_mut().for_each(|x| *x = x.abs() + 0.5);
        let error = error(&p);
        assert!(matches!(error, Error::Overflow { tensor: "row sums", .. }), "{normalisation}: {error}");
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
