//! The certificate of a plan: its bounds hold, and some are met.

use crate::support;

use proptest::{prelude::*, sample::select, test_runner::RngSeed};
use resolvent_kernels::{Certificate, Error, Inputs, Mechanism, Shape, reference};
use support::{problem::Problem, random::problem};

fn ssa(fields: &str) -> Mechanism {
    let name = if fields.contains("route_by") { "routed" } else { "ssa" };
    Mechanism::from_json(&format!(r#"{{"mechanism": "{name}", {fields}}}"#)).unwrap()
}

/// A row that the masks leave no cluster to join is zero, however far all values are from that.
#[test]
fn rows_without_an_entry_miss_everything() {
    for fields in [r#""estimator": "centroid""#, r#""samples": 2"#] {
        let shape = Shape::square(1, 1, 20, 4);
        let mut p = problem(ssa(&format!(r#""clusters": 3, "causal": true, {fields}"#)), shape, 4);
        p.v.iter_mut().for_each(|v| *v += 100.0);
        // Token 1 has no kept key, and no token before it has both sides.
        p.key_mask = Some((0..20).map(|n| n != 1).collect());
        p.query_mask = Some((0..20).map(|n| n != 0).collect());
        p.fix_plan();
        let bounds = certificate(&p);
        assert_eq!([bounds.missed_mass[1], bounds.total_variation[1]], [1.0, 1.0], "{fields}");
        assert!(bounds.output_error[1] > 150.0, "{fields}: {}", bounds.output_error[1]);
    }
}

/// Where every pair is exact nothing is missed.
#[test]
fn a_single_cluster_misses_nothing() {
    for fields in [r#""estimator": "centroid""#, r#""samples": 2"#] {
        let p = problem(ssa(&format!(r#""clusters": 1, {fields}"#)), Shape::square(1, 1, 20, 4), 4);
        let bounds = certificate(&p);
        for bound in [bounds.missed_mass, bounds.total_variation, bounds.output_error] {
            assert!(bound.iter().all(|&x| x == 0.0), "{fields}: {bound:?}");
        }
    }
}

const PLANNERS: &[&str] = &[
    r#""clusters": 5, "estimator": "centroid""#,
    r#""clusters": 6, "estimator": "centroid", "cluster_on": "keys", "outlier_globals": 3, "outlier_queries": 4"#,
    r#""clusters": 4, "estimator": "centroid", "cluster_on": "dual", "routes": 2"#,
    r#""clusters": 4, "estimator": "centroid", "causal": true"#,
    r#""clusters": 3, "estimator": "centroid", "causal": true, "causal_clusters": {"kind": "block", "size": 7}"#,
    r#""clusters": 4, "samples": 3"#,
    r#""clusters": 4, "samples": 2, "pairs": 5, "global_tokens": 2"#,
    r#""clusters": 4, "samples": 3, "estimator": "raw", "sampler": "degree-weighted""#,
    r#""clusters": 4, "samples": 3, "sampler": "row", "cluster_on": "keys""#,
    r#""clusters": 4, "samples": 3, "causal": true"#,
    r#""clusters": 3, "samples": 0"#,
    r#""route_by": "query", "clusters": 5, "routes": 2"#,
    r#""route_by": "query", "clusters": 6, "routes": 1, "cluster_metric": "cosine", "outlier_globals": 3"#,
    r#""route_by": "query", "clusters": 2, "routes": 1, "causal": true, "causal_clusters": {"kind": "segment", "size": 6}"#,
    r#""route_by": "query", "causal": true, "causal_clusters": {"kind": "segment", "size": 9}, "global_tokens": 2"#,
];

/// Tokens of several kinds: as they come, in tight groups, in far ones, many on one spot with a few far off, and so far
/// apart that the exponentials of their products leave the range of f64.
const DATA: &[&str] = &["random", "planted", "large", "duplicates", "sharp"];

fn spoil(p: &mut Problem, kind: &str) {
    let d = p.shape.head_dim;
    let k = p.k.as_mut().unwrap();
    for (which, x) in [&mut p.q, k].into_iter().enumerate() {
        for (n, x) in x.iter_mut().enumerate() {
            let (token, channel) = (n / d, n % d);
            *x = match kind {
                "planted" => 2.0 * ((token % 5 * 31 + channel * 17) as f64).sin() + 0.05 * *x,
                "large" => 9.0 * *x,
                "sharp" => 40.0 * *x,
                "duplicates" if token % 7 != 3 + which => 0.5,
                "duplicates" => 6.0 * *x,
                _ => *x,
            };
            *x = f64::from(*x as f32);
        }
    }
}

fn certificate(p: &Problem) -> Certificate {
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (q, k, v) = (narrow(&p.q), narrow(p.k.as_ref().unwrap()), narrow(&p.v));
    let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: p.extras() };
    p.plan().certificate(&p.mechanism, &p.shape, &inputs, &p.mask()).unwrap()
}

/// What the certificate bounds, of every row, from whole matrices in f64.
fn measured(p: &Problem) -> Certificate {
    let m = p.mechanism.clustering().unwrap();
    let s = &p.shape;
    let mut p = p.clone();
    p.fix_plan();
    let along = reference::forward(&p.mechanism, s, &p.inputs(), &p.mask()).unwrap();
    let far = p.clusters.as_ref().unwrap().matrices(&p.mechanism, s, &p.mask()).unwrap();
    let block = m.causal.then(|| m.causal_clusters.block());
    let mut all = Certificate::default();
    for row in 0..s.slices() * s.seq_q {
        let (slice, i) = (row / s.seq_q, row % s.seq_q);
        let kept = |mask: &Option<Vec<bool>>, n: usize, seq: usize| {
            mask.as_ref().is_none_or(|keep| keep[slice / s.heads * seq + n])
        };
        let sees = |j: usize| {
            kept(&p.query_mask, i, s.seq_q)
                && kept(&p.key_mask, j, s.seq_kv)
                && block.is_none_or(|block| j / block <= i / block)
        };
        let d = s.head_dim;
        let k = p.k.as_ref().unwrap();
        let logit = |j: usize| {
            let (q, k) = (&p.q[row * d..][..d], &k[(slice * s.seq_kv + j) * d..][..d]);
            q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
        };
        let z: Vec<f64> = (0..s.seq_kv).map(|j| if sees(j) { logit(j) } else { f64::NEG_INFINITY }).collect();
        let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = z.iter().map(|z| (z - most).exp()).sum();
        let dense = |j: usize| if sees(j) { (z[j] - most).exp() / total } else { 0.0 };
        let weights = &along.weights()[row * s.seq_kv..][..s.seq_kv];
        let (lse, lse_dense) = (along.lse.as_ref().unwrap()[row], most + total.ln());
        let dv = s.value_dim;
        let value = |j: usize, c: usize| p.v[(slice * s.seq_kv + j) * dv + c];
        let error = |c: usize| (0..s.seq_kv).map(|j| (weights[j] - dense(j)) * value(j, c)).sum::<f64>();
        let log_weight = &far.log_weight[row * s.seq_kv..][..s.seq_kv];
        let without = |j: &usize| log_weight[*j] == f32::NEG_INFINITY;
        let missed: f64 = match far.far.iter().any(|&x| x > 0.0) {
            _ if !most.is_finite() => 0.0,
            true => 1.0 - (lse - lse_dense).exp(),
            false => (0..s.seq_kv).filter(without).map(dense).sum(),
        };
        all.missed_mass.push(missed);
        all.total_variation
            .push((0..s.seq_kv).map(|j| (weights[j] - dense(j)).max(dense(j) - weights[j])).sum::<f64>() / 2.0);
        all.output_error.push((0..dv).map(|c| error(c).powi(2)).sum::<f64>().sqrt());
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, rng_seed: RngSeed::Fixed(3), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bounds_hold(
        fields in select(PLANNERS), data in select(DATA), seq in 1..60_usize, seed in any::<u64>(), masked in any::<bool>(),
    ) {
        let mut p = problem(ssa(fields), Shape::square(1, 2, seq, 5), seed);
        // Bounds are on softmax at its own scale.
        p.parameters.clear();
        spoil(&mut p, data);
        if masked {
            p.key_mask = Some((0..seq).map(|n| (seed >> (n % 60)) & 3 != 0).collect());
            p.query_mask = Some((0..seq).map(|n| (seed >> (n % 50)) & 7 != 0).collect());
        }
        let (bounds, truth) = (certificate(&p), measured(&p));
        for (name, bounds, truth) in [
            ("missed mass", &bounds.missed_mass, &truth.missed_mass),
            ("total variation", &bounds.total_variation, &truth.total_variation),
            ("output error", &bounds.output_error, &truth.output_error),
        ] {
            prop_assert_eq!(bounds.len(), truth.len());
            for (row, (bound, truth)) in bounds.iter().zip(truth).enumerate() {
                // Both are rounded in f64.
                prop_assert!(*bound >= truth - 1e-11 * (1.0 + truth), "{name} of row {row}: {truth} above {bound}");
            }
        }
        prop_assert!(bounds.missed_mass.iter().chain(&bounds.total_variation).all(|x| (0.0..=1.0).contains(x)));
    }
}

/// Two keys at equal distance from their mean, along the query, are the worst that the bound on missed mass allows for.
#[test]
fn the_bound_on_missed_mass_is_met() {
    let mut p =
        problem(ssa(r#""clusters": 2, "cluster_on": "keys", "estimator": "centroid""#), Shape::square(1, 1, 4, 2), 1);
    p.q = [0.0, 3.0].repeat(4);
    p.k = Some(vec![8.0, 0.0, 8.0, 0.5, -8.0, 1.0, -8.0, -1.0]);
    let (bounds, truth) = (certificate(&p), measured(&p));
    for i in 0..4 {
        assert!(truth.missed_mass[i] > 1e-3);
        assert!((bounds.missed_mass[i] - truth.missed_mass[i]).abs() < 1e-12, "{bounds:?} {truth:?}");
    }
}

/// Nothing is missed where everything is exact, or all keys of a cluster are alike.
#[test]
fn nothing_is_missed_where_nothing_is_approximated() {
    for fields in [
        r#""clusters": 1"#,
        r#""clusters": 30, "balance": 1, "estimator": "centroid""#,
        r#""clusters": 4, "samples": 1000"#,
        r#""clusters": 3, "global_tokens": 30"#,
    ] {
        let p = problem(ssa(fields), Shape::square(1, 2, 30, 4), 4);
        let bounds = certificate(&p);
        let all = bounds.missed_mass.iter().chain(&bounds.total_variation).chain(&bounds.output_error);
        assert!(all.copied().fold(0.0, f64::max) < 1e-12, "{fields}: {bounds:?}");
    }
}

/// More exact clusters miss less: bounds are worth comparing.
#[test]
fn bounds_fall_with_what_is_exact() {
    let worst = |fields: &str| {
        let mut p = problem(ssa(fields), Shape::square(1, 1, 256, 8), 5);
        spoil(&mut p, "planted");
        certificate(&p).total_variation.into_iter().fold(0.0, f64::max)
    };
    let [one, four, all] = [1, 4, 5].map(|routes| {
        worst(&format!(r#""clusters": 5, "estimator": "centroid", "balance": null, "routes": {routes}"#))
    });
    assert!(one < 0.1 && four < one && all == 0.0, "{one} {four} {all}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let p = problem(ssa(r#""clusters": 3"#), Shape::square(1, 1, 9, 4), 6);
    let (plan, x) = (p.plan(), vec![0.0; 36]);
    let inputs = Inputs { q: &x[..], k: Some(&x[..]), v: &x[..32], extras: p.extras() };
    let short = plan.certificate(&p.mechanism, &p.shape, &inputs, &p.mask()).unwrap_err();
    assert!(matches!(short, Error::Length { tensor: "v", .. }), "{short}");
    let softmax = Mechanism::preset("softmax").unwrap();
    let inputs = Inputs { v: &x[..], ..inputs };
    let other = plan.certificate(&softmax, &p.shape, &inputs, &p.mask()).unwrap_err();
    assert!(matches!(other, Error::Unsupported { mechanism: "softmax", .. }), "{other}");
    let larger = plan.certificate(
        &p.mechanism,
        &Shape::square(1, 1, 8, 4),
        &Inputs { q: &x[..32], k: Some(&x[..32]), v: &x[..32], ..inputs },
        &p.mask(),
    );
    assert!(matches!(larger, Err(Error::Shape { .. })), "{larger:?}");
}
