//! Queries that choose for themselves which clusters of keys they see: the kernels against the reference, what plans are, and what the
//! operator is equal to.

use crate::{support, threads};

use std::collections::BTreeMap;

use resolvent_kernels::{ClusterPlan, Error, Extras, Inputs, Mechanism, Operator, Shape, Strategy, Tol, reference};
use support::{
    problem::{Problem, Solution, assert_solution},
    random::problem,
};

/// Scores, normalisations and series that run on such a graph.
const VALUES: &[&str] = &[
    r#""mechanism": "routed", "clusters": 5, "routes": 2"#,
    r#""mechanism": "routed", "clusters": 7, "routes": 1, "cluster_metric": "cosine", "outlier_globals": 3"#,
    r#""mechanism": "routed", "clusters": 6, "routes": 3, "global_tokens": 2, "scale": 0.8"#,
    r#""mechanism": "routed", "clusters": 6, "routes": 2, "structure": {"estimator": "importance", "samples": 0}"#,
    r#""mechanism": "routed", "clusters": 4, "routes": 2, "score": {"kind": "levy", "alpha": 1.3, "kappa": 3}"#,
    r#""mechanism": "routed", "clusters": 4, "routes": 2, "score": {"kind": "student", "alpha": 1.5, "kappa": 2}, "series": {"kind": "resolvent", "gamma": 0.6}"#,
    r#""mechanism": "routed", "clusters": 5, "routes": 2, "score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius"}"#,
    r#""mechanism": "routed", "clusters": 5, "routes": 2, "score": {"kind": "dot-sigmoid"}, "normalisation": {"kind": "none", "factor": "inv-n"}"#,
    r#""mechanism": "routed", "clusters": 5, "routes": 2, "normalisation": {"kind": "frobenius"}, "series": {"kind": "hops", "count": 2, "gamma": 0.7}"#,
    r#""mechanism": "routed", "clusters": 5, "routes": 2, "tied": true, "score": {"kind": "gaussian"}"#,
];

/// The same in segments, of tokens that see the past alone.
const CAUSAL: &[&str] = &[
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "routes": 2"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 8}, "clusters": 3, "global_tokens": 2"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 20}, "cluster_metric": "cosine", "scale": 0.8"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "routes": 1, "structure": {"estimator": "importance", "samples": 0}"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "score": {"kind": "levy", "alpha": 1.3, "kappa": 3}, "series": {"kind": "hops", "count": 2, "gamma": 0.6}"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius"}"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 16}, "score": {"kind": "dot-sigmoid"}, "normalisation": {"kind": "none", "factor": "inv-n"}"#,
    r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "segment", "size": 32}, "tied": true, "score": {"kind": "gaussian"}"#,
];

fn all() -> impl Iterator<Item = &'static str> {
    VALUES.iter().chain(CAUSAL).copied()
}

fn mechanism(values: &str) -> Mechanism {
    Mechanism::from_json(&format!("{{{values}}}")).unwrap()
}

/// A problem with one plan for all that solve it.
fn planned(values: &str, shape: Shape, seed: u64) -> Problem {
    let mut p = problem(mechanism(values), shape, seed);
    p.fix_plan();
    p
}

fn without_lse(mut solution: Solution) -> Solution {
    solution.remove("lse");
    solution
}

fn assert_fused(p: &Problem) {
    let got = without_lse(p.solve::<f32>(Strategy::Fused, None).unwrap());
    let what = format!("{:?} on {:?}", p.mechanism, p.shape);
    assert_solution(&what, &got, &without_lse(p.reference()), &p.shape, Tol::f32(&p.mechanism).with_noise(4.0));
}

/// Queries that a plan has in no cluster see all keys that they may see.
#[test]
fn queries_of_no_cluster_see_every_key() {
    for values in [VALUES[0], CAUSAL[0]] {
        let mut p = planned(values, Shape::square(1, 2, 50, 8), 5);
        let mut plan = p.clusters.as_ref().unwrap().to_tensors();
        [3, 20, 71].into_iter().for_each(|i| plan.label_q[i] = -1);
        p.clusters = Some(ClusterPlan::from_tensors(&plan, &p.shape).unwrap());
        assert_fused(&p);
    }
}

#[test]
fn the_fused_path_is_the_reference() {
    for (n, values) in all().enumerate() {
        for (m, seq) in [7, 60, 230].into_iter().enumerate() {
            let shape = Shape { value_dim: 7, ..Shape::square(2, 2, seq, 5) };
            let mut p = planned(values, shape, (10 * n + m) as u64);
            assert_fused(&p);
            p.key_mask = Some((0..2 * seq).map(|n| n % 5 != 3).collect());
            p.query_mask =
                Some((0..2 * seq).map(|n| if values.contains("tied") { n % 5 != 3 } else { n % 7 != 2 }).collect());
            // The plan of all tokens meets the masks, then one of their own.
            assert_fused(&p);
            p.clusters = None;
            p.fix_plan();
            assert_fused(&p);
        }
    }
}

