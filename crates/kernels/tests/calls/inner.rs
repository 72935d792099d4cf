//! The inner loops that are measured by themselves, against f64 at every level.

use resolvent_kernels::{
    inner::{Pair, exponentials, pairs},
    simd::Level,
};

/// Numbers in [-1.5, 1.5] without a pattern.
fn entries(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|n| 1.5 * (((n * n + seed) * 37) as f32).sin()).collect()
}

#[test]
fn pairs_are_products_and_kernels_of_two_rows() {
    for level in Level::available() {
        for (rows, cols, dim) in [(1, 16, 1), (70, 32, 5), (129, 48, 24)] {
            let (x, marks) = (entries(rows * dim, 1), entries(dim * cols, 2));
            for pair in [Pair::Product, Pair::Laplacian, Pair::Gaussian] {
                let mut out = vec![f32::NAN; rows * cols];
                pairs(level, pair, &x, &marks, dim, &mut out);
                for (n, got) in out.iter().enumerate() {
                    let both =
                        (0..dim).map(|c| (f64::from(x[n / cols * dim + c]), f64::from(marks[c * cols + n % cols])));
                    let expected = match pair {
                        Pair::Product => both.map(|(x, y)| x * y).sum::<f64>(),
                        Pair::Laplacian => (-both.map(|(x, y)| (x - y).abs()).sum::<f64>()).exp(),
                        Pair::Gaussian => (-both.map(|(x, y)| (x - y).powi(2)).sum::<f64>()).exp(),
                    };
                    let error = (f64::from(*got) - expected).abs();
                    // Terms of a product cancel; an exponential loses digits with its exponent.
                    let tolerance = match pair {
                        Pair::Product => 1e-6 + 1e-5 * expected.abs(),
                        _ => f64::from(f32::MIN_POSITIVE) + expected * (1e-6 - 4e-7 * expected.ln()),
                    };
                    assert!(error <= tolerance, "{pair:?} on {}: {got}, not {expected}", level.name());
                }
            }
        }
    }
}

#[test]
fn exponentials_are_powers_of_two() {
    for level in Level::available() {
        let x: Vec<f32> = (0..4096).map(|n| -125.0 + 250.0 * n as f32 / 4096.0).collect();
        let mut out = vec![f32::NAN; x.len()];
        exponentials(level, &x, &mut out);
        for (x, got) in x.iter().zip(&out) {
            let expected = f64::from(*x).exp2();
            assert!((f64::from(*got) / expected - 1.0).abs() < 3e-7, "2^{x} on {}: {got}", level.name());
        }
    }
}
