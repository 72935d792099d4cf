//! The table on more and fewer clusters in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release -p resolvent-graph --example ssa -- [--seed N]`
//!
//! "Spectral Sparse Attention", section 4.4, on drawn tokens, queries being the keys: the leading eigenvectors, as many as there
//! are clusters, and the gap of the sparse graph beside the dense one's.

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
    Mechanism::Softmax(Default::default())
}

fn ssa(clusters: usize, estimator: Estimator) -> Mechanism {
    Mechanism::Ssa(Ssa::default().with_clusters(Some(clusters)).with_estimator(estimator))
}

fn main() -> Result<()> {
    draws::print(&[("clusters", clusters)])
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
