//! The labels of tokens: all at once, as they come, or segment by segment.

use super::{
    Head, Stage, Stream,
    kmeans::{self, Points},
    online::{self, Running},
    space::Space,
};
use crate::{
    call::cluster_plan::NONE,
    mechanism::{Segments, Ssa},
    parallel,
    simd::Level,
};

impl Head<'_> {
    /// Labels of the rows of `x` that are in the fit; none for the others.
    pub(super) fn fit(&self, x: &[f32], fit: &[bool], stage: Stage) -> Vec<i32> {
        let tokens: Vec<u32> = (0..fit.len()).filter(|&n| fit[n]).map(|n| n as u32).collect();
        let mut labels = vec![NONE; fit.len()];
        if tokens.is_empty() {
            return labels;
        }
        let space = Space::of(self.m, self.dim);
        let x = space.points(self.level, x, &tokens);
        let found = if self.causal && self.m.routes_queries() {
            self.by_segment(Points { x: &x, dim: space.dim(), tokens: &tokens }, stage)
        } else {
            let points = Points { x: &x, dim: space.dim(), tokens: &tokens };
            let (asked, cap) = (self.m.clusters(self.seq_kv), self.m.cap(self.seq_kv, tokens.len()));
            if self.causal && self.codebook.is_none() {
                let running = Running::new(asked.min(tokens.len()), points.dim, cap);
                online::online(points, running, self.m.causal_clusters.block(), self.level)
            } else {
                self.clusters_of(points, self.stream(stage, &[]), [asked, cap])
            }
        };
        let compact = compact(&found);
        tokens.iter().zip(found).for_each(|(&n, label)| labels[n as usize] = compact[label as usize]);
        labels
    }

    /// Labels of the points of one segment.
    fn segment_labels(&self, segment: usize, points: Points<'_>, stage: Stage) -> Vec<u32> {
        if points.tokens.is_empty() {
            return Vec::new();
        }
        let asked = self.m.clusters_in(&self.segments.keys(segment, usize::MAX));
        let cap = self.m.cap_of(asked, points.tokens.len());
        self.clusters_of(points, self.stream(stage, &[segment as u64]), [asked, cap])
    }

    /// Labels of points, of the codebook's rows or of as many clusters as are `asked` for, none larger than `cap`.
    fn clusters_of(&self, points: Points<'_>, stream: Stream, [asked, cap]: [usize; 2]) -> Vec<u32> {
        if let Some(codebook) = self.codebook {
            let block = self.m.causal_clusters.block();
            return online::online(points, Running::fixed(codebook, self.dim, cap), block, self.level);
        }
        let mut found = kmeans::kmeans(points, asked, self.m.kmeans_iterations, stream, self.level);
        kmeans::split_large(points, &mut found, cap);
        found
    }

    /// Labels of the first of the points, those whose segments are complete: each of these by itself, and counted on from those before.
    fn by_segment(&self, points: Points<'_>, stage: Stage) -> Vec<u32> {
        let until = |end: usize| points.tokens.partition_point(|&n| (n as usize) < end);
        let of_segment = |segment: usize| {
            let keys = self.segments.keys(segment, self.seq_kv);
            let tokens = &points.tokens[until(keys.start)..until(keys.end)];
            self.segment_labels(segment, Points { tokens, ..points }, stage)
        };
        let found = parallel::map(0..self.segments.complete(self.seq_kv), of_segment);
        let (mut all, mut first) = (Vec::with_capacity(points.tokens.len()), 0);
        for labels in found {
            all.extend(labels.iter().map(|label| first + label));
            first = all.iter().max().map_or(0, |&most| most + 1);
        }
        all
    }
}

/// The clusters of a segment by itself, whose unmasked rows are `k [rows, dim]`, at `places` in it: the rows of each. Global tokens are in
/// none.
pub(in super::super) fn of_segment(
    (m, level, index): (&Ssa, Level, [u64; 2]),
    codebook: Option<&[f32]>,
    (k, dim): (&[f32], usize),
    (segment, places): (usize, &[usize]),
) -> Vec<Vec<usize>> {
    let size = places.len();
    let segments = Segments::new(m, true, size, size);
    let (keep_q, keep_k) = (None, None);
    let head = Head {
        m,
        q: &[],
        k,
        dim,
        seq_q: 0,
        seq_kv: size,
        keep_q,
        keep_k,
        causal: true,
        segments,
        codebook,
        level,
        index,
    };
    let first = segments.keys(segment, usize::MAX).start;
    let tokens: Vec<u32> = (0..size).filter(|n| !m.is_global(first + places[*n])).map(|n| n as u32).collect();
    let space = Space::of(m, dim);
    let x = space.points(level, k, &tokens);
    let labels = head.segment_labels(segment, Points { x: &x, dim: space.dim(), tokens: &tokens }, Stage::Keys);
    let mut members = vec![Vec::new(); labels.iter().max().map_or(0, |&most| most as usize + 1)];
    tokens.iter().zip(labels).for_each(|(&n, label)| members[label as usize].push(n as usize));
    members.retain(|members| !members.is_empty());
    members
}

/// The labels without those that no point has, in order.
pub(super) fn compact(labels: &[u32]) -> Vec<i32> {
    let mut used = vec![NONE; labels.iter().max().map_or(0, |&most| most as usize + 1)];
    labels.iter().for_each(|&label| used[label as usize] = 0);
    used.iter_mut().filter(|slot| **slot == 0).zip(0..).for_each(|(slot, label)| *slot = label);
    used
}
