//! Labels that depend on no later token: running clusters, and fixed centroids.

use super::kmeans::Points;
use crate::simd::{Level, distance};

/// Labels given in order, with a limit on the size: a label that is full is replaced by a fresh one.
#[derive(Debug, Clone)]
struct Labels {
    /// The open label of every leader.
    open: Vec<u32>,
    sizes: Vec<usize>,
    cap: usize,
}

impl Labels {
    fn new(leaders: usize, taken: usize, cap: usize) -> Self {
        Self { open: (0..leaders as u32).collect(), sizes: vec![taken; leaders], cap }
    }

    fn next(&mut self, leader: usize) -> u32 {
        if self.sizes[self.open[leader] as usize] >= self.cap {
            self.open[leader] = self.sizes.len() as u32;
            self.sizes.push(0);
        }
        self.sizes[self.open[leader] as usize] += 1;
        self.open[leader]
    }
}

/// Clusters of the points so far.
#[derive(Debug, Clone)]
pub(in super::super) struct Running {
    /// Leaders that there will be.
    leaders: usize,
    dim: usize,
    /// Of the leaders that there are.
    means: Vec<f32>,
    sums: Vec<f64>,
    counts: Vec<f64>,
    /// Whether the means follow the points.
    moving: bool,
    labels: Labels,
    distances: Vec<f32>,
}

impl Running {
    /// The first points lead a cluster each; a later one joins the nearest running mean.
    pub fn new(leaders: usize, dim: usize, cap: usize) -> Self {
        let labels = Labels::new(leaders, 1, cap);
        let (means, sums, counts, distances) = (Vec::new(), Vec::new(), Vec::new(), vec![0.0; leaders]);
        Self { leaders, dim, means, sums, counts, moving: true, labels, distances }
    }

    /// Every point joins the nearest row of `codebook [.., dim]`.
    pub fn fixed(codebook: &[f32], dim: usize, cap: usize) -> Self {
        let leaders = codebook.len() / dim;
        let labels = Labels::new(leaders, 0, cap);
        Self { moving: false, labels, means: codebook.to_vec(), ..Self::new(leaders, dim, cap) }
    }

    /// The label of the next point, and where it does not lead a cluster itself its leader.
    fn label(&mut self, level: Level, x: &[f32]) -> (u32, Option<usize>) {
        let led = self.means.len() / self.dim;
        if led < self.leaders {
            self.means.extend_from_slice(x);
            self.sums.extend(x.iter().map(|&x| f64::from(x)));
            self.counts.push(1.0);
            return (led as u32, None);
        }
        let leader = nearest(level, &self.means, x, &mut self.distances);
        (self.labels.next(leader), Some(leader))
    }

    /// Moves a mean towards a point.
    fn absorb(&mut self, leader: usize, x: &[f32]) {
        if !self.moving {
            return;
        }
        self.counts[leader] += 1.0;
        let count = self.counts[leader];
        let sum = &mut self.sums[leader * self.dim..][..self.dim];
        sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
        let mean = &mut self.means[leader * self.dim..][..self.dim];
        mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = (*sum / count) as f32);
    }

    /// The label of the next point, which the later ones find in its cluster.
    pub fn next(&mut self, level: Level, x: &[f32]) -> usize {
        let (label, leader) = self.label(level, x);
        if let Some(leader) = leader {
            self.absorb(leader, x);
        }
        label as usize
    }
}

/// The labels of [`Running`] clusters, whose means stand still within each block of `block` positions.
pub(super) fn online(points: Points<'_>, mut running: Running, block: usize, level: Level) -> Vec<u32> {
    let mut given = Vec::with_capacity(points.tokens.len());
    let mut pending: Vec<(usize, usize)> = Vec::new();
    let block_of = |n: usize| points.tokens[n] as usize / block;
    for n in 0..points.tokens.len() {
        if pending.last().is_some_and(|&(_, last)| block_of(last) != block_of(n)) {
            pending.drain(..).for_each(|(leader, n)| running.absorb(leader, points.row(n)));
        }
        let (label, leader) = running.label(level, points.row(n));
        given.push(label);
        pending.extend(leader.map(|leader| (leader, n)));
    }
    given
}

/// The first of the rows of `centres` that are nearest to `x`.
pub(super) fn nearest(level: Level, centres: &[f32], x: &[f32], distances: &mut [f32]) -> usize {
    distance::squares(level, centres, x, distances);
    let nearer = |best: usize, n: usize| if distances[n] < distances[best] { n } else { best };
    (1..distances.len()).fold(0, nearer)
}
