//! The plan of a clustered call as a value: made once, inspected, stored, used again.

use super::Shape;
use crate::{
    Error, Result,
    mechanism::{Segments, Ssa},
};

/// The label of a token in no cluster: a global one, which sees all and is seen by all, or a masked one.
pub(crate) const NONE: i32 = -1;

/// The label of a kept token that found no cluster to join: only global tokens see it, and it sees only these.
pub(crate) const STRAY: i32 = -2;

/// Which tokens are clustered with which, what is evaluated exactly, and which edges are sampled, for every (batch, head)
/// of a call. A plan is a constant of the call: no gradient goes through it, and the same plan gives the same bits on one
/// instruction set, whatever the number of threads.
///
/// A query sees exactly the keys of the clusters that its own cluster is routed to; a key without a label is seen by
/// every query, and a query without a label sees every key. A stray, a query or key that the masks leave no cluster to join,
/// has neither: it sees only keys without a label, and is seen only by queries without one.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterPlan {
    seq_q: usize,
    seq_kv: usize,
    pub(crate) heads: Vec<HeadPlan>,
}

/// The plan of one (batch, head).
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct HeadPlan {
    /// Cluster of every query, [`NONE`] for none, or [`STRAY`].
    pub label_q: Vec<i32>,
    /// Cluster of every key, [`NONE`] for none, or [`STRAY`].
    pub label_k: Vec<i32>,
    /// Pairs of a query cluster and a key cluster that are evaluated exactly, ascending.
    pub exact: Vec<[u32; 2]>,
    /// Sampled edges, ascending in query and key.
    pub edges: Vec<Edge>,
}

/// A sampled edge.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Edge {
    pub query: u32,
    pub key: u32,
    /// Added to the scaled product of query and key.
    pub log_weight: f64,
}

impl HeadPlan {
    /// Number of clusters of queries and of keys.
    pub fn clusters(&self) -> [usize; 2] {
        [clusters(&self.label_q), clusters(&self.label_k)]
    }
}

/// A [`ClusterPlan`] as flat tensors, as it is stored. `slice` counts batch entry and head: `batch_index * heads + head`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PlanTensors {
    /// Cluster of every query, `[batch, heads, seq_q]`; -1 for none (global or masked), -2 for a stray, whose key has none.
    pub label_q: Vec<i64>,
    /// Cluster of every key, `[batch, heads, seq_kv]`; -1 for none, -2 for a stray, whose query has none.
    pub label_k: Vec<i64>,
    /// `[n, 3]`: slice, query cluster, key cluster.
    pub exact_blocks: Vec<[i64; 3]>,
    /// `[n, 3]`: slice, query, key.
    pub edges: Vec<[i64; 3]>,
    /// `[n]`: the constant that is added to each edge's logit.
    pub edge_log_weight: Vec<f64>,
}

