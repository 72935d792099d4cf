//! Eigenvalues that are known, and Lanczos and Arnoldi beside the dense solvers.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{
    Arnoldi, AttentionOperator, Dense, Error, Lanczos, LinearOperator, Rank, Reversible, StreamedReversible,
    eigenvalues, sin_theta, singular_values, spectral_gap, symmetric_eigen,
};
use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{Fna, Frobenius, Infsa, Resolvent, Softmax, Ssa},
};
use serde_json::json;

/// Tokens in a row, each joined to the next.
fn path(n: usize) -> Dense {
    Dense::from_fn(n, |i, j| f64::from(u8::from(i.abs_diff(j) == 1)))
}

fn complete(n: usize) -> Dense {
    Dense::from_fn(n, |i, j| f64::from(u8::from(i != j)))
}

fn cycle(n: usize) -> Dense {
    Dense::from_fn(n, |i, j| f64::from(u8::from((i + 1) % n == j || (j + 1) % n == i)))
}

#[track_caller]
fn assert_near(got: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= tol, "{got} is not {expected}");
    }
}

#[test]
fn laplacians_of_paths_cycles_and_complete_graphs() {
    let n = 17;
    let angle = |k: usize, of: f64| 1.0 - (std::f64::consts::PI * k as f64 / of).cos();
    let spectrum = |graph: &Dense| Reversible::from_weights(graph).unwrap().spectrum().unwrap();
    let of_path: Vec<f64> = (0..n).map(|k| angle(k, n as f64 - 1.0)).collect();
    assert_near(&spectrum(&path(n)).values, &of_path, 1e-13);
    let mut of_cycle: Vec<f64> = (0..n).map(|k| angle(2 * k, n as f64)).collect();
    of_cycle.sort_by(f64::total_cmp);
    assert_near(&spectrum(&cycle(n)).values, &of_cycle, 1e-13);
    let mut of_complete = vec![n as f64 / (n as f64 - 1.0); n];
    of_complete[0] = 0.0;
    let complete = spectrum(&complete(n));
    assert_near(&complete.values, &of_complete, 1e-13);
    assert_near(&[complete.gap(), complete.absolute_gap()], &[17.0 / 16.0, 15.0 / 16.0], 1e-13);
}

/// A symmetric graph of random weights.
fn random_graph(n: usize, seed: u64) -> Reversible {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let logs: Vec<f64> = (0..n * n).map(|_| 6.0 * rng.random_range(-1.0..1.0)).collect();
    Reversible::from_log_weights(n, &logs).unwrap()
}

#[test]
fn lanczos_finds_what_the_dense_solver_finds() {
    for seed in 0..20 {
        let n = 30 + 17 * seed as usize;
        let graph = random_graph(n, seed);
        let dense = symmetric_eigen(graph.adjacency()).unwrap();
        let lanczos = Lanczos { largest: 6, smallest: 3, basis: 60, tol: 1e-10, seed, ..Lanczos::default() };
        let found = lanczos.eigenpairs(&graph).unwrap();
        let mut expected: Vec<f64> = dense.values.iter().rev().take(6).copied().collect();
        expected.extend(dense.values[..3].iter().rev());
        assert_near(&found.values, &expected, 1e-8);
        assert!(found.residuals.iter().all(|&r| r <= 1e-10));
        for (value, vector) in found.values.iter().zip(&found.vectors) {
            let image = graph.apply(vector).unwrap();
            let residual = image.iter().zip(vector).map(|(y, x)| (y - value * x).powi(2)).sum::<f64>().sqrt();
            assert!(residual <= 2e-10, "the residual of {value} is {residual:e}");
        }
    }
}

/// One eigenvalue many times over, fewer tokens than pairs, nothing to find, too few products.
#[test]
fn lanczos_at_its_edges() {
    let same = Dense::from_fn(40, |i, j| f64::from(u8::from(i != j)) / 39.0);
    let found = Lanczos::default().eigenpairs(&same).unwrap();
    assert_near(&found.values[..1], &[1.0], 1e-12);
    assert_near(&found.values[1..], &[-1.0 / 39.0; 9], 1e-12);
    let small = Lanczos { largest: 7, smallest: 7, ..Lanczos::default() }.eigenpairs(&path(3)).unwrap();
    assert_near(&small.values, &[2.0_f64.sqrt(), 0.0, -2.0_f64.sqrt()], 1e-12);
    assert!(Lanczos::default().eigenpairs(&path(0)).unwrap().values.is_empty());
    let starved = Lanczos { max_products: 16, tol: 1e-14, ..Lanczos::default() };
    let error = starved.eigenpairs(&path(500)).unwrap_err();
    assert!(matches!(error, Error::Eigen { wanted: 10.., products: 16, .. }), "{error}");
    let nan = Dense::from_fn(50, |i, _| if i == 3 { f64::NAN } else { 1.0 });
    assert!(Lanczos::default().eigenpairs(&nan).is_err());
    assert!(matches!(symmetric_eigen(&nan), Err(Error::NotFinite { row: 3, column: 0, .. })));
}

