//! A plan as it meets the masks of a call: who attends to whom, by lists.

use std::ops::Range;

use super::members::Members;
use crate::{
    Shape,
    call::cluster_plan::{Edge, HeadPlan, NONE, STRAY},
    mechanism::{Segments, Ssa},
};

/// Which keys a query may see by its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub seq_kv: usize,
    /// Positions that become visible together; `None` without causality.
    pub block: Option<usize>,
    /// `seq_kv - seq_q`.
    shift: usize,
    segments: Segments,
}

impl Window {
    pub fn new(m: &Ssa, causal: bool, shape: &Shape) -> Self {
        Self {
            seq_kv: shape.seq_kv,
            block: causal.then(|| m.causal_clusters.block()),
            shift: shape.seq_kv.saturating_sub(shape.seq_q),
            segments: Segments::new(m, causal, shape.seq_q, shape.seq_kv),
        }
    }

    /// Query `i` sees the keys below this.
    pub fn limit(self, i: usize) -> usize {
        let end = |block: usize| ((i + self.shift) / block + 1).saturating_mul(block);
        self.block.map_or(self.seq_kv, |block| end(block).min(self.seq_kv))
    }

    /// Query `i` sees these keys, as far as it sees them, exactly, whatever their clusters; the clusters of those below.
    pub fn own(self, i: usize) -> Range<usize> {
        let own = self.segments.keys(self.segments.of_query(i), self.seq_kv);
        own.start..self.limit(i).max(own.start)
    }
}

/// The graph of one (batch, head). Masked tokens are in no list.
pub(super) struct Graph {
    pub queries: Members,
    pub keys: Members,
    pub window: Window,
    /// Key clusters seen exactly by every query cluster, and query clusters that see every key cluster.
    routes: [Lists; 2],
    edges: Vec<Edge>,
    /// Where the edges of every query start.
    edge_start: Vec<u32>,
    /// Labels of the kept queries and keys.
    labels: [Vec<i32>; 2],
}

/// Lists of numbers, one after the other.
pub(super) struct Lists {
    items: Vec<u32>,
    start: Vec<u32>,
}

impl Lists {
    /// `pairs` of a list below `lists` and an item, in the order of the pairs within each list.
    fn new(pairs: impl Iterator<Item = (u32, u32)> + Clone, lists: usize) -> Self {
        Self::with_places(pairs, lists).0
    }

    /// The same, and for every pair the place of its item.
    fn with_places(pairs: impl Iterator<Item = (u32, u32)> + Clone, lists: usize) -> (Self, Vec<u32>) {
        let mut start = vec![0; lists + 1];
        pairs.clone().for_each(|(list, _)| start[list as usize + 1] += 1);
        (1..=lists).for_each(|n| start[n] += start[n - 1]);
        let (mut items, mut next) = (vec![0; start[lists] as usize], start.clone());
        let place = |(list, item): (u32, u32)| {
            let place = next[list as usize];
            items[place as usize] = item;
            next[list as usize] += 1;
            place
        };
        let places = pairs.map(place).collect();
        (Self { items, start }, places)
    }

    /// Where the items of a list are among all.
    pub fn range(&self, list: usize) -> Range<usize> {
        self.start[list] as usize..self.start[list + 1] as usize
    }

    pub fn of(&self, list: usize) -> &[u32] {
        &self.items[self.range(list)]
    }
}

impl Graph {
    /// The plan is taken apart: a head's edges are what most memory goes to.
    pub fn new(plan: HeadPlan, keep_q: Option<&[bool]>, keep_k: Option<&[bool]>, window: Window) -> Self {
        let [na, nb] = plan.clusters();
        let HeadPlan { mut label_q, mut label_k, exact, mut edges } = plan;
        let kept = |keep: Option<&[bool]>, n: u32| keep.is_none_or(|keep| keep[n as usize]);
        let present = |e: &Edge| {
            kept(keep_q, e.query) && kept(keep_k, e.key) && (e.key as usize) < window.limit(e.query as usize)
        };
        edges.retain(present);
        let mut edge_start = vec![0; label_q.len() + 1];
        edges.iter().for_each(|edge| edge_start[edge.query as usize + 1] += 1);
        (1..edge_start.len()).for_each(|i| edge_start[i] += edge_start[i - 1]);
        let queries = Members::new(&label_q, keep_q, na);
        let keys = Members::new(&label_k, keep_k, nb);
        unlabel_masked(&mut label_q, keep_q);
        unlabel_masked(&mut label_k, keep_k);
        Self {
            window,
            routes: [
                Lists::new(exact.iter().map(|&[a, c]| (a, c)), queries.len()),
                Lists::new(exact.iter().map(|&[a, c]| (c, a)), keys.len()),
            ],
            queries,
            keys,
            edges,
            edge_start,
            labels: [label_q, label_k],
        }
    }

