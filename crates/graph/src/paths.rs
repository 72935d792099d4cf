//! Shortest paths along strong edges. "Fractional neural attention for efficient multiscale sequence processing", fig. 5d.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::{Dense, Error, LinearOperator, Result, error::check_len, reversible::check_non_negative};

/// The number of hops of a pair without a path.
pub const UNREACHABLE: u32 = u32::MAX;

/// Shortest paths from some tokens to all.
#[derive(Debug, Clone, PartialEq)]
pub struct Paths {
    tokens: usize,
    /// The tokens they start from; one row each.
    pub sources: Vec<usize>,
    /// Lengths `[from, to]`; infinite without a path (and where no number holds them), 0 from a token to itself.
    pub lengths: Vec<f64>,
    /// Numbers of edges `[from, to]`, the fewest among paths of equal length; [`UNREACHABLE`] without a path.
    pub hops: Vec<u32>,
    /// The token before the last `[from, to]`; [`UNREACHABLE`] without a path, and from a token to itself.
    pub predecessors: Vec<u32>,
}

/// How many hops it takes from token to token.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct HopSummary {
    /// Mean over ordered pairs with a path, from the sources.
    pub mean: f64,
    /// The most.
    pub max: u32,
    /// Ordered pairs without a path.
    pub unreachable: usize,
    /// `counts[h]`: ordered pairs of different tokens that are `h` hops apart.
    pub counts: Vec<usize>,
}

impl Paths {
    /// The tokens of the shortest path, `from` and `to` themselves included: `[from]` where they are one token. `None` without a
    /// path, and where `from` is none of the sources.
    pub fn route(&self, from: usize, to: usize) -> Option<Vec<usize>> {
        let predecessors = &self.predecessors[self.row(from)?..][..self.tokens];
        if *predecessors.get(to)? == UNREACHABLE && to != from {
            return None;
        }
        let before = |&token: &usize| (token != from).then(|| predecessors[token] as usize);
        let mut tokens: Vec<usize> = std::iter::successors(Some(to), before).collect();
        tokens.reverse();
        Some(tokens)
    }

    /// The length of [`Self::route`], infinite where no number holds it; `None` where there is none.
    pub fn length(&self, from: usize, to: usize) -> Option<f64> {
        let lengths = &self.lengths[self.row(from)?..][..self.tokens];
        lengths.get(to).copied().filter(|_| self.route(from, to).is_some())
    }

    /// Where what starts from a source stands.
    fn row(&self, from: usize) -> Option<usize> {
        self.sources.iter().position(|&source| source == from).map(|at| at * self.tokens)
    }

    /// Mean, maximum and distribution of the hops between different tokens.
    pub fn summary(&self) -> HopSummary {
        let rows = self.sources.iter().zip(self.hops.chunks(self.tokens.max(1)));
        let others = rows.flat_map(|(&from, row)| row.iter().enumerate().filter(move |(to, _)| *to != from));
        let (mut counts, mut unreachable) = (vec![0; 1], 0);
        for (_, &hops) in others {
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
    shortest_paths_from(weights, (0..weights.len()).collect())
}

/// [`shortest_paths`] from the tokens `sources` alone.
///
/// # Errors
/// As [`shortest_paths`].
///
/// # Panics
/// Where a source is no token.
pub fn shortest_paths_from(weights: &Dense, sources: Vec<usize>) -> Result<Paths> {
    check_non_negative(weights, "a path length")?;
    // What is left of a weight below this is in units that leave its inverse within f64.
    const SMALL: f64 = 1e-300;
    let small = weights.entries().iter().any(|&w| w > 0.0 && w < SMALL);
    let unit = if small { 1e20 } else { 1.0 };
    let length = |&w: &f64| if w > 0.0 { 1.0 / (w * unit) } else { f64::INFINITY };
    Ok(search(weights.len(), weights.entries().iter().map(length).collect(), sources, unit))
}

/// [`shortest_paths_from`] for the logarithms of the weights `[n, n]`, `-inf` for no edge: edges that no number could
/// hold the length of are there all the same. An edge `e^1400` times as long as the shortest counts as long as that.
///
/// # Errors
/// [`Error::NotFinite`] for NaN and `+inf`; [`Error::Length`].
///
/// # Panics
/// Where a source is no token.
pub fn shortest_paths_from_logs(n: usize, log_weights: &[f64], sources: Vec<usize>) -> Result<Paths> {
    /// What an exponential holds, with room for sums.
    const ROOM: f64 = 700.0;
    check_len("log_weights", log_weights.len(), n * n)?;
    if let Some(at) = log_weights.iter().position(|x| x.is_nan() || *x == f64::INFINITY) {
        return Err(Error::NotFinite { row: at / n, column: at % n, value: log_weights[at] });
    }
    let edges = || log_weights.iter().filter(|x| x.is_finite()).map(|x| -x);
    let (least, most) = edges().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), x| (l.min(x), m.max(x)));
    let unit = if least > most { 0.0 } else { (most - ROOM).max(0.0).min(least + ROOM) };
    let length = |&x: &f64| if x.is_finite() { (-x - unit).min(ROOM).exp() } else { f64::INFINITY };
    Ok(search(n, log_weights.iter().map(length).collect(), sources, unit.exp()))
}

