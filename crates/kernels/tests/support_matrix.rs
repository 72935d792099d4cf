//! Which masks and shapes each mechanism takes: everything else is refused by name, on every path, never ignored.

mod support;

use resolvent_kernels::{Error, Inputs, Mask, Mechanism, Operator, Parameter, Shape, Strategy, plan, reference};

const SELF: Shape = Shape::square(2, 2, 6, 4);
const CROSS: Shape = Shape { seq_q: 3, seq_kv: 6, ..SELF };

/// Whether every way of making the call accepts it; panics where they differ.
fn accepted(json: &str, shape: Shape, causal: bool) -> bool {
    let mechanism = Mechanism::from_json(json).unwrap();
    let mut inputs = support::random::problem(Mechanism::preset("uniform").unwrap(), shape, 1);
    inputs.k = inputs.k.filter(|_| !mechanism.tied());
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
    let line = Shape { head_dim: 1, ..SELF };
    assert!(accepted(r#"{"mechanism": "fna"}"#, line, false));
    assert!(!accepted(r#"{"mechanism": "fna", "manifold": "sphere"}"#, line, false));
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
