//! Tokens, heads and sequences of very unequal size in one call: each is right, or the call is refused by the name of a tensor.

use crate::support;

use resolvent_kernels::{Error, Mechanism, Result, Shape, Strategy, Tol};
use support::{
    assert_close,
    problem::{Problem, Solution, assert_solution},
    random::problem,
};

fn call(json: &str) -> Problem {
    problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 24, 8), 9)
}

/// Multiplies the entries that `is` is true of, by their number.
fn scale(x: &mut [f64], by: f64, is: impl Fn(usize) -> bool) {
    x.iter_mut().enumerate().filter(|(n, _)| is(*n)).for_each(|(_, x)| *x = f64::from((*x * by) as f32));
}

fn solved(p: &Problem) -> Result<Solution> {
    p.solve::<f32>(Strategy::Fused, None)
}

#[track_caller]
fn refused_for(what: &str, got: Result<Solution>, tensors: &[&str]) {
    match got {
        Err(Error::Range { tensor, .. } | Error::Overflow { tensor, .. }) => {
            assert!(tensors.contains(&tensor), "{what}")
        }
        got => panic!("{what}: {got:?}"),
    }
}

/// A token so much larger that the squares of all other products leave f32, and that meets no key itself.
#[test]
fn a_token_that_drowns_the_norm_is_refused() {
    for json in [r#"{"mechanism": "infsa"}"#, r#"{"mechanism": "infsa-resolvent"}"#] {
        let mut p = call(json);
        let row = |n: usize| n % (24 * 8) < 8;
        let q = p.q.clone();
        let k = p.k.as_mut().unwrap();
        k.iter_mut().zip(&q).enumerate().filter(|(n, _)| row(*n)).for_each(|(_, (k, q))| *k = -q);
        scale(&mut p.q, 1e24, row);
        scale(p.k.as_mut().unwrap(), 1e24, row);
        refused_for(json, solved(&p), &["q", "k"]);
    }
}

/// The unit of one head's gradients is no unit of another's.
#[test]
fn heads_of_unequal_values_are_right_or_refused() {
    for json in [r#"{"mechanism": "softmax"}"#, r#"{"mechanism": "infsa"}"#, r#"{"mechanism": "fna"}"#] {
        for (large, small) in [(1e17, 1e-8), (1e14, 1e-4), (1e6, 1e-6)] {
            let mut p = call(json);
            let first = |n: usize| n < 24 * 8;
            for x in [&mut p.v, &mut p.dout] {
                scale(x, large, first);
                scale(x, small, |n| !first(n));
            }
            match solved(&p) {
                Ok(got) => {
                    assert_solution(json, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1e-20))
                }
                got => refused_for(json, got, &["v", "dout"]),
            }
        }
    }
}

/// Later values of any size change no bit of earlier gradients.
#[test]
fn later_values_change_no_gradient() {
    for json in [
        r#"{"mechanism": "softmax", "causal": true}"#,
        r#"{"mechanism": "infsa", "causal": true}"#,
        r#"{"mechanism": "fna", "kappa": 3, "causal": true}"#,
        r#"{"mechanism": "laplacian-exact", "centering": "per-query", "whitening": "none", "causal": true}"#,
    ] {
        let mut p = call(json);
        let late = |n: usize| n / 8 % 24 >= 13;
        scale(&mut p.dout, 0.0, late);
        let before = solved(&p).unwrap();
        for size in [1e10, 1e25, 1e30] {
            let mut p = p.clone();
            scale(&mut p.v, size, late);
            let after = solved(&p).unwrap();
            for name in ["dq", "dk", "dv"] {
                let early =
                    |s: &Solution| s[name].iter().enumerate().filter(|(n, _)| !late(*n)).map(|(_, x)| *x).collect();
                let [before, after]: [Vec<f64>; 2] = [&before, &after].map(early);
                assert!(before == after, "{json}: {name} at {size:e}");
            }
        }
    }
}

/// A key far away has no similarity, and takes no digits from the gradient of the kernel's width.
#[test]
fn a_far_key_leaves_the_gradient_of_the_width() {
    for (json, rtol) in [
        (r#"{"mechanism": "laplacian-exact"}"#, 1e-4),
        (r#"{"mechanism": "laplacian", "inverse": "cholesky", "landmarks": {"kind": "stride", "ratio": 3}}"#, 1e-3),
    ] {
        for size in [1e4, 1e6, 1e8] {
            let mut p = call(json);
            scale(p.k.as_mut().unwrap(), size, |n| n % (24 * 8) < 8);
            let (got, expected) = (solved(&p).unwrap(), p.reference());
            assert_close(&format!("{json} at {size:e}"), &got["dlambda"], &expected["dlambda"], 2, rtol, 0.0);
        }
    }
}

/// Keys of very unequal size that no query has anything in common with leave nothing, which is right.
#[test]
fn keys_that_meet_nothing_leave_nothing() {
    let mut p = call(r#"{"mechanism": "infsa"}"#);
    p.q.fill(1.0);
    p.k.as_mut().unwrap().fill(-1.0);
    scale(p.k.as_mut().unwrap(), 1e12, |n| n % (24 * 8) < 8);
    let got = solved(&p).unwrap();
    assert!(got["out"].iter().all(|&x| x == 0.0));
}

/// A token so small that a factor on it leaves f32 is told.
#[test]
fn factors_beyond_f32_are_told() {
    let mut p = call(r#"{"mechanism": "linear-infsa", "tied": true, "norm_bias": 1}"#);
    scale(&mut p.q, 1e-40, |n| n / 8 % 24 == 5);
    match solved(&p) {
        Ok(got) => assert!(got["dq"].iter().all(|x| x.is_finite())),
        got => refused_for("a subnormal token", got, &["dq"]),
    }
}

/// Sums that leave f32 are told by every mechanism.
#[test]
fn sums_beyond_f32_are_told() {
    let mut p = call(r#"{"mechanism": "uniform"}"#);
    p.v.iter_mut().for_each(|x| *x = 3e38);
    match solved(&p) {
        Ok(got) => assert_close("out", &got["out"], &p.reference()["out"], 2, 1e-5, 0.0),
        got => refused_for("uniform", got, &["out"]),
    }
    let mut p = call(r#"{"mechanism": "uniform"}"#);
    p.dout.iter_mut().for_each(|x| *x = 3e38);
    refused_for("uniform", solved(&p), &["dv"]);
}
