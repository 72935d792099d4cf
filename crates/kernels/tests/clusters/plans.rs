//! The plans of the kernels against those that the reference makes by code of its own, in f64 and by the definitions; and what
//! a plan may depend on.

use crate::support;

use proptest::{prelude::*, test_runner::RngSeed};
use resolvent_kernels::{
    ClusterPlan, Error, Extras, Inputs, Mask, Mechanism, Operator, PlanMatrices, PlanTensors, Shape, reference,
};
use support::{
    clusters::{any_clustered_problem, mask_apart},
    problem::Problem,
    random::problem,
};

fn few(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(4), failure_persistence: None, ..ProptestConfig::default() }
}

fn ssa(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", {fields}}}"#)).unwrap()
}

fn by_definition(p: &Problem) -> PlanTensors {
    reference::clusters(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().to_tensors()
}

/// Panics unless the plans are the same but for the rounding of weights to f32.
#[track_caller]
fn assert_same(got: &PlanTensors, want: &PlanTensors, what: &str) {
    assert_eq!(got.label_q, want.label_q, "queries of {what}");
    assert_eq!(got.label_k, want.label_k, "keys of {what}");
    assert_eq!(got.exact_blocks, want.exact_blocks, "{what}");
    assert_eq!(got.edges, want.edges, "{what}");
    for (got, want) in got.edge_log_weight.iter().zip(&want.edge_log_weight) {
        assert!((got - want).abs() < 1e-5, "{what}: {got} instead of {want}");
    }
}

fn masked(mut p: Problem, seed: u64) -> Problem {
    if !seed.is_multiple_of(4) {
        mask_apart(&mut p, seed);
    }
    p
}

proptest! {
    #![proptest_config(few(600))]

    /// Labels, blocks, edges and weights are those of the definitions, whatever the masks.
    #[test]
    fn plans_are_those_of_the_definitions(p in (any_clustered_problem(), any::<u64>()).prop_map(|(p, seed)| masked(p, seed))) {
        assert_same(&p.plan().to_tensors(), &by_definition(&p), &format!("{:?} on {:?}", p.mechanism, p.shape));
    }

    /// Masked content, NaN included, changes nothing of a plan, and later tokens nothing of what it says of earlier ones.
    #[test]
    fn plans_see_neither_masked_tokens_nor_later_ones(
        mut p in any_clustered_problem(), seed in any::<u64>(), at in any::<prop::sample::Index>(),
    ) {
        mask_apart(&mut p, seed);
        let plan = p.plan();
        let mut other = p.clone();
        other.fill_masked(&[f64::NAN, 1e30, f64::NEG_INFINITY, -1e30]);
        prop_assert_eq!(&plan, &other.plan());
        let m = p.mechanism.as_ssa().unwrap();
        let (seq, block) = (p.shape.seq_kv, m.causal_clusters.block());
        prop_assume!(m.causal && p.codebook.is_none());
        let first = at.index(seq) / block * block;
        for x in [&mut other.q, other.k.as_mut().unwrap()] {
            x.iter_mut().enumerate().filter(|(n, _)| n / 4 % seq >= first).for_each(|(_, x)| *x = 2.5 - 1.5 * *x);
        }
        let past = |plan: &ClusterPlan| {
            let t = plan.to_tensors();
            let earlier = |labels: &[i64]| (0..labels.len()).filter(|n| n % seq < first).map(|n| labels[n]).collect::<Vec<_>>();
            let edges = t.edges.iter().zip(&t.edge_log_weight).filter(|(edge, _)| edge[1] < first as i64);
            let edges: Vec<_> = edges.map(|(edge, weight)| (*edge, weight.to_bits())).collect();
            (earlier(&t.label_q), earlier(&t.label_k), edges)
        };
        prop_assert_eq!(past(&plan), past(&other.plan()));
    }

    /// Among equal distances the first centre, the first of the farthest points and the first of equal projections count:
    /// points on a coarse grid, whose distances are exact in f32.
    #[test]
    fn ties_go_to_the_first(
        (clusters, iterations, balance) in (1..7_usize, 0..2_usize, any::<bool>()), seq in 2..40_usize, seed in any::<u64>(),
    ) {
        let balance = if balance { "1" } else { "null" };
        let fields = format!(
            r#""clusters": {clusters}, "kmeans_iterations": {iterations}, "balance": {balance}, "seed": {}, "samples": 2"#, seed % 97
        );
        let mut p = problem(ssa(&fields), Shape::square(1, 2, seq, 2), seed);
        p.q.iter_mut().for_each(|x| *x = 4.0 * x.round());
        // Without a round the centres are points: every distance is a small integer.
        if iterations == 0 {
            assert_same(&p.plan().to_tensors(), &by_definition(&p), &format!("{fields}, {seq} tokens"));
        }
        // With one, three of the points make a mean that is as far from the origin as a fourth.
        let kinds = [[-8.0, 0.0], [-4.0, 0.0], [4.0, 0.0], [0.0, 0.0]];
        p.q.chunks_mut(2).enumerate().for_each(|(n, x)| x.copy_from_slice(&kinds[n % seq % 4]));
        p.mechanism = ssa(&format!(r#""clusters": 2, "kmeans_iterations": 1, "balance": null, "seed": {}, "samples": 2"#, seed % 97));
        assert_same(&p.plan().to_tensors(), &by_definition(&p), &format!("{:?}, {seq} tokens", p.mechanism));
    }
}

/// Weights of queries over keys out of [`PlanMatrices`], as tensor operations make them.
fn weights(p: &Problem, plan: &ClusterPlan) -> Vec<f64> {
    let Shape { seq_q, seq_kv, head_dim: d, .. } = p.shape;
    let m = p.mechanism.as_ssa().unwrap();
    let PlanMatrices { clusters, log_weight, far, member, count } =
        plan.matrices(&p.mechanism, &p.shape, &p.mask()).unwrap();
    let scale = m.scale.unwrap_or((d as f64).powf(-0.5));
    let k = p.k.as_ref().unwrap();
    let of_row = |row: usize| {
        let slice = row / seq_q;
        let score = |j: usize| match log_weight[row * seq_kv + j].is_finite() || far[row * seq_kv + j] > 0.0 {
            true => scale * (0..d).map(|c| p.q[row * d + c] * k[(slice * seq_kv + j) * d + c]).sum::<f64>(),
            false => 0.0, // nothing of a masked key may be read
        };
        let (row_far, count) = (&far[row * seq_kv..][..seq_kv], &count[row * clusters..][..clusters]);
        let is_member = |j: usize, c: usize| f64::from(member[(slice * seq_kv + j) * clusters + c] * row_far[j]);
        let near = (0..seq_kv).map(|j| (score(j) + f64::from(log_weight[row * seq_kv + j])).exp());
        let mean = |c: usize| match f64::from(count[c]) {
            0.0 => 0.0,
            n => n * ((0..seq_kv).map(|j| score(j) * is_member(j, c)).sum::<f64>() / n).exp(),
        };
        let (near, means): (Vec<f64>, Vec<f64>) = (near.collect(), (0..clusters).map(mean).collect());
        let total = near.iter().chain(&means).sum::<f64>().max(f64::MIN_POSITIVE);
        let share = |j: usize, c: usize| means[c] * is_member(j, c) / f64::from(count[c]).max(1.0);
        (0..seq_kv).map(|j| (near[j] + (0..clusters).map(|c| share(j, c)).sum::<f64>()) / total).collect::<Vec<_>>()
    };
    (0..p.shape.slices() * seq_q).flat_map(of_row).collect()
}

proptest! {
    #![proptest_config(few(200))]

    /// What a plan says as matrices is what the reference attends along.
    #[test]
    fn matrices_are_the_plan(mut p in any_clustered_problem(), seed in any::<u64>()) {
        mask_apart(&mut p, seed);
        p.fix_plan();
        let got = weights(&p, p.clusters.as_ref().unwrap());
        let want = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
        let close = got.iter().zip(want.weights()).all(|(got, want)| (got - want).abs() < 1e-5);
        prop_assert!(close, "{:?}", p.mechanism);
    }
}

/// A token that finds no cluster to join has no entries but global tokens, and only these see it.
#[test]
fn strays_see_global_tokens_alone() {
    for estimator in [r#""estimator": "centroid""#, r#""samples": 3"#] {
        let fields = format!(r#""clusters": 3, "causal": true, "global_tokens": [3], {estimator}"#);
        let mut p = problem(ssa(&fields), Shape::square(1, 1, 20, 4), 5);
        // Tokens 0 and 1 are before any that has both sides: one is a query alone, the other a key.
        p.key_mask = Some((0..20).map(|n| n != 0 && n != 2).collect());
        p.query_mask = Some((0..20).map(|n| n != 1 && n != 2).collect());
        let t = p.plan().to_tensors();
        assert_eq!((&t.label_q[..4], &t.label_k[..4]), (&[-2, -1, -1, -1][..], &[-1, -2, -1, -1][..]), "{fields}");
        let got = p.fused();
        assert!(got["lse"][0] == f64::NEG_INFINITY && got["out"][..4].iter().all(|&x| x == 0.0), "{fields}");
        assert!(got["dv"][4..8].iter().any(|&x| x != 0.0), "the global token does not see the stray: {fields}");
        let mut without = p.clone();
        without.dout[3 * 4..4 * 4].fill(0.0);
        assert!(without.fused()["dv"][4..8].iter().all(|&x| x == 0.0), "another query sees the stray: {fields}");
        let stored = ClusterPlan::from_tensors(&t, &p.shape).unwrap();
        assert_eq!(stored, p.plan());
        let spoilt = PlanTensors { label_k: [&t.label_k[..5], &[-2], &t.label_k[6..]].concat(), ..t };
        let refused = ClusterPlan::from_tensors(&spoilt, &p.shape).unwrap_err();
        assert!(matches!(refused, Error::Index { tensor: "label_k", index: 5, value: -2, .. }), "{refused}");
        // Without a mask of the queries, too.
        (p.key_mask, p.query_mask) = (Some((0..20).map(|n| n != 0).collect()), None);
        assert_eq!(p.plan().to_tensors().label_q[0], -2, "{fields}");
        p = problem(ssa(&fields), Shape { heads: 2, ..p.shape }, 5);
        let mut second = p.plan().to_tensors();
        second.label_q[25] = -2;
        let refused = ClusterPlan::from_tensors(&second, &p.shape).unwrap_err();
        assert!(matches!(refused, Error::Index { tensor: "label_q", index: 25, value: -2, .. }), "{refused}");
    }
}

/// A sequence of a batch has the clusters that it has as a call of its own, where this says its number.
#[test]
fn a_part_of_a_batch_draws_what_the_whole_does() {
    const FUSED: resolvent_kernels::Strategy = resolvent_kernels::Strategy::Fused;
    const NAIVE: resolvent_kernels::Strategy = resolvent_kernels::Strategy::Reference;
    let whole = problem(ssa(r#""clusters": 5, "samples": 2"#), Shape::square(3, 2, 24, 4), 7);
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (q, k, v) = (narrow(&whole.q), narrow(whole.k.as_ref().unwrap()), narrow(&whole.v));
    let of_whole = whole.plan().to_tensors();
    let shape = Shape { batch: 1, ..whole.shape };
    let part = |x: &[f32], n: usize| x[n * x.len() / 3..(n + 1) * x.len() / 3].to_vec();
    for (n, strategy) in [(0, FUSED), (1, FUSED), (2, FUSED), (2, NAIVE)] {
        let (q, k, v) = (part(&q, n), part(&k, n), part(&v, n));
        let operator = Operator::new(&whole.mechanism, shape, false, strategy).unwrap();
        let labels = |extras| {
            let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras };
            operator.clusters(&inputs, &Mask::NONE).unwrap().to_tensors().label_k
        };
        let own = labels(Extras::default().with_first_sequence(n));
        assert_eq!(own, of_whole.label_k[n * own.len()..][..own.len()], "sequence {n}, {strategy:?}");
        assert_eq!(n == 0, labels(Extras::default()) == own, "sequence {n}");
    }
}
