//! Softmax over the entries that a plan gives every query: single tokens, and mean tokens of clusters.

mod edges;
mod labels;
mod planner;
mod random;

pub(super) use planner::plan;

use super::{
    HeadForward, HeadGradients,
    head::Head,
    matrix::{Matrix, inner},
};
use crate::{
    call::cluster_plan::{HeadPlan, NONE, STRAY},
    mechanism::{Estimator, Pairs, Sampler, Ssa},
};

/// What a query attends to: the mean of some tokens (mostly of one), with a constant added to its logit.
pub(super) struct Entry {
    pub tokens: Vec<usize>,
    log_weight: f64,
}

impl Entry {
    pub fn token(j: usize, log_weight: f64) -> Self {
        Self { tokens: vec![j], log_weight }
    }

    /// What is added to the logarithm of the affinity itself: the weight of a mean is the number of its tokens.
    pub fn edge_weight(&self) -> f64 {
        self.log_weight - (self.tokens.len() as f64).ln()
    }

    pub fn mean(&self, x: &Matrix) -> Vec<f64> {
        let column = |c: usize| self.tokens.iter().map(|&j| x.at(j, c)).sum::<f64>() / self.tokens.len() as f64;
        (0..x.cols).map(column).collect()
    }
}

/// The probabilities of one query's entries, and their log-sum-exp.
struct Row {
    entries: Vec<Entry>,
    p: Vec<f64>,
    lse: f64,
}

/// Exact tokens: of the clusters that the query's is routed to, and those of no cluster; all, for a query of no cluster.
/// Then sampled tokens with their weight, or the mean of what is visible of every other cluster with the weight `n`. A stray
/// has no cluster and is in none: exact pairs of it are those with tokens of no cluster.
pub(super) fn entries(head: &Head, m: &Ssa, plan: &HeadPlan, i: usize) -> Vec<Entry> {
    let block = m.causal_clusters.block();
    let visible = |j: &usize| head.keep_query[i] && head.keep_key[*j] && (!head.causal || j / block <= i / block);
    let own = plan.label_q[i];
    let exact = |label: i32| match (own, label) {
        (NONE, _) | (_, NONE) => true,
        (STRAY, _) | (_, STRAY) => false,
        (a, c) => plan.exact.contains(&[a as u32, c as u32]),
    };
    let tokens = (0..head.k.rows).filter(visible).filter(|&j| exact(plan.label_k[j]));
    let mut entries: Vec<Entry> = tokens.map(|j| Entry::token(j, 0.0)).collect();
    let edges = plan.edges.iter().filter(|edge| edge.query as usize == i && visible(&(edge.key as usize)));
    entries.extend(edges.map(|edge| Entry::token(edge.key as usize, edge.log_weight)));
    if m.estimator == Estimator::Centroid && own != STRAY {
        for label in (0..=plan.label_k.iter().copied().max().unwrap_or(-1)).filter(|&label| !exact(label)) {
            let tokens: Vec<usize> = (0..head.k.rows).filter(visible).filter(|&j| plan.label_k[j] == label).collect();
            let log_weight = (tokens.len() as f64).ln();
            entries.extend((!tokens.is_empty()).then_some(Entry { tokens, log_weight }));
        }
    }
    entries
}

/// `p_e = exp(z_e - lse)` with `z_e = scale q.k_e + w_e` and `lse = ln sum_e exp(z_e)`.
fn row(head: &Head, m: &Ssa, plan: &HeadPlan, i: usize) -> Row {
    let entries = entries(head, m, plan, i);
    let logit = |e: &Entry| head.scale(m.scale) * inner(head.q.row(i), &e.mean(&head.k)) + e.log_weight;
    let z: Vec<f64> = entries.iter().map(logit).collect();
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
    let lse = if z.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
    Row { entries, p: z.iter().map(|z| (z - lse).exp()).collect(), lse }
}

/// Every entry's probability is shared by its tokens.
pub(super) fn forward(head: &Head, m: &Ssa, plan: &HeadPlan) -> HeadForward {
    let mut weights = Matrix::zeros(head.q.rows, head.k.rows);
    let mut lse = Vec::new();
    for i in 0..head.q.rows {
        let row = row(head, m, plan, i);
        for (entry, p) in row.entries.iter().zip(&row.p) {
            entry.tokens.iter().for_each(|&j| weights.row_mut(i)[j] += p / entry.tokens.len() as f64);
        }
        lse.push(row.lse);
    }
    HeadForward { weights, lse: Some(lse), ..HeadForward::default() }
}

/// `dz_e = p_e (dout.v_e - delta)` with `delta = sum_e p_e dout.v_e`; the gradient of a mean goes to its tokens alike.
pub(super) fn backward(head: &Head, m: &Ssa, plan: &HeadPlan, dout: &Matrix) -> HeadGradients {
    let scale = head.scale(m.scale);
    let mut dq = Matrix::zeros(head.q.rows, head.q.cols);
    let mut dk = Matrix::zeros(head.k.rows, head.k.cols);
    for i in 0..head.q.rows {
        let Row { entries, p, .. } = row(head, m, plan, i);
        let dp: Vec<f64> = entries.iter().map(|e| inner(dout.row(i), &e.mean(&head.v))).collect();
        let delta = inner(&p, &dp);
        for ((entry, p), dp) in entries.iter().zip(&p).zip(&dp) {
            let dz = scale * p * (dp - delta);
            dq.row_mut(i).iter_mut().zip(entry.mean(&head.k)).for_each(|(dq, k)| *dq += dz * k);
            for &j in &entry.tokens {
                let share = dz / entry.tokens.len() as f64;
                dk.row_mut(j).iter_mut().zip(head.q.row(i)).for_each(|(dk, q)| *dk += share * q);
            }
        }
    }
    HeadGradients { dq, dk, parameters: Vec::new() }
}
