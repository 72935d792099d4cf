//! Shortest paths beside the algorithm of Floyd and Warshall.

use proptest::prelude::*;
use resolvent_graph::{Dense, Error, LinearOperator, UNREACHABLE, shortest_paths, shortest_paths_from};

/// Lengths and hops between all pairs, by trying every token in between.
fn floyd_warshall(weights: &Dense) -> (Vec<f64>, Vec<f64>) {
    let n = weights.len();
    let mut length: Vec<f64> = weights.entries().iter().map(|w| 1.0 / w).collect();
    let mut hops: Vec<f64> = length.iter().map(|x| if x.is_finite() { 1.0 } else { f64::INFINITY }).collect();
    for i in 0..n {
        (length[i * (n + 1)], hops[i * (n + 1)]) = (0.0, 0.0);
    }
    for via in 0..n {
        for i in 0..n {
            for j in 0..n {
                let (through, count) =
                    (length[i * n + via] + length[via * n + j], hops[i * n + via] + hops[via * n + j]);
                let at = i * n + j;
                if through < length[at] || (through == length[at] && count < hops[at]) {
                    (length[at], hops[at]) = (through, count);
                }
            }
        }
    }
    (length, hops)
}

fn check(weights: &Dense) {
    let found = shortest_paths(weights).unwrap();
    let (length, hops) = floyd_warshall(weights);
    for at in 0..length.len() {
        if length[at] == f64::INFINITY {
            assert_eq!((found.lengths[at], found.hops[at]), (f64::INFINITY, UNREACHABLE));
        } else {
            assert!((found.lengths[at] - length[at]).abs() <= 1e-12 * length[at], "{at}");
            assert_eq!(f64::from(found.hops[at]), hops[at], "{at}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// From nearly uniform rows to nearly hard ones, with edges missing. (Harder still, and lengths that differ round to
    /// the same sum: how many hops the shortest has then depends on the order of additions.)
    #[test]
    fn any_rows(scores in proptest::collection::vec(-1.0_f64..1.0, 24 * 24), sharp in 0.01_f64..12.0, missing in 0.0..1.0) {
        let row = |i: usize, j: usize| {
            let score = scores[i * 24 + j];
            if (score * 1e4).fract().abs() < missing { 0.0 } else { (sharp * score).exp() }
        };
        check(&Dense::from_fn(24, row));
    }

    /// Lengths that are sums of whole numbers tie; the fewest hops win.
    #[test]
    fn ties(lengths in proptest::collection::vec(1_u32..6, 100)) {
        check(&Dense::from_fn(10, |i, j| 1.0 / f64::from([1, 2, 4, 8, 16][lengths[i * 10 + j] as usize - 1])));
    }
}

#[test]
fn few_tokens_and_none() {
    check(&Dense::from_fn(0, |_, _| 1.0));
    check(&Dense::from_fn(1, |_, _| 1.0));
    check(&Dense::from_fn(5, |_, _| 0.0));
    check(&Dense::from_fn(5, |_, _| 0.2));
    let empty = shortest_paths(&Dense::from_fn(3, |_, _| 0.0)).unwrap().summary();
    assert_eq!((empty.mean, empty.max, empty.unreachable), (0.0, 0, 6));
}

#[test]
fn a_chain_is_walked() {
    let chain = Dense::from_fn(6, |i, j| if j == i + 1 { 0.5 } else { 0.0 });
    let summary = shortest_paths(&chain).unwrap().summary();
    assert_eq!((summary.max, summary.unreachable), (5, 15));
    assert_eq!(summary.counts, [0, 5, 4, 3, 2, 1]);
    assert!((summary.mean - 35.0 / 15.0).abs() < 1e-15);
    let middle = shortest_paths_from(&chain, vec![3]).unwrap();
    assert_eq!(middle.hops, [UNREACHABLE, UNREACHABLE, UNREACHABLE, 0, 1, 2]);
    assert_eq!(middle.summary().counts, [0, 1, 1]);
}

/// One token that hardly anyone attends to, which keeps every search going to its end.
#[test]
fn an_outlier() {
    check(&Dense::from_fn(40, |i, j| if j == 7 { 1e-9 } else { (3.0 * ((i * 31 + j * 17) as f64).sin()).exp() }));
}

#[test]
fn weights_that_have_no_length() {
    let with = |w: f64| Dense::from_fn(3, |i, j| if (i, j) == (1, 2) { w } else { 1.0 });
    assert!(matches!(shortest_paths(&with(-1.0)), Err(Error::Negative { row: 1, column: 2, .. })));
    assert!(matches!(shortest_paths(&with(f64::NAN)), Err(Error::NotFinite { .. })));
}
