//! Mean tokens: what stands for a cluster that a query does not see exactly, where every query sees the same of it.

use std::ops::Range;

use super::{graph::Graph, members::mean};
use crate::structure::dense::{Head, Rows, padded};

/// The mean key and value of every cluster that has keys, with the logarithm of their number.
///
/// The logarithm lies behind the channels of the key: against queries with a one there, the product is the logit.
pub(super) struct Far {
    /// The clusters, ascending.
    pub clusters: Vec<u32>,
    /// `[clusters, key_stride]`.
    pub keys: Vec<f32>,
    /// `[clusters, value_stride]`.
    pub values: Vec<f32>,
    pub key_stride: usize,
    pub value_stride: usize,
}

impl Far {
    pub fn new(graph: &Graph, head: &Head<'_>) -> Self {
        let (d, dv) = (head.head_dim, head.value_dim);
        let has_mean = |&c: &usize| Some(c) != graph.keys.strays() && !graph.keys.of(c).is_empty();
        let clusters: Vec<u32> = (0..graph.keys.len()).filter(has_mean).map(|c| c as u32).collect();
        let (key_stride, value_stride) = (padded(d + 1), padded(dv));
        let mut keys = vec![0.0; clusters.len() * key_stride];
        let mut values = vec![0.0; clusters.len() * value_stride];
        let rows = keys.chunks_exact_mut(key_stride).zip(values.chunks_exact_mut(value_stride));
        for (&c, (key, value)) in clusters.iter().zip(rows) {
            let tokens = graph.keys.of(c as usize);
            mean(head.k, tokens.iter(), key);
            mean(head.v, tokens.iter(), value);
            key[d] = (tokens.len() as f64).log2() as f32;
        }
        Self { clusters, keys, values, key_stride, value_stride }
    }

    /// Mean keys and values as a tile.
    pub fn rows(&self, range: Range<usize>) -> (Rows<'_>, Rows<'_>) {
        let rows = |data, stride| Rows { data: part(data, range.clone(), stride), stride };
        (rows(&self.keys, self.key_stride), rows(&self.values, self.value_stride))
    }

    /// f32 of the gradients of all mean keys and values, in rows of whole vectors.
    pub fn gradient_len(&self, head_dim: usize) -> usize {
        self.clusters.len() * (padded(head_dim) + self.value_stride)
    }

    /// The mean tokens that the queries of cluster `a` see: runs of them between those seen exactly.
    pub fn seen_by<'s>(&'s self, graph: &'s Graph, a: usize) -> impl Iterator<Item = Range<usize>> + 's {
        let exact = graph.keys_of(a);
        let mut at = if Some(a) == graph.queries.strays() { self.clusters.len() } else { 0 };
        std::iter::from_fn(move || {
            while at < self.clusters.len() && exact.contains(&self.clusters[at]) {
                at += 1;
            }
            let start = at;
            while at < self.clusters.len() && !exact.contains(&self.clusters[at]) {
                at += 1;
            }
            (start < at).then_some(start..at)
        })
    }
}

fn part(data: &[f32], rows: Range<usize>, stride: usize) -> &[f32] {
    &data[rows.start * stride..rows.end * stride]
}
