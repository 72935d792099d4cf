//! Tokens that coincide, as those of padding do, and tokens that nearly do.

mod support;

use resolvent_kernels::{Error, Inputs, Mechanism, Operator, Scratch, Shape, Strategy, Tol};
use support::{
    assert_close,
    problem::{Problem, assert_solution},
    random::{VARIANTS, problem},
};

const TOKENS: usize = 50;
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
        r#"{"mechanism": "laplacian", "tied": true, "landmarks": {"kind": "pool", "ratio": 3}}"#,
        r#"{"mechanism": "laplacian", "ridge": 1e-6, "landmarks": {"kind": "pool", "ratio": 5}}"#,
    ] {
        let groups: [fn(usize) -> Option<f64>; 3] = [
            |token| (token >= 24).then_some(0.0),
            |token| (token < 24).then_some(0.37),
            |token| [None, Some(0.0), Some(0.0), None, Some(0.3137), Some(0.3137), Some(0.3137)][token / 8],
        ];
        for (n, (at, masked)) in groups.into_iter().flat_map(|at| [(at, false), (at, true)]).enumerate() {
            let mut p = call(json);
            fill(&mut p.q, at);
            p.k.iter_mut().for_each(|k| fill(k, at));
            if masked {
                // Windows of other sizes than the rest.
                p.key_mask = Some((0..TOKENS).map(|token| ![1, 26, 33, 34].contains(&token)).collect());
            }
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
                fill(&mut p.q, |_| Some(0.3137));
            }
            match &mut p.k {
                Some(keys) if k => fill(keys, |_| Some(0.6151)),
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

/// Landmarks that nearly coincide leave no digits to the gradient of the keys, however many others there are: that is told, and a larger
/// ridge is enough. Outputs are right.
#[test]
fn landmarks_that_nearly_coincide_are_refused() {
    for (ridge, backward) in [("0", false), ("1e-6", false), ("1e-3", false), ("2.9e-3", false), ("3e-3", true)] {
        for pairs in [1, TOKENS / 2] {
            let fields = r#""inverse": "cholesky", "landmarks": {"kind": "stride", "ratio": 1}"#;
            let mut p = call(&format!(r#"{{"mechanism": "laplacian", "ridge": {ridge}, {fields}}}"#));
            let k = p.k.as_mut().unwrap();
            for at in (0..k.len()).filter(|at| at / DIM % 2 == 1 && at / DIM % TOKENS < 2 * pairs) {
                // A hundred-thousandth of the bandwidth from the token before.
                k[at] = f64::from((k[at - DIM] + 5e-6) as f32);
            }
            let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Fused).unwrap();
            let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            let (q, k, v) = (narrow(&p.q), narrow(p.k.as_ref().unwrap()), narrow(&p.v));
            let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: p.extras() };
            let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
            op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default()).unwrap();
            let out: Vec<f64> = out.into_iter().map(f64::from).collect();
            assert_close(ridge, &out, &p.reference()["out"], 2, 1e-4, 0.0);
            let is_close = |e: &Error| matches!(e, Error::Close { tensor: "k", .. });
            let solved = p.solve::<f32>(Strategy::Fused, None);
            assert_eq!(solved.is_ok(), backward, "{ridge}, {pairs} pairs");
            assert!(solved.err().is_none_or(|e| is_close(&e)), "{ridge}");
        }
    }
}

/// Statistics of similarities that differ by their rounding alone are refused by the side that they are taken over.
#[test]
fn similarities_that_nearly_coincide_are_refused() {
    for (fields, near_q, near_k, size, refused) in [
        ("", true, false, 1e-6, Some("q")),
        ("", false, true, 1e-6, None),
        (r#", "centering": "per-query""#, false, true, 1e-6, Some("k")),
        (r#", "centering": "per-query""#, true, false, 1e-6, None),
        (r#", "whiten_eps": 1e-12"#, true, false, 1e-4, Some("q")),
        (r#", "whiten_eps": 1e-12, "whitening": "none""#, true, false, 1e-4, None),
        ("", true, false, 1e-3, None),
    ] {
        let mut p = call(&format!(r#"{{"mechanism": "laplacian-exact"{fields}}}"#));
        let near = |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = f64::from((1.0 + *x * size) as f32));
        if near_q {
            near(&mut p.q);
        }
        if near_k {
            near(p.k.as_mut().unwrap());
        }
        match (p.solve::<f32>(Strategy::Fused, None), refused) {
            (Err(Error::Close { tensor, .. }), Some(name)) if tensor == name => {}
            (Ok(_), None) => {}
            (got, _) => panic!("{fields}, {near_q}, {near_k}, {size}: {got:?}"),
        }
    }
}
