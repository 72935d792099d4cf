//! Sampled edges by pairs of clusters: which pairs, and which edges of a pair.

use std::collections::BTreeMap;

use super::{
    Sides, gather,
    random::{Stage, Stream, floyd, pick},
};
use crate::{
    call::cluster_plan::Edge,
    mechanism::{Pairs, Sampler},
    parallel::grain,
    simd::rows,
};

/// The edges between the clusters that are not evaluated exactly, ascending in query and key for each query cluster.
pub(super) fn edges(sides: &Sides<'_>, samples: usize) -> Vec<Edge> {
    let [queries, keys] = [sides.queries.len(), sides.keys.len()];
    let remote: Vec<[u32; 2]> = (0..queries as u32)
        .flat_map(|a| (0..keys as u32).map(move |c| [a, c]))
        .filter(|&[a, c]| !sides.queries.of(a as usize).is_empty() && !sides.keys.of(c as usize).is_empty())
        .filter(|&[a, c]| !sides.is_exact(a, c))
        .collect();
    let degrees = (sides.sampler == Sampler::DegreeWeighted).then(|| Degrees::new(sides));
    let chosen = choose(sides, &remote, degrees.as_ref());
    drop(remote);
    let of_pair = |n: usize, buffer: &mut [Edge]| {
        let ([a, c], psi) = chosen[n];
        let mut stream = sides.stream(Stage::Tokens, &[a.into(), c.into()]);
        let (rows, columns) = (sides.queries.of(a as usize), sides.keys.of(c as usize));
        match &degrees {
            None => uniform(rows, columns, &mut stream, psi, buffer),
            Some(degrees) => degrees.edges([a, c], [rows, columns], samples, &mut stream, psi, buffer),
        }
    };
    let sizes = chosen
        .iter()
        .map(|([a, c], _)| samples.min(sides.queries.of(*a as usize).len() * sides.keys.of(*c as usize).len()));
    gather(sizes, grain(64), of_pair)
}

/// The sampled pairs with their inclusion probabilities.
fn choose(sides: &Sides<'_>, remote: &[[u32; 2]], degrees: Option<&Degrees>) -> Vec<([u32; 2], f64)> {
    let count = match sides.m.pairs {
        Pairs::Count(count) if count < remote.len() => count,
        _ => return remote.iter().map(|&pair| (pair, 1.0)).collect(),
    };
    let affinity = sides.affinity(sides.queries, sides.keys);
    let log_mass = |&[a, c]: &[u32; 2]| {
        let (a, c) = (a as usize, c as usize);
        let log_sizes = match degrees {
            None => (sides.queries.of(a).len() as f64).ln() + (sides.keys.of(c).len() as f64).ln(),
            Some(degrees) => degrees.rows[a].log_sum + degrees.columns[c].log_sum,
        };
        log_sizes + affinity[a * sides.keys.len() + c]
    };
    let logs: Vec<f64> = remote.iter().map(log_mass).collect();
    let most = logs.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
    let psi = inclusion(&logs.iter().map(|x| (x - most).exp()).collect::<Vec<_>>(), count);
    let u = sides.stream(Stage::Pairs, &[]).uniform();
    systematic(&psi, u).into_iter().map(|n| (remote[n], psi[n])).collect()
}

/// Inclusion probabilities `min(1, c mass)` that sum to `count`, fewer than there are masses.
fn inclusion(mass: &[f64], count: usize) -> Vec<f64> {
    let mut capped = vec![false; mass.len()];
    loop {
        let free: f64 = mass.iter().zip(&capped).filter(|(_, capped)| !**capped).map(|(mass, _)| mass).sum();
        let left = count - capped.iter().filter(|capped| **capped).count();
        // Where the masses that are left have underflowed, none of them is drawn.
        let scale = if free > 0.0 { left as f64 / free } else { 0.0 };
        let full = |n: usize| !capped[n] && scale * mass[n] >= 1.0;
        let new: Vec<usize> = (0..mass.len()).filter(|&n| full(n)).collect();
        if new.is_empty() {
            return mass.iter().zip(&capped).map(|(mass, &capped)| if capped { 1.0 } else { scale * mass }).collect();
        }
        new.into_iter().for_each(|n| capped[n] = true);
    }
}

/// Madow's systematic sample: exact inclusion probabilities and a fixed size.
fn systematic(psi: &[f64], u: f64) -> Vec<usize> {
    let mut run = 0.0_f64;
    let taken = |&n: &usize| {
        if psi[n] >= 1.0 {
            return true;
        }
        let before = run;
        run += psi[n];
        (run - u).ceil() > (before - u).ceil()
    };
    (0..psi.len()).filter(taken).collect()
}

