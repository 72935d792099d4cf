//! Keys that leave their cluster, and queries that choose for themselves what they see: `outlier_globals` and
//! `outlier_queries` of spectral sparse attention.

use crate::{support, threads};

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::select, test_runner::RngSeed};
use resolvent_kernels::{ClusterPlan, Error, Mechanism, PlanTensors, Shape, Tol};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};
use threads::on_threads;

fn ssa(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", {fields}}}"#)).unwrap()
}

const PLANNERS: &[&str] = &[
    r#""clusters": 5, "estimator": "centroid", "outlier_globals": 4"#,
    r#""clusters": 5, "estimator": "centroid", "outlier_queries": 6"#,
    r#""clusters": 6, "estimator": "centroid", "cluster_on": "keys", "routes": 2, "outlier_globals": 3, "outlier_queries": 9"#,
    r#""clusters": 4, "samples": 3, "outlier_globals": 2, "outlier_queries": 3, "global_tokens": 1"#,
    r#""clusters": 4, "samples": 3, "sampler": "row", "outlier_globals": 90, "outlier_queries": 90"#,
    r#""clusters": 5, "samples": 2, "pairs": 4, "cluster_on": "dual", "outlier_globals": 2, "outlier_queries": 4"#,
    r#""clusters": 30, "estimator": "raw", "sampler": "degree-weighted", "samples": 2, "outlier_globals": 5, "outlier_queries": 2"#,
];

/// The same fields without outliers.
fn without(mechanism: &Mechanism) -> Mechanism {
    let m = mechanism.as_ssa().unwrap();
    Mechanism::from(m.with_outlier_globals(0).with_outlier_queries(0))
}

/// How far each token of one slice is from the mean of its cluster; 0 for those in none.
fn distances(x: &[f64], labels: &[i64], dim: usize, keep: impl Fn(usize) -> bool) -> Vec<f64> {
    let distance = |n: usize| {
        let of_channel = |c: usize| {
            let tokens = (0..labels.len()).filter(|&m| labels[m] == labels[n] && keep(m));
            let (sum, count) = tokens.fold((0.0, 0.0), |(sum, count), m| (sum + x[m * dim + c], count + 1.0));
            (x[n * dim + c] - sum / count).powi(2)
        };
        (0..dim).map(of_channel).sum::<f64>()
    };
    (0..labels.len()).map(|n| if labels[n] >= 0 && keep(n) { distance(n) } else { 0.0 }).collect()
}

/// Below this, distances are rounding.
const NOISE: f64 = 1e-9;

/// The distance of the last of `count` outliers; what is farther is one, and what is nearer is none.
fn threshold(distances: &[f64], count: usize) -> f64 {
    let mut sorted = distances.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    count.checked_sub(1).map_or(f64::INFINITY, |last| sorted.get(last).copied().unwrap_or(0.0))
}

