//! The entries of a clustered kernel, held.

use faer::{Accum, Mat, MatRef, Par, linalg::matmul::matmul};
use rayon::prelude::*;
use resolvent_kernels::{PlanTensors, mechanism::Estimator};

use crate::AttentionOperator;

/// Most entries that are held: 1 GiB.
const MOST: usize = 1 << 28;

/// `(H + H^T) x` for the half `H = D^-1/2 W D^-1/2 / 2` of a clustered mechanism's kernel `W`: blocks of what it evaluates
/// exactly, and the edges beyond.
#[derive(Debug)]
pub(super) struct Entries {
    tokens: usize,
    blocks: Vec<Block>,
    edges: Vec<(u32, u32, f32)>,
}

/// The entries of some queries with all keys that they see exactly.
#[derive(Debug)]
struct Block {
    queries: Vec<u32>,
    keys: Vec<u32>,
    half: Mat<f32>,
}

impl Entries {
    /// Of a graph with these degrees. `None` where the mechanism is not a sparse one of the tokens' own products (mean
    /// tokens, causality, masks), or has too many entries.
    pub fn of(operator: &AttentionOperator, log_degree: &[f64]) -> Option<Self> {
        let (ssa, plan) = (operator.mechanism().as_ssa()?, operator.clusters()?);
        if ssa.estimator == Estimator::Centroid || ssa.routes_queries() || ssa.causal || operator.keep().is_some() {
            return None;
        }
        let (plan, tokens) = (plan.to_tensors(), log_degree.len());
        // Strays, which only masks leave, are in no group.
        if plan.label_q.iter().chain(&plan.label_k).any(|&label| label < -1) {
            return None;
        }
        let groups = groups(&plan);
        let exact: usize = groups.iter().map(|(queries, keys)| queries.len() * keys.len()).sum();
        if exact + plan.edges.len() > MOST {
            return None;
        }
        let (q, k) = operator.tokens();
        let dim = q.len() / tokens.max(1);
        let scale = ssa.scale.unwrap_or((dim as f64).powf(-0.5));
        let kernel = Kernel { q, k: k.unwrap_or(q), dim, scale, log_degree };
        let edges = plan.edges.iter().zip(&plan.edge_log_weight).map(|(&[_, i, j], &log_weight)| {
            let (i, j) = (i as u32, j as u32);
            (i, j, kernel.half(i, j, kernel.score(i, j) + log_weight))
        });
        let edges = edges.collect();
        let blocks = groups.into_par_iter().map(|(queries, keys)| kernel.block(queries, keys)).collect();
        Some(Self { tokens, blocks, edges })
    }

    /// The products with some vectors.
    pub fn apply_block(&self, block: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let x = Mat::from_fn(block.len(), self.tokens, |c, i| block[c][i] as f32);
        let parts: Vec<[Mat<f32>; 2]> = self.blocks.par_iter().map(|own| own.products(x.as_ref())).collect();
        let mut sums = Mat::<f64>::zeros(block.len(), self.tokens);
        let mut add = |token: u32, part: &[f32], weight: f32| {
            let sum = sums.col_as_slice_mut(token as usize);
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(weight * part));
        };
        for (own, [there, back]) in self.blocks.iter().zip(&parts) {
            own.queries.iter().enumerate().for_each(|(n, &i)| add(i, there.col_as_slice(n), 1.0));
            own.keys.iter().enumerate().for_each(|(n, &j)| add(j, back.col_as_slice(n), 1.0));
        }
        for &(i, j, half) in &self.edges {
            add(i, x.col_as_slice(j as usize), half);
            add(j, x.col_as_slice(i as usize), half);
        }
        (0..block.len()).map(|c| (0..self.tokens).map(|i| sums[(c, i)]).collect()).collect()
    }
}

impl Block {
    /// `x H^T` at the queries and `x H` at the keys, of `x [vectors, tokens]`.
    fn products(&self, x: MatRef<'_, f32>) -> [Mat<f32>; 2] {
        let of = |tokens: &[u32]| Mat::from_fn(x.nrows(), tokens.len(), |c, n| x[(c, tokens[n] as usize)]);
        let product = |x: Mat<f32>, half: MatRef<'_, f32>| {
            let mut out = Mat::zeros(x.nrows(), half.ncols());
            matmul(out.as_mut(), Accum::Replace, &x, half, 1.0, Par::Seq);
            out
        };
        [product(of(&self.keys), self.half.transpose()), product(of(&self.queries), self.half.as_ref())]
    }
}

/// The kernel's entries by the tokens.
struct Kernel<'a> {
    q: &'a [f32],
    k: &'a [f32],
    dim: usize,
    scale: f64,
    log_degree: &'a [f64],
}

impl Kernel<'_> {
    fn score(&self, i: u32, j: u32) -> f64 {
        let row = |x: &[f32], i: u32| x[i as usize * self.dim..][..self.dim].to_vec();
        let products = row(self.q, i).into_iter().zip(row(self.k, j)).map(|(q, k)| f64::from(q) * f64::from(k));
        self.scale * products.sum::<f64>()
    }

    /// Half of the normalised weight with the logarithm `log_weight`.
    fn half(&self, i: u32, j: u32, log_weight: f64) -> f32 {
        (0.5 * (log_weight - 0.5 * (self.log_degree[i as usize] + self.log_degree[j as usize])).exp()) as f32
    }

    fn block(&self, queries: Vec<u32>, keys: Vec<u32>) -> Block {
        let rows = |x: &[f32], tokens: &[u32]| {
            Mat::from_fn(tokens.len(), self.dim, |n, c| f64::from(x[tokens[n] as usize * self.dim + c]))
        };
        let mut scores = Mat::<f64>::zeros(queries.len(), keys.len());
        let k = rows(self.k, &keys);
        matmul(scores.as_mut(), Accum::Replace, rows(self.q, &queries), k.transpose(), self.scale, Par::Seq);
        let half = Mat::from_fn(queries.len(), keys.len(), |a, b| self.half(queries[a], keys[b], scores[(a, b)]));
        Block { queries, keys, half }
    }
}

/// The queries of every cluster, and those of none, with the keys that they see exactly.
fn groups(plan: &PlanTensors) -> Vec<(Vec<u32>, Vec<u32>)> {
    let clusters = |labels: &[i64]| labels.iter().max().map_or(0, |most| (most + 1) as usize);
    let members = |labels: &[i64]| {
        let mut members = vec![Vec::new(); clusters(labels) + 1];
        let last = members.len() - 1;
        for (token, &label) in (0..).zip(labels) {
            members[usize::try_from(label).unwrap_or(last)].push(token);
        }
        members
    };
    let (queries, keys) = (members(&plan.label_q), members(&plan.label_k));
    let (lone, everywhere) = (queries.len() - 1, &keys[keys.len() - 1]);
    let mut seen = vec![everywhere.clone(); queries.len()];
    plan.exact_blocks.iter().for_each(|&[_, a, c]| seen[a as usize].extend(&keys[c as usize]));
    seen[lone] = (0..plan.label_k.len() as u32).collect();
    queries.into_iter().zip(seen).filter(|(queries, keys)| !queries.is_empty() && !keys.is_empty()).collect()
}
