//! The entries that a plan of clusters gives every query, single tokens and mean tokens of clusters, and the making of plans.

mod edges;
mod labels;
mod planner;
mod random;

pub(super) use planner::plan;

use std::{borrow::Cow, cmp::Ordering};

use super::{head::Head, matrix::Matrix};
use crate::{
    call::cluster_plan::{HeadPlan, NONE, STRAY},
    mechanism::{CausalClusters, Estimator, Pairs, Sampler, Ssa},
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

    pub fn mean<'x>(&self, x: &'x Matrix) -> Cow<'x, [f64]> {
        if let [token] = self.tokens[..] {
            return Cow::Borrowed(x.row(token));
        }
        let column = |c: usize| self.tokens.iter().map(|&j| x.at(j, c)).sum::<f64>() / self.tokens.len() as f64;
        (0..x.cols).map(column).collect()
    }
}

/// How the segment of key `j` lies to that of query `i`: before it, or the same. Without causal segments every key is before.
fn segment_order(head: &Head, m: &Ssa, i: usize, j: usize) -> Ordering {
    let position = i + head.k.rows.saturating_sub(head.q.rows);
    match m.causal_clusters {
        CausalClusters::Segment { size } if head.causal => (j / size).cmp(&(position / size)),
        _ => Ordering::Less,
    }
}

/// Exact tokens: of the clusters that the query's is routed to, and those of no cluster; all, for a query of no cluster.
/// Then sampled tokens with their weight, or the mean of what is visible of every other cluster with the weight `n`. A stray
/// has no cluster and is in none: exact pairs of it are those with tokens of no cluster. Exact in any case: the past of the own segment.
pub(super) fn entries(head: &Head, m: &Ssa, plan: &HeadPlan, i: usize) -> Vec<Entry> {
    let block = m.causal_clusters.block();
    let position = i + head.k.rows.saturating_sub(head.q.rows);
    let past = |j: usize| !head.causal || j / block <= position / block;
    let visible = |j: &usize| head.keep_query[i] && head.keep_key[*j] && past(*j);
    let near = |j: &usize| segment_order(head, m, i, *j) == Ordering::Equal;
    let own = plan.label_q[i];
    let exact = |label: i32| match (own, label) {
        (NONE, _) | (_, NONE) => true,
        (STRAY, _) | (_, STRAY) => false,
        (a, c) => plan.exact.contains(&[a as u32, c as u32]),
    };
    let tokens = (0..head.k.rows).filter(visible).filter(|j| near(j) || exact(plan.label_k[*j]));
    let mut entries: Vec<Entry> = tokens.map(|j| Entry::token(j, 0.0)).collect();
    let edges = plan.edges.iter().filter(|edge| edge.query as usize == i && visible(&(edge.key as usize)));
    entries.extend(edges.map(|edge| Entry::token(edge.key as usize, edge.log_weight)));
    if m.estimator == Estimator::Centroid && own != STRAY {
        for label in (0..=plan.label_k.iter().copied().max().unwrap_or(-1)).filter(|&label| !exact(label)) {
            let of_label = |j: &usize| plan.label_k[*j] == label && !near(j);
            let tokens: Vec<usize> = (0..head.k.rows).filter(visible).filter(of_label).collect();
            let log_weight = (tokens.len() as f64).ln();
            entries.extend((!tokens.is_empty()).then_some(Entry { tokens, log_weight }));
        }
    }
    entries
}
