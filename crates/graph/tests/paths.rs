//! Shortest paths beside the algorithm of Floyd and Warshall.

use proptest::prelude::*;
use resolvent_graph::{
    Dense, Error, LinearOperator, Paths, UNREACHABLE, shortest_paths, shortest_paths_from, shortest_paths_from_logs,
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
        check_route(weights, &found, at);
    }
}

/// The tokens in between: as many edges as hops, whose lengths sum up to the path's.
fn check_route(weights: &Dense, found: &Paths, at: usize) {
    let n = weights.len();
    let (from, to) = (at / n, at % n);
    let Some(tokens) = found.route(from, to) else {
        assert_eq!((found.hops[at], found.predecessors[at]), (UNREACHABLE, UNREACHABLE));
        return;
    };
    assert_eq!((tokens[0], tokens[tokens.len() - 1], tokens.len()), (from, to, found.hops[at] as usize + 1));
    let length: f64 = tokens.windows(2).map(|edge| 1.0 / weights.row(edge[0])[edge[1]]).sum();
    assert!((length - found.lengths[at]).abs() <= 1e-12 * length, "{length} {}", found.lengths[at]);
    assert_eq!(
        found.predecessors[at] as usize,
        if from == to { UNREACHABLE as usize } else { tokens[tokens.len() - 2] }
    );
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

/// Edges of lengths 0 -> 1: 1, 1 -> 2: 1, 2 -> 3: 1, 0 -> 2: 2, 0 -> 3: 9; nothing leads back. Two ways to 2 are as long, and the
/// one with fewer edges is taken, also by what goes on from there.
#[test]
fn a_route_that_is_known() {
    let lengths = [[0.0, 1.0, 2.0, 9.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0; 4]];
    let weight = |i: usize, j: usize| if lengths[i][j] > 0.0 { 1.0 / lengths[i][j] } else { 0.0 };
    let found = shortest_paths_from(&Dense::from_fn(4, weight), vec![3, 0]).unwrap();
    assert_eq!(found.predecessors[4..], [UNREACHABLE, 0, 0, 2]);
    assert_eq!(found.route(0, 3), Some(vec![0, 2, 3]));
    assert_eq!((found.lengths[7], found.hops[7]), (3.0, 2));
    assert_eq!((found.route(0, 0), found.route(3, 0)), (Some(vec![0]), None));
    assert_eq!((found.route(1, 2), found.route(0, 4)), (None, None));
}

/// Edges so short beside others that sums do not show them: tokens then lie at one distance, and routes end all the same.
#[test]
fn routes_end_where_lengths_round() {
    for seed in 0..64_usize {
        let draw = |at: usize| (seed * 131 + at * 7919).wrapping_mul(2_654_435_761) >> 7;
        let weight = |i: usize, j: usize| [1e-20, 1.0, 1e20, 1e25, 0.0][draw(i * 12 + j) % 5];
        let found = shortest_paths(&Dense::from_fn(12, weight)).unwrap();
        for at in 0..144 {
            let edges = found.route(at / 12, at % 12).map(|tokens| tokens.len() - 1);
            assert!(
                edges.map_or(found.hops[at] == UNREACHABLE, |edges| edges <= found.hops[at] as usize),
                "{seed} {at}"
            );
        }
    }
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
