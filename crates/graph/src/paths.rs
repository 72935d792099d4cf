//! Shortest paths along strong edges. "Fractional neural attention for efficient multiscale sequence processing", fig. 5d.

use crate::{Dense, LinearOperator, Result, reversible::check_non_negative};

/// The number of hops of a pair without a path.
pub const UNREACHABLE: u32 = u32::MAX;

/// Shortest paths between all pairs of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Paths {
    tokens: usize,
    /// Lengths `[from, to]`; infinite without a path, 0 from a token to itself.
    pub lengths: Vec<f64>,
    /// Numbers of edges `[from, to]`, the fewest among paths of equal length; [`UNREACHABLE`] without a path.
    pub hops: Vec<u32>,
}

/// How many hops it takes from token to token.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct HopSummary {
    /// Mean over ordered pairs with a path.
    pub mean: f64,
    /// The most.
    pub max: u32,
    /// Ordered pairs without a path.
    pub unreachable: usize,
    /// `counts[h]`: ordered pairs of different tokens that are `h` hops apart.
    pub counts: Vec<usize>,
}

impl Paths {
    /// Mean, maximum and distribution of the hops between different tokens.
    pub fn summary(&self) -> HopSummary {
        let n = self.tokens;
        let different = (0..n * n).filter(|at| at / n.max(1) != at % n.max(1)).map(|at| self.hops[at]);
        let (mut counts, mut unreachable) = (vec![0; 1], 0);
        for hops in different {
            if hops == UNREACHABLE {
                unreachable += 1;
                continue;
            }
            let hops = hops as usize;
            counts.resize(counts.len().max(hops + 1), 0);
            counts[hops] += 1;
        }
        let pairs: usize = counts.iter().sum();
        let total: usize = counts.iter().enumerate().map(|(hops, count)| hops * count).sum();
        let mean = if pairs == 0 { 0.0 } else { total as f64 / pairs as f64 };
        HopSummary { mean, max: counts.len() as u32 - 1, unreachable, counts }
    }
}

/// Shortest directed paths for edges of length `1 / weight`; no weight, no edge, and none from a token to itself.
///
/// Exact. From each token, Dijkstra's algorithm starts from the direct edges and ends as soon as no tentative length can be
/// beaten any more: where all weights are alike that is at once, and a source costs two passes over its row. Where they
/// are not, the edges of a token are sorted once, and those longer than what is left to beat are not looked at.
///
/// # Errors
/// [`crate::Error::NotFinite`], [`crate::Error::Negative`].
pub fn shortest_paths(weights: &Dense) -> Result<Paths> {
    check_non_negative(weights, "a path length")?;
    let n = weights.len();
    let mut edges = Edges::new(weights);
    let mut paths = Paths { tokens: n, lengths: vec![0.0; n * n], hops: vec![0; n * n] };
    let mut search = Search::default();
    for source in 0..n {
        search.from(source, &mut edges);
        paths.lengths[source * n..][..n].copy_from_slice(&search.length);
        let hops = |(hops, length): (&f64, &f64)| if length.is_finite() { *hops as u32 } else { UNREACHABLE };
        let row = search.hops.iter().zip(&search.length).map(hops);
        paths.hops[source * n..][..n].iter_mut().zip(row).for_each(|(to, hops)| *to = hops);
    }
    Ok(paths)
}

/// Lengths of the direct edges.
struct Edges {
    n: usize,
    lengths: Vec<f64>,
    /// The shortest edge of all.
    least: f64,
    /// Per token, once it is needed: its edges with the shortest first.
    sorted: Vec<Vec<(f64, u32)>>,
}

impl Edges {
    fn new(weights: &Dense) -> Self {
        let n = weights.len();
        let mut lengths: Vec<f64> = weights.entries().iter().map(|w| 1.0 / w).collect();
        (0..n).for_each(|i| lengths[i * (n + 1)] = f64::INFINITY);
        let least = lengths.iter().copied().fold(f64::INFINITY, f64::min);
        Self { n, lengths, least, sorted: vec![Vec::new(); n] }
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.lengths[i * self.n..][..self.n]
    }

    /// The edges of token `i` that are no longer than `most`.
    fn up_to(&mut self, i: usize, most: f64) -> &[(f64, u32)] {
        if self.sorted[i].is_empty() {
            let mut edges: Vec<_> = self.row(i).iter().copied().zip(0..).filter(|e| e.0.is_finite()).collect();
            edges.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
            self.sorted[i] = edges;
        }
        let end = self.sorted[i].partition_point(|edge| edge.0 <= most);
        &self.sorted[i][..end]
    }
}

/// One source's tentative paths. Hops are f64, so that comparing paths is one vector operation.
#[derive(Default)]
struct Search {
    length: Vec<f64>,
    hops: Vec<f64>,
    /// `length` of the tokens that are not settled, infinite for the others.
    open: Vec<f64>,
}

impl Search {
    fn from(&mut self, source: usize, edges: &mut Edges) {
        self.length.clear();
        self.length.extend_from_slice(edges.row(source));
        self.open.clone_from(&self.length);
        self.length[source] = 0.0;
        self.hops.clear();
        self.hops.resize(edges.n, 1.0);
        self.hops[source] = 0.0;
        loop {
            // Settled tokens are nearer than all others: the farthest is not settled.
            let (near, far) =
                (extreme(&self.open, f64::INFINITY, |x, y| x < y), extreme(&self.length, 0.0, |x, y| x > y));
            // A path of the same length as the farthest may still have fewer hops.
            if near == f64::INFINITY || near + edges.least > far {
                return;
            }
            let token = self.open.iter().position(|&x| x == near).expect("the least of them is one of them");
            self.open[token] = f64::INFINITY;
            self.relax(token, far, edges);
        }
    }

    /// Tries the paths through `token`, the farthest token being at `far`.
    fn relax(&mut self, token: usize, far: f64, edges: &mut Edges) {
        /// Beyond this share of a row, one pass over all of it is faster than picking edges.
        const MANY: usize = 8;
        let (start, hops, n) = (self.length[token], self.hops[token] + 1.0, edges.n);
        let short = edges.up_to(token, far - start);
        if short.len() < n / MANY {
            for &(edge, to) in short {
                let to = to as usize;
                let length = start + edge;
                if length < self.length[to] {
                    self.open[to] = length;
                }
                if length < self.length[to] || (length == self.length[to] && hops < self.hops[to]) {
                    (self.length[to], self.hops[to]) = (length, hops);
                }
            }
            return;
        }
        let state = self.length.iter_mut().zip(&mut self.hops).zip(&mut self.open);
        for (((best, best_hops), open), edge) in state.zip(edges.row(token)) {
            let length = start + edge;
            let shorter = length < *best;
            let better = shorter | ((length == *best) & (hops < *best_hops));
            *open = if shorter { length } else { *open };
            *best = if shorter { length } else { *best };
            *best_hops = if better { hops } else { *best_hops };
        }
    }
}

/// The extreme of `x` by `before`, `worst` where there is none: eight at once, which the compiler can keep in vectors.
fn extreme(x: &[f64], worst: f64, before: impl Fn(f64, f64) -> bool + Copy) -> f64 {
    let first = move |x: f64, y: f64| if before(x, y) { x } else { y };
    let (chunks, rest) = x.as_chunks::<8>();
    let mut lanes = [worst; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = first(x, *lane));
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(worst, |most, x| first(x, most))
}
