//! What holds for every mechanism on any input, of the reference and of the fused kernels alike.

use crate::{support, threads};

use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngSeed, TestCaseResult},
};
use resolvent_kernels::{Mechanism, Parameter, Shape, Tol, mechanism::Series};
use support::{
    assert_close,
    problem::{Problem, Solution, assert_solution, is_parameter},
    random::{
        aligns_tokens, any_masked_problem, any_problem, counts_masked_tokens, every_mechanism, orders_tokens, problem,
    },
};
use threads::on_threads;

/// A way to solve a problem, and how exactly it does.
struct Solver {
    name: &'static str,
    solve: fn(&Problem) -> Solution,
    tol: fn(&Mechanism) -> Tol,
}

const SOLVERS: [Solver; 2] = [
    Solver { name: "reference", solve: Problem::reference, tol: |_| Tol::F64.with_noise(1.0) },
    Solver { name: "fused", solve: Problem::fused, tol: |m| Tol::f32(m).with_noise(1.0) },
];

impl Solver {
    /// Solves both problems and compares their solutions after `part` took out of the first what the second has.
    fn compare(&self, whole: &Problem, part: impl Fn(&Solution) -> Solution, other: &Problem) {
        let (whole_solution, expected) = ((self.solve)(whole), (self.solve)(other));
        let what = format!("{} of {:?}", self.name, whole.mechanism);
        assert_solution(&what, &part(&whole_solution), &expected, &other.shape, (self.tol)(&whole.mechanism));
    }
}

/// The same `cases` in every run: what fails, fails again.
fn few(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(1), failure_persistence: None, ..ProptestConfig::default() }
}

fn bits(solution: &Solution) -> Vec<(&'static str, Vec<u64>)> {
    solution.iter().map(|(&name, x)| (name, x.iter().map(|x| x.to_bits()).collect())).collect()
}

fn causal(mechanism: &Mechanism) -> bool {
    mechanism.causal
}