/// The clusters that query `i` of a slice sees exactly.
fn seen(t: &PlanTensors, slice: usize, label: i64) -> BTreeSet<i64> {
    let of_query = t.exact_blocks.iter().filter(|block| block[0] == slice as i64 && block[1] == label);
    of_query.map(|block| block[2]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, rng_seed: RngSeed::Fixed(2), failure_persistence: None, ..ProptestConfig::default() })]

    /// Outliers are the tokens farthest from their cluster; nothing else differs from the plan without.
    #[test]
    fn outliers_are_the_farthest(fields in select(PLANNERS), seq in 1..50_usize, seed in any::<u64>(), masked in any::<bool>()) {
        let mechanism = ssa(fields);
        let m = mechanism.as_ssa().unwrap();
        let mut p = problem(mechanism.clone(), Shape::square(1, 2, seq, 4), seed);
        if masked {
            let keep: Vec<bool> = (0..seq).map(|n| (seed >> (n % 60)) & 3 != 0).collect();
            (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        }
        let kept = |n: usize| p.key_mask.as_ref().is_none_or(|keep| keep[n]);
        let (plan, t) = (p.plan(), p.plan().to_tensors());
        let plain = Problem { mechanism: without(&mechanism), ..p.clone() }.plan().to_tensors();
        prop_assert_eq!(&ClusterPlan::from_tensors(&t, &p.shape).unwrap(), &plan);
        for slice in 0..2 {
            let part = |x: &[i64]| x[slice * seq..][..seq].to_vec();
            let rows = |x: &[f64]| x[slice * seq * 4..][..seq * 4].to_vec();
            let (old_k, new_k) = (part(&plain.label_k), part(&t.label_k));
            let freed: BTreeSet<usize> = (0..seq).filter(|&n| old_k[n] != new_k[n]).collect();
            prop_assert!(freed.iter().all(|&n| new_k[n] == -1));
            let far = distances(&rows(p.k.as_ref().unwrap()), &old_k, 4, kept);
            let least = threshold(&far, m.outlier_globals);
            prop_assert!((0..seq).all(|n| !freed.contains(&n) || far[n] > least - NOISE));
            prop_assert!((0..seq).all(|n| freed.contains(&n) || far[n] < least + NOISE));
            let off_mean = far.iter().filter(|&&distance| distance > NOISE).count();
            prop_assert_eq!(freed.len(), m.outlier_globals.min(off_mean));

            let (old_q, new_q) = (part(&plain.label_q), part(&t.label_q));
            prop_assert!((0..seq).all(|n| (old_q[n] < 0) == (new_q[n] < 0)));
            let mut far = distances(&rows(&p.q), &old_q, 4, kept);
            for i in 0..seq {
                match (0..seq).filter(|&n| kept(n) && old_q[n] == old_q[i] && old_q[i] >= 0).count() {
                    0 => {}
                    1 if kept(i) => far[i] = f64::INFINITY,
                    n => far[i] *= (n as f64 / (n.max(2) - 1) as f64).powi(2),
                }
            }
            let least = threshold(&far, m.outlier_queries).max(NOISE);
            let present: BTreeSet<i64> = new_k.iter().copied().filter(|&c| c >= 0).collect();
            for i in (0..seq).filter(|&i| new_q[i] >= 0) {
                let seen = seen(&t, slice, new_q[i]);
                prop_assert!(seen.is_subset(&present), "{:?} of {:?}", seen, present);
                if m.shared() && present.contains(&old_q[i]) {
                    prop_assert!(seen.contains(&old_q[i]));
                }
                let limit = m.routes * if far[i] < least * (1.0 - 1e-6) { 1 } else { 2 };
                prop_assert!(seen.len() <= limit, "query {i} sees {seen:?}");
                if far[i] > least * (1.0 + 1e-6) {
                    let best = best_cluster(&p, &new_k, slice, i);
                    prop_assert!(best.is_none_or(|best| seen.contains(&best)), "query {i} sees {seen:?}, not {best:?}");
                }
            }
        }
    }

    /// What masked tokens hold, NaN included, makes no outlier.
    #[test]
    fn masked_content_makes_no_outlier(fields in select(PLANNERS), seq in 2..40_usize, seed in any::<u64>()) {
        let mut p = problem(ssa(fields), Shape::square(1, 2, seq, 4), seed);
        let keep: Vec<bool> = (0..seq).map(|n| (seed >> (n % 60)) & 3 != 0).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        let plan = p.plan();
        p.fill_masked(&[f64::NAN, 1e30, f64::NEG_INFINITY, -1e30]);
        prop_assert_eq!(plan, p.plan());
    }
}

/// The cluster of keys whose mean has the largest product with a query.
fn best_cluster(p: &Problem, labels: &[i64], slice: usize, i: usize) -> Option<i64> {
    let (seq, d) = (labels.len(), 4);
    let row = |x: &[f64], n: usize| x[(slice * seq + n) * d..][..d].to_vec();
    let product = |c: i64| {
        let tokens: Vec<usize> = (0..seq).filter(|&j| labels[j] == c).collect();
        let k = p.k.as_ref().unwrap();
        let terms = tokens.iter().map(|&j| row(&p.q, i).iter().zip(row(k, j)).map(|(q, k)| q * k).sum::<f64>());
        terms.sum::<f64>() / tokens.len() as f64
    };
    let clusters: BTreeSet<i64> = labels.iter().copied().filter(|&c| c >= 0).collect();
    clusters.into_iter().map(|c| (product(c), c)).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, c)| c)
}

