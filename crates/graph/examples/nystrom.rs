//! The tables on landmark matrices in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example nystrom -- [iterations] [norms] [lengths] [solvers] [conditions] [--seed N]`
//!
//! Tokens are drawn, not trained: independent normal ones, and fields that vary smoothly over a grid, white noise blurred by
//! a Gaussian of so many cells and brought to unit variance, as patches of a picture would.

mod draws;

use draws::normal;
use resolvent_graph::{
    AttentionOperator, Dense, Lanczos, LinearOperator, Result,
    nystrom::{
        InverseNorms, Kernel, Start, conjugate_gradient_curve, newton_curve, nystrom_error, one_norm, residual_bound,
    },
    symmetric_eigen,
};
use resolvent_kernels::{Mechanism, Strategy};

const DIM: usize = 32;

fn main() -> Result<()> {
    draws::print(&[
        ("iterations", iterations),
        ("norms", norms),
        ("lengths", lengths),
        ("solvers", solvers),
        ("conditions", conditions),
    ])
}

/// "Softmax-free Linear Transformers", Fig. 5: residual and error of the inverse against the step.
fn iterations(seed: u64) -> Result<()> {
    let pooled = |correlation| pool(&field(56, DIM, correlation, 1, seed), 56, DIM, 8);
    let kinds = [
        ("pooled independent", pooled(0.0), DIM),
        ("pooled field, 8 cells", pooled(8.0), DIM),
        ("independent, D = 2", normal(49 * 2, 2, seed), 2),
    ];
    println!("| 49 landmarks | condition | below \\|A\\|/1400 | step | residual | bound | error of the inverse |");
    println!("|---|---|---|---|---|---|---|");
    for (name, landmarks, dim) in kinds {
        let a = gaussian(dim).gram(&landmarks, dim)?;
        let norms = InverseNorms::of(&a)?;
        let (one, most) = (one_norm(&a), norms.eigenvalues.last().copied().unwrap_or(1.0));
        let curve = newton_curve(&a, Start::Matrix(1.8 / (one * one)), 40)?;
        for step in [5, 10, 20, 30, 40] {
            let (at, bound) = (curve[step], residual_bound(one, most, step));
            let condition = norms.condition();
            let below = norms.below(one / 1400.0);
            println!(
                "| {name} | {condition:.0e} | {below} | {step} | {:.1e} | {bound:.1e} | {:.1e} |",
                at.residual, at.error
            );
        }
    }
    Ok(())
}

/// The same paper's Fig. 6b: the inverse's norm, with and without the degrees, against the number of landmarks.
fn norms(seed: u64) -> Result<()> {
    println!("| tokens | landmarks | \\|A^-1\\| | \\|D^-1/2 A^-1 D^-1/2\\| | ratio | mean degree |");
    println!("|---|---|---|---|---|---|");
    for correlation in [0.0, 4.0] {
        for side in [7, 14, 20, 32] {
            let a = gaussian(DIM).gram(&field(side, DIM, correlation, 3, seed), DIM)?;
            let norms = InverseNorms::of(&a)?;
            let degree = a.entries().iter().sum::<f64>() / a.len() as f64;
            let name = if correlation == 0.0 { "independent" } else { "field, 4 cells" };
            let ratio = norms.inverse / norms.normalised;
            println!(
                "| {name} | {} | {:.2e} | {:.2e} | {ratio:.1} | {degree:.1} |",
                a.len(),
                norms.inverse,
                norms.normalised
            );
        }
    }
    Ok(())
}

