//! Means of clusters over the tokens that a row sees.

use crate::{
    call::cluster_plan::clusters,
    simd::{Level, distance},
};

/// The members of every cluster below a limit that only grows, and their means.
pub(super) struct Seen<'a> {
    x: &'a [f32],
    dim: usize,
    labels: &'a [i32],
    /// Tokens below this are taken in.
    limit: usize,
    pub counts: Vec<usize>,
    sums: Vec<f64>,
    means: Vec<f32>,
    /// Clusters whose mean is not that of their sum.
    stale: Vec<usize>,
}

impl<'a> Seen<'a> {
    /// Before the first of the rows of `x [labels.len(), dim]`.
    pub fn new(x: &'a [f32], dim: usize, labels: &'a [i32]) -> Self {
        let len = clusters(labels);
        let (sums, means) = (vec![0.0; len * dim], vec![0.0; len * dim]);
        Self { x, dim, labels, limit: 0, counts: vec![0; len], sums, means, stale: Vec::new() }
    }

    /// Takes in the tokens below `limit`.
    pub fn extend(&mut self, limit: usize) {
        for n in self.limit..limit {
            let Ok(c) = usize::try_from(self.labels[n]) else { continue };
            self.counts[c] += 1;
            self.stale.push(c);
            let sum = &mut self.sums[c * self.dim..][..self.dim];
            sum.iter_mut().zip(&self.x[n * self.dim..]).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        self.limit = self.limit.max(limit);
    }

    /// The mean of every cluster, 0 for one without members.
    pub fn means(&mut self) -> &[f32] {
        self.stale.sort_unstable();
        self.stale.dedup();
        for c in self.stale.drain(..) {
            let mean = self.means[c * self.dim..].iter_mut().zip(&self.sums[c * self.dim..][..self.dim]);
            mean.for_each(|(mean, sum)| *mean = (sum / self.counts[c] as f64) as f32);
        }
        &self.means
    }

    /// The first of the clusters whose mean is nearest to token `n`; none where no cluster has a member yet.
    pub fn nearest(&mut self, level: Level, n: usize) -> Option<usize> {
        let token = &self.x[n * self.dim..][..self.dim];
        let mut distances = vec![0.0; self.counts.len()];
        distance::squares(level, self.means(), token, &mut distances);
        let present = (0..distances.len()).filter(|&c| self.counts[c] > 0);
        present.reduce(|best, c| if distances[c] < distances[best] { c } else { best })
    }
}
