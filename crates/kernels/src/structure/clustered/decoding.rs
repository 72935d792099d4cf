//! Causal clusters token by token: what a plan says of a token depends on none after it.

use std::collections::{BTreeMap, BTreeSet};

use super::planner::{Stage, Stream, online::Running, pick, space::Space};
use crate::{
    mechanism::{ClusterOn, Estimator, Ssa},
    simd::{Level, rows},
};

/// A call's constants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting<'a> {
    pub m: &'a Ssa,
    pub level: Level,
    /// Most tokens that there will be: clusters are made for so many.
    pub span: usize,
}

/// What one head keeps of the tokens so far.
#[derive(Debug, Clone)]
pub(crate) struct Past {
    /// Batch entry and head, which draws depend on.
    index: [u64; 2],
    dim: usize,
    value_dim: usize,
    len: usize,
    labels: Running,
    space: Space,
    /// Tokens in no cluster, which all see.
    globals: BTreeSet<usize>,
    /// Of every cluster, by its label; at last the tokens in none.
    clusters: Vec<Kept>,
    free: Kept,
    /// The mean key and value of every cluster.
    mean_keys: Vec<f32>,
    mean_values: Vec<f32>,
    buffer: Vec<f32>,
}

/// Tokens that are seen or passed over together.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept {
    pub count: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub sum_keys: Vec<f64>,
    pub sum_values: Vec<f64>,
}

impl Kept {
    pub fn bytes(&self) -> usize {
        let sums = self.sum_keys.capacity() + self.sum_values.capacity();
        size_of::<f32>() * (self.keys.capacity() + self.values.capacity()) + size_of::<f64>() * sums
    }

    pub fn push(&mut self, k: &[f32], v: &[f32]) {
        self.count += 1;
        self.keys.extend_from_slice(k);
        self.values.extend_from_slice(v);
        for (sums, x) in [(&mut self.sum_keys, k), (&mut self.sum_values, v)] {
            sums.resize(x.len(), 0.0);
            sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
        }
    }
}

/// A token of one head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
}

impl Past {
    /// Bytes of keys, values and means.
    pub fn bytes(&self) -> usize {
        let kept: usize = self.clusters.iter().chain([&self.free]).map(Kept::bytes).sum();
        kept + size_of::<f32>() * (self.mean_keys.capacity() + self.mean_values.capacity())
    }

    /// Before the first token. `codebook [clusters, dim]`, if the call has one.
    pub fn new(at: &Setting<'_>, index: [u64; 2], codebook: Option<&[f32]>, [dim, value_dim]: [usize; 2]) -> Self {
        let m = at.m;
        let globals: BTreeSet<usize> = m.globals(at.span).into_iter().collect();
        let clustered = at.span - globals.len();
        let asked = m.clusters(at.span).min(clustered);
        let cap = m.cap(at.span, clustered);
        let space = Space::of(m, dim);
        let labels = match codebook {
            Some(codebook) => Running::fixed(codebook, dim, cap),
            None => Running::new(asked, space.dim(), cap),
        };
        Self {
            index,
            dim,
            value_dim,
            len: 0,
            labels,
            space,
            globals,
            clusters: Vec::new(),
            free: Kept::default(),
            mean_keys: Vec::new(),
            mean_values: Vec::new(),
            buffer: Vec::new(),
        }
    }

    /// Takes a token in. Returns its cluster.
    pub fn push(&mut self, at: &Setting<'_>, token: Token<'_>) -> Option<usize> {
        let position = self.len;
        self.len += 1;
        if self.globals.contains(&position) {
            self.free.push(token.k, token.v);
            return None;
        }
        let x = if at.m.cluster_on == ClusterOn::Keys { token.k } else { token.q };
        let label = self.labels.next(at.level, &self.space.point(at.level, x));
        if self.clusters.len() <= label {
            self.clusters.resize_with(label + 1, Kept::default);
            self.mean_keys.resize((label + 1) * self.dim, 0.0);
            self.mean_values.resize((label + 1) * self.value_dim, 0.0);
        }
        let cluster = &mut self.clusters[label];
        cluster.push(token.k, token.v);
        let count = cluster.count as f64;
        for (means, sums) in [(&mut self.mean_keys, &cluster.sum_keys), (&mut self.mean_values, &cluster.sum_values)] {
            let means = &mut means[label * sums.len()..][..sums.len()];
            means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / count) as f32);
        }
        Some(label)
    }

    /// `sum = sum_e exp(z_e - max z) v_e` over the entries of the newest token, which is in cluster `own`; returns what it has
    /// to be multiplied by.
    pub fn row(&mut self, at: &Setting<'_>, own: Option<usize>, q: &[f32], sum: &mut [f64]) -> f64 {
        let scale = at.m.scale.unwrap_or((self.dim as f64).powf(-0.5));
        let Self { clusters, free, mean_keys, mean_values, buffer, value_dim, .. } = self;
        let exact: Vec<&Kept> = match own {
            Some(own) => vec![&clusters[own], &*free],
            // A token in no cluster sees all.
            None => clusters.iter().chain([&*free]).collect(),
        };
        let remote = own.map_or(0, |_| clusters.len());
        buffer.clear();
        buffer.resize(remote, 0.0);
        rows::dots(at.level, &mean_keys[..remote * q.len()], q, buffer);
        let mass = |c: usize, product: f32| match clusters[c].count {
            0 => f64::NEG_INFINITY,
            _ if Some(c) == own => f64::NEG_INFINITY,
            n => scale * f64::from(product) + (n as f64).ln(),
        };
        let masses: Vec<f64> = buffer.iter().enumerate().map(|(c, &product)| mass(c, product)).collect();
        let far = |mass: f64| if at.m.estimator == Estimator::Centroid { mass as f32 } else { f32::NEG_INFINITY };
        buffer.iter_mut().zip(&masses).for_each(|(z, &mass)| *z = far(mass));
        let place = (self.index, self.len - 1);
        let mut edges = sampled(at, place, clusters, own, &masses);
        for edge in &mut edges {
            let mut product = [0.0];
            rows::dots(at.level, edge.key, q, &mut product);
            edge.logit += (scale * f64::from(product[0])) as f32;
        }
        let largest = edges.iter().map(|edge| edge.logit).fold(f32::NEG_INFINITY, f32::max);
        let means = &mean_values[..remote * *value_dim];
        let (mut total, most) = weigh(at.level, (q, scale), (buffer, means), &exact, largest, sum);
        for edge in edges {
            let weight = (edge.logit - most).exp();
            rows::accumulate(at.level, &[weight], edge.value, 1.0, sum);
            total += f64::from(weight);
        }
        1.0 / total
    }
}

