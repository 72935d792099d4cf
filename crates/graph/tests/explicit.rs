//! The diagnostics on graphs that are small enough to know the answers.

#[path = "../../kernels/tests/support/mod.rs"]
mod support;

use resolvent_graph::{
    Dense, Error, HTransform, LinearOperator, Power, Rank, Solver, Transposed, katz, markov, perron, spectral_norm,
    spectral_radius, subdominant_ratio,
};
use resolvent_kernels::{mechanism::OneHop, reference};
use support::{assert_close, golden::Golden};

const EXACT: Solver = Solver { tol: 1e-13, max_iter: 2000, restart: 30 };
const POWER: Power = Power { tol: 1e-13, max_iter: 5000 };

#[track_caller]
fn assert_near(got: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= tol, "{got} is not {expected}");
    }
}

/// Tokens 1 and 2 point at 0, 0 at 3, 3 at 4, 4 at itself; Frobenius-normalised, decay 0.7.
fn worked_example() -> Dense {
    let graph = Dense::from_edges(5, &[(1, 0, 1.0), (2, 0, 1.0), (0, 3, 1.0), (3, 4, 1.0), (4, 4, 0.9)]);
    let norm = graph.frobenius();
    graph.scaled(0.7 / norm)
}

/// One hop ranks the token with most direct links first, all hops the one where walks end.
#[test]
fn all_hops_rank_differently_from_one() {
    let graph = worked_example();
    let one_hop: Vec<f64> = graph.apply_transpose(&[1.0; 5]).unwrap().iter().map(|sum| sum / 0.7).collect();
    assert_near(&one_hop, &[0.9119, 0.0, 0.0, 0.4560, 0.8663], 5e-5);
    let scores = katz(&graph, &EXACT).unwrap();
    assert_near(&scores.c_in, &[1.6383, 1.0, 1.0, 1.5229, 2.0850], 5e-5);
    assert_near(&scores.c_out, &[1.4621, 1.4667, 1.4667, 1.4478, 1.4030], 5e-5);
    assert_near(&scores.discounted_row_sums(), &[0.4621, 0.4667, 0.4667, 0.4478, 0.4030], 5e-5);
    let largest = |x: &[f64]| (0..5).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
    assert_eq!((largest(&one_hop), largest(&scores.c_in)), (0, 4));
}

#[test]
fn stored_cases_of_the_resolvent() {
    let mut graphs = 0;
    for case in Golden::all("infsa") {
        let (p, n) = (&case.problem, case.problem.shape.seq_q);
        if p.mechanism.id() != "infsa-resolvent" {
            continue;
        }
        let gamma = p.mechanism.series.gamma();
        let hop = p.mechanism.clone().series(OneHop::default().with_gamma(gamma));
        let hop = reference::forward(&hop, &p.shape, &p.inputs(), &p.mask()).unwrap();
        for (slice, entries) in hop.weights().chunks(n * n).enumerate() {
            let expected = |name: &str| &case.get(name).unwrap()[slice * n..][..n];
            let graph = Dense::new(n, entries.to_vec()).unwrap();
            let (chain, scores) = (markov(&graph).unwrap(), katz(&graph, &EXACT).unwrap());
            assert_close(&case.name, &chain.absorption, expected("absorption"), 1, 1e-12, 0.0);
            assert_close(&case.name, &scores.c_out, expected("c_out"), 1, 1e-10, 0.0);
            assert_close(&case.name, &scores.c_in, expected("c_in"), 1, 1e-10, 0.0);
            graphs += 1;
        }
    }
    assert_eq!(graphs, 5);
}

/// A long query gives its row more mass than a walker can lose; the h-transform is a chain all the same.
#[test]
fn the_h_transform_is_always_substochastic() {
    let m = Dense::new(3, vec![0.1, 0.9, 0.8, 0.05, 0.0, 0.1, 0.0, 0.1, 0.05]).unwrap();
    let chain = markov(&m).unwrap();
    assert!(!chain.substochastic);
    assert_eq!(chain.negative, 1);
    assert_near(&[chain.min_absorption], &[-0.8], 1e-15);
    assert_near(&chain.row_sums, &[1.8, 0.15, 0.15], 1e-15);
    let c_out = katz(&m, &EXACT).unwrap().c_out;
    let transformed = HTransform::new(&m, &c_out).unwrap();
    let chain = markov(&transformed).unwrap();
    assert!(chain.substochastic);
    assert_near(&chain.absorption, &c_out.iter().map(|u| 1.0 / u).collect::<Vec<_>>(), 1e-12);
    // The transpose is the transpose: <x, M y> = <M^T x, y>.
    let (x, y) = ([1.0, -2.0, 0.5], [0.3, 1.0, 2.0]);
    let inner = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let (left, right) = (transformed.apply(&y).unwrap(), transformed.apply_transpose(&x).unwrap());
    assert_near(&[inner(&x, &left)], &[inner(&right, &y)], 1e-12);
    let error = HTransform::new(&m, &[1.0, 0.0, 1.0]).unwrap_err();
    assert_eq!(error, Error::NotPositive { index: 1, value: 0.0 });
}