/// Forward and backward pass along such plans are what the reference says, also where all tokens are alike.
#[test]
fn fused_is_the_reference() {
    for fields in PLANNERS {
        for (seq, alike) in [(1, false), (2, false), (37, false), (70, false), (30, true)] {
            let mut p = problem(ssa(fields), Shape { batch: 2, ..Shape::square(2, 2, seq, 6) }, 3);
            if alike {
                p.q.iter_mut().chain(p.k.as_mut().unwrap()).for_each(|x| *x = 0.5);
            }
            let what = format!("{fields}, {seq} tokens");
            let tol = Tol::f32(&p.mechanism).with_noise(1.0);
            assert_solution(&what, &p.fused(), &p.reference(), &p.shape, tol);
            let made = p.fused();
            p.clusters = Some(ClusterPlan::from_tensors(&p.plan().to_tensors(), &p.shape).unwrap());
            assert_eq!(made, p.fused(), "{what}");
        }
    }
}

#[test]
fn threads_change_no_outlier() {
    for fields in PLANNERS {
        let p = problem(ssa(fields), Shape::square(1, 2, 9000, 8), 5);
        assert_eq!(on_threads(1, || p.plan()), on_threads(3, || p.plan()), "{fields}");
    }
}

/// One key outside its cluster's direction holds nearly all of a query's attention: as a global token it is found, as a
/// part of a mean it is not; and so is one of a query that differs from its cluster.
#[test]
fn outliers_are_found() {
    let (seq, d) = (64, 4);
    let mut base = problem(ssa(r#""clusters": 4, "estimator": "centroid""#), Shape::square(1, 1, seq, d), 7);
    let (asker, needle) = (63, 10);
    let k = base.k.as_mut().unwrap();
    // Channel 3 is the needle's alone.
    k.chunks_mut(d).for_each(|k| k[3] = 0.0);
    k[needle * d + 3] = 20.0;
    base.q[asker * d + 3] = 8.0;
    base.q[needle * d + 3] = 0.0;
    let close = |p: &Problem| {
        let dense = Problem { mechanism: Mechanism::preset("softmax").unwrap(), ..p.clone() };
        let (got, want) = (p.fused()["out"].clone(), dense.fused()["out"].clone());
        (0..d).all(|c| (got[asker * d + c] - want[asker * d + c]).abs() < 1e-3)
    };
    let with = |fields: &str| Problem {
        mechanism: ssa(&format!(r#""clusters": 4, "estimator": "centroid", {fields}"#)),
        ..base.clone()
    };
    assert!(!close(&with(r#""seed": 0"#)), "the needle was found without outliers: the test shows nothing");
    assert!(close(&with(r#""outlier_globals": 1"#)));
    assert!(close(&with(r#""outlier_queries": 1"#)));
    // A query so far from all others that it is alone in its cluster.
    base.q[asker * d + 3] = 80.0;
    base.k.as_mut().unwrap()[needle * d + 3] = 2.0;
    let with = |fields: &str| Problem {
        mechanism: ssa(&format!(r#""clusters": 4, "estimator": "centroid", {fields}"#)),
        ..base.clone()
    };
    assert!(!close(&with(r#""outlier_globals": 1"#)), "the needle does not hide: the test shows nothing");
    assert!(close(&with(r#""outlier_queries": 1"#)));
}

#[test]
fn later_tokens_choose_no_outliers() {
    for fields in [r#""causal": true, "outlier_globals": 1"#, r#""causal": true, "outlier_queries": 1"#] {
        let error = Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", {fields}}}"#)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { mechanism: "ssa", .. }), "{fields}: {error}");
    }
    let late = ssa(r#""outlier_globals": 1"#).check(&Shape::square(1, 1, 4, 2), true).unwrap_err();
    assert!(matches!(late, Error::Unsupported { mechanism: "ssa", .. }), "{late}");
}
