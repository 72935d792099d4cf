//! Mean tokens of what a causal query sees of every cluster: they differ from query to query, as running means.
//!
//! Queries pass in panels, in the order of the tokens. What a panel sees of a cluster is the sum over all keys before its
//! first query's limit, which all of its queries share, and a few keys more: both are tile products. (Keys by key, the
//! whole matrix of running sums would have to be read for every query.)

mod backward;
mod forward;
mod panel;

use std::ops::Range;

pub(super) use backward::backward;
pub(super) use forward::forward;

use super::graph::{Graph, Window};
use crate::{
    Shape,
    parallel::workers,
    structure::dense::{Head, PANEL, TILE_STRIDE, padded},
};

/// Parts of a head's panels that are worked on at once. A constant, lest results depend on the machine.
const CHUNKS: usize = 32;

/// Consecutive positions whose limits differ by less than a panel, at most [`PANEL`] of them.
fn panels(seq: usize, window: Window) -> Vec<Range<usize>> {
    let block = window.block.unwrap_or(1).min(seq);
    let whole = if block < PANEL { PANEL / block * block } else { block };
    let cut = |start: usize| {
        let end = (start + whole).min(seq);
        (start..end).step_by(PANEL).map(move |start| start..(start + PANEL).min(end))
    };
    (0..seq).step_by(whole).flat_map(cut).collect()
}

/// Bytes of the sums of the chunks that are worked on at once, and of what is made from them: forward, backward.
pub(super) fn allocated(shape: &Shape, clusters: usize) -> [usize; 2] {
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    let sums = clusters * (size_of::<f64>() * (shape.head_dim + shape.value_dim) + size_of::<u32>());
    let buffer = size_of::<f32>() * panel::room_for(clusters, shape);
    let passed = size_of::<f32>() * clusters * (d + dv);
    let slopes = size_of::<f32>() * (clusters * TILE_STRIDE + PANEL * d.max(dv));
    let (heads, threads) = (workers(shape.slices()), workers(CHUNKS * shape.slices()));
    let chunks = heads * CHUNKS * sums;
    // Chunks are given up as they are worked on, and what they pass on is smaller.
    [chunks + threads * buffer, chunks + threads * (buffer + sums + slopes + passed)]
}

/// Consecutive panels with the sums over all keys before the limit of their first query.
struct Chunk {
    panels: Vec<Range<usize>>,
    sums: Sums,
}

impl Chunk {
    /// How many queries the panels have.
    fn len(&self) -> usize {
        self.panels.iter().map(Range::len).sum()
    }
}

/// Sums over keys of every cluster.
#[derive(Clone)]
struct Sums {
    /// Keys below this are in the sums.
    limit: usize,
    counts: Vec<u32>,
    keys: Vec<f64>,
    values: Vec<f64>,
}

impl Sums {
    fn new(graph: &Graph, head: &Head<'_>) -> Self {
        let clusters = graph.keys.len();
        Self {
            limit: 0,
            counts: vec![0; clusters],
            keys: vec![0.0; clusters * head.head_dim],
            values: vec![0.0; clusters * head.value_dim],
        }
    }

    /// Takes in the keys from `self.limit` to `limit`.
    fn extend(&mut self, graph: &Graph, head: &Head<'_>, limit: usize) {
        for j in self.limit..limit {
            let Some(c) = graph.cluster_of_key(j) else { continue };
            self.counts[c] += 1;
            add(&mut self.keys[c * head.head_dim..], head.k.row(j));
            add(&mut self.values[c * head.value_dim..], head.v.row(j));
        }
        self.limit = self.limit.max(limit);
    }
}

fn add(sums: &mut [f64], x: &[f32]) {
    sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
}

/// All panels of a head in chunks of about equal length.
fn chunks(graph: &Graph, head: &Head<'_>) -> Vec<Chunk> {
    let panels = panels(head.seq_q, graph.window);
    let mut sums = Sums::new(graph, head);
    let part = |panels: &[Range<usize>]| {
        sums.extend(graph, head, graph.window.limit(panels[0].start));
        Chunk { panels: panels.to_vec(), sums: sums.clone() }
    };
    panels.chunks(panels.len().div_ceil(CHUNKS)).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Shape,
        mechanism::{CausalClusters, Ssa},
    };

    #[test]
    fn panels_cover_all_positions_and_share_most_of_what_they_see() {
        for seq in [1, 5, 63, 64, 65, 200] {
            for block in [1, 2, 9, 48, 63, 64, 65, 130, 1000] {
                let blocks = Ssa::default().with_causal_clusters(CausalClusters::Block { size: block });
                let window = Window::new(&blocks, true, &Shape::square(1, 1, seq, 1));
                let panels = panels(seq, window);
                assert_eq!((panels[0].start, panels[panels.len() - 1].end), (0, seq));
                assert!(panels.windows(2).all(|pair| pair[0].end == pair[1].start));
                for panel in panels {
                    assert!(!panel.is_empty() && panel.len() <= PANEL);
                    assert!(window.limit(panel.end - 1) - window.limit(panel.start) < PANEL);
                }
            }
        }
    }
}
