//! One batch element and head: its kept tokens in the order of the blocks that the structure makes of them.

use std::ops::Range;

use super::{
    bias::PairBias,
    columns::{Block, Edges, push},
    routes::Routes,
    sight::{EVERYWHERE, Sight},
    tile::QUERIES,
    whole_rows::{WholeRows, add_rows, ascends, mean_of},
};
use crate::{
    call::{
        Call, TokenRows,
        cluster_plan::{HeadPlan, NONE, STRAY},
    },
    mechanism::{Estimator, Ssa},
    score::map::Map,
    scratch::Aligned,
    structure::dense::padded,
};

/// The tokens of one head.
pub(super) struct Head<'a> {
    /// Positions of the rows and of the columns; [`EVERYWHERE`] for a mean.
    pub queries: Vec<u32>,
    pub keys: Vec<u32>,
    /// Images of the queries' own rows and of columns, `stride` apart.
    pub q: WholeRows<'a>,
    pub k: WholeRows<'a>,
    pub stride: usize,
    /// How many tokens a column stands for; empty where each is one.
    pub counts: Vec<f32>,
    /// Which columns the means at their end are of.
    pub means: Vec<Range<usize>>,
    pub blocks: Vec<Block>,
    pub sight: Sight,
    pub bias: Option<PairBias<'a>>,
    /// Where queries have several rows.
    pub routes: Option<Routes>,
}

/// How the logits of pairs are made: what tokens are turned into before their terms are summed, and what is added to these.
pub(super) struct Logits<'a> {
    pub map: Map,
    /// The score's, where queries have offsets of their own.
    pub scale: f32,
    pub bias: Option<PairBias<'a>>,
}

impl Logits<'_> {
    /// Leaves out the tokens of which the bias leaves no pair.
    pub fn retain_paired(&self, queries: &mut Vec<u32>, keys: &mut Vec<u32>) {
        if let Some(bias) = &self.bias {
            bias.retain_paired(queries, keys);
        }
    }
}

/// One head of a call, as it lies in memory.
#[derive(Clone, Copy)]
pub(super) struct Slice<'a> {
    pub q: TokenRows<'a>,
    pub k: TokenRows<'a>,
    pub keep_query: Option<&'a [bool]>,
    pub keep_key: Option<&'a [bool]>,
    pub dim: usize,
}

impl<'a> Slice<'a> {
    pub fn of(call: &Call<'a>, slice: usize) -> Self {
        let s = call.shape;
        let batch = slice / s.heads;
        Self {
            q: call.q.slice(slice),
            k: call.k.slice(slice),
            keep_query: call.mask.query.map(|keep| &keep[batch * s.seq_q..][..s.seq_q]),
            keep_key: call.mask.key.map(|keep| &keep[batch * s.seq_kv..][..s.seq_kv]),
            dim: s.head_dim,
        }
    }
}

pub(super) fn kept(keep: Option<&[bool]>, len: usize) -> Vec<u32> {
    (0..len as u32).filter(|&i| keep.is_none_or(|keep| keep[i as usize])).collect()
}

impl<'a> Head<'a> {
    /// Every kept query and key, in windows where there are any.
    pub fn dense(slice: Slice<'a>, sight: Sight, logits: Logits<'a>) -> Self {
        let mut queries = kept(slice.keep_query, slice.q.tokens);
        let mut keys = kept(slice.keep_key, slice.k.tokens);
        logits.retain_paired(&mut queries, &mut keys);
        let chunks = (0..queries.len()).step_by(QUERIES).map(|from| from..(from + QUERIES).min(queries.len()));
        let block = |rows: Range<usize>| Block {
            columns: sight.columns(&queries[rows.clone()], &keys),
            rows,
            edges: Vec::new(),
        };
        let blocks = chunks.map(block).collect();
        Self::new(slice, [queries, keys], Vec::new(), blocks, (sight, None), logits)
    }

