//! One batch element and head: its kept tokens in the order of the blocks that the structure makes of them.

use std::ops::Range;

use super::tile::QUERIES;
use crate::{
    Shape,
    call::{
        Call,
        cluster_plan::{HeadPlan, NONE, STRAY},
    },
    mechanism::{Dense, Estimator, Ssa},
    score::map::Map,
    structure::dense::padded,
};

/// The position of a mean token, which is seen from everywhere.
const EVERYWHERE: u32 = u32::MAX;

/// Which keys a query may see, masks aside.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub causal: bool,
    /// Tokens that become visible together.
    pub block: usize,
    pub window: Option<usize>,
    pub sinks: usize,
    /// `seq_kv - seq_q`.
    shift: i64,
    /// Whether rows are the keys and columns the queries.
    transposed: bool,
}

impl Sight {
    pub fn dense(m: &Dense, shape: &Shape, causal: bool) -> Self {
        let shift = shape.seq_kv as i64 - shape.seq_q as i64;
        Self { causal, block: 1, window: m.window, sinks: m.sinks, shift, transposed: false }
    }

    /// Whether row `i` sees column `j`.
    pub fn sees(&self, i: u32, j: u32) -> bool {
        if i == EVERYWHERE || j == EVERYWHERE {
            return true;
        }
        let (i, j) = if self.transposed { (j, i) } else { (i, j) };
        let (p, j) = (i64::from(i) + self.shift, i64::from(j));
        let block = self.block as i64;
        let past = !self.causal || j.div_euclid(block) <= p.div_euclid(block);
        past && self.window.is_none_or(|w| (p - j).unsigned_abs() < w as u64 || j < self.sinks as i64)
    }

    /// Whether all see all.
    pub fn is_complete(&self) -> bool {
        !self.causal && self.window.is_none()
    }
}

/// Some rows of queries and the columns that they may see.
pub(super) struct Block {
    pub rows: Range<usize>,
    pub columns: Vec<Range<usize>>,
    pub edges: Vec<Edges>,
}

/// Single columns of one row, with constants added to the logarithms of their affinities.
pub(super) struct Edges {
    pub row: usize,
    pub columns: Vec<u32>,
    pub weights: Vec<f32>,
}

/// The tokens of one head.
pub(super) struct Head {
    /// Positions of the rows and of the columns; [`EVERYWHERE`] for a mean.
    pub queries: Vec<u32>,
    pub keys: Vec<u32>,
    /// Images of rows and columns, `stride` apart.
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub stride: usize,
    /// How many tokens a column stands for.
    pub counts: Vec<f32>,
    /// Which columns the means at their end are of.
    pub means: Vec<Range<usize>>,
    pub blocks: Vec<Block>,
    pub sight: Sight,
    /// Keys that every row sees.
    pub seen: Vec<f64>,
}

/// One head of a call, as it lies in memory.
#[derive(Clone, Copy)]
pub(super) struct Slice<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub keep_query: Option<&'a [bool]>,
    pub keep_key: Option<&'a [bool]>,
    pub dim: usize,
}

impl<'a> Slice<'a> {
    pub fn of(call: &Call<'a>, slice: usize) -> Self {
        let s = call.shape;
        let batch = slice / s.heads;
        Self {
            q: &call.q[slice * s.seq_q * s.head_dim..][..s.seq_q * s.head_dim],
            k: &call.k[slice * s.seq_kv * s.head_dim..][..s.seq_kv * s.head_dim],
            keep_query: call.mask.query.map(|keep| &keep[batch * s.seq_q..][..s.seq_q]),
            keep_key: call.mask.key.map(|keep| &keep[batch * s.seq_kv..][..s.seq_kv]),
            dim: s.head_dim,
        }
    }
}

fn kept(keep: Option<&[bool]>, len: usize) -> Vec<u32> {
    (0..len as u32).filter(|&i| keep.is_none_or(|keep| keep[i as usize])).collect()
}

