//! `uniform` and `linear-infsa` against the reference: sizes around every block, every level, masks, token weights,
//! extreme magnitudes, and the same bits on any number of threads.

use crate::{support, threads};

use resolvent_kernels::{
    Error, Inputs, Mechanism, Operator, Scratch, Shape, Strategy, TokenWeights, Tol, mechanism::Structure, simd::Level,
};
use support::{
    assert_close,
    golden::Golden,
    problem::{Problem, assert_solution},
    random::{mechanisms, problem, takes_cross},
};
use threads::on_threads;

fn is_pooled(mechanism: &Mechanism) -> bool {
    matches!(mechanism.structure, Structure::Pooled(_))
}

fn goldens() -> impl Iterator<Item = Golden> {
    Golden::all("infsa").into_iter().filter(|case| is_pooled(&case.problem.mechanism))
}

fn variants() -> impl Iterator<Item = Mechanism> {
    mechanisms().into_iter().filter(is_pooled)
}

fn tolerance(p: &Problem) -> Tol {
    Tol::f32(&p.mechanism).with_noise(1.0)
}

fn at_every_level(p: &Problem, what: &str) {
    let expected = p.reference();
    for level in Level::available() {
        let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
        assert_solution(&format!("{what}, {}", level.name()), &got, &expected, &p.shape, tolerance(p));
    }
}

#[test]
fn sizes_around_every_block() {
    for mechanism in variants() {
        for (seed, n) in [1, 2, 7, 8, 9, 63, 64, 65, 257].into_iter().enumerate() {
            for dim in [1, 8, 12, 16, 64] {
                let shape = Shape { value_dim: if n == 9 { 5 } else { dim }, ..Shape::square(1, 2, n, dim) };
                let p = problem(mechanism.clone(), shape, seed as u64);
                at_every_level(&p, &format!("{mechanism:?}, {n} x {dim}"));
            }
        }
    }
}

#[test]
fn more_tokens_than_a_tile() {
    for mechanism in variants().filter(|m| !format!("{m:?}").contains("Exact")) {
        let p = problem(mechanism.clone(), Shape::square(1, 2, 2500, 4), 1);
        at_every_level(&p, &format!("{mechanism:?}, long"));
    }
}

#[test]
fn rows_that_are_written_past_the_caches() {
    for id in ["uniform", "linear-infsa"] {
        // 2100 rows of 64 f32 are 525 KiB, more than a quarter of a second-level cache.
        let p = problem(Mechanism::preset(id).unwrap(), Shape { value_dim: 64, ..Shape::square(1, 1, 2100, 2) }, 4);
        at_every_level(&p, id);
    }
}

/// `a`, and the gradients of `<da, a>`.
struct Weighed {
    a: Vec<f64>,
    dq: Vec<f64>,
    dk: Option<Vec<f64>>,
}

fn token_weights(p: &Problem, da: &[f32], strategy: Strategy) -> Weighed {
    let m = p.mechanism.pooling().unwrap();
    let weights = TokenWeights::new(&m, p.shape, strategy).unwrap();
    assert_eq!((weights.len(), weights.is_empty()), (p.shape.slices() * p.shape.seq_kv, false));
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
    let (q, k) = (narrow(&p.q), p.k.as_deref().map(narrow));
    let (mut a, mut stats) = (vec![f32::NAN; weights.len()], vec![f32::NAN; weights.plan().stats]);
    let mut scratch = Scratch::default();
    weights.forward(&q, k.as_deref(), &p.mask(), &mut a, &mut stats, &mut scratch).unwrap();
    let (mut dq, mut dk) = (vec![f32::NAN; q.len()], k.as_ref().map(|k| vec![f32::NAN; k.len()]));
    let into = (&mut dq[..], dk.as_deref_mut());
    weights.backward((&q, k.as_deref()), &p.mask(), &a, &stats, da, into, &mut scratch).unwrap();
    Weighed { a: wide(a), dq: wide(dq), dk: dk.map(wide) }
}

