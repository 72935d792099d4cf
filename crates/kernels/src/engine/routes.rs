//! Queries that choose for themselves which clusters of keys they see: work goes by cluster.
//!
//! Beside its own row, in which a query meets the keys of no cluster and the means, it has one for each cluster that it sees
//! exactly. Rows of one cluster lie together, so that they meet its keys in whole tiles; what a query has in several rows is one sum.

use std::{borrow::Cow, ops::Range};

use super::{
    columns::{Block, Columns},
    head::{Head, Logits, Slice, kept},
    sight::Sight,
    sums::RowSum,
    tile::{QUERIES, STRIDE},
};
use crate::{
    call::cluster_plan::{HeadPlan, NONE},
    mechanism::{Estimator, Segments, Ssa},
    scratch::Aligned,
};

/// Which rows are of one query.
pub(super) struct Routes {
    /// Rows of queries, one each; those of their clusters follow.
    own: usize,
    /// The own row of each that follows.
    of: Vec<u32>,
    /// The columns of means that stand for clusters which a row's query sees exactly, row by row.
    seen_means: Vec<u32>,
    start: Vec<u32>,
}

impl Routes {
    /// Of rows that are the queries of some `labels`, in order. `means` says at which column the mean of a cluster is, where it has
    /// one; pairs of a row and a cluster that it does not see (`sees`) are none. Also returns, for every cluster of keys, the rows that
    /// see it exactly.
    pub fn new(
        labels: &[i32],
        plan: &HeadPlan,
        means: &[Option<u32>],
        sees: impl Fn(usize, usize) -> bool,
    ) -> (Self, Vec<Vec<u32>>) {
        let mut by_cluster = vec![Vec::new(); plan.clusters()[1]];
        let (mut seen_means, mut start) = (Vec::new(), vec![0]);
        let mut from = 0;
        for (row, &label) in labels.iter().enumerate() {
            let before = |&[a, _]: &[u32; 2]| i64::from(a) < i64::from(label);
            // Mostly it is the next.
            if from > 0 && !before(&plan.exact[from - 1]) {
                from = plan.exact.partition_point(before);
            }
            from += plan.exact[from..].iter().take_while(|pair| before(pair)).count();
            let of_label = plan.exact[from..].iter().take_while(|&&[a, _]| i64::from(a) == i64::from(label));
            let until = from + of_label.clone().count();
            for &[_, c] in of_label.filter(|&&[_, c]| sees(row, c as usize)) {
                by_cluster[c as usize].push(row as u32);
                seen_means.extend(means.get(c as usize).copied().flatten());
            }
            from = until;
            start.push(seen_means.len() as u32);
        }
        let of = by_cluster.iter().flatten().copied().collect();
        (Self { own: labels.len(), of, seen_means, start }, by_cluster)
    }

    /// Columns of means that stand for what the query of a row sees exactly.
    pub fn seen_means(&self, row: usize) -> &[u32] {
        &self.seen_means[self.start[row] as usize..self.start[row + 1] as usize]
    }

    /// How many queries have rows.
    pub fn own(&self) -> usize {
        self.own
    }

    /// Every row beyond those of the queries themselves, with that of its query.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        self.of.iter().enumerate().map(|(n, &own)| (self.own + n, own as usize))
    }

    /// Sums of all rows of a query, for each of these rows.
    pub fn merged(&self, sums: &[RowSum]) -> Vec<RowSum> {
        let mut merged = sums.to_vec();
        self.others().for_each(|(n, own)| merged[own] = merged[own].plus(&sums[n]));
        self.others().for_each(|(n, own)| merged[n] = merged[own]);
        merged
    }

    /// The same of plain numbers.
    pub fn add_up(&self, x: &mut [f64]) {
        self.others().for_each(|(n, own)| x[own] += x[n]);
        self.others().for_each(|(n, own)| x[n] = x[own]);
    }

    /// What holds of all rows of a query, for each of these rows.
    pub fn agree(&self, x: &mut [bool]) {
        self.others().for_each(|(n, own)| x[own] &= x[n]);
        self.others().for_each(|(n, own)| x[n] = x[own]);
    }

    /// Adds the values of all rows of a query to those of its own, `stride` numbers each.
    pub fn gather(&self, rows: &mut [f32], stride: usize) {
        let (of_queries, others) = rows.split_at_mut(self.own * stride);
        for (row, &own) in others.chunks_exact(stride.max(1)).zip(&self.of) {
            let own = &mut of_queries[own as usize * stride..][..stride];
            own.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }

    /// Writes the tile `[column][row]` that takes the pairs of means out which stand for what a query sees exactly: `-inf` for these, 0
    /// for the others.
    pub fn load(&self, rows: &Range<usize>, columns: &Range<usize>, tile: &mut [f32]) {
        tile[..columns.len() * STRIDE].fill(0.0);
        for (n, row) in rows.clone().enumerate() {
            for column in self.seen_means(row).iter().map(|&c| c as usize).filter(|c| columns.contains(c)) {
                tile[(column - columns.start) * STRIDE + n] = f32::NEG_INFINITY;
            }
        }
    }
}

