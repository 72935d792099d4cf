//! The symmetrised graph: similarity, isometry, mixing, cuts; and graphs that are nearly nothing.

use proptest::prelude::*;
use resolvent_graph::{
    ClusterFit, Dense, Error, LinearOperator, Reversible, Walk, asymmetry, degree_ratio, diffusion_distances,
    diffusion_map, generator, matched_bandwidth, mixing_time, neighbour_dimension, row_perplexity, sweep_cut,
    two_stage_distortion,
};

/// Two triangles joined by one weak edge.
fn barbell(bridge: f64) -> Dense {
    let mut edges = vec![(2, 3, bridge), (3, 2, bridge)];
    for (a, b) in [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5)] {
        edges.extend([(a, b, 1.0), (b, a, 1.0)]);
    }
    Dense::from_edges(6, &edges)
}

#[track_caller]
fn assert_near(got: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= tol, "{got} is not {expected}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The walk is similar to the symmetric matrix, its stationary distribution stays, and the map keeps distances.
    #[test]
    fn the_walk_and_its_map(logs in proptest::collection::vec(-8.0_f64..8.0, 81), tau in 1_u32..5) {
        let (n, graph) = (9, Reversible::from_log_weights(9, &logs).unwrap());
        let (spectrum, pi, walk) = (graph.spectrum().unwrap(), graph.stationary(), graph.transition());
        assert_near(&walk.apply(&[1.0; 9]).unwrap(), &[1.0; 9], 1e-12);
        assert_near(&walk.apply_transpose(&pi).unwrap(), &pi, 1e-13);
        for (value, vector) in spectrum.values.iter().zip(&spectrum.vectors) {
            let right: Vec<f64> = vector.iter().zip(&pi).map(|(v, pi)| v / pi.sqrt()).collect();
            let size = right.iter().fold(1.0_f64, |size, x| size.max(x.abs()));
            let expected: Vec<f64> = right.iter().map(|x| (1.0 - value) * x).collect();
            assert_near(&walk.apply(&right).unwrap(), &expected, 1e-11 * size);
        }
        let mut power = Dense::from_fn(n, |i, j| f64::from(u8::from(i == j)));
        for _ in 0..tau {
            power = Dense::from_fn(n, |i, j| (0..n).map(|m| power.row(i)[m] * walk.row(m)[j]).sum());
        }
        let far = |i: usize, j: usize| -> f64 {
            (0..n).map(|y| (power.row(i)[y] - power.row(j)[y]).powi(2) / pi[y]).sum()
        };
        let expected: Vec<f64> = (0..n * n).map(|at| far(at / n, at % n)).collect();
        let size = expected.iter().fold(1.0_f64, |size, x| size.max(*x));
        assert_near(&diffusion_distances(&graph, &spectrum, tau), &expected, 1e-10 * size);
    }

    /// What stays within clusters and what leaves them, between the bounds that theory gives.
    #[test]
    fn cuts_are_between_cheegers_bounds(logs in proptest::collection::vec(-3.0_f64..3.0, 64)) {
        let graph = Reversible::from_log_weights(8, &logs).unwrap();
        let spectrum = graph.spectrum().unwrap();
        let cut = sweep_cut(&graph, &spectrum).unwrap();
        prop_assert!(spectrum.gap() / 2.0 <= cut.conductance + 1e-12);
        prop_assert!(cut.conductance <= (2.0 * spectrum.gap()).sqrt() + 1e-12);
        let weights = Dense::new(8, logs.iter().map(|x| x.exp()).collect()).unwrap();
        let sides: Vec<usize> = cut.side.iter().map(|&side| usize::from(side)).collect();
        let fit = ClusterFit::new(&weights, &sides).unwrap();
        // Two clusters: the coupling is the cut's conductance.
        prop_assert!((fit.coupling - cut.conductance).abs() < 1e-10);
        prop_assert!(fit.eps_cluster <= fit.row_leak && fit.row_leak <= 1.0);
    }

    /// Tokens without edges change no cut, wherever they stand among the others.
    #[test]
    fn lonely_tokens_are_not_cut_off(logs in proptest::collection::vec(-3.0_f64..3.0, 49), places in 0_usize..512) {
        let whole = Reversible::from_log_weights(7, &logs).unwrap();
        let expected = sweep_cut(&whole, &whole.spectrum().unwrap()).unwrap();
        // Seven of the nine bits say where the tokens with edges are.
        let mut there: Vec<usize> = (0..9).filter(|bit| places >> bit & 1 == 1).take(7).collect();
        (0..9).for_each(|i| if there.len() < 7 && !there.contains(&i) { there.push(i) });
        there.sort_unstable();
        let mut wide = vec![f64::NEG_INFINITY; 81];
        for (i, &row) in there.iter().enumerate() {
            there.iter().enumerate().for_each(|(j, &column)| wide[row * 9 + column] = logs[i * 7 + j]);
        }
        let graph = Reversible::from_log_weights(9, &wide).unwrap();
        let cut = sweep_cut(&graph, &graph.spectrum().unwrap()).unwrap();
        prop_assert!((cut.conductance - expected.conductance).abs() < 1e-9, "{} {}", cut.conductance, expected.conductance);
        prop_assert!((0..9).all(|i| there.contains(&i) || !cut.side[i]));
    }
}