impl Head {
    /// Every kept query and key, in windows where there are any.
    pub fn dense(slice: Slice<'_>, sight: Sight, map: Map, scale: f32) -> Self {
        let queries = kept(slice.keep_query, slice.q.len() / slice.dim);
        let keys = kept(slice.keep_key, slice.k.len() / slice.dim);
        let columns = |rows: &[u32]| columns(&sight, rows, &keys);
        let chunks = (0..queries.len()).step_by(QUERIES).map(|from| from..(from + QUERIES).min(queries.len()));
        let block = |rows: Range<usize>| Block { columns: columns(&queries[rows.clone()]), rows, edges: Vec::new() };
        let blocks = chunks.map(block).collect();
        Self::new(slice, [queries, keys], Vec::new(), blocks, sight, (map, scale))
    }

    /// Queries and keys by their clusters: exact clusters, sampled edges, and means of the other clusters.
    pub fn clustered(slice: Slice<'_>, plan: &HeadPlan, m: &Ssa, causal: bool, map: Map, scale: f32) -> Self {
        let label = |labels: &[i32], n: &u32| labels[*n as usize];
        let mut queries = kept(slice.keep_query, plan.label_q.len());
        let mut keys = kept(slice.keep_key, plan.label_k.len());
        queries.sort_by_key(|n| label(&plan.label_q, n));
        keys.sort_by_key(|n| label(&plan.label_k, n));
        let run = |tokens: &[u32], labels: &[i32], of: i32| {
            let start = tokens.partition_point(|n| label(labels, n) < of);
            start..tokens.partition_point(|n| label(labels, n) <= of)
        };
        let clusters = plan.clusters()[1];
        let means: Vec<Range<usize>> = match m.estimator {
            Estimator::Centroid => (0..clusters).map(|c| run(&keys, &plan.label_k, c as i32)).collect(),
            _ => Vec::new(),
        };
        let tokens = keys.len();
        let mut row_of = vec![EVERYWHERE; plan.label_k.len()];
        keys.iter().enumerate().for_each(|(n, &j)| row_of[j as usize] = n as u32);
        let sight =
            Sight { causal, block: m.causal_clusters.block(), window: None, sinks: 0, shift: 0, transposed: false };
        let mut blocks = Vec::new();
        let labels = [NONE, STRAY].into_iter().chain(0..plan.clusters()[0] as i32);
        for of in labels {
            let rows = run(&queries, &plan.label_q, of);
            let mut columns = Vec::new();
            for c in 0..clusters as i32 {
                let exact = of == NONE || of != STRAY && plan.exact.binary_search(&[of as u32, c as u32]).is_ok();
                if exact {
                    push(&mut columns, run(&keys, &plan.label_k, c));
                }
            }
            push(&mut columns, run(&keys, &plan.label_k, NONE));
            if of == NONE {
                push(&mut columns, run(&keys, &plan.label_k, STRAY));
            }
            for (c, mean) in means.iter().enumerate() {
                let exact = of < 0 || plan.exact.binary_search(&[of as u32, c as u32]).is_ok();
                if !exact && !mean.is_empty() {
                    push(&mut columns, tokens + c..tokens + c + 1);
                }
            }
            for from in rows.clone().step_by(QUERIES) {
                let rows = from..(from + QUERIES).min(rows.end);
                let edges = rows.clone().filter_map(|row| edges_of(plan, row, queries[row], &row_of, &sight)).collect();
                blocks.push(Block { rows, columns: columns.clone(), edges });
            }
        }
        Self::new(slice, [queries, keys], means, blocks, sight, (map, scale))
    }

