//! Clusters of tokens that may all see each other: k-means++, Lloyd's algorithm, and a cap on the size.

use super::{
    panels::{self, Panels},
    random::{Stream, pick},
};
use crate::{Scratch, simd::Level};

/// What is clustered: the rows `tokens` of `x [.., dim]`.
#[derive(Clone, Copy)]
pub(super) struct Points<'a> {
    pub x: &'a [f32],
    pub dim: usize,
    pub tokens: &'a [u32],
}

impl<'a> Points<'a> {
    /// The `n`-th of the tokens.
    pub fn row(&self, n: usize) -> &'a [f32] {
        &self.x[self.tokens[n] as usize * self.dim..][..self.dim]
    }

    /// The mean of the tokens numbered `of`.
    fn mean(&self, of: &[usize]) -> Vec<f64> {
        let mut mean = vec![0.0; self.dim];
        for &n in of {
            mean.iter_mut().zip(self.row(n)).for_each(|(mean, &x)| *mean += f64::from(x));
        }
        mean.iter_mut().for_each(|mean| *mean /= of.len().max(1) as f64);
        mean
    }

    fn distance(&self, n: usize, centre: &[f32]) -> f64 {
        self.row(n).iter().zip(centre).map(|(&x, &c)| (f64::from(x) - f64::from(c)).powi(2)).sum()
    }
}

/// Labels of the points, at most `clusters` different ones: k-means++ and at most `iterations` rounds of Lloyd's algorithm. A
/// round that changes no label is the last: the next would start from the same means.
pub(super) fn kmeans(
    points: Points<'_>,
    clusters: usize,
    iterations: usize,
    mut stream: Stream,
    level: Level,
) -> Vec<u32> {
    let mut buffer = Scratch::default();
    let buffer = buffer.take(panels::scratch_len(points.tokens.len(), points.dim));
    let panels = Panels::new(points.x, points.dim, points.tokens, level, buffer);
    let (mut labels, mut centres) = first_centres(&panels, points, clusters, &mut stream);
    for _ in 0..iterations {
        let before = labels.clone();
        move_to_means(points, &labels, &mut centres);
        assign(&panels, points.dim, &centres, &mut labels);
        refill(points, &mut labels, &mut centres);
        if labels == before {
            break;
        }
    }
    labels
}

/// k-means++: every centre is a point, drawn by its squared distance to the nearest centre so far. Returns the label of
/// the nearest centre for every point, and the centres.
fn first_centres(
    panels: &Panels<'_>,
    points: Points<'_>,
    clusters: usize,
    stream: &mut Stream,
) -> (Vec<u32>, Vec<f32>) {
    let n = panels.len();
    let (mut nearest, mut labels) = (vec![f32::INFINITY; n], vec![0; n]);
    let mut chosen = stream.below(n);
    let mut centres = Vec::with_capacity(clusters.min(n) * points.dim);
    for label in 0..clusters.min(n) as u32 {
        centres.extend_from_slice(points.row(chosen));
        let sums = panels.nearer(points.row(chosen), label, &mut nearest, &mut labels);
        let total: f64 = sums.iter().sum();
        if total <= 0.0 || label as usize + 1 == clusters.min(n) {
            break;
        }
        chosen = pick_in_groups(&nearest, &sums, total, stream.uniform());
    }
    (labels, centres)
}

/// [`pick`], by way of the groups' sums.
fn pick_in_groups(weights: &[f32], sums: &[f64], total: f64, u: f64) -> usize {
    let group = pick(sums.iter().copied(), total, u);
    let before: f64 = sums[..group].iter().sum();
    let start = group * Panels::group();
    let weights = weights[start..].iter().take(Panels::group()).map(|&w| f64::from(w));
    // What is left of `u * total` when the groups before are gone.
    start + pick(weights, 1.0, u * total - before)
}

