//! The tables on spectra and paths in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example fna -- [spectrum] [densities] [steps] [edges] [sharpness] [lengths] [--seed N]`
//!
//! "Fractional neural attention for efficient multiscale sequence processing", figures 1, 2, 5a, 5d and 5e, on drawn tokens: the
//! same comparisons at equal sharpness beside those at the kernels' own widths.

mod draws;

use std::f64::consts::PI;

use draws::normal;
use resolvent_graph::{
    Dense, LinearOperator, Result, Reversible, generator, matched_bandwidth, row_perplexity, shortest_paths,
    spectral_gap,
};

fn main() -> Result<()> {
    draws::print(&[
        ("spectrum", spectrum),
        ("densities", densities),
        ("steps", steps),
        ("edges", edges),
        ("sharpness", sharpness),
        ("lengths", lengths),
    ])
}

/// How two tokens relate.
#[derive(Debug, Clone, Copy)]
enum Score {
    /// `(1 + r / width)^-(d + alpha)`.
    Levy(f64),
    /// `exp(-(r / width)^2)`.
    Gaussian,
    /// `exp(q . k / width)`.
    Dot,
}

impl Score {
    /// The logarithm of the weight at a distance `r` in `d` dimensions.
    fn of_distance(self, r: f64, width: f64, d: f64) -> f64 {
        match self {
            Self::Levy(alpha) => -(d + alpha) * (r / width).ln_1p(),
            _ => -(r / width).powi(2),
        }
    }

    /// The rows of the weights among tokens `x [n, d]`, each with a sum of one.
    fn weights(self, x: &[f64], d: usize, width: f64) -> Dense {
        let n = x.len() / d;
        let row = |i: usize| &x[i * d..][..d];
        let score = |i: usize, j: usize| match self {
            Self::Dot => row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum::<f64>() / width,
            _ => {
                let square: f64 = row(i).iter().zip(row(j)).map(|(a, b)| (a - b).powi(2)).sum();
                self.of_distance(square.sqrt(), width, d as f64)
            }
        };
        let rows: Vec<f64> = (0..n).flat_map(|i| normalised((0..n).map(|j| score(i, j)).collect())).collect();
        Dense::from_fn(n, |i, j| rows[i * n + j])
    }
}

/// `exp` of the scores, over their sum.
fn normalised(mut scores: Vec<f64>) -> Vec<f64> {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - most).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
    scores
}

/// Fig. 2a: eigenvalues of the generator on a circle of 500 points, length scale 0.01, geodesic distances; the slope of their
/// logarithm against that of the frequency.
fn spectrum(_: u64) -> Result<()> {
    const POINTS: usize = 500;
    const WIDTH: f64 = 0.01;
    let windows = [(1, 10), (1, 25), (5, 50), (10, 100), (100, 249)];
    println!("| alpha | lambda_1 | k 1-10 | 1-25 | 5-50 | 10-100 | 100-249 |\n|---|---|---|---|---|---|---|");
    for alpha in [1.2, 2.0] {
        let score = if alpha < 2.0 { Score::Levy(alpha) } else { Score::Gaussian };
        let log = |i: usize, j: usize| {
            let steps = i.abs_diff(j).min(POINTS - i.abs_diff(j));
            score.of_distance(steps as f64 * 2.0 * PI / POINTS as f64, WIDTH, 1.0)
        };
        let logs: Vec<f64> = (0..POINTS * POINTS).map(|at| log(at / POINTS, at % POINTS)).collect();
        let mut lambda = generator(&Reversible::from_log_weights(POINTS, &logs)?.spectrum()?, WIDTH.powf(alpha));
        lambda.sort_by(f64::total_cmp);
        // Both directions of a frequency have one eigenvalue.
        let of = |k: usize| ((k as f64).ln(), lambda[2 * k - 1].ln());
        let slopes = windows.map(|(from, to)| format!("{:.3}", slope(&(from..=to).map(of).collect::<Vec<_>>())));
        println!("| {alpha} | {:.4} | {} |", lambda[1], slopes.join(" | "));
    }
    Ok(())
}