#[test]
fn arnoldi_finds_the_largest_moduli() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for n in [1, 2, 5, 60, 150] {
        let raw = Dense::from_fn(n, |_, _| 0.0);
        let entries = raw.entries().iter().map(|_| rng.random_range(-4.0_f64..4.0).exp()).collect();
        let raw = Dense::new(n, entries).unwrap();
        let walk = Dense::from_fn(n, |i, j| raw.row(i)[j] / raw.row(i).iter().sum::<f64>());
        let found = Arnoldi::default().eigenvalues(&walk).unwrap();
        let all = eigenvalues(&walk).unwrap();
        assert_eq!(found.len(), n.min(2));
        for (found, all) in found.iter().zip(&all) {
            assert!((found.value.modulus() - all.modulus()).abs() < 1e-8, "{n}: {found:?} {all:?}");
        }
        let gap = 1.0 - found.get(1).map_or(0.0, |v| v.value.modulus());
        assert!((spectral_gap(&walk).unwrap() - gap).abs() < 1e-8);
    }
    // A rotation: a complex pair on the unit circle, and 2 in its own direction.
    let rotation = Dense::new(3, vec![0.6, -0.8, 0.0, 0.8, 0.6, 0.0, 0.0, 0.0, 2.0]).unwrap();
    let found = Arnoldi { wanted: 3, ..Arnoldi::default() }.eigenvalues(&rotation).unwrap();
    assert!((found[0].value.re - 2.0).abs() < 1e-12 && (found[1].value.re - 0.6).abs() < 1e-12);
    assert!((found[1].value.im.abs() - 0.8).abs() < 1e-12);
    // The residual is measured: of exact pairs it is rounding, and not the zero of an estimate.
    assert!(found.iter().all(|found| found.residual < 1e-14) && found.iter().any(|found| found.residual > 0.0));
    let starved = Arnoldi { max_products: 3, ..Arnoldi::default() };
    assert!(matches!(starved.eigenvalues(&cycle(30)), Err(Error::Eigen { products: 3, .. })));
}

#[test]
fn singular_values_and_ranks() {
    let m = Dense::new(2, vec![0.0, 3.0, 4.0, 0.0]).unwrap();
    assert_near(&singular_values(&m).unwrap(), &[4.0, 3.0], 1e-14);
    let rank = Rank::of(&[2.0, 2.0, 2.0, 0.0]);
    assert!((rank.effective - 3.0).abs() < 1e-12 && rank.stable == 3.0 && rank.numerical == 3);
    assert_eq!(Rank::of(&[0.0; 3]).numerical, 0);
}

#[test]
fn angles_between_subspaces() {
    let e = |i: usize| (0..4).map(|j| f64::from(u8::from(i == j))).collect::<Vec<_>>();
    assert_eq!(sin_theta(&[e(0), e(1)], &[e(1), e(0)]).unwrap(), 0.0);
    assert_near(&[sin_theta(&[e(0), e(1)], &[e(2), e(3)]).unwrap()], &[2.0_f64.sqrt()], 1e-14);
    // Planes turned by a small angle keep their digits.
    let turned = [vec![1e-9_f64.cos(), 0.0, 1e-9_f64.sin(), 0.0], e(1)];
    assert_near(&[sin_theta(&[e(0), e(1)], &turned).unwrap()], &[1e-9], 1e-18);
    assert!(matches!(sin_theta(&[e(0)], &[e(0), e(1)]), Err(Error::Length { got: 2, expected: 1, .. })));
}

/// Queries and keys of a few clusters.
fn tokens(n: usize, d: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let centres: Vec<f32> = (0..4 * d).map(|_| rng.random_range(-1.0..1.0)).collect();
    (0..n * d).map(|at| centres[at / d % 4 * d + at % d] + 0.7 * rng.random_range(-1.0..1.0)).collect()
}

