//! Labels that depend on no later token: running clusters, and fixed centroids.

use super::kmeans::Points;
use crate::simd::{Level, distance};

/// Labels given in order, with a limit on the size: a label that is full is replaced by a fresh one.
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

/// The first points lead a cluster each; a later one joins the nearest running mean as of the start of its block of
/// `block` positions.
pub(super) fn online(points: Points<'_>, clusters: usize, block: usize, cap: usize, level: Level) -> Vec<u32> {
    let (n, dim) = (points.tokens.len(), points.dim);
    let leaders = clusters.min(n);
    let mut means: Vec<f32> = (0..leaders).flat_map(|n| points.row(n)).copied().collect();
    let mut sums: Vec<f64> = means.iter().map(|&x| x.into()).collect();
    let mut counts = vec![1.0; leaders];
    let mut labels = Labels::new(leaders, 1, cap);
    let mut given: Vec<u32> = (0..leaders as u32).collect();
    let mut distances = vec![0.0; leaders];
    let mut pending: Vec<(usize, usize)> = Vec::new();
    let block_of = |n: usize| points.tokens[n] as usize / block;
    for n in leaders..n {
        if pending.last().is_some_and(|&(_, last)| block_of(last) != block_of(n)) {
            for (leader, n) in pending.drain(..) {
                counts[leader] += 1.0;
                let sum = &mut sums[leader * dim..][..dim];
                sum.iter_mut().zip(points.row(n)).for_each(|(sum, &x)| *sum += f64::from(x));
                let mean = &mut means[leader * dim..][..dim];
                mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = (*sum / counts[leader]) as f32);
            }
        }
        let leader = nearest(level, &means, points.row(n), &mut distances);
        given.push(labels.next(leader));
        pending.push((leader, n));
    }
    given
}

/// Every point joins the nearest row of `codebook [.., dim]`.
pub(super) fn by_codebook(points: Points<'_>, codebook: &[f32], cap: usize, level: Level) -> Vec<u32> {
    let mut distances = vec![0.0; codebook.len() / points.dim];
    let mut labels = Labels::new(distances.len(), 0, cap);
    (0..points.tokens.len()).map(|n| labels.next(nearest(level, codebook, points.row(n), &mut distances))).collect()
}

/// The first of the rows of `centres` that are nearest to `x`.
pub(super) fn nearest(level: Level, centres: &[f32], x: &[f32], distances: &mut [f32]) -> usize {
    distance::squares(level, centres, x, distances);
    let nearer = |best: usize, n: usize| if distances[n] < distances[best] { n } else { best };
    (1..distances.len()).fold(0, nearer)
}