/// Eq. 40 to 42: tokens on a circle that are up to nineteen times as dense on one side as on the other, their density divided out with an exponent.
/// Where it does not matter the eigenvalues of the generator come in pairs, one for each direction of a frequency, and those of the second are
/// `2^alpha` times those of the first; and the stationary distribution is the density itself, or uniform.
fn densities(_: u64) -> Result<()> {
    const POINTS: usize = 500;
    const WIDTH: f64 = 0.1;
    /// The density is `1 + UNEVEN cos`.
    const UNEVEN: f64 = 0.9;
    // The angle below which a share of the points lies, by bisection.
    let below = |x: f64| (x + UNEVEN * x.sin()) / (2.0 * PI);
    let angle = |share: f64| {
        let halve = |(low, high): (f64, f64)| {
            let middle = 0.5 * (low + high);
            if below(middle) < share { (middle, high) } else { (low, middle) }
        };
        (0..60).fold((0.0, 2.0 * PI), |range, _| halve(range)).0
    };
    println!(
        "| alpha | exponent | apart in the first pair | second over first | 2^alpha | visits, densest over sparsest token |"
    );
    println!("|---|---|---|---|---|---|");
    for alpha in [1.2, 2.0] {
        let score = if alpha < 2.0 { Score::Levy(alpha) } else { Score::Gaussian };
        let at: Vec<f64> = (0..POINTS).map(|n| angle((n as f64 + 0.5) / POINTS as f64)).collect();
        let log = |i: usize, j: usize| {
            let apart = (at[i] - at[j]).abs();
            score.of_distance(apart.min(2.0 * PI - apart), WIDTH, 1.0)
        };
        let logs: Vec<f64> = (0..POINTS * POINTS).map(|n| log(n / POINTS, n % POINTS)).collect();
        let density = Reversible::from_log_weights(POINTS, &logs)?.log_degree().to_vec();
        for exponent in [0.0, 0.5, 1.0] {
            let divided = |(n, log): (usize, &f64)| log - exponent * (density[n / POINTS] + density[n % POINTS]);
            let logs: Vec<f64> = logs.iter().enumerate().map(divided).collect();
            let graph = Reversible::from_log_weights(POINTS, &logs)?;
            let mut lambda = generator(&graph.spectrum()?, WIDTH.powf(alpha));
            lambda.sort_by(f64::total_cmp);
            let [first, second] = [1, 3].map(|n| 0.5 * (lambda[n] + lambda[n + 1]));
            // The tokens lie closest at an angle of zero, where the first of them is, and farthest apart half way round.
            let (apart, stationary) = ((lambda[2] - lambda[1]) / first, graph.stationary());
            let (ratio, expected, visits) = (second / first, 2_f64.powf(alpha), stationary[0] / stationary[POINTS / 2]);
            println!("| {alpha} | {exponent} | {apart:.3} | {ratio:.2} | {expected:.2} | {visits:.2} |");
        }
    }
    Ok(())
}

/// Figs. 2b and 2c: the share of the pairs, in percent, of a weight that is drawn as an edge, within three clusters of six tokens on the
/// plane and between them.
fn edges(seed: u64) -> Result<()> {
    const CENTRES: [[f64; 2]; 3] = [[-3.0, 0.0], [3.0, 0.0], [0.0, 1.732]];
    const EACH: usize = 6;
    const DRAWN: f64 = 3.12e-5;
    let n = CENTRES.len() * EACH;
    let noise = normal(2 * n, 4, seed);
    let x: Vec<f64> = (0..2 * n).map(|at| CENTRES[at / 2 / EACH][at % 2] + 0.5 * noise[at]).collect();
    println!("| kernel | within | between | largest between |\n|---|---|---|---|");
    for (kernel, score, width, _) in kernels(2) {
        let weights = score.weights(&x, 2, width);
        let of = |same: bool| {
            let pairs = (0..n * n).filter(|at| at / n != at % n && (at / n / EACH == at % n / EACH) == same);
            pairs.map(|at| weights.entries()[at]).collect::<Vec<_>>()
        };
        let [within, between] = [of(true), of(false)];
        let share = |w: &[f64]| 100.0 * w.iter().filter(|&&w| w > DRAWN).count() as f64 / w.len() as f64;
        let largest = between.iter().copied().fold(0.0, f64::max);
        println!("| {kernel} | {:.1} | {:.1} | {largest:.2e} |", share(&within), share(&between));
    }
    Ok(())
}

