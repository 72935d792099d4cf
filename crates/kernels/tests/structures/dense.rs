//! `softmax`, `infsa` and `infsa-resolvent` against the reference: sizes around every block, every level, masks,
//! causality, norms, the solver's end, and the same bits on any number of threads.

use crate::{support, threads};

use resolvent_kernels::{
    Error, Inputs, Mechanism, Operator, Scratch, Shape, Strategy, Tol, mechanism, reference, simd::Level,
};
use support::{
    assert_close,
    floors::assert_agrees,
    golden::Golden,
    problem::{Problem, assert_solution},
    random::{problem, takes_cross},
};
use threads::on_threads;

const DENSE: [&str; 3] = ["softmax", "infsa", "infsa-resolvent"];

/// The preset with some `fields`, and a large `eps` where there is one: where few affinities are positive, the gradients
/// are what `eps` leaves of terms that cancel.
fn preset(id: &str, fields: &str) -> Mechanism {
    let eps = if id == "softmax" { "" } else { r#","eps":0.125"# };
    Mechanism::from_json(&format!(r#"{{"mechanism":"{id}"{eps}{fields}}}"#)).unwrap()
}

#[track_caller]
fn check(p: &Problem, levels: &[Level]) {
    let expected = p.reference();
    for &level in levels {
        let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
        let what = format!("{:?} {:?} on {}", p.mechanism, p.shape, level.name());
        assert_agrees(&what, &got, &expected, p);
    }
}

/// Drops about a third of the keys and of the queries, differently.
fn masked(mut p: Problem) -> Problem {
    p.key_mask = Some((0..p.shape.batch * p.shape.seq_kv).map(|i| i * i % 7 < 5).collect());
    p.query_mask = Some((0..p.shape.batch * p.shape.seq_q).map(|i| i * i % 11 < 6).collect());
    p
}

/// The operator of a problem and what its forward pass saved.
fn saved(p: &Problem) -> Result<(Operator, Vec<f32>), Error> {
    let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Auto)?;
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (q, k, v) = (narrow(&p.q), p.k.as_deref().map(narrow), narrow(&p.v));
    let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() };
    let (mut out, mut stats) = (vec![f32::NAN; op.out_len()], vec![f32::NAN; op.plan().stats]);
    op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default())?;
    Ok((op, stats))
}

#[test]
fn norms_are_those_of_the_stored_cases() {
    let mut checked = 0;
    for case in Golden::all("infsa") {
        let Some(frob) = case.get("frob") else { continue };
        let (op, stats) = saved(&case.problem).unwrap();
        let (got, rtol) = (op.frobenius(&stats).unwrap(), Tol::f32(&case.problem.mechanism).forward);
        assert_close(&case.name, &got, frob, case.problem.shape.slices(), rtol, 0.0);
        checked += 1;
    }
    assert!(checked >= 9, "{checked}");
}

#[test]
fn sizes_around_every_block_at_every_level() {
    for id in ["softmax", "infsa"] {
        for n in [1, 2, 7, 8, 9, 63, 64, 65, 257] {
            for d in [1, 8, 12, 32, 64] {
                check(&problem(preset(id, ""), Shape::square(1, 2, n, d), 1), &Level::available());
            }
        }
    }
}

#[test]
fn masks_causality_cross_attention_and_tying() {
    for id in DENSE {
        for fields in ["", r#","tied":true"#, r#","causal":true"#, r#","causal":true,"tied":true"#] {
            if id == "infsa-resolvent" && fields.contains("causal") {
                continue;
            }
            for n in [5, 64, 150] {
                let shape = Shape { value_dim: 40, ..Shape::square(2, 2, n, 12) };
                let p = problem(preset(id, fields), shape, 2);
                check(&p, &[Level::selected().unwrap()]);
                check(&masked(p.clone()), &Level::available());
                if takes_cross(&p.mechanism) {
                    let cross = Shape { seq_kv: n + 77, ..shape };
                    check(&masked(problem(p.mechanism, cross, 3)), &[Level::selected().unwrap()]);
                }
            }
        }
    }
}