    fn new(
        slice: Slice<'_>,
        [queries, mut keys]: [Vec<u32>; 2],
        means: Vec<Range<usize>>,
        blocks: Vec<Block>,
        sight: Sight,
        (map, scale): (Map, f32),
    ) -> Self {
        let (dim, stride) = (slice.dim, map.stride(slice.dim));
        let mut counts = vec![1.0; keys.len()];
        counts.extend(means.iter().map(|mean| mean.len() as f32));
        let raw = |x: &'_ [f32], n: u32| x[n as usize * dim..][..dim].to_vec();
        let mut k = vec![0.0; counts.len() * stride];
        let images = k.chunks_exact_mut(stride);
        let tokens = keys
            .iter()
            .map(|&n| raw(slice.k, n))
            .chain(means.iter().map(|mean| mean_of(slice.k, dim, &keys[mean.clone()])));
        images.zip(tokens).for_each(|(image, row)| map.apply(&row, false, 0.0, image));
        keys.extend(means.iter().map(|_| EVERYWHERE));
        let mut head = Self { queries, keys, q: Vec::new(), k, stride, counts, means, blocks, sight, seen: Vec::new() };
        head.seen = head.count_seen();
        let mut q = vec![0.0; head.queries.len() * stride];
        for ((image, &n), &seen) in q.chunks_exact_mut(stride).zip(&head.queries).zip(&head.seen) {
            let offset = if seen > 0.0 { (-seen.ln() / f64::from(scale)) as f32 } else { 0.0 };
            map.apply(&raw(slice.q, n), true, offset, image);
        }
        Self { q, ..head }
    }

    /// How many keys each row sees.
    fn count_seen(&self) -> Vec<f64> {
        let mut seen = vec![0.0; self.queries.len()];
        for block in &self.blocks {
            let total: f64 = block.columns.iter().flat_map(|c| &self.counts[c.clone()]).map(|&n| f64::from(n)).sum();
            for row in block.rows.clone() {
                seen[row] = if self.sight.is_complete() {
                    total
                } else {
                    let columns = block.columns.iter().flat_map(|columns| columns.clone());
                    let seen = columns.filter(|&c| self.sight.sees(self.queries[row], self.keys[c]));
                    seen.map(|c| f64::from(self.counts[c])).sum()
                };
            }
            block.edges.iter().for_each(|edges| seen[edges.row] += edges.columns.len() as f64);
        }
        seen
    }

    /// The same pairs with keys for queries, each of which sees all of them that see it. Of dense heads.
    pub fn transposed(&self) -> Self {
        let columns = 0..self.queries.len();
        let chunks = (0..self.keys.len()).step_by(QUERIES).map(|from| from..(from + QUERIES).min(self.keys.len()));
        let blocks = chunks.map(|rows| Block { rows, columns: vec![columns.clone()], edges: Vec::new() }).collect();
        Self {
            queries: self.keys.clone(),
            keys: self.queries.clone(),
            q: self.k.clone(),
            k: self.q.clone(),
            stride: self.stride,
            counts: vec![1.0; self.queries.len()],
            means: Vec::new(),
            blocks,
            sight: Sight { transposed: true, ..self.sight },
            seen: Vec::new(),
        }
    }

    /// Rows of `x [seq_kv, dim]` in the order of the columns, means at their end; rows of whole vectors.
    pub fn of_columns(&self, x: &[f32], dim: usize) -> Vec<f32> {
        let stride = padded(dim);
        let tokens = self.keys.len() - self.means.len();
        let mut rows = vec![0.0; self.keys.len() * stride];
        for (row, &n) in rows.chunks_exact_mut(stride.max(1)).zip(&self.keys[..tokens]) {
            row[..dim].copy_from_slice(&x[n as usize * dim..][..dim]);
        }
        for (n, mean) in self.means.iter().enumerate() {
            let mean = mean_of(x, dim, &self.keys[mean.clone()]);
            rows[(tokens + n) * stride..][..dim].copy_from_slice(&mean);
        }
        rows
    }

