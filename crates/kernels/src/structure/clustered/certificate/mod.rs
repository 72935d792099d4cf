//! What a plan can miss of dense attention, bounded row by row without forming it.
//!
//! Let `w_j = exp(scale q.k_j)`, and let a cluster of `n` keys have the mean `m` and the radius `r = max_j |k_j - m|`. The
//! deviations `t_j = scale q.(k_j - m)` have mean 0 and lie within `x = scale |q| r` of it. The chord of a convex
//! function bounds its mean, hence
//!
//! ```text
//! M <= sum_j w_j <= M cosh(x),    sum_j |w_j - M/n| <= M sinh(x),    where M = n exp(scale q.m)
//! ```
//!
//! (Jensen on the left; `cosh(x) <= exp(min(x, x^2 / 2))`, Hoeffding's bound). Everything follows from these two.

mod visible;

use self::visible::Visible;
use super::{
    graph::{Graph, Window},
    members::exact_mean,
};
use crate::{
    ClusterPlan, Error, Inputs, Mask, Mechanism, Parameter, Result, Shape,
    call::TokenRows,
    check,
    mechanism::{Estimator, Ssa},
    parallel,
};

/// Tasks of a head: each takes in the keys before its own anew.
const TASKS: usize = 16;

/// Upper bounds, for every query, on how far attention along a plan is from dense softmax attention, in exact arithmetic;
/// each `[batch, heads, seq_q]`. They hold for every input; loose where clusters are wide.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Certificate {
    /// The share of the dense attention's mass that the plan's entries do not account for: with mean tokens, what these
    /// fall short of their clusters (`1 - exp(lse - lse_dense)`); with sampled edges, the mass of the keys without one.
    pub missed_mass: Vec<f64>,
    /// Half the sum over all keys of the difference between the two attention weights, at most 1.
    pub total_variation: Vec<f64>,
    /// The Euclidean distance between the two outputs.
    pub output_error: Vec<f64>,
}

impl ClusterPlan {
    /// Bounds on what a call of `mechanism` (an `ssa`, or `routed`) with this plan misses. `O(seq_q (clusters + exact keys) head_dim)`
    /// time, in f64.
    ///
    /// # Errors
    /// Those of [`crate::Operator::forward`] for the same call; [`Error::Unsupported`] for another mechanism.
    pub fn certificate(
        &self,
        mechanism: &Mechanism,
        shape: &Shape,
        inputs: &Inputs<'_, f32>,
        mask: &Mask<'_>,
    ) -> Result<Certificate> {
        let refused = |what, why| Error::Unsupported { mechanism: mechanism.id(), what, why };
        let m = &mechanism
            .as_ssa()
            .ok_or_else(|| refused("a certificate", "only softmax over clusters of tokens has bounds"))?;
        if inputs.extras.get(Parameter::Gamma).is_some() {
            return Err(refused("a certificate with gamma", "the bounds are on softmax itself; leave gamma out"));
        }
        mechanism.check(shape, mask.causal)?;
        check::inputs("certificate", mechanism, shape, inputs, mask)?;
        self.check("certificate", shape, m.estimator != Estimator::Centroid)?;
        let mut all = Certificate::default();
        for slice in 0..self.slices() {
            Rows::new(self, m, shape, inputs, mask, slice).bounds().into_iter().for_each(|row| all.push(row));
        }
        Ok(all)
    }
}

impl Certificate {
    fn push(&mut self, row: Bounds) {
        self.missed_mass.push(row.missed);
        self.total_variation.push(row.variation);
        self.output_error.push(row.error);
    }
}

/// The bounds of one query.
#[derive(Debug, Clone, Copy, Default)]
struct Bounds {
    missed: f64,
    variation: f64,
    error: f64,
}

/// The rows of one (batch, head).
struct Rows<'a> {
    graph: Graph,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    keep_k: Option<&'a [bool]>,
    shape: &'a Shape,
    scale: f64,
    centroid: bool,
    /// The mean key of every cluster, all keys together: what radii are measured from before they are moved.
    anchors: Vec<f64>,
    /// The mean of all values.
    value_mean: Vec<f64>,
}