proptest! {
    #![proptest_config(few(256))]

    /// What a masked token holds, NaN included, changes no bit; its gradient is exactly zero.
    #[test]
    fn masked_content_is_absent(clean in any_masked_problem()) {
        let mut dirty = clean.clone();
        dirty.fill_masked(&[f64::NAN, 1e30, f64::NEG_INFINITY, -1e30]);
        for Solver { name, solve, .. } in SOLVERS {
            let solution = solve(&clean);
            prop_assert_eq!(bits(&solution), bits(&solve(&dirty)), "{}", name);
            masked_rows_are_zero(&clean, &solution)?;
        }
    }

    /// A masked tail is the same as a shorter sequence.
    #[test]
    fn a_masked_tail_is_no_tail(mut whole in any_problem(), cut in 0.0..0.9_f64) {
        prop_assume!(!counts_masked_tokens(&whole.mechanism));
        let Shape { batch, seq_q, seq_kv, .. } = whole.shape;
        let mut tails = [seq_q, seq_kv].map(|seq| (seq as f64 * cut) as usize);
        if aligns_tokens(&whole.mechanism) {
            tails = [tails[0].min(tails[1]); 2]; // alignment at the end is about the padded lengths
        }
        let (queries, keys) = (seq_q - tails[0], seq_kv - tails[1]);
        let short = whole.select(&Vec::from_iter(0..queries), &Vec::from_iter(0..keys));
        let first = |kept: usize, seq: usize| Some((0..batch * seq).map(|n| n % seq < kept).collect());
        (whole.query_mask, whole.key_mask) = (first(queries, seq_q), first(keys, seq_kv));
        let part = |s: &Solution| whole.select_solution(s, &Vec::from_iter(0..queries), &Vec::from_iter(0..keys));
        SOLVERS.iter().for_each(|solver| solver.compare(&whole, part, &short));
    }

    /// Without causality, tokens have no order.
    #[test]
    fn tokens_have_no_order(whole in any_masked_problem(), turn in any::<prop::sample::Index>()) {
        prop_assume!(!orders_tokens(&whole.mechanism));
        let order = |seq: usize| {
            let mut order: Vec<usize> = (0..seq).rev().collect();
            order.rotate_left(turn.index(seq));
            order
        };
        let (queries, keys) = (order(whole.shape.seq_q), order(whole.shape.seq_kv));
        let part = |s: &Solution| whole.select_solution(s, &queries, &keys);
        SOLVERS.iter().for_each(|solver| solver.compare(&whole, part, &whole.select(&queries, &keys)));
    }

    /// A head is computed as if it were alone.
    #[test]
    fn heads_and_batch_entries_are_independent(whole in any_masked_problem()) {
        prop_assume!(whole.mechanism.drawn_landmarks().is_none()); // drawn by the batch entry's number
        let Shape { batch, heads, .. } = whole.shape;
        let alone = whole.head(batch - 1, heads - 1);
        let last = |s: Solution, slices: usize| {
            let of = |x: &[f64]| x[x.len() - x.len() / slices..].to_vec();
            s.iter().filter(|(name, _)| !is_parameter(name)).map(|(&name, x)| (name, of(x))).collect::<Solution>()
        };
        for Solver { name, solve, tol } in SOLVERS {
            let (got, expected) = (last(solve(&whole), whole.shape.slices()), last(solve(&alone), 1));
            let what = format!("{name} of {:?}", whole.mechanism);
            assert_solution(&what, &got, &expected, &alone.shape, tol(&whole.mechanism));
        }
    }

    /// The output is linear in the values, and (but for the series) in the decay: `<dout, out> = <dv, v> = <dgamma, gamma>`.
    #[test]
    fn linear_inputs_meet_their_adjoints(p in any_masked_problem()) {
        let inner = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        for Solver { name, solve, .. } in SOLVERS {
            let s = solve(&p);
            let size = inner(&p.dout, &p.dout).sqrt() * inner(&s["out"], &s["out"]).sqrt() + 1e-3;
            let expected = inner(&p.dout, &s["out"]);
            prop_assert!((inner(&s["dv"], &p.v) - expected).abs() < 1e-5 * size, "{name}: dv of {:?}", p.mechanism);
            let Some(gamma) = p.mechanism.gamma() else { continue };
            if !matches!(p.mechanism.series, Series::Resolvent(_) | Series::Hops(_)) {
                let gamma = |h: usize| p.parameters.get(&Parameter::Gamma).map_or(gamma, |gamma| gamma[h].into());
                let got: f64 = s["dgamma"].iter().enumerate().map(|(h, d)| d * gamma(h)).sum();
                prop_assert!((got - expected).abs() < 1e-5 * size, "{name}: dgamma of {:?}", p.mechanism);
            }
        }
    }

    /// The future changes nothing: the first rows of a longer sequence are the shorter sequence's.
    #[test]
    fn causal_rows_see_no_future(
        mechanism in select(every_mechanism().into_iter().filter(causal).collect::<Vec<_>>()),
        (seq, longer) in (1..20_usize, 1..20_usize),
        seed in any::<u64>(),
    ) {
        let whole = problem(mechanism, Shape::square(2, 2, seq + longer, 6), seed);
        let first = Vec::from_iter(0..seq);
        let only_out = |s: &Solution| Solution::from([("out", s["out"].clone())]);
        for Solver { name, solve, tol } in SOLVERS {
            let got = only_out(&whole.select_solution(&solve(&whole), &first, &first));
            let short = whole.select(&first, &first);
            assert_solution(name, &got, &only_out(&solve(&short)), &short.shape, tol(&whole.mechanism));
        }
    }

    /// A row without keys is zero, and so are its gradients: never NaN.
    #[test]
    fn rows_without_keys_are_zero(mut p in any_problem(), rest in any::<bool>()) {
        let Shape { batch, seq_kv, .. } = p.shape;
        let others = |seq: usize| (0..batch * seq).map(|n| rest && n >= seq).collect::<Vec<_>>();
        p.key_mask = Some(others(seq_kv));
        for Solver { name, solve, .. } in SOLVERS {
            let s = solve(&p);
            for (tensor, x) in &s {
                let finite = |x: &f64| x.is_finite() || (*tensor == "lse" && *x == f64::NEG_INFINITY);
                prop_assert!(x.iter().all(finite), "{name}: {tensor} of {:?}", p.mechanism);
                let masked = if is_parameter(tensor) { 0 } else { x.len() / batch };
                let empty = if *tensor == "lse" { f64::NEG_INFINITY } else { 0.0 };
                prop_assert!(x[..masked].iter().all(|x| *x == empty), "{name}: {tensor} of {:?}", p.mechanism);
            }
        }
    }

    /// The fused kernels compute what the equations say.
    #[test]
    fn fused_agrees_with_the_reference(p in any_masked_problem()) {
        let [reference, fused] = &SOLVERS;
        let what = format!("{:?} on {:?}", p.mechanism, p.shape);
        assert_solution(&what, &(fused.solve)(&p), &(reference.solve)(&p), &p.shape, (fused.tol)(&p.mechanism));
    }
}

