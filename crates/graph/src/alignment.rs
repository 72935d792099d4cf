//! How well token weights stand in for the Perron vector. "Infinite Self-Attention", section 4.5 and table 5.

use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{Infsa, LinearInfsa},
};

use crate::{
    AttentionOperator, Error, Lanczos, LinearOperator, Power, Result,
    vector::{dot, norm},
};

/// Entries this close, as a share of the largest by size, differ by rounding: weights are products in f32.
const FLAT: f64 = 1e-5;

/// Agreement of two vectors over the tokens.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Alignment {
    /// [`cosine`].
    pub cosine: f64,
    /// [`spearman`].
    pub spearman: Option<f64>,
}

impl Alignment {
    /// The agreement of `x` with `y`.
    pub fn of(x: &[f64], y: &[f64]) -> Self {
        Self { cosine: cosine(x, y), spearman: spearman(x, y) }
    }
}

/// The cosine of the angle between two vectors; 0 where one is zero.
pub fn cosine(x: &[f64], y: &[f64]) -> f64 {
    let size = norm(x) * norm(y);
    if size == 0.0 { 0.0 } else { dot(x, y) / size }
}

/// Spearman's rank correlation, ties sharing their average rank. `None` where one vector ranks nothing: its entries are
/// equal up to 1e-5 of the largest by size.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    if flat(x) || flat(y) {
        return None;
    }
    let centred = |x: &[f64]| {
        let mean = (x.len() as f64 - 1.0) / 2.0;
        ranks(x).into_iter().map(|rank| rank - mean).collect::<Vec<_>>()
    };
    Some(cosine(&centred(x), &centred(y)))
}

fn flat(x: &[f64]) -> bool {
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
    // Also of nothing.
    high - low <= FLAT * high.abs().max(low.abs())
}

/// The rank of every entry, from 0, ties averaged.
fn ranks(x: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[a].total_cmp(&x[b]));
    let mut ranks = vec![0.0; x.len()];
    let mut start = 0;
    for tied in order.chunk_by(|&a, &b| x[a] == x[b]) {
        let average = start as f64 + (tied.len() as f64 - 1.0) / 2.0;
        tied.iter().for_each(|&i| ranks[i] = average);
        start += tied.len();
    }
    ranks
}

/// The token weights of `linear-infsa` beside the Perron vector of `relu(Q Q^T)` that they stand in for.
///
/// The baselines belong to the result: between non-negative vectors a high cosine says little by itself, and the norms
/// of the queries alone often score higher than the weights. The vector is that of at most 200 steps of power iteration
/// from the uniform one, as in the paper: [`PerronReport::change`] tells how far it still is from standing.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PerronReport {
    /// The weights `a`.
    pub weights: Alignment,
    /// The same weight for every token, which ranks nothing.
    pub uniform: Alignment,
    /// The norms `|q_i|`.
    pub energies: Alignment,
    /// The second largest eigenvalue of the affinities by size over the largest: the smaller, the faster hops forget where they started.
    /// `None` where these eigenvalues do not converge.
    pub subdominant_ratio: Option<f64>,
    /// By how much the last step still changed the Perron vector.
    pub change: f64,
}

impl PerronReport {
    /// Compares over the kept tokens of one head, queries `q [seq, head_dim]` being the keys too; `linear` says how the
    /// weights are found (its `tied` is taken for true), `keep [seq]` which tokens are there.
    ///
    /// # Errors
    /// What the mechanism refuses; [`crate::Error::Length`].
    pub fn new(linear: &LinearInfsa, seq: usize, q: &[f32], keep: Option<&[bool]>) -> Result<Self> {
        let graph = |mechanism: Mechanism| AttentionOperator::new(&mechanism, seq, q, None, keep, Strategy::Auto);
        let affinity = graph(Infsa::default().with_gamma(1.0).with_tied(true).into())?;
        let weights = graph(linear.clone().with_gamma(1.0).with_tied(true).into())?;
        let kept = |x: Vec<f64>| match keep {
            Some(keep) => x.into_iter().zip(keep).filter_map(|(x, keep)| keep.then_some(x)).collect(),
            None => x,
        };
        // Every kept row of the graph is the weights: any one of them, transposed, reads them off.
        let first = keep.map_or(0, |keep| keep.iter().position(|&keep| keep).unwrap_or(0));
        let unit: Vec<f64> = (0..seq).map(|i| f64::from(u8::from(i == first))).collect();
        let a = kept(weights.apply_transpose(&unit)?);
        let power = Power { max_iter: 200, ..Power::default() };
        let pair = power.iterate(vec![1.0; seq], 0.0, |x| affinity.apply(x))?;
        let reference = kept(pair.vector);
        let norms = q.chunks(q.len() / seq.max(1)).map(|q| q.iter().map(|&q| f64::from(q).powi(2)).sum::<f64>().sqrt());
        let energies = kept(norms.collect());
        Ok(Self {
            weights: Alignment::of(&a, &reference),
            uniform: Alignment::of(&vec![1.0; reference.len()], &reference),
            energies: Alignment::of(&energies, &reference),
            subdominant_ratio: second_over_first(&affinity)?,
            change: pair.change,
        })
    }
}

/// `|lambda_2| / lambda_1` of a symmetric operator in f32 whose weights are not negative; `None` where the eigenpairs do not converge.
fn second_over_first(m: &AttentionOperator) -> Result<Option<f64>> {
    let found = match (Lanczos { largest: 2, smallest: 1, tol: 1e-5, ..Lanczos::default() }).eigenpairs(m) {
        Err(Error::Eigen { .. }) => return Ok(None),
        found => found?,
    };
    let mut sizes: Vec<f64> = found.values.iter().map(|x| x.abs()).collect();
    sizes.sort_by(|a, b| b.total_cmp(a));
    Ok(Some(match sizes[..] {
        [first, second, ..] if first > 0.0 => second / first,
        _ => 0.0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_share_their_rank() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0, 3.0]), [3.0, 0.0, 3.0, 1.0, 3.0]);
    }

    #[test]
    fn rank_correlation_knows_order_only() {
        let x = [0.1, 0.2, 5.0, 7.0];
        let of = |y: &[f64]| spearman(&x, y).unwrap();
        assert!((of(&[1.0, 4.0, 9.0, 16.0]) - 1.0).abs() < 1e-15);
        assert!((of(&[4.0, 3.0, 2.0, 1.0]) + 1.0).abs() < 1e-15);
        // One tie: ranks (0.5, 0.5, 2, 3) against (0, 1, 2, 3), by hand 4.5 / sqrt(4.5 * 5).
        assert!((of(&[1.0, 1.0, 2.0, 3.0]) - 4.5 / 22.5_f64.sqrt()).abs() < 1e-15);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 2.0]), 0.0);
    }

    /// Equal entries rank nothing, and neither does what rounding makes of them.
    #[test]
    fn no_rank_correlation_with_a_constant() {
        let x = [0.1, 0.2, 5.0, 7.0];
        for flat in [[1.0; 4], [0.0; 4], [1.0, 1.0 + 1e-7, 1.0 - 1e-7, 1.0], [-3.0, -3.0, -3.000_01, -3.0]] {
            assert_eq!((spearman(&x, &flat), spearman(&flat, &x)), (None, None), "{flat:?}");
        }
        assert!(spearman(&x, &[1.0, 1.0001, 1.0002, 1.0003]).is_some());
        assert_eq!(spearman(&[], &[]), None);
    }
}
