//! Clusters of tokens: exact within a cluster and between clusters that are routed to each other; beyond, a few sampled
//! edges or one mean token per cluster.
//!
//! A call has two stages. *Planning* ([`planner`]) says which tokens are clustered, what is exact and which edges are
//! sampled: a [`ClusterPlan`], a constant. *Attending* is softmax over the entries that the plan gives every query, with
//! the plan's constant added to the logits of sampled edges; it runs on the tile products of the dense structure, on
//! gathered rows. What depends on the number of clusters or edges is allocated by the call; tiles come from its scratch.

mod backward;
mod certificate;
mod decoding;
mod far;
mod forward;
mod graph;
mod held;
mod matrices;
mod members;
mod memory;
mod plan;
mod planner;
mod prefix;
mod segmented;
mod sparse;

pub(crate) use backward::backward;
pub use certificate::Certificate;
pub(crate) use decoding::{Past, Setting, Token};
pub(crate) use forward::forward;
pub use matrices::PlanMatrices;
pub(crate) use plan::plan;
pub(crate) use planner::plan as make;
pub(crate) use segmented::Routed;

use self::graph::{Graph, Window};
use crate::{
    Result,
    call::{Call, cluster_plan::HeadPlan},
    mechanism::{Estimator, Ssa},
    parallel,
};

/// What forward and backward pass have in common.
struct Case {
    /// Of every (batch, head).
    graphs: Vec<Graph>,
    /// Factor on the gradients of `q` and `k`.
    scale: f32,
    /// Factor on the products of queries and keys, for base-2 logits.
    logit: f32,
    centroid: bool,
    causal: bool,
}

impl Case {
    fn new(call: &Call<'_>, m: &Ssa) -> Result<Self> {
        let plan = call.extras.clusters.cloned().map_or_else(|| planner::plan(call, m), Ok)?;
        let shape = call.shape;
        let window = Window::new(m, call.mask.causal, &shape);
        let graph = |(slice, plan): (usize, HeadPlan)| {
            let b = slice / shape.heads;
            let keep_q = call.mask.query.map(|keep| &keep[b * shape.seq_q..][..shape.seq_q]);
            let keep_k = call.mask.key.map(|keep| &keep[b * shape.seq_kv..][..shape.seq_kv]);
            Graph::new(plan, keep_q, keep_k, window)
        };
        let scale = m.scale.unwrap_or((shape.head_dim as f64).powf(-0.5));
        Ok(Self {
            graphs: parallel::map(plan.heads.into_iter().enumerate(), graph),
            scale: scale as f32,
            logit: (scale * std::f64::consts::LOG2_E) as f32,
            centroid: m.estimator == Estimator::Centroid,
            causal: call.mask.causal,
        })
    }

    /// Whether mean tokens stand for clusters that are complete.
    fn has_far(&self) -> bool {
        self.centroid && !self.causal
    }

    /// Whether mean tokens stand for what a query sees of the clusters so far.
    fn has_prefix_far(&self) -> bool {
        self.centroid && self.causal
    }
}
