//! What the clustered structure costs, clusters being of equal size.

use super::{backward, forward, memory};
use crate::{
    Plan, Shape, Strategy,
    mechanism::{Estimator, Pairs, Sampler, Segments, Ssa},
    structure::dense::{self, log_sum},
};

/// The plan of one call, planning included. What is found decides the real number of clusters and edges.
pub(crate) fn plan(m: &Ssa, s: &Shape, causal: bool) -> Plan {
    let counts = Counts::new(m, s, causal);
    let entries = counts.entries;
    let [allocated_forward, allocated_backward] = memory::allocated(m, s, causal, &counts);
    let slices = s.slices() as u64;
    let [d, dv] = [s.head_dim as u64, s.value_dim as u64];
    let tensors = (s.q_len() + s.k_len() + s.v_len()) as u64;
    let channels = m.jl_dim.unwrap_or(s.head_dim) as u64;
    // Lengths and counts are bounded one by one, not this product of all of them.
    let planning = [2, counts.products, channels].into_iter().fold(slices, u64::saturating_mul);
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "exact entries in gathered tiles, the others row by row; no score is stored",
        tile: (dense::QUERIES.min(s.seq_q), dense::KEYS.min(s.seq_kv)),
        flops_forward: planning.saturating_add(slices * entries * 2 * (d + dv)),
        flops_backward: slices * entries * 2 * (4 * d + 3 * dv),
        exps_forward: slices * entries,
        exps_backward: slices * entries,
        // Every tensor is gathered once; planning reads what it clusters from the caches.
        bytes_forward: 4 * (2 * tensors + s.out_len() as u64),
        bytes_backward: 4 * (4 * tensors + 3 * s.out_len() as u64),
        scratch_forward: forward::work(s),
        scratch_backward: backward::work(s),
        stats: log_sum::SAVED * s.slices() * s.seq_q,
        allocated_forward,
        allocated_backward,
    }
}

/// Clusters that are asked for.
pub(super) fn clusters(m: &Ssa, s: &Shape) -> usize {
    m.clusters(s.seq_kv).min(s.seq_kv)
}

/// Segments that are counted one by one.
const MOST_SEGMENTS: usize = 4096;

/// Of causal segments, clusters being of equal size and all keys kept.
fn of_segments(m: &Ssa, s: &Shape) -> Counts {
    let segments = Segments::new(m, true, s.seq_q, s.seq_kv);
    let passes = m.kmeans_iterations as u64 + 2;
    let first = s.seq_kv - s.seq_q.min(s.seq_kv);
    let globals = m.globals(s.seq_kv).len() as u64;
    let complete = segments.complete(s.seq_kv);
    // Very many segments are counted several at a time.
    let step = complete.div_ceil(MOST_SEGMENTS).max(1);
    let (mut entries, mut products, mut clusters) = (0_u64, 0_u64, 0_u64);
    for segment in (0..=complete).step_by(step) {
        let (keys, last) = (segments.keys(segment, s.seq_kv), (segment + step).min(complete + 1) - 1);
        let end = segments.keys(last, s.seq_kv).end;
        let (before, queries) = (keys.start as u64, end.saturating_sub(keys.start.max(first)) as u64);
        let routes = (m.routes as u64).min(clusters);
        let exact = routes * before.div_ceil(clusters.max(1)) + globals.min(before);
        let means = if m.estimator == Estimator::Centroid { clusters - routes } else { 0 };
        let near = (keys.len() as u64).div_ceil(2);
        entries = entries.saturating_add(queries.saturating_mul((near + exact + means).min(before + near)));
        products = products.saturating_add(queries.saturating_mul(clusters));
        if segment < complete {
            let segments = (segment + step).min(complete) - segment;
            let asked = (m.clusters_in(&keys).min(keys.len()) as u64).saturating_mul(segments as u64);
            products = products.saturating_add((keys.len() as u64 * passes).saturating_mul(asked));
            clusters += asked;
        }
    }
    Counts { entries, products, edges: 0, pairs: 0 }
}

/// What one (batch, head) has.
pub(super) struct Counts {
    /// Entries that all queries have together.
    pub entries: u64,
    /// Products of a query or a key with a centre, in planning.
    products: u64,
    /// Of the entries, sampled edges.
    pub edges: usize,
    /// Pairs of clusters that they are drawn from; 0 where rows draw.
    pub pairs: usize,
}

impl Counts {
    fn new(m: &Ssa, s: &Shape, causal: bool) -> Self {
        if causal && m.routes_queries() {
            return of_segments(m, s);
        }
        let clusters = clusters(m, s) as u64;
        let (queries, keys) = (s.seq_q as u64, s.seq_kv as u64);
        let routes = (m.routes as u64).min(clusters);
        let outliers = (m.outlier_globals as u64).min(keys) * queries;
        let globals = m.globals(s.seq_kv).len() as u64 * (queries + if m.shared() { keys } else { 0 }) + outliers;
        let chosen = (m.outlier_queries as u64).min(queries) * routes;
        let exact = keys.div_ceil(clusters) * (queries * routes + chosen) / if causal { 2 } else { 1 };
        let all_pairs = clusters * (clusters - routes);
        let pairs = if let Pairs::Count(count) = m.pairs { (count as u64).min(all_pairs) } else { all_pairs };
        let samples = m.samples(s.seq_kv) as u64;
        let (edges, pairs) = match (m.estimator, m.sampler(causal)) {
            (Estimator::Centroid, _) => (0, 0),
            (_, Sampler::Row) => (queries.saturating_mul(samples), 0),
            _ => (pairs.saturating_mul(samples), pairs),
        };
        let edges = edges.min(queries * keys);
        let means = if m.estimator == Estimator::Centroid { queries * (clusters - routes) } else { 0 };
        let entries = exact.saturating_add(globals).saturating_add(edges + means).min(queries * keys);
        let fits = if m.shared() { keys } else { keys + queries };
        let passes = if causal { 1 } else { m.kmeans_iterations as u64 + 2 };
        let products = fits.saturating_mul(clusters).saturating_mul(passes);
        Self { entries, products, edges: edges as usize, pairs: pairs as usize }
    }
}
