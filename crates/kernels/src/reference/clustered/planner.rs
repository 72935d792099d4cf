//! A plan in f64 and by the definitions: shares no code with the planner of the kernels, lest both err alike.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{
    super::{
        head::Head,
        matrix::{Matrix, inner},
    },
    Estimator, Sampler, Ssa,
    edges::Sides,
    labels::{by_codebook, compact, distance, kmeans, mean, online, project, smallest, split_large},
    random::Stream,
    segment_order,
};
use crate::{
    call::cluster_plan::{Edge, HeadPlan, NONE, STRAY},
    mechanism::{CausalClusters, ClusterMetric, ClusterOn, RouteBy},
};

/// Stages of the random numbers: first centres of the queries (or of the one set of tokens), of the keys; the projection.
const QUERIES: u64 = 1;
const KEYS: u64 = 2;
const PROJECTION: u64 = 3;

/// One (batch, head).
pub(super) struct Planner<'a> {
    pub m: &'a Ssa,
    pub q: Matrix,
    pub k: Matrix,
    head: &'a Head,
    codebook: Option<Vec<Vec<f64>>>,
    globals: Vec<usize>,
    index: [u64; 2],
}

/// The plan of head `h`, with the centroids of its codebook if it has one; for the f32 that the kernels see.
pub(in super::super) fn plan(head: &Head, m: &Ssa, h: usize, codebook: Option<&[f32]>) -> HeadPlan {
    let rounded = |x: &Matrix| x.map(|_, _, x| f64::from(x as f32));
    let (q, k) = (rounded(&head.q), rounded(&head.k));
    let centroid = |row: &[f32]| row.iter().map(|&x| x.into()).collect();
    let codebook = codebook.map(|book| book.chunks(q.cols).map(centroid).collect());
    let globals = m.globals(k.rows);
    Planner { m, q, k, head, codebook, globals, index: [head.batch as u64, m.draws_of(h)] }.plan()
}

/// The tokens of every cluster.
fn members(labels: &[i32]) -> Vec<Vec<usize>> {
    let clusters = labels.iter().max().map_or(0, |&most| (most + 1).max(0));
    (0..clusters).map(|a| (0..labels.len()).filter(|&n| labels[n] == a).collect()).collect()
}

/// The indices of `values` from the largest down, those of equal values in order.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // A zero is a zero, whatever its sign.
    order.sort_by(|&a, &b| (values[b] + 0.0).total_cmp(&(values[a] + 0.0)));
    order
}

/// The `count` tokens with the largest positive distances, in order.
fn farthest(distances: &[f64], count: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> =
        descending(distances).into_iter().filter(|&n| distances[n] > 0.0).take(count).collect();
    chosen.sort_unstable();
    chosen
}

