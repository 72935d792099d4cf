//! Which masks and shapes each mechanism takes: everything else is refused by name, on every path, never ignored.

use crate::support;

use resolvent_kernels::{
    ClusterPlan, Error, Inputs, Mask, Mechanism, Operator, Parameter, PlanTensors, Scratch, Shape, Strategy,
    check_finite,
    mechanism::{self, Inverse, Landmarks, NewtonInit},
    plan, reference,
};

const SELF: Shape = Shape::square(2, 2, 6, 4);
const CROSS: Shape = Shape { seq_q: 3, seq_kv: 6, ..SELF };

/// Whether every way of making the call accepts it; panics where they differ.
fn accepted(json: &str, shape: Shape, causal: bool) -> bool {
    let mechanism = Mechanism::from_json(json).unwrap();
    let mut inputs = support::random::problem(Mechanism::preset("uniform").unwrap(), shape, 1);
    inputs.k = inputs.k.filter(|_| !mechanism.tied);
    let inputs = inputs.inputs();
    let mask = Mask { causal, ..Mask::NONE };
    let by_reference = reference::forward(&mechanism, &shape, &inputs, &mask).map(drop);
    let by_plan = plan(&mechanism, &shape, causal, Strategy::Auto).map(drop);
    let by_operator = Operator::new(&mechanism, shape, causal, Strategy::Auto).map(drop);
    assert_eq!(by_reference, by_plan, "{json}");
    assert_eq!(by_reference, by_operator, "{json}");
    match by_reference {
        Ok(()) => true,
        Err(Error::Unsupported { mechanism: id, what, why }) => {
            assert_eq!(id, mechanism.id());
            assert!(!what.is_empty() && !why.is_empty());
            false
        }
        Err(other) => panic!("{json}: {other}"),
    }
}