impl ClusterPlan {
    /// Reads a stored plan for calls of `shape`.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::Index`] naming the tensor that does not fit.
    pub fn from_tensors(tensors: &PlanTensors, shape: &Shape) -> Result<Self> {
        let PlanTensors { label_q, label_k, exact_blocks, edges, edge_log_weight } = tensors;
        shape.check()?;
        let slices = shape.slices();
        length("label_q", label_q.len(), slices * shape.seq_q, "expected batch * heads * seq_q")?;
        length("label_k", label_k.len(), slices * shape.seq_kv, "expected batch * heads * seq_kv")?;
        length("edge_log_weight", edge_log_weight.len(), edges.len(), "expected one weight per edge")?;
        // Logits are base-2 and f32.
        if let Some(index) = edge_log_weight.iter().position(|w| !log2_weight(*w).is_finite()) {
            return Err(Error::NonFinite { tensor: "edge_log_weight", index, value: edge_log_weight[index] });
        }
        let mut heads = (0..slices)
            .map(|slice| {
                Ok(HeadPlan {
                    label_q: labels("label_q", label_q, slice, shape.seq_q)?,
                    label_k: labels("label_k", label_k, slice, shape.seq_kv)?,
                    ..HeadPlan::default()
                })
            })
            .collect::<Result<Vec<_>>>()?;
        for (slice, head) in heads.iter().enumerate() {
            strays("label_q", slice, &head.label_q, &head.label_k)?;
            strays("label_k", slice, &head.label_k, &head.label_q)?;
        }
        for (n, block) in exact_blocks.iter().enumerate() {
            let slice = within("exact_blocks", 3 * n, block[0], slices)?;
            let [queries, keys] = heads[slice].clusters();
            let query = within("exact_blocks", 3 * n + 1, block[1], queries)?;
            let key = within("exact_blocks", 3 * n + 2, block[2], keys)?;
            heads[slice].exact.push([query as u32, key as u32]);
        }
        for (n, (edge, &log_weight)) in edges.iter().zip(edge_log_weight).enumerate() {
            let slice = within("edges", 3 * n, edge[0], slices)?;
            let query = within("edges", 3 * n + 1, edge[1], shape.seq_q)? as u32;
            let key = within("edges", 3 * n + 2, edge[2], shape.seq_kv)? as u32;
            heads[slice].edges.push(Edge { query, key, log_weight });
        }
        heads.iter_mut().try_for_each(HeadPlan::settle)?;
        Ok(Self { seq_q: shape.seq_q, seq_kv: shape.seq_kv, heads })
    }

    /// The plan as it is stored.
    pub fn to_tensors(&self) -> PlanTensors {
        let mut tensors = PlanTensors::default();
        for (slice, head) in self.heads.iter().enumerate() {
            let slice = slice as i64;
            tensors.label_q.extend(head.label_q.iter().map(|&label| i64::from(label)));
            tensors.label_k.extend(head.label_k.iter().map(|&label| i64::from(label)));
            tensors.exact_blocks.extend(head.exact.iter().map(|&[a, c]| [slice, a.into(), c.into()]));
            tensors.edges.extend(head.edges.iter().map(|edge| [slice, edge.query.into(), edge.key.into()]));
            tensors.edge_log_weight.extend(head.edges.iter().map(|edge| edge.log_weight));
        }
        tensors
    }

    /// The plan of all heads of a call of `shape`.
    pub(crate) fn of_heads(shape: &Shape, heads: Vec<HeadPlan>) -> Self {
        Self { seq_q: shape.seq_q, seq_kv: shape.seq_kv, heads }
    }

    /// Number of (batch, head) problems planned for.
    pub fn slices(&self) -> usize {
        self.heads.len()
    }

    /// Clusters of queries and of keys of one slice.
    ///
    /// # Panics
    /// If `slice` is not below [`ClusterPlan::slices`].
    pub fn clusters(&self, slice: usize) -> [usize; 2] {
        self.heads[slice].clusters()
    }

    /// Sampled edges of all slices together.
    pub fn edges(&self) -> usize {
        self.heads.iter().map(|head| head.edges.len()).sum()
    }

    /// The plan of one slice.
    pub(crate) fn head(&self, slice: usize) -> &HeadPlan {
        &self.heads[slice]
    }

    /// Whether the plan is for calls of `shape`.
    pub(crate) fn check(&self, op: &'static str, shape: &Shape, takes_edges: bool) -> Result<()> {
        if (self.heads.len(), self.seq_q, self.seq_kv) != (shape.slices(), shape.seq_q, shape.seq_kv) {
            return Err(Error::Shape {
                op,
                left: "plan [batch * heads, seq_q, seq_kv]",
                left_shape: vec![self.heads.len(), self.seq_q, self.seq_kv],
                right: "the call",
                right_shape: vec![shape.slices(), shape.seq_q, shape.seq_kv],
                remedy: "plan for the sizes of the call",
            });
        }
        self.check_edges(op, takes_edges)
    }

