//! How well a partition of the tokens fits their graph. "Spectral Sparse Attention", sections 2.4 and 4.4.

use crate::{
    Dense, LinearOperator, Result,
    error::check_len,
    reversible::{check_non_negative, log_sum},
    vector::norm,
};

/// What crosses between clusters, of a graph of non-negative weights `W`; `W^sym = (W + W^T) / 2`.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ClusterFit {
    /// Number of clusters with tokens.
    pub clusters: usize,
    /// The share of `W^sym` between tokens of different clusters.
    pub eps_cluster: f64,
    /// The largest share of a token's own weight that leaves its cluster: bounds what dropping those edges does, which
    /// the mean share does not.
    pub row_leak: f64,
    /// `max_(a != c) W^sym(C_a, C_c) / min(W^sym(C_a, V), W^sym(C_c, V))`: how close two clusters come to being one.
    pub coupling: f64,
}

impl ClusterFit {
    /// Of the tokens' `labels [n]`; tokens without weight count for nothing.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`], [`crate::Error::Negative`], [`crate::Error::Length`].
    pub fn new(weights: &Dense, labels: &[usize]) -> Result<Self> {
        check_non_negative(weights, "a share of weight")?;
        check_len("labels", labels.len(), weights.len())?;
        let (n, labels, clusters) = (weights.len(), compact(labels), distinct(labels));
        let mut between = vec![0.0; clusters * clusters];
        let (mut inter, mut row_leak) = (0.0, 0.0_f64);
        for i in 0..n {
            let (mut leaves, mut all) = (0.0, 0.0);
            for j in 0..n {
                let w = 0.5 * (weights.row(i)[j] + weights.row(j)[i]);
                between[labels[i] * clusters + labels[j]] += w;
                all += w;
                leaves += if labels[i] == labels[j] { 0.0 } else { w };
            }
            inter += leaves;
            row_leak = row_leak.max(share(leaves, all));
        }
        let volume = |a: usize| between[a * clusters..][..clusters].iter().sum::<f64>();
        let coupling = |at: usize| match (at / clusters, at % clusters) {
            (a, c) if a == c => 0.0,
            (a, c) => share(between[at], volume(a).min(volume(c))),
        };
        Ok(Self {
            clusters,
            eps_cluster: share(inter, between.iter().sum()),
            row_leak,
            coupling: (0..between.len()).map(coupling).fold(0.0, f64::max),
        })
    }
}

/// `part / all`; 0 of nothing.
fn share(part: f64, all: f64) -> f64 {
    if all > 0.0 { part / all } else { 0.0 }
}

/// Labels counted from 0 without gaps, in the order of their values.
fn compact(labels: &[usize]) -> Vec<usize> {
    let mut known = labels.to_vec();
    known.sort_unstable();
    known.dedup();
    labels.iter().map(|label| known.partition_point(|k| k < label)).collect()
}

fn distinct(labels: &[usize]) -> usize {
    compact(labels).into_iter().max().map_or(0, |most| most + 1)
}

/// `|W - W^T|_F / |W|_F`: 0 for a symmetric graph, `sqrt(2)` where no edge is returned; 0 of nothing.
///
/// # Errors
/// [`crate::Error::NotFinite`].
pub fn asymmetry(weights: &Dense) -> Result<f64> {
    crate::dense::check_finite(weights)?;
    let n = weights.len();
    let difference: Vec<f64> = (0..n * n).map(|at| weights.entries()[at] - weights.row(at % n)[at / n]).collect();
    Ok(share(norm(&difference), norm(weights.entries())))
}

/// `kappa_D = D_max / D_min` over the tokens with edges, from the logarithms of the degrees; 1 of nothing.
pub fn degree_ratio(log_degree: &[f64]) -> f64 {
    let finite = || log_degree.iter().copied().filter(|d| d.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), d| (l.min(d), h.max(d)));
    if low > high { 1.0 } else { (high - low).exp() }
}

/// The two-stage distortion: drawing a pair of clusters by `g_ac = |A||C| exp(scale q_a.k_c)` of their means, then tokens
/// of them, draws edge `ij` with probability `p'_ij` where its weight asks for `p_ij`; the largest of `p/p'` and `p'/p`
/// over the edges between clusters. 1 without any. `q`, `k` are `[n, head_dim]`, `labels [n]`.
///
/// # Errors
/// [`crate::Error::Length`].
pub fn two_stage_distortion(head_dim: usize, q: &[f64], k: &[f64], scale: f64, labels: &[usize]) -> Result<f64> {
    let n = labels.len();
    check_len("q", q.len(), n * head_dim)?;
    check_len("k", k.len(), n * head_dim)?;
    let (labels, clusters) = (compact(labels), distinct(labels));
    let mut sizes = vec![0.0; clusters];
    labels.iter().for_each(|&label| sizes[label] += 1.0);
    let means = |x: &[f64]| {
        let mut means = vec![0.0; clusters * head_dim];
        for (x, &label) in x.chunks(head_dim.max(1)).zip(&labels) {
            means[label * head_dim..][..head_dim].iter_mut().zip(x).for_each(|(m, x)| *m += x / sizes[label]);
        }
        means
    };
    let (q_means, k_means) = (means(q), means(k));
    let product = |x: &[f64], i: usize, y: &[f64], j: usize| -> f64 {
        scale * crate::vector::dot(&x[i * head_dim..][..head_dim], &y[j * head_dim..][..head_dim])
    };
    let pairs = |count: usize| (0..count * count).map(move |at| (at / count, at % count));
    let mass = |(a, c): (usize, usize)| product(&q_means, a, &k_means, c) + (sizes[a] * sizes[c]).ln();
    let drawn: Vec<f64> = pairs(clusters).filter(|(a, c)| a != c).map(mass).collect();
    let edges: Vec<_> = pairs(n).filter(|&(i, j)| labels[i] != labels[j]).collect();
    let wanted: Vec<f64> = edges.iter().map(|&(i, j)| product(q, i, k, j)).collect();
    let (all_drawn, all_wanted) = (log_sum(&drawn), log_sum(&wanted));
    let far = edges.iter().zip(&wanted).map(|(&(i, j), log_w)| {
        let log_drawn = product(&q_means, labels[i], &k_means, labels[j]) - all_drawn;
        (log_w - all_wanted - log_drawn).abs()
    });
    Ok(far.fold(0.0, f64::max).exp())
}
