//! The plan of a clustered call.

use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;
use resolvent_kernels::{self as kernels, ClusterPlan};

use super::{Inputs, Mask, fused::host_mask};
use crate::{Mechanism, Result, Shape};

/// A place for a plan that several calls use, layers of a model for instance: the first of them makes it. The calls must have
/// the same sizes and masks; others are refused.
#[derive(Debug, Clone, Default)]
pub struct SharedClusters(Arc<OnceLock<Arc<ClusterPlan>>>);

impl SharedClusters {
    /// The plan, if it has been made.
    pub fn plan(&self) -> Option<&Arc<ClusterPlan>> {
        self.0.get()
    }
}

/// [`clusters`] of a call with these inputs.
pub(crate) fn plan_of_call(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask) -> Result<Option<Arc<ClusterPlan>>> {
    let [batch, heads, seq_q, head_dim] = inputs.q.dims();
    let [_, _, seq_kv, value_dim] = inputs.v.dims();
    clusters(inputs, mechanism, mask, &Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim })
}

/// The plan that the call brings, or one that is made for its queries and keys; `None` for mechanisms without clusters.
/// Made once, for forward and backward pass.
pub(super) fn clusters(
    inputs: &Inputs,
    mechanism: &Mechanism,
    mask: &Mask,
    shape: &Shape,
) -> Result<Option<Arc<ClusterPlan>>> {
    if mechanism.clustering().is_none() || inputs.extras.clusters.is_some() {
        return Ok(inputs.extras.clusters.clone());
    }
    let k = inputs.k.as_ref().unwrap_or(&inputs.q);
    if let Some(made) = inputs.extras.shared_clusters.as_ref().and_then(SharedClusters::plan) {
        return Ok(Some(made.clone()));
    }
    let host = |x: &Tensor<4>| x.to_data().iter::<f32>().collect::<Vec<_>>();
    let codebook = inputs.extras.codebook.as_deref();
    let (key, query) = (mask.key.as_ref().map(host_mask), mask.query.as_ref().map(host_mask));
    let mask = kernels::Mask { causal: mask.causal, key: key.as_deref(), query: query.as_deref() };
    let (q, k, kv_heads) = (host(&inputs.q), host(k), inputs.kv_heads());
    let plan = Arc::new(ClusterPlan::with_kv_heads(mechanism, shape, kv_heads, &q, &k, codebook, &mask)?);
    let shared = inputs.extras.shared_clusters.as_ref();
    Ok(Some(shared.map_or(plan.clone(), |shared| shared.0.get_or_init(|| plan).clone())))
}