/// Paths over edges of `lengths`, which are in multiples of `unit`.
fn search(n: usize, lengths: Vec<f64>, sources: Vec<usize>, unit: f64) -> Paths {
    let mut edges = Edges::new(n, lengths);
    let room = n * sources.len();
    let (mut lengths, mut all_hops) = (Vec::with_capacity(room), Vec::with_capacity(room));
    let mut predecessors = Vec::with_capacity(room);
    let mut search = Search::default();
    for &source in &sources {
        search.from(source, &mut edges);
        lengths.extend(search.length.iter().map(|&length| if length > 0.0 { length * unit } else { 0.0 }));
        let reached = |(&of, length): (&u32, &f64)| if length.is_finite() { of } else { UNREACHABLE };
        all_hops.extend(search.hops.iter().zip(&search.length).map(reached));
        predecessors.extend(search.before.iter().zip(&search.length).map(reached));
    }
    Paths { tokens: n, sources, lengths, hops: all_hops, predecessors }
}

/// Lengths of the direct edges.
struct Edges {
    n: usize,
    lengths: Vec<f64>,
    /// The shortest edge of all.
    least: f64,
    /// Per token, its edges with the shortest first, once it has been passed through often enough to be worth it.
    sorted: Vec<Vec<(f64, u32)>>,
    /// How often each token was passed through.
    passes: Vec<u32>,
}

impl Edges {
    fn new(n: usize, mut lengths: Vec<f64>) -> Self {
        (0..n).for_each(|i| lengths[i * (n + 1)] = f64::INFINITY);
        let least = lengths.iter().copied().fold(f64::INFINITY, f64::min);
        Self { n, lengths, least, sorted: vec![Vec::new(); n], passes: vec![0; n] }
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.lengths[i * self.n..][..self.n]
    }

    /// The edges of token `i` that are no longer than `most`; `None` while looking at all of them is cheaper than sorting.
    fn up_to(&mut self, i: usize, most: f64) -> Option<&[(f64, u32)]> {
        /// Sorting a row costs about as much as passing through it this often.
        const WORTH_SORTING: u32 = 16;
        self.passes[i] = self.passes[i].saturating_add(1);
        if self.passes[i] < WORTH_SORTING {
            return None;
        }
        if self.passes[i] == WORTH_SORTING {
            let mut edges: Vec<_> = self.row(i).iter().copied().zip(0..).filter(|e| e.0.is_finite()).collect();
            edges.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
            self.sorted[i] = edges;
        }
        let end = self.sorted[i].partition_point(|edge| edge.0 <= most);
        Some(&self.sorted[i][..end])
    }
}

/// One source's tentative paths.
#[derive(Default)]
struct Search {
    length: Vec<f64>,
    hops: Vec<u32>,
    /// The token before the last one.
    before: Vec<u32>,
    /// Tentative lengths with their tokens, the shortest first; one that was beaten since stays until it comes up. The
    /// bits of positive numbers are in the order of the numbers.
    open: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Search {
    fn from(&mut self, source: usize, edges: &mut Edges) {
        /// Searches that end early end within these many tokens; after them, what is left to beat is measured seldom.
        const EARLY: usize = 8;
        self.length.clear();
        self.length.extend_from_slice(edges.row(source));
        self.length[source] = 0.0;
        self.hops.clear();
        self.hops.resize(edges.n, 1);
        self.hops[source] = 0;
        self.before.clear();
        self.before.resize(edges.n, source as u32);
        self.before[source] = UNREACHABLE;
        let mut far = largest(&self.length);
        // Through a token beyond this no path gets shorter; a path as long as the farthest may still have fewer hops.
        let beyond = |length: f64, far: f64| length + edges.least > far || length == f64::INFINITY;
        let mut open = std::mem::take(&mut self.open).into_vec();
        open.clear();
        let direct = edges.row(source).iter().zip(0..).filter(|&(&length, _)| !beyond(length, far));
        open.extend(direct.map(|(length, to)| Reverse((length.to_bits(), to))));
        self.open = BinaryHeap::from(open);
        let mut settled = 0;
        while let Some(Reverse((bits, token))) = self.open.pop() {
            let start = f64::from_bits(bits);
            if start > self.length[token as usize] {
                continue;
            }
            // Settled tokens are nearer than all others: the farthest is not settled.
            if settled < EARLY || settled % EARLY == 0 {
                far = largest(&self.length);
            }
            if start + edges.least > far {
                return;
            }
            settled += 1;
            self.relax(token as usize, far, edges);
        }
    }

    /// Tries the paths through `token`, the farthest token being no farther than `far`.
    fn relax(&mut self, token: usize, far: f64, edges: &mut Edges) {
        let (start, hops) = (self.length[token], self.hops[token] + 1);
        if let Some(short) = edges.up_to(token, far - start) {
            short.iter().for_each(|&(edge, to)| self.reach(to, start + edge, hops, token));
            return;
        }
        let row = edges.row(token);
        // One pass in vectors tells that nothing is gained, as is usual where all weights are alike.
        let gains = row.iter().zip(&self.length).fold(false, |gains, (edge, length)| gains | (start + edge <= *length));
        if gains {
            row.iter().zip(0..).for_each(|(edge, to)| self.reach(to, start + edge, hops, token));
        }
    }

    /// A path to `to` through `before`, if it is better than the known one.
    fn reach(&mut self, to: u32, length: f64, hops: u32, before: usize) {
        let at = to as usize;
        let shorter = length < self.length[at];
        if shorter || (length == self.length[at] && hops < self.hops[at]) {
            (self.length[at], self.hops[at], self.before[at]) = (length, hops, before as u32);
        }
        if shorter {
            self.open.push(Reverse((length.to_bits(), to)));
        }
    }
}

/// The largest of non-negative numbers: eight at once, which the compiler can keep in vectors.
fn largest(x: &[f64]) -> f64 {
    let (chunks, rest) = x.as_chunks::<8>();
    let mut lanes = [0.0_f64; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = if x > *lane { x } else { *lane });
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(0.0, f64::max)
}
