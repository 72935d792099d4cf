//! Compositions where f32 ends: right, or an error, and nothing that a causal row may not know.

use crate::{ends, support};

use ends::{Tally, resized};
use resolvent_kernels::{Error, Extras, Inputs, Mask, Mechanism, Operator, Shape, Strategy};
use support::{
    problem::{Problem, Solution},
    random::problem,
};

fn planned(json: &str) -> Problem {
    let mut p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 1, 18, 5), 3);
    p.fix_plan();
    p
}

/// Whether the call with some tensors of another size is refused; else it is right.
fn is_refused(json: &str, what: &str, size: f64) -> bool {
    let mut tally = Tally::default();
    tally.take(&format!("{json}, {what} {size:e}"), &resized(&planned(json), what, size));
    tally.report() == (0, 1)
}

/// However long the length scale is, the square of a distance is one of f32.
#[test]
fn distances_have_squares() {
    for json in [
        r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 1e20}, "structure": {"kind": "dense", "window": 4}}"#,
        r#"{"mechanism": "composed", "score": {"kind": "student", "kappa": 1e20}, "normalisation": "symmetric"}"#,
        r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 1e20}, "series": {"kind": "hops", "count": 2, "gamma": 0.5}}"#,
        r#"{"mechanism": "fna", "kappa": 1e20, "bias": "alibi"}"#,
    ] {
        for (size, refused) in [(1.0, false), (1e16, false), (1e20, true)] {
            assert_eq!(is_refused(json, "q k", size), refused, "{json}, {size:e}");
        }
    }
}

/// A Gaussian by another name has its limits.
#[test]
fn levy_of_order_two_is_a_gaussian() {
    for rest in [
        r#""structure": {"kind": "dense", "window": 4}"#,
        r#""bias": "alibi""#,
        r#""series": {"kind": "resolvent", "gamma": 0.5}"#,
        r#""structure": {"kind": "clustered", "clusters": 3, "samples": 2}"#,
        r#""normalisation": "factors", "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 1.0}"#,
    ] {
        let json = format!(r#"{{"mechanism": "composed", "score": {{"kind": "levy", "alpha": 2}}, {rest}}}"#);
        assert!(!is_refused(&json, "q", 1.0), "{json}");
        for size in [1e6, 1e7, 1e10] {
            assert!(is_refused(&json, "q", size), "{json}, {size:e}");
        }
    }
}

/// Which rows f32 can stream is each row's own: later values, however large, change no bit of it.
#[test]
fn later_values_change_no_earlier_row() {
    for json in [
        r#"{"mechanism": "relu", "causal": true}"#,
        r#"{"mechanism": "sigmoid", "causal": true}"#,
        r#"{"mechanism": "composed", "score": "dot-relu", "causal": true}"#,
        r#"{"mechanism": "composed", "score": "dot-squared-relu", "normalisation": {"kind": "frobenius", "eps": 0.1}, "causal": true}"#,
        r#"{"mechanism": "composed", "score": "dot-relu", "causal": true, "structure": {"kind": "clustered", "clusters": 3, "causal_clusters": {"kind": "block", "size": 4}}}"#,
        r#"{"mechanism": "routed", "clusters": 3, "routes": 1, "score": {"kind": "dot-relu"}, "causal": true, "causal_clusters": {"kind": "segment", "size": 4}}"#,
        r#"{"mechanism": "routed", "clusters": 3, "routes": 2, "score": {"kind": "dot-sigmoid"}, "normalisation": {"kind": "none"}, "causal": true, "causal_clusters": {"kind": "segment", "size": 4}}"#,
    ] {
        let before = planned(json);
        for size in [1e-36, 1e36] {
            let (mut after, dim) = (before.clone(), before.shape.value_dim);
            after.v[16 * dim..].iter_mut().for_each(|x| *x = f64::from((*x * size) as f32));
            let rows = |solution: Solution| solution["out"][..16 * dim].to_vec();
            assert_eq!(rows(before.fused()), rows(after.fused()), "{json}, {size:e}");
        }
    }
}

/// Clusters are lists of pairs, which are asked for before they are made.
#[test]
fn clusters_that_no_memory_holds_are_refused() {
    let json = r#"{"mechanism": "ssa", "clusters": 3000, "samples": 1000, "kmeans_iterations": 1}"#;
    let shape = Shape::square(1, 8, 1_000_000, 1);
    let op = Operator::new(&Mechanism::from_json(json).unwrap(), shape, false, Strategy::Fused).unwrap();
    assert!(op.plan().allocated_forward > 1 << 40, "{}", op.plan().allocated_forward);
    let x = vec![0.5_f32; shape.q_len()];
    let inputs = Inputs { q: &x[..], k: Some(&x[..]), v: &x[..], extras: Extras::default() };
    let told = op.clusters(&inputs, &Mask::NONE).unwrap_err();
    assert!(matches!(told, Error::Memory { op: "clusters", .. }), "{told}");
}

/// Output gradients are divided where their products with values leave f32; the gradient of values has no such product.
#[test]
fn small_weights_beside_large_values_leave_gradients_of_values() {
    for (json, sizes) in [
        (r#"{"mechanism": "infsa"}"#, [1e-15, 1e-15, 1e30]),
        (r#"{"mechanism": "infsa", "activation": "gelu"}"#, [1.0, 1e-20, 1e25]),
        (r#"{"mechanism": "infsa-resolvent"}"#, [1e-15, 1e-15, 1e30]),
    ] {
        let mut p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 1, 18, 5), 3);
        let scaled = |x: &mut [f64], by: f64| x.iter_mut().for_each(|x| *x = f64::from((*x * by) as f32));
        scaled(&mut p.q, sizes[0]);
        p.k.iter_mut().for_each(|k| scaled(k, sizes[1]));
        scaled(&mut p.v, sizes[2]);
        let [got, expected] = [p.fused(), p.reference()].map(|mut x| x.remove("dv").unwrap());
        support::assert_close(json, &got, &expected, 1, 1e-5, 0.0);
    }
}