    /// Queries and keys by their clusters: exact clusters, sampled edges, and means of the other clusters.
    pub fn clustered(slice: Slice<'a>, plan: &HeadPlan, m: &Ssa, causal: bool, logits: Logits<'a>) -> Self {
        let label = |labels: &[i32], n: &u32| labels[*n as usize];
        let mut queries = kept(slice.keep_query, plan.label_q.len());
        let mut keys = kept(slice.keep_key, plan.label_k.len());
        logits.retain_paired(&mut queries, &mut keys);
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
        // In the order of the rows, which are sorted by their labels.
        let labels = [STRAY, NONE].into_iter().chain(0..plan.clusters()[0] as i32);
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
        Self::new(slice, [queries, keys], means, blocks, (sight, None), logits)
    }

    pub(super) fn new(
        slice: Slice<'a>,
        [queries, keys]: [Vec<u32>; 2],
        means: Vec<Range<usize>>,
        blocks: Vec<Block>,
        (sight, routes): (Sight, Option<Routes>),
        Logits { map, scale, bias }: Logits<'a>,
    ) -> Self {
        let stride = map.stride(slice.dim);
        let counts = match means.is_empty() {
            true => Vec::new(),
            false => keys.iter().map(|_| 1.0).chain(means.iter().map(|mean| mean.len() as f32)).collect(),
        };
        let (q, k) = (WholeRows::Lent(&[]), WholeRows::Lent(&[]));
        let mut head = Self { queries, keys, q, k, stride, counts, means, blocks, sight, bias, routes };
        // Causal means are those of tokens that all who see them come after.
        let last = |mean: &Range<usize>| if sight.causal { head.keys[mean.end - 1] } else { EVERYWHERE };
        let means: Vec<u32> = head.means.iter().map(last).collect();
        head.keys.extend(means);
        (head.q, head.k) = head.images(slice, map, scale);
        head
    }

    /// The images of rows and columns.
    fn images(&self, slice: Slice<'a>, map: Map, scale: f32) -> (WholeRows<'a>, WholeRows<'a>) {
        let dim = slice.dim;
        if map == Map::Identity {
            return (self.of_rows(slice.q), self.of_columns(slice.k));
        }
        let image = |x: &[f32], query: bool, offset: &dyn Fn(usize) -> f32| {
            let mut images = Aligned::new(x.len() / padded(dim) * self.stride);
            let rows = images.chunks_exact_mut(self.stride).zip(x.chunks_exact(padded(dim)));
            rows.enumerate().for_each(|(n, (image, x))| map.apply(&x[..dim], query, offset(n), image));
            WholeRows::Own(images)
        };
        let seen = if map == Map::Offset { self.seen() } else { Vec::new() };
        let offset = |n: usize| match seen.get(n) {
            Some(&seen) if seen > 0.0 => (-seen.ln() / f64::from(scale)) as f32,
            _ => 0.0,
        };
        let (q, k) = (self.of_rows(slice.q), self.of_columns(slice.k));
        (image(&q, true, &offset), image(&k, false, &|_| 0.0))
    }

    /// How many tokens each row sees.
    pub fn seen(&self) -> Vec<f64> {
        let mut seen = vec![0.0; self.queries.len()];
        let count = |column: usize| self.counts.get(column).map_or(1.0, |&n| f64::from(n));
        let bias = self.bias.as_ref().filter(|bias| bias.has_absent());
        let absent =
            |row: usize, column: usize| bias.is_some_and(|b| b.is_absent(self.queries[row], self.keys[column]));
        // Runs of columns in order are counted by where an interval begins and ends in them.
        let in_order = self.counts.is_empty() && bias.is_none() && ascends(&self.keys);
        for block in &self.blocks {
            let columns = || block.columns.iter().flat_map(|columns| columns.clone());
            let total: f64 = match self.counts.is_empty() {
                true => block.columns.iter().map(|run| run.len() as f64).sum(),
                false => columns().map(count).sum(),
            };
            for row in block.rows.clone() {
                let interval = self.sight.of(self.queries[row]);
                seen[row] = if self.sight.is_complete() && bias.is_none() {
                    total
                } else if in_order {
                    block.columns.iter().map(|run| interval.count(&self.keys[run.clone()]) as f64).sum()
                } else {
                    columns().filter(|&c| interval.holds(self.keys[c]) && !absent(row, c)).map(count).sum()
                };
            }
            for edges in &block.edges {
                seen[edges.row] += edges.columns.iter().filter(|&&c| !absent(edges.row, c as usize)).count() as f64;
            }
        }
        if let Some(routes) = &self.routes {
            let twice = |row: usize| routes.seen_means(row).iter().map(|&c| count(c as usize)).sum::<f64>();
            (0..routes.own()).for_each(|row| seen[row] -= twice(row));
            routes.add_up(&mut seen);
        }
        seen
    }

