//! The tables on more and fewer clusters, gaps, asymmetry, directed Laplacians and projections in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example ssa -- [clusters] [gaps] [asymmetry] [directed] [projections] [--seed N]`
//!
//! "Spectral Sparse Attention", section 4.4, on drawn tokens, queries being the keys: the leading eigenvectors, as many as there
//! are clusters, and the gap of the sparse graph beside the dense one's; section 5.2: the gaps and the clusters that its theorems assume;
//! section 4.5 and corollary 39 on drawn queries and keys.

mod draws;

use draws::normal;
use resolvent_graph::{
    AttentionOperator, ClusterFit, Dense, Power, Result, Reversible, Spectrum, Transposed, perron, sin_theta,
    symmetric_eigen,
};
use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{Estimator, Ssa},
};

const TOKENS: usize = 512;
const DIM: usize = 32;
/// Clusters of the planted tokens.
const PLANTED: usize = 16;

/// A mechanism's graph on tokens that are queries and keys, before rows are normalised; and the operator.
fn graph(mechanism: &Mechanism, x: &[f32]) -> Result<(Vec<f64>, AttentionOperator)> {
    let n = x.len() / DIM;
    let operator = AttentionOperator::new(mechanism, n, x, Some(x), None, Strategy::Auto)?;
    let (weights, rows) = (Dense::of(&operator)?, operator.lse().unwrap_or_default());
    let logs = weights.entries().iter().enumerate().map(|(at, w)| w.ln() + rows[at / n]).collect();
    Ok((logs, operator))
}

/// The spectrum of a mechanism's symmetrised graph on tokens that are queries and keys.
fn spectrum(mechanism: &Mechanism, x: &[f32]) -> Result<Spectrum> {
    Reversible::from_log_weights(x.len() / DIM, &graph(mechanism, x)?.0)?.spectrum()
}

fn softmax() -> Mechanism {
    Mechanism::softmax()
}

fn ssa(clusters: usize, estimator: Estimator) -> Mechanism {
    Mechanism::from(Ssa::default().with_clusters(Some(clusters)).with_estimator(estimator))
}

fn main() -> Result<()> {
    draws::print(&[
        ("clusters", clusters),
        ("gaps", gaps),
        ("asymmetry", asymmetry),
        ("directed", directed),
        ("projections", projections),
    ])
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

/// What theorem 34 assumes of the dense graph, by the number of tokens: the gap behind as many eigenvalues as there are clusters, the
/// share of weight between clusters, and the largest share of a token's that leaves its own.
fn gaps(seed: u64) -> Result<()> {
    println!("| tokens | number | clusters | gap delta_k | between clusters | most of a token |");
    println!("|---|---|---|---|---|---|");
    for n in [128, 256, 512, 1024] {
        let root = (n as f64).sqrt().ceil() as usize;
        for (name, x, k) in [
            ("independent", independent(n, seed), root),
            ("16 planted clusters", planted(n, seed), PLANTED),
            ("16 planted clusters", planted(n, seed), 2 * PLANTED),
        ] {
            let (logs, _) = graph(&softmax(), &x)?;
            let spectrum = Reversible::from_log_weights(n, &logs)?.spectrum()?;
            let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights = Dense::from_fn(n, |i, j| (logs[i * n + j] - most).exp());
            let (_, operator) = graph(&ssa(k, Estimator::Importance), &x)?;
            let plan = operator.clusters().expect("a clustered mechanism").to_tensors();
            // What is in no cluster is one of its own.
            let own = |(token, &label): (usize, &i64)| if label < 0 { n + token } else { label as usize };
            let labels: Vec<usize> = plan.label_k.iter().enumerate().map(own).collect();
            let fit = ClusterFit::new(&weights, &labels)?;
            let (gap, ClusterFit { eps_cluster, row_leak, .. }) = (spectrum.gap_at(k).unwrap_or(0.0), fit);
            println!("| {name} | {n} | {k} | {gap:.2e} | {eps_cluster:.2e} | {row_leak:.2e} |");
        }
    }
    Ok(())
}

/// The least eigenvalue of the directed Laplacian `I - (P + P^T) / 2 + i (P - P^T) / 2`, and of Chung's,
/// `I - (R P R^-1 + its transpose) / 2` with `R` the roots of the stationary distribution, of softmax on drawn queries and keys and of walks that
/// mostly end in one token.
fn directed(seed: u64) -> Result<()> {
    println!("| graph | tokens | least eigenvalue | of Chung's |\n|---|---|---|---|");
    for n in [20, 128] {
        let [q, k] = [9, 10].map(|what| normal(n * DIM, what, seed));
        let mut scores = products(&q, &k, DIM);
        scores.iter_mut().for_each(|s| *s /= (DIM as f64).sqrt());
        for (name, share) in [("softmax", 0.0), ("0.95 of each row to one token", 0.95)] {
            let mut p: Vec<f64> = scores.iter().map(|s| s.exp()).collect();
            for row in p.chunks_exact_mut(n) {
                let sum: f64 = row.iter().sum();
                row.iter_mut().for_each(|x| *x *= (1.0 - share) / sum);
                row[0] += share;
            }
            let p = Dense::new(n, p)?;
            let stationary = perron(&Transposed(&p), &Power::default())?.vector;
            let root = |i: usize| stationary[i].abs().sqrt();
            let at = |i: usize, j: usize| p.row(i)[j];
            let unit = |i: usize, j: usize| if i == j { 1.0 } else { 0.0 };
            // A Hermitian matrix A + i B has the eigenvalues of [[A, -B], [B, A]], each twice.
            let hermitian = Dense::from_fn(2 * n, |i, j| {
                let (a, b) = (i % n, j % n);
                let skew = 0.5 * (at(a, b) - at(b, a));
                match (i < n, j < n) {
                    (true, false) => -skew,
                    (false, true) => skew,
                    _ => unit(a, b) - 0.5 * (at(a, b) + at(b, a)),
                }
            });
            let flow = |i: usize, j: usize| root(i) * at(i, j) / root(j);
            let chung = Dense::from_fn(n, |i, j| unit(i, j) - 0.5 * (flow(i, j) + flow(j, i)));
            let least = |m: &Dense| symmetric_eigen(m).map(|eigen| eigen.values[0]);
            // A rounding below zero is zero.
            let [directed, chung] = [least(&hermitian)?, least(&chung)?].map(|x| (1e3 * x).round() / 1e3 + 0.0);
            println!("| {name} | {n} | {directed:.3} | {chung:.3} |");
        }
    }
    Ok(())
}

fn clusters(seed: u64) -> Result<()> {
    println!("| tokens | remote edges | clusters | sines / sqrt(k) | dense gap | sparse gap | ratio |");
    println!("|---|---|---|---|---|---|---|");
    for (name, x) in [("independent", independent(TOKENS, seed)), ("16 planted clusters", planted(TOKENS, seed))] {
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

fn independent(tokens: usize, seed: u64) -> Vec<f32> {
    normal(tokens * DIM, 1, seed).into_iter().map(|x| x as f32).collect()
}

/// Tokens around sixteen centres, three times as far apart as the tokens of one are spread.
fn planted(tokens: usize, seed: u64) -> Vec<f32> {
    let (centres, tokens) = (normal(PLANTED * DIM, 2, seed), normal(tokens * DIM, 3, seed));
    let at = |token: usize, channel: usize| 1.5 * centres[token % PLANTED * DIM + channel];
    tokens.iter().enumerate().map(|(i, x)| (at(i / DIM, i % DIM) + 0.5 * x) as f32).collect()
}