fn ssa(mut config: serde_json::Value) -> Mechanism {
    config["mechanism"] = "ssa".into();
    Mechanism::from_value(config).unwrap()
}

/// The graph that is never stored has the spectrum of the one that is, by each way to a transposed product.
#[test]
fn streamed_graphs_have_the_spectra_of_stored_ones() {
    let (n, d) = (90, 8);
    let (q, k) = (tokens(n, d, 1), tokens(n, d, 2));
    let tied = |tied: bool| (!tied).then_some(&k[..]);
    let cases = [
        Mechanism::from(Softmax::default().with_tied(true)),
        Mechanism::from(Softmax::default()),
        Mechanism::from(Fna::default().with_tied(true)),
        Mechanism::from(Infsa::default()),
        Mechanism::preset("soft").unwrap(),
        // Entries held, with what a plan may have beside equal clusters; then what is streamed: means, and causality.
        Mechanism::from(Ssa::default()),
        ssa(json!({"cluster_on": "dual", "routes": 2, "estimator": "raw", "scale": 0.5})),
        ssa(json!({"global_tokens": [3, 70], "outlier_globals": 2, "outlier_queries": 3})),
        ssa(json!({"estimator": "centroid"})),
        ssa(json!({"causal": true})),
        // What is told of presets holds of the values that they are, by whatever name: exchanged, held, and by the adjoint.
        Mechanism::from_json(r#"{"mechanism": "local", "window": 9}"#).unwrap(),
        Mechanism::from_json(r#"{"mechanism": "local", "window": 9, "sinks": 2}"#).unwrap(),
        Mechanism::preset("cosine").unwrap(),
        Mechanism::from_json(r#"{"mechanism": "relu", "structure": {"kind": "dense", "window": 9}}"#).unwrap(),
        Mechanism::from_json(r#"{"mechanism": "sigmoid", "structure": {"kind": "dense", "window": 9}}"#).unwrap(),
        Mechanism::preset("relu").unwrap().normalisation(Frobenius::default()),
        Mechanism::softmax().structure(Ssa::default()),
        Mechanism::softmax().series(Resolvent::default()),
        Mechanism::preset("nystromformer").unwrap(),
    ];
    for mechanism in cases {
        let k = tied(mechanism.tied);
        let streamed = StreamedReversible::new(&mechanism, n, &q, k).unwrap();
        let operator = AttentionOperator::new(&mechanism, n, &q, k, None, Strategy::Auto).unwrap();
        let stored = Dense::of(&operator).unwrap();
        let rows = operator.lse().unwrap_or_else(|| vec![0.0; n]);
        let kernel = Dense::from_fn(n, |i, j| stored.row(i)[j] * rows[i].exp());
        // The landmarks of soft leave weights below zero, which have no logarithm: symmetrise by hand.
        let half = Dense::from_fn(n, |i, j| 0.5 * (kernel.row(i)[j] + kernel.row(j)[i]));
        let degree: Vec<f64> = half.rows().map(|row| row.iter().sum()).collect();
        let normalised = Dense::from_fn(n, |i, j| half.row(i)[j] / (degree[i] * degree[j]).sqrt());
        let dense = symmetric_eigen(&normalised).unwrap();
        let found = Lanczos { largest: 5, tol: 1e-5, ..Lanczos::default() }.eigenpairs(&streamed).unwrap();
        let expected: Vec<f64> = dense.values.iter().rev().take(5).copied().collect();
        assert_near(&found.values, &expected, 2e-5);
        assert_near(&found.values[..1], &[1.0], 1e-5);
        let x: Vec<f64> = (0..n).map(|i| (i as f64).sin()).collect();
        assert_near(&streamed.apply(&x).unwrap(), &normalised.apply(&x).unwrap(), 1e-5);
        let total: f64 = degree.iter().sum();
        let shares: Vec<f64> = degree.iter().map(|d| d / total).collect();
        assert_near(&streamed.stationary(), &shares, 1e-5);
    }
    let signed = Mechanism::preset("laplacian-exact").unwrap();
    let refused = StreamedReversible::new(&signed, n, &q, Some(&k)).unwrap_err();
    assert!(matches!(refused, Error::Degree { .. }), "{refused}");
}
