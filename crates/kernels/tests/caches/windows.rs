//! Caches with a window, which hold it and its sinks alone, and caches of masked tokens.

use crate::{cached, support};

use cached::{WINDOWS, of_rows, problem, tokens};
use resolvent_kernels::{Cache, Error, Inputs, Mask, Mechanism, Shape, Tol, reference};
use support::{assert_close, problem::Problem};

/// The masks of tokens `from..to` of every sequence.
fn masks(keep: Option<&Vec<bool>>, seq: usize, from: usize, to: usize) -> Option<Vec<bool>> {
    keep.map(|keep| keep.chunks(seq).flat_map(|keep| keep[from..to].to_vec()).collect())
}

/// Feeds tokens of a problem in steps of the given lengths, the last one repeated; the first `appended` without their rows, which are
/// those of `expected`.
fn decode(p: &Problem, cache: &mut Cache, steps: &[usize], appended: usize, expected: &[f64]) -> Vec<f64> {
    let Shape { seq_q: seq, head_dim, value_dim, .. } = p.shape;
    let mut out = expected.to_vec();
    let (mut at, mut steps) = (0, steps.iter().copied().chain(std::iter::repeat(*steps.last().unwrap())));
    while at < seq {
        let to = if at < appended { appended } else { (at + steps.next().unwrap()).min(seq) };
        let q = tokens(&p.q, seq, head_dim, at, to);
        let k = p.k.as_ref().map(|k| tokens(k, seq, head_dim, at, to));
        let v = tokens(&p.v, seq, value_dim, at, to);
        let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() };
        let [key, query] = [&p.key_mask, &p.query_mask].map(|keep| masks(keep.as_ref(), seq, at, to));
        let mask = Mask { causal: false, key: key.as_deref(), query: query.as_deref() };
        if at < appended {
            cache.append_masked(&inputs, &mask).unwrap();
        } else {
            let mut rows = vec![f32::NAN; v.len()];
            cache.step_masked(&inputs, &mask, &mut rows).unwrap();
            for (slice, rows) in out.chunks_mut(seq * value_dim).zip(rows.chunks((to - at) * value_dim)) {
                let slice = slice[at * value_dim..to * value_dim].iter_mut();
                slice.zip(rows).for_each(|(out, x)| *out = (*x).into());
            }
        }
        at = to;
    }
    assert_eq!(cache.len(), seq);
    out
}

fn cache_of(p: &Problem, capacity: usize) -> Cache {
    let Shape { batch, heads, head_dim, value_dim, .. } = p.shape;
    Cache::new(&p.mechanism, batch, heads, head_dim, value_dim, capacity).unwrap()
}

fn check(p: &Problem) {
    let expected = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
    for (steps, capacity, appended) in [(&[1][..], 1, 0), (&[5, 1, 90, 7], 4, 0), (&[1000], 0, 0), (&[1], 500, 117)] {
        let mut cache = cache_of(p, capacity);
        let what = format!("{:?}, {steps:?}, {appended}", p.mechanism);
        let rtol = Tol::f32(&p.mechanism).forward;
        let out = decode(p, &mut cache, steps, appended, &expected);
        assert_close(&what, &out, &expected, p.shape.slices(), rtol, 0.0);
        cache.clear();
        assert_eq!(decode(p, &mut cache, steps, appended, &expected), out, "{what}: cleared");
    }
}

/// The ring goes round several times.
#[test]
fn windows_roll() {
    for (n, json) in WINDOWS.iter().enumerate() {
        let shape = Shape { value_dim: 3, ..Shape::square(2, 2, 230, 6) };
        check(&problem(Mechanism::from_json(json).unwrap(), shape, n as u64));
    }
}

/// What is held does not grow with the tokens, with shared heads and in a choice of sequences neither.
#[test]
fn memory_of_a_window_is_bounded() {
    for json in WINDOWS.into_iter().filter(|json| json.contains("local") && !json.contains("buckets")) {
        let mechanism = Mechanism::from_json(json).unwrap();
        let mut cache = Cache::new(&mechanism, 2, 4, 4, 4, 1_000_000).unwrap().with_kv_heads(2).unwrap();
        let most = cache.most_tokens().unwrap();
        assert!(most <= 23 + 20 + 48, "{json}: {most}");
        let x = vec![0.25; 2 * 4 * 50 * 4];
        let (kv, mut out) = (x.len() / 2, vec![0.0; x.len()]);
        let mut bytes = Vec::new();
        for _ in 0..12 {
            let inputs = Inputs { q: &x, k: Some(&x[..kv]), v: &x[..kv], extras: Default::default() };
            cache.step(&inputs, &mut out).unwrap();
            cache = cache.select(&[1, 0]);
            bytes.push(cache.bytes());
        }
        let of_tokens = size_of::<f32>() * 2 * 2 * (4 + 4) * most;
        assert!(bytes.iter().all(|&bytes| bytes == bytes_of(of_tokens)), "{json}: {bytes:?}, {of_tokens}");
        assert_eq!(cache.len(), 600);
    }
    let dense = Cache::new(&Mechanism::preset("softmax").unwrap(), 1, 1, 4, 4, 10).unwrap();
    assert_eq!(dense.most_tokens(), None);
}

