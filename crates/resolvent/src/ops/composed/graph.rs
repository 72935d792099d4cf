//! The pairs of a dense or clustered structure.

use burn::tensor::{Bool, Tensor, TensorData};

use super::{Call, absent, clustered::Clusters, score::Affinity};
use crate::{Shape, mechanism::Dense};

/// What every query sees, `[batch, heads, seq_q, seq_kv]`.
pub(super) struct Pairs {
    /// Whether values are logarithms of affinities.
    pub log: bool,
    /// Values, finite also where a pair does not exist.
    pub values: Tensor<4>,
    /// Factors on the values of a linear score, `[batch, heads, 1, 1]`.
    pub units: Vec<Tensor<4>>,
    /// Pairs that do not exist, `[batch, heads or 1, seq_q, seq_kv]`.
    pub blocked: Option<Tensor<4, Bool>>,
    /// How many keys each query sees, `[batch, heads or 1, seq_q, 1]`.
    pub seen: Tensor<4>,
}

impl Pairs {
    /// Every pair of the window.
    pub fn dense(call: &Call, affinity: &Affinity<'_>, structure: &Dense) -> Self {
        let far = structure.window.map(|window| outside(call, window, structure.sinks));
        let blocked = match (call.blocked(), far) {
            (Some(blocked), Some(far)) => {
                let shape = blocked.shape();
                Some(blocked.bool_or(far.expand(shape)))
            }
            (blocked, far) => blocked.or(far),
        };
        let seen = seen(call, &blocked);
        let values = affinity.values(affinity.terms(&call.q, &call.k), &seen);
        Self { log: affinity.is_log(), values, units: affinity.units(), blocked, seen }
    }

    /// Exact pairs and sampled edges, and the mean of a cluster in place of each of its keys.
    pub fn clustered(call: &Call, affinity: &Affinity<'_>, clusters: &Clusters) -> Self {
        let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
        let full = |mask: Tensor<4, Bool>| mask.expand([batch, heads, seq_q, seq_kv]);
        let absent = clusters.absent.clone();
        let blocked = Some(call.absent().map_or(absent.clone(), |without| absent.bool_or(full(without))));
        let seen = seen(call, &blocked);
        let terms = affinity.terms(&call.q, &call.k);
        let of_means = clusters.means.as_ref().map(|means| {
            let terms = if affinity.is_linear_in_keys() {
                means.mean(terms.clone())
            } else {
                affinity.own_terms(&call.q, means.means(&call.k))
            };
            means.spread(affinity.values(terms, &seen))
        });
        let near = affinity.values(terms, &seen);
        let log = affinity.is_log();
        let near = if log { near + clusters.log_weight.clone() } else { near * clusters.log_weight.clone().exp() };
        let values = match (&clusters.means, of_means) {
            (Some(means), Some(values)) => near.mask_where(means.is_far(), values),
            _ => near,
        };
        Self { log, values, units: affinity.units(), blocked, seen }
    }

    /// Affinities of a linear score over its units, 0 where there is no pair.
    pub fn present(&self) -> Tensor<4> {
        absent(self.values.clone(), &self.blocked)
    }
}

/// How many keys each query sees.
fn seen(call: &Call, blocked: &Option<Tensor<4, Bool>>) -> Tensor<4> {
    let Shape { batch, seq_q, seq_kv, .. } = call.shape;
    let heads = blocked.as_ref().map_or(1, |blocked| blocked.dims()[1]);
    absent(Tensor::ones([batch, heads, seq_q, seq_kv], (&call.q.device(), call.q.dtype())), blocked).sum_dim(3)
}

/// The pairs that are neither in the window nor with a sink, `[1, 1, seq_q, seq_kv]`; the last query is where the last key is.
fn outside(call: &Call, window: usize, sinks: usize) -> Tensor<4, Bool> {
    let Shape { seq_q, seq_kv, .. } = call.shape;
    let pair = |i: usize, j: usize| (i + seq_kv).abs_diff(j + seq_q) >= window && j >= sinks;
    let pairs: Vec<bool> = (0..seq_q).flat_map(|i| (0..seq_kv).map(move |j| pair(i, j))).collect();
    Tensor::from_data(TensorData::new(pairs, [1, 1, seq_q, seq_kv]), &call.q.device())
}
