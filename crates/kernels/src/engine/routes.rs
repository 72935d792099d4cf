//! Queries that choose for themselves which clusters of keys they see: work goes by cluster.
//!
//! Beside its own row, in which a query meets the keys of no cluster and the means, it has one for each cluster that it sees
//! exactly. Rows of one cluster lie together, so that they meet its keys in whole tiles; what a query has in several rows is one sum.

use std::{borrow::Cow, ops::Range};

use super::{
    columns::{Block, Columns},
    head::{Head, Logits, Slice, kept},
    normalise::RowSum,
    sight::Sight,
    tile::{QUERIES, STRIDE},
};
use crate::{
    call::cluster_plan::{HeadPlan, NONE},
    mechanism::{Estimator, Ssa},
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
    /// one. Also returns, for every cluster of keys, the rows that see it exactly.
    pub fn new(labels: &[i32], plan: &HeadPlan, means: &[Option<u32>]) -> (Self, Vec<Vec<u32>>) {
        let mut by_cluster = vec![Vec::new(); plan.clusters()[1]];
        let (mut seen_means, mut start) = (Vec::new(), vec![0]);
        for (row, &label) in labels.iter().enumerate() {
            let from = plan.exact.partition_point(|&[a, _]| i64::from(a) < i64::from(label));
            for &[_, c] in plan.exact[from..].iter().take_while(|&&[a, _]| i64::from(a) == i64::from(label)) {
                by_cluster[c as usize].push(row as u32);
                seen_means.extend(means.get(c as usize).copied().flatten());
            }
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

impl<'a> Head<'a> {
    /// Queries that choose for themselves, and keys by their clusters: exact ones, and means of the others.
    pub fn routed(slice: Slice<'a>, plan: &HeadPlan, m: &Ssa, logits: Logits<'a>) -> Self {
        let mut queries = kept(slice.keep_query, plan.label_q.len());
        let mut keys = kept(slice.keep_key, plan.label_k.len());
        logits.retain_paired(&mut queries, &mut keys);
        // Those that see all, and are seen by all, at the end.
        queries.sort_by_key(|&i| plan.label_q[i as usize] == NONE);
        let place = |j: u32| (plan.label_k[j as usize] == NONE, plan.label_k[j as usize]);
        keys.sort_by_key(|&j| place(j));
        let until = |label: i32| keys.partition_point(|&j| place(j) <= (false, label));
        let (tokens, free) = (keys.len(), until(i32::MAX)..keys.len());
        let run = |c: usize| until(c as i32 - 1)..until(c as i32);
        let (mut means, mut mean_at) = (Vec::new(), Vec::new());
        for c in 0..plan.clusters()[1] {
            let has_mean = m.estimator == Estimator::Centroid && !run(c).is_empty();
            mean_at.push(has_mean.then_some((tokens + means.len()) as u32));
            means.extend(has_mean.then(|| run(c)));
        }
        let labels: Vec<i32> = queries.iter().map(|&i| plan.label_q[i as usize]).collect();
        let (routes, by_cluster) = Routes::new(&labels, plan, &mean_at);
        let choosing = labels.partition_point(|&label| label != NONE);
        let mut blocks = Vec::new();
        // Means by themselves, lest a tile hold tokens too.
        cut(0..choosing, &mut blocks, &[free, tokens..tokens + means.len()]);
        cut(choosing..queries.len(), &mut blocks, std::slice::from_ref(&(0..tokens)));
        for (c, rows) in by_cluster.iter().enumerate() {
            cut(queries.len()..queries.len() + rows.len(), &mut blocks, &[run(c)]);
            rows.iter().for_each(|&row| queries.push(queries[row as usize]));
        }
        let sight = Sight { causal: false, block: 1, window: None, sinks: 0, shift: 0, transposed: false };
        Self::new(slice, [queries, keys], means, blocks, (sight, Some(routes)), logits)
    }

    /// Rows that are a query's first; the others come after them.
    pub fn own_rows(&self) -> usize {
        self.routes.as_ref().map_or(self.queries.len(), Routes::own)
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
fn cut(rows: Range<usize>, blocks: &mut Vec<Block>, columns: &[Range<usize>]) {
    let columns: Vec<_> = columns.iter().filter(|columns| !columns.is_empty()).cloned().collect();
    for from in rows.clone().step_by(QUERIES) {
        let rows = from..(from + QUERIES).min(rows.end);
        blocks.push(Block { rows, columns: columns.clone(), edges: Vec::new() });
    }
}