/// Two parts whose tokens take turns, and one without edges: the cut between the parts is free.
#[test]
fn parts_are_cut_apart() {
    let joined = |i: usize, j: usize| i != 4 && j != 4 && i % 2 == j % 2;
    let weights = Dense::from_fn(9, |i, j| if joined(i, j) { 1.0 + (i + j) as f64 } else { 0.0 });
    let graph = Reversible::from_weights(&weights).unwrap();
    let cut = sweep_cut(&graph, &graph.spectrum().unwrap()).unwrap();
    assert_eq!(cut.conductance, 0.0);
    assert_eq!(cut.side, [true, false, true, false, false, false, true, false, true]);
}

#[test]
fn a_bottleneck_is_found() {
    let graph = Reversible::from_weights(&barbell(0.01)).unwrap();
    let spectrum = graph.spectrum().unwrap();
    let cut = sweep_cut(&graph, &spectrum).unwrap();
    assert_eq!(cut.side[..3], [cut.side[0]; 3]);
    assert_ne!(cut.side[0], cut.side[3]);
    assert_near(&[cut.conductance], &[0.01 / 6.01], 1e-14);
    let map = diffusion_map(&graph, &spectrum, 1, 1.0);
    assert!((map[0][0] - map[1][0]).abs() < 0.1 && (map[0][0] - map[4][0]).abs() > 1.0);
    let slow = mixing_time(&graph, 0.25).unwrap().unwrap();
    let fast = mixing_time(&Reversible::from_weights(&barbell(1.0)).unwrap(), 0.25).unwrap().unwrap();
    assert!(slow > 20 * fast, "{slow} {fast}");
    let rates = generator(&spectrum, 2.0);
    assert!(rates[0].abs() < 1e-12 && (rates[1] + (1.0 - spectrum.gap()).ln() / 2.0).abs() < 1e-12);
}

/// In two parts: a second zero eigenvalue, no mixing, a cut that costs nothing.
#[test]
fn disconnected_graphs() {
    let graph = Reversible::from_weights(&barbell(0.0)).unwrap();
    let spectrum = graph.spectrum().unwrap();
    assert!(spectrum.gap() < 1e-14 && spectrum.values[2] > 0.5);
    assert_eq!(mixing_time(&graph, 0.25).unwrap(), None);
    assert!(sweep_cut(&graph, &spectrum).unwrap().conductance < 1e-14);
}

