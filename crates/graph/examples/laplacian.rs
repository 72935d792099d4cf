//! The tables on what "LaplacianFormer" claims of its kernel in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example laplacian -- [distances] [gradients] [injective] [rotary] [growth] [--seed N]`
//!
//! Tokens are drawn, not trained: independent normal ones.

mod draws;

use draws::normal;
use resolvent_graph::{AttentionOperator, LinearOperator, Result, nystrom::Kernel};
use resolvent_kernels::{Mechanism, Strategy};

const LAMBDA: f64 = 4.0;
const LAPLACIAN: Kernel = Kernel::Laplacian { lambda: LAMBDA };

fn main() -> Result<()> {
    draws::print(&[
        ("distances", distances),
        ("gradients", gradients),
        ("injective", injective),
        ("rotary", rotary),
        ("growth", growth),
    ])
}

/// The Gaussian of SOFT's default width, `exp(-|t|^2 / (2 sqrt(d)))`.
fn gaussian(dim: usize) -> Kernel {
    Kernel::Gaussian { scale: 0.5 / (dim as f64).sqrt() }
}

/// Fig. 1: how sums of magnitudes and of squares of differences are spread over pairs of tokens: the deviation over the mean, the excess
/// kurtosis, and the largest of a thousand over the median; of tokens of one size, and with one in twenty five five times as long.
fn distances(seed: u64) -> Result<()> {
    const PAIRS: usize = 20_000;
    println!(
        "| tokens | channels | distance | deviation / mean | kurtosis | 99.9 % / median |\n|---|---|---|---|---|---|"
    );
    for (tokens, factor) in [("of one size", 1.0), ("4 % five times as long", 5.0)] {
        for dim in [8, 32, 64] {
            let drawn = normal(2 * PAIRS * dim, 11 + dim as u64, seed);
            let size = |token: usize| if token.is_multiple_of(25) { factor } else { 1.0 };
            let pair = |(n, x): (usize, &[f64])| {
                let (q, k) = x.split_at(dim);
                let difference = q.iter().zip(k).map(|(q, k)| q * size(2 * n) - k * size(2 * n + 1));
                difference.fold([0.0, 0.0], |[sum, square], t| [sum + t.abs(), square + t * t])
            };
            let pairs: Vec<[f64; 2]> = drawn.chunks_exact(2 * dim).enumerate().map(pair).collect();
            for (name, which) in [("magnitudes (L1)", 0), ("squares", 1)] {
                let mut x: Vec<f64> = pairs.iter().map(|pair| pair[which]).collect();
                x.sort_by(f64::total_cmp);
                let mean = x.iter().sum::<f64>() / PAIRS as f64;
                let moment = |power: i32| x.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / PAIRS as f64;
                let (spread, kurtosis) = (moment(2).sqrt() / mean, moment(4) / moment(2).powi(2) - 3.0);
                let tail = x[PAIRS * 999 / 1000] / x[PAIRS / 2];
                println!("| {tokens} | {dim} | {name} | {spread:.3} | {kurtosis:.2} | {tail:.2} |");
            }
        }
    }
    Ok(())
}

/// Proposition 1: the length of the kernel's gradient in a query, over pairs of tokens; the claim is about `sqrt(d) / lambda`.
fn gradients(seed: u64) -> Result<()> {
    const PAIRS: usize = 20_000;
    println!("| channels | token deviation | Laplacian | Gaussian | Laplacian over Gaussian | sqrt(d) / lambda |");
    println!("|---|---|---|---|---|---|");
    for dim in [8, 32, 64] {
        for deviation in [0.01, 0.1, 1.0] {
            let drawn = normal(2 * PAIRS * dim, dim as u64, seed);
            let (mut laplacian, mut normal) = (0.0, 0.0);
            for pair in drawn.chunks_exact(2 * dim) {
                let (q, k) = pair.split_at(dim);
                let difference = || q.iter().zip(k).map(|(q, k)| deviation * (q - k));
                let (sum, square) = difference().fold((0.0, 0.0), |(sum, square), t| (sum + t.abs(), square + t * t));
                let width = (dim as f64).sqrt();
                laplacian += (-sum / LAMBDA).exp() * width / LAMBDA;
                normal += (-square / (2.0 * width)).exp() * square.sqrt() / width;
            }
            let [laplacian, normal] = [laplacian, normal].map(|sum| sum / PAIRS as f64);
            let (ratio, limit) = (laplacian / normal, (dim as f64).sqrt() / LAMBDA);
            println!("| {dim} | {deviation} | {laplacian:.2e} | {normal:.2e} | {ratio:.2e} | {limit:.2} |");
        }
    }
    Ok(())
}

