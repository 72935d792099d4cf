//! A plan as dense matrices, for implementations out of tensor operations.

use super::graph::{Graph, Window};
use crate::{ClusterPlan, Mask, Mechanism, Result, Shape, mechanism::Estimator};

/// What a [`ClusterPlan`] makes of a call, as matrices of `[batch, heads, ..]`, row-major. With the scaled scores `S`:
/// the logits of single tokens are `S + log_weight`, those of mean tokens `(S * far) member / count + ln count`; one
/// softmax runs over both.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanMatrices {
    /// Clusters of keys, of the head that has most.
    pub clusters: usize,
    /// `[.., seq_q, seq_kv]`: 0 for exact pairs, the constant of sampled edges, `-inf` elsewhere.
    pub log_weight: Vec<f32>,
    /// `[.., seq_q, seq_kv]`: 1 where the query sees the key in the mean of its cluster, else 0.
    pub far: Vec<f32>,
    /// `[.., seq_kv, clusters]`: 1 where the key is in the cluster, else 0.
    pub member: Vec<f32>,
    /// `[.., seq_q, clusters]`: the keys in each mean that the query sees, 0 for none.
    pub count: Vec<f32>,
}

impl ClusterPlan {
    /// The plan as matrices, for a call of `mechanism` (an `ssa`) with these sizes and masks.
    ///
    /// # Errors
    /// Those of [`crate::Operator::new`]; [`crate::Error::Length`] for a plan of other sizes.
    pub fn matrices(&self, mechanism: &Mechanism, shape: &Shape, mask: &Mask<'_>) -> Result<PlanMatrices> {
        let m = &mechanism.clusters()?;
        mechanism.check(shape, mask.causal)?;
        self.check("plan", shape, m.estimator != Estimator::Centroid)?;
        let Shape { heads, seq_q, seq_kv, .. } = *shape;
        let clusters = (0..self.slices()).map(|slice| self.clusters(slice)[1]).max().unwrap_or(0).max(1);
        let zeros = |rows: usize, cols: usize| vec![0.0; shape.slices() * rows * cols];
        let mut all = PlanMatrices {
            clusters,
            log_weight: vec![f32::NEG_INFINITY; shape.slices() * seq_q * seq_kv],
            far: zeros(seq_q, seq_kv),
            member: zeros(seq_kv, clusters),
            count: zeros(seq_q, clusters),
        };
        let window = Window::new(m, mask.causal || m.causal, shape);
        for slice in 0..self.slices() {
            let b = slice / heads;
            let keep_q = mask.query.map(|keep| &keep[b * seq_q..][..seq_q]);
            let keep_k = mask.key.map(|keep| &keep[b * seq_kv..][..seq_kv]);
            let graph = Graph::new(self.head(slice).clone(), keep_q, keep_k, window);
            for j in 0..seq_kv {
                if let Some(c) = graph.cluster_of_key(j) {
                    all.member[(slice * seq_kv + j) * clusters + c] = 1.0;
                }
            }
            let groups = (0..graph.queries.len()).map(Some).chain([None]);
            for (group, i) in groups.flat_map(|group| graph.queries.group(group).iter().map(move |&i| (group, i))) {
                let row = slice * seq_q + i as usize;
                let has_cluster = group.is_some() && group != graph.queries.strays();
                let centroid = m.estimator == Estimator::Centroid && has_cluster;
                all.fill_row(&graph, group, i as usize, row, centroid);
            }
        }
        Ok(all)
    }
}

impl PlanMatrices {
    /// Writes the row of query `i`, number `row` of all.
    fn fill_row(&mut self, graph: &Graph, group: Option<usize>, i: usize, row: usize, centroid: bool) {
        let (seq_kv, limit) = (graph.window.seq_kv, graph.window.limit(i));
        let log_weight = &mut self.log_weight[row * seq_kv..][..seq_kv];
        let exact = graph.exact_keys(group).flatten().filter(|&&j| (j as usize) < limit);
        let near = group.into_iter().flat_map(|a| graph.own_keys(i, a));
        exact.map(|&j| j as usize).chain(near).for_each(|j| log_weight[j] = 0.0);
        graph.edges_of(i).iter().for_each(|edge| log_weight[edge.key as usize] = edge.log_weight as f32);
        for j in (0..limit).filter(|_| centroid) {
            let Some(c) = graph.cluster_of_key(j).filter(|_| log_weight[j] == f32::NEG_INFINITY) else { continue };
            self.far[row * seq_kv + j] = 1.0;
            self.count[row * self.clusters + c] += 1.0;
        }
    }
}
