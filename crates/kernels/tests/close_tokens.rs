//! Tokens that coincide, as those of padding do, and tokens that nearly do.

mod support;

use resolvent_kernels::{Error, Mechanism, Shape, Strategy, Tol};
use support::{
    assert_close,
    problem::{Problem, assert_solution},
    random::{VARIANTS, problem},
};

const TOKENS: usize = 48;
const DIM: usize = 8;

fn call(json: &str) -> Problem {
    problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, TOKENS, DIM), 5)
}

/// Writes to all channels of every token what `at` gives for it, if anything.
fn fill(x: &mut [f64], at: fn(usize) -> Option<f64>) {
    for (n, x) in x.iter_mut().enumerate() {
        *x = at(n / DIM % TOKENS).map_or(*x, |value| f64::from(value as f32));
    }
}

/// Landmarks of equal tokens count as one, whatever inverts the matrix among them, and their gradient is that of each.
#[test]
fn landmarks_that_coincide_keep_their_gradients() {
    for json in [
        r#"{"mechanism": "laplacian"}"#,
        r#"{"mechanism": "laplacian", "inverse": "cholesky"}"#,
        r#"{"mechanism": "laplacian", "inverse": "cg", "centering": "per-query"}"#,
        r#"{"mechanism": "laplacian", "newton_iterations": 6}"#,
        r#"{"mechanism": "laplacian", "centering": "none", "whitening": "none", "landmarks": {"kind": "stride", "ratio": 3}}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "conv", "ratio": 4}}"#,
        r#"{"mechanism": "laplacian", "tied": true, "landmarks": {"kind": "pool", "ratio": 4}}"#,
    ] {
        let groups: [fn(usize) -> Option<f64>; 3] = [
            |token| (token >= 24).then_some(0.0),
            |token| (token < 24).then_some(0.37),
            |token| [None, Some(0.0), Some(0.0), None, Some(0.37), Some(0.37)][token / 8],
        ];
        for (n, at) in groups.into_iter().enumerate() {
            let mut p = call(json);
            fill(&mut p.q, at);
            p.k.iter_mut().for_each(|k| fill(k, at));
            let (mut got, mut expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            // The bandwidth's gradient is one sum of them all, in which most cancels.
            let [of_width, width] = [&mut got, &mut expected].map(|s| s.remove("dlambda").unwrap());
            let (tol, what) = (Tol::f32(&p.mechanism), format!("{json}, {n}"));
            assert_close(&what, &of_width, &width, 1, 4.0 * tol.backward, 0.0);
            assert_solution(&what, &got, &expected, &p.shape, tol);
        }
    }
}

/// Where all queries, or all keys, or both are equal, every mechanism is right in what it computes of them, or says that it cannot.
#[test]
fn equal_tokens_are_right() {
    for json in VARIANTS {
        for (q, k) in [(true, false), (false, true), (true, true)] {
            let mut p = call(json);
            if q {
                fill(&mut p.q, |_| Some(0.37));
            }
            match &mut p.k {
                Some(keys) if k => fill(keys, |_| Some(0.61)),
                None if !q => continue,
                _ => {}
            }
            p.fix_plan();
            let (got, expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            let of_values = |s: &support::problem::Solution| {
                s.iter().filter(|(name, _)| ["out", "dv"].contains(name)).map(|(name, x)| (*name, x.clone())).collect()
            };
            let tol = Tol::f32(&p.mechanism).with_noise(1.0);
            assert_solution(json, &of_values(&got), &of_values(&expected), &p.shape, tol);
        }
    }
}

/// Keys that nearly coincide leave no digits to the kernel among their landmarks; one of them is enough, a ridge is too.
#[test]
fn keys_that_nearly_coincide_are_refused() {
    for (json, refused) in [
        (r#"{"mechanism": "laplacian"}"#, true),
        (r#"{"mechanism": "laplacian", "centering": "none", "inverse": "cholesky", "ridge": 0}"#, true),
        (r#"{"mechanism": "laplacian", "ridge": 0.25}"#, false),
        (r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "ratio": 48}}"#, false),
        (r#"{"mechanism": "laplacian-exact"}"#, false),
    ] {
        for offset in [0.0, 1.0] {
            let mut p = call(json);
            p.k.as_mut().unwrap().iter_mut().for_each(|k| *k = f64::from((offset + *k * 1e-4) as f32));
            match p.solve::<f32>(Strategy::Fused, None) {
                Err(Error::Close { tensor: "k", .. }) if refused => {}
                Ok(_) if !refused => {}
                got => panic!("{json}, {offset}: {got:?}"),
            }
        }
    }
    let mut p = call(r#"{"mechanism": "laplacian-exact"}"#);
    for x in [Some(&mut p.q), p.k.as_mut()].into_iter().flatten() {
        x.iter_mut().for_each(|x| *x = f64::from((1.0 + *x * 1e-6) as f32));
    }
    let error = p.solve::<f32>(Strategy::Fused, None).unwrap_err();
    assert!(matches!(error, Error::Close { .. }), "{error}");
}