#[test]
fn causality() {
    for (json, yes) in [
        (r#"{"mechanism": "softmax"}"#, true),
        (r#"{"mechanism": "uniform"}"#, true),
        (r#"{"mechanism": "infsa"}"#, true),
        (r#"{"mechanism": "infsa-resolvent"}"#, false),
        (r#"{"mechanism": "linear-infsa"}"#, false),
        (r#"{"mechanism": "fna"}"#, true),
        (r#"{"mechanism": "fna", "norm_exponent": 1}"#, true),
        (r#"{"mechanism": "ssa"}"#, true),
        (r#"{"mechanism": "ssa", "estimator": "centroid"}"#, true),
        (r#"{"mechanism": "soft"}"#, false),
        (r#"{"mechanism": "soft-pp"}"#, false),
        (r#"{"mechanism": "laplacian"}"#, false),
        (r#"{"mechanism": "laplacian-exact"}"#, false),
        (r#"{"mechanism": "laplacian-exact", "whitening": "none"}"#, false),
        (r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "per-query"}"#, true),
    ] {
        assert!(accepted(json, SELF, false), "{json}");
        assert_eq!(accepted(json, SELF, true), yes, "{json}, asked by the mask");
        let configured = json.replace('}', r#", "causal": true}"#);
        assert_eq!(accepted(&configured, SELF, false), yes, "{json}, asked by the configuration");
    }
}

#[test]
fn cross_attention() {
    for (json, yes, causal) in [
        (r#"{"mechanism": "softmax"}"#, true, true),
        (r#"{"mechanism": "softmax", "tied": true}"#, false, false),
        (r#"{"mechanism": "uniform"}"#, true, true),
        (r#"{"mechanism": "infsa"}"#, true, false),
        (r#"{"mechanism": "infsa", "tied": true}"#, false, false),
        (r#"{"mechanism": "infsa-resolvent"}"#, false, false),
        (r#"{"mechanism": "linear-infsa"}"#, true, false),
        (r#"{"mechanism": "linear-infsa", "iterations": 2}"#, false, false),
        (r#"{"mechanism": "linear-infsa", "tied": true}"#, false, false),
        (r#"{"mechanism": "fna"}"#, true, true),
        (r#"{"mechanism": "fna", "tied": true}"#, false, false),
        (r#"{"mechanism": "fna", "norm_exponent": 1}"#, false, false),
        (r#"{"mechanism": "ssa"}"#, false, false),
        (r#"{"mechanism": "ssa", "cluster_on": "dual"}"#, true, false),
        (r#"{"mechanism": "soft"}"#, false, false),
        (r#"{"mechanism": "soft-pp"}"#, false, false),
        (r#"{"mechanism": "laplacian"}"#, true, false),
        (r#"{"mechanism": "laplacian", "tied": true}"#, false, false),
        (r#"{"mechanism": "laplacian-exact"}"#, true, false),
        (r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "none"}"#, true, true),
    ] {
        assert_eq!(accepted(json, CROSS, false), yes, "{json}");
        assert_eq!(accepted(json, CROSS, true), causal, "{json}, causal");
    }
    assert!(accepted(r#"{"mechanism": "linear-infsa", "iterations": 2}"#, SELF, false));
    let (fna, more_queries) = (r#"{"mechanism": "fna"}"#, Shape { seq_q: 6, seq_kv: 3, ..SELF });
    assert!(accepted(fna, more_queries, false) && !accepted(fna, more_queries, true));
}

#[test]
fn a_sphere_needs_two_channels() {
    let [line, circle] = [1, 2].map(|head_dim| Shape { head_dim, ..SELF });
    assert!(accepted(r#"{"mechanism": "fna"}"#, line, false));
    for sphere in [
        r#"{"mechanism": "fna", "manifold": "sphere"}"#,
        r#"{"mechanism": "composed", "score": {"kind": "levy", "manifold": "sphere"}}"#,
    ] {
        assert!(!accepted(sphere, line, false) && accepted(sphere, circle, false), "{sphere}");
    }
}

#[test]
fn empty_axes_are_refused() {
    for id in Mechanism::IDS {
        let mechanism = Mechanism::preset(id).unwrap();
        for axis in 0..6 {
            let mut s = [2, 2, 6, 6, 4, 4];
            s[axis] = 0;
            let [batch, heads, seq_q, seq_kv, head_dim, value_dim] = s;
            let shape = Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim };
            let inputs = Inputs { q: &[], k: Some(&[]), v: &[], extras: Default::default() };
            assert!(plan(&mechanism, &shape, false, Strategy::Auto).is_err());
            assert!(reference::forward(&mechanism, &shape, &inputs, &Mask::NONE).is_err());
        }
    }
}

/// The tensor that the reference refuses in a call of `json` changed by `spoil`.
fn refused(json: &str, spoil: impl Fn(&mut support::problem::Problem)) -> (&'static str, String) {
    let mut p = support::random::problem(Mechanism::from_json(json).unwrap(), SELF, 2);
    spoil(&mut p);
    let forward = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).map(drop);
    let backward = reference::backward(&p.mechanism, &p.shape, &p.inputs(), &p.mask(), &p.dout).map(drop);
    let error = forward.and(backward).unwrap_err();
    match error {
        Error::Length { tensor, .. } | Error::Tensor { tensor, .. } => (tensor, error.to_string()),
        Error::OutOfRange { field, .. } => (field, error.to_string()),
        other => panic!("{json}: {other}"),
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    const INFSA: &str = r#"{"mechanism": "infsa"}"#;
    const TIED: &str = r#"{"mechanism": "infsa", "tied": true}"#;
    assert_eq!(refused(INFSA, |p| p.q.truncate(95)).0, "q");
    assert_eq!(refused(INFSA, |p| p.k.as_mut().unwrap().push(0.0)).0, "k");
    assert_eq!(refused(INFSA, |p| p.k = None).0, "k");
    assert_eq!(refused(TIED, |p| p.k = Some(p.q.clone())).0, "k");
    assert_eq!(refused(INFSA, |p| p.v.clear()).0, "v");
    assert_eq!(refused(INFSA, |p| p.dout.truncate(1)).0, "dout");
    assert_eq!(refused(INFSA, |p| p.key_mask = Some(vec![true; 6])).0, "key_mask");
    assert_eq!(refused(INFSA, |p| p.query_mask = Some(vec![true; 13])).0, "query_mask");
    assert_eq!(refused(INFSA, |p| p.set_gamma(vec![0.5])).0, "gamma");
    assert_eq!(refused(INFSA, |p| p.set_gamma(vec![0.5, f32::NAN])).0, "gamma");
    assert_eq!(refused(r#"{"mechanism": "softmax"}"#, |p| p.set_gamma(vec![0.5; 2])).0, "gamma");
    let give = |parameter, values: [f32; 2]| {
        move |p: &mut support::problem::Problem| {
            p.parameters.insert(parameter, values.into());
        }
    };
    const FNA: &str = r#"{"mechanism": "fna"}"#;
    assert_eq!(refused(FNA, give(Parameter::Alpha, [1.5, 2.0])).0, "alpha");
    assert_eq!(refused(FNA, give(Parameter::Kappa, [1.5, 0.0])).0, "kappa");
    assert_eq!(refused(FNA, give(Parameter::Kappa, [f32::INFINITY, 1.0])).0, "kappa");
    assert_eq!(refused(r#"{"mechanism": "fna", "alpha": 2}"#, give(Parameter::Alpha, [1.5; 2])).0, "alpha");
    assert_eq!(refused(r#"{"mechanism": "infsa-resolvent"}"#, |p| p.set_gamma(vec![0.5, 1.0])).0, "gamma");
    let (_, message) = refused(INFSA, |p| p.q.truncate(95));
    assert!(message.contains("95") && message.contains("96"), "{message}");
}

#[test]
fn landmark_tensors_that_do_not_fit_are_named() {
    let conv = r#"{"mechanism": "soft", "landmarks": {"kind": "conv", "ratio": 2}}"#;
    let drawn = r#"{"mechanism": "soft", "landmarks": {"kind": "random", "count": 2, "seed": 0}}"#;
    let depthwise = r#"{"mechanism": "laplacian", "landmarks": {"kind": "conv", "ratio": 2}}"#;
    for json in [conv, depthwise] {
        assert_eq!(refused(json, |p| p.parameters.clear()).0, "landmark_weight");
        let short = |p: &mut support::problem::Problem| p.parameters.values_mut().for_each(|x| x.truncate(1));
        assert_eq!(refused(json, short).0, "landmark_weight");
    }
    for indices in [vec![0, 1, 2], vec![0, 0, 1, 2], vec![1, 0, 1, 2], vec![0, 6, 1, 2], vec![-1, 0, 1, 2]] {
        assert_eq!(refused(drawn, |p| p.landmark_indices = Some(indices.clone())).0, "landmark_indices");
    }
    let undrawn = |p: &mut support::problem::Problem| p.landmark_indices = Some(vec![0, 1, 0, 1]);
    assert_eq!(refused(r#"{"mechanism": "soft"}"#, undrawn).0, "landmark_indices");
}

/// What depends on the sizes of a call is refused by name: grids, windows and picks that do not fit.
#[test]
fn sizes_that_do_not_fit_are_named() {
    for (json, field) in [
        (r#"{"mechanism": "soft", "grid": [2, 2]}"#, "grid"),
        (r#"{"mechanism": "laplacian", "grid": [4, 2]}"#, "grid"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "first", "count": 7}}"#, "landmarks.count"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "given"}}"#, "landmarks.count"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "conv", "ratio": 7}}"#, "landmarks.ratio"),
        (r#"{"mechanism": "soft", "grid": [2, 3], "landmarks": {"kind": "conv", "ratio": 3}}"#, "landmarks.ratio"),
    ] {
        let error = plan(&Mechanism::from_json(json).unwrap(), &SELF, false, Strategy::Auto).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { field: got, .. } if got == field), "{json}: {error}");
    }
    let full = Mechanism::from_json(r#"{"mechanism": "laplacian-exact", "whitening": "full"}"#).unwrap();
    assert_eq!(plan(&full, &SELF, false, Strategy::Auto).unwrap().strategy, Strategy::Reference);
    assert!(matches!(plan(&full, &SELF, false, Strategy::Fused), Err(Error::Unsupported { .. })));
    let long = Shape::square(1, 1, 1025, 4);
    assert!(matches!(plan(&full, &long, false, Strategy::Auto), Err(Error::Unsupported { .. })));
}

/// Where queries are keys, one mask is for both.
#[test]
fn a_mask_of_queries_alone_is_refused_where_queries_are_keys() {
    let mut p = support::random::problem(Mechanism::preset("soft").unwrap(), SELF, 2);
    let refused = |p: &support::problem::Problem| reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask());
    for masked in [0, 3, 11] {
        p.query_mask = Some((0..12).map(|n| n != masked).collect());
        assert!(matches!(refused(&p), Err(Error::Unsupported { mechanism: "soft", .. })), "{masked}");
    }
    p.key_mask = p.query_mask.clone();
    assert!(refused(&p).is_ok());
}

/// What a plan counts for the most steps that it may take, as `bench` says of it.
#[test]
fn iterations_that_end_early() {
    for (json, yes) in [
        (r#"{"mechanism": "softmax"}"#, false),
        (r#"{"mechanism": "linear-infsa", "iterations": 3}"#, false),
        (r#"{"mechanism": "infsa-resolvent"}"#, true),
        (r#"{"mechanism": "soft", "inverse": "newton-schulz"}"#, true),
        (r#"{"mechanism": "soft", "inverse": "newton-schulz", "landmarks": {"kind": "all"}}"#, false),
        (r#"{"mechanism": "soft-pp", "inverse": "eigen"}"#, false),
        (r#"{"mechanism": "laplacian", "inverse": "cg"}"#, true),
        (r#"{"mechanism": "laplacian", "inverse": "newton-schulz"}"#, true),
        (r#"{"mechanism": "laplacian", "inverse": "cholesky"}"#, false),
    ] {
        assert_eq!(Mechanism::from_json(json).unwrap().iterates(), yes, "{json}");
    }
}

/// A stored plan that is damaged is refused with the place of the number.
#[test]
fn numbers_of_a_plan_are_found() {
    for at in [3, 4, 5] {
        let mut blocks = vec![[0, 0, 0], [0, 1, 1]];
        blocks[1][at % 3] = 7;
        let tensors = PlanTensors {
            label_q: vec![0, 1, 1],
            label_k: vec![0, 1, 1],
            exact_blocks: blocks,
            ..PlanTensors::default()
        };
        let error = ClusterPlan::from_tensors(&tensors, &Shape::square(1, 1, 3, 2)).unwrap_err();
        assert!(
            matches!(error, Error::Index { tensor: "exact_blocks", index, value: 7, .. } if index == at),
            "{error}"
        );
    }
}

/// The same of its edges.
#[test]
fn numbers_of_edges_are_found() {
    for at in 0..6 {
        let mut edges = vec![[0, 0, 2], [0, 1, 0]];
        edges[at / 3][at % 3] = 7;
        let tensors = PlanTensors {
            label_q: vec![0, 1, 1],
            label_k: vec![0, 1, 1],
            edges,
            edge_log_weight: vec![0.5; 2],
            ..PlanTensors::default()
        };
        let error = ClusterPlan::from_tensors(&tensors, &Shape::square(1, 1, 3, 2)).unwrap_err();
        assert!(matches!(error, Error::Index { tensor: "edges", index, value: 7, .. } if index == at), "{at}: {error}");
    }
}

/// What is learned per head has one number for each.
#[test]
fn parameters_of_heads_have_one_axis() {
    for (id, parameter) in [
        ("infsa", Parameter::Gamma),
        ("fna", Parameter::Alpha),
        ("fna", Parameter::Kappa),
        ("laplacian", Parameter::Lambda),
        ("laplacian-exact", Parameter::Lambda),
        ("soft", Parameter::Scale),
    ] {
        assert_eq!(Mechanism::preset(id).unwrap().parameter_shape(parameter, &SELF), [SELF.heads], "{id}");
    }
}

/// The first number that is none is found, with its place.
#[test]
fn numbers_that_are_none_are_found() {
    assert!(check_finite("q", &[0.0, f32::MAX]).is_ok());
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = check_finite("q", &[0.0, value, value]).unwrap_err();
        assert!(matches!(error, Error::NonFinite { tensor: "q", index: 1, .. }), "{error}");
    }
}

/// The naive path writes all of `stats`, whatever they held.
#[test]
fn the_naive_path_leaves_no_statistics_unwritten() {
    for id in Mechanism::IDS {
        let p = support::random::problem(Mechanism::preset(id).unwrap(), SELF, 2);
        let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Reference).unwrap();
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k, v) = (narrow(&p.q), p.k.as_deref().map(narrow), narrow(&p.v));
        let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() };
        let (mut out, mut stats) = (vec![f32::NAN; op.out_len()], vec![f32::NAN; op.plan().stats]);
        op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default()).unwrap();
        assert!(stats.iter().chain(&out).all(|x| x.is_finite()), "{id}");
    }
}

/// Filters over landmarks begin as the mean of their window, channel by channel; the rest as if it were not there.
#[test]
fn parameters_begin_as_means_and_nothing() {
    let json =
        r#"{"mechanism": "soft", "landmarks": {"kind": "conv", "ratio": 3}, "landmark_act": true, "value_conv": 3}"#;
    let mechanism = Mechanism::from_json(json).unwrap();
    for parameter in mechanism.parameters() {
        let got = mechanism.parameter_default(parameter, &SELF);
        assert_eq!(got.len(), mechanism.parameter_shape(parameter, &SELF).iter().product::<usize>(), "{parameter:?}");
        let expected: Vec<f32> = match parameter {
            Parameter::Scale => vec![0.25; got.len()],
            Parameter::LandmarkNormGamma => vec![1.0; got.len()],
            // [out, in, window], the identity of 4 channels.
            Parameter::LandmarkWeight => (0..48).map(|n| if n / 12 == n / 3 % 4 { 1.0 / 3.0 } else { 0.0 }).collect(),
            _ => vec![0.0; got.len()],
        };
        assert_eq!(got, expected, "{parameter:?}");
    }
}

/// The named settings of `soft`, field by field.
#[test]
fn named_settings() {
    let soft = mechanism::Soft::default();
    let printed = soft.clone().as_printed();
    assert_eq!((printed.inverse, printed.newton_init), (Inverse::NewtonSchulz, NewtonInit::Paper));
    assert_eq!((printed.newton_iterations, printed.ridge), (20, 0.0));
    let official = soft.clone().official(7);
    assert_eq!((official.inverse, official.newton_init), (Inverse::NewtonSchulz, NewtonInit::Official));
    assert_eq!((official.newton_iterations, official.ridge, official.landmark_act), (20, 0.01, true));
    assert_eq!(official.landmarks, Landmarks::Conv { ratio: 7 });
    assert_eq!((soft.clone().robust().inverse, soft.robust().ridge), (Inverse::Cholesky, 0.01));
}

/// Landmarks that differ by less than f32 tells apart in their similarity, without a ridge: a pivot that is not zero, but noise.
#[test]
fn nearly_singular_matrices_are_refused_by_name() {
    for id in ["soft", "laplacian"] {
        for inverse in ["cholesky", "cg"] {
            if (id, inverse) == ("soft", "cg") {
                continue;
            }
            let json = format!(
                r#"{{"mechanism": "{id}", "ridge": 0, "inverse": "{inverse}", "landmarks": {{"kind": "pool", "ratio": 2}}}}"#
            );
            let mut p = support::random::problem(Mechanism::from_json(&json).unwrap(), SELF, 2);
            // The first token is apart: calls in which all are near are refused for that.
            let at = |token: usize| if token == 0 { 2.0 } else { 0.5 + 2e-8 * (token % 6) as f64 };
            let near =
                |x: &mut Vec<f64>| x.iter_mut().enumerate().for_each(|(n, x)| *x = at(n / SELF.head_dim % SELF.seq_q));
            near(&mut p.q);
            p.k.iter_mut().for_each(near);
            for strategy in [Strategy::Fused, Strategy::Reference] {
                let error = p.solve::<f32>(strategy, None).unwrap_err();
                let by_name = matches!(error, Error::Singular { .. })
                    || id == "laplacian" && matches!(error, Error::Close { tensor: "k", .. });
                assert!(by_name, "{json}: {error}");
            }
        }
    }
}

/// Coinciding landmarks without a ridge have no inverse: said by name, not returned as noise.
#[test]
fn singular_matrices_are_refused_by_name() {
    for id in ["soft", "laplacian"] {
        let json = format!(
            r#"{{"mechanism": "{id}", "ridge": 0, "inverse": "cholesky", "landmarks": {{"kind": "pool", "ratio": 2}}}}"#
        );
        let mut p = support::random::problem(Mechanism::from_json(&json).unwrap(), SELF, 2);
        p.q.fill(0.5);
        p.k.iter_mut().for_each(|k| k.fill(0.5));
        for strategy in [Strategy::Fused, Strategy::Reference] {
            let error = p.solve::<f32>(strategy, None).unwrap_err();
            assert!(matches!(error, Error::Singular { landmark: 1, .. }), "{error}");
            assert!(error.to_string().contains("ridge"), "{error}");
        }
    }
}