    /// Whether every cluster of keys lies within one segment, as causal calls of `m`, whose queries choose for themselves, need it.
    pub(crate) fn check_segments(&self, op: &'static str, m: &Ssa) -> Result<()> {
        let segments = Segments::new(m, true, self.seq_q, self.seq_kv);
        for head in &self.heads {
            let mut of_cluster = vec![None; head.clusters()[1]];
            for (j, &label) in head.label_k.iter().enumerate().filter(|(_, label)| **label != NONE) {
                let own = segments.of_key(j);
                if of_cluster.get_mut(label as usize).is_none_or(|of| *of.get_or_insert(own) != own) {
                    let problem =
                        "has a cluster of several segments of a causal call, or a key that was cut off from all";
                    return Err(Error::Tensor { op, tensor: "label_k", problem });
                }
            }
        }
        Ok(())
    }

    /// Whether there are no sampled edges where a call takes none.
    fn check_edges(&self, op: &'static str, takes_edges: bool) -> Result<()> {
        if !takes_edges && self.edges() > 0 {
            let problem =
                "has sampled edges although estimator = centroid stands for all of them; plan without samples";
            return Err(Error::Tensor { op, tensor: "edges", problem });
        }
        Ok(())
    }
}

impl HeadPlan {
    /// Sorts blocks and edges, and refuses pairs that are given twice.
    fn settle(&mut self) -> Result<()> {
        const OP: &str = "plan";
        self.exact.sort_unstable();
        self.exact.dedup();
        self.edges.sort_unstable_by_key(|edge| (edge.query, edge.key));
        let same = |pair: &[Edge]| (pair[0].query, pair[0].key) == (pair[1].query, pair[1].key);
        if self.edges.windows(2).any(same) {
            return Err(Error::Tensor { op: OP, tensor: "edges", problem: "names an edge twice; add up the weights" });
        }
        if self.edges.iter().any(|edge| self.is_exact(edge)) {
            let problem = "names an edge that is evaluated exactly; leave it out";
            return Err(Error::Tensor { op: OP, tensor: "edges", problem });
        }
        Ok(())
    }

    /// Whether the pair of an edge is evaluated exactly.
    fn is_exact(&self, edge: &Edge) -> bool {
        let [a, c] = [self.label_q[edge.query as usize], self.label_k[edge.key as usize]];
        a == NONE || c == NONE || self.exact.binary_search(&[a as u32, c as u32]).is_ok()
    }
}

/// Number of clusters that `labels` speak of.
pub(crate) fn clusters(labels: &[i32]) -> usize {
    labels.iter().max().map_or(0, |&label| (label + 1).max(0) as usize)
}

/// The constant of an edge, as its base-2 logarithm.
pub(crate) fn log2_weight(log_weight: f64) -> f32 {
    (log_weight * std::f64::consts::LOG2_E) as f32
}

fn labels(tensor: &'static str, all: &[i64], slice: usize, seq: usize) -> Result<Vec<i32>> {
    let label = |(n, &label): (usize, &i64)| match label {
        -1 => Ok(NONE),
        -2 => Ok(STRAY),
        _ => within(tensor, slice * seq + n, label, seq).map(|label| label as i32),
    };
    all[slice * seq..][..seq].iter().enumerate().map(label).collect()
}

/// Refuses strays among the `labels` of one side where the `other` side of the token has a cluster to join.
fn strays(tensor: &'static str, slice: usize, labels: &[i32], other: &[i32]) -> Result<()> {
    let alone = |n: usize| labels.len() == other.len() && other[n] < 0;
    match (0..labels.len()).find(|&n| labels[n] == STRAY && !alone(n)) {
        Some(n) => within(tensor, slice * labels.len() + n, STRAY.into(), labels.len()).map(|_| ()),
        None => Ok(()),
    }
}

/// `value` as an index below `limit`.
fn within(tensor: &'static str, index: usize, value: i64, limit: usize) -> Result<usize> {
    match usize::try_from(value) {
        Ok(value) if value < limit => Ok(value),
        _ => Err(Error::Index { tensor, index, value, limit }),
    }
}

fn length(tensor: &'static str, got: usize, expected: usize, remedy: &'static str) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { op: "plan", tensor, got, expected, remedy }) }
}