/// Proposition 2: how far the rows of kernel values of two queries are from each other that are one apart, by where they are: outside of
/// the box that 49 keys lie in by two channels, moved along one and back along the other; and moved likewise among the keys.
fn injective(seed: u64) -> Result<()> {
    const KEYS: usize = 49;
    println!("| channels | where the queries are | kernel | largest value of the rows | largest difference |");
    println!("|---|---|---|---|---|");
    for dim in [4, 8, 32] {
        let keys = normal(KEYS * dim, 7 + dim as u64, seed);
        let beyond = keys.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        for (place, at) in [("outside of the keys' box", 1.1 * beyond), ("among the keys", 0.0)] {
            let query = |moved: f64| {
                let mut query = keys[..dim].to_vec();
                (query[0], query[1]) = (at + 0.5 + moved, at + 0.5 - moved);
                query
            };
            for (name, kernel) in [("Laplacian", LAPLACIAN), ("Gaussian", gaussian(dim))] {
                let rows = [query(0.0), query(0.5)]
                    .map(|query| keys.chunks_exact(dim).map(|key| kernel.of(&query, key)).collect::<Vec<_>>());
                let largest = rows.iter().flatten().copied().fold(0.0, f64::max);
                // Less is the rounding of f64.
                let off = rows[0].iter().zip(&rows[1]).map(|(a, b)| (a - b).abs()).fold(1e-16, f64::max);
                println!("| {dim} | {place} | {name} | {largest:.2e} | {off:.2e} |");
            }
        }
    }
    Ok(())
}

/// Rotary positions: the distance of a query and a key that stay three positions apart, at 56 places.
fn rotary(seed: u64) -> Result<()> {
    const DIM: usize = 32;
    println!("| distance | mean | deviation over the places | largest over least kernel value |");
    println!("|---|---|---|---|");
    let (q, k) = (normal(DIM, 1, seed), normal(DIM, 2, seed));
    let places = || (0..56).map(|at| (rotated(&q, at), rotated(&k, at + 3)));
    for (name, kernel) in [("sum of magnitudes (L1)", LAPLACIAN), ("sum of squares", gaussian(DIM))] {
        let distances: Vec<f64> = places().map(|(q, k)| -kernel.of(&q, &k).ln()).collect();
        let of_kernel = distances.iter().copied();
        let spread = of_kernel.clone().fold(f64::MIN, f64::max) - of_kernel.fold(f64::MAX, f64::min);
        let unit = if name.contains("L1") { LAMBDA } else { 2.0 * (DIM as f64).sqrt() };
        let mean = distances.iter().sum::<f64>() * unit / distances.len() as f64;
        let variance = distances.iter().map(|x| (x * unit - mean).powi(2)).sum::<f64>() / distances.len() as f64;
        println!("| {name} | {mean:.2} | {:.2e} | {:.3} |", variance.sqrt(), spread.exp());
    }
    Ok(())
}

/// `x` turned to a position: neighbouring channels by `10000^(-2 p / d)` a position.
fn rotated(x: &[f64], position: usize) -> Vec<f64> {
    let turn = |(p, pair): (usize, &[f64])| {
        let angle = position as f64 * 10_000_f64.powf(-2.0 * p as f64 / x.len() as f64);
        let (sin, cos) = angle.sin_cos();
        [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos]
    };
    x.chunks_exact(2).enumerate().flat_map(turn).collect()
}

/// Whitened weights are of order one: the root mean square of the output, of values of 0.165, against the number of tokens.
fn growth(seed: u64) -> Result<()> {
    const DIM: usize = 32;
    println!("| mechanism | weight scale | 49 | 196 | 784 | exponent in n |");
    println!("|---|---|---|---|---|---|");
    for mechanism in ["laplacian-exact", "laplacian"] {
        for scale in ["unit", "inv-n"] {
            let mut sizes = Vec::new();
            for side in [7_usize, 14, 28] {
                let n = side * side;
                let landmarks = if mechanism == "laplacian" {
                    format!(r#", "grid": [{side}, {side}], "landmarks": {{"kind": "pool", "count": 49}}"#)
                } else {
                    String::new()
                };
                let json = format!(r#"{{"mechanism": "{mechanism}", "weight_scale": "{scale}"{landmarks}}}"#);
                let tokens: Vec<f32> = normal(n * DIM, 3, seed).iter().map(|&x| 0.16 * x as f32).collect();
                let graph = AttentionOperator::new(
                    &Mechanism::from_json(&json)?,
                    n,
                    &tokens,
                    Some(&tokens),
                    None,
                    Strategy::Auto,
                )?;
                let values: Vec<f64> = normal(n, 4, seed).iter().map(|x| 0.165 * x).collect();
                let out = graph.apply(&values)?;
                sizes.push((out.iter().map(|x| x * x).sum::<f64>() / n as f64).sqrt());
            }
            let exponent = (sizes[2] / sizes[0]).ln() / 16_f64.ln();
            println!("| {mechanism} | {scale} | {:.3} | {:.3} | {:.3} | {exponent:.2} |", sizes[0], sizes[1], sizes[2]);
        }
    }
    Ok(())
}
