//! Threads that share a buffer, at the smallest sizes at which they do: small enough for the interpreter Miri, which finds
//! overlapping parts, reads of memory that nothing wrote and pointers out of bounds (`scripts/miri.sh`).

mod support;
#[path = "support/threads.rs"]
mod threads;

use resolvent_kernels::{
    ExtraGradients, Extras, Heads, Mask, Mechanism, Operator, Precision, Scratch, Sequences, Shape, Strategy, Strided,
    Tol, VarlenOperator,
    simd::{Bf16Unit, Level},
};
use support::{
    problem::assert_solution,
    random::{VARIANTS, problem},
};
use threads::on_threads;

/// Solves on the portable path by two threads, and compares with the reference. Miri leaves the reference out, which shares no
/// buffer and takes it longer than the kernels.
fn check(json: &str, shape: Shape) {
    let mut p = problem(Mechanism::from_json(json).unwrap(), shape, 3);
    p.fix_plan();
    let got = on_threads(2, || p.solve::<f32>(Strategy::Fused, Some(Level::Portable)).unwrap());
    if cfg!(miri) {
        println!("passed: {json}"); // hours would pass without a word
        return;
    }
    assert_solution(json, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
}

/// Two heads for two threads, of the presets with these names and all their options.
fn heads_of(ids: &[&str]) {
    let shape = Shape { batch: 1, heads: 2, seq_q: 9, seq_kv: 11, head_dim: 3, value_dim: 2 };
    let is_one = |json: &&&str| ids.contains(&Mechanism::from_json(json).unwrap().id());
    // Options share most of their code: every second one is enough for Miri, which takes half a minute for each.
    let step = if cfg!(miri) { 2 } else { 1 };
    let mut variants = VARIANTS.iter().filter(is_one).step_by(step).peekable();
    assert!(variants.peek().is_some(), "{ids:?}");
    variants.for_each(|json| check(json, shape));
}

const DENSE: &[&str] = &["softmax", "infsa", "fna", "laplacian-exact"];
const SERIES: &[&str] = &["infsa-resolvent"];
const POOLS: &[&str] = &["uniform", "linear-infsa"];
const CLUSTERS: &[&str] = &["ssa"];
const LANDMARKS: &[&str] = &["soft", "soft-pp", "laplacian"];

#[test]
fn heads_of_pairs() {
    heads_of(DENSE);
}

#[test]
fn heads_of_series() {
    heads_of(SERIES);
}

#[test]
fn heads_of_pools() {
    heads_of(POOLS);
}

#[test]
fn heads_of_clusters() {
    heads_of(CLUSTERS);
}

#[test]
fn heads_of_landmarks() {
    heads_of(LANDMARKS);
}

#[test]
fn no_head_is_left_out() {
    let tested = [DENSE, SERIES, POOLS, CLUSTERS, LANDMARKS].concat();
    assert!(VARIANTS.iter().all(|json| tested.contains(&Mechanism::from_json(json).unwrap().id())));
}

/// Compositions of every structure and series, for two threads as well.
#[test]
fn compositions() {
    let shape = Shape { batch: 1, heads: 2, seq_q: 9, seq_kv: 9, head_dim: 3, value_dim: 2 };
    for json in [
        r#"{"mechanism": "local", "structure": {"kind": "dense", "window": 3, "sinks": 1}}"#,
        r#"{"mechanism": "linear", "causal": true}"#,
        r#"{"mechanism": "performer"}"#,
        r#"{"mechanism": "nystromformer", "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "count": 3}}}"#,
        r#"{"mechanism": "linformer", "structure": {"count": 3}}"#,
        r#"{"mechanism": "routed", "clusters": 3, "routes": 1}"#,
        r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 4}, "clusters": 2, "routes": 1}"#,
        r#"{"mechanism": "composed", "score": {"kind": "cosine-exp"}, "series": {"kind": "hops", "count": 2, "gamma": 0.5}}"#,
        r#"{"mechanism": "composed", "score": {"kind": "levy"}, "structure": {"kind": "clustered", "clusters": 3, "samples": 2}, "series": {"kind": "resolvent", "gamma": 0.5}}"#,
    ] {
        check(json, shape);
    }
}

