//! The key/value cache against the causal reference, token by token and in steps of several lengths.

use crate::{cached, support};

use cached::{DENSE, problem, tokens};
use resolvent_kernels::{Cache, Error, Inputs, Mechanism, Parameter, Shape, Tol, reference};
use support::{assert_close, problem::Problem, random::mechanisms};

/// `out` of a problem, fed in steps of the given lengths (the last one repeated).
fn stepwise(p: &Problem, cache: &mut Cache, steps: &[usize]) -> Vec<f64> {
    let Shape { seq_q: seq, head_dim, value_dim, .. } = p.shape;
    let mut out = vec![f64::NAN; p.shape.out_len()];
    let (mut at, mut steps) = (0, steps.iter().copied().chain(std::iter::repeat(*steps.last().unwrap())));
    while at < seq {
        let to = (at + steps.next().unwrap()).min(seq);
        let q = tokens(&p.q, seq, head_dim, at, to);
        let k = p.k.as_ref().map(|k| tokens(k, seq, head_dim, at, to));
        let v = tokens(&p.v, seq, value_dim, at, to);
        let mut rows = vec![f32::NAN; v.len()];
        cache.step(&Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() }, &mut rows).unwrap();
        for (slice, rows) in out.chunks_mut(seq * value_dim).zip(rows.chunks((to - at) * value_dim)) {
            slice[at * value_dim..to * value_dim].iter_mut().zip(rows).for_each(|(out, x)| *out = (*x).into());
        }
        at = to;
    }
    assert_eq!(cache.len(), seq);
    out
}

/// `routed` in segments of several lengths.
const ROUTED: &[&str] = &[
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 8}, "clusters": 3, "routes": 2}"#,
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 6}, "global_tokens": 3, "scale": 0.7, "cluster_metric": "cosine"}"#,
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 8}, "routes": 1, "structure": {"estimator": "importance", "samples": 0}}"#,
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 5}, "series": {"kind": "one-hop", "gamma": 0.5}}"#,
];

/// A token sees in a cache what it sees in the whole sequence: segments that are complete, by their clusters.
#[test]
fn segments_are_clustered_as_they_come() {
    for (n, json) in ROUTED.iter().enumerate() {
        for seq in [1, 5, 16, 17, 43] {
            let p = problem(
                Mechanism::from_json(json).unwrap(),
                Shape { value_dim: 3, ..Shape::square(2, 2, seq, 6) },
                n as u64,
            );
            check(&p);
        }
    }
}

/// Positions behind what a cache begins with are some that it will have.
#[test]
fn global_tokens_are_taken_as_they_come() {
    let json = r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 8}, "clusters": 3, "routes": 1, "global_tokens": [1, 0, 13]}"#;
    check(&problem(Mechanism::from_json(json).unwrap(), Shape::square(2, 2, 30, 4), 3));
}

fn cache_of(p: &Problem, capacity: usize) -> Cache {
    let Shape { batch, heads, head_dim, value_dim, .. } = p.shape;
    Cache::new(&p.mechanism, batch, heads, head_dim, value_dim, capacity).unwrap()
}

fn check(p: &Problem) {
    let expected = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
    for (steps, capacity) in [(&[1][..], 1), (&[5, 1, 7], 4), (&[1000], 0), (&[40, 3], 100)] {
        // The clusters of a call are made for its length.
        let capacity = if p.mechanism.id() == "ssa" { p.shape.seq_q } else { capacity };
        let mut cache = cache_of(p, capacity);
        let first = stepwise(p, &mut cache, steps);
        let rtol = Tol::f32(&p.mechanism).forward;
        assert_close(&format!("{:?}, {steps:?}", p.mechanism), &first, &expected, p.shape.slices(), rtol, 0.0);
        cache.clear();
        assert!(cache.is_empty() && stepwise(p, &mut cache, steps) == first, "{:?}: cleared", p.mechanism);
    }
}

fn causal() -> impl Iterator<Item = Mechanism> {
    let json = |m: &Mechanism| serde_json::to_value(m).unwrap();
    let makes_sense = |m: &Mechanism| match m.as_fna() {
        Some(m) => m.norm_exponent == 0.0,
        None => ["softmax", "infsa", "uniform"].contains(&m.id()),
    };
    let clustered = CLUSTERED.iter().map(|json| Mechanism::from_json(json).unwrap());
    let rows = mechanisms().into_iter().filter(makes_sense).map(move |m| {
        let mut config = json(&m);
        config["causal"] = true.into();
        Mechanism::from_value(config).unwrap()
    });
    let features = FEATURES.iter().map(|json| Mechanism::from_json(json).unwrap());
    let routed = ROUTED.iter().map(|json| Mechanism::from_json(json).unwrap());
    let dense = DENSE.iter().map(|json| Mechanism::from_json(json).unwrap());
    rows.chain(clustered).chain(features).chain(routed).chain(dense)
}

