//! The logits of a panel of queries with what each of them sees of every cluster.

use std::ops::Range;

use pulp::Simd;

use super::Sums;
use crate::{
    Shape,
    scratch::{Scratch, cut, scratch_len},
    simd::product::{Left, Right, Size, Store, store_product},
    structure::{
        clustered::graph::Graph,
        dense::{Head, PANEL, Rows, TILE_STRIDE, padded, transpose},
    },
};

/// The vectors of one row of a matrix `[.., TILE_STRIDE]`.
#[inline(always)]
pub(super) fn row<S: Simd>(matrix: &[f32], n: usize, width: usize) -> &[S::f32s] {
    S::as_simd_f32s(&matrix[n * TILE_STRIDE..][..width]).0
}

/// As [`row`], to be written.
#[inline(always)]
pub(super) fn row_mut<S: Simd>(matrix: &mut [f32], n: usize, width: usize) -> &mut [S::f32s] {
    S::as_mut_simd_f32s(&mut matrix[n * TILE_STRIDE..][..width]).0
}

/// Memory for one panel of any head with as many clusters.
pub(super) struct Room {
    memory: Scratch,
    clusters: usize,
}

impl Room {
    pub fn new(graph: &Graph, head: &Head<'_>) -> Self {
        let clusters = graph.keys.len();
        Self { memory: Scratch::new(room_for(clusters, &head.shape())), clusters }
    }
}

/// f32 of a [`Room`].
pub(super) fn room_for(clusters: usize, shape: &Shape) -> usize {
    scratch_len(sizes(clusters, shape))
}

fn sizes(clusters: usize, shape: &Shape) -> [usize; 8] {
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    // queries; sums of keys, of values; local keys, values; logits, shares; products with local keys
    [
        PANEL * shape.head_dim,
        clusters * d,
        clusters * dv,
        PANEL * d,
        PANEL * dv,
        clusters * TILE_STRIDE,
        clusters * TILE_STRIDE,
        PANEL * TILE_STRIDE,
    ]
}

/// Some queries, and what they see of the clusters.
pub(super) struct Panel<'a> {
    /// Kept queries with a cluster.
    pub queries: Vec<u32>,
    /// Their number in whole vectors.
    pub width: usize,
    /// Kept keys with a cluster that some of the queries see and others do not, and their clusters.
    pub local: Vec<(u32, usize)>,
    /// Sums of the keys and values that all queries see, a row per cluster.
    pub keys: Rows<'a>,
    pub values: Rows<'a>,
    pub local_keys: Rows<'a>,
    pub local_values: Rows<'a>,
    /// Base-2 logits `[clusters, queries]`, `-inf` where a query sees nothing of a cluster or all of it exactly.
    pub logits: &'a mut [f32],
    /// One over the number of keys that a query sees of a cluster, or 0.
    pub shares: &'a mut [f32],
    /// Room for a row per local key.
    pub products: &'a mut [f32],
    /// Number of clusters.
    pub clusters: usize,
    limits: Vec<u32>,
}

impl<'a> Panel<'a> {
    /// The queries at `positions`; `sums` must be those of the limit of the first of them.
    #[inline(always)]
    pub fn new<S: Simd>(
        simd: S,
        head: &Head<'a>,
        graph: &Graph,
        logit: f32,
        positions: Range<usize>,
        sums: &Sums,
        buffer: &'a mut Room,
    ) -> Self {
        let clusters = buffer.clusters;
        let all = buffer.memory.take(room_for(clusters, &head.shape()));
        let [q_panel, keys, values, local_k, local_v, logits, shares, products] =
            cut(all, sizes(clusters, &head.shape())).0;
        let (d, dv) = (head.head_dim, head.value_dim);
        let clustered = |i: &usize| graph.cluster_of_query(*i).is_some();
        let queries: Vec<u32> = positions.clone().filter(clustered).map(|i| i as u32).collect();
        let ends = sums.limit..graph.window.limit(positions.end - 1);
        let local: Vec<(u32, usize)> = ends.filter_map(|j| Some((j as u32, graph.cluster_of_key(j)?))).collect();
        let local_tokens: Vec<u32> = local.iter().map(|&(j, _)| j).collect();
        let limits = queries.iter().map(|&i| graph.window.limit(i as usize) as u32).collect();
        let width = padded(queries.len());
        transpose(head.q, &queries, |_| logit, q_panel);
        let mut panel = Self {
            width,
            local,
            keys: narrow(&sums.keys, d, keys),
            values: narrow(&sums.values, dv, values),
            local_keys: Rows::copy(head.k, &local_tokens, |_| 1.0, local_k),
            local_values: Rows::copy(head.v, &local_tokens, |_| 1.0, local_v),
            logits,
            shares,
            products,
            clusters,
            limits,
            queries,
        };
        let right = Right { data: &q_panel[..width * d], stride: width };
        panel.sum(simd, panel.keys, panel.local_keys, right, d, Matrix::Logits);
        panel.count(&sums.counts);
        panel.weigh(simd, &sums.counts);
        panel.exclude(graph);
        panel
    }

