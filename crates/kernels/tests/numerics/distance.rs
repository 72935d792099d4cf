//! `fna` against the reference where distances are hard: far from the origin, close together, coinciding, antipodal, huge and
//! tiny; and every option at every level.

use crate::support;

use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Strategy, Tol, simd::Level};
use support::{
    assert_close,
    floors::assert_agrees,
    problem::{Problem, assert_solution},
    random::problem,
};

fn fna(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "fna"{fields}}}"#)).unwrap()
}

/// Every combination of manifold and kernel.
const KERNELS: [&str; 7] = [
    r#", "kappa": "text""#,
    r#", "kappa": "vision""#,
    r#", "alpha": 2"#,
    r#", "kernel": "student", "kappa": 6"#,
    r#", "manifold": "sphere", "kappa": 0.5, "intrinsic_dim": 3"#,
    r#", "manifold": "sphere", "alpha": 2, "intrinsic_dim": 3"#,
    r#", "manifold": "sphere", "kernel": "student", "kappa": 0.5, "intrinsic_dim": 3"#,
];

#[track_caller]
fn check(p: &Problem) {
    let expected = p.reference();
    for level in Level::available() {
        let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
        let what = format!("{:?} {:?} on {}", p.mechanism, p.shape, level.name());
        assert_agrees(&what, &got, &expected, p);
    }
}

/// Every token changed by `change(position, channel, entry)`, to what f32 holds.
fn change(p: &mut Problem, change: impl Fn(usize, usize, f64) -> f64) {
    let (seq, dim) = (p.shape.seq_q, p.shape.head_dim);
    for x in [Some(&mut p.q), p.k.as_mut()].into_iter().flatten() {
        for (n, x) in x.iter_mut().enumerate() {
            *x = f64::from(change(n / dim % seq, n % dim, *x) as f32);
        }
    }
}

#[test]
fn every_kernel_and_option_at_every_level() {
    for kernel in KERNELS {
        for options in ["", r#", "tied": true"#, r#", "causal": true"#, r#", "norm_exponent": 0.5, "causal": true"#] {
            for (n, dim) in [(9, 5), (80, 16), (150, 20)] {
                let shape = Shape { value_dim: 24, ..Shape::square(2, 2, n, dim) };
                let mut p = problem(fna(&format!("{kernel}{options}")), shape, 1);
                check(&p);
                p.key_mask = Some((0..2 * n).map(|i| i * i % 7 < 5).collect());
                p.query_mask = Some((0..2 * n).map(|i| i * i % 11 < 8).collect());
                for parameter in p.mechanism.parameters() {
                    let values = if parameter == Parameter::Alpha { [1.875, 1.25] } else { [3.75, 2.5] };
                    p.parameters.insert(parameter, values.into());
                }
                check(&p);
            }
        }
    }
}

/// The expansion of the square would be off by 0.7 in the distance.
#[test]
fn a_common_offset_changes_nothing() {
    for dim in [8, 24, 64] {
        for fields in [r#", "kappa": "vision""#, r#", "kappa": "vision", "tied": true"#, r#", "alpha": 2"#] {
            let mut p = problem(fna(fields), Shape::square(1, 2, 100, dim), 2);
            change(&mut p, |_, c, x| x + [100.0, -130.0, 0.0][c % 3]);
            check(&p);
        }
    }
}

#[test]
fn close_and_coinciding_tokens_keep_their_distances() {
    for kernel in KERNELS {
        for tied in ["", r#", "tied": true"#] {
            for dim in [8, 40] {
                let mut p = problem(fna(&format!("{kernel}{tied}")), Shape::square(1, 2, 70, dim), 3);
                let (head, q) = (70 * dim, p.q.clone());
                // Unit vectors are rounded, so that a direction between two of them has the digits of their distance.
                let least = if kernel.contains("sphere") { 0.03 } else { 1e-6 };
                let near = |i: usize, size: f64| f64::from((size * ((i * i) as f64).sin()) as f32);
                for slice in [0, head] {
                    let keys = p.k.as_mut().unwrap_or(&mut p.q);
                    // Some keys are queries, some are close to one, some are opposite.
                    for (key, query, factor, size) in [
                        (3, 5, 1.0, 0.0),
                        (4, 5, 1.0, 0.0),
                        (20, 9, 1.0, f64::max(least, 1e-3)),
                        (21, 9, 1.0, least),
                        (33, 9, -1.0, 0.0),
                        (34, 8, -1.0, f64::max(least, 1e-4)),
                    ] {
                        for c in 0..dim {
                            let x = factor * q[slice + query * dim + c] + near(c + key, size);
                            keys[slice + key * dim + c] = f64::from(x as f32);
                        }
                    }
                }
                check(&p);
            }
        }
    }
}

