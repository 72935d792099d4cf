//! Sampled edges, in f64 and by the definitions.

use std::collections::BTreeMap;

use super::{
    super::matrix::{Matrix, inner},
    Pairs, Sampler,
    labels::mean,
    planner::Planner,
    random::Stream,
};

/// Stages of the random numbers: which cluster pairs, which edges of a pair, which edges of a row.
const PAIRS: u64 = 4;
const TOKENS: u64 = 5;
const ROWS: u64 = 6;

/// Log-weights by query and key.
pub(super) type Edges = BTreeMap<(usize, usize), f64>;

/// Both sides as clusters.
pub(super) struct Sides<'a> {
    pub planner: &'a Planner<'a>,
    pub rows: Vec<Vec<usize>>,
    pub keys: Vec<Vec<usize>>,
    /// The key clusters that each query cluster sees exactly.
    pub exact: &'a [Vec<usize>],
}

fn log_sum_exp(logs: &[f64]) -> f64 {
    let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY { most } else { most + logs.iter().map(|x| (x - most).exp()).sum::<f64>().ln() }
}

fn relative(logs: &[f64]) -> Vec<f64> {
    let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logs.iter().map(|x| (x - most).exp()).collect()
}

impl Sides<'_> {
    fn stream(&self, words: &[u64]) -> Stream {
        self.planner.stream(words)
    }

    /// `scale q.k` of a query and a mean key, or of a mean query and a key.
    fn score(&self, q: &[f64], k: &[f64]) -> f64 {
        self.planner.scale() * inner(q, k)
    }

    /// Every row draws among the remote keys that it may see.
    pub fn by_row(&self, samples: usize) -> Edges {
        let mut edges = Edges::new();
        for (a, i) in self.rows.iter().enumerate().flat_map(|(a, rows)| rows.iter().map(move |&i| (a, i))) {
            let remote = |c: usize| !self.exact[a].contains(&c);
            let list = |c: usize| match remote(c) {
                true => self.keys[c].iter().copied().filter(|&j| self.planner.sees(i, j)).collect(),
                false => Vec::new(),
            };
            let lists: Vec<Vec<usize>> = (0..self.keys.len()).map(list).collect();
            if lists.iter().map(Vec::len).sum::<usize>() <= samples {
                edges.extend(lists.concat().into_iter().map(|j| ((i, j), 0.0)));
                continue;
            }
            let log_mass = |list: &Vec<usize>| match list.len() {
                0 => f64::NEG_INFINITY,
                n => self.score(self.planner.q.row(i), &mean(&self.planner.k, list)) + (n as f64).ln(),
            };
            let logs: Vec<f64> = lists.iter().map(log_mass).collect();
            let (mass, mut stream) = (relative(&logs), self.stream(&[ROWS, i as u64]));
            let mut drawn: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for _ in 0..samples {
                let c = stream.pick(&mass);
                drawn.entry(lists[c][stream.below(lists[c].len())]).or_insert((c, 0)).1 += 1;
            }
            for (j, (c, times)) in drawn {
                let expected = samples as f64 * (logs[c] - log_sum_exp(&logs)).exp() / lists[c].len() as f64;
                edges.insert((i, j), (times as f64 / expected).ln());
            }
        }
        edges
    }

    /// Pairs of clusters draw edges between their tokens.
    pub fn by_pair(&self, samples: usize, sampler: Sampler) -> Edges {
        let pairs = (0..self.rows.len()).flat_map(|a| (0..self.keys.len()).map(move |c| (a, c)));
        let filled = |&(a, c): &(usize, usize)| !self.rows[a].is_empty() && !self.keys[c].is_empty();
        let remote: Vec<_> = pairs.filter(filled).filter(|&(a, c)| !self.exact[a].contains(&c)).collect();
        let weights = self.log_weights(sampler);
        let sizes = weights.each_ref().map(|side| side.iter().map(|logs| log_sum_exp(logs)).collect::<Vec<_>>());
        let (p, m) = (self.planner, self.planner.m);
        let log_mass = |&(a, c): &(usize, usize)| {
            sizes[0][a] + sizes[1][c] + self.score(&mean(&p.q, &self.rows[a]), &mean(&p.k, &self.keys[c]))
        };
        let count = if let Pairs::Count(count) = m.pairs { count } else { remote.len() };
        let psi = inclusion(&relative(&remote.iter().map(log_mass).collect::<Vec<_>>()), count);
        let mut edges = Edges::new();
        for n in systematic(&psi, self.stream(&[PAIRS]).uniform()) {
            let (a, c) = remote[n];
            let (rows, keys) = (&self.rows[a], &self.keys[c]);
            let mut stream = self.stream(&[TOKENS, a as u64, c as u64]);
            if sampler == Sampler::Uniform {
                let population = rows.len() * keys.len();
                let count = samples.min(population);
                let weight = (population as f64 / count as f64).ln() - psi[n].ln();
                let flat = stream.distinct(population, count).into_iter();
                edges.extend(flat.map(|f| ((rows[f / keys.len()], keys[f % keys.len()]), weight)));
                continue;
            }
            let share = |logs: &[f64]| logs.iter().map(|x| (x - log_sum_exp(logs)).exp()).collect::<Vec<_>>();
            let (u, w) = (share(&weights[0][a]), share(&weights[1][c]));
            let mut drawn: BTreeMap<(usize, usize), usize> = BTreeMap::new();
            for _ in 0..samples {
                let x = stream.pick(&u);
                *drawn.entry((x, stream.pick(&w))).or_default() += 1;
            }
            for ((x, y), times) in drawn {
                let expected = samples as f64 * u[x] * w[y] * psi[n];
                edges.insert((rows[x], keys[y]), (times as f64 / expected).ln());
            }
        }
        edges
    }

    /// The log-weight of every member by which its cluster's edges are drawn, of queries and of keys: 0, or minus half its
    /// estimated log-degree.
    fn log_weights(&self, sampler: Sampler) -> [Vec<Vec<f64>>; 2] {
        if sampler == Sampler::Uniform {
            return [&self.rows, &self.keys].map(|side| side.iter().map(|tokens| vec![0.0; tokens.len()]).collect());
        }
        let (q, k) = (&self.planner.q, &self.planner.k);
        let of = |side: &[Vec<usize>], x: &Matrix, others: &[Vec<usize>], y: &Matrix| -> Vec<Vec<f64>> {
            let to = |n: usize, other: &Vec<usize>| match other.len() {
                0 => f64::NEG_INFINITY,
                count => self.score(x.row(n), &mean(y, other)) + (count as f64).ln(),
            };
            let log_degree = |n: usize| log_sum_exp(&others.iter().map(|other| to(n, other)).collect::<Vec<_>>());
            side.iter().map(|tokens| tokens.iter().map(|&n| -0.5 * log_degree(n)).collect()).collect()
        };
        [of(&self.rows, q, &self.keys, k), of(&self.keys, k, &self.rows, q)]
    }
}

