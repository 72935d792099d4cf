//! The tables on more and fewer clusters, asymmetry and projections in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release -p resolvent-graph --example ssa -- [clusters] [asymmetry] [projections] [--seed N]`
//!
//! "Spectral Sparse Attention", section 4.4, on drawn tokens, queries being the keys: the leading eigenvectors, as many as there
//! are clusters, and the gap of the sparse graph beside the dense one's; section 4.5 and corollary 39 on drawn queries and keys.

mod draws;

use draws::normal;
use resolvent_graph::{AttentionOperator, Dense, Result, Reversible, Spectrum, sin_theta};
use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{Estimator, Ssa},
};

const TOKENS: usize = 512;
const DIM: usize = 32;
/// Clusters of the planted tokens.
const PLANTED: usize = 16;

/// The spectrum of a mechanism's symmetrised graph on tokens that are queries and keys.
fn spectrum(mechanism: &Mechanism, x: &[f32]) -> Result<Spectrum> {
    let operator = AttentionOperator::new(mechanism, TOKENS, x, Some(x), None, Strategy::Auto)?;
    let (weights, rows) = (Dense::of(&operator)?, operator.lse().unwrap_or_default());
    let logs = weights.entries().iter().enumerate().map(|(at, w)| w.ln() + rows[at / TOKENS]);
    Reversible::from_log_weights(TOKENS, &logs.collect::<Vec<_>>())?.spectrum()
}

fn softmax() -> Mechanism {
    Mechanism::softmax()
}

fn ssa(clusters: usize, estimator: Estimator) -> Mechanism {
    Mechanism::from(Ssa::default().with_clusters(Some(clusters)).with_estimator(estimator))
}

fn main() -> Result<()> {
    draws::print(&[("clusters", clusters), ("asymmetry", asymmetry), ("projections", projections)])
}

/// Inner products of rows of `dim` channels.
fn products(q: &[f64], k: &[f64], dim: usize) -> Vec<f64> {
    let dot = |q: &[f64], k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
    q.chunks_exact(dim).flat_map(|q| k.chunks_exact(dim).map(move |k| dot(q, k))).collect()
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// How far `exp(S - max S)` is from its transpose, and from the mean of both, over its norm; scores of queries and keys of their own.
fn asymmetry(seed: u64) -> Result<()> {
    const N: usize = 256;
    let [q, k] = [4, 5].map(|what| normal(N * DIM, what, seed));
    println!("| deviation of the scores | from the transpose | from the mean of both |\n|---|---|---|");
    for deviation in [0.25, 0.5, 1.0, 2.0] {
        let mut w = products(&q, &k, DIM);
        let most = w.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        w.iter_mut().for_each(|w| *w = ((*w - most) * deviation / (DIM as f64).sqrt()).exp());
        let apart = norm((0..N * N).map(|at| w[at] - w[at % N * N + at / N])) / norm(w.iter().copied());
        println!("| {deviation} | {apart:.3} | {:.3} |", 0.5 * apart);
    }
    Ok(())
}

/// What scores of queries and keys of 64 channels and unit variance lose to a random projection to fewer, or more, channels.
fn projections(seed: u64) -> Result<()> {
    const N: usize = 256;
    const CHANNELS: usize = 64;
    let [q, k] = [6, 7].map(|what| normal(N * CHANNELS, what, seed));
    let scores = products(&q, &k, CHANNELS);
    println!("| projected to | error of a score | factor on a weight |\n|---|---|---|");
    for channels in [16, 64, 256, 1024] {
        let map = normal(channels * CHANNELS, 8, seed);
        let [q, k] = [&q, &k].map(|x| products(x, &map, CHANNELS));
        let far = products(&q, &k, channels).into_iter().zip(&scores).map(|(p, s)| p / channels as f64 - s);
        let error = norm(far) / N as f64 / (CHANNELS as f64).sqrt();
        println!("| {channels} | {error:.3} | {:.2} |", error.exp());
    }
    Ok(())
}

fn clusters(seed: u64) -> Result<()> {
    println!("| tokens | remote edges | clusters | sines / sqrt(k) | dense gap | sparse gap | ratio |");
    println!("|---|---|---|---|---|---|---|");
    for (name, x) in [("independent", independent(seed)), ("16 planted clusters", planted(seed))] {
        let dense = spectrum(&softmax(), &x)?;
        for (how, estimator) in [("as sampled", Estimator::Raw), ("weighted", Estimator::Importance)] {
            for k in [4, 8, 16, 32] {
                let sparse = spectrum(&ssa(k, estimator), &x)?;
                let sines = sin_theta(dense.subspace(k), sparse.subspace(k))? / (k as f64).sqrt();
                let (own, other) = (dense.gap(), sparse.gap());
                println!("| {name} | {how} | {k} | {sines:.3} | {own:.2e} | {other:.2e} | {:.2} |", own / other);
            }
        }
    }
    Ok(())
}

fn independent(seed: u64) -> Vec<f32> {
    normal(TOKENS * DIM, 1, seed).into_iter().map(|x| x as f32).collect()
}

/// Tokens around sixteen centres, three times as far apart as the tokens of one are spread.
fn planted(seed: u64) -> Vec<f32> {
    let (centres, tokens) = (normal(PLANTED * DIM, 2, seed), normal(TOKENS * DIM, 3, seed));
    let at = |token: usize, channel: usize| 1.5 * centres[token % PLANTED * DIM + channel];
    tokens.iter().enumerate().map(|(i, x)| (at(i / DIM, i % DIM) + 0.5 * x) as f32).collect()
}