    /// Whether a row sees a column that it is not at a right angle to.
    pub fn has_product(&self, row: usize) -> bool {
        let q = &self.q[self.own_row(row) * self.stride..][..self.stride];
        let product = |k: &[f32]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>();
        let mut columns = self.k.chunks_exact(self.stride).zip(&self.keys);
        columns.any(|(k, &key)| self.sight.sees(self.queries[row], key) && product(k) != 0.0)
    }

    /// The same pairs with keys for queries, each of which sees all of them that see it. Of dense heads.
    pub fn transposed(&self) -> Head<'_> {
        let sight = Sight { transposed: true, ..self.sight };
        let chunks = (0..self.keys.len()).step_by(QUERIES).map(|from| from..(from + QUERIES).min(self.keys.len()));
        let block = |rows: Range<usize>| Block {
            columns: sight.columns(&self.keys[rows.clone()], &self.queries),
            rows,
            edges: Vec::new(),
        };
        Head {
            blocks: chunks.map(block).collect(),
            queries: self.keys.clone(),
            keys: self.queries.clone(),
            q: WholeRows::Lent(&self.k),
            k: WholeRows::Lent(&self.q),
            stride: self.stride,
            counts: Vec::new(),
            means: Vec::new(),
            sight,
            bias: self.bias.as_ref().map(PairBias::transposed),
            routes: None,
        }
    }

    /// Rows of `x`, one per key, in the order of the columns, means at their end; rows of whole vectors.
    pub fn of_columns<'x>(&self, x: TokenRows<'x>) -> WholeRows<'x> {
        let tokens = self.keys.len() - self.means.len();
        let rows = WholeRows::of(x, &self.keys[..tokens]);
        self.means.iter().fold(rows, |rows, mean| rows.push(&mean_of(x, &self.keys[mean.clone()])))
    }

    /// Whether `rows` of whole vectors, in the order of the rows, lie like a tensor of `seq` rows of `dim` channels.
    pub fn lies_like(&self, seq: usize, dim: usize) -> bool {
        padded(dim) == dim && self.queries.len() == seq && ascends(&self.queries)
    }

    /// The same of columns.
    pub fn columns_lie_like(&self, seq: usize, dim: usize) -> bool {
        padded(dim) == dim && self.keys.len() == seq && self.means.is_empty() && ascends(&self.keys)
    }

    /// Rows of `x`, one per query, in the order of the queries' own rows; of whole vectors.
    pub fn of_rows<'x>(&self, x: TokenRows<'x>) -> WholeRows<'x> {
        WholeRows::of(x, &self.queries[..self.own_rows()])
    }

    /// Adds the gradients of the columns, `width` apart, to the tokens' in `out [seq_kv, dim]`; with `source`, they are those of
    /// the images that a map makes of it.
    pub fn add_columns(
        &self,
        x: &[f32],
        width: usize,
        out: &mut [f32],
        dim: usize,
        source: Option<(Map, TokenRows<'_>)>,
    ) {
        let tokens = self.keys.len() - self.means.len();
        add_rows(&self.keys[..tokens], x, width, out, dim, source);
        for (n, mean) in self.means.iter().enumerate().filter(|(_, mean)| !mean.is_empty()) {
            let members = &self.keys[mean.clone()];
            let mut part = x[(tokens + n) * width..][..dim].to_vec();
            if let Some((map, source)) = source {
                map.pull_back(&mean_of(source, members), &x[(tokens + n) * width..][..width], &mut part);
            }
            for &j in members {
                let out = &mut out[j as usize * dim..][..dim];
                out.iter_mut().zip(&part).for_each(|(out, x)| *out += x / members.len() as f32);
            }
        }
    }

    /// The same of the rows.
    pub fn add_rows(&self, x: &[f32], width: usize, out: &mut [f32], dim: usize, source: Option<(Map, TokenRows<'_>)>) {
        add_rows(&self.queries, x, width, out, dim, source);
    }
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