/// Of the last queries alone, as they come when a sequence goes on.
#[test]
fn the_last_queries_see_what_they_do_among_all() {
    for values in [CAUSAL[0], CAUSAL[1], CAUSAL[3]] {
        for seq_q in [1, 5, 40] {
            let shape = Shape::square(1, 2, 75, 6);
            let whole = problem(mechanism(values), shape, 4);
            let last = |x: &[f64]| -> Vec<f64> {
                x.chunks_exact(75 * 6).flat_map(|head| &head[(75 - seq_q) * 6..]).copied().collect()
            };
            let part = Problem {
                shape: Shape { seq_q, ..shape },
                q: last(&whole.q),
                dout: last(&whole.dout),
                ..whole.clone()
            };
            let mut planned = part.clone();
            planned.fix_plan();
            assert_fused(&planned);
            let [got, all] = [&part, &whole].map(|p| p.fused()["out"].clone());
            assert!(got.iter().zip(last(&all)).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs().max(1.0)), "{values}");
        }
    }
}

/// Whatever comes later changes no bit of what came before.
#[test]
fn the_past_does_not_know_the_future() {
    for values in CAUSAL {
        let p = problem(mechanism(values), Shape::square(1, 2, 90, 6), 9);
        for from in [1, 16, 40, 63, 89] {
            let mut changed = p.clone();
            let future = |x: &mut [f64]| {
                x.chunks_exact_mut(90 * 6)
                    .for_each(|head| head[from * 6..].iter_mut().for_each(|x| *x = 1.7 - 2.0 * *x))
            };
            future(&mut changed.q);
            changed.k.as_deref_mut().into_iter().for_each(future);
            future(&mut changed.v);
            let past = |p: &Problem| -> Vec<f64> {
                p.fused()["out"].chunks_exact(90 * 6).flat_map(|head| &head[..from * 6]).copied().collect()
            };
            assert!(past(&p) == past(&changed), "{values}, from {from}");
        }
    }
}

/// A cluster that went on into a later segment would have a mean of its own for every query.
#[test]
fn plans_of_other_segments_are_refused() {
    let p = problem(mechanism(CAUSAL[0]), Shape::square(1, 1, 40, 4), 2);
    let mut tensors = p.plan().to_tensors();
    tensors.label_k[17] = tensors.label_k[3];
    let plan = ClusterPlan::from_tensors(&tensors, &p.shape).unwrap();
    let error = Problem { clusters: Some(plan), ..p }.solve::<f32>(Strategy::Fused, None).unwrap_err();
    assert!(matches!(error, Error::Tensor { tensor: "label_k", .. }), "{error}");
}

/// The names of clusters say nothing: a plan that counts them backwards is the same operator, though its means are of other segments in turn.
#[test]
fn clusters_may_have_any_label() {
    for values in CAUSAL.iter().chain(&VALUES[..3]) {
        let mut p = planned(values, Shape::square(1, 2, 70, 5), 3);
        let expected = p.fused()["out"].clone();
        let plan = p.clusters.take().unwrap();
        let mut tensors = plan.to_tensors();
        let backwards = |slice: usize, label: i64| plan.clusters(slice)[1] as i64 - 1 - label;
        for (n, label) in tensors.label_k.iter_mut().enumerate().filter(|(_, label)| **label >= 0) {
            *label = backwards(n / 70, *label);
        }
        tensors.exact_blocks.iter_mut().for_each(|[slice, _, key]| *key = backwards(*slice as usize, *key));
        tensors.exact_blocks.sort_unstable();
        p.clusters = Some(ClusterPlan::from_tensors(&tensors, &p.shape).unwrap());
        support::assert_close(values, &p.fused()["out"], &expected, 2, 1e-6, 0.0);
        assert_fused(&p);
    }
}

#[test]
fn queries_may_be_of_another_number() {
    for values in [VALUES[0], VALUES[1], VALUES[4]] {
        for (seq_q, seq_kv, value_dim) in [(1, 40, 6), (9, 120, 1), (150, 30, 3)] {
            let shape = Shape { seq_q, seq_kv, value_dim, ..Shape::square(1, 2, 1, 6) };
            assert_fused(&planned(values, shape, seq_q as u64));
        }
    }
}