#[test]
fn token_weights_are_those_of_the_equations() {
    for case in goldens() {
        let p = &case.problem;
        let expected = case.get("a").unwrap();
        for strategy in [Strategy::Fused, Strategy::Reference] {
            let what = format!("{}, a, {strategy:?}", case.name);
            let da = vec![0.0; expected.len()];
            assert_close(&what, &token_weights(p, &da, strategy).a, expected, p.shape.slices(), 1e-5, 0.0);
        }
    }
}

/// Weights and gradients are those of the reference, whatever masked tokens hold; pooling with them is the operator.
#[test]
fn token_weights_pool_as_the_operator_does() {
    for (seed, mechanism) in variants().filter(|m| m.pooling().is_some()).enumerate() {
        let mut p = problem(mechanism, Shape::square(2, 2, 70, 6), seed as u64);
        let keep: Vec<bool> = (0..2 * 70).map(|n| n % 7 != 3).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        let what = format!("{:?}", p.mechanism);
        let da: Vec<f32> = p.v.iter().step_by(6).map(|&x| x as f32).collect();
        let expected = token_weights(&p, &da, Strategy::Reference);
        p.fill_masked(&[f64::NAN]);
        let got = token_weights(&p, &da, Strategy::Fused);
        assert_close(&format!("a of {what}"), &got.a, &expected.a, 4, 1e-5, 1e-7);
        let tol = tolerance(&p);
        assert_close(&format!("dq of {what}"), &got.dq, &expected.dq, 4, tol.backward, 1e-6);
        if let (Some(got), Some(expected)) = (&got.dk, &expected.dk) {
            assert_close(&format!("dk of {what}"), got, expected, 4, tol.backward, 1e-6);
        }
        p.mechanism = p.mechanism.pooling().unwrap().with_broadcast(false).with_gamma(1.0).into();
        p.dout.truncate(4 * 6);
        let values = p.v.chunks_exact(70 * 6).zip(got.a.chunks_exact(70));
        let pooled: Vec<f64> = values.flat_map(|(v, a)| pool(v, a)).collect();
        assert_close(&format!("pooled by {what}"), &pooled, &p.fused()["out"], 4, 1e-5, 1e-7);
    }
}

/// `sum_j a_j v_j` over the tokens with a weight.
fn pool(v: &[f64], a: &[f64]) -> Vec<f64> {
    let mut sum = vec![0.0; v.len() / a.len()];
    for (row, a) in v.chunks_exact(sum.len()).zip(a).filter(|(_, a)| **a != 0.0) {
        sum.iter_mut().zip(row).for_each(|(s, v)| *s += a * v);
    }
    sum
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    for mechanism in variants() {
        let n = if format!("{mechanism:?}").contains("Exact") { 150 } else { 3000 };
        let p = problem(mechanism, Shape::square(1, 2, n, 12), 5);
        let on = |threads| on_threads(threads, || p.fused());
        let one = on(1);
        assert!(on(2) == one && on(3) == one, "{:?}", p.mechanism);
    }
}

#[test]
fn masked_content_is_never_read() {
    for mechanism in variants() {
        let mut p = problem(mechanism, Shape::square(2, 2, 75, 6), 7);
        let keep: Vec<bool> = (0..150).map(|i| i % 75 < 60 && i % 7 != 3 && i != 0).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep.clone()));
        let expected = p.fused();
        at_every_level(&p, &format!("{:?}, masked", p.mechanism));
        let poison = |x: &mut Vec<f64>, dim: usize| {
            for (n, row) in x.chunks_mut(dim).enumerate() {
                if !keep[n / 75 / 2 * 75 + n % 75] {
                    row.fill(f64::NAN);
                }
            }
        };
        poison(&mut p.q, 6);
        p.k.iter_mut().for_each(|k| poison(k, 6));
        poison(&mut p.v, 6);
        if p.dout.len() == p.v.len() {
            poison(&mut p.dout, 6);
        }
        assert!(p.fused() == expected, "{:?}", p.mechanism);
    }
}

