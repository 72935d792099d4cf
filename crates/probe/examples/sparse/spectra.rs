//! "Spectral Sparse Attention", theorem 34: what the sparse graph does to the leading eigenvectors, and its bounds.

use super::heads::{ClusterKind, Clusters, Head};
use resolvent_graph::{ClusterFit, Dense, Power, Reversible, sin_theta, spectral_norm};
use resolvent_kernels::{Error, Mask, Mechanism, Result};

use super::{plan, ssa};

const TOKENS: usize = 512;
const CLUSTERS: usize = 32;

/// The distance between leading eigenspaces beside Davis and Kahan's bound, and what dropping all edges between clusters
/// does to the graph beside the paper's bound, `2 eps`, and one that holds, `rho + 2 (1 - sqrt(1 - rho))`.
pub fn table(seed: u64) -> Result<()> {
    println!(
        "| data | edges beyond | \\|E\\| | gap | sin | 2 sqrt(r) \\|E\\| / gap | eps | 2 eps | row leak | bound by the leak |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (data, kind, factor) in [
        ("planted, tripled", ClusterKind::Planted, 3.0),
        ("planted, doubled", ClusterKind::Planted, 2.0),
        ("planted", ClusterKind::Planted, 1.0),
        ("near", ClusterKind::Near, 1.0),
    ] {
        let mut head = Clusters { seed, tokens: TOKENS, dim: 32, kind }.generate()?;
        head.q.iter_mut().chain(&mut head.k).for_each(|x| *x *= factor);
        for (name, fields) in [
            ("none", r#""samples": 0"#),
            ("`raw`, 7 a pair", r#""estimator": "raw""#),
            ("`importance`, 7 a pair", ""),
            ("`importance`, 100 a pair", r#""samples": 100"#),
        ] {
            let comma = if fields.is_empty() { "" } else { ", " };
            row(data, name, &head, &ssa(&format!(r#""clusters": {CLUSTERS}{comma}{fields}"#))?)
                .map_err(|e| Error::Config { field: name.into(), problem: e.to_string() })?;
        }
    }
    Ok(())
}

fn row(data: &str, name: &str, head: &Head, mechanism: &Mechanism) -> resolvent_graph::Result<()> {
    let n = head.tokens;
    let plan = plan(mechanism, head)?;
    let omega = plan.matrices(mechanism, &head.shape(), &Mask::NONE)?.log_weight;
    let scores = scores(head);
    let sparse: Vec<f64> = scores.iter().zip(&omega).map(|(s, &w)| s + f64::from(w)).collect();
    let (dense, sparse) = (Reversible::from_log_weights(n, &scores)?, Reversible::from_log_weights(n, &sparse)?);
    let rank = plan.clusters(0)[0];
    let (full, thin) = (dense.spectrum()?, sparse.spectrum()?);
    let sine = sin_theta(full.subspace(rank), thin.subspace(rank))?;
    let change = Dense::from_fn(n, |i, j| sparse.adjacency().row(i)[j] - dense.adjacency().row(i)[j]);
    let norm = spectral_norm(&change, &Power::default())?;
    let gap = full.gap_at(rank).unwrap_or(0.0);
    let labels: Vec<usize> = plan.to_tensors().label_k.iter().map(|&label| label as usize).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let fit = ClusterFit::new(&Dense::from_fn(n, |i, j| (scores[i * n + j] - most).exp()), &labels)?;
    let (eps, leak) = (fit.eps_cluster, fit.row_leak);
    println!(
        "| {data} | {name} | {norm:.3} | {gap:.4} | {sine:.2} | {:.3} | {eps:.3} | {:.3} | {leak:.3} | {:.3} |",
        2.0 * (rank as f64).sqrt() * norm / gap,
        2.0 * eps,
        leak + 2.0 * (1.0 - (1.0 - leak).sqrt()),
    );
    Ok(())
}

/// `q.k / sqrt(dim)` of all pairs.
fn scores(head: &Head) -> Vec<f64> {
    let d = head.dim;
    let dot = |q: &[f32], k: &[f32]| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
    let row = |q| head.k.chunks_exact(d).map(move |k| dot(q, k) / (d as f64).sqrt());
    head.q.chunks_exact(d).flat_map(row).collect()
}
