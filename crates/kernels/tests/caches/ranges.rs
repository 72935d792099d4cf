//! What f32 has no room for is told of in a cache as in a call.

use resolvent_kernels::{Cache, Error, Extras, Inputs, Mechanism, PagedCache};

const TOKENS: usize = 8;

/// Four channels of every token, of that size.
fn tokens(size: f32, seed: usize) -> Vec<f32> {
    (0..TOKENS * 4).map(|n| size * ((n * 7 + seed * 13) as f32 * 0.61).sin()).collect()
}

fn step(json: &str, q: &[f32], k: &[f32]) -> Result<(), Error> {
    let mut cache = Cache::new(&Mechanism::from_json(json).unwrap(), 1, 1, 4, 4, TOKENS).unwrap();
    let inputs = Inputs { q, k: Some(k), v: &tokens(1.0, 3), extras: Extras::default() };
    let told = cache.step(&inputs, &mut [0.0; TOKENS * 4]);
    assert_eq!(cache.len(), if told.is_ok() { TOKENS } else { 0 }, "{json}");
    assert_eq!(cache.append(&inputs).is_err(), told.is_err() || json.contains("ssa"));
    told
}

#[test]
fn clusters_of_large_tokens_are_refused() {
    for json in [
        r#"{"mechanism": "ssa", "clusters": 3, "estimator": "centroid", "causal": true}"#,
        r#"{"mechanism": "ssa", "clusters": 3, "samples": 2, "causal": true}"#,
        r#"{"mechanism": "routed", "clusters": 3, "causal": true}"#,
    ] {
        step(json, &tokens(1e4, 1), &tokens(1e4, 2)).unwrap_or_else(|e| panic!("{json}: {e}"));
        for [of_q, of_k] in [[2e5, 1.0], [1.0, 2e5], [1e-20, 1.0], [1e-3, 1e12]] {
            let told = step(json, &tokens(of_q, 1), &tokens(of_k, 2));
            assert!(matches!(told, Err(Error::Range { .. })), "{json}, {of_q:e}, {of_k:e}: {told:?}");
        }
    }
}

#[test]
fn scores_of_softmax_are_bounded() {
    let json = r#"{"mechanism": "softmax", "causal": true}"#;
    step(json, &tokens(1e5, 1), &tokens(1e4, 2)).unwrap();
    let told = step(json, &tokens(1e6, 1), &tokens(1e6, 2));
    assert!(matches!(told, Err(Error::Range { .. })), "{told:?}");
    let mut paged = PagedCache::new(&Mechanism::from_json(json).unwrap(), 1, 4, 4, 16, 1).unwrap();
    let id = paged.add();
    let inputs = Inputs { q: &tokens(1e6, 1), k: Some(&tokens(1e6, 2)), v: &tokens(1.0, 3), extras: Extras::default() };
    let told = paged.step(&[id], &inputs, &mut [0.0; TOKENS * 4]);
    assert!(matches!(told, Err(Error::Range { .. })) && paged.len(id) == Ok(0), "{told:?}");
}