/// The second of two causal tokens has a norm of its own already.
#[test]
fn two_causal_tokens_have_two_norms() {
    check(&problem(preset("infsa", r#","causal":true"#), Shape::square(1, 2, 2, 5), 4), &Level::available());
}

#[test]
fn causal_softmax_of_unequal_lengths_is_aligned_at_the_end() {
    for (seq_q, seq_kv) in [(3, 200), (200, 3), (70, 140), (140, 70), (300, 299)] {
        let shape = Shape { seq_q, seq_kv, ..Shape::square(1, 2, 1, 16) };
        let p = problem(preset("softmax", r#","causal":true"#), shape, 4);
        check(&p, &Level::available());
        check(&masked(p), &Level::available());
    }
}

#[test]
fn activations_and_decays_at_every_level() {
    for activation in ["relu", "abs", "gelu"] {
        for id in ["infsa", "infsa-resolvent"] {
            let fields = format!(r#","activation":"{activation}","scale":0.7"#);
            let mut p = problem(preset(id, &fields), Shape::square(2, 3, 90, 20), 5);
            p.set_gamma(vec![0.2, 0.6, 0.95]);
            check(&p, &Level::available());
            check(&masked(p), &Level::available());
        }
    }
}

/// Every logit is well within f32, and nearly all are the largest; the norm over all pairs is saved in units of a power of two.
#[test]
fn gelu_norms_beyond_f32_are_exact() {
    let large = |causal: &str| {
        let fields = format!(r#","activation":"gelu","scale":0.5{causal}"#);
        let mut p = problem(preset("infsa", &fields), Shape::square(1, 2, 850, 4), 6);
        for x in [&mut p.q, p.k.as_mut().unwrap()] {
            x.iter_mut().for_each(|x| *x = f64::from(((1.0 + 0.1 * *x) * 5.5e17) as f32));
        }
        p
    };
    let p = large("");
    let norms = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().frob.unwrap();
    assert!(norms.iter().all(|&norm| norm > f64::from(f32::MAX)), "of {:e}", norms[0]);
    check(&p, &Level::available());
    let (op, stats) = saved(&p).unwrap();
    assert_close("norms", &op.frobenius(&stats).unwrap(), &norms, 2, 1e-6, 0.0);
    // Causal, the rows' norms differ, and sums over rows keep the digits of smaller logits alone.
    let refused = large(r#","causal":true"#).solve::<f32>(Strategy::Fused, None);
    assert!(matches!(refused, Err(Error::Range { .. })), "{refused:?}");
}

#[test]
fn gradients_survive_where_eps_dwarfs_the_norm() {
    // Of the resolvent, the reference takes the difference of two matrices next to the identity: no smaller there.
    for (id, fields, by) in [
        ("infsa", "", [1e-18, 1e-13]),
        ("infsa", r#","causal":true"#, [1e-13, 1e-18]),
        ("infsa", r#","activation":"abs","tied":true"#, [1e-16; 2]),
        ("infsa-resolvent", "", [1e-5, 1e-4]),
        ("infsa-resolvent", r#","tied":true"#, [1e-5; 2]),
    ] {
        let mut p = problem(preset(id, fields), Shape::square(1, 2, 70, 16), 6);
        let shrink = |x: &mut Vec<f64>, by: f64| x.iter_mut().for_each(|x| *x = f64::from((*x * by) as f32));
        shrink(&mut p.q, by[0]);
        p.k.iter_mut().for_each(|k| shrink(k, by[1]));
        let (expected, what) = (p.reference(), format!("{id} {fields}"));
        for level in Level::available() {
            let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            assert_solution(&what, &got, &expected, &p.shape, Tol::f32(&p.mechanism));
        }
    }
}

/// A query or key of zeros is at the kink of every logit: no slope, by convention.
#[test]
fn a_kink_has_no_slope() {
    for activation in ["relu", "abs"] {
        for causal in ["", r#","causal":true"#] {
            let fields = format!(r#","activation":"{activation}"{causal}"#);
            let mut p = problem(preset("infsa", &fields), Shape::square(1, 2, 20, 8), 13);
            p.q[3 * 8..4 * 8].fill(0.0);
            p.k.as_mut().unwrap()[30 * 8..31 * 8].fill(0.0);
            for solution in [p.reference(), p.fused()] {
                assert!(solution["dq"][3 * 8..4 * 8].iter().all(|&x| x == 0.0), "{fields}");
                assert!(solution["dk"][30 * 8..31 * 8].iter().all(|&x| x == 0.0), "{fields}");
            }
        }
    }
}

#[test]
fn garbage_behind_a_mask_changes_nothing_and_gets_no_gradient() {
    for (id, fields) in DENSE.map(|id| (id, "")).into_iter().chain([("softmax", r#","causal":true"#)]) {
        let clean = masked(problem(preset(id, fields), Shape::square(2, 2, 100, 16), 7));
        let expected = clean.fused();
        let mut dirty = clean.clone();
        let dropped = |mask: &Option<Vec<bool>>, i: usize| !mask.as_ref().unwrap()[i / 3200 * 100 + i / 16 % 100];
        for i in 0..clean.q.len() {
            let garbage = [f64::NAN, f64::INFINITY, -1e30][i % 3];
            if dropped(&clean.key_mask, i) {
                (dirty.k.as_mut().unwrap()[i], dirty.v[i]) = (garbage, garbage);
                assert_eq!((expected["dk"][i], expected["dv"][i]), (0.0, 0.0));
            }
            if dropped(&clean.query_mask, i) {
                (dirty.q[i], dirty.dout[i]) = (garbage, garbage);
                assert_eq!((expected["dq"][i], expected["out"][i]), (0.0, 0.0));
            }
        }
        assert_eq!(dirty.fused(), expected, "{id}");
    }
}

#[test]
fn nothing_kept_is_nothing() {
    for id in DENSE {
        let mut p = problem(preset(id, ""), Shape::square(1, 2, 70, 16), 8);
        p.key_mask = Some(vec![false; 70]);
        for (name, x) in p.fused() {
            let nothing = if name == "lse" { f64::NEG_INFINITY } else { 0.0 };
            assert!(x.iter().all(|&x| x == nothing), "{id} {name}");
        }
    }
}

#[test]
fn threads_do_not_matter() {
    // Few heads and many keys: the backward pass is split over the keys.
    let one_head = Shape { seq_q: 700, seq_kv: 1100, ..Shape::square(1, 1, 1, 24) };
    for id in DENSE {
        for shape in [Shape::square(2, 3, 300, 16), one_head] {
            let p = problem(preset(id, ""), shape, 9);
            let with = |threads| on_threads(threads, || p.fused());
            let one = with(1);
            assert!(one == with(2) && one == with(3), "{id}");
            check(&p, &[Level::selected().unwrap()]);
        }
    }
}

/// Tokens that all point nearly the same way: the operator is nearly of rank one, and its norm nearly the decay.
fn nearly_parallel(fields: &str, tokens: usize) -> Problem {
    let mut p = problem(preset("infsa-resolvent", fields), Shape::square(1, 2, tokens, 8), 12);
    for x in [Some(&mut p.q), p.k.as_mut()].into_iter().flatten() {
        x.iter_mut().for_each(|x| *x = f64::from((0.1 * *x + 1.0) as f32));
    }
    p
}

/// What is kept of one mask alone makes a tied operator asymmetric: conjugate gradients would end elsewhere.
#[test]
fn tied_tokens_under_unequal_masks_are_not_symmetric() {
    for tokens in [6, 40] {
        let mut p = nearly_parallel(r#","tied":true,"gamma":0.95"#, tokens);
        p.query_mask = Some((0..tokens).map(|i| i % 3 != 0).collect());
        check(&p, &Level::available());
        p.key_mask = Some((0..tokens).map(|i| i % 2 == 0).collect());
        check(&p, &Level::available());
        p.query_mask = None;
        check(&p, &Level::available());
        p.query_mask = p.key_mask.clone();
        check(&p, &Level::available());
    }
}

/// The error is below the bound that is reported, the bound below the tolerance that is asked for, and neither by far: a
/// solver that stopped late would be wasteful, one that stopped early wrong.
#[test]
fn solvers_end_within_the_bound_that_they_report() {
    for tied in ["", r#","tied":true"#] {
        for tol in [1e-1, 1e-2, 1e-3, 1e-4] {
            for (gamma, size) in [(0.5, 1.0), (0.9, 1.0), (0.9, 1e-3)] {
                let mut p = nearly_parallel(&format!(r#","gamma":{gamma},"tol":{tol}{tied}"#), 50);
                p.v.iter_mut().for_each(|x| *x = f64::from((size * (0.1 * *x + 1.0)) as f32));
                let (got, exact) = (p.fused(), p.reference());
                let (op, stats) = saved(&p).unwrap();
                let ends = op.convergence(&stats).unwrap();
                let parts = p.shape.slices();
                let heads = got["out"].chunks(400).zip(exact["out"].chunks(400)).zip(p.v.chunks(400));
                assert_eq!((ends.len(), parts), (2, 2));
                for (((got, exact), v), end) in heads.zip(&ends) {
                    let what = format!("{:?}, {end:?}", p.mechanism);
                    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                    let error = norm(&mut got.iter().zip(exact).map(|(x, y)| x - y)) / norm(&mut v.iter().copied());
                    assert!(end.bound <= tol, "{what}");
                    // What f32 leaves of a solution that is 1 / (1 - gamma) times as long as the values.
                    let rounding = 1e-6 / (1.0 - gamma);
                    assert!(error <= end.bound + rounding, "{what}: the error is {error:e}");
                    // Neumann's steps shrink by the decay, and the bound is sharp where the operator is of rank one.
                    let sharp = !tied.is_empty() || error > 0.5 * end.bound && end.bound > 0.9 * gamma * tol;
                    assert!(sharp, "{what}: the error is {error:e}");
                }
                // The adjoint solve is the same, for the gradient of the values.
                for name in ["dv", "dq"] {
                    let what = format!("{name} of {:?}", p.mechanism);
                    assert_close(&what, &got[name], &exact[name], 2, 2.0 * tol / (1.0 - gamma), 0.0);
                }
            }
        }
    }
}

/// A tolerance that f32 cannot reach: a solver ends where its steps are rounding, well before the iterations of the bound.
#[test]
fn solvers_end_at_the_rounding_of_f32() {
    for (tied, size) in [("", 1.0), ("", 1e6), (r#","tied":true"#, 1.0), (r#","tied":true"#, 1e-6)] {
        let mut p = nearly_parallel(&format!(r#","gamma":0.95,"tol":1e-13{tied}"#), 50);
        p.v.iter_mut().for_each(|x| *x = f64::from((size * *x) as f32));
        let limit = mechanism::InfsaResolvent::worst_case_iterations(0.95, 1e-13);
        let (op, stats) = saved(&p).unwrap();
        for end in op.convergence(&stats).unwrap() {
            assert!(2 * end.iterations < limit && end.bound < 1e-3, "{tied}, {size}: {end:?}");
        }
    }
}

#[test]
fn solver_reports_its_end_and_refuses_to_stop_early() {
    let shape = Shape::square(1, 3, 60, 16);
    for (tied, most) in [("", 60), (r#","tied":true"#, 12)] {
        let p = problem(preset("infsa-resolvent", &format!(r#","gamma":0.95{tied}"#)), shape, 10);
        let (op, stats) = saved(&p).unwrap();
        for end in op.convergence(&stats).unwrap() {
            // With gamma 0.95 the bound on what f32 rounding leaves of a step is some 1e-5.
            assert!(end.iterations > 2 && end.iterations <= most && end.bound <= 2e-5, "{tied} {end:?}");
        }
        let p = problem(preset("infsa-resolvent", &format!(r#","gamma":0.95,"max_iter":3{tied}"#)), shape, 10);
        let error = saved(&p).unwrap_err();
        assert!(matches!(error, Error::NotConverged { iterations: 3, residual, .. } if residual > 1e-6), "{error}");
    }
}

#[test]
fn plan_counts_two_products_forward_and_five_backward() {
    let (shape, pairs) = (Shape { value_dim: 32, ..Shape::square(2, 3, 100, 16) }, 6 * 100 * 100);
    let plan = resolvent_kernels::plan(&preset("infsa", ""), &shape, false, Strategy::Auto).unwrap();
    assert_eq!(plan.flops_forward, pairs * 2 * (16 + 32));
    assert_eq!(plan.flops_backward, pairs * 2 * (3 * 16 + 2 * 32));
    let causal = resolvent_kernels::plan(&preset("infsa", ""), &shape, true, Strategy::Auto).unwrap();
    assert_eq!(causal.flops_forward, plan.flops_forward * 101 / 200);
    let long = Shape { seq_q: 100_000, seq_kv: 100_000, ..shape };
    let plan = resolvent_kernels::plan(&preset("softmax", ""), &long, false, Strategy::Auto).unwrap();
    let inputs = long.q_len() + long.k_len() + long.v_len();
    assert!(plan.scratch_forward + plan.scratch_backward < 12 * inputs, "O(N) memory");
}