impl<'a> Rows<'a> {
    fn new(
        plan: &ClusterPlan,
        m: &Ssa,
        shape: &'a Shape,
        inputs: &Inputs<'a, f32>,
        mask: &Mask<'a>,
        slice: usize,
    ) -> Self {
        let Shape { heads, seq_q, seq_kv, head_dim: d, value_dim: dv, .. } = *shape;
        let b = slice / heads;
        let given = inputs.extras.get(Parameter::Scale).map(|scale| scale[slice % heads].into());
        let keep_q = mask.query.map(|keep| &keep[b * seq_q..][..seq_q]);
        let keep_k = mask.key.map(|keep| &keep[b * seq_kv..][..seq_kv]);
        let window = Window::new(m, mask.causal || m.causal, shape);
        let graph = Graph::new(plan.head(slice).clone(), keep_q, keep_k, window);
        let k = &inputs.k.expect("checked: an untied call has keys")[slice * seq_kv * d..][..seq_kv * d];
        let v = &inputs.v[slice * seq_kv * dv..][..seq_kv * dv];
        let anchors = (0..graph.keys.len())
            .flat_map(|c| exact_mean(TokenRows::in_one_piece(k, d), graph.keys.of(c).iter().copied()))
            .collect();
        let kept = (0..seq_kv as u32).filter(|&j| keep_k.is_none_or(|keep| keep[j as usize]));
        Self {
            q: &inputs.q[slice * seq_q * d..][..seq_q * d],
            k,
            v,
            keep_k,
            shape,
            scale: given.or(m.scale).unwrap_or((d as f64).powf(-0.5)),
            centroid: m.estimator == Estimator::Centroid,
            anchors,
            value_mean: exact_mean(TokenRows::in_one_piece(v, dv), kept),
            graph,
        }
    }

    fn bounds(&self) -> Vec<Bounds> {
        let mut groups = vec![None; self.shape.seq_q];
        let all = (0..self.graph.queries.len()).map(Some).chain([None]);
        for group in all {
            self.graph.queries.group(group).iter().for_each(|&i| groups[i as usize] = Some(group));
        }
        let of_rows = |(task, groups): (usize, &[Option<Option<usize>>])| {
            let mut visible = Visible::new(self);
            let first = task * self.shape.seq_q.div_ceil(TASKS);
            let row = |(n, group): (usize, &Option<Option<usize>>)| {
                visible.extend(self.graph.window.limit(first + n));
                // A masked query has no row, and a query of no cluster sees every key exactly.
                group.flatten().map_or(Bounds::default(), |a| self.bound(&mut visible, first + n, a))
            };
            groups.iter().enumerate().map(row).collect::<Vec<_>>()
        };
        parallel::map(groups.chunks(self.shape.seq_q.div_ceil(TASKS)).enumerate(), of_rows).concat()
    }

    /// The bounds of query `i`, of cluster `a`.
    fn bound(&self, visible: &mut Visible<'_>, i: usize, a: usize) -> Bounds {
        let d = self.shape.head_dim;
        let q = &self.q[i * d..][..d];
        let limit = self.graph.window.limit(i);
        let logit = |j: u32| self.scale * dot(q, &self.k[j as usize * d..][..d]);
        let routed = self.graph.exact_keys(Some(a)).flatten().copied().filter(|&j| (j as usize) < limit);
        let near = self.graph.own_keys(i, a).map(|j| j as u32);
        let exact: Vec<f64> = routed.chain(near).map(logit).collect();
        let edges = self.graph.edges_of(i).iter();
        let sampled: Vec<Sample> =
            edges.map(|edge| Sample::new(self, edge.key, logit(edge.key), edge.log_weight)).collect();
        let far = visible.far(i, a);
        let row = Row::new(&exact, &sampled, &far);
        let (missed, variation) = if self.centroid { row.of_means(&far) } else { row.of_samples(&far) };
        // A row without any entry is 0, which is no mean of values.
        let absent = row.is_empty() && !far.is_empty() && !far.iter().any(|c| c.has_mean);
        let error = if absent { visible.largest_value } else { 2.0 * variation * visible.value_radius };
        Bounds { missed, variation, error }
    }
}

/// A sampled edge of a query.
struct Sample {
    cluster: Option<usize>,
    /// The scaled product.
    logit: f64,
    log_weight: f64,
}

impl Sample {
    fn new(rows: &Rows<'_>, key: u32, logit: f64, log_weight: f64) -> Self {
        Self { cluster: rows.graph.group_of_key(key as usize), logit, log_weight }
    }
}

/// A cluster that a query does not see exactly.
struct FarCluster {
    cluster: usize,
    /// Its keys that the query sees.
    count: usize,
    /// `ln M`: the least mass that it has.
    log_mass: f64,
    /// How far the scaled products may be from the mean's.
    spread: f64,
    /// Whether a mean token stands for it.
    has_mean: bool,
}

impl FarCluster {
    /// The logarithm of the most mass that it has.
    fn log_most(&self) -> f64 {
        // ln cosh(x), which overflows no sooner than x
        self.log_mass + self.spread + (-2.0 * self.spread).exp().ln_1p() - std::f64::consts::LN_2
    }
}