/// Tight clusters: most pairs are close, far from the origin.
#[test]
fn clusters_are_resolved() {
    for fields in [r#", "kappa": 0.05, "tied": true, "intrinsic_dim": 2"#, r#", "kappa": 0.05, "intrinsic_dim": 2"#] {
        let mut p = problem(fna(fields), Shape::square(1, 1, 130, 32), 4);
        change(&mut p, |i, c, x| 0.01 * x + ((i % 4 * 7 + c) as f64).sin());
        check(&p);
    }
}

#[test]
fn tokens_whose_squares_leave_the_range_of_f32() {
    for kernel in &KERNELS[..4] {
        for size in [1e25, 1e-25] {
            for dim in [8, 24] {
                let mut p = problem(fna(kernel), Shape::square(1, 2, 40, dim), 5);
                change(&mut p, |_, _, x| x * size);
                p.parameters.insert(Parameter::Kappa, vec![size as f32, 3.0 * size as f32]);
                check(&p);
            }
        }
    }
}

/// Tokens without direction are a right angle from all others and get no gradient.
#[test]
fn zero_vectors_on_the_sphere() {
    for kernel in &KERNELS[4..] {
        let mut p = problem(fna(kernel), Shape::square(1, 1, 40, 12), 6);
        change(&mut p, |i, _, x| if i % 5 == 2 { 1e-14 * x * (i % 2) as f64 } else { x });
        check(&p);
        let (dq, dim) = (&p.fused()["dq"], 12);
        assert!(dq[2 * dim..3 * dim].iter().all(|&x| x == 0.0));
    }
}