/// Maps of features, with a decay, a scale, and keys that are the queries.
const FEATURES: [&str; 4] = [
    r#"{"mechanism": "linear", "causal": true}"#,
    r#"{"mechanism": "linear", "causal": true, "tied": true, "series": {"gamma": 0.5}}"#,
    r#"{"mechanism": "performer", "causal": true}"#,
    r#"{"mechanism": "performer", "causal": true, "score": {"scale": 0.75}, "structure": {"count": 40, "seed": 3}}"#,
];

/// Causal clusters: every estimator, with the options that change a plan.
const CLUSTERED: [&str; 11] = [
    r#"{"mechanism": "ssa", "causal": true}"#,
    r#"{"mechanism": "ssa", "causal": true, "samples": 0, "clusters": 5}"#,
    r#"{"mechanism": "ssa", "causal": true, "samples": 100, "clusters": 4, "scale": 0.7}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "raw", "samples": 3, "cluster_on": "keys", "seed": 5}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "centroid", "cluster_on": "keys", "balance": 1}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "centroid", "global_tokens": [7, 0, 30, 7], "jl_dim": 4}"#,
    r#"{"mechanism": "ssa", "causal": true, "global_tokens": 2, "clusters": 6, "balance": null}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "centroid", "clusters": 100}"#,
    r#"{"mechanism": "ssa", "causal": true, "estimator": "centroid", "clusters": 4, "cluster_metric": "cosine"}"#,
    r#"{"mechanism": "ssa", "causal": true, "clusters": 4, "cluster_metric": "cosine", "cluster_on": "keys", "jl_dim": 4}"#,
];

fn inputs<'a>(q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Inputs<'a, f32> {
    Inputs { q, k: Some(k), v, extras: Default::default() }
}

/// Centroids that the call gives label as in a call.
#[test]
fn a_codebook_serves_every_step() {
    let mechanism = Mechanism::from_json(
        r#"{"mechanism": "ssa", "causal": true, "clusters": 5, "estimator": "centroid", "balance": 1.5}"#,
    );
    let (shape, book) = (Shape::square(2, 2, 40, 8), (0..80).map(|n| (n as f32 * 0.9).sin()).collect::<Vec<_>>());
    let p = problem(mechanism.unwrap(), shape, 5);
    let whole = Inputs { extras: resolvent_kernels::Extras::default().with_codebook(&book), ..p.inputs() };
    let expected = reference::forward(&p.mechanism, &p.shape, &whole, &p.mask()).unwrap().out;
    let mut cache = cache_of(&p, 40);
    for n in 0..40 {
        let [q, k, v] = [&p.q, p.k.as_ref().unwrap(), &p.v].map(|x| tokens(x, 40, 8, n, n + 1));
        let mut out = vec![f32::NAN; 2 * 2 * 8];
        let extras = resolvent_kernels::Extras::default().with_codebook(&book);
        cache.step(&Inputs { extras, ..inputs(&q, &k, &v) }, &mut out).unwrap();
        let want = tokens(&expected, 40, 8, n, n + 1);
        assert!(out.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-5), "token {n}");
    }
}