/// Plans are made twice, by code that shares nothing.
#[test]
fn plans_are_those_of_the_reference() {
    for values in VALUES[..5].iter().chain(&CAUSAL[..5]) {
        for seed in 0..4 {
            let p = problem(mechanism(values), Shape::square(2, 2, 90, 6), seed);
            let own = reference::clusters(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
            assert_eq!(p.plan(), own, "{values}");
            let again = ClusterPlan::from_tensors(&own.to_tensors(), &p.shape).unwrap();
            assert_eq!(again, own);
        }
    }
}

/// More clusters than a block of the product has rows, and more queries than a panel has columns, some of them masked and some not in
/// the same segment.
#[test]
fn routes_among_many_clusters_are_those_of_the_reference() {
    for values in [
        r#""mechanism": "routed", "clusters": 70, "routes": 9"#,
        r#""mechanism": "routed", "clusters": 40, "routes": 1, "outlier_globals": 60, "balance": null"#,
        r#""mechanism": "routed", "causal": true, "clusters": 9, "routes": 6, "causal_clusters": {"kind": "segment", "size": 25}"#,
    ] {
        for seed in 0..3 {
            let mut p = problem(mechanism(values), Shape::square(1, 2, 290, 5), seed);
            p.key_mask = Some((0..290).map(|n| n % 6 != 2).collect());
            p.query_mask = Some((0..290).map(|n| n % 7 != 3).collect());
            let own = reference::clusters(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
            assert_eq!(p.plan(), own, "{values}, seed {seed}");
        }
    }
}

/// Every query sees exactly the clusters whose means weigh most.
#[test]
fn routes_are_the_heaviest_means() {
    let p = problem(mechanism(r#""mechanism": "routed", "clusters": 6, "routes": 2"#), Shape::square(1, 1, 50, 4), 3);
    let plan = p.plan().to_tensors();
    let keys = p.k.as_ref().unwrap();
    let mut routes: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
    plan.exact_blocks.iter().for_each(|[_, i, c]| routes.entry(*i).or_default().push(*c));
    assert_eq!(routes.len(), 50);
    let weight = |i: usize, c: i64| {
        let members: Vec<usize> = (0..50).filter(|&j| plan.label_k[j] == c).collect();
        let mean = |x: usize| members.iter().map(|j| keys[j * 4 + x]).sum::<f64>() / members.len() as f64;
        0.5 * (0..4).map(|x| p.q[i * 4 + x] * mean(x)).sum::<f64>() + (members.len() as f64).ln()
    };
    let clusters = *plan.label_k.iter().max().unwrap() + 1;
    for (i, chosen) in routes {
        let least = chosen.iter().map(|&c| weight(i as usize, c)).fold(f64::INFINITY, f64::min);
        let others = (0..clusters).filter(|c| !chosen.contains(c)).map(|c| weight(i as usize, c));
        assert!(chosen.len() == 2 && others.fold(f64::NEG_INFINITY, f64::max) <= least + 1e-5);
    }
}

#[test]
fn all_routes_or_one_cluster_are_softmax() {
    let dense = mechanism(r#""mechanism": "softmax""#);
    for values in [
        r#""mechanism": "routed", "clusters": 1"#,
        r#""mechanism": "routed", "clusters": 9, "routes": 100"#,
        r#""mechanism": "routed", "clusters": 9, "outlier_globals": 500"#,
        r#""mechanism": "routed", "clusters": 500"#,
        r#""mechanism": "routed", "causal": true"#,
        r#""mechanism": "routed", "causal": true, "routes": 100, "causal_clusters": {"kind": "segment", "size": 16}"#,
        r#""mechanism": "routed", "causal": true, "clusters": 500, "causal_clusters": {"kind": "segment", "size": 10}"#,
    ] {
        let dense = dense.clone().with_causal(values.contains("causal"));
        let mut p = planned(values, Shape::square(1, 2, 130, 8), 5);
        p.key_mask = Some((0..130).map(|n| n % 4 != 1).collect());
        p.clusters = None;
        p.fix_plan();
        let softmax = Problem { mechanism: dense.clone(), clusters: None, ..p.clone() };
        let (mut got, expected) = (p.fused(), softmax.fused());
        got.retain(|name, _| expected.contains_key(name));
        assert_solution(values, &got, &expected, &p.shape, Tol::f32(&dense).with_noise(4.0));
    }
}

/// What is masked enters no cluster, no mean and no route.
#[test]
fn masked_content_changes_no_bit() {
    for values in all() {
        let mut p = problem(mechanism(values), Shape::square(1, 2, 80, 6), 8);
        p.key_mask = Some((0..80).map(|n| n % 3 != 1).collect());
        let tied = p.mechanism.tied;
        p.query_mask = if tied { p.key_mask.clone() } else { Some((0..80).map(|n| n % 4 != 2).collect()) };
        let mut poisoned = p.clone();
        poisoned.fill_masked(&[f64::NAN, f64::INFINITY, 1e30]);
        let (clean, dirty) = (p.fused(), poisoned.fused());
        let changed: Vec<_> = clean.keys().filter(|name| clean[*name] != dirty[*name]).collect();
        assert!(changed.is_empty(), "{values}: {changed:?}");
    }
}

#[test]
fn threads_change_no_bit() {
    for values in [VALUES[0], VALUES[5], CAUSAL[0]] {
        let p = problem(mechanism(values), Shape::square(1, 2, 1500, 8), 6);
        let [one, four] = [1, 4].map(|threads| threads::on_threads(threads, || p.fused()));
        assert!(one == four, "{values}");
    }
}

#[test]
fn what_cannot_be_routed_is_refused() {
    let of = |values: &str| Mechanism::from_json(&format!("{{{values}}}"));
    for (values, expected) in [
        (r#""mechanism": "routed", "outlier_queries": 2"#, "every query chooses for itself"),
        (r#""mechanism": "routed", "cluster_on": "queries""#, "keys alone are clustered"),
        (r#""mechanism": "routed", "estimator": "importance""#, "edges are sampled"),
        (r#""mechanism": "ssa", "route_by": "query""#, "`routed`"),
        (r#""mechanism": "routed", "routes": 0"#, "routes"),
        (r#""mechanism": "routed", "rotes": 2"#, "routes"),
        (r#""mechanism": "routed", "sampler": "row""#, "no edges are sampled"),
        (r#""mechanism": "routed", "causal_clusters": {"kind": "block", "size": 8}"#, "tokens would see later ones"),
        (r#""mechanism": "routed", "causal": true, "causal_clusters": {"kind": "prefix"}"#, "made of later keys"),
        (r#""mechanism": "routed", "causal": true, "outlier_globals": 2"#, "chosen by later tokens"),
        (r#""mechanism": "routed", "causal_clusters": {"kind": "segment"}"#, "needs a size"),
        (r#""mechanism": "routed", "causal_clusters": {"kind": "segment", "size": 0}"#, "causal_clusters.size"),
        (r#""mechanism": "ssa", "causal_clusters": {"kind": "segment", "size": 8}"#, "`routed`"),
    ] {
        let error = of(values).unwrap_err().to_string();
        assert!(error.contains(expected), "{values}: {error}");
    }
    let shape = Shape { seq_q: 9, ..Shape::square(1, 1, 8, 4) };
    let causal = Operator::new(&of(r#""mechanism": "routed""#).unwrap(), shape, true, Strategy::Auto);
    assert!(matches!(causal, Err(Error::Unsupported { what: "causal with seq_q > seq_kv", .. })), "{causal:?}");
}

/// What no kernels compute in f32 plans its clusters, too.
#[test]
fn compositions_of_the_reference_have_plans() {
    for values in [
        r#""mechanism": "routed", "clusters": 3, "routes": 1, "normalisation": {"kind": "symmetric"}"#,
        r#""mechanism": "ssa", "clusters": 3, "samples": 0, "normalisation": {"kind": "row", "density_exponent": 0.5}"#,
    ] {
        let p = planned(values, Shape::square(1, 2, 20, 4), 7);
        let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Auto).unwrap();
        assert_eq!(op.plan().strategy, Strategy::Reference);
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k, v) = (narrow(&p.q), narrow(p.k.as_ref().unwrap()), narrow(&p.v));
        let inputs = Inputs { q: &q[..], k: Some(&k), v: &v, extras: Extras::default() };
        assert_eq!(&*op.clusters(&inputs, &p.mask()).unwrap(), p.clusters.as_ref().unwrap(), "{values}");
    }
}

/// A field of the score or the structure stands beside the preset's name, and it reads back.
#[test]
fn fields_of_the_parts_are_those_of_the_preset() {
    let flat = mechanism(r#""mechanism": "routed", "clusters": 8, "routes": 3, "scale": 0.5"#);
    let parts = mechanism(
        r#""mechanism": "routed", "structure": {"clusters": 8, "routes": 3}, "score": {"kind": "dot-exp", "scale": 0.5}"#,
    );
    assert_eq!(flat, parts);
    assert_eq!(Mechanism::from_value(serde_json::to_value(&flat).unwrap()).unwrap(), flat);
    let twice = r#"{"mechanism": "routed", "routes": 3, "structure": {"routes": 2}}"#;
    assert!(Mechanism::from_json(twice).unwrap_err().to_string().contains("given twice"));
    assert_eq!(
        mechanism(r#""mechanism": "local", "window": 9, "sinks": 2"#),
        mechanism(r#""mechanism": "local", "structure": {"window": 9, "sinks": 2}"#)
    );
}