impl Planner<'_> {
    fn plan(&self) -> HeadPlan {
        let (mut label_q, mut label_k) = self.labels();
        self.free_outliers(&mut label_k);
        let mut exact = match self.m.route_by {
            RouteBy::Cluster => self.routes(&members(&label_q), &members(&label_k)),
            RouteBy::Query => self.routes_of_queries(&members(&label_k)),
        };
        self.route_outliers(&mut label_q, &members(&label_k), &mut exact);
        let sides = Sides { planner: self, rows: members(&label_q), keys: members(&label_k), exact: &exact };
        let (samples, sampler) = (self.m.samples(self.k.rows), self.m.sampler(self.head.causal));
        let edges = match sampler {
            _ if samples == 0 => BTreeMap::new(),
            Sampler::Row => sides.by_row(samples),
            sampler => sides.by_pair(samples, sampler),
        };
        let raw = self.m.estimator == Estimator::Raw;
        let edge = |((i, j), w): ((usize, usize), f64)| Edge {
            query: i as u32,
            key: j as u32,
            log_weight: if raw { 0.0 } else { w },
        };
        let blocks = |(a, seen): (usize, &Vec<usize>)| {
            let mut seen = seen.clone();
            seen.sort_unstable();
            seen.into_iter().map(move |c| [a as u32, c as u32])
        };
        let exact = exact.iter().enumerate().flat_map(blocks).collect();
        self.mark_strays(&mut label_q, &mut label_k);
        HeadPlan { label_q, label_k, exact, edges: edges.into_iter().map(edge).collect() }
    }

    pub fn stream(&self, words: &[u64]) -> Stream {
        Stream::new(self.m.seed, &[&self.index, words].concat())
    }

    pub fn scale(&self) -> f64 {
        self.head.scale(self.m.scale)
    }

    /// Whether token `i` may see token `j` by their positions.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        let block = self.m.causal_clusters.block();
        !self.head.causal || j / block <= i / block
    }

    fn is_local(&self, n: usize) -> bool {
        !self.globals.contains(&n)
    }

    fn labels(&self) -> (Vec<i32>, Vec<i32>) {
        let (keep_q, keep_k) = (&self.head.keep_query, &self.head.keep_key);
        let local_k: Vec<bool> = (0..self.k.rows).map(|j| keep_k[j] && self.is_local(j)).collect();
        if self.m.route_by == RouteBy::Query {
            let alone = |i: usize| if keep_q[i] { i as i32 } else { NONE };
            return ((0..self.q.rows).map(alone).collect(), self.fit(&self.k, &local_k, KEYS));
        }
        if self.m.cluster_on == ClusterOn::Dual {
            return (self.fit(&self.q, keep_q, QUERIES), self.fit(&self.k, &local_k, KEYS));
        }
        let local_q: Vec<bool> = (0..self.q.rows).map(|i| keep_q[i] && self.is_local(i)).collect();
        let both: Vec<bool> = (0..self.k.rows).map(|n| local_k[n] && local_q[n]).collect();
        let (fit_on, labels) = match self.m.cluster_on {
            ClusterOn::Queries => (&both, self.fit(&self.q, &both, QUERIES)),
            _ => (&local_k, self.fit(&self.k, &local_k, QUERIES)),
        };
        let side = |x: &Matrix, local: &[bool], members: &[bool]| -> Vec<i32> {
            let label = |n: usize| match (local[n], fit_on[n]) {
                (false, _) => NONE,
                (true, true) => labels[n],
                (true, false) => self.nearest(x, n, &labels, members),
            };
            (0..x.rows).map(label).collect()
        };
        (side(&self.q, &local_q, &both), side(&self.k, &local_k, fit_on))
    }

    /// The cluster whose mean of `x` over the `members` that row `n` sees is nearest to the row.
    fn nearest(&self, x: &Matrix, n: usize, labels: &[i32], members: &[bool]) -> i32 {
        let clusters = labels.iter().max().map_or(0, |most| most + 1);
        let to = |a: i32| {
            let seen = (0..x.rows).filter(|&j| labels[j] == a && members[j] && self.sees(n, j));
            let seen: Vec<usize> = seen.collect();
            if seen.is_empty() { f64::INFINITY } else { distance(x.row(n), &mean(x, &seen)) }
        };
        let distances: Vec<f64> = (0..clusters).map(to).collect();
        let best = smallest(distances.iter().copied()).filter(|&a| distances[a] < f64::INFINITY);
        best.map_or(NONE, |a| a as i32)
    }

    /// Labels of the rows of `x` in the fit; none for the others.
    fn fit(&self, x: &Matrix, fit_on: &[bool], stage: u64) -> Vec<i32> {
        let tokens: Vec<usize> = (0..x.rows).filter(|&n| fit_on[n]).collect();
        let mut labels = vec![NONE; x.rows];
        if tokens.is_empty() {
            return labels;
        }
        if let (CausalClusters::Segment { size }, true) = (self.m.causal_clusters, self.head.causal) {
            return self.fit_segments(x, fit_on, stage, size);
        }
        let points = self.points(x, &tokens);
        let (clusters, block) = (self.m.clusters(self.k.rows), self.m.causal_clusters.block());
        let found = match &self.codebook {
            None if self.head.causal => online(&points, &tokens, clusters, block, self.cap(clusters, tokens.len())),
            _ => self.clusters_of(&points, clusters, self.stream(&[stage])),
        };
        tokens.iter().zip(compact(&found)).for_each(|(&n, label)| labels[n] = label as i32);
        labels
    }

    /// The same of the whole segments of `size` keys, each by itself.
    fn fit_segments(&self, x: &Matrix, fit_on: &[bool], stage: u64, size: usize) -> Vec<i32> {
        let (mut labels, mut first) = (vec![NONE; x.rows], 0);
        for segment in 0..x.rows / size {
            let keys = segment * size..(segment + 1) * size;
            let tokens: Vec<usize> = keys.clone().filter(|&n| fit_on[n]).collect();
            if tokens.is_empty() {
                continue;
            }
            let asked = self.m.clusters_in(&keys);
            let found = self.clusters_of(&self.points(x, &tokens), asked, self.stream(&[stage, segment as u64]));
            let found = compact(&found);
            tokens.iter().zip(&found).for_each(|(&n, label)| labels[n] = (first + label) as i32);
            first += found.iter().max().map_or(0, |most| most + 1);
        }
        labels
    }

    fn cap(&self, clusters: usize, tokens: usize) -> usize {
        let of_clusters = |balance: f64| (balance * tokens as f64 / clusters.min(tokens) as f64).ceil() as usize;
        self.m.balance.map_or(tokens, of_clusters)
    }

    fn clusters_of(&self, points: &Matrix, clusters: usize, stream: Stream) -> Vec<usize> {
        let cap = self.cap(clusters, points.rows);
        if let Some(codebook) = &self.codebook {
            return by_codebook(points, codebook, cap);
        }
        let mut found = kmeans(points, clusters, self.m.kmeans_iterations, stream);
        split_large(points, &mut found, cap);
        found
    }

    /// The rows `tokens` of `x` in the space where tokens are near each other.
    fn points(&self, x: &Matrix, tokens: &[usize]) -> Matrix {
        let mut points = Matrix::from_fn(tokens.len(), x.cols, |n, c| x.at(tokens[n], c));
        if self.m.cluster_metric == ClusterMetric::Cosine {
            let length = |n: usize| inner(points.row(n), points.row(n)).sqrt();
            // The kernels hold unit rows in f32.
            let unit = |n: usize, x: f64| if x == 0.0 { 0.0 } else { f64::from((x / length(n)) as f32) };
            points = points.map(|n, _, x| unit(n, x));
        }
        if let Some(dim) = self.m.jl_dim {
            points = project(&points, dim, Stream::new(self.m.seed, &[PROJECTION]));
        }
        points
    }

    /// The key clusters that each query cluster sees exactly: its own, then those of the largest products of the means.
    fn routes(&self, rows: &[Vec<usize>], keys: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let (shared, count) = (self.m.shared(), self.m.routes.min(keys.len()));
        let of = |a: usize| {
            let query = mean(&self.q, &rows[a]);
            let own = |c: usize| shared && c == a;
            let affinity = |c: usize| if own(c) { f64::INFINITY } else { inner(&query, &mean(&self.k, &keys[c])) };
            let order = descending(&(0..keys.len()).map(affinity).collect::<Vec<_>>());
            let filled = order.into_iter().filter(|&c| !keys[c].is_empty()).take(count);
            // Whose own keys are all outliers has no other route unless it is to have several.
            filled.filter(|&c| !shared || count > 1 || own(c)).collect()
        };
        (0..rows.len()).map(of).collect()
    }

    /// The key clusters that each query sees exactly: of the largest weights of their means.
    fn routes_of_queries(&self, keys: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let of = |i: usize| {
            let weight = |keys: &Vec<usize>| {
                self.scale() * inner(self.q.row(i), &mean(&self.k, keys)) + (keys.len() as f64).ln()
            };
            let order = descending(&keys.iter().map(weight).collect::<Vec<_>>());
            let count = if self.head.keep_query[i] { self.m.routes } else { 0 };
            let before = |j: usize| segment_order(self.head, self.m, i, j) == Ordering::Less;
            order.into_iter().filter(|&c| keys[c].first().is_some_and(|&j| before(j))).take(count).collect()
        };
        (0..self.q.rows).map(of).collect()
    }

    /// The keys farthest from the means of their clusters leave these.
    fn free_outliers(&self, label_k: &mut [i32]) {
        let keys = members(label_k);
        let from_mean = |j: usize| match usize::try_from(label_k[j]) {
            Ok(c) => distance(self.k.row(j), &mean(&self.k, &keys[c])),
            Err(_) => 0.0,
        };
        let distances: Vec<f64> = (0..label_k.len()).map(from_mean).collect();
        farthest(&distances, self.m.outlier_globals).into_iter().for_each(|j| label_k[j] = NONE);
    }

    /// The queries farthest from the mean of the others of their clusters also see the clusters that are best for them.
    fn route_outliers(&self, label_q: &mut [i32], keys: &[Vec<usize>], exact: &mut Vec<Vec<usize>>) {
        if self.m.outlier_queries == 0 {
            return;
        }
        let rows = members(label_q);
        let from_others = |i: usize| {
            let Ok(a) = usize::try_from(label_q[i]) else { return 0.0 };
            let others: Vec<usize> = rows[a].iter().copied().filter(|&other| other != i).collect();
            if others.is_empty() { f64::INFINITY } else { distance(self.q.row(i), &mean(&self.q, &others)) }
        };
        let distances: Vec<f64> = (0..label_q.len()).map(from_others).collect();
        let (mut all, mut parted) = (exact.clone(), BTreeMap::new());
        for i in farthest(&distances, self.m.outlier_queries) {
            let of_cluster = &all[label_q[i] as usize];
            let products: Vec<f64> = keys.iter().map(|keys| inner(self.q.row(i), &mean(&self.k, keys))).collect();
            let best = descending(&products).into_iter().filter(|&c| !keys[c].is_empty()).take(self.m.routes);
            let mut seen: Vec<usize> = best.chain(of_cluster.iter().copied()).collect();
            seen.sort_unstable();
            seen.dedup();
            if seen.len() > of_cluster.len() {
                label_q[i] = *parted.entry(seen.clone()).or_insert(all.len() as i32);
                all.resize(all.len().max(label_q[i] as usize + 1), seen);
            }
        }
        // Clusters that have lost their queries are gone.
        let mut used: Vec<i32> = label_q.iter().copied().filter(|&label| label >= 0).collect();
        used.sort_unstable();
        used.dedup();
        *exact = used.iter().map(|&label| all[label as usize].clone()).collect();
        let rank = |label: i32| used.iter().position(|&used| used == label).map_or(NONE, |n| n as i32);
        label_q.iter_mut().for_each(|label| *label = rank(*label));
    }

    /// Kept tokens that are not global have entries by their clusters alone.
    fn mark_strays(&self, label_q: &mut [i32], label_k: &mut [i32]) {
        if !self.m.shared() {
            return;
        }
        for n in (0..self.k.rows).filter(|&n| self.is_local(n)) {
            if self.head.keep_query[n] && label_q[n] == NONE {
                label_q[n] = STRAY;
            }
            if self.head.keep_key[n] && label_k[n] == NONE && self.m.outlier_globals == 0 {
                label_k[n] = STRAY;
            }
        }
    }
}