/// Every centre that has points becomes their mean.
fn move_to_means(points: Points<'_>, labels: &[u32], centres: &mut [f32]) {
    let dim = points.dim;
    let mut sums = vec![0.0_f64; centres.len()];
    let mut counts = vec![0_usize; centres.len() / dim];
    for (n, &label) in labels.iter().enumerate() {
        counts[label as usize] += 1;
        let sum = &mut sums[label as usize * dim..][..dim];
        sum.iter_mut().zip(points.row(n)).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    for ((centre, sum), &count) in centres.chunks_exact_mut(dim).zip(sums.chunks_exact(dim)).zip(&counts) {
        if count > 0 {
            centre.iter_mut().zip(sum).for_each(|(c, sum)| *c = (sum / count as f64) as f32);
        }
    }
}

/// Labels every point by its nearest centre. Products are taken with the centres relative to their median, lest a common
/// offset of all points swamps the differences; a mean would itself be offset by a single centre far away.
fn assign(panels: &Panels<'_>, dim: usize, centres: &[f32], labels: &mut [u32]) {
    let count = centres.len() / dim;
    let median = |channel: usize| {
        let mut of_centres: Vec<f32> = centres.iter().skip(channel).step_by(dim).copied().collect();
        f64::from(*of_centres.select_nth_unstable_by(count / 2, f32::total_cmp).1)
    };
    let origin: Vec<f64> = (0..dim).map(median).collect();
    let mut relative = Vec::with_capacity(centres.len());
    let mut half_squares = Vec::with_capacity(count);
    for centre in centres.chunks_exact(dim) {
        let start = relative.len();
        relative.extend(centre.iter().zip(&origin).map(|(&c, origin)| (f64::from(c) - origin) as f32));
        // x.(c - o) - (|c|^2 - |o|^2) / 2 is largest where |x - c| is smallest; the last term is (c - o).(c + o) / 2.
        let terms = relative[start..].iter().zip(&origin);
        half_squares.push(terms.map(|(&r, origin)| f64::from(r) * (0.5 * f64::from(r) + origin)).sum::<f64>() as f32);
    }
    panels.assign(&relative, &half_squares, labels);
}

/// Every cluster without points, in order, takes the point that is farthest from its centre among the clusters of at least
/// two.
fn refill(points: Points<'_>, labels: &mut [u32], centres: &mut [f32]) {
    let dim = points.dim;
    let mut counts = vec![0_usize; centres.len() / dim];
    labels.iter().for_each(|&label| counts[label as usize] += 1);
    if counts.iter().all(|&count| count > 0) {
        return;
    }
    let of = |label: u32, centres: &[f32]| centres[label as usize * dim..][..dim].to_vec();
    let mut fit: Vec<f64> =
        labels.iter().enumerate().map(|(n, &label)| points.distance(n, &of(label, centres))).collect();
    for empty in (0..counts.len()).filter(|&a| counts[a] == 0).collect::<Vec<_>>() {
        let movable = (0..labels.len()).filter(|&n| counts[labels[n] as usize] >= 2);
        let farther = |best: Option<usize>, n: usize| match best {
            Some(best) if fit[best] >= fit[n] => Some(best),
            _ => Some(n),
        };
        let Some(worst) = movable.fold(None, farther).filter(|&n| fit[n] > 0.0) else { continue };
        counts[labels[worst] as usize] -= 1;
        (labels[worst], counts[empty], fit[worst]) = (empty as u32, 1, 0.0);
        centres[empty * dim..][..dim].copy_from_slice(points.row(worst));
    }
}

/// Cuts every cluster of more than `cap` points into equal runs along its longest radius; the first run keeps the label.
pub(super) fn split_large(points: Points<'_>, labels: &mut [u32], cap: usize) {
    let clusters = labels.iter().max().map_or(0, |&most| most as usize + 1);
    let mut members = vec![Vec::new(); clusters];
    labels.iter().enumerate().for_each(|(n, &label)| members[label as usize].push(n));
    let mut fresh = clusters as u32;
    for members in members.iter().filter(|members| members.len() > cap) {
        let order = along_longest_radius(points, members);
        let (size, parts) = (order.len(), order.len().div_ceil(cap));
        for part in 1..parts {
            order[part * size / parts..(part + 1) * size / parts].iter().for_each(|&n| labels[n] = fresh);
            fresh += 1;
        }
    }
}

/// The members by their projection on the vector from their mean to the farthest of them.
fn along_longest_radius(points: Points<'_>, members: &[usize]) -> Vec<usize> {
    let mean = points.mean(members);
    let centred = |n: usize| points.row(n).iter().zip(&mean).map(|(&x, mean)| f64::from(x) - mean);
    let radius = |n: usize| centred(n).map(|x| x * x).sum::<f64>();
    let farther = |best: (f64, usize), n: usize| if radius(n) > best.0 { (radius(n), n) } else { best };
    let (_, farthest) = members[1..].iter().fold((radius(members[0]), members[0]), |best, &n| farther(best, n));
    let axis: Vec<f64> = centred(farthest).collect();
    let mut keyed: Vec<(f64, usize)> =
        members.iter().map(|&n| (centred(n).zip(&axis).map(|(x, axis)| x * axis).sum(), n)).collect();
    // A zero is a zero, whatever its sign.
    keyed.sort_by(|a, b| (a.0 + 0.0).total_cmp(&(b.0 + 0.0)));
    keyed.into_iter().map(|(_, n)| n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clusters that lost all points take the farthest of those that are not alone, as long as there are some.
    #[test]
    fn empty_clusters_take_the_farthest_points() {
        let x = [0.0, 1.0, 5.0, 9.0];
        let points = Points { x: &x, dim: 1, tokens: &[0, 1, 2, 3] };
        let (mut labels, mut centres) = ([0, 0, 0, 1], [0.0, 20.0, 100.0, 200.0, 300.0]);
        refill(points, &mut labels, &mut centres);
        assert_eq!((labels, centres), ([0, 3, 2, 1], [0.0, 20.0, 5.0, 1.0, 300.0]));
    }

    /// Runs along the longest radius, the first of which keeps the label.
    #[test]
    fn large_clusters_are_cut_in_equal_runs() {
        let x = [3.0, 0.0, 10.0, 1.0, 2.0, 50.0];
        let points = Points { x: &x, dim: 1, tokens: &[0, 1, 2, 3, 4, 5] };
        let mut labels = [0, 0, 0, 0, 0, 1];
        split_large(points, &mut labels, 2);
        assert_eq!(labels, [3, 0, 3, 2, 2, 1]);
    }
}
