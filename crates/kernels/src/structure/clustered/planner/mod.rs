//! Making a plan: clusters, what is exact, and sampled edges. Every draw comes from a stream of its own, so that the plan
//! does not depend on the order of evaluation.

mod by_row;
mod fit;
mod heaviest;
mod kmeans;
pub(super) mod online;
mod outliers;
mod pairs;
mod panels;
mod random;
mod routes;
mod seen;
pub(super) mod space;

use self::seen::Seen;
pub(super) use self::{
    fit::of_segment,
    random::{Stage, Stream, pick},
    routes::largest,
};
use super::members::Members;
use crate::{
    ClusterPlan, Extras, Inputs, Mask, Mechanism, Result, Shape,
    call::{
        Call, HeadGroups, View,
        cluster_plan::{Edge, HeadPlan, NONE, STRAY, clusters},
    },
    check,
    mechanism::{ClusterOn, Estimator, Sampler, Segments, Ssa},
    parallel, range,
    simd::{Level, rows},
};

/// The plan of a checked call.
///
/// # Errors
/// [`Error::Range`] naming the first head whose tokens f32 has no room for.
pub(crate) fn plan(call: &Call<'_>, m: &Ssa) -> Result<ClusterPlan> {
    let Shape { seq_q, seq_kv, .. } = call.shape;
    let slices = call.shape.slices();
    let make = || {
        parallel::try_each(0..slices, |slice| range::check_clustered(call, m, slice))?;
        let head = |slice: usize| Head::of(call, m, slice);
        if !m.routes_queries() {
            return Ok(parallel::map(0..slices, |slice| head(slice).plan()));
        }
        // A codebook is a head of queries' own.
        let sharing = if call.extras.codebook.is_none() { call.sharing } else { 1 };
        let labels = parallel::map(0..slices / sharing, |keys| head(keys * sharing).key_labels());
        Ok(parallel::map(0..slices, |slice| head(slice).routed(labels[slice / sharing].clone())))
    };
    // Each of the hundreds of short parallel steps of k-means would wait for a thread to wake, were it started from
    // outside the pool.
    let heads = if panels::is_shared(seq_q.max(seq_kv)) { rayon::scope(|_| make()) } else { make() };
    Ok(ClusterPlan::of_heads(&call.shape, heads?))
}

impl ClusterPlan {
    /// Plans a call of `mechanism` (an `ssa`), which then takes the plan in [`crate::Extras::clusters`]: `q` and `k` as in
    /// [`crate::Inputs`], `codebook [heads, clusters, head_dim]` or none.
    ///
    /// # Errors
    /// Those of [`crate::Operator::new`] and [`crate::Operator::forward`]; [`crate::Error::Unsupported`] for another mechanism.
    pub fn new(
        mechanism: &Mechanism,
        shape: &Shape,
        q: &[f32],
        k: &[f32],
        codebook: Option<&[f32]>,
        mask: &Mask<'_>,
    ) -> Result<Self> {
        Self::with_kv_heads(mechanism, shape, shape.heads, q, k, codebook, mask)
    }

    /// The same of keys that have fewer heads: `kv_heads`, each of which serves as many heads of queries in a row, as in
    /// [`crate::Operator::with_kv_heads`].
    ///
    /// # Errors
    /// As [`ClusterPlan::new`]; [`crate::Error::OutOfRange`] where `kv_heads` does not divide the heads.
    pub fn with_kv_heads(
        mechanism: &Mechanism,
        shape: &Shape,
        kv_heads: usize,
        q: &[f32],
        k: &[f32],
        codebook: Option<&[f32]>,
        mask: &Mask<'_>,
    ) -> Result<Self> {
        let m = &mechanism.clusters()?;
        mechanism.check(shape, mask.causal)?;
        let mask = Mask { causal: mask.causal || m.causal, ..*mask };
        let extras = codebook.map_or(Extras::default(), |codebook| Extras::default().with_codebook(codebook));
        // A plan does not depend on the values: they have no channels here.
        let shape = Shape { value_dim: 0, ..*shape };
        let k = if mechanism.tied { q } else { k };
        let sharing = check::sharing(mechanism, shape.heads, kv_heads)?;
        let repeated = match sharing {
            1 => None,
            _ => {
                let remedy = "expected batch * kv_heads * seq_kv * head_dim";
                check::length("plan", "k", k.len(), shape.k_len() / sharing, remedy)?;
                Some(HeadGroups::new(shape.batch, shape.heads, kv_heads).repeat(k))
            }
        };
        let k = repeated.as_deref().unwrap_or(k);
        let own = (!mechanism.tied).then_some(k);
        check::planned("plan", mechanism, &shape, &Inputs { q, k: own, v: &[], extras }, &mask)?;
        let of = |x, tokens| View::in_one_piece(x, shape.slices(), [tokens, shape.head_dim]);
        let (q, k, level) = (of(q, shape.seq_q), of(k, shape.seq_kv), Level::selected()?);
        let v = View::none();
        let call = Call { shape, q, k, v, extras, sharing, mask, level, bf16: None, units: None };
        plan(&call, m)
    }
}

