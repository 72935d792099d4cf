//! Scores so far apart that a row has all its weight at one key: no gradient goes back through it, and what rounding leaves of its
//! terms, times the scale of the scores, must not take its place.

use crate::support;

use resolvent_kernels::{Error, Mechanism, Shape, Strategy, simd::Level};
use support::{problem::Problem, random::problem};

/// At each of them f32 had a gradient of up to 1e9 where f64 has none.
const SATURATED: &[&str] = &[
    r#"{"mechanism": "softmax", "scale": 1e5}"#,
    r#"{"mechanism": "softmax", "scale": 1e7, "causal": true}"#,
    r#"{"mechanism": "softmax", "scale": 1e8}"#,
    r#"{"mechanism": "fna", "alpha": 2, "kappa": 3e-4}"#,
    r#"{"mechanism": "fna", "alpha": 2, "kappa": 3e-4, "tied": true}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "samples": 3, "scale": 1e6}"#,
    r#"{"mechanism": "ssa", "clusters": 4, "estimator": "centroid", "scale": 1e6}"#,
    r#"{"mechanism": "routed", "clusters": 4, "routes": 2, "scale": 1e6}"#,
    r#"{"mechanism": "composed", "score": {"kind": "gaussian", "scale": 1e8}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "gaussian", "scale": 1e8}, "series": {"kind": "one-hop", "gamma": 0.7}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "series": {"kind": "one-hop", "gamma": 0.7}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "laplacian", "lambda": 3e-4}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "laplacian", "lambda": 3e-4}, "causal": true}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "structure": {"kind": "dense", "window": 9}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "cosine-exp", "scale": 1e4}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-exp", "scale": 1e8}, "series": {"kind": "hops", "count": 3}}"#,
];

/// Channels of queries and of values: few, and more than a panel of a product is deep.
const CHANNELS: [[usize; 2]; 2] = [[12, 20], [144, 257]];

fn saturated(json: &str, [head_dim, value_dim]: [usize; 2], seed: u64) -> Problem {
    let mechanism = Mechanism::from_json(json).unwrap_or_else(|e| panic!("{json}: {e}"));
    let mut p = problem(mechanism, Shape { value_dim, ..Shape::square(2, 2, 70, head_dim) }, seed);
    if head_dim > CHANNELS[0][0] {
        // Products of so many channels would leave what f32 is right for.
        p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| *x *= 0.25);
    }
    p.key_mask = Some((0..140).map(|i| i * i % 7 < 5).collect());
    p.fix_plan();
    p
}

#[test]
fn rows_with_all_weight_at_one_key_have_no_gradient() {
    let (mut wrong, mut wide) = (Vec::new(), 0);
    let cases = SATURATED.iter().enumerate().flat_map(|(seed, json)| CHANNELS.map(|channels| (seed, json, channels)));
    for (seed, json, channels) in cases {
        let p = saturated(json, channels, seed as u64);
        let expected = p.reference();
        for level in Level::available() {
            let got = match p.solve::<f32>(Strategy::Fused, Some(level)) {
                Ok(got) => got,
                // Distances of more channels are larger, and some then leave what f32 is right for.
                Err(Error::Range { .. } | Error::Overflow { .. }) if channels == CHANNELS[1] => continue,
                Err(error) => panic!("{json}: {error}"),
            };
            wide += usize::from(channels == CHANNELS[1]);
            for name in ["dq", "dk"].into_iter().filter(|name| expected.contains_key(name)) {
                let rows = got[name].chunks(p.shape.head_dim).zip(expected[name].chunks(p.shape.head_dim));
                let none: Vec<_> = rows.filter(|(_, expected)| expected.iter().all(|&x| x == 0.0)).collect();
                let worst = none.iter().flat_map(|(got, _)| *got).fold(0.0, |most: f64, x| most.max(x.abs()));
                let few = if channels == CHANNELS[0] { 20 } else { 1 };
                if none.len() < few || worst != 0.0 {
                    wrong.push(format!(
                        "{json} {channels:?} on {}: {name}, {} rows, {worst:.1e}",
                        level.name(),
                        none.len()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(wide >= 8 * Level::available().len(), "only {wide} calls of many channels are in range");
}