/// The sums of queries from those of rows, for every row.
pub(super) fn merged<'s>(routes: Option<&Routes>, sums: &'s [RowSum]) -> Cow<'s, [RowSum]> {
    routes.map_or(Cow::Borrowed(sums), |routes| Cow::Owned(routes.merged(sums)))
}

/// Keys in the order of their segments and clusters, and where these lie.
struct Clusters {
    /// Those in clusters, those in none, and, of a causal call, the first again in the order of their positions: what a query sees of
    /// its own segment is summed in an order that no later token has a say in.
    keys: Vec<u32>,
    /// Where the second and the third begin.
    labelled: usize,
    tokens: usize,
    /// The keys of every cluster by its label; empty for one that has none.
    runs: Vec<Range<usize>>,
    segments: Segments,
}

impl Clusters {
    fn new(mut keys: Vec<u32>, plan: &HeadPlan, segments: Segments, causal: bool) -> Self {
        let label = |j: u32| plan.label_k[j as usize];
        keys.sort_by_key(|&j| (label(j) == NONE, segments.of_key(j as usize), label(j)));
        let labelled = keys.partition_point(|&j| label(j) != NONE);
        let mut runs = vec![0..0; plan.clusters()[1]];
        for (n, &j) in keys[..labelled].iter().enumerate() {
            let Ok(c) = usize::try_from(label(j)) else { continue };
            runs[c] = if runs[c].is_empty() { n..n + 1 } else { runs[c].start..n + 1 };
        }
        let tokens = keys.len();
        if causal {
            keys.extend_from_within(..labelled);
            keys[tokens..].sort_unstable();
        }
        Self { keys, labelled, tokens, runs, segments }
    }

    /// The keys that are in clusters of a segment, by their positions, and those in none; of both what is below `limit`.
    fn near(&self, segment: usize, limit: u32) -> [Range<usize>; 2] {
        let near = &self.keys[self.tokens..];
        let start = near.partition_point(|&j| self.segments.of_key(j as usize) < segment);
        let until = |keys: &[u32]| keys.partition_point(|&j| j < limit);
        [
            self.tokens + start..self.tokens + until(near).max(start),
            self.labelled..self.labelled + until(&self.keys[self.labelled..self.tokens]),
        ]
    }

    /// The segment of a run that is not empty.
    fn segment_of(&self, run: &Range<usize>) -> usize {
        self.segments.of_key(self.keys[run.start] as usize)
    }

    /// Whether a query sees cluster `c` by its routes: it is of an earlier segment.
    fn is_before(&self, c: usize, query: u32) -> bool {
        let run = &self.runs[c];
        !run.is_empty() && self.segment_of(run) < self.segments.of_query(query as usize)
    }
}