/// A token without edges is apart, and a graph of nothing but those too.
#[test]
fn rows_of_zeros() {
    let lonely = Dense::from_edges(3, &[(0, 1, 2.0), (1, 0, 2.0)]);
    let graph = Reversible::from_weights(&lonely).unwrap();
    let spectrum = graph.spectrum().unwrap();
    assert_near(&spectrum.values, &[0.0, 0.0, 2.0], 1e-14);
    assert_eq!(graph.stationary(), [0.5, 0.5, 0.0]);
    assert_eq!(graph.transition().row(2), [0.0, 0.0, 1.0]);
    assert_eq!(mixing_time(&graph, 0.25).unwrap(), None);
    assert!(diffusion_map(&graph, &spectrum, 2, 1.0).concat().iter().all(|x| x.is_finite()));
    assert_eq!(degree_ratio(graph.log_degree()), 1.0);
    assert_eq!(row_perplexity(&lonely).unwrap(), [1.0, 1.0, 0.0]);
    let nothing = Reversible::from_weights(&Dense::from_edges(2, &[])).unwrap();
    assert_eq!(nothing.spectrum().unwrap().values, [0.0, 0.0]);
    assert_eq!(nothing.stationary(), [0.0, 0.0]);
    assert_eq!(sweep_cut(&nothing, &nothing.spectrum().unwrap()), None);
    let empty = Reversible::from_weights(&Dense::from_edges(0, &[])).unwrap();
    assert_eq!((empty.spectrum().unwrap().gap(), empty.stationary().len()), (1.0, 0));
    assert_eq!(asymmetry(&Dense::from_edges(2, &[])).unwrap(), 0.0);
}

#[test]
fn weights_that_are_none() {
    let signed = Dense::from_edges(2, &[(0, 1, -1.0)]);
    assert!(matches!(Reversible::from_weights(&signed), Err(Error::Negative { row: 0, column: 1, .. })));
    assert!(matches!(row_perplexity(&signed), Err(Error::Negative { .. })));
    assert!(matches!(ClusterFit::new(&signed, &[0, 1]), Err(Error::Negative { .. })));
    assert!(matches!(Walk::default().distribution(&signed), Err(Error::Degree { index: 0, .. })));
    let nan = Dense::from_edges(2, &[(1, 0, f64::NAN)]);
    assert!(matches!(Reversible::from_weights(&nan), Err(Error::NotFinite { row: 1, column: 0, .. })));
    assert!(matches!(asymmetry(&nan), Err(Error::NotFinite { .. })));
    assert!(matches!(Reversible::from_log_weights(1, &[f64::INFINITY]), Err(Error::NotFinite { .. })));
    let graph = Reversible::from_weights(&barbell(1.0)).unwrap();
    assert!(matches!(mixing_time(&graph, 0.0), Err(Error::Range { what: "eps", .. })));
    let damping = Walk { damping: 1.5, ..Walk::default() };
    assert!(matches!(damping.distribution(&barbell(1.0)), Err(Error::Range { what: "damping", .. })));
}

/// Scores of thousands overflow when exponentiated; the graph does not.
#[test]
fn large_scores() {
    let logs = [4000.0, 3999.0, 3999.0, 3990.0];
    let graph = Reversible::from_log_weights(2, &logs).unwrap();
    let shifted = Reversible::from_log_weights(2, &logs.map(|x| x - 4000.0)).unwrap();
    assert_near(graph.adjacency().entries(), shifted.adjacency().entries(), 1e-12);
    assert!(graph.log_degree()[0] > 4000.0);
}