/// Heads of keys and values that heads of queries share are those heads repeated; tokens of a prompt need no rows; a cache
/// of chosen sequences goes on with these.
#[test]
fn shared_heads_prompts_and_choices() {
    let (batch, heads, kv_heads, dim, seq) = (2, 4, 2, 6, 40);
    let one = Shape::square(batch, heads, 1, dim);
    for mechanism in causal().filter(|m| !m.tied && !m.requires(Parameter::Bias, &one)) {
        let noise = |slices: usize, seed: usize| -> Vec<f64> {
            (0..slices * seq * dim).map(|n| ((n * 37 + seed * 101) as f64 * 0.61).sin()).collect()
        };
        let [q, k, v] =
            [(batch * heads, 1), (batch * kv_heads, 2), (batch * kv_heads, 3)].map(|(n, seed)| noise(n, seed));
        let repeated = |x: &[f64]| -> Vec<f64> { x.chunks(seq * dim).flat_map(|slice| [slice; 2].concat()).collect() };
        let (all_k, all_v) = (repeated(&k), repeated(&v));
        let new = || Cache::new(&mechanism, batch, heads, dim, dim, seq).unwrap();
        let (mut whole, mut shared) = (new(), new().with_kv_heads(kv_heads).unwrap());
        let part = |x: &[f64], from, to| tokens(x, seq, dim, from, to);
        let rows = |cache: &mut Cache, k: &[f64], v: &[f64], from, to| {
            let (q, k, v) = (part(&q, from, to), part(k, from, to), part(v, from, to));
            let mut out = vec![f32::NAN; q.len()];
            cache.step(&inputs(&q, &k, &v), &mut out).unwrap();
            out
        };
        let first = rows(&mut whole, &all_k, &all_v, 0, 20);
        assert_eq!(rows(&mut shared, &k, &v, 0, 20), first, "{mechanism:?}");
        let mut read = new().with_kv_heads(kv_heads).unwrap();
        read.append(&inputs(&part(&q, 0, 20), &part(&k, 0, 20), &part(&v, 0, 20))).unwrap();
        let next = rows(&mut whole, &all_k, &all_v, 20, 21);
        assert_eq!(rows(&mut read, &k, &v, 20, 21), next, "{mechanism:?}: appended");
        // The second sequence twice, then the first.
        let chosen = |x: &[f64]| -> Vec<f64> {
            let half = x.len() / 2;
            [&x[half..], &x[half..], &x[..half]].concat()
        };
        let mut others = shared.select(&[1, 1, 0]);
        let [q, k, v] = [&q, &k, &v].map(|x| part(&chosen(x), 20, 21));
        let mut out = vec![f32::NAN; q.len()];
        others.step(&inputs(&q, &k, &v), &mut out).unwrap();
        let half = next.len() / 2;
        assert_eq!(out, [&next[half..], &next[half..], &next[..half]].concat(), "{mechanism:?}: chosen");
        assert_eq!((others.len(), shared.len(), read.len()), (21, 20, 21));
    }
    let cache = || Cache::new(&Mechanism::preset("softmax").unwrap(), 1, 4, 2, 2, 8).unwrap();
    for kv_heads in [0, 3, 8] {
        assert!(matches!(cache().with_kv_heads(kv_heads), Err(Error::OutOfRange { field: "kv_heads", .. })));
    }
}

#[test]
fn steps_of_any_length_equal_the_whole() {
    for mechanism in causal() {
        let mut p = problem(mechanism, Shape { value_dim: 5, ..Shape::square(2, 3, 61, 12) }, 3);
        check(&p);
        if p.mechanism.gamma().is_some() {
            p.set_gamma(vec![0.2, 0.9, 0.5]);
            check(&p);
        }
        let others = |parameter: &&Parameter| ![Parameter::Gamma, Parameter::Bias].contains(parameter);
        for &parameter in p.mechanism.parameters().iter().filter(others) {
            p.parameters.insert(parameter, vec![1.1, 1.9, 1.5]);
            check(&p);
        }
    }
}

/// Channels that fill registers of every instruction set and leave some over.
#[test]
fn wide_heads() {
    for json in DENSE {
        check(&problem(Mechanism::from_json(json).unwrap(), Shape { value_dim: 20, ..Shape::square(1, 2, 40, 36) }, 4));
    }
}

#[test]
fn the_running_norm_survives_products_out_of_range() {
    for mechanism in causal().filter(|m| m.id() == "infsa") {
        for size in [1e25, 1e-12] {
            let mut p = problem(mechanism.clone(), Shape::square(1, 2, 20, 8), 9);
            p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| *x = f64::from((*x * size) as f32));
            check(&p);
        }
    }
}

/// Products of tokens that f32 has no room for, and a norm that nothing is added to: weights depend on ratios alone.
#[test]
fn tiny_tokens_decode_as_others() {
    for activation in ["relu", "abs"] {
        let json = format!(r#"{{"mechanism": "infsa", "eps": 0, "causal": true, "activation": "{activation}"}}"#);
        let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 2, 20, 8), 9);
        p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| *x = f64::from((*x * 1e-24) as f32));
        check(&p);
    }
}