    /// Rows of `x [seq_q, dim]` in the order of the rows; of whole vectors.
    pub fn of_rows(&self, x: &[f32], dim: usize) -> Vec<f32> {
        let stride = padded(dim);
        let mut rows = vec![0.0; self.queries.len() * stride];
        for (row, &n) in rows.chunks_exact_mut(stride.max(1)).zip(&self.queries) {
            row[..dim].copy_from_slice(&x[n as usize * dim..][..dim]);
        }
        rows
    }

    /// Adds the gradients of the columns, `width` apart, to the tokens' in `out [seq_kv, dim]`; `pull_back` makes a token's of its column's.
    pub fn add_columns(
        &self,
        x: &[f32],
        width: usize,
        out: &mut [f32],
        dim: usize,
        source: &[f32],
        pull_back: impl Fn(&[f32], &[f32], &mut [f32]),
    ) {
        let tokens = self.keys.len() - self.means.len();
        let mut part = vec![0.0; dim];
        for (n, &j) in self.keys[..tokens].iter().enumerate() {
            let at = j as usize * dim..(j as usize + 1) * dim;
            pull_back(&source[at.clone()], &x[n * width..][..width], &mut part);
            out[at].iter_mut().zip(&part).for_each(|(out, x)| *out += x);
        }
        for (n, mean) in self.means.iter().enumerate().filter(|(_, mean)| !mean.is_empty()) {
            let members = &self.keys[mean.clone()];
            pull_back(&mean_of(source, dim, members), &x[(tokens + n) * width..][..width], &mut part);
            for &j in members {
                let out = &mut out[j as usize * dim..][..dim];
                out.iter_mut().zip(&part).for_each(|(out, x)| *out += x / members.len() as f32);
            }
        }
    }
}

/// The mean of some rows, divided at the end: that of equal rows is then that row.
fn mean_of(x: &[f32], dim: usize, rows: &[u32]) -> Vec<f32> {
    let mut sum = vec![0.0_f64; dim];
    for &n in rows {
        sum.iter_mut().zip(&x[n as usize * dim..]).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    sum.iter().map(|x| (x / rows.len().max(1) as f64) as f32).collect()
}

/// Adds a range to others, joined with the last where they meet.
fn push(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// The columns, ascending in position, that any of some rows, ascending too, may see.
fn columns(sight: &Sight, rows: &[u32], keys: &[u32]) -> Vec<Range<usize>> {
    let (Some(&first), Some(&last)) = (rows.first(), rows.last()) else { return Vec::new() };
    let [low, high] = [first, last].map(|i| i64::from(i) + sight.shift);
    let until = |position: i64| keys.partition_point(|&j| i64::from(j) < position);
    let window = sight.window.map_or(i64::MAX / 2, |w| w.min(1 << 40) as i64);
    let end = if sight.causal { until(high + 1) } else { keys.len() };
    let mut ranges = Vec::new();
    let start = until(low.saturating_sub(window).saturating_add(1)).min(end);
    push(&mut ranges, 0..until(sight.sinks as i64).min(start));
    let from = ranges.last().map_or(start, |sinks: &Range<usize>| start.max(sinks.end));
    push(&mut ranges, from..until(high.saturating_add(window)).min(end).max(from));
    ranges
}

/// The sampled edges of one row that it may see.
fn edges_of(plan: &HeadPlan, row: usize, query: u32, row_of: &[u32], sight: &Sight) -> Option<Edges> {
    let from = plan.edges.partition_point(|edge| edge.query < query);
    let edges = plan.edges[from..].iter().take_while(|edge| edge.query == query);
    let edges = edges.filter(|edge| row_of[edge.key as usize] != EVERYWHERE && sight.sees(query, edge.key));
    let (columns, weights): (Vec<u32>, Vec<f32>) =
        edges.map(|edge| (row_of[edge.key as usize], edge.log_weight as f32)).unzip();
    (!columns.is_empty()).then_some(Edges { row, columns, weights })
}
