//! Spectral sparse attention: what its plans promise, and its limits.

use crate::{support, threads};

use proptest::{prelude::*, sample::select, test_runner::RngSeed};
use resolvent_kernels::{ClusterPlan, Error, Mask, Mechanism, PlanTensors, Shape, Tol};
use support::{
    problem::{Problem, Solution, assert_solution},
    random::problem,
};
use threads::on_threads;

fn ssa(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", {fields}}}"#)).unwrap()
}

fn few(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(1), failure_persistence: None, ..ProptestConfig::default() }
}

fn only<const N: usize>(s: Solution, names: [&str; N]) -> Solution {
    s.into_iter().filter(|(name, _)| names.contains(name)).collect()
}

/// Any way of making clusters, for tokens that are the same in queries and keys, or not.
const PLANNERS: &[&str] = &[
    r#""clusters": 5, "samples": 3"#,
    r#""clusters": 6, "samples": 2, "cluster_on": "keys", "balance": 1"#,
    r#""clusters": 4, "samples": 3, "sampler": "degree-weighted", "balance": 1.5"#,
    r#""clusters": 7, "samples": 4, "sampler": "row", "kmeans_iterations": 0"#,
    r#""clusters": 5, "estimator": "centroid", "jl_dim": 3"#,
    r#""clusters": 40, "samples": 1, "pairs": 11"#,
    r#""clusters": 4, "samples": 2, "cluster_on": "dual", "routes": 2"#,
    r#""clusters": 5, "samples": 3, "causal": true"#,
    r#""clusters": 3, "estimator": "centroid", "causal": true, "causal_clusters": {"kind": "block", "size": 7}"#,
];

