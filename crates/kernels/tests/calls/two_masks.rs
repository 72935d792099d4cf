//! Key mask and query mask that differ: for every mechanism, what either of them leaves out, and the future, is not read.

use crate::support;

use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngSeed, TestCaseResult},
};
use resolvent_kernels::{Mechanism, Shape, Tol};
use support::{
    clusters::{any_clustered_problem, mask_apart},
    problem::{Problem, Solution, assert_solution},
    random::{any_problem, every_mechanism, problem},
};

/// What masked tokens hold instead.
const JUNK: [f64; 4] = [f64::NAN, 1e30, f64::NEG_INFINITY, -1e30];

type Solver = fn(&Problem) -> Solution;

const SOLVERS: [(&str, Solver); 2] = [("reference", Problem::reference), ("fused", Problem::fused)];

fn few(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(3), failure_persistence: None, ..ProptestConfig::default() }
}

/// Masks a problem on both sides; where queries are keys there is one mask.
fn masked(mut p: Problem, seed: u64) -> Problem {
    mask_apart(&mut p, seed);
    if p.mechanism.as_soft().is_some() {
        p.query_mask = None;
    }
    p.clusters = None;
    p
}

/// Any mechanism, masked apart. Plans are made for every call.
fn any_masked_apart() -> impl Strategy<Value = Problem> {
    let problems = prop_oneof![any_problem(), any_clustered_problem()];
    (problems, any::<u64>()).prop_map(|(p, seed)| masked(p, seed))
}

/// Any causal mechanism, masked apart.
fn any_causal() -> impl Strategy<Value = Problem> {
    let causal = every_mechanism().into_iter().filter(|m| m.causal).collect::<Vec<_>>();
    let of_any = (select(causal), 8..70_usize, any::<u64>())
        .prop_map(|(mechanism, seq, seed)| problem(mechanism, Shape::square(2, 2, seq, 4), seed));
    let clustered = any_clustered_problem().prop_filter("causal", |p| p.mechanism.causal);
    (prop_oneof![of_any, clustered], any::<u64>()).prop_map(|(p, seed)| masked(p, seed))
}

/// The rows of `x` whose token `is` it; `rows` tokens a head.
fn pick(x: &[f64], rows: usize, seq: usize, is: impl Fn(usize) -> bool) -> Vec<f64> {
    let cols = x.len() / rows;
    x.iter().enumerate().filter(|(n, _)| is(n / cols % seq)).map(|(_, x)| *x).collect()
}

/// Replaces all tokens from `first` on, and the gradient that they pass back by 0.
fn change_future(p: &mut Problem, first: usize, change: impl Fn(f64) -> f64) {
    let Shape { seq_q: seq, .. } = p.shape;
    let (slices, mut other) = (p.shape.slices(), p.clone());
    let tensors = [Some(&mut other.q), other.k.as_mut(), Some(&mut other.v)];
    for x in tensors.into_iter().flatten() {
        let cols = x.len() / (slices * seq);
        x.iter_mut().enumerate().filter(|(n, _)| n / cols % seq >= first).for_each(|(_, x)| *x = change(*x));
    }
    *p = other;
}

fn silence_future(p: &mut Problem, first: usize) {
    let (cols, seq) = (p.dout.len() / (p.shape.slices() * p.shape.seq_q), p.shape.seq_q);
    p.dout.iter_mut().enumerate().filter(|(n, _)| n / cols % seq >= first).for_each(|(_, x)| *x = 0.0);
}

/// The results before token `first` are the same; gradients of later tokens are zero.
fn same_past(what: &str, p: &Problem, [a, b]: [&Solution; 2], first: usize) -> TestCaseResult {
    let (seq, rows) = (p.shape.seq_q, p.shape.slices() * p.shape.seq_q);
    for name in ["out", "lse", "dq", "dk", "dv"] {
        let (Some(a), Some(b)) = (a.get(name), b.get(name)) else { continue };
        let past = |x: &[f64]| pick(x, rows, seq, |token| token < first);
        let what = format!("{what}: {name} before {first} of {:?}", p.mechanism);
        prop_assert!(past(a) == past(b), "{what}");
        if name.starts_with('d') {
            let later = pick(b, rows, seq, |token| token >= first);
            prop_assert!(later.iter().all(|&x| x == 0.0), "{name} from {first} on of {:?}", p.mechanism);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(few(400))]

    /// What a masked query or key holds changes no bit.
    #[test]
    fn masked_content_is_absent(clean in any_masked_apart()) {
        let mut dirty = clean.clone();
        dirty.fill_masked(&JUNK);
        for (name, solve) in SOLVERS {
            let (a, b) = (solve(&clean), solve(&dirty));
            for (tensor, a) in &a {
                let same = a.iter().zip(&b[tensor]).all(|(a, b)| a.to_bits() == b.to_bits());
                prop_assert!(same, "{name}: {tensor} of {:?}", clean.mechanism);
            }
        }
    }

    /// The kernels do what the equations say.
    #[test]
    fn fused_agrees_with_the_reference(p in any_masked_apart()) {
        let what = format!("{:?} on {:?}", p.mechanism, p.shape);
        assert_solution(&what, &p.fused(), &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
    }

    /// Later tokens, kept or not, change no earlier row and no gradient of one.
    #[test]
    fn the_future_is_absent(mut p in any_causal(), at in any::<prop::sample::Index>()) {
        let block = p.mechanism.as_ssa().map_or(1, |m| m.causal_clusters.block());
        let first = at.index(p.shape.seq_q) / block * block;
        silence_future(&mut p, first);
        let mut other = p.clone();
        change_future(&mut other, first, |x| 2.5 - 1.5 * x);
        other.fill_masked(&JUNK);
        silence_future(&mut other, first);
        for (name, solve) in SOLVERS {
            same_past(name, &p, [&solve(&p), &solve(&other)], first)?;
        }
    }
}

/// Keys 5 and 7 are masked, their queries are not: these join clusters by what they see of them. (Means over all members
/// once let later tokens and masked ones choose for them.)
#[test]
fn queries_of_masked_keys_see_no_future() {
    for cluster_on in ["queries", "keys"] {
        let json = format!(
            r#"{{"mechanism": "ssa", "clusters": 4, "estimator": "centroid", "cluster_on": "{cluster_on}", "causal": true}}"#
        );
        let mut moved = 0;
        for seed in 0..20 {
            let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 1, 24, 4), seed);
            p.key_mask = Some((0..24).map(|n| n != 5 && n != 7).collect());
            let mut other = p.clone();
            change_future(&mut other, 12, |x| 2.5 - 1.5 * x);
            let rows = |p: &Problem| p.fused()["out"][..12 * 4].to_vec();
            assert_eq!(rows(&p), rows(&other), "{cluster_on}, seed {seed}");
            moved += usize::from(p.plan().to_tensors().label_q[12..] != other.plan().to_tensors().label_q[12..]);
        }
        assert!(moved > 10, "the future changes no label: the test shows nothing");
    }
}