/// What multiplies in bf16, without a unit for it: two heads for two threads, and then more tokens than a tile has for one.
#[test]
fn products_of_bf16() {
    let two_heads = Shape { batch: 1, heads: 2, seq_q: 9, seq_kv: 11, head_dim: 3, value_dim: 2 };
    for (shape, causal) in [(two_heads, false), (alone(70), true)] {
        for json in [
            r#"{"mechanism": "softmax"}"#,
            r#"{"mechanism": "infsa", "eps": 0.125}"#,
            r#"{"mechanism": "fna"}"#,
            r#"{"mechanism": "cosine"}"#,
            r#"{"mechanism": "local", "window": 5, "sinks": 2}"#,
        ] {
            let mechanism = Mechanism::from_json(json).unwrap().with_causal(causal);
            let p = problem(mechanism, shape, 3);
            let op = Operator::new(&p.mechanism, shape, false, Strategy::Fused).unwrap();
            let op = op.with_level(Level::Portable).unwrap();
            let precisions = [Precision::Bf16, Precision::Bf16x3];
            for precision in precisions.into_iter().take(if json.contains("fna") { 1 } else { 2 }) {
                let op = op.clone().with_precision(precision).with_bf16_unit(Bf16Unit::Widened).unwrap();
                assert_eq!(op.plan().arithmetic.runs, precision, "{json}");
                let mut got = on_threads(2, || p.solve_by::<f32>(&op).unwrap());
                if cfg!(miri) {
                    println!("passed: {json} in {}", precision.name());
                    continue;
                }
                // Sums over few pairs that mostly cancel; `precision.rs` puts them beside a naive computation in bf16.
                let mut expected = p.reference();
                for solution in [&mut got, &mut expected] {
                    solution.retain(|name, _| !matches!(*name, "dalpha" | "dkappa"));
                }
                assert_solution(json, &got, &expected, &p.shape, Tol::HALF);
            }
        }
    }
}

/// Two sequences of a packed projection `[tokens, (q, k, v), heads, channels]`, which is read and whose gradient is written
/// where it lies.
#[test]
fn rows_between_others() {
    let (heads, tokens, dim) = (2, 14, 4);
    let (row, len) = (3 * heads * dim, tokens * heads * dim);
    let sequences = Sequences::new(&[0, 5, tokens]).unwrap();
    let packed = (0..tokens * row).map(|n| (n as f32 * 0.61).sin()).collect::<Vec<_>>();
    let dout = (0..len).map(|n| (n as f32 * 0.37).cos()).collect::<Vec<_>>();
    for json in [r#"{"mechanism": "softmax"}"#, r#"{"mechanism": "infsa", "eps": 0.125}"#, r#"{"mechanism": "linear"}"#]
    {
        let mechanism = Mechanism::from_json(json).unwrap();
        let strategy = Strategy::Auto;
        let op = VarlenOperator::new(&mechanism, Heads::new(heads, dim), &sequences, false, strategy).unwrap();
        let mut gradient = vec![f32::NAN; packed.len()];
        on_threads(2, || {
            let inputs = op.packed_inputs(&packed, Extras::default(), None).unwrap();
            let (mut out, mut stats) = (vec![f32::NAN; len], vec![f32::NAN; op.plan().stats]);
            let mut scratch = Scratch::default();
            let view = |x| Strided::tokens_first(x, [heads, tokens, dim]);
            let into = Strided::tokens_first(&mut out[..], [heads, tokens, dim]);
            op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut scratch).unwrap();
            let (out, dout) = (view(&out[..]), view(&dout[..]));
            let into = (&mut gradient[..], &mut ExtraGradients::default());
            op.backward_packed(&inputs, &Mask::NONE, out, &stats, dout, into, &mut scratch).unwrap();
        });
        assert!(gradient.iter().all(|x| x.is_finite()), "{json}");
    }
}

/// One head of so many tokens.
fn alone(tokens: usize) -> Shape {
    Shape { batch: 1, heads: 1, seq_q: tokens, seq_kv: tokens, head_dim: 2, value_dim: 2 }
}

/// More queries than a tile of the dense structure has, and more keys, whose partial sums are shared.
#[test]
fn tiles_of_pairs() {
    for json in [
        r#"{"mechanism": "softmax"}"#,
        r#"{"mechanism": "infsa", "eps": 0.125}"#,
        r#"{"mechanism": "fna", "kappa": "vision"}"#,
    ] {
        check(json, Shape { seq_q: 260, ..alone(4) });
        check(json, Shape { seq_kv: 260, ..alone(4) });
    }
    check(r#"{"mechanism": "softmax", "causal": true}"#, Shape { seq_kv: 260, ..alone(4) });
}

/// Two tasks of tokens, and a rest.
#[test]
fn tasks_of_clusters() {
    for json in [
        r#"{"mechanism": "ssa", "clusters": 6, "samples": 3, "kmeans_iterations": 1}"#,
        r#"{"mechanism": "ssa", "clusters": 6, "estimator": "centroid", "causal": true, "balance": null, "kmeans_iterations": 1}"#,
    ] {
        check(json, alone(130));
    }
}

/// The same of landmarks, and of pairs whose columns have statistics.
#[test]
fn tasks_of_landmarks() {
    for json in [
        r#"{"mechanism": "soft-pp", "ridge": 0.25, "landmarks": {"kind": "pool", "ratio": 16}}"#,
        r#"{"mechanism": "laplacian", "ridge": 0.125, "whiten_eps": 0.125, "landmarks": {"kind": "pool", "ratio": 16}}"#,
    ] {
        check(json, alone(130));
    }
    check(r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.125}"#, Shape { seq_q: 4, ..alone(130) });
    // All pairs of so many tokens are too many for Miri.
    if !cfg!(miri) {
        check(r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#, alone(130));
    }
}

/// More tokens than a task of pooling has.
#[test]
fn tasks_of_pooling() {
    check(r#"{"mechanism": "linear-infsa", "eps": 0.125}"#, alone(1030));
}