/// Weights that would all underflow before the row's maximum is taken out.
#[test]
fn scores_far_below_the_range_of_exp() {
    let mut p = problem(fna(r#", "kappa": "vision""#), Shape::square(1, 1, 60, 64), 7);
    change(&mut p, |_, _, x| x * 1000.0);
    let expected = p.reference();
    assert!(expected["lse"].iter().all(|&lse| lse < -300.0));
    assert_agrees("far tokens", &p.fused(), &expected, &p);
}

/// Rows of one weight, whose log-sum-exp in f32 is whole units off: the backward pass makes the same weights as the forward
/// pass.
#[test]
fn the_weights_of_sharp_rows_come_back() {
    for (fields, factor) in [
        (r#", "alpha": 2, "kappa": 1"#, 30.0),
        (r#", "alpha": 2, "kappa": 0.05, "tied": true"#, 1.0),
        (r#", "alpha": 2, "kappa": 0.3, "norm_exponent": 1"#, 30.0),
    ] {
        let mut p = problem(fna(fields), Shape::square(1, 2, 50, 8), 8);
        change(&mut p, |_, _, x| x * factor);
        let expected = p.reference();
        assert!(expected["lse"].iter().any(|&lse| lse.abs() > 1e3) || fields.contains("tied"));
        let (got, exact) = (p.fused()["dv"].clone(), &expected["dv"]);
        let sharp = Tol::f32(&p.mechanism);
        assert_close(fields, &got, exact, 2, sharp.backward, 0.0);
    }
}

/// The sums behind the gradients of order and length scale, where rows are flat and `d_M` is small.
#[test]
fn flat_rows_give_exact_gradients_of_the_parameters() {
    for fields in
        [r#", "alpha": 1, "kappa": 10, "intrinsic_dim": 0.25"#, r#", "alpha": 1, "intrinsic_dim": 1, "kappa": 10"#]
    {
        let mut p = problem(fna(&format!(r#"{fields}, "tied": true"#)), Shape::square(1, 1, 1500, 4), 9);
        p.dout.iter_mut().for_each(|x| *x *= 1000.0);
        let (got, expected) = (p.fused(), p.reference());
        assert_close(fields, &got["dkappa"], &expected["dkappa"], 1, 3e-5, 0.0);
    }
}

/// With a density the rows' sums do not vanish, but those of all rows do: nothing of their rounding may reach the parameters.
#[test]
fn densities_at_small_length_scales_keep_the_gradients_of_the_parameters() {
    // The largest scores have no more digits than f32 has for them.
    for (fields, shape, scores) in [
        (r#""manifold": "sphere", "kernel": "student", "causal": true"#, Shape::square(2, 1, 2, 128), 0.0),
        (r#""manifold": "sphere", "kernel": "student""#, Shape::square(2, 2, 64, 17), 60.0),
        (r#""norm_exponent": 0.5, "causal": true"#, Shape::square(2, 2, 64, 17), 80.0),
    ] {
        let exponent = if fields.contains("norm_exponent") { "" } else { r#", "norm_exponent": 1"# };
        let mut p = problem(fna(&format!(r#", "kappa": 0.05, {fields}{exponent}"#)), shape, 10);
        if shape.seq_q > 2 {
            p.query_mask = Some((0..shape.batch * shape.seq_q).map(|i| i % 9 != 4).collect());
        }
        let tol = Tol::f32(&p.mechanism).with_noise(1.0).with_scores(scores);
        assert_solution(fields, &p.fused(), &p.reference(), &shape, tol);
    }
}

/// With the text rule every distance is a small part of the length scale, and so is what its gradient sums up.
#[test]
fn small_tokens_keep_the_gradient_of_the_length_scale() {
    for fields in ["", r#", "kernel": "student", "kappa": 700"#, r#", "alpha": 2, "kappa": 700"#] {
        for size in [1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-6] {
            let mut p = problem(fna(fields), Shape::square(1, 2, 60, 64), 12);
            change(&mut p, |_, _, x| x * size);
            let (got, expected) = (p.fused(), p.reference());
            assert_close(&format!("{fields}, {size}"), &got["dkappa"], &expected["dkappa"], 1, 1e-4, 0.0);
        }
    }
}

/// Tokens so small that in their units the square of the length scale would leave the range of f32.
#[test]
fn length_scales_far_beyond_the_tokens_keep_gradients() {
    for (fields, size) in [
        (r#", "kernel": "student", "kappa": 1"#, 1e-24),
        (r#", "kernel": "student", "kappa": 1e3"#, 1e-21),
        (r#", "alpha": 2, "kappa": 1"#, 1e-24),
        (r#", "alpha": 2, "kappa": 1e-3"#, 1e-27),
        (r#", "kappa": 1"#, 1e-36),
    ] {
        let mut p = problem(fna(fields), Shape::square(1, 2, 40, 8), 13);
        change(&mut p, |_, _, x| x * size);
        let (got, expected) = (p.fused(), p.reference());
        for name in ["dq", "dk"] {
            assert!(expected[name].iter().any(|&x| x != 0.0), "{fields}");
            assert_close(&format!("{fields}, {name}"), &got[name], &expected[name], 2, 1e-4, 0.0);
        }
    }
}

/// Distances whose squares, in units of the length scale, leave the range of f32, or that in which they have digits.
#[test]
fn distances_beyond_any_length_scale_stay_numbers() {
    for (fields, factor) in [(r#", "alpha": 2"#, 1e21), (r#", "alpha": 2, "kappa": 1e-20"#, 1.0)] {
        let mut p = problem(fna(fields), Shape::square(1, 1, 30, 6), 11);
        change(&mut p, |_, _, x| x * factor);
        let error = p.solve::<f32>(Strategy::Fused, None).unwrap_err();
        assert!(matches!(error, Error::Range { .. }) && error.to_string().contains("kappa"), "{error}");
    }
    for (fields, factor) in [(r#", "kernel": "student""#, 1e21), (r#", "kernel": "student", "kappa": 1e-20"#, 1.0)] {
        let mut p = problem(fna(fields), Shape::square(1, 1, 30, 6), 11);
        change(&mut p, |_, _, x| x * factor);
        let (got, expected) = (p.fused(), p.reference());
        for name in ["out", "lse", "dv"] {
            assert_close(&format!("{fields}, {name}"), &got[name], &expected[name], 1, 2e-5, 0.0);
        }
        assert!(got.values().flatten().all(|x| x.is_finite()), "{fields}");
    }
}

#[test]
fn plan_counts_passes() {
    let shape = Shape::square(2, 3, 100, 32);
    let plan = |fields: &str| resolvent_kernels::plan(&fna(fields), &shape, false, Strategy::Auto).unwrap();
    let (one, two) = (plan(""), plan(r#", "norm_exponent": 1"#));
    assert_eq!((one.flops_forward, one.exps_forward), (60_000 * 2 * (32 + 32), 3 * 60_000));
    assert_eq!(one.stats, 1200, "a logarithm in two parts for each of 600 rows");
    assert_eq!((two.stats, two.flops_forward), (2400, one.flops_forward + 60_000 * 2 * 32));
    assert_eq!(plan(r#", "alpha": 2"#).exps_forward, 60_000);
}

/// With a window the decay is a composition: it, too, takes pairs that are nearly opposite from the antipode.
#[test]
fn compositions_keep_the_slopes_of_opposite_tokens() {
    for kernel in ["levy", "student"] {
        let json = format!(
            r#"{{"mechanism": "composed", "score": {{"kind": "{kernel}", "manifold": "sphere", "kappa": 0.5, "intrinsic_dim": 3}},
                "structure": {{"kind": "dense", "window": 6}}, "normalisation": "row"}}"#
        );
        for (apart, tol) in [(1e-1, 2e-6), (1e-2, 2e-5), (1e-3, 2e-4)] {
            let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 2, 20, 8), 3);
            // Every key stands opposite of every query, but for some of the distance.
            change(&mut p, |_, channel, x| if channel == 0 { 1.0 } else { 0.3 * apart * x });
            p.k.as_mut().unwrap().iter_mut().for_each(|x| *x = -*x);
            let expected = p.reference();
            for level in Level::available() {
                let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
                for name in ["out", "dq", "dk"] {
                    let what = format!("{kernel} {apart} {name} on {}", level.name());
                    assert_close(&what, &got[name], &expected[name], 2, tol, tol);
                }
            }
        }
    }
}