/// k-means ends where it has converged, however many rounds are allowed, with empty clusters and doubles too.
#[test]
fn kmeans_stops_when_no_label_changes() {
    for (seq, dim) in [(300, 4), (40, 1), (7, 2)] {
        let plan = |iterations: u64| {
            let fields = format!(r#""clusters": 20, "samples": 2, "kmeans_iterations": {iterations}"#);
            let mut p = problem(ssa(&fields), Shape::square(1, 2, seq, dim), 3);
            p.q.iter_mut().for_each(|x| *x = (*x * 4.0).round());
            p.plan().to_tensors()
        };
        assert!(seq < 300 || plan(0) != plan(300), "nothing moves");
        assert!(plan(300) == plan(1_000_000), "{seq} tokens");
    }
}

proptest! {
    #![proptest_config(few(200))]

    /// Every kept token has one cluster of limited size; blocks and edges are about kept tokens that may meet.
    #[test]
    fn plans_are_what_they_say(fields in select(PLANNERS), seq in 1..60_usize, seed in any::<u64>(), masked in any::<bool>()) {
        let mechanism = ssa(fields);
        let m = mechanism.as_ssa().unwrap();
        let mut p = problem(mechanism.clone(), Shape::square(1, 2, seq, 4), seed);
        if masked {
            let keep: Vec<bool> = (0..seq).map(|n| (seed >> (n % 60)) & 3 != 0).collect();
            (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        }
        let plan = p.plan();
        let kept = |n: usize| p.key_mask.as_ref().is_none_or(|keep| keep[n]);
        let count = (0..seq).filter(|&n| kept(n)).count();
        let asked = m.clusters.unwrap();
        let t = plan.to_tensors();
        for (slice, labels) in t.label_k.chunks(seq).enumerate() {
            let of_queries = &t.label_q[slice * seq..][..seq];
            prop_assert!((0..seq).all(|n| (labels[n] >= 0) == kept(n) && (of_queries[n] >= 0) == kept(n)));
            prop_assert!(!m.shared() || labels == of_queries);
            let clusters = plan.clusters(slice)[1];
            let sizes: Vec<usize> = (0..clusters as i64).map(|c| labels.iter().filter(|&&label| label == c).count()).collect();
            let beta = m.balance.unwrap();
            let cap = (beta * count as f64 / asked.min(count.max(1)) as f64).ceil() as usize;
            prop_assert!(sizes.iter().all(|&size| (1..=cap).contains(&size)), "{sizes:?}, cap {cap}");
            prop_assert!(clusters as f64 <= asked.min(count) as f64 * (1.0 + 1.0 / beta) + 1.0);
        }
        let block = m.causal_clusters.block();
        let label = |labels: &[i64], slice: i64, n: i64| labels[slice as usize * seq + n as usize];
        for (&[slice, i, j], weight) in t.edges.iter().zip(&t.edge_log_weight) {
            prop_assert!(kept(i as usize) && kept(j as usize) && weight.is_finite());
            prop_assert!(!t.exact_blocks.contains(&[slice, label(&t.label_q, slice, i), label(&t.label_k, slice, j)]));
            prop_assert!(!m.causal || j as usize / block <= i as usize / block);
        }
        prop_assert_eq!(&ClusterPlan::from_tensors(&t, &p.shape).unwrap(), &plan);
    }

    /// What masked tokens hold, NaN included, changes no plan.
    #[test]
    fn masked_content_changes_no_plan(fields in select(PLANNERS), seq in 2..40_usize, seed in any::<u64>()) {
        let mut p = problem(ssa(fields), Shape::square(1, 2, seq, 4), seed);
        let keep: Vec<bool> = (0..seq).map(|n| (seed >> (n % 60)) & 3 != 0).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep));
        let plan = p.plan();
        p.fill_masked(&[f64::NAN, 1e30, f64::NEG_INFINITY, -1e30]);
        prop_assert_eq!(plan, p.plan());
    }

    /// A later token changes nothing before it: not one bit.
    #[test]
    fn the_future_changes_no_bit(
        fields in select(vec![
            r#""samples": 3"#,
            r#""estimator": "raw", "cluster_on": "keys", "global_tokens": 2"#,
            r#""estimator": "centroid""#,
            r#""estimator": "centroid", "clusters": 3, "balance": 1"#,
            r#""estimator": "centroid", "causal_clusters": {"kind": "block", "size": 5}"#,
            r#""samples": 2, "causal_clusters": {"kind": "block", "size": 3}"#,
        ]),
        with_codebook in any::<bool>(), seq in 2..90_usize, at in any::<prop::sample::Index>(), seed in any::<u64>(),
    ) {
        let mechanism = ssa(&format!(r#""causal": true, {fields}"#));
        let m = mechanism.as_ssa().unwrap();
        let shape = Shape::square(1, 2, seq, 6);
        let mut p = problem(mechanism.clone(), shape, seed);
        if with_codebook {
            let clusters = m.clusters.unwrap_or(4);
            p.codebook = Some((0..2 * clusters * 6).map(|n| (n as f32 * 0.7).sin()).collect());
        }
        let first = at.index(seq) / m.causal_clusters.block() * m.causal_clusters.block();
        let mut other = p.clone();
        for x in [&mut other.q, other.k.as_mut().unwrap(), &mut other.v] {
            for (n, x) in x.iter_mut().enumerate() {
                if n / 6 % seq >= first {
                    *x = 3.0 - 2.0 * *x;
                }
            }
        }
        let rows = |p: &Problem| -> Vec<u64> {
            let out = p.fused().remove("out").unwrap();
            out.iter().enumerate().filter(|(n, _)| n / 6 % seq < first).map(|(_, x)| x.to_bits()).collect()
        };
        prop_assert_eq!(rows(&p), rows(&other));
    }

    /// Only differences between the scores of a row matter.
    #[test]
    fn a_shift_of_all_keys_changes_nothing(fields in select(PLANNERS), seq in 2..40_usize, seed in any::<u64>()) {
        let mut p = problem(ssa(fields), Shape::square(1, 1, seq, 4), seed);
        p.fix_plan();
        let mut shifted = p.clone();
        shifted.k.as_mut().unwrap().iter_mut().enumerate().for_each(|(n, k)| *k += [0.5, -0.25, 1.0, 0.75][n % 4]);
        let names = ["out", "dv"];
        let what = format!("{:?}", p.mechanism);
        let tol = Tol::f32(&p.mechanism).with_noise(2.0);
        assert_solution(&what, &only(shifted.fused(), names), &only(p.fused(), names), &p.shape, tol);
    }
}

/// With everything in reach, it is softmax attention.
#[test]
fn dense_limits() {
    let softmax = Mechanism::preset("softmax").unwrap();
    for (fields, seq_kv) in [
        (r#""clusters": 1"#, 37),
        (r#""clusters": 1, "balance": null, "estimator": "centroid""#, 37),
        (r#""clusters": 37, "estimator": "centroid", "balance": 1"#, 37),
        (r#""clusters": 37, "estimator": "centroid", "cluster_on": "dual", "balance": 1"#, 37),
        (r#""clusters": 5, "cluster_on": "dual", "routes": 100"#, 29),
        (r#""clusters": 5, "routes": 100, "estimator": "centroid""#, 37),
        (r#""clusters": 5, "samples": 10000"#, 37),
        (r#""clusters": 5, "samples": 10000, "sampler": "row""#, 37),
        (r#""clusters": 5, "samples": 10000, "cluster_on": "dual""#, 29),
        (r#""clusters": 3, "global_tokens": 37"#, 37),
    ] {
        let shape = Shape { batch: 1, heads: 2, seq_q: 37, seq_kv, head_dim: 6, value_dim: 5 };
        let p = problem(ssa(fields), shape, 3);
        let dense = Problem { mechanism: softmax.clone(), ..p.clone() };
        assert_solution(fields, &p.fused(), &dense.fused(), &shape, Tol::f32(&softmax));
        assert_solution(fields, &p.reference(), &dense.reference(), &shape, Tol::F64);
    }
    let shape = Shape::square(1, 2, 45, 6);
    for fields in [r#""samples": 10000"#, r#""clusters": 45, "estimator": "centroid""#] {
        let p = problem(
            ssa(&format!(r#""causal": true, "clusters": 5, {fields}"#)
                .replace(r#""clusters": 5, "clusters""#, r#""clusters""#)),
            shape,
            4,
        );
        let causal = Mechanism::from_json(r#"{"mechanism": "softmax", "causal": true}"#).unwrap();
        let dense = Problem { mechanism: causal, ..p.clone() };
        assert_solution(fields, &p.fused(), &dense.fused(), &shape, Tol::f32(&softmax));
    }
}

/// Every remote edge has weight one on average. Over 600 plans the mean weight of the remote edges of each of eight parts is
/// within four and a half of its standard errors of one: for a right sampler one of the 32 fails with a probability of
/// 2e-4, were the seeds not fixed.
#[test]
fn importance_weights_are_unbiased() {
    const PARTS: usize = 8;
    for fields in [
        r#""samples": 4, "clusters": 4"#,
        r#""samples": 4, "clusters": 4, "pairs": 5"#,
        r#""samples": 5, "clusters": 4, "sampler": "degree-weighted", "pairs": 7"#,
        r#""samples": 4, "clusters": 4, "sampler": "row""#,
    ] {
        let seq = 30;
        let plans = 600;
        // Whichever edges of a pair of clusters are chosen, their weights have the same sum: parts cut across the pairs.
        let part = |i: usize, j: usize| (7 * i + 3 * j) % PARTS;
        let means: Vec<[f64; PARTS]> = (0..plans)
            .map(|seed| {
                let mut p = problem(ssa(&format!(r#""seed": {seed}, {fields}"#)), Shape::square(1, 1, seq, 3), 7);
                for (n, q) in p.q.chunks_mut(3).enumerate() {
                    q.iter_mut().for_each(|x| *x *= 0.05);
                    q[n % 3] += if n % 4 == 3 { -4.0 } else { 4.0 * (1 + n % 4 % 2) as f64 };
                }
                let t = p.plan().to_tensors();
                let exact = |i: usize, j: usize| t.label_q[i] == t.label_k[j];
                let (mut remote, mut weight) = ([0.0; PARTS], [0.0; PARTS]);
                let pairs = (0..seq * seq).map(|n| (n / seq, n % seq)).filter(|&(i, j)| !exact(i, j));
                pairs.for_each(|(i, j)| remote[part(i, j)] += 1.0);
                for (&[_, i, j], w) in t.edges.iter().zip(&t.edge_log_weight) {
                    weight[part(i as usize, j as usize)] += w.exp();
                }
                std::array::from_fn(|n| weight[n] / remote[n])
            })
            .collect();
        for n in 0..PARTS {
            let mean = means.iter().map(|x| x[n]).sum::<f64>() / plans as f64;
            let variance = means.iter().map(|x| (x[n] - mean).powi(2)).sum::<f64>() / (plans - 1) as f64;
            let error = (variance / plans as f64).sqrt();
            assert!((mean - 1.0).abs() <= 4.5 * error + 1e-12, "{fields}, part {n}: {mean} +- {error}");
        }
    }
}

/// The number of threads changes no plan.
#[test]
fn threads_change_no_plan() {
    for fields in PLANNERS {
        let p = problem(ssa(fields), Shape::square(1, 2, 9000, 8), 5);
        assert_eq!(on_threads(1, || p.plan()), on_threads(3, || p.plan()), "{fields}");
    }
}

/// A plan that was stored gives the bits of the plan that was made.
#[test]
fn stored_plans_give_the_same_bits() {
    for fields in PLANNERS {
        let mut p = problem(ssa(fields), Shape::square(2, 1, 33, 8), 5);
        let made = p.fused();
        let stored = p.plan().to_tensors();
        p.clusters = Some(ClusterPlan::from_tensors(&stored, &p.shape).unwrap());
        assert_eq!(made, p.fused(), "{fields}");
    }
}

#[test]
fn degenerate_tokens() {
    for fields in PLANNERS {
        for seq in [1, 2, 30] {
            for content in [Some(0.0), Some(1.5), None] {
                let mut p = problem(ssa(fields), Shape::square(1, 1, seq, 4), 6);
                // All tokens alike; or two kinds, more clusters than kinds being asked for.
                let token = |n: usize| content.unwrap_or((n / 4 % 2) as f64);
                p.q.iter_mut().enumerate().for_each(|(n, x)| *x = token(n));
                p.k.as_mut().unwrap().iter_mut().enumerate().for_each(|(n, x)| *x = token(n));
                let what = format!("{fields}, {seq} tokens of {content:?}");
                let tol = Tol::f32(&p.mechanism).with_noise(1.0);
                assert_solution(&what, &p.fused(), &p.reference(), &p.shape, tol);
                p.key_mask = Some(vec![false; seq]);
                let nothing = p.fused();
                assert!(nothing["out"].iter().chain(&nothing["dq"]).all(|&x| x == 0.0), "{what}");
                assert!(nothing["lse"].iter().all(|&x| x == f64::NEG_INFINITY), "{what}");
            }
        }
    }
}

/// Kept queries of masked keys attend as rows of the nearest cluster; masked queries do not.
#[test]
fn keys_and_queries_are_masked_apart() {
    for fields in [r#""clusters": 4, "estimator": "centroid""#, r#""clusters": 4, "cluster_on": "keys""#] {
        let mut p = problem(ssa(fields), Shape::square(1, 2, 20, 4), 8);
        p.key_mask = Some((0..20).map(|n| n % 3 != 0).collect());
        p.query_mask = Some((0..20).map(|n| n != 6 && n != 7).collect());
        let fused = p.fused();
        assert_solution(fields, &fused, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
        let row = |n: usize| fused["lse"][n].is_finite();
        assert!(row(0) && row(3) && !row(6) && !row(7));
        // Nothing that a masked key holds reaches a row, its own query's neither.
        let mut dirty = p.clone();
        for (n, k) in dirty.k.as_mut().unwrap().chunks_mut(4).enumerate().filter(|(n, _)| n % 20 % 3 == 0) {
            k.fill(if n % 2 == 0 { f64::NAN } else { 1e30 });
        }
        assert_eq!(dirty.fused(), fused, "{fields}");
    }
}

#[test]
fn tensors_of_plans_are_checked() {
    let shape = Shape::square(1, 1, 3, 2);
    let good = PlanTensors {
        label_q: vec![0, 1, 1],
        label_k: vec![0, 1, 1],
        exact_blocks: vec![[0, 0, 0], [0, 1, 1]],
        edges: vec![[0, 0, 2]],
        edge_log_weight: vec![0.5],
    };
    assert!(ClusterPlan::from_tensors(&good, &shape).is_ok());
    let refused = |spoil: fn(&mut PlanTensors)| {
        let mut tensors = good.clone();
        spoil(&mut tensors);
        match ClusterPlan::from_tensors(&tensors, &shape).unwrap_err() {
            Error::Length { tensor, .. } | Error::Index { tensor, .. } => tensor,
            Error::Tensor { tensor, .. } | Error::NonFinite { tensor, .. } => tensor,
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(|t| t.label_q.truncate(2)), "label_q");
    assert_eq!(refused(|t| t.label_k[1] = -2), "label_k");
    assert_eq!(refused(|t| t.label_k[1] = 3), "label_k");
    assert_eq!(refused(|t| t.exact_blocks[0][2] = 2), "exact_blocks");
    assert_eq!(refused(|t| t.exact_blocks[0][0] = 1), "exact_blocks");
    assert_eq!(refused(|t| t.edges[0][1] = 3), "edges");
    assert_eq!(refused(|t| t.edges[0] = [0, 1, 2]), "edges");
    assert_eq!(refused(|t| (t.edges.push([0, 0, 2]), t.edge_log_weight.push(0.0)).0), "edges");
    assert_eq!(refused(|t| t.edge_log_weight.push(0.0)), "edge_log_weight");
    assert_eq!(refused(|t| t.edge_log_weight[0] = f64::INFINITY), "edge_log_weight");
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let error = |fields: &str| Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", {fields}}}"#)).unwrap_err();
    for fields in [
        r#""estimator": "centroid", "samples": 3"#,
        r#""causal": true, "cluster_on": "dual""#,
        r#""causal": true, "routes": 2"#,
        r#""causal": true, "sampler": "uniform""#,
        r#""sampler": "row", "pairs": 3"#,
    ] {
        assert!(matches!(error(fields), Error::Unsupported { mechanism: "ssa", .. }), "{fields}: {}", error(fields));
    }
    for (fields, name) in [
        (r#""clusters": 0"#, "clusters"),
        (r#""pairs": 0"#, "pairs"),
        (r#""routes": 0"#, "routes"),
        (r#""jl_dim": 0"#, "jl_dim"),
        (r#""jl_dim": 4611686018427387904"#, "jl_dim"),
        (r#""balance": 0.5"#, "balance"),
        (r#""scale": 0"#, "scale"),
        (r#""causal_clusters": {"kind": "block", "size": 0}"#, "causal_clusters.size"),
    ] {
        assert!(
            matches!(error(fields), Error::OutOfRange { field, .. } if field == name),
            "{fields}: {}",
            error(fields)
        );
    }
    for fields in
        [r#""pairs": "some""#, r#""causal_clusters": {"kind": "prefix", "size": 3}"#, r#""clusters": -1"#, r#""k": 3"#]
    {
        assert!(matches!(error(fields), Error::Config { .. }), "{fields}: {}", error(fields));
    }
    let shape = Shape::square(1, 1, 4, 2);
    let beyond = ssa(r#""global_tokens": [4]"#).check(&shape, false).unwrap_err();
    assert!(matches!(beyond, Error::OutOfRange { field: "global_tokens", .. }), "{beyond}");
    let mut p = problem(ssa(r#""jl_dim": 2"#), shape, 1);
    p.codebook = Some(vec![0.5; 4]);
    let x = [0.0; 8];
    let refused = |p: &Problem, shape: &Shape| {
        ClusterPlan::new(&p.mechanism, shape, &x, &x, p.codebook.as_deref(), &Mask::NONE).unwrap_err()
    };
    assert!(matches!(refused(&p, &shape), Error::Unsupported { what: "codebook with jl_dim", .. }));
    p.mechanism = ssa(r#""clusters": 3"#);
    assert!(matches!(refused(&p, &shape), Error::Length { tensor: "codebook", .. }));
    p.mechanism = Mechanism::preset("softmax").unwrap();
    assert!(matches!(refused(&p, &shape), Error::Unsupported { mechanism: "softmax", .. }));
}

/// Mean tokens lie close to dense attention where tokens form clusters.
#[test]
fn mean_tokens_are_close_on_planted_clusters() {
    let (seq, groups, d) = (512, 16, 16);
    let mut p = problem(ssa(r#""clusters": 16, "estimator": "centroid""#), Shape::square(1, 1, seq, d), 9);
    let centre = |n: usize, c: usize| 2.0 * ((n % groups * 31 + c * 17) as f64 * 0.61).sin();
    for (x, spread) in [(&mut p.q, 0.05), (p.k.as_mut().unwrap(), 0.05)] {
        x.iter_mut().enumerate().for_each(|(at, x)| *x = centre(at / d, at % d) + spread * *x);
    }
    let dense = Problem { mechanism: Mechanism::preset("softmax").unwrap(), ..p.clone() };
    let (got, want) = (p.fused(), dense.fused());
    let cosine = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let mean = got["out"].chunks(d).zip(want["out"].chunks(d)).map(|(a, b)| cosine(a, b)).sum::<f64>() / seq as f64;
    assert!(mean > 0.99, "{mean}");
}