/// With a norm and a sum of values for every head.
fn bytes_of(tokens: usize) -> usize {
    tokens + size_of::<f64>() * (2 * 4 + 2 * 4 * 5)
}

/// Segments of clusters: with means, without, and with tokens in no cluster, of which some are masked.
const SEGMENTS: &[&str] = &[
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "clusters": 3, "routes": 2}"#,
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 7}, "global_tokens": 13, "cluster_metric": "cosine"}"#,
    r#"{"mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 10}, "routes": 1, "structure": {"estimator": "importance", "samples": 0}}"#,
];

/// Masked tokens may hold anything: they are in no later row, and have none; what follows is as far away as with them.
#[test]
fn masked_tokens_are_left_out() {
    let sums = [
        r#"{"mechanism": "uniform", "causal": true}"#,
        r#"{"mechanism": "linear", "causal": true}"#,
        r#"{"mechanism": "performer", "causal": true}"#,
    ];
    let others = sums.iter().chain(SEGMENTS).map(|json| Mechanism::from_json(json).unwrap());
    for (n, mechanism) in of_rows().chain(others).enumerate() {
        let shape = Shape { value_dim: 3, ..Shape::square(2, 2, 130, 6) };
        let mut p = problem(mechanism, shape, n as u64);
        // The second sequence begins with padding; the first sees none of a whole window.
        let kept = |n: usize| if n < 130 { n % 5 != 3 && !(40..90).contains(&n) } else { n >= 130 + 11 };
        let keep: Vec<bool> = (0..2 * 130).map(kept).collect();
        p.query_mask = Some(keep.clone());
        p.key_mask = Some(keep.clone());
        let expected = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
        let garbage = |x: &mut Vec<f64>, dim: usize| {
            let rows = x.chunks_mut(dim).enumerate();
            rows.filter(|(n, _)| !keep[n / (2 * 130) * 130 + n % 130]).for_each(|(_, row)| row.fill(f64::NAN));
        };
        garbage(&mut p.q, 6);
        garbage(&mut p.v, 3);
        p.k.iter_mut().for_each(|k| garbage(k, 6));
        for (steps, appended) in [(&[1][..], 0), (&[7, 50], 0), (&[1], 100)] {
            let out = decode(&p, &mut cache_of(&p, 1), steps, appended, &expected);
            let what = format!("{:?}, {steps:?}", p.mechanism);
            assert_close(&what, &out, &expected, 4, Tol::f32(&p.mechanism).forward, 0.0);
        }
        // A key that nobody sees may be a query all the same.
        p.query_mask = None;
        let full = problem(p.mechanism.clone(), shape, n as u64);
        (p.q, p.k, p.v) = (full.q, full.k, full.v);
        let expected = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
        let out = decode(&p, &mut cache_of(&p, 1), &[3], 0, &expected);
        assert_close(&format!("{:?}, keys", p.mechanism), &out, &expected, 4, Tol::f32(&p.mechanism).forward, 0.0);
    }
}

#[test]
fn masks_that_do_not_fit_are_refused() {
    let x = [0.5; 8];
    let inputs = Inputs { q: &x, k: Some(&x), v: &x, extras: Default::default() };
    let masked = |keep| Mask { causal: false, key: Some(keep), query: None };
    let mut softmax = Cache::new(&Mechanism::preset("softmax").unwrap(), 1, 2, 2, 2, 4).unwrap();
    let refused = softmax.step_masked(&inputs, &masked(&[true]), &mut [0.0; 8]).unwrap_err();
    assert!(matches!(refused, Error::Length { tensor: "key_mask", .. }) && softmax.is_empty(), "{refused}");
    let mut cache = Cache::new(&Mechanism::preset("ssa").unwrap(), 1, 2, 2, 2, 8).unwrap();
    let refused = cache.append_masked(&inputs, &masked(&[true, false])).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { what: "masks in a cache", .. }) && cache.is_empty(), "{refused}");
    cache.append_masked(&inputs, &masked(&[true, true])).unwrap();
}