/// Probabilities `min(1, c mass)` that sum to `count`.
fn inclusion(mass: &[f64], count: usize) -> Vec<f64> {
    if count >= mass.len() {
        return vec![1.0; mass.len()];
    }
    let mut certain = vec![false; mass.len()];
    loop {
        let free: f64 = (0..mass.len()).filter(|&n| !certain[n]).map(|n| mass[n]).sum();
        let left = count - certain.iter().filter(|&&certain| certain).count();
        let psi = |n: usize| match certain[n] {
            true => 1.0,
            false if free > 0.0 => left as f64 / free * mass[n],
            false => 0.0,
        };
        let new: Vec<bool> = (0..mass.len()).map(|n| psi(n) >= 1.0).collect();
        if new == certain {
            return (0..mass.len()).map(psi).collect();
        }
        certain = new;
    }
}

/// Madow's systematic sample: every element whose running sum passes one of `u`, `u + 1`, ...
fn systematic(psi: &[f64], u: f64) -> Vec<usize> {
    let mut sum = 0.0;
    let mut chosen = Vec::new();
    for (n, &p) in psi.iter().enumerate() {
        let before: f64 = sum;
        sum += if p < 1.0 { p } else { 0.0 };
        if p >= 1.0 || (sum - u).ceil() > (before - u).ceil() {
            chosen.push(n);
        }
    }
    chosen
}
