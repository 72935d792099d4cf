//! What a call allocates beside its scratch: plans, graphs and mean tokens, clusters being of equal size.

use super::{
    backward::SHARES,
    plan::{Counts, clusters},
    prefix,
};
use crate::{
    Shape,
    call::cluster_plan::Edge,
    mechanism::{ClusterMetric, Estimator, Ssa},
    parallel::workers,
    structure::dense::{QUERIES, padded},
};

/// Bytes of an f32, an index, or a label.
const WORD: usize = 4;
const EDGE: usize = size_of::<Edge>();

/// Bytes at the peak of the forward and of the backward pass, planning included.
pub(super) fn allocated(m: &Ssa, s: &Shape, causal: bool, counts: &Counts) -> [usize; 2] {
    let slices = s.slices();
    let planning = planning(m, s, causal, counts);
    let graph = 2 * WORD * (s.seq_q + s.seq_kv) + WORD * s.seq_q + EDGE * counts.edges;
    let clusters = clusters(m, s);
    let rows = |extra: usize| WORD * clusters * (padded(s.head_dim + extra) + padded(s.value_dim));
    let run = size_of::<(usize, super::graph::Run)>();
    let runs = |tokens: usize| run * (clusters + tokens / QUERIES);
    let (mut far, mut far_gradients, mut prefix) = (0, 0, [0; 2]);
    match m.estimator {
        Estimator::Centroid if causal && !m.routes_queries() => prefix = prefix::allocated(s, clusters),
        Estimator::Centroid => (far, far_gradients) = (rows(1), SHARES * rows(0)),
        _ => {}
    }
    let attending = slices * (graph + far);
    let by_key = (2 * WORD + 2 * WORD) * counts.edges + WORD * s.seq_kv;
    let forward = attending + (slices * runs(s.seq_q)).max(prefix[0]);
    let passed = slices * (far_gradients + by_key + runs(s.seq_kv));
    [planning.max(forward), planning.max(attending + passed.max(prefix[1]))]
}

/// Bytes at the peak of planning: heads that are planned, and those that are being planned.
fn planning(m: &Ssa, s: &Shape, causal: bool, counts: &Counts) -> usize {
    let tokens = s.seq_q + s.seq_kv;
    let planned = WORD * tokens + EDGE * counts.edges;
    let fit = if m.shared() { s.seq_kv } else { s.seq_q.max(s.seq_kv) };
    let channels = m.jl_dim.unwrap_or(s.head_dim);
    // A flag, the token's number, its labels before and after.
    let mut fitting = fit * (1 + 3 * WORD) + 3 * WORD * clusters(m, s) * channels;
    if m.jl_dim.is_some() || m.cluster_metric != ClusterMetric::Euclidean {
        fitting += WORD * fit * channels;
    }
    if !causal || m.routes_queries() {
        fitting += WORD * (padded(fit) * channels + fit);
    }
    // Members, and of every pair its clusters, its probability and its room.
    let drawing = planned + WORD * tokens + 2 * 16 * counts.pairs;
    let at_once = workers(s.slices());
    (s.slices() - at_once) * planned + at_once * fitting.max(drawing)
}