impl<'a> Head<'a> {
    /// Queries that choose for themselves, and keys by their clusters: exact ones, and means of the others. Causal: exactly, what
    /// came before a query in its own segment; clusters and means, of the segments before.
    pub fn routed(slice: Slice<'a>, plan: &HeadPlan, m: &Ssa, causal: bool, logits: Logits<'a>) -> Self {
        let [seq_q, seq_kv] = [&plan.label_q, &plan.label_k].map(Vec::len);
        let (mut queries, mut keys) = (kept(slice.keep_query, seq_q), kept(slice.keep_key, seq_kv));
        logits.retain_paired(&mut queries, &mut keys);
        // Those that see all, and are seen by all, at the end.
        queries.sort_by_key(|&i| plan.label_q[i as usize] == NONE);
        let segments = Segments::new(m, causal, seq_q, seq_kv);
        let clusters = Clusters::new(keys, plan, segments, causal);
        let (first_mean, mut means) = (clusters.keys.len(), clusters.runs.clone());
        means.retain(|run| !run.is_empty() && m.estimator == Estimator::Centroid);
        means.sort_by_key(|run| run.start);
        let mean_at = |run: &Range<usize>| means.binary_search_by_key(&run.start, |mean| mean.start).ok();
        let mean_at: Vec<_> = clusters.runs.iter().map(|run| mean_at(run).map(|n| (first_mean + n) as u32)).collect();
        let labels: Vec<i32> = queries.iter().map(|&i| plan.label_q[i as usize]).collect();
        let choosing = labels.partition_point(|&label| label != NONE);
        let sees = |row: usize, c: usize| row < choosing && clusters.is_before(c, queries[row]);
        let (routes, by_cluster) = Routes::new(&labels, plan, &mean_at, sees);
        let shift = seq_kv as i64 - seq_q as i64;
        let sight = Sight { causal, block: 1, window: None, sinks: 0, shift, transposed: false };
        let mut blocks = Vec::new();
        let segment = |i: &u32| segments.of_query(*i as usize);
        let mut first = 0;
        for rows in queries[..choosing].chunk_by(|a, b| segment(a) == segment(b)) {
            let own = segment(&rows[0]);
            let before = means.partition_point(|run| clusters.segment_of(run) < own);
            cut(first..first + rows.len(), &mut blocks, |rows| {
                let [near, free] = clusters.near(own, sight.of(queries[rows.end - 1]).high);
                // Means by themselves, lest a tile hold tokens too.
                vec![near, free, first_mean..first_mean + before]
            });
            first += rows.len();
        }
        let all = if causal { clusters.labelled..first_mean } else { 0..clusters.tokens };
        cut(choosing..queries.len(), &mut blocks, |_| Vec::from([all.clone()]));
        for (rows, run) in by_cluster.iter().zip(&clusters.runs) {
            cut(queries.len()..queries.len() + rows.len(), &mut blocks, |_| vec![run.clone()]);
            rows.iter().for_each(|&row| queries.push(queries[row as usize]));
        }
        Self::new(slice, [queries, clusters.keys], means, blocks, (sight, Some(routes)), logits)
    }

    /// Copies what is known of queries to their other rows.
    pub fn spread<T: Copy>(&self, x: &mut [T]) {
        self.routes.iter().flat_map(Routes::others).for_each(|(n, own)| x[n] = x[own]);
    }

    /// Rows that are a query's first; the others come after them.
    pub fn own_rows(&self) -> usize {
        self.routes.as_ref().map_or(self.queries.len(), Routes::own)
    }

    /// The own row of a row's query.
    pub fn own_row(&self, row: usize) -> usize {
        self.routes
            .as_ref()
            .filter(|routes| row >= routes.own)
            .map_or(row, |routes| routes.of[row - routes.own] as usize)
    }

    /// Copies what the queries of a block's rows have in `x`, `stride` numbers each, where it does not lie in their order.
    pub fn copy_rows(&self, x: &[f32], stride: usize, rows: &Range<usize>, copy: &mut Aligned) {
        if rows.end <= self.own_rows() {
            return;
        }
        copy.resize(rows.len() * stride);
        for (to, row) in copy.chunks_exact_mut(stride.max(1)).zip(rows.clone()) {
            to.copy_from_slice(&x[self.own_row(row) * stride..][..stride]);
        }
    }

    /// The same as it lies in `x`, or in the `copy`.
    pub fn rows_of<'x>(&self, x: &'x [f32], stride: usize, rows: &Range<usize>, copy: &'x [f32]) -> &'x [f32] {
        if rows.end <= self.own_rows() { &x[rows.start * stride..rows.end * stride] } else { copy }
    }

    /// Whether something is added to the logits of a tile's pairs.
    pub fn adds_to(&self, columns: &Columns<'_>) -> bool {
        self.bias.is_some() || self.routes.is_some() && self.are_means(columns)
    }

    fn are_means(&self, columns: &Columns<'_>) -> bool {
        columns.len() > 0 && columns.at(0) >= self.keys.len() - self.means.len()
    }

    /// Writes the tile `[column][row]` of what is added to the logits of pairs, where something is.
    pub fn load_added(&self, rows: &Range<usize>, columns: &Columns<'_>, tile: &mut [f32]) {
        match (&self.bias, &self.routes, columns) {
            (Some(bias), ..) => bias.load(&self.queries[rows.clone()], &columns.of(&self.keys, 1), tile),
            (None, Some(routes), Columns::Run(range)) => routes.load(rows, range, tile),
            _ => {}
        }
    }
}

/// Adds blocks of `rows` that see some columns.
fn cut(rows: Range<usize>, blocks: &mut Vec<Block>, columns: impl Fn(&Range<usize>) -> Vec<Range<usize>>) {
    for from in rows.clone().step_by(QUERIES) {
        let rows = from..(from + QUERIES).min(rows.end);
        let mut columns = columns(&rows);
        columns.retain(|columns| !columns.is_empty());
        blocks.push(Block { rows, columns, edges: Vec::new() });
    }
}