/// Rows that leave f32 are told, where tokens do not; no number gives none.
#[test]
fn rows_beyond_f32_are_told() {
    let mut cache = Cache::new(&Mechanism::preset("infsa").unwrap(), 1, 1, 2, 2, 8).unwrap();
    let refused = cache.step(&inputs(&[10.0; 2], &[10.0; 2], &[3e38; 2]), &mut [0.0; 2]).unwrap_err();
    assert!(matches!(refused, Error::Overflow { tensor: "out", .. }), "{refused}");
    let mut cache = Cache::new(&Mechanism::preset("softmax").unwrap(), 1, 1, 2, 2, 8).unwrap();
    let mut out = [0.0; 2];
    cache.step(&inputs(&[1.0; 2], &[1.0; 2], &[f32::NAN; 2]), &mut out).unwrap();
    assert!(out.iter().all(|x| x.is_nan()));
}

#[test]
fn what_cannot_be_decoded_is_refused() {
    let kernel = r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "none"}"#;
    let refused = Cache::new(&Mechanism::from_json(kernel).unwrap(), 1, 1, 4, 4, 8).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { mechanism: "laplacian-exact", .. }), "{refused}");
    for id in ["infsa-resolvent", "linear-infsa"] {
        let refused = Cache::new(&Mechanism::preset(id).unwrap(), 1, 1, 4, 4, 8).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { mechanism, what: "causal", .. } if mechanism == id));
    }
    let density = Mechanism::from_json(r#"{"mechanism": "fna", "norm_exponent": 1}"#).unwrap();
    let refused = Cache::new(&density, 1, 1, 4, 4, 8).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { what: "decoding with norm_exponent != 0", .. }), "{refused}");
    for json in [
        r#"{"mechanism": "cosine", "series": "hops"}"#,
        r#"{"mechanism": "cosine", "normalisation": "frobenius"}"#,
        r#"{"mechanism": "cosine", "normalisation": {"kind": "row", "density_exponent": 1}}"#,
        r#"{"mechanism": "cosine", "bias": "tensor"}"#,
        r#"{"mechanism": "linear", "series": "hops"}"#,
    ] {
        let refused = Cache::new(&Mechanism::from_json(json).unwrap(), 1, 1, 4, 4, 8).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { what: "decoding token by token", .. }), "{refused}");
    }
    let mut performer = Cache::new(&Mechanism::preset("performer").unwrap(), 1, 1, 2, 2, 1).unwrap();
    let refused = performer.step(&inputs(&[1e4; 2], &[1.0; 2], &[1.0; 2]), &mut [0.0; 2]).unwrap_err();
    assert!(matches!(refused, Error::Range { tensor: "q", .. }) && performer.is_empty(), "{refused}");
    let mut cosine = Cache::new(&Mechanism::preset("relu").unwrap(), 1, 1, 2, 2, 1).unwrap();
    let refused = cosine.step(&inputs(&[1e20; 2], &[1e5; 2], &[1.0; 2]), &mut [0.0; 2]).unwrap_err();
    assert!(matches!(refused, Error::Range { tensor: "q", .. }) && cosine.is_empty(), "{refused}");
    let block = r#"{"mechanism": "ssa", "causal": true, "causal_clusters": {"kind": "block", "size": 4}, "estimator": "centroid"}"#;
    let refused = Cache::new(&Mechanism::from_json(block).unwrap(), 1, 1, 4, 4, 8).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { mechanism: "ssa", .. }), "{refused}");
    let mut full = Cache::new(&Mechanism::preset("ssa").unwrap(), 1, 1, 2, 2, 1).unwrap();
    full.step(&inputs(&[1.0; 2], &[1.0; 2], &[1.0; 2]), &mut [0.0; 2]).unwrap();
    let refused = full.step(&inputs(&[1.0; 2], &[1.0; 2], &[1.0; 2]), &mut [0.0; 2]).unwrap_err();
    assert!(matches!(refused, Error::OutOfRange { field: "tokens", .. }), "{refused}");
    let mut cache = Cache::new(&Mechanism::preset("infsa").unwrap(), 1, 2, 4, 4, 8).unwrap();
    let (x, mut out) = ([0.5; 16], [0.0; 16]);
    for (q, k, v) in [(0, 8, 8), (9, 8, 8), (8, 16, 8), (8, 8, 4)] {
        let inputs = Inputs { q: &x[..q], k: Some(&x[..k]), v: &x[..v], extras: Default::default() };
        assert!(matches!(cache.step(&inputs, &mut out[..8]), Err(Error::Length { op: "step", .. })));
    }
    let inputs = Inputs { q: &x[..8], k: None, v: &x[..8], extras: Default::default() };
    assert!(matches!(cache.step(&inputs, &mut out[..8]), Err(Error::Tensor { tensor: "k", .. })));
    assert!(cache.is_empty());
}
