//! The diagnostics of Nystrom operators against closed forms.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{
    Dense, Error,
    nystrom::{
        InverseNorms, Kernel, Start, conjugate_gradient_curve, newton_curve, nystrom_error, one_norm, residual_bound,
    },
    symmetric_eigen,
};

const GAUSSIAN: Kernel = Kernel::Gaussian { scale: 0.25 };
const LAPLACIAN: Kernel = Kernel::Laplacian { lambda: 4.0 };

fn tokens(seed: u64, count: usize, dim: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count * dim).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A symmetric matrix with the given eigenvalues: Householder's reflection of the diagonal.
fn with_spectrum(values: &[f64]) -> Dense {
    let n = values.len();
    let v = tokens(9, n, 1);
    let square: f64 = v.iter().map(|x| x * x).sum();
    let reflection = |i: usize, j: usize| f64::from(u8::from(i == j)) - 2.0 * v[i] * v[j] / square;
    Dense::from_fn(n, |i, j| (0..n).map(|m| reflection(i, m) * values[m] * reflection(m, j)).sum())
}

fn log_spaced(n: usize, condition: f64) -> Vec<f64> {
    (0..n).map(|i| condition.powf(i as f64 / (n - 1) as f64 - 1.0)).collect()
}

/// "LaplacianFormer", Fig. 6, as it comes out: the first step at which the error is below 1e-6.
#[test]
fn iterations_on_a_log_spaced_spectrum() {
    let steps = |errors: Vec<f64>| errors.iter().position(|&e| e < 1e-6);
    for (condition, of_square, of_identity, gradients) in
        [(2.0, Some(6), Some(5), 6..=11), (50.0, Some(15), Some(10), 34..=40), (1000.0, Some(24), Some(14), 80..=200)]
    {
        let a = with_spectrum(&log_spaced(49, condition));
        let newton = |start| newton_curve(&a, start, 30).unwrap().iter().map(|step| step.error).collect();
        // The largest eigenvalue is 1, so that both starts have factor 1.
        assert_eq!(steps(newton(Start::Matrix(1.0))), of_square, "condition {condition}");
        assert_eq!(steps(newton(Start::Identity(1.0))), of_identity, "condition {condition}");
        let ones = vec![1.0; 49];
        let found = steps(conjugate_gradient_curve(&a, &ones, 200).unwrap()).unwrap();
        assert!(gradients.contains(&found), "condition {condition}: {found} steps of conjugate gradients");
    }
}

#[test]
fn newton_is_a_filter_of_the_spectrum_and_keeps_its_bound() {
    let a = GAUSSIAN.gram(&tokens(1, 12, 4), 4).unwrap();
    let eigen = symmetric_eigen(&a).unwrap();
    let (one, most) = (one_norm(&a), *eigen.values.last().unwrap());
    let alpha = 1.8 / (one * one);
    let curve = newton_curve(&a, Start::Matrix(alpha), 20).unwrap();
    for (step, at) in curve.iter().enumerate() {
        // In each eigenvector the iterate is f(x) = (1 - (1 - alpha x^2)^(2^k)) / x.
        let left = |x: f64| x * (1.0 - alpha * x * x).powf(2_f64.powi(step as i32));
        let residual = eigen.values.iter().map(|&x| left(x).abs()).fold(0.0, f64::max) / most;
        assert!((at.residual - residual).abs() < 1e-9, "step {step}: {} instead of {residual}", at.residual);
        assert!(at.residual <= residual_bound(one, most, step) * (1.0 + 1e-9) || step == 0, "step {step}");
        let [error, size] = [1, 0].map(|only| {
            let miss = |x: f64| if only == 1 { left(x) / (x * x) } else { 1.0 / x };
            eigen.values.iter().map(|&x| miss(x).powi(2)).sum::<f64>().sqrt()
        });
        assert!((at.error - error / size).abs() < 1e-7, "step {step}: {} instead of {}", at.error, error / size);
    }
}

/// Algorithm 2 of "LaplacianFormer" as printed.
#[test]
fn the_printed_start_diverges() {
    let a = LAPLACIAN.gram(&tokens(2, 49, 8), 8).unwrap();
    let most = *symmetric_eigen(&a).unwrap().values.last().unwrap();
    assert!(most > 1.5);
    let curve = newton_curve(&a, Start::Matrix(2.0 / most), 12).unwrap();
    assert!(curve[12].error.is_infinite() && curve[12].residual.is_infinite());
    let ours = newton_curve(&a, Start::Identity(1.0 / one_norm(&a)), 30).unwrap();
    assert!(ours[30].error < 1e-9);
}

#[test]
fn norms_of_two_landmarks_are_known() {
    // Eigenvalues 1 - e and 1 + e; the degrees are both 1 + e.
    let e = 0.9;
    let norms = InverseNorms::of(&Dense::new(2, vec![1.0, e, e, 1.0]).unwrap()).unwrap();
    assert!((norms.inverse - 1.0 / (1.0 - e)).abs() < 1e-10);
    assert!((norms.normalised - 1.0 / ((1.0 - e) * (1.0 + e))).abs() < 1e-10);
    assert!((norms.condition() - (1.0 + e) / (1.0 - e)).abs() < 1e-9);
    assert_eq!([0.05, 0.5, 2.0].map(|x| norms.below(x)), [0, 1, 2]);
    let singular = Dense::new(2, vec![1.0; 4]).unwrap();
    assert!(matches!(InverseNorms::of(&singular), Err(Error::Singular { .. })));
}

#[test]
fn all_tokens_as_landmarks_lose_what_the_ridge_takes() {
    let (q, k) = (tokens(3, 7, 3), tokens(4, 9, 3));
    for kernel in [GAUSSIAN, LAPLACIAN] {
        let none = nystrom_error(kernel, &q, &k, &k, 3, 0.0).unwrap();
        assert!(none.frobenius < 1e-9 && none.largest < 1e-9, "{none:?}");
        assert!((none.effective_rank - 9.0).abs() < 1e-9);
        let some = nystrom_error(kernel, &q, &k, &k[..9], 3, 1e-3).unwrap();
        assert!(some.frobenius > 0.01 && some.effective_rank < 3.0, "{some:?}");
    }
    assert!(matches!(nystrom_error(GAUSSIAN, &q[..5], &k, &k, 3, 0.0), Err(Error::Length { .. })));
    assert!(matches!(nystrom_error(GAUSSIAN, &q, &k, &[k[0]; 6], 3, -1.0), Err(Error::Singular { .. })));
}