#[test]
fn walkers() {
    // Two tokens point at a third, which points nowhere.
    let sink = Dense::from_edges(3, &[(0, 2, 1.0), (1, 2, 5.0)]);
    let found = Walk { tol: 1e-14, ..Walk::default() }.distribution(&sink).unwrap().shares;
    // By hand: x = a (1 + 0.85 x_2 / 3 ...) with all of x_2 spread anew.
    let spread = |x: &[f64]| (0.15 + 0.85 * x[2]) / 3.0;
    assert_near(&found, &[spread(&found), spread(&found), spread(&found) + 0.85 * (found[0] + found[1])], 1e-12);
    let graph = Reversible::from_weights(&barbell(0.3)).unwrap();
    let undamped = Walk { damping: 1.0, tol: 1e-13, max_iter: 10_000 };
    assert_near(&undamped.distribution(&barbell(0.3)).unwrap().shares, &graph.stationary(), 1e-11);
    // A cycle of two is periodic: the lazy walk settles all the same.
    let swap = Dense::from_edges(2, &[(0, 1, 1.0), (1, 0, 1.0)]);
    assert_near(&undamped.distribution(&swap).unwrap().shares, &[0.5, 0.5], 1e-12);
}

#[test]
fn sharpness() {
    let rows = Dense::new(2, vec![1.0, 1.0, 0.9, 0.1]).unwrap();
    let expected = (-(0.9 * 0.9_f64.ln() + 0.1 * 0.1_f64.ln())).exp();
    assert_near(&row_perplexity(&rows).unwrap(), &[2.0, expected], 1e-14);
    let found = matched_bandwidth(30.0, (1e-3, 1e3), |kappa| Ok(10.0 * kappa)).unwrap();
    assert_near(&[found], &[3.0], 1e-5);
    assert_near(&[matched_bandwidth(1e9, (1e-3, 1e3), Ok).unwrap()], &[1e3], 1e-2);
    assert!(matched_bandwidth(1.0, (0.0, 1.0), Ok).is_err());
}

#[test]
fn dimension_of_a_line_and_a_square() {
    let noise = |i: usize, c: usize| ((i * 7919 + c * 104_729) as f64 * 0.618_033_988_749).fract();
    let line: Vec<f64> = (0..300).flat_map(|i| [noise(i, 0).powi(2), 3.0 * noise(i, 0).powi(2)]).collect();
    let square: Vec<f64> =
        (0..400).flat_map(|i| [(i as f64).sin() * 1e3, (i as f64 * 1.7).cos() * 1e3].map(f64::fract)).collect();
    let (one, two) =
        (neighbour_dimension(300, &line).unwrap().unwrap(), neighbour_dimension(400, &square).unwrap().unwrap());
    assert!((0.7..1.4).contains(&one) && (1.5..2.5).contains(&two), "{one} {two}");
    assert_eq!(neighbour_dimension(3, &[1.0; 6]).unwrap(), None);
}

/// Two tokens a cluster whose means are the tokens: the two-stage draw is exact. A spread within makes it not.
#[test]
fn distortion() {
    let q = [1.0, 1.0, -1.0, -1.0];
    assert_near(&[two_stage_distortion(1, &q, &q, 0.5, &[0, 0, 1, 1]).unwrap()], &[1.0], 1e-12);
    let spread = [1.5, 0.5, -1.0, -1.0];
    assert!(two_stage_distortion(1, &spread, &spread, 0.5, &[4, 4, 9, 9]).unwrap() > 1.2);
    assert_eq!(two_stage_distortion(1, &q, &q, 0.5, &[0; 4]).unwrap(), 1.0);
    assert!(two_stage_distortion(1, &q, &q[..3], 0.5, &[0; 4]).is_err());
}

#[test]
fn dirichlet_energy_of_features() {
    let graph = Reversible::from_weights(&barbell(1.0)).unwrap();
    assert_eq!(graph.dirichlet_energy(&[2.0; 12]).unwrap(), 0.0);
    // Only the bridge joins different values; it is a third of each of its ends.
    let apart = graph.dirichlet_energy(&[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).unwrap();
    assert_near(&[apart], &[2.0 / 3.0], 1e-14);
    assert!(graph.dirichlet_energy(&[0.0; 7]).is_err());
}