/// One (batch, head) that is planned for.
struct Head<'a> {
    m: &'a Ssa,
    q: &'a [f32],
    k: &'a [f32],
    dim: usize,
    seq_q: usize,
    seq_kv: usize,
    keep_q: Option<&'a [bool]>,
    keep_k: Option<&'a [bool]>,
    causal: bool,
    segments: Segments,
    codebook: Option<&'a [f32]>,
    level: Level,
    /// Batch entry and head, which draws depend on.
    index: [u64; 2],
}

/// Both sides of the graph, between which edges are sampled.
struct Sides<'a> {
    head: &'a Head<'a>,
    label_q: &'a [i32],
    label_k: &'a [i32],
    queries: &'a Members,
    keys: &'a Members,
    /// The key clusters that are exact for each query cluster.
    routes: &'a [Vec<u32>],
    sampler: Sampler,
}

impl<'a> std::ops::Deref for Sides<'a> {
    type Target = Head<'a>;
    fn deref(&self) -> &Head<'a> {
        self.head
    }
}

impl Sides<'_> {
    fn is_exact(&self, a: u32, c: u32) -> bool {
        self.routes[a as usize].contains(&c)
    }
}

impl<'a> Head<'a> {
    fn of(call: &Call<'a>, m: &'a Ssa, slice: usize) -> Self {
        let Shape { heads, seq_q, seq_kv, head_dim: dim, .. } = call.shape;
        let (b, h) = (slice / heads, slice % heads);
        let codebook = call.extras.codebook.map(|book| &book[h * book.len() / heads..(h + 1) * book.len() / heads]);
        Self {
            m,
            q: &call.q.dense()[slice * seq_q * dim..][..seq_q * dim],
            k: &call.k.dense()[slice * seq_kv * dim..][..seq_kv * dim],
            dim,
            seq_q,
            seq_kv,
            keep_q: call.mask.query.map(|keep| &keep[b * seq_q..][..seq_q]),
            keep_k: call.mask.key.map(|keep| &keep[b * seq_kv..][..seq_kv]),
            causal: call.mask.causal,
            segments: Segments::new(m, call.mask.causal, seq_q, seq_kv),
            codebook,
            level: call.level,
            index: [(call.extras.first_sequence + b) as u64, m.draws_of(h)],
        }
    }

    fn plan(&self) -> HeadPlan {
        let (mut label_q, mut label_k) = self.labels();
        self.free_outliers(&mut label_k);
        let keys = of_labels(&label_k);
        let mut queries = of_labels(&label_q);
        let mut routes = self.routes(&queries, &keys);
        if self.m.outlier_queries > 0 {
            (label_q, routes) = self.route_outliers(&label_q, &queries, &keys, routes);
            queries = of_labels(&label_q);
        }
        let mut edges = Vec::new();
        let samples = self.m.samples(self.seq_kv);
        if samples > 0 {
            let sampler = self.m.sampler(self.causal);
            let sides = Sides {
                head: self,
                label_q: &label_q,
                label_k: &label_k,
                queries: &queries,
                keys: &keys,
                routes: &routes,
                sampler,
            };
            edges = match sampler {
                Sampler::Row => by_row::edges(&sides, samples),
                Sampler::Uniform | Sampler::DegreeWeighted => pairs::edges(&sides, samples),
            };
            edges.sort_unstable_by_key(|edge| (edge.query, edge.key));
            if self.m.estimator == Estimator::Raw {
                edges.iter_mut().for_each(|edge| edge.log_weight = 0.0);
            }
        }
        let of_cluster =
            |(a, routes): (usize, &Vec<u32>)| routes.iter().map(move |&c| [a as u32, c]).collect::<Vec<_>>();
        let mut exact: Vec<[u32; 2]> = routes.iter().enumerate().flat_map(of_cluster).collect();
        exact.sort_unstable();
        self.mark_strays(&mut label_q, &mut label_k);
        HeadPlan { label_q, label_k, exact, edges }
    }

