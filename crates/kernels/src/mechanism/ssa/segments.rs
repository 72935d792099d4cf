//! Runs of tokens that are clustered each by itself, so that clusters never change once they are made.

use std::ops::Range;

use super::{CausalClusters, Ssa};

/// Where the clusters that a query may see end: in a causal call of [`CausalClusters::Segment`], with the segment before its own; else
/// with the last key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segments {
    size: usize,
    /// `seq_kv - seq_q`: the last query is at the position of the last key.
    shift: usize,
    causal: bool,
}

impl Segments {
    /// Of `seq_q` queries and `seq_kv` keys.
    pub fn new(m: &Ssa, causal: bool, seq_q: usize, seq_kv: usize) -> Self {
        match m.causal_clusters {
            CausalClusters::Segment { size } if causal => Self { size, shift: seq_kv.saturating_sub(seq_q), causal },
            _ => Self { size: usize::MAX, shift: 0, causal: false },
        }
    }

    /// The segment of a key.
    pub fn of_key(&self, j: usize) -> usize {
        j / self.size
    }

    /// The segment of a query: it sees the clusters of those before.
    pub fn of_query(&self, i: usize) -> usize {
        // All keys are of segment 0, without causality, and all queries come after them.
        if self.causal { (i + self.shift) / self.size } else { 1 }
    }

    /// Segments of `seq_kv` keys that have all of theirs: what comes after them is in no cluster yet.
    pub fn complete(&self, seq_kv: usize) -> usize {
        if self.causal { seq_kv / self.size } else { 1 }
    }

    /// Its keys, of `seq_kv`.
    pub fn keys(&self, segment: usize, seq_kv: usize) -> Range<usize> {
        let start = segment.saturating_mul(self.size).min(seq_kv);
        start..start.saturating_add(self.size).min(seq_kv)
    }
}

impl Ssa {
    /// Clusters asked for in a segment that holds these keys; by default, as many as make `round(4 sqrt(n))` of any `n` first keys.
    /// What is asked for does not depend on how many keys follow.
    pub(crate) fn clusters_in(&self, keys: &Range<usize>) -> usize {
        let until = |end: usize| (4.0 * (end as f64).sqrt()).round() as usize;
        self.clusters.unwrap_or_else(|| (until(keys.end) - until(keys.start)).max(1))
    }
}