#[test]
fn masks_of_one_side_only_and_of_everything() {
    for mechanism in variants() {
        for (seed, (key, query)) in [(true, false), (false, true), (true, true)].into_iter().enumerate() {
            let mut p = problem(mechanism.clone(), Shape { value_dim: 3, ..Shape::square(2, 1, 40, 9) }, seed as u64);
            let mask = |step: usize| (0..80).map(|i| i < 40 && i % step != 0).collect::<Vec<_>>(); // none of batch 1
            p.key_mask = key.then(|| mask(3));
            p.query_mask = query.then(|| mask(5));
            at_every_level(&p, &format!("{mechanism:?}, masks {key} {query}"));
        }
    }
}

#[test]
fn unequal_lengths_align_bottom_right() {
    for mechanism in variants().filter(takes_cross) {
        for (seq_q, seq_kv) in [(3, 40), (40, 3), (1, 1200), (1200, 1)] {
            let shape = Shape { seq_q, seq_kv, ..Shape::square(1, 2, 1, 5) };
            let mut p = problem(mechanism.clone(), shape, 2);
            at_every_level(&p, &format!("{mechanism:?}, {seq_q} x {seq_kv}"));
            p.key_mask = Some((0..seq_kv).map(|j| j % 4 != 1).collect());
            p.query_mask = Some((0..seq_q).map(|i| i % 3 != 1).collect());
            at_every_level(&p, &format!("{mechanism:?}, {seq_q} x {seq_kv}, masked"));
        }
    }
}

#[test]
fn magnitudes_whose_products_leave_f32() {
    for mechanism in variants() {
        for (size_q, size_k) in [(1e25, 1e25), (1e-15, 1e25), (1e18, 1e-18), (1e15, 1.0)] {
            let mut p = problem(mechanism.clone(), Shape::square(1, 2, 33, 8), 11);
            let resize = |x: &mut Vec<f64>, size: f64| x.iter_mut().for_each(|x| *x = f64::from((*x * size) as f32));
            resize(&mut p.q, size_q);
            p.k.iter_mut().for_each(|k| resize(k, size_k));
            if mechanism.tied && size_q < 1.0 {
                continue; // see `tokens_drowned_by_eps_pool_and_refuse_gradients`
            }
            at_every_level(&p, &format!("{mechanism:?}, {size_q:e}, {size_k:e}"));
        }
    }
}

/// Beside an `eps` that is larger by far than what it is added to, values are pooled as ever, and no gradients are made up.
#[test]
fn tokens_drowned_by_eps_pool_and_refuse_gradients() {
    let mut refused = 0;
    for mechanism in variants().filter(|m| m.pooling().is_some()) {
        let mut p = problem(mechanism.clone(), Shape::square(1, 2, 33, 8), 11);
        let small = |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = f64::from((*x * 1e-15) as f32));
        small(&mut p.q);
        p.k.iter_mut().for_each(small);
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k, v) = (narrow(&p.q), p.k.as_deref().map(narrow), narrow(&p.v));
        let op = Operator::new(&mechanism, p.shape, false, Strategy::Fused).unwrap();
        let (mut out, mut stats) = (vec![f32::NAN; op.out_len()], vec![f32::NAN; op.plan().stats]);
        let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() };
        op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default()).unwrap();
        let out: Vec<f64> = out.iter().map(|&x| x.into()).collect();
        assert_close(&format!("{mechanism:?}"), &out, &p.reference()["out"], 2, 1e-5, 0.0);
        match p.solve::<f32>(Strategy::Fused, None) {
            Err(Error::Range { tensor: "q" | "k", .. }) => refused += 1,
            got => assert_solution(&format!("{mechanism:?}"), &got.unwrap(), &p.reference(), &p.shape, tolerance(&p)),
        }
    }
    assert!(refused > 0, "nothing is drowned: the test shows nothing");
}