/// Fig. 1: the steps of a walker among tokens that fill a square, its kernel as wide as makes half of them shorter than two places: the
/// share of long ones, and how far the walker is from the middle in the square mean, after 16 steps over after one.
fn steps(seed: u64) -> Result<()> {
    const SIDE: usize = 32;
    const MEDIAN: f64 = 2.0;
    const N: usize = SIDE * SIDE;
    let noise = normal(2 * N, 5, seed);
    let place = |at: usize| [at / 2 % SIDE, at / 2 / SIDE][at % 2];
    let x: Vec<f64> = (0..2 * N).map(|at| place(at) as f64 + 0.2 * noise[at]).collect();
    let far = |i: usize, j: usize| (x[2 * i] - x[2 * j]).hypot(x[2 * i + 1] - x[2 * j + 1]);
    // The share of all steps, those that stay left out, that are longer than `least`.
    let share = |weights: &Dense, least: f64| {
        let sum = |keep: &dyn Fn(f64) -> bool| -> f64 {
            let pairs = (0..N * N).filter(|at| at / N != at % N && keep(far(at / N, at % N)));
            pairs.map(|at| weights.entries()[at]).sum()
        };
        sum(&|r| r > least) / sum(&|_| true)
    };
    println!(
        "| kernel | beyond 3 medians, % | beyond 6 medians, % | spread after 16 steps over one |\n|---|---|---|---|"
    );
    for (kernel, score) in
        [("levy 1.2", Score::Levy(1.2)), ("levy 1.6", Score::Levy(1.6)), ("gaussian", Score::Gaussian)]
    {
        let [mut narrow, mut wide] = [0.01, 100.0_f64];
        for _ in 0..24 {
            let width = (narrow * wide).sqrt();
            let longer = share(&score.weights(&x, 2, width), MEDIAN) > 0.5;
            *(if longer { &mut wide } else { &mut narrow }) = width;
        }
        let weights = score.weights(&x, 2, wide);
        let middle = N / 2 + SIDE / 2;
        let mut walker: Vec<f64> = (0..N).map(|token| f64::from(u8::from(token == middle))).collect();
        let mut spreads = Vec::new();
        for _ in 0..16 {
            walker = (0..N).map(|j| (0..N).map(|i| walker[i] * weights.row(i)[j]).sum()).collect();
            spreads.push((0..N).map(|j| walker[j] * far(middle, j).powi(2)).sum::<f64>());
        }
        let [three, six] = [3.0, 6.0].map(|medians| 100.0 * share(&weights, medians * MEDIAN));
        println!("| {kernel} | {three:.2} | {six:.2} | {:.1} |", spreads[15] / spreads[0]);
    }
    Ok(())
}

/// The slope of the line of least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let (x, y) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let above: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    above / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>()
}

/// What is compared: a name, the score, its own width in `d` dimensions, and its range of widths.
fn kernels(d: usize) -> [(&'static str, Score, f64, (f64, f64)); 3] {
    let root = (d as f64).sqrt();
    let text = root / (std::f64::consts::LN_2 / d as f64).exp_m1();
    [
        ("levy 1.2", Score::Levy(1.2), text, (1e-4, 1e4)),
        ("gaussian", Score::Gaussian, root, (1e-2, 1e3)),
        ("dot product", Score::Dot, root, (1e-3, 1e4)),
    ]
}

fn mean_perplexity(weights: &Dense) -> Result<f64> {
    Ok(row_perplexity(weights)?.iter().sum::<f64>() / weights.len() as f64)
}

/// Figs. 5a and 5d: spectral gap and hops on 200 tokens of 8 channels, at the kernels' own widths and at one perplexity (for
/// which the tokens' scale does not matter).
fn sharpness(seed: u64) -> Result<()> {
    const N: usize = 200;
    const D: usize = 8;
    println!("| tokens | width | kernel | perplexity | gap | mean hops | most |\n|---|---|---|---|---|---|---|");
    for (name, size, targets) in [("unit normal", 1.0, &[150.0, 20.0, 2.6][..]), ("3 times that", 3.0, &[])] {
        let x: Vec<f64> = normal(N * D, 5, seed).into_iter().map(|x| size * x).collect();
        let row = |target: Option<f64>| -> Result<()> {
            for (kernel, score, own, range) in kernels(D) {
                let perplexity = |width: f64| mean_perplexity(&score.weights(&x, D, width));
                let width = match target {
                    Some(target) => matched_bandwidth(target, range, perplexity)?,
                    None => own,
                };
                let weights = score.weights(&x, D, width);
                let (hops, gap) = (shortest_paths(&weights)?.summary(), spectral_gap(&weights)?);
                let rows = mean_perplexity(&weights)?;
                let how = target.map_or("own".into(), |target| format!("matched at {target}"));
                println!("| {name} | {how} | {kernel} | {rows:.1} | {gap:.3e} | {:.3} | {} |", hops.mean, hops.max);
            }
            Ok(())
        };
        row(None)?;
        for &target in targets {
            row(Some(target))?;
        }
    }
    Ok(())
}

/// Fig. 5e: hops against the number of tokens, of 8 channels and twice unit variance.
fn lengths(seed: u64) -> Result<()> {
    const D: usize = 8;
    println!("| tokens | width | kernel | perplexity | mean hops | most |\n|---|---|---|---|---|---|");
    for n in [100, 200, 300, 400, 500] {
        let x: Vec<f64> = normal(n * D, n as u64, seed).into_iter().map(|x| 2.0 * x).collect();
        for (kernel, score, own, range) in kernels(D) {
            let perplexity = |width: f64| mean_perplexity(&score.weights(&x, D, width));
            let matched = matched_bandwidth(n as f64 / 20.0, range, perplexity)?;
            for (how, width) in [("own", own), ("matched at n / 20", matched)] {
                let weights = score.weights(&x, D, width);
                let (hops, rows) = (shortest_paths(&weights)?.summary(), mean_perplexity(&weights)?);
                println!("| {n} | {how} | {kernel} | {rows:.1} | {:.3} | {} |", hops.mean, hops.max);
            }
        }
    }
    Ok(())
}
