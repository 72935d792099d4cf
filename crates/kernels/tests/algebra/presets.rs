//! Presets that are four values and a name: read, written, changed part by part, and computed as those values are.

use crate::support;

use resolvent_kernels::{
    Error, Mechanism, Shape, Strategy, Tol,
    mechanism::{Bandwidth, Dense, Hops, Pooled, Resolvent, Row, Structure},
};
use support::{
    problem::{Problem, assert_solution},
    random::{is_composed, problem},
};

/// Those without a struct of their own.
fn named() -> impl Iterator<Item = (&'static str, Mechanism)> {
    let presets = Mechanism::IDS.into_iter().map(|id| (id, Mechanism::preset(id).unwrap()));
    presets.filter(|(_, preset)| is_composed(preset))
}

fn read(json: &str) -> Mechanism {
    Mechanism::from_json(json).unwrap()
}

#[test]
fn ids_are_distinct_and_every_preset_is_written_as_it_is_read() {
    let mut ids = Mechanism::IDS.to_vec();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), Mechanism::IDS.len());
    assert_eq!(named().count(), 9);
    for id in Mechanism::IDS {
        let preset = Mechanism::preset(id).unwrap();
        assert_eq!((preset.id(), &read(&format!(r#"{{"mechanism": "{id}"}}"#))), (id, &preset));
        let written = serde_json::to_string(&preset).unwrap();
        assert!(written.starts_with(&format!(r#"{{"mechanism":"{id}""#)), "{written}");
        assert_eq!(read(&written), preset, "{written}");
    }
}

#[test]
fn values_are_those_of_the_papers() {
    for (id, values) in [
        ("cosine", "cosine-exp x dense x row x one-hop"),
        ("sigmoid", "dot-sigmoid x dense x none x one-hop"),
        ("relu", "dot-relu x dense x none x one-hop"),
        ("linear", "dot-exp x features x row x one-hop"),
        ("performer", "dot-exp x features x row x one-hop"),
        ("nystromformer", "dot-exp x nystrom x factors x one-hop"),
        ("linformer", "dot-exp x projected x row x one-hop"),
        ("routed", "dot-exp x clustered x row x one-hop"),
        ("local", "dot-exp x dense x row x one-hop"),
    ] {
        let preset = Mechanism::preset(id).unwrap();
        assert_eq!(preset.values().to_string(), values, "{id}");
        assert!(preset.paper().is_some_and(|paper| !paper.is_empty()), "{id}");
        assert!(Mechanism::summary(id).is_some_and(|sentence| sentence.ends_with('.')), "{id}");
    }
}

/// A name says nothing of what its values are carried out by.
#[test]
fn a_named_preset_whose_parts_are_replaced_is_the_composition_of_these() {
    let laplacian = r#""score": "laplacian", "structure": {"kind": "nystrom", "landmarks": {"kind": "conv", "ratio": 2}, "newton_init": null,
        "gradient": "unrolled"}, "normalisation": "none", "series": "one-hop""#;
    let others = [
        laplacian,
        r#""score": "levy", "structure": {"kind": "dense"}, "normalisation": "row", "series": "one-hop""#,
        r#""score": "dot-relu", "structure": {"kind": "dense"}, "normalisation": "frobenius", "series": "one-hop""#,
        r#""score": "dot-exp", "structure": {"kind": "clustered", "clusters": 3}, "normalisation": "row", "series": "hops""#,
    ];
    for (parts, id) in
        others.iter().flat_map(|parts| ["cosine", "nystromformer", "relu", "softmax", "infsa"].map(|id| (parts, id)))
    {
        let mechanism = read(&format!(r#"{{"mechanism": "{id}", {parts}}}"#));
        assert!(is_composed(&mechanism), "{id} with {parts}");
        let expected = problem(mechanism.values(), Shape::square(1, 2, 8, 4), 3);
        let got = Problem { mechanism, ..expected.clone() };
        assert_eq!(got.fused(), expected.fused(), "{id} with {parts}");
    }
}

/// Whoever sets a value that a preset has no field for has a composition of it: nothing is ignored.
#[test]
fn a_preset_with_a_value_that_it_has_not_is_a_composition() {
    let with = |mut m: Mechanism, change: fn(&mut Mechanism)| {
        change(&mut m);
        m
    };
    let density = |m: &mut Mechanism| m.normalisation = Row::default().with_density_exponent(2.0).into();
    for m in [
        with(Mechanism::uniform(), |m| m.structure = Pooled::default().with_broadcast(false).into()),
        with(Mechanism::linear_infsa(), density),
        with(Mechanism::softmax(), |m| m.structure = Dense::default().with_sinks(5).into()),
        with(Mechanism::infsa(), |m| m.structure = Dense::default().with_sinks(5).into()),
    ] {
        assert_eq!(m.id(), "composed");
        assert!(m.validate().is_err(), "{m:?}");
    }
    let mut diffused = read(r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#);
    diffused.series = Hops::default().into();
    assert_eq!(read(&serde_json::to_string(&diffused).unwrap()).values(), diffused.values());
    let refused = r#"{"mechanism": "soft", "landmarks": {"kind": "all"}, "value_conv": 3, "series": "hops"}"#;
    assert!(Mechanism::from_json(refused).unwrap_err().to_string().contains("value_conv"));
}

#[test]
fn parts_are_changed_field_by_field_or_replaced() {
    let performer = read(r#"{"mechanism": "performer", "structure": {"count": 64}, "causal": true}"#);
    let Structure::Features(features) = performer.values().structure else { panic!("{performer:?}") };
    assert!(features.map.is_random() && features.count == Some(64) && performer.causal);
    assert_eq!(performer.id(), "performer");
    assert_eq!(read(&serde_json::to_string(&performer).unwrap()), performer);

    let local = read(r#"{"mechanism": "local", "structure": {"kind": "dense", "sinks": 4}, "series": "resolvent"}"#);
    let written = serde_json::to_string(&local).unwrap();
    assert!(written.contains(r#""window":256,"sinks":4"#) && written.contains(r#""kind":"resolvent""#), "{written}");

    let unbounded = read(r#"{"mechanism": "local", "structure": {"window": null}}"#);
    let written = serde_json::to_string(&unbounded).unwrap();
    assert!(unbounded != Mechanism::preset("local").unwrap() && written.contains(r#""window":null"#), "{written}");
    assert_eq!(read(&written), unbounded);

    let clustered = read(r#"{"mechanism": "cosine", "structure": {"kind": "clustered", "clusters": 4}}"#);
    assert_eq!(clustered.values().to_string(), "cosine-exp x clustered x row x one-hop");

    let blamed = |json: &str| match Mechanism::from_json(json).unwrap_err() {
        Error::Config { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(blamed(r#"{"mechanism": "local", "structure": {"widow": 3}}"#), "structure.widow");
    assert_eq!(blamed(r#"{"mechanism": "linear", "skale": 3}"#), "skale");
    let error = Mechanism::from_json(r#"{"mechanism": "sigmoid", "series": "resolvent"}"#).unwrap_err();
    assert!(matches!(error, Error::Unsupported { mechanism: "sigmoid", .. }), "{error}");
}

/// LaplacianFormer goes back through the steps of its inverse; a composition that does not is not taken for it.
#[test]
fn a_preset_is_not_taken_for_another_gradient() {
    // The last begins its steps as the preset does.
    let nystrom = r#""kind": "nystrom", "#;
    let [mut steps, implicit, changed] =
        [(nystrom, "unrolled"), (nystrom, "implicit"), ("", "implicit")].map(|(kind, gradient)| {
            let inverse = format!(r#"{{{kind}"newton_iterations": 2, "gradient": "{gradient}"}}"#);
            let m = read(&format!(r#"{{"mechanism": "laplacian", "ridge": 0.25, "structure": {inverse}}}"#));
            problem(m, Shape::square(1, 1, 16, 4), 3).fused()
        });
    let preset = read(r#"{"mechanism": "laplacian", "ridge": 0.25, "newton_iterations": 2}"#);
    let preset = problem(preset, Shape::square(1, 1, 16, 4), 3).fused();
    steps.remove("dgamma"); // which the preset has not
    assert_eq!(steps, preset);
    for implicit in [implicit, changed] {
        assert_eq!(implicit["out"], preset["out"]);
        assert_ne!(implicit["dk"], preset["dk"]);
    }
}

/// Presets with fields of their own are changed value by value, too.
#[test]
fn values_of_any_preset_are_replaced() {
    let diffused =
        read(r#"{"mechanism": "ssa", "clusters": 4, "causal": true, "series": {"kind": "resolvent", "gamma": 0.5}}"#);
    let values = diffused.values();
    let clusters = |m: &Mechanism| m.clustering().and_then(|ssa| ssa.clusters);
    assert_eq!((values.to_string().as_str(), clusters(&diffused)), ("dot-exp x clustered x row x resolvent", Some(4)));
    assert!(diffused.causal && values.series.gamma() == 0.5);
    let soft = read(r#"{"mechanism": "soft", "ridge": 0.5, "score": "laplacian", "normalisation": "symmetric"}"#);
    assert_eq!(soft.to_string(), "laplacian x nystrom x symmetric x one-hop");
    assert!(soft.tied && matches!(soft.values().structure, Structure::Nystrom(m) if m.ridge == 0.5));
    // A field of a part is the preset's where it is not given.
    let fna = read(r#"{"mechanism": "fna", "kappa": 3, "score": {"alpha": 1.7}}"#);
    assert_eq!(fna, read(r#"{"mechanism": "fna", "kappa": 3, "alpha": 1.7, "score": {}}"#));
    let built = Mechanism::soft().score(Bandwidth::default()).structure(Dense::default()).with_tied(false);
    assert_eq!(built.to_string(), "laplacian x dense x none x one-hop");
    let refused = Mechanism::from_json(r#"{"mechanism": "infsa", "structure": "nystrom"}"#).unwrap_err();
    assert!(refused.to_string().contains("positive definite"), "{refused}");
    let wrong = Mechanism::from_json(r#"{"mechanism": "fna", "alfa": 1, "score": {}}"#).unwrap_err();
    assert!(wrong.to_string().contains("alfa"), "{wrong}");
}

/// Whatever is left in the result's memory: rows that see nothing are zeros.
#[test]
fn rows_without_a_key_are_written() {
    let series = r#"{"mechanism": "composed", "score": {"kind": "levy"}, "series": {"kind": "hops", "count": 2}}"#;
    let all = Mechanism::IDS.into_iter().map(|id| Mechanism::preset(id).unwrap()).chain([read(series)]);
    for mechanism in all {
        let mut p = problem(mechanism, Shape::square(2, 2, 17, 8), 1);
        let keep: Vec<bool> = (0..2 * 17).map(|n| n >= 17).collect();
        for (keys, queries) in [(Some(&keep), None), (None, Some(&keep)), (Some(&keep), Some(&keep))] {
            (p.key_mask, p.query_mask) = (keys.cloned(), queries.cloned());
            // What needs one mask for both refuses two.
            let Ok(got) = p.solve::<f32>(Strategy::Auto, None) else { continue };
            for (name, x) in got {
                assert!(x.iter().all(|x| !x.is_nan()), "{} of {}", name, p.mechanism.id());
            }
        }
    }
}

#[test]
fn the_fused_path_is_the_reference() {
    for (n, (id, mechanism)) in named().enumerate() {
        for (seq_q, seq_kv, masked) in [(33, 33, false), (70, 70, true), (9, 300, true)] {
            let shape = Shape { batch: 2, heads: 2, seq_q, seq_kv, head_dim: 8, value_dim: 5 };
            let mut p = problem(mechanism.clone(), shape, n as u64);
            if masked {
                p.key_mask = Some((0..2 * seq_kv).map(|n| n % 5 != 3).collect());
                p.query_mask = Some((0..2 * seq_q).map(|n| n % 7 != 2).collect());
            }
            let tol = Tol::f32(&p.mechanism).with_scores(20.0).with_noise(1.0);
            let got = p.solve::<f32>(Strategy::Auto, None).unwrap();
            assert_solution(&format!("{id} on {shape:?}"), &got, &p.reference(), &shape, tol);
        }
    }
}

/// What the crates above ask of a mechanism they ask of its values: the same of a preset and of a composition of these.
#[test]
fn values_answer_whatever_their_name() {
    let composed = |parts: &str| read(&format!(r#"{{"mechanism": "composed", {parts}}}"#));
    for (mechanism, local) in [
        (read(r#"{"mechanism": "softmax"}"#), true),
        (read(r#"{"mechanism": "uniform"}"#), true),
        (read(r#"{"mechanism": "local"}"#), true),
        (read(r#"{"mechanism": "linear"}"#), true),
        (read(r#"{"mechanism": "routed"}"#), true),
        (read(r#"{"mechanism": "fna"}"#), true),
        (composed(r#""score": "levy""#), true),
        (read(r#"{"mechanism": "fna", "norm_exponent": 0.5}"#), false),
        (composed(r#""score": "levy", "normalisation": {"kind": "row", "density_exponent": 0.5}"#), false),
        (read(r#"{"mechanism": "infsa"}"#), false),
        (read(r#"{"mechanism": "linear-infsa"}"#), false),
        (read(r#"{"mechanism": "ssa"}"#), false),
        (read(r#"{"mechanism": "soft"}"#), false),
        (read(r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#), false),
        (read(r#"{"mechanism": "softmax", "series": "resolvent"}"#), false),
    ] {
        assert_eq!(mechanism.is_row_local(), local, "{mechanism}");
    }
    let law = r#"{"alpha": 1.5, "manifold": "sphere"}"#;
    let fna = read(&law.replace('{', r#"{"mechanism": "fna", "#));
    let levy = composed(&format!(r#""score": {}"#, law.replace('{', r#"{"kind": "levy", "#)));
    assert_eq!(fna.as_fna(), levy.as_fna());
    assert_eq!(levy.clone().series(Resolvent::default()).as_fna(), None);
    assert_eq!(read(r#"{"mechanism": "softmax"}"#).as_fna(), None);
    // On the sphere the dimension is of all heads, and the length scale of the dimension.
    let [alone, of_four] = [levy.clone(), levy.of_one_head(4, 4)].map(|m| m.as_fna().unwrap().resolve(4, 1));
    assert_eq!(of_four, fna.clone().of_one_head(4, 4).as_fna().unwrap().resolve(4, 1));
    assert_eq!(of_four, fna.as_fna().unwrap().resolve(4, 4));
    assert_ne!(of_four, alone);
}

#[test]
fn without_landmarks_every_pair_is_there() {
    for (json, whole) in [
        (
            r#"{"mechanism": "soft", "scale": 0.3}"#,
            r#"{"mechanism": "soft", "scale": 0.3, "landmarks": {"kind": "all"}}"#,
        ),
        (
            r#"{"mechanism": "soft-pp", "landmark_act": true}"#,
            r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}}"#,
        ),
        (
            r#"{"mechanism": "laplacian", "lambda": 2.0, "whitening": "none"}"#,
            r#"{"mechanism": "laplacian-exact", "lambda": 2.0, "whitening": "none"}"#,
        ),
        (r#"{"mechanism": "ssa"}"#, r#"{"mechanism": "ssa"}"#),
    ] {
        assert_eq!(read(json).without_landmarks(), read(whole));
    }
    let degrees = read(r#"{"mechanism": "soft-pp", "score": "cosine-exp"}"#).without_landmarks();
    assert!(is_composed(&degrees), "{degrees:?}");
    degrees.validate().unwrap();
    assert_eq!((degrees.structure.kind(), degrees.normalisation.kind()), ("dense", "symmetric"));
    let filtered = read(r#"{"mechanism": "soft", "score": "levy", "value_conv": 3}"#);
    assert_eq!(filtered.clone().without_landmarks(), filtered);
    let nystromformer = read(r#"{"mechanism": "nystromformer"}"#).without_landmarks();
    assert_eq!(nystromformer.values(), read(r#"{"mechanism": "softmax"}"#).values());
    assert_eq!(read(r#"{"mechanism": "linformer"}"#).with_projected(7).projected().map(|m| m.count), Some(7));
}