    /// The labels of keys of which queries choose, whatever these are.
    fn key_labels(&self) -> Vec<i32> {
        let mut labels = self.fit(self.k, &self.clustered_keys(), Stage::Keys);
        self.free_outliers(&mut labels);
        labels
    }

    /// The plan of queries that choose among clusters of keys: every query is a cluster of its own, no edges are sampled, and nothing is a
    /// stray.
    fn routed(&self, label_k: Vec<i32>) -> HeadPlan {
        let label = |i: usize| if self.keeps_query(i) { i as i32 } else { NONE };
        let label_q = (0..self.seq_q).map(label).collect();
        HeadPlan { exact: self.best_of_queries(&of_labels(&label_k)), label_q, label_k, edges: Vec::new() }
    }

    /// The keys that are neither masked nor global.
    fn clustered_keys(&self) -> Vec<bool> {
        let mut clustered: Vec<bool> = (0..self.seq_kv).map(|j| self.keeps_key(j)).collect();
        self.m.globals(self.seq_kv).iter().for_each(|&g| clustered[g] = false);
        clustered
    }

    fn keeps_query(&self, i: usize) -> bool {
        self.keep_q.is_none_or(|keep| keep[i])
    }

    fn keeps_key(&self, j: usize) -> bool {
        self.keep_k.is_none_or(|keep| keep[j])
    }

    /// The label of every query and key; none for what is masked, global, or has no cluster to join.
    ///
    /// Clusters are those of tokens whose clustered side is kept and whose key is. A query or key beyond these, the other
    /// side of its token being masked, joins one of the clusters by itself.
    fn labels(&self) -> (Vec<i32>, Vec<i32>) {
        let (local_k, globals) = (self.clustered_keys(), self.m.globals(self.seq_kv));
        if !self.m.shared() {
            let fit_q: Vec<bool> = (0..self.seq_q).map(|i| self.keeps_query(i)).collect();
            return (self.fit(self.q, &fit_q, Stage::Queries), self.fit(self.k, &local_k, Stage::Keys));
        }
        let on_queries = self.m.cluster_on == ClusterOn::Queries;
        let base = if on_queries { self.q } else { self.k };
        let fit: Vec<bool> = (0..self.seq_kv).map(|n| local_k[n] && (!on_queries || self.keeps_query(n))).collect();
        let mut label_k = self.fit(base, &fit, Stage::Queries);
        let mut label_q = label_k.clone();
        label_q.iter_mut().enumerate().filter(|(i, _)| !self.keeps_query(*i)).for_each(|(_, label)| *label = NONE);
        self.attach(&mut label_k, self.k, |j| local_k[j] && !fit[j]);
        self.attach(&mut label_q, self.q, |i| self.keeps_query(i) && !self.keeps_key(i) && !globals.contains(&i));
        (label_q, label_k)
    }

    /// Gives the `joining` rows of `x` the label of the nearest mean of the labelled rows that they see: of earlier ones
    /// alone in a causal call, lest later tokens move it. Those that see none keep no label.
    fn attach(&self, labels: &mut [i32], x: &[f32], joining: impl Fn(usize) -> bool) {
        let joining: Vec<usize> = (0..labels.len()).filter(|&n| joining(n)).collect();
        if joining.is_empty() {
            return;
        }
        let members = labels.to_vec();
        let mut seen = Seen::new(x, self.dim, &members);
        for n in joining {
            seen.extend(self.limit(n));
            labels[n] = seen.nearest(self.level, n).map_or(NONE, |c| c as i32);
        }
    }