#[test]
fn spectra_of_known_matrices() {
    let m = Dense::new(2, vec![2.0, 1.0, 1.0, 2.0]).unwrap();
    assert_near(&[spectral_radius(&m, &POWER).unwrap(), spectral_norm(&m, &POWER).unwrap()], &[3.0, 3.0], 1e-10);
    assert_near(&perron(&m, &POWER).unwrap().vector, &[0.5, 0.5], 1e-10);
    assert_near(&[subdominant_ratio(&m, &POWER, 40).unwrap()], &[1.0 / 3.0], 1e-9);
    // Not symmetric: right vector (1, 2)/3, left (1, 1)/2, eigenvalues 4 and 1.
    let m = Dense::new(2, vec![2.0, 1.0, 2.0, 3.0]).unwrap();
    let pair = perron(&m, &POWER).unwrap();
    assert_near(&[pair.value], &[4.0], 1e-10);
    assert_near(&pair.vector, &[1.0 / 3.0, 2.0 / 3.0], 1e-10);
    assert_near(&perron(&Transposed(&m), &POWER).unwrap().vector, &[0.5, 0.5], 1e-10);
    assert_near(&[subdominant_ratio(&m, &POWER, 60).unwrap()], &[0.25], 1e-9);
    // Two halves that only see each other have eigenvalues of both signs.
    let bipartite = Dense::from_edges(3, &[(0, 1, 2.0), (1, 0, 2.0), (1, 2, 1.0), (2, 1, 1.0)]);
    assert_near(&[spectral_radius(&bipartite, &POWER).unwrap()], &[5.0_f64.sqrt()], 1e-9);
    // A signed operator whose dominant direction the uniform vector does not see.
    let signed = Dense::new(2, vec![1.0, -1.0, -1.0, 1.0]).unwrap();
    assert_near(&[spectral_norm(&signed, &POWER).unwrap()], &[2.0], 1e-9);
    let nothing = Dense::new(2, vec![0.0; 4]).unwrap();
    assert_eq!(spectral_radius(&nothing, &POWER).unwrap(), 0.0);
    assert_eq!(subdominant_ratio(&nothing, &POWER, 10).unwrap(), 0.0);
}

/// More unknowns than the method keeps vectors, not symmetric, nearly singular.
#[test]
fn the_solver_restarts() {
    let n = 60;
    let entry = |i: usize, j: usize| (1.0 + ((i * 7 + j * 3) % 11) as f64) / 11.0 + f64::from(u8::from(j == i + 1));
    let raw = Dense::new(n, (0..n * n).map(|at| entry(at / n, at % n)).collect()).unwrap();
    let radius = spectral_radius(&raw, &POWER).unwrap();
    let m = raw.scaled(0.999 / radius);
    let b: Vec<f64> = (0..n).map(|i| (i as f64).cos()).collect();
    let solver = Solver { restart: 5, tol: 1e-11, ..EXACT };
    let x = solver.resolvent(&m, &b).unwrap();
    let back: Vec<f64> = m.apply(&x).unwrap().iter().zip(&x).map(|(mx, x)| x - mx).collect();
    assert_close("residual", &back, &b, 1, 1e-11, 0.0);
    let starved = Solver { max_iter: 3, ..solver };
    assert!(matches!(starved.resolvent(&m, &b), Err(Error::NotConverged { iterations: 3..=5, .. })));
    assert_eq!(solver.resolvent(&m, &vec![0.0; n]).unwrap(), vec![0.0; n]);
    // I - M is singular: there is no answer to give.
    let singular = Dense::new(2, vec![1.0, 0.0, 0.0, 0.5]).unwrap();
    assert!(matches!(solver.resolvent(&singular, &[1.0, 1.0]), Err(Error::NotConverged { .. })));
}

#[test]
fn vectors_of_another_length_are_refused() {
    let m = worked_example();
    let length = |got| Error::Length { what: "x", got, expected: 5 };
    assert_eq!(m.apply(&[1.0; 4]).unwrap_err(), length(4));
    assert_eq!(m.apply_transpose(&[1.0; 6]).unwrap_err(), length(6));
    assert!(Dense::new(2, vec![0.0; 3]).is_err());
    assert!(EXACT.resolvent(&m, &[1.0; 2]).is_err());
    assert!(HTransform::new(&m, &[1.0; 2]).is_err());
}

/// What is not a number is not an answer either.
#[test]
fn operators_with_nan() {
    let broken = Dense::new(2, vec![1.0, f64::NAN, 0.0, 1.0]).unwrap();
    assert!(matches!(spectral_norm(&broken, &POWER), Err(Error::Product { .. })));
    assert!(matches!(perron(&broken, &POWER), Err(Error::Product { index: 0, .. })));
    assert!(matches!(subdominant_ratio(&broken, &POWER, 4), Err(Error::Product { .. })));
    let chain = markov(&broken).unwrap();
    assert!(!chain.substochastic && chain.min_absorption.is_nan());
    let rank = Rank::of(&[1.0, f64::NAN]);
    assert!(rank.effective.is_nan() && rank.stable.is_nan());
}

/// Walks that grow with their length have no count, though the equations have a solution.
#[test]
fn walks_without_an_end() {
    let grows = |entries: Vec<f64>, n: usize| katz(&Dense::new(n, entries).unwrap(), &EXACT);
    assert!(matches!(grows(vec![2.0], 1), Err(Error::Diverges { radius }) if (radius - 2.0).abs() < 1e-9));
    assert!(matches!(grows(vec![0.5, 1.0, 1.0, 0.5], 2), Err(Error::Diverges { .. })));
    // A signed operator of radius below one has what counts below zero.
    let signed = grows(vec![0.0, -3.0, 0.0, 0.0], 2).unwrap();
    assert_near(&signed.c_out, &[-2.0, 1.0], 1e-12);
}
