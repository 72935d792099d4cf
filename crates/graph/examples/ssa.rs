//! The tables on the spectra of clustered graphs in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release -p resolvent-graph --example ssa -- [clusters] [theorem]`
//!
//! "Spectral Sparse Attention", section 4.4 and theorem 34, on drawn tokens, queries being the keys.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{
    AttentionOperator, ClusterFit, Dense, Power, Result, Reversible, Spectrum, sin_theta, spectral_norm,
};
use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{Estimator, Ssa},
};

const TOKENS: usize = 512;
const DIM: usize = 32;
/// Clusters of the planted tokens.
const PLANTED: usize = 16;

/// A table's name, and what prints it.
type Table = (&'static str, fn() -> Result<()>);

fn main() -> Result<()> {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    let tables: [Table; 2] = [("clusters", clusters), ("theorem", theorem)];
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            println!("\n## {name}\n");
            table()?;
        }
    }
    Ok(())
}

/// A mechanism's graph on tokens that are queries and keys, before its rows are divided.
struct Graph {
    logs: Vec<f64>,
    labels: Vec<usize>,
}

impl Graph {
    fn new(mechanism: &Mechanism, x: &[f32]) -> Result<Self> {
        let operator = AttentionOperator::new(mechanism, x.len() / DIM, x, Some(x), None, Strategy::Auto)?;
        let (weights, rows) = (Dense::of(&operator)?, operator.lse().unwrap_or_default());
        let n = rows.len();
        let logs = weights.entries().iter().enumerate().map(|(at, w)| w.ln() + rows[at / n]).collect();
        let labels = operator.clusters().map(|plan| plan.to_tensors().label_q).unwrap_or_default();
        Ok(Self { logs, labels: labels.into_iter().map(|label| label.max(0) as usize).collect() })
    }

    fn reversible(&self) -> Result<Reversible> {
        Reversible::from_log_weights(self.logs.len().isqrt(), &self.logs)
    }
}

fn softmax() -> Mechanism {
    Mechanism::Softmax(Default::default())
}

fn ssa(clusters: usize, estimator: Estimator) -> Mechanism {
    Mechanism::Ssa(Ssa { clusters: Some(clusters), estimator, ..Ssa::default() })
}

/// Section 4.4: the leading eigenvectors, as many as there are clusters, and the gap of the sparse graph beside the dense one's.
fn clusters() -> Result<()> {
    println!("| tokens | remote edges | clusters | sines / sqrt(k) | dense gap | sparse gap | ratio |");
    println!("|---|---|---|---|---|---|---|");
    for (name, x) in [("independent", independent(1)), ("16 planted clusters", planted(2))] {
        let dense = Graph::new(&softmax(), &x)?.reversible()?.spectrum()?;
        for (how, estimator) in [("as sampled", Estimator::Raw), ("weighted", Estimator::Importance)] {
            for k in [4, 8, 16, 32] {
                let sparse = Graph::new(&ssa(k, estimator), &x)?.reversible()?.spectrum()?;
                let sines = sin_theta(dense.subspace(k), sparse.subspace(k))? / (k as f64).sqrt();
                let (own, other) = (dense.gap(), sparse.gap());
                println!("| {name} | {how} | {k} | {sines:.2} | {own:.1e} | {other:.1e} | {:.1} |", own / other);
            }
        }
    }
    Ok(())
}

/// Theorem 34: what dropping all edges between clusters does to the normalised graph, and what that does to the eigenvectors.
fn theorem() -> Result<()> {
    println!(
        "| tokens | eps | row leak r | \\|E\\| | 2 eps | r + 2(1 - sqrt(1 - r)) | sines | 2\\|E\\|/gap | 2 sqrt(k)\\|E\\|/gap |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    // Two tokens that see each other alone, in different clusters, and weigh nothing beside the others.
    let mut outliers = planted(2);
    outliers.iter_mut().step_by(DIM).for_each(|x| *x = 0.0);
    for token in outliers.chunks_exact_mut(DIM).take(2) {
        token.fill(0.0);
        token[0] = 8.0;
    }
    for (name, x) in [("independent", independent(1)), ("planted", planted(2)), ("planted, two outliers", outliers)] {
        let (dense, plan) = (Graph::new(&softmax(), &x)?, Graph::new(&ssa(PLANTED, Estimator::Raw), &x)?);
        let mut labels = plan.labels;
        if name.contains("outliers") {
            (labels[0], labels[1]) = (0, 1);
        }
        let inside = |at: usize| labels[at / TOKENS] == labels[at % TOKENS];
        let kept = dense.logs.iter().enumerate().map(|(at, &log)| if inside(at) { log } else { f64::NEG_INFINITY });
        let (whole, parts) = (dense.reversible()?, Reversible::from_log_weights(TOKENS, &kept.collect::<Vec<_>>())?);
        let (a, b) = (whole.adjacency().entries(), parts.adjacency().entries());
        let error = Dense::new(TOKENS, a.iter().zip(b).map(|(a, b)| a - b).collect())?;
        let norm = spectral_norm(&error, &Power { max_iter: 2000, ..Power::default() })?;
        let most = dense.logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights = Dense::new(TOKENS, dense.logs.iter().map(|log| (log - most).exp()).collect())?;
        let fit = ClusterFit::new(&weights, &labels)?;
        let (before, after): (Spectrum, Spectrum) = (whole.spectrum()?, parts.spectrum()?);
        let sines = sin_theta(before.subspace(PLANTED), after.subspace(PLANTED))?;
        let bound = 2.0 * norm / before.gap_at(PLANTED).unwrap_or(0.0);
        let (eps, leak, root) = (fit.eps_cluster, fit.row_leak, (PLANTED as f64).sqrt());
        let valid = leak + 2.0 * (1.0 - (1.0 - leak).sqrt());
        println!(
            "| {name} | {eps:.1e} | {leak:.3} | {norm:.3} | {:.1e} | {valid:.3} | {sines:.2} | {bound:.2} | {:.2} |",
            2.0 * eps,
            root * bound
        );
    }
    Ok(())
}

fn independent(seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..TOKENS * DIM).map(|_| normal(&mut rng)).collect()
}

/// Tokens around sixteen centres, three times as far apart as the tokens of one are spread.
fn planted(seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let centres: Vec<f32> = (0..PLANTED * DIM).map(|_| 1.5 * normal(&mut rng)).collect();
    let at = |token: usize, channel: usize| centres[token % PLANTED * DIM + channel];
    (0..TOKENS * DIM).map(|i| at(i / DIM, i % DIM) + 0.5 * normal(&mut rng)).collect()
}

/// A standard normal number, by Box and Muller.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    (radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
}