/// Writes `sum = sum_e exp(z_e - z) v_e` over means, whose logits are in `logits` and to which those of the `exact` tokens are added,
/// and over these. Returns the sum of the weights, and `z`, the largest logit of all, of which `largest` is one.
pub(super) fn weigh(
    level: Level,
    (q, scale): (&[f32], f64),
    (logits, mean_values): (&mut Vec<f32>, &[f32]),
    exact: &[&Kept],
    largest: f32,
    sum: &mut [f64],
) -> (f64, f32) {
    let remote = logits.len();
    for kept in exact {
        let first = logits.len();
        logits.resize(first + kept.count, 0.0);
        rows::dots(level, &kept.keys, q, &mut logits[first..]);
        logits[first..].iter_mut().for_each(|z| *z *= scale as f32);
    }
    let most = logits.iter().copied().fold(largest, f32::max);
    logits.iter_mut().for_each(|z| *z = (*z - most).exp());
    sum.fill(0.0);
    let (means, mut rest) = logits.split_at(remote);
    rows::accumulate(level, means, mean_values, 1.0, sum);
    for kept in exact {
        let (weights, after) = rest.split_at(kept.count);
        rows::accumulate(level, weights, &kept.values, 1.0, sum);
        rest = after;
    }
    (logits.iter().map(|&w| f64::from(w)).sum(), most)
}

/// An edge to a token of another cluster.
struct Edge<'a> {
    key: &'a [f32],
    value: &'a [f32],
    logit: f32,
}

/// What the `row` sampler draws for a token, as the plan of the whole sequence has it; the logits are yet to be added to.
fn sampled<'a>(
    at: &Setting<'_>,
    (index, row): ([u64; 2], usize),
    clusters: &'a [Kept],
    own: Option<usize>,
    masses: &[f64],
) -> Vec<Edge<'a>> {
    let samples = at.m.samples(at.span);
    if samples == 0 || own.is_none() {
        return Vec::new();
    }
    let edge = |(c, n): (usize, usize), logit: f64| {
        let Kept { count, keys, values, .. } = &clusters[c];
        let [dim, value_dim] = [keys.len() / count, values.len() / count];
        Edge { key: &keys[n * dim..][..dim], value: &values[n * value_dim..][..value_dim], logit: logit as f32 }
    };
    let remote = (0..clusters.len()).filter(|&c| Some(c) != own);
    if remote.clone().map(|c| clusters[c].count).sum::<usize>() <= samples {
        return remote.flat_map(|c| (0..clusters[c].count).map(move |n| (c, n))).map(|at| edge(at, 0.0)).collect();
    }
    let most = masses.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
    let shares: Vec<f64> = masses.iter().map(|mass| (mass - most).exp()).collect();
    let sum: f64 = shares.iter().sum();
    let mut stream = Stream::new(at.m.seed, &[index[0], index[1], Stage::Rows as u64, row as u64]);
    let mut drawn = BTreeMap::new();
    for _ in 0..samples {
        let c = pick(shares.iter().copied(), sum, stream.uniform());
        *drawn.entry((c, stream.below(clusters[c].count))).or_insert(0_u32) += 1;
    }
    let weighted = |((c, n), times): ((usize, usize), u32)| {
        let log_count = (clusters[c].count as f64).ln();
        let weight = f64::from(times).ln() - (samples as f64).ln() - (shares[c].ln() - sum.ln()) + log_count;
        edge((c, n), if at.m.estimator == Estimator::Raw { 0.0 } else { weight })
    };
    drawn.into_iter().map(weighted).collect()
}
