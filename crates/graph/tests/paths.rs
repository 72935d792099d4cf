//! Shortest paths beside the algorithm of Floyd and Warshall.

use proptest::prelude::*;
use resolvent_graph::{
    Dense, Error, LinearOperator, UNREACHABLE, shortest_paths, shortest_paths_from, shortest_paths_from_logs,
};

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

/// No weight is a weight of zero, whatever its sign; one too small for its inverse is an edge all the same.
#[test]
fn the_ends_of_the_numbers() {
    let edges = Dense::new(3, vec![0.0, 1.0, 5e-324, -0.0, 0.0, 2.0, -0.0, 0.0, 0.0]).unwrap();
    let found = shortest_paths(&edges).unwrap();
    assert_eq!(found.hops, [0, 1, 2, UNREACHABLE, 0, 1, UNREACHABLE, UNREACHABLE, 0]);
    assert!((found.lengths[1] - 1.0).abs() < 1e-12 && (found.lengths[2] - 1.5).abs() < 1e-12);
    let weak = Dense::new(2, vec![0.0, 5e-324, 0.0, 0.0]).unwrap();
    assert_eq!(shortest_paths(&weak).unwrap().hops, [0, 1, UNREACHABLE, 0]);
}

/// From logarithms the paths are those of the weights, and edges of scores far apart are there.
#[test]
fn paths_of_logarithms() {
    let logs: Vec<f64> = (0..49).map(|at| 6.0 * (1.7 * at as f64).sin()).collect();
    let weights = Dense::new(7, logs.iter().map(|x| x.exp()).collect()).unwrap();
    let (found, expected) =
        (shortest_paths_from_logs(7, &logs, (0..7).collect()).unwrap(), shortest_paths(&weights).unwrap());
    assert_eq!(found.hops, expected.hops);
    for (length, expected) in found.lengths.iter().zip(&expected.lengths) {
        assert!((length - expected).abs() <= 1e-12 * expected);
    }
    // 0 -> 1 -> 2 with lengths e^900 each, and e^902 directly: shorter by way of 1.
    let none = f64::NEG_INFINITY;
    let far = [none, -900.0, -902.0, none, none, -900.0, none, -1.0, none];
    assert_eq!(shortest_paths_from_logs(3, &far, vec![0]).unwrap().hops, [0, 1, 2]);
    assert!(matches!(shortest_paths_from_logs(1, &[f64::NAN], vec![0]), Err(Error::NotFinite { .. })));
    assert!(matches!(shortest_paths_from_logs(2, &[0.0], vec![0]), Err(Error::Length { .. })));
}