    /// Key clusters that query cluster `a` sees exactly.
    pub fn keys_of(&self, a: usize) -> &[u32] {
        self.routes[0].of(a)
    }

    /// Query clusters that see key cluster `c` exactly.
    pub fn queries_of(&self, c: usize) -> &[u32] {
        self.routes[1].of(c)
    }

    /// The sampled edges of query `i`, ascending in the key.
    pub fn edges_of(&self, i: usize) -> &[Edge] {
        &self.edges[self.edge_range(i)]
    }

    /// The numbers of the sampled edges of query `i`.
    pub fn edge_range(&self, i: usize) -> Range<usize> {
        self.edge_start[i] as usize..self.edge_start[i + 1] as usize
    }

    /// The queries of the sampled edges of every key, and the place of every edge among them.
    pub fn edges_by_key(&self) -> (Lists, Vec<u32>) {
        Lists::with_places(self.edges.iter().map(|edge| (edge.key, edge.query)), self.window.seq_kv)
    }

    /// Cluster of query `i`; none if it is masked, global or a stray.
    pub fn cluster_of_query(&self, i: usize) -> Option<usize> {
        usize::try_from(self.labels[0][i]).ok()
    }

    /// Cluster of key `j`; none if it is masked, global or a stray.
    pub fn cluster_of_key(&self, j: usize) -> Option<usize> {
        usize::try_from(self.labels[1][j]).ok()
    }

    /// Cluster of key `j`, that of the strays included.
    pub fn group_of_key(&self, j: usize) -> Option<usize> {
        if self.labels[1][j] == STRAY { self.keys.strays() } else { self.cluster_of_key(j) }
    }

    /// Lists of keys, ascending in each, that the queries of a group see exactly: of cluster `a`, or of no cluster.
    pub fn exact_keys(&self, group: Option<usize>) -> impl Iterator<Item = &[u32]> {
        let clusters = match group {
            Some(a) => self.keys_of(a).iter().map(|&c| c as usize).collect::<Vec<_>>(),
            None => (0..self.keys.len()).collect(),
        };
        clusters.into_iter().map(|c| self.keys.of(c)).chain([self.keys.unlabelled()]).filter(|keys| !keys.is_empty())
    }

    /// The keys of its own segment that query `i`, of cluster `a`, sees although they are in clusters that it is not routed to.
    pub fn own_keys(&self, i: usize, a: usize) -> impl Iterator<Item = usize> {
        let is_new = move |&j: &usize| self.cluster_of_key(j).is_some_and(|c| !self.keys_of(a).contains(&(c as u32)));
        self.window.own(i).filter(is_new)
    }

    /// Lists of queries, ascending in each, that see the keys of a group exactly: of cluster `c`, or of no cluster.
    pub fn exact_queries(&self, group: Option<usize>) -> impl Iterator<Item = &[u32]> {
        let clusters = match group {
            Some(c) => self.queries_of(c).iter().map(|&a| a as usize).collect::<Vec<_>>(),
            None => (0..self.queries.len()).collect(),
        };
        let lists = clusters.into_iter().map(|a| self.queries.of(a)).chain([self.queries.unlabelled()]);
        lists.filter(|queries| !queries.is_empty())
    }
}

fn unlabel_masked(labels: &mut [i32], keep: Option<&[bool]>) {
    let masked = labels.iter_mut().zip(keep.into_iter().flatten()).filter(|(_, keep)| !**keep);
    masked.for_each(|(label, _)| *label = NONE);
}

/// Consecutive members of one group: cluster `group`, or no cluster.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub group: Option<usize>,
    pub range: Range<usize>,
}

/// All groups of `members`, cut into runs of at most `most`.
pub(super) fn runs(members: &Members, most: usize) -> Vec<Run> {
    let group = |group: Option<usize>, len: usize| {
        (0..len).step_by(most).map(move |start| Run { group, range: start..(start + most).min(len) })
    };
    let clusters = (0..members.len()).flat_map(|c| group(Some(c), members.of(c).len()));
    clusters.chain(group(None, members.unlabelled().len())).collect()
}

impl Members {
    /// The tokens of a run.
    pub fn run(&self, run: &Run) -> &[u32] {
        &self.group(run.group)[run.range.clone()]
    }
}