/// The sampled edges of a query into one cluster.
fn into_cluster(sampled: &[Sample], cluster: usize) -> impl Iterator<Item = &Sample> {
    sampled.iter().filter(move |edge| edge.cluster == Some(cluster))
}

/// Whether every key of a cluster has its edge.
fn is_complete(sampled: &[Sample], far: &FarCluster) -> bool {
    into_cluster(sampled, far.cluster).count() == far.count
}

/// What part of all a part is at most; 1 where masses beyond the range of f64 do not tell.
fn share(part: f64, all: f64) -> f64 {
    match part {
        0.0 => 0.0,
        _ if part < all => part / all,
        _ => 1.0,
    }
}

/// All masses of a query relative to `exp(unit)`.
struct Row<'r> {
    unit: f64,
    exact: &'r [f64],
    sampled: &'r [Sample],
}

impl<'r> Row<'r> {
    fn new(exact: &'r [f64], sampled: &'r [Sample], far: &[FarCluster]) -> Self {
        let sampled_logs = sampled.iter().flat_map(|e| [e.logit, e.logit + e.log_weight]);
        // What is known of a cluster replaces its bound, which may be so far above that nothing else is left beside it.
        let bounds = far.iter().filter(|c| !is_complete(sampled, c)).map(FarCluster::log_most);
        let logs = exact.iter().copied().chain(sampled_logs).chain(bounds);
        Self { unit: logs.fold(f64::NEG_INFINITY, f64::max), exact, sampled }
    }

    /// Whether the plan gives the query no token.
    fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.sampled.is_empty()
    }

    fn mass(&self, log: f64) -> f64 {
        (log - self.unit).exp()
    }

    fn exact_mass(&self) -> f64 {
        self.exact.iter().map(|&z| self.mass(z)).sum()
    }

    /// Missed mass and total variation where mean tokens stand for the clusters beyond.
    fn of_means(&self, far: &[FarCluster]) -> (f64, f64) {
        if far.is_empty() {
            return (0.0, 0.0);
        }
        let exact = self.exact_mass();
        let (far, lost): (Vec<_>, Vec<_>) = far.iter().partition(|c| c.has_mean);
        let lost: f64 = lost.iter().map(|c| self.mass(c.log_most())).sum();
        let least: f64 = far.iter().map(|c| self.mass(c.log_mass)).sum();
        let most: f64 = far.iter().map(|c| self.mass(c.log_most())).sum::<f64>() + lost;
        // sum_j max(w_j - M/n, 0) is half of sinh(x) + cosh(x) - 1 of M
        let log_excess = |c: &FarCluster| c.log_mass + (0.5 * c.spread.exp_m1()).ln().min(c.spread);
        let excess: f64 = far.iter().filter(|c| c.spread > 0.0).map(|&c| self.mass(log_excess(c))).sum::<f64>() + lost;
        // Only keys beyond can have more weight in dense attention, and all of theirs is a bound too.
        let variation = share(excess, exact + least).min(share(most, exact + most));
        (share((most - least).max(0.0), exact + most), variation)
    }

    /// The same where sampled edges do.
    fn of_samples(&self, far: &[FarCluster]) -> (f64, f64) {
        let exact = self.exact_mass();
        let rest = |c: &FarCluster| {
            let sampled: f64 = into_cluster(self.sampled, c.cluster).map(|e| self.mass(e.logit)).sum();
            (self.mass(c.log_most()) - sampled).max(0.0)
        };
        let rest: f64 = far.iter().filter(|c| !is_complete(self.sampled, c)).map(rest).sum();
        let known = exact + self.sampled.iter().map(|e| self.mass(e.logit)).sum::<f64>();
        if rest == 0.0 && self.sampled.iter().all(|e| e.log_weight == 0.0) {
            return (0.0, 0.0);
        }
        if self.is_empty() {
            return (1.0, 1.0);
        }
        let most = known + rest;
        let total = exact + self.sampled.iter().map(|e| self.mass(e.logit + e.log_weight)).sum::<f64>();
        // A mass that vanishes beside the largest bound, or has an infinite weight, says nothing of its parts.
        if total == 0.0 || !total.is_finite() {
            return (1.0, 1.0);
        }
        let gain = |log: f64, log_weight: f64| (self.mass(log + log_weight) / total - self.mass(log) / most).max(0.0);
        let variation = self.exact.iter().map(|&z| gain(z, 0.0)).sum::<f64>()
            + self.sampled.iter().map(|e| gain(e.logit, e.log_weight)).sum::<f64>();
        (share(rest, most), share(variation, 1.0))
    }
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}