/// As many distinct edges as `buffer` holds, all equally likely.
fn uniform(rows: &[u32], columns: &[u32], stream: &mut Stream, psi: f64, buffer: &mut [Edge]) {
    let population = rows.len() * columns.len();
    let count = buffer.len();
    let log_weight = (population as f64 / count as f64).ln() - psi.ln();
    let mut flat = Vec::with_capacity(count);
    floyd(population, count, stream, &mut flat);
    let edge = |f: usize| Edge { query: rows[f / columns.len()], key: columns[f % columns.len()], log_weight };
    buffer.iter_mut().zip(flat).for_each(|(to, f)| *to = edge(f));
}

/// Estimated degrees, by which edges are drawn: "Spectral Sparse Attention", remark 25.
struct Degrees {
    rows: Vec<Weights>,
    columns: Vec<Weights>,
}

/// `D^-1/2` of the members of one cluster over its sum, and the log of that sum.
struct Weights {
    shares: Vec<f64>,
    log_sum: f64,
}

impl Degrees {
    fn new(sides: &Sides<'_>) -> Self {
        let (queries, keys) = (sides.queries.means(sides.q, sides.dim), sides.keys.means(sides.k, sides.dim));
        let weights = |members: &super::Members, x: &[f32], means: &[f32], others: &super::Members| {
            (0..members.len()).map(|a| Weights::new(sides, members.of(a), x, means, others)).collect()
        };
        Self {
            rows: weights(sides.queries, sides.q, &keys, sides.keys),
            columns: weights(sides.keys, sides.k, &queries, sides.queries),
        }
    }

    /// Edges with replacement; one that is drawn `m` times has `m` times the weight.
    fn edges(
        &self,
        [a, c]: [u32; 2],
        [rows, columns]: [&[u32]; 2],
        samples: usize,
        stream: &mut Stream,
        psi: f64,
        buffer: &mut [Edge],
    ) {
        let (u, w) = (&self.rows[a as usize].shares, &self.columns[c as usize].shares);
        let mut drawn = BTreeMap::new();
        for _ in 0..samples {
            let x = pick(u.iter().copied(), u.iter().sum(), stream.uniform());
            let y = pick(w.iter().copied(), w.iter().sum(), stream.uniform());
            *drawn.entry((x, y)).or_insert(0_u32) += 1;
        }
        let edge = |((x, y), times): ((usize, usize), u32)| Edge {
            query: rows[x],
            key: columns[y],
            log_weight: f64::from(times).ln() - (samples as f64 * u[x] * w[y]).ln() - psi.ln(),
        };
        buffer.iter_mut().zip(drawn.into_iter().map(edge)).for_each(|(to, edge)| *to = edge);
    }
}

impl Weights {
    /// The log degree of a token is `ln sum_c n_c exp(scale x . mean_c)` over the clusters of the other side.
    fn new(sides: &Sides<'_>, tokens: &[u32], x: &[f32], means: &[f32], others: &super::Members) -> Self {
        let mut products = vec![0.0; others.len()];
        let log_degree = |&n: &u32| {
            rows::dots(sides.level, means, &x[n as usize * sides.dim..][..sides.dim], &mut products);
            let terms = products.iter().enumerate();
            log_sum_exp(terms.map(|(c, &z)| sides.scale() * f64::from(z) + (others.of(c).len() as f64).ln()))
        };
        let logs: Vec<f64> = tokens.iter().map(log_degree).map(|degree| -0.5 * degree).collect();
        let log_sum = log_sum_exp(logs.iter().copied());
        Self { shares: logs.into_iter().map(|x| (x - log_sum).exp()).collect(), log_sum }
    }
}

fn log_sum_exp(terms: impl Iterator<Item = f64>) -> f64 {
    let terms: Vec<f64> = terms.collect();
    let most = terms.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
    if most == f64::NEG_INFINITY { most } else { most + terms.iter().map(|x| (x - most).exp()).sum::<f64>().ln() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inclusion_probabilities_add_up_and_are_kept_by_the_sample() {
        let mass: Vec<f64> = (0..12).map(|n| (n as f64 * 0.9).exp() + 1.0).collect();
        let psi = inclusion(&mass, 5);
        assert!((psi.iter().sum::<f64>() - 5.0).abs() < 1e-12 && psi.iter().all(|p| (0.0..=1.0).contains(p)));
        // Over evenly spaced u, the share of samples with an element is its probability.
        let draws = 4000;
        let mut counts = [0; 12];
        for n in 0..draws {
            let sample = systematic(&psi, (n as f64 + 0.5) / draws as f64);
            assert_eq!(sample.len(), 5);
            sample.into_iter().for_each(|n| counts[n] += 1);
        }
        for (count, psi) in counts.iter().zip(&psi) {
            assert!((f64::from(*count) / draws as f64 - psi).abs() < 1e-3, "{count} for {psi}");
        }
        assert_eq!(inclusion(&[1.0, 0.0, 0.0], 2), [1.0, 0.0, 0.0]);
    }
}