    /// Tells the kept tokens that found no cluster from the global ones, which see all and are seen by all. (Every key is
    /// seen somewhere where outliers among them are.)
    fn mark_strays(&self, label_q: &mut [i32], label_k: &mut [i32]) {
        if !self.m.shared() || self.keep_q.is_none() && self.keep_k.is_none() {
            return;
        }
        let globals = self.m.globals(self.seq_kv);
        for n in (0..self.seq_kv).filter(|n| !globals.contains(n)) {
            if label_q[n] == NONE && self.keeps_query(n) {
                label_q[n] = STRAY;
            }
            if label_k[n] == NONE && self.keeps_key(n) && self.m.outlier_globals == 0 {
                label_k[n] = STRAY;
            }
        }
    }

    /// The key clusters that each query cluster sees exactly.
    fn routes(&self, queries: &Members, keys: &Members) -> Vec<Vec<u32>> {
        let (count, shared) = (self.m.routes.min(keys.len()), self.m.shared());
        // Outliers may have left a cluster without keys.
        let present = |c: &u32| !keys.of(*c as usize).is_empty();
        if shared && count <= 1 {
            let own = |a| (0..keys.len() as u32).contains(&a).then_some(a).filter(present);
            return (0..queries.len() as u32).map(|a| own(a).into_iter().collect()).collect();
        }
        let affinity = self.affinity(queries, keys);
        let of_cluster = |a: usize| {
            let affinity = &affinity[a * keys.len()..][..keys.len()];
            let mut order: Vec<u32> = (0..keys.len() as u32).filter(present).collect();
            let own = |c: u32| shared && c as usize == a;
            order.sort_by(|&c, &e| {
                let by_affinity = affinity[e as usize].total_cmp(&affinity[c as usize]);
                own(e).cmp(&own(c)).then(by_affinity)
            });
            order.truncate(count);
            order
        };
        (0..queries.len()).map(of_cluster).collect()
    }

    /// `scale q.k` between the means of the clusters, `[queries, keys]`.
    fn affinity(&self, queries: &Members, keys: &Members) -> Vec<f64> {
        let (q, k) = (queries.means(self.q, self.dim), keys.means(self.k, self.dim));
        let mut products = vec![0.0; keys.len()];
        let mut affinity = Vec::with_capacity(queries.len() * keys.len());
        for q in q.chunks_exact(self.dim) {
            rows::dots(self.level, &k, q, &mut products);
            affinity.extend(products.iter().map(|&x| self.scale() * f64::from(x)));
        }
        affinity
    }

    fn stream(&self, stage: Stage, words: &[u64]) -> Stream {
        let all: Vec<u64> = self.index.into_iter().chain([stage as u64]).chain(words.iter().copied()).collect();
        Stream::new(self.m.seed, &all)
    }

    fn scale(&self) -> f64 {
        self.m.scale.unwrap_or((self.dim as f64).powf(-0.5))
    }

    /// Query `i` sees the keys below this.
    fn limit(&self, i: usize) -> usize {
        if !self.causal {
            return self.seq_kv;
        }
        let block = self.m.causal_clusters.block();
        (i / block + 1).saturating_mul(block).min(self.seq_kv)
    }
}

/// The tokens of the clusters that `labels` name.
fn of_labels(labels: &[i32]) -> Members {
    Members::new(labels, None, clusters(labels))
}

/// The edges that tasks write, in the order of the tasks. Task `n` has room for `sizes[n]` edges and begins at the front;
/// what it leaves of its room is no edge. (Lists of their own, joined, would take twice the memory.)
fn gather(
    sizes: impl Iterator<Item = usize> + Clone,
    grain: usize,
    task: impl Fn(usize, &mut [Edge]) + Sync,
) -> Vec<Edge> {
    const ABSENT: Edge = Edge { query: u32::MAX, key: u32::MAX, log_weight: 0.0 };
    let mut edges = vec![ABSENT; sizes.clone().sum()];
    let sizes: Vec<usize> = sizes.collect();
    let groups = sizes.chunks(grain);
    let parts = parallel::split(&mut edges, groups.clone().map(|sizes| sizes.iter().sum()));
    parallel::each(groups.zip(parts).enumerate(), |(group, (sizes, part))| {
        let parts = parallel::split(part, sizes.iter().copied());
        parts.enumerate().for_each(|(n, part)| task(group * grain + n, part));
    });
    edges.retain(|edge| *edge != ABSENT);
    edges
}