/// Spectral norms of the operators at three picture sizes: why SOFT does not transfer to other lengths.
fn lengths(seed: u64) -> Result<()> {
    println!("| field | operator | 56 x 56 | 96 x 96 | 128 x 128 | exponent in n |");
    println!("|---|---|---|---|---|---|");
    for share in [0.05, 0.1, 0.2] {
        for (name, fields) in [
            ("soft", r#""mechanism": "soft""#),
            ("soft-pp", r#""mechanism": "soft-pp""#),
            ("soft-pp, degree token", r#""mechanism": "soft-pp", "degree": "token""#),
        ] {
            let mut norms = Vec::new();
            for side in [56, 96, 128] {
                let json = format!(
                    r#"{{{fields}, "grid": [{side}, {side}], "landmarks": {{"kind": "pool", "ratio": 8}}, "inverse": "cholesky"}}"#
                );
                // The same kind of picture at another resolution: it varies over the same share of its side.
                let tokens: Vec<f32> =
                    field(side, DIM, share * side as f64, 4, seed).iter().map(|&x| x as f32).collect();
                let mechanism = Mechanism::from_json(&json)?;
                let graph = AttentionOperator::new(&mechanism, side * side, &tokens, None, None, Strategy::Fused)?;
                // Symmetric and positive: its norm is its largest eigenvalue.
                norms.push(
                    Lanczos { largest: 1, block: 2, tol: 1e-4, ..Default::default() }.eigenpairs(&graph)?.values[0],
                );
            }
            let exponent = (norms[2] / norms[0]).ln() / (128.0_f64 / 56.0).powi(2).ln();
            let [a, b, c] = [norms[0], norms[1], norms[2]];
            println!("| {:.0} % of the side | {name} | {a:.2} | {b:.2} | {c:.2} | {exponent:.2} |", 100.0 * share);
        }
    }
    Ok(())
}

/// "LaplacianFormer", Fig. 6: steps to an error of 1e-6 on a log-spaced spectrum, and what they cost; algorithm 2's start.
fn solvers(seed: u64) -> Result<()> {
    const N: usize = 49;
    println!(
        "| condition | from W / s^2 | from I / s | conjugate gradients | operations in n^3: from I, conjugate gradients |"
    );
    println!("|---|---|---|---|---|");
    let below = |errors: Vec<f64>| errors.iter().position(|&e| e < 1e-6);
    let shown = |steps: Option<usize>| steps.map_or("none in 80".into(), |n| n.to_string());
    let reflection = normal(N, 5, seed);
    let square: f64 = reflection.iter().map(|x| x * x).sum();
    let at = |i: usize, j: usize| f64::from(u8::from(i == j)) - 2.0 * reflection[i] * reflection[j] / square;
    for condition in [2.0_f64, 50.0, 1000.0] {
        let value = |m: usize| condition.powf(m as f64 / (N - 1) as f64 - 1.0);
        let w = Dense::from_fn(N, |i, j| (0..N).map(|m| at(i, m) * value(m) * at(m, j)).sum());
        let newton = |start| {
            Ok::<_, resolvent_graph::Error>(below(newton_curve(&w, start, 40)?.iter().map(|s| s.error).collect()))
        };
        let (matrix, identity) = (newton(Start::Matrix(1.0))?, newton(Start::Identity(1.0))?);
        let gradients = below(conjugate_gradient_curve(&w, &vec![1.0; N], 80)?);
        let cost = |steps: Option<usize>, of_step: usize| steps.map_or("-".into(), |n| (n * of_step).to_string());
        println!(
            "| {condition} | {} | {} | {} | {}, {} |",
            shown(matrix),
            shown(identity),
            shown(gradients),
            cost(identity, 4),
            cost(gradients, 2)
        );
    }
    println!("\n| landmarks | largest eigenvalue | steps of algorithm 2, start 2 W / s, until it overflows |");
    println!("|---|---|---|");
    for correlation in [0.0, 8.0] {
        let landmarks = pool(&field(56, DIM, correlation, 6, seed), 56, DIM, 8);
        let w = LAPLACIAN.gram(&landmarks, DIM)?;
        let most = symmetric_eigen(&w)?.values.last().copied().unwrap_or(1.0);
        let curve = newton_curve(&w, Start::Matrix(2.0 / most), 20)?;
        let overflow = curve.iter().position(|step| step.residual.is_infinite());
        let name = if correlation == 0.0 { "pooled independent" } else { "pooled field, 8 cells" };
        println!("| {name} | {most:.1} | {} |", overflow.map_or("none in 20".into(), |n| n.to_string()));
    }
    Ok(())
}

/// Condition numbers of both kernels among 49 pooled landmarks, and the error of going through them.
fn conditions(seed: u64) -> Result<()> {
    println!("| tokens | deviation | Laplacian | Gaussian | error of Laplacian | of Gaussian |");
    println!("|---|---|---|---|---|---|");
    for correlation in [0.0, 8.0] {
        for deviation in [0.01, 0.1, 0.3, 1.0] {
            let tokens: Vec<f64> = field(56, DIM, correlation, 7, seed).iter().map(|x| x * deviation).collect();
            let landmarks = pool(&tokens, 56, DIM, 8);
            let sample: Vec<f64> = tokens.chunks(DIM).step_by(7).flatten().copied().collect();
            let name = if correlation == 0.0 { "independent" } else { "field, 8 cells" };
            let mut columns = Vec::new();
            for kernel in [LAPLACIAN, gaussian(DIM)] {
                let a = kernel.gram(&landmarks, DIM)?;
                let condition =
                    InverseNorms::of(&a).map_or("not positive in f64".into(), |n| format!("{:.1e}", n.condition()));
                let error = nystrom_error(kernel, &sample, &sample, &landmarks, DIM, 1e-3)?;
                columns.push((condition, error.frobenius));
            }
            let [(l, l_error), (g, g_error)] = [&columns[0], &columns[1]];
            println!("| {name} | {deviation} | {l} | {g} | {l_error:.3} | {g_error:.3} |");
        }
    }
    Ok(())
}

const LAPLACIAN: Kernel = Kernel::Laplacian { lambda: 4.0 };

/// SOFT's default scale.
fn gaussian(dim: usize) -> Kernel {
    Kernel::Gaussian { scale: 0.5 / (dim as f64).sqrt() }
}

/// Tokens `[side * side, dim]` of unit variance that vary over about `correlation` cells, 0 for independent ones; the grid's
/// ends meet.
fn field(side: usize, dim: usize, correlation: f64, what: u64, seed: u64) -> Vec<f64> {
    let mut x = normal(side * side * dim, what, seed);
    if correlation > 0.0 {
        let reach = (3.0 * correlation).ceil() as isize;
        let weight = |d: isize| (-0.5 * (d as f64 / correlation).powi(2)).exp();
        let size = (-reach..=reach).map(|d| weight(d).powi(2)).sum::<f64>().sqrt();
        for along_rows in [false, true] {
            let blurred = (0..x.len()).map(|at| {
                let (token, channel) = (at / dim, at % dim);
                let (row, column) = ((token / side) as isize, (token % side) as isize);
                let wrapped = |i: isize| i.rem_euclid(side as isize) as usize;
                let neighbour = |d: isize| {
                    let (r, c) = if along_rows { (row, column + d) } else { (row + d, column) };
                    x[(wrapped(r) * side + wrapped(c)) * dim + channel]
                };
                (-reach..=reach).map(|d| weight(d) * neighbour(d)).sum::<f64>() / size
            });
            x = blurred.collect();
        }
    }
    x
}

/// The means of the tokens in windows of `ratio` by `ratio` cells.
fn pool(x: &[f64], side: usize, dim: usize, ratio: usize) -> Vec<f64> {
    let across = side / ratio;
    let mut pooled = vec![0.0; across * across * dim];
    for (token, x) in x.chunks_exact(dim).enumerate() {
        let window = token / side / ratio * across + token % side / ratio;
        pooled[window * dim..][..dim].iter_mut().zip(x).for_each(|(sum, x)| *sum += x / (ratio * ratio) as f64);
    }
    pooled
}