    /// Products of what the queries see of every cluster, `whole` and `local` rows of it, with `right`, into one of the
    /// matrices.
    #[inline(always)]
    pub fn sum<S: Simd>(
        &mut self,
        simd: S,
        whole: Rows<'_>,
        local: Rows<'_>,
        right: Right<'_>,
        depth: usize,
        into: Matrix<'_>,
    ) {
        let size = |rows| Size { rows, cols: self.width, depth };
        let rows = self.clusters;
        let into = match into {
            Matrix::Logits => &mut *self.logits,
            Matrix::Other(matrix) => matrix,
        };
        store_product(simd, size(rows), whole.as_left(), right, Store { data: into, stride: TILE_STRIDE });
        let store = Store { data: &mut *self.products, stride: TILE_STRIDE };
        store_product(simd, size(self.local.len()), local.as_left(), right, store);
        for (n, &(key, c)) in self.local.iter().enumerate() {
            // Queries are in order, so that those who see a key are the last.
            let first = self.limits.partition_point(|&limit| limit <= key);
            let sums = &mut into[c * TILE_STRIDE + first..c * TILE_STRIDE + self.limits.len()];
            sums.iter_mut().zip(&self.products[n * TILE_STRIDE + first..]).for_each(|(sum, x)| *sum += x);
        }
    }

    /// For every local key, the row of its cluster of `matrix` where it is seen, 0 elsewhere; in `self.products`.
    #[inline(always)]
    pub fn spread(&mut self, matrix: &[f32]) {
        for (n, &(key, c)) in self.local.iter().enumerate() {
            let first = self.limits.partition_point(|&limit| limit <= key);
            let row = &mut self.products[n * TILE_STRIDE..][..self.width];
            row.copy_from_slice(&matrix[c * TILE_STRIDE..][..self.width]);
            row[..first].fill(0.0);
        }
    }

    /// Writes the numbers of keys to `shares`.
    fn count(&mut self, counts: &[u32]) {
        for (c, &count) in counts.iter().enumerate() {
            self.shares[c * TILE_STRIDE..][..self.width].fill(count as f32);
        }
        for &(key, c) in &self.local {
            let first = self.limits.partition_point(|&limit| limit <= key);
            let row = &mut self.shares[c * TILE_STRIDE + first..c * TILE_STRIDE + self.width];
            row.iter_mut().for_each(|count| *count += 1.0);
        }
    }

    /// Turns numbers into shares, and sums of logits into logits of means.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, simd: S, counts: &[u32]) {
        let mut touched = vec![false; counts.len()];
        self.local.iter().for_each(|&(_, c)| touched[c] = true);
        let log2 = |count: f32| if count > 0.0 { count.log2() } else { f32::NEG_INFINITY };
        let share = |count: f32| if count > 0.0 { 1.0 / count } else { 0.0 };
        for (c, &count) in counts.iter().enumerate() {
            let mut logs = [log2(count as f32); PANEL];
            let shares = &mut self.shares[c * TILE_STRIDE..][..self.width];
            if touched[c] {
                logs.iter_mut().zip(&*shares).for_each(|(log, &count)| *log = log2(count));
                shares.iter_mut().for_each(|count| *count = share(*count));
            } else {
                shares.fill(share(count as f32));
            }
            // One arithmetic for all: whether a later key of the panel is in the cluster must not show in the rounding.
            let terms = row::<S>(self.shares, c, self.width).iter().zip(S::as_simd_f32s(&logs).0);
            for (logit, (share, log)) in row_mut::<S>(self.logits, c, self.width).iter_mut().zip(terms) {
                *logit = simd.mul_add_e_f32s(*logit, *share, *log);
            }
        }
    }

    /// Takes out what the queries see exactly.
    fn exclude(&mut self, graph: &Graph) {
        for (m, &i) in self.queries.iter().enumerate() {
            for &c in graph.cluster_of_query(i as usize).map_or(&[][..], |a| graph.keys_of(a)) {
                self.logits[c as usize * TILE_STRIDE + m] = f32::NEG_INFINITY;
            }
        }
    }

    /// Elements of `matrix [.., clusters or local keys]` as the left side of a product with a row per query.
    pub fn by_query(matrix: &[f32]) -> Left<'_> {
        Left { data: matrix, row_stride: 1, depth_stride: TILE_STRIDE }
    }
}

/// Where [`Panel::sum`] writes.
pub(super) enum Matrix<'a> {
    Logits,
    Other(&'a mut [f32]),
}

/// Rows of `dim` in f32, padded to whole vectors.
fn narrow<'a>(sums: &[f64], dim: usize, buffer: &'a mut [f32]) -> Rows<'a> {
    let stride = padded(dim);
    for (row, sums) in buffer.chunks_exact_mut(stride).zip(sums.chunks_exact(dim)) {
        let (head, pad) = row.split_at_mut(dim);
        head.iter_mut().zip(sums).for_each(|(x, &sum)| *x = sum as f32);
        pad.fill(0.0);
    }
    Rows { data: buffer, stride }
}
