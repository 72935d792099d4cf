//! Clusters of points, in f64 and by the definitions.

use super::{super::matrix::Matrix, random::Stream};

pub(super) fn distance(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum()
}

/// The mean of the rows `tokens`; 0 of none.
pub(super) fn mean(x: &Matrix, tokens: &[usize]) -> Vec<f64> {
    let column = |c: usize| tokens.iter().map(|&n| x.at(n, c)).sum::<f64>() / tokens.len().max(1) as f64;
    (0..x.cols).map(column).collect()
}

/// The first index of the smallest value.
pub(super) fn smallest(values: impl IntoIterator<Item = f64>) -> Option<usize> {
    let less = |best: (usize, f64), next: (usize, f64)| if next.1 < best.1 { next } else { best };
    values.into_iter().enumerate().reduce(less).map(|(n, _)| n)
}

fn nearest(x: &[f64], centres: &[Vec<f64>]) -> usize {
    smallest(centres.iter().map(|centre| distance(x, centre))).expect("there is a centre")
}

/// The points with each label.
pub(super) fn members(labels: &[usize]) -> Vec<Vec<usize>> {
    let clusters = labels.iter().max().map_or(0, |most| most + 1);
    (0..clusters).map(|a| (0..labels.len()).filter(|&n| labels[n] == a).collect()).collect()
}

/// k-means++, then `iterations` rounds of Lloyd's algorithm, fewer where a round changes nothing.
pub(super) fn kmeans(x: &Matrix, clusters: usize, iterations: usize, mut stream: Stream) -> Vec<usize> {
    let mut centres = vec![x.row(stream.below(x.rows)).to_vec()];
    loop {
        let to_nearest = |n: usize| centres.iter().map(|centre| distance(x.row(n), centre)).fold(f64::MAX, f64::min);
        let squares: Vec<f64> = (0..x.rows).map(to_nearest).collect();
        if centres.len() == clusters.min(x.rows) || squares.iter().all(|&square| square == 0.0) {
            break;
        }
        centres.push(x.row(stream.pick(&squares)).to_vec());
    }
    let assign = |centres: &[Vec<f64>]| (0..x.rows).map(|n| nearest(x.row(n), centres)).collect::<Vec<_>>();
    let mut labels = assign(&centres);
    for _ in 0..iterations {
        for (a, tokens) in members(&labels).iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            centres[a] = mean(x, tokens);
        }
        let before = std::mem::replace(&mut labels, assign(&centres));
        refill(x, &mut labels, &mut centres);
        if labels == before {
            break;
        }
    }
    labels
}

/// Every cluster without points takes the point farthest from its centre, of a cluster with others.
fn refill(x: &Matrix, labels: &mut [usize], centres: &mut [Vec<f64>]) {
    let size = |labels: &[usize], a: usize| labels.iter().filter(|&&label| label == a).count();
    for empty in 0..centres.len() {
        if size(labels, empty) > 0 {
            continue;
        }
        let fit = |n: usize| match size(labels, labels[n]) {
            1 => 1.0,
            _ => -distance(x.row(n), &centres[labels[n]]),
        };
        let worst = smallest((0..x.rows).map(fit)).filter(|&n| fit(n) < 0.0);
        if let Some(worst) = worst {
            (labels[worst], centres[empty]) = (empty, x.row(worst).to_vec());
        }
    }
}

/// Cuts clusters of more than `cap` points into runs along the vector from their mean to their farthest point.
pub(super) fn split_large(x: &Matrix, labels: &mut [usize], cap: usize) {
    let clusters = members(labels);
    let mut fresh = clusters.len();
    for tokens in clusters.into_iter().filter(|tokens| tokens.len() > cap) {
        let centre = mean(x, &tokens);
        let centred = |n: usize| x.row(n).iter().zip(&centre).map(|(x, c)| x - c).collect::<Vec<f64>>();
        let farthest = smallest(tokens.iter().map(|&n| -distance(x.row(n), &centre))).expect("there are points");
        let axis = centred(tokens[farthest]);
        let along = |n: usize| centred(n).iter().zip(&axis).map(|(x, axis)| x * axis).sum::<f64>();
        let mut order = tokens.clone();
        // A zero is a zero, whatever its sign.
        order.sort_by(|&a, &b| (along(a) + 0.0).total_cmp(&(along(b) + 0.0)));
        let parts = order.len().div_ceil(cap);
        for part in 1..parts {
            let run = part * order.len() / parts..(part + 1) * order.len() / parts;
            order[run].iter().for_each(|&n| labels[n] = fresh);
            fresh += 1;
        }
    }
}

/// Gives labels in order; one that is full is replaced by a fresh one.
struct Open {
    labels: Vec<usize>,
    sizes: Vec<usize>,
    cap: usize,
}

impl Open {
    fn next(&mut self, leader: usize) -> usize {
        if self.sizes[self.labels[leader]] == self.cap {
            self.labels[leader] = self.sizes.len();
            self.sizes.push(0);
        }
        self.sizes[self.labels[leader]] += 1;
        self.labels[leader]
    }
}

/// The first points lead; each later one joins the nearest mean of the leaders' points in earlier blocks of `positions`.
pub(super) fn online(x: &Matrix, positions: &[usize], clusters: usize, block: usize, cap: usize) -> Vec<usize> {
    let leaders = clusters.min(x.rows);
    let mut open = Open { labels: (0..leaders).collect(), sizes: vec![1; leaders], cap };
    // Which leader every point has followed.
    let mut followed: Vec<usize> = (0..leaders).collect();
    let mut labels = followed.clone();
    for n in leaders..x.rows {
        let known = |other: usize| other < leaders || positions[other] / block < positions[n] / block;
        let of = |a: usize| (0..n).filter(|&other| followed[other] == a && known(other)).collect::<Vec<_>>();
        let means: Vec<Vec<f64>> = (0..leaders).map(|a| mean(x, &of(a))).collect();
        let leader = nearest(x.row(n), &means);
        followed.push(leader);
        labels.push(open.next(leader));
    }
    labels
}

/// Each point joins the nearest row of the codebook.
pub(super) fn by_codebook(x: &Matrix, codebook: &[Vec<f64>], cap: usize) -> Vec<usize> {
    let mut open = Open { labels: (0..codebook.len()).collect(), sizes: vec![0; codebook.len()], cap };
    (0..x.rows).map(|n| open.next(nearest(x.row(n), codebook))).collect()
}

/// Labels counted from 0 without gaps, in their order.
pub(super) fn compact(labels: &[usize]) -> Vec<usize> {
    let mut used = labels.to_vec();
    used.sort_unstable();
    used.dedup();
    labels.iter().map(|label| used.iter().position(|used| used == label).expect("it is used")).collect()
}

/// `x phi^T / sqrt(dim)`, `phi` of standard normal numbers row by row.
pub(super) fn project(x: &Matrix, dim: usize, mut stream: Stream) -> Matrix {
    let phi = Matrix::from_fn(dim, x.cols, |_, _| stream.normal());
    x.times_transposed(&phi).map(|_, _, x| x / (dim as f64).sqrt())
}
