//! Queries and keys far from 1: InfSA depends on their lengths only through `eps`, so results stay, and gradients shrink or
//! grow with the lengths but keep their digits.

use crate::support;

use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Strategy, Tol};
use support::{
    assert_close,
    problem::{Problem, Solution, assert_solution},
    random::{mechanisms, problem},
};

/// Lengths of queries and of keys. At the ends even one product of two entries leaves f32.
const SIZES: [(f64, f64); 10] = [
    (1e10, 1e10),
    (1e13, 1e20),
    (1e22, 1e22),
    (1e30, 1e30),
    (1e-15, 1e25),
    (1e25, 1e-20),
    (1e-12, 1e-12),
    (1e30, 1.0),
    (1e-20, 1.0),
    (1.0, 1e-20),
];

/// Whether the activation has no scale of its own.
fn homogeneous(mechanism: &Mechanism) -> bool {
    let text = format!("{mechanism:?}");
    text.contains("Infsa") && !text.contains("Gelu")
}

/// The gradients of the problem with queries and keys of order 1 that `p` is a multiple of.
fn in_units(p: &Problem, mut solution: Solution, [q, k]: [f64; 2]) -> Solution {
    let keys = if p.mechanism.tied { q } else { k };
    for (name, by) in [("dq", q), ("dk", keys)] {
        solution.entry(name).and_modify(|x| x.iter_mut().for_each(|x| *x *= by));
    }
    solution
}

#[test]
fn results_keep_their_digits() {
    for mechanism in mechanisms().into_iter().filter(homogeneous) {
        for sizes @ (size_q, size_k) in SIZES {
            let mut p = problem(mechanism.clone(), Shape::square(1, 2, 33, 8), 11);
            let resize = |x: &mut Vec<f64>, size: f64| x.iter_mut().for_each(|x| *x = f64::from((*x * size) as f32));
            resize(&mut p.q, size_q);
            p.k.iter_mut().for_each(|k| resize(k, size_k));
            let got = p.solve::<f32>(Strategy::Fused, None);
            let size_of_keys = if mechanism.tied { size_q } else { size_k };
            // The gradients of such tokens are far below f32 where `eps` is not as small.
            if mechanism.pooling().is_some_and(|m| m.eps > 0.0) && size_q * size_of_keys < 1e-19 {
                assert!(matches!(got, Ok(_) | Err(Error::Range { .. })), "{mechanism:?}, {sizes:?}: {got:?}");
                if got.is_err() {
                    continue;
                }
            }
            let got = got.unwrap_or_else(|error| panic!("{mechanism:?}, {sizes:?}: {error}"));
            let (got, expected) = (in_units(&p, got, sizes.into()), in_units(&p, p.reference(), sizes.into()));
            // Far above `eps` what is projected out is nearly everything that a decay's gradient sees of the lengths.
            let tol = Tol::f32(&mechanism).with_noise(1e-5);
            assert_solution(&format!("{mechanism:?}, {sizes:?}"), &got, &expected, &p.shape, tol);
        }
    }
}

/// Far from each other, all pairs' derivatives in the length scale are nearly the same, and the gradient is what they differ by.
#[test]
fn gradients_of_length_scales_keep_their_digits() {
    let weighed = [
        r#""structure": {"kind": "dense", "window": 20}"#,
        r#""structure": {"kind": "clustered", "clusters": 3, "estimator": "centroid"}"#,
        r#""series": {"kind": "hops", "count": 2}"#,
        r#""normalisation": {"kind": "row", "density_exponent": 0.5}"#,
        r#""normalisation": "symmetric""#,
    ];
    // Beyond the last of `student` the reference, which takes the difference as it comes, has no digits in f64 either.
    let scores =
        [(r#""kind": "levy""#, 1e5), (r#""kind": "levy", "manifold": "sphere""#, 1e5), (r#""kind": "student""#, 1e3)];
    for (score, most) in scores {
        for fields in weighed {
            for ratio in [1.0, 1e1, 1e2, 1e3, 1e5].into_iter().filter(|&ratio| ratio <= most) {
                let score = format!(r#"{{{score}, "kappa": {}}}"#, 1.0 / ratio);
                let json = format!(r#"{{"mechanism": "composed", "score": {score}, {fields}}}"#);
                let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 2, 40, 16), 5);
                p.fix_plan();
                let (got, expected) = (p.fused(), p.reference());
                for name in ["dalpha", "dkappa"] {
                    assert_close(&format!("{json}, {name}"), &got[name], &expected[name], 1, 1e-4, 0.0);
                }
            }
        }
    }
}

/// Rows that see nothing but what is masked in finite numbers, as those of padding on the left of a causal mask do.
#[test]
fn masks_written_as_numbers_leave_symmetric_gradients() {
    let hidden: [fn(usize, usize) -> bool; 2] = [|i, j| j > i || j < 2, |i, j| i == 0 || j >= 16];
    for score in ["dot-exp", "gaussian"] {
        for (hidden, low) in hidden.into_iter().flat_map(|f| [-90.0, -300.0, -1e3, -1e4].map(|low| (f, low))) {
            for heads in [true, false] {
                let bias = format!(r#"{{"kind": "tensor", "heads": {heads}}}"#);
                let values = format!(r#""score": "{score}", "normalisation": "symmetric", "bias": {bias}"#);
                let m = Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {values}}}"#)).unwrap();
                let mut p = problem(m, Shape::square(1, 2, 32, 16), 3);
                // The hidden ones in steps that f32 has beside the largest of them, the others of order one.
                let number = |n: usize| {
                    if hidden(n / 32 % 32, n % 32) { low + (n % 5) as f32 / 16.0 } else { (n % 7) as f32 / 3.0 }
                };
                let len = if heads { 2 * 32 * 32 } else { 32 * 32 };
                p.parameters.insert(Parameter::Bias, (0..len).map(number).collect());
                let (got, expected) = (p.fused(), p.reference());
                for (name, expected) in &expected {
                    // Of a logit f32 rounds 6e-8; sums over all pairs mostly cancel.
                    let tol = f64::from(low.abs()).max(50.0) * if *name == "dscale" { 3e-6 } else { 1.2e-7 };
                    let what = format!("{values}, {low}: {name}");
                    support::assert_close(&what, &got[name], expected, 2, tol, 0.0);
                }
            }
        }
    }
}
