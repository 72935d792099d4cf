//! The plan of a clustered call.

use std::sync::Arc;

use burn::tensor::Tensor;
use resolvent_kernels::{self as kernels, ClusterPlan};

use super::{Inputs, Mask, fused::host_mask};
use crate::{Mechanism, Result, Shape};

/// The plan that the call brings, or one that is made for its queries and keys; `None` for mechanisms without clusters.
/// Made once, for forward and backward pass.
pub(super) fn clusters(
    inputs: &Inputs,
    mechanism: &Mechanism,
    mask: &Mask,
    shape: &Shape,
) -> Result<Option<Arc<ClusterPlan>>> {
    let (Mechanism::Ssa(_), Some(k), None) = (mechanism, &inputs.k, &inputs.extras.clusters) else {
        return Ok(inputs.extras.clusters.clone());
    };
    let host = |x: &Tensor<4>| x.to_data().iter::<f32>().collect::<Vec<_>>();
    let codebook = inputs.extras.codebook.as_deref();
    let (key, query) = (mask.key.as_ref().map(host_mask), mask.query.as_ref().map(host_mask));
    let mask = kernels::Mask { causal: mask.causal, key: key.as_deref(), query: query.as_deref() };
    Ok(Some(Arc::new(ClusterPlan::new(mechanism, shape, &host(&inputs.q), &host(k), codebook, &mask)?)))
}