proptest! {
    #![proptest_config(few(24))]

    /// The number of threads changes no bit, whatever the tiles.
    #[test]
    fn threads_change_no_bit(mechanism in select(every_mechanism()), seq in 60..300_usize, seed in any::<u64>()) {
        let p = problem(mechanism, Shape { batch: 1, heads: 2, seq_q: seq, seq_kv: seq + 7, head_dim: 8, value_dim: 5 }, seed);
        let solve = |threads: usize| on_threads(threads, || p.fused());
        let one = solve(1);
        for threads in [2, 3] {
            prop_assert_eq!(bits(&one), bits(&solve(threads)), "{} threads, {:?}", threads, p.mechanism);
        }
    }
}

/// With queries and keys of unequal number, the last query sees all keys: bottom-right alignment.
#[test]
fn the_last_query_sees_all_keys() {
    for (seq_q, seq_kv, means) in [(2, 4, vec![7.0 / 3.0, 15.0 / 4.0]), (4, 2, vec![0.0, 0.0, 1.0, 1.5])] {
        let shape = Shape { batch: 1, heads: 1, seq_q, seq_kv, head_dim: 1, value_dim: 1 };
        let mut p = problem(Mechanism::from_json(r#"{"mechanism": "uniform", "causal": true}"#).unwrap(), shape, 1);
        p.v = [1.0, 2.0, 4.0, 8.0][..seq_kv].to_vec();
        let mut flat = p.clone();
        flat.mechanism = Mechanism::from_json(r#"{"mechanism": "softmax", "causal": true}"#).unwrap();
        flat.q.fill(0.0);
        for Solver { name, solve, .. } in SOLVERS {
            for p in [&p, &flat] {
                assert_close(&format!("{name} of {:?}", p.mechanism), &solve(p)["out"], &means, 1, 1e-6, 0.0);
            }
        }
    }
}

/// Every row of a masked query in `out` and `dq`, and of a masked key in `dk` and `dv`, is exactly zero.
fn masked_rows_are_zero(p: &Problem, solution: &Solution) -> TestCaseResult {
    let heads = p.shape.heads;
    for (name, mask) in [("out", &p.query_mask), ("dq", &p.query_mask), ("dk", &p.key_mask), ("dv", &p.key_mask)] {
        let (Some(x), Some(mask)) = (solution.get(name), mask) else { continue };
        if name == "out" && p.is_pooled() || name == "dq" && p.mechanism.tied && p.query_mask != p.key_mask {
            continue;
        }
        let (seq, cols) = (mask.len() / p.shape.batch, x.len() / (mask.len() * heads));
        for (n, row) in x.chunks(cols).enumerate() {
            let kept = mask[n / seq / heads * seq + n % seq];
            prop_assert!(kept || row.iter().all(|&x| x == 0.0), "{name}, row {n} of {:?}", p.mechanism);
        }
    }
    Ok(())
}
