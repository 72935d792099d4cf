//! Reading a mechanism that is none: an error that names the field.

use resolvent_kernels::{
    Error, Mechanism,
    mechanism::{Infsa, InfsaResolvent, LinearInfsa, NormBias, Softmax},
};

/// The field that reading `json` complains about.
#[track_caller]
fn blamed(json: &str) -> String {
    match Mechanism::from_json(json).expect_err(json) {
        Error::Config { field, problem } => {
            assert!(!problem.is_empty());
            field
        }
        Error::OutOfRange { field, .. } => field.into(),
        other => panic!("{json}: {other}"),
    }
}

fn with(id: &str, fields: &str) -> String {
    format!(r#"{{"mechanism": "{id}", {fields}}}"#)
}

#[test]
fn unknown_fields_are_named() {
    for id in Mechanism::IDS {
        assert_eq!(blamed(&with(id, r#""gama": 0.5"#)), "gama");
        assert_eq!(blamed(&with(id, r#""codebook": {"kind": "pool", "ratio": 2}"#)), "codebook");
    }
    for (id, field) in [
        ("softmax", r#""gamma": 0.5"#),
        ("uniform", r#""tied": true"#),
        ("uniform", r#""scale": 1.0"#),
        ("infsa", r#""tol": 1e-3"#),
        ("infsa", r#""iterations": 2"#),
        ("infsa-resolvent", r#""broadcast": false"#),
        ("linear-infsa", r#""max_iter": 3"#),
    ] {
        let name = field.split('"').nth(1).unwrap();
        assert_eq!(blamed(&with(id, field)), name, "{id}");
    }
}

/// A field of a part that is replaced would say nothing.
#[test]
fn fields_of_parts_that_are_replaced_are_named() {
    for (id, field, part) in [
        ("ssa", r#""clusters": 4"#, r#""structure": {"kind": "dense", "window": 5}"#),
        ("softmax", r#""scale": 0.25"#, r#""score": "cosine-exp""#),
        ("infsa", r#""eps": 0.5"#, r#""normalisation": "row""#),
        ("soft", r#""landmarks": {"kind": "first", "count": 3}"#, r#""structure": "dense""#),
        // Its default is told apart from no value too.
        ("infsa", r#""gamma": 0.7"#, r#""series": "hops""#),
        ("infsa", r#""gamma": 0.7"#, r#""series": {"gamma": 0.9}"#),
        ("fna", r#""alpha": 1.2"#, r#""score": {"alpha": 1.9}"#),
    ] {
        let name = field.split('"').nth(1).unwrap();
        assert_eq!(blamed(&with(id, &format!("{field}, {part}"))), name, "{id}");
        Mechanism::from_json(&with(id, part)).unwrap();
    }
    let kept = Mechanism::from_json(&with("ssa", r#""clusters": 4, "structure": {"estimator": "centroid"}"#)).unwrap();
    assert_eq!(kept.clustering().unwrap().clusters, Some(4));
}

/// Whoever gives parts alone is told how these are named.
#[test]
fn parts_without_a_name_are_called_composed() {
    let message = Mechanism::from_json(r#"{"score": "laplacian"}"#).unwrap_err().to_string();
    assert!(message.contains("composed"), "{message}");
}

/// What would have been right is said in words of the configuration.
#[test]
fn objects_are_asked_for_by_example() {
    for (id, field, example) in [
        ("ssa", r#""causal_clusters": "prefix""#, r#"{"kind": "prefix"}"#),
        ("soft", r#""landmarks": "pool""#, r#"{"kind": "pool", "ratio": 8}"#),
    ] {
        let message = Mechanism::from_json(&with(id, field)).unwrap_err().to_string();
        assert!(message.contains(field.split('"').nth(1).unwrap()) && message.contains(example), "{message}");
    }
}

#[test]
fn wrong_types_are_named() {
    for (id, field) in [
        ("softmax", r#""scale": "big""#),
        ("softmax", r#""causal": 1"#),
        ("uniform", r#""causal": null"#),
        ("infsa", r#""gamma": "0.7""#),
        ("infsa", r#""gamma": [0.5, 0.7]"#),
        ("infsa", r#""activation": "softplus""#),
        ("infsa", r#""activation": 1"#),
        ("infsa", r#""tied": "yes""#),
        ("infsa-resolvent", r#""max_iter": 2.5"#),
        ("infsa-resolvent", r#""max_iter": -1"#),
        ("linear-infsa", r#""iterations": 1.0"#),
        ("linear-infsa", r#""operator": "Exact""#),
        ("linear-infsa", r#""norm_bias": "automatic""#),
        ("linear-infsa", r#""norm_bias": true"#),
        ("linear-infsa", r#""broadcast": 0"#),
        ("fna", r#""kappa": "image""#),
        ("fna", r#""kappa": [1.0]"#),
        ("fna", r#""manifold": "torus""#),
        ("fna", r#""kernel": "gaussian""#),
    ] {
        let name = field.split('"').nth(1).unwrap();
        assert_eq!(blamed(&with(id, field)), name, "{id}: {field}");
    }
}

/// The ends of every range are in it, and the next numbers beyond are not.
#[test]
fn ranges_end_where_they_say() {
    let ends = [
        ("softmax", "scale", 1e-18, 1e18),
        ("infsa", "gamma", 1e-12, 1.0),
        ("infsa-resolvent", "gamma", 1e-12, 0.99999),
        ("infsa", "eps", 1e-30, 1e30),
        ("linear-infsa", "norm_bias", 1e-12, 1e3),
        ("fna", "kappa", 1e-30, 1e30),
        ("fna", "intrinsic_dim", 1e-3, 1e4),
        ("fna", "norm_exponent", -100.0, 100.0),
        ("fna", "alpha", 1.0, 2.0),
        ("soft", "ridge", 1e-12, 1e12),
        ("laplacian", "ridge", 1e-12, 1e12),
        ("laplacian", "lambda", 1e-18, 1e18),
        ("laplacian-exact", "whiten_eps", 1e-12, 1e12),
    ];
    for (id, field, least, most) in ends {
        let read = |value: f64| Mechanism::from_json(&with(id, &format!(r#""{field}": {value:e}"#)));
        for end in [least, most] {
            assert!(read(end).is_ok(), "{id}, {field}: {end:e}");
        }
        for beyond in [f64::next_down(least), f64::next_up(most)] {
            let error = read(beyond).unwrap_err();
            assert!(matches!(error, Error::OutOfRange { field: f, .. } if f == field), "{id}, {field}: {error}");
        }
    }
}

#[test]
fn values_out_of_range_are_named() {
    let all_gamma = ["infsa", "infsa-resolvent", "linear-infsa"];
    for id in all_gamma {
        for gamma in ["0", "-0.1", "1.0001", "1e300"] {
            assert_eq!(blamed(&with(id, &format!(r#""gamma": {gamma}"#))), "gamma");
        }
        for (field, value) in [("eps", "-1e-9"), ("scale", "0"), ("scale", "-1")] {
            assert_eq!(blamed(&with(id, &format!(r#""{field}": {value}"#))), field);
        }
    }
    assert_eq!(blamed(&with("infsa-resolvent", r#""gamma": 1"#)), "gamma");
    for (id, field, value) in [
        ("softmax", "scale", "0.0"),
        ("infsa-resolvent", "tol", "0"),
        ("infsa-resolvent", "tol", "1"),
        ("infsa-resolvent", "max_iter", "0"),
        ("linear-infsa", "iterations", "0"),
        ("linear-infsa", "iterations", "65"),
        ("linear-infsa", "norm_bias", "-0.5"),
        ("fna", "alpha", "0.99"),
        ("fna", "alpha", "2.01"),
        ("fna", "kappa", "0"),
        ("fna", "kappa", "-3"),
        ("fna", "kappa", "1e-31"),
        ("fna", "kappa", "1e31"),
        ("fna", "intrinsic_dim", "1e300"),
        ("fna", "norm_exponent", "1e300"),
        ("softmax", "scale", "1e39"),
        ("softmax", "scale", "1e-300"),
        ("infsa", "eps", "1e-300"),
        ("infsa", "gamma", "1e-300"),
        ("infsa-resolvent", "gamma", "0.999999"),
        ("infsa-resolvent", "max_iter", "18446744073709551615"),
        ("linear-infsa", "norm_bias", "1e39"),
        ("laplacian", "lambda", "1e-300"),
        ("laplacian", "lambda", "1e300"),
        ("laplacian-exact", "whiten_eps", "1e-300"),
        ("soft", "ridge", "1e300"),
        ("soft", "value_conv", "4294967297"),
        ("ssa", "balance", "1e300"),
        ("ssa", "clusters", "18446744073709551615"),
        ("ssa", "kmeans_iterations", "1000000000"),
        ("fna", "norm_exponent", "101"),
        ("fna", "intrinsic_dim", "1e-300"),
        ("fna", "kappa", "\"sphere\""),
        ("fna", "intrinsic_dim", "0"),
    ] {
        let error = Mechanism::from_json(&with(id, &format!(r#""{field}": {value}"#))).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { field: f, .. } if f == field), "{error}");
    }
}

#[test]
fn numbers_that_json_cannot_write_are_caught_too() {
    for bad in [f64::NAN, f64::INFINITY] {
        let scale = Mechanism::from(Softmax::default().with_scale(Some(bad)));
        let gamma = Mechanism::from(Infsa::default().with_gamma(bad));
        let eps = Mechanism::from(Infsa::default().with_eps(bad));
        let tol = Mechanism::from(InfsaResolvent::default().with_tol(bad));
        let bias = Mechanism::from(LinearInfsa::default().with_norm_bias(NormBias::Value(bad)));
        for (field, mechanism) in [("scale", scale), ("gamma", gamma), ("eps", eps), ("tol", tol), ("norm_bias", bias)]
        {
            let error = mechanism.validate().unwrap_err();
            assert!(matches!(error, Error::OutOfRange { field: f, .. } if f == field), "{error}");
        }
    }
}

#[test]
fn documents_that_are_no_mechanism() {
    assert_eq!(blamed(""), ".");
    assert_eq!(blamed("{\"mechanism\": \"infsa\""), ".");
    assert_eq!(blamed("[]"), ".");
    assert_eq!(blamed("\"infsa\""), ".");
    assert_eq!(blamed("{}"), "mechanism");
    assert_eq!(blamed(r#"{"mechanism": 3}"#), "mechanism");
    assert_eq!(blamed(r#"{"mechanism": "Softmax"}"#), "mechanism");
    let message = Mechanism::preset("synthesizer").unwrap_err().to_string();
    assert!(Mechanism::IDS.iter().all(|id| message.contains(id)), "{message}");
}

#[test]
fn rules_for_kappa_belong_to_a_manifold() {
    for rule in ["text", "vision"] {
        assert_eq!(blamed(&with("fna", &format!(r#""manifold": "sphere", "kappa": "{rule}""#))), "kappa");
    }
    assert!(Mechanism::from_json(&with("fna", r#""manifold": "sphere", "kappa": 0.5"#)).is_ok());
}

#[test]
fn fields_of_landmarks_out_of_range_are_named() {
    for (id, fields, field) in [
        ("soft", r#""landmarks": {"kind": "pool", "ratio": 0}"#, "landmarks.ratio"),
        ("soft", r#""landmarks": {"kind": "pool"}"#, "landmarks"),
        ("soft", r#""landmarks": {"kind": "pool", "ratio": 2, "count": 4}"#, "landmarks"),
        ("soft", r#""landmarks": {"kind": "pool", "side": 2}"#, "landmarks"),
        ("soft", r#""landmarks": {"kind": "pool", "count": 0}"#, "landmarks.count"),
        ("laplacian", r#""landmarks": {"kind": "pool", "count": 65537}"#, "landmarks.count"),
        ("laplacian", r#""landmarks": {"kind": "conv", "count": 4}"#, "landmarks"),
        ("soft", r#""landmarks": {"kind": "all", "ratio": 2}"#, "landmarks.ratio"),
        ("laplacian", r#""landmarks": {"kind": "conv", "ratio": 4294967296}"#, "landmarks.ratio"),
        ("soft", r#""landmarks": {"kind": "stride", "ratio": 2}"#, "landmarks.kind"),
        ("soft", r#""landmarks": {"kind": "random", "count": 0, "seed": 1}"#, "landmarks.count"),
        ("soft", r#""landmarks": {"kind": "all"}, "landmark_act": true"#, "landmark_act"),
        ("soft", r#""degree": "token""#, "degree"),
        ("soft", r#""scale": 0"#, "scale"),
        ("soft", r#""inverse": "cg""#, "inverse"),
        ("soft", r#""newton_iterations": 65"#, "newton_iterations"),
        ("soft", r#""newton_init": "identity", "ridge": 0"#, "ridge"),
        ("soft", r#""ridge": -0.1"#, "ridge"),
        ("soft", r#""inverse": "cholesky", "gradient": "unrolled""#, "gradient"),
        ("soft", r#""eigen_cutoff": 1"#, "eigen_cutoff"),
        ("soft", r#""value_conv": 4"#, "value_conv"),
        ("soft", r#""tied": true"#, "tied"),
        ("laplacian", r#""lambda": 0"#, "lambda"),
        ("laplacian", r#""landmarks": {"kind": "all"}"#, "landmarks.kind"),
        ("laplacian", r#""inverse": "eigen""#, "inverse"),
        ("laplacian", r#""newton_iterations": 0"#, "newton_iterations"),
        ("laplacian", r#""whitening": "full""#, "whitening"),
        ("laplacian-exact", r#""whiten_eps": 0"#, "whiten_eps"),
        ("laplacian-exact", r#""ridge": 0.5"#, "ridge"),
    ] {
        assert_eq!(blamed(&with(id, fields)), field, "{id}, {fields}");
    }
}

/// One of the two says how wide windows are, and which one is missing or too much is told.
#[test]
fn pooled_landmarks_have_a_side_or_a_number() {
    for (fields, told) in
        [("", "need `ratio`"), (r#", "ratio": 2, "count": 4"#, "exclude each other"), (r#", "side": 2"#, "`side`")]
    {
        for id in ["soft", "soft-pp", "laplacian"] {
            let message = Mechanism::from_json(&with(id, &format!(r#""landmarks": {{"kind": "pool"{fields}}}"#)))
                .unwrap_err()
                .to_string();
            assert!(["`ratio`", "`count`", told].iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

#[test]
fn null_is_refused_where_there_is_no_such_default() {
    for (field, id) in [("gamma", "infsa"), ("eps", "infsa"), ("activation", "infsa"), ("tol", "infsa-resolvent")] {
        assert_eq!(blamed(&with(id, &format!(r#""{field}": null"#))), field);
    }
}
