//! Softmax along the clusters of a plan: `ssa`.

use burn::tensor::{FloatDType, Tensor, TensorData};
use resolvent_kernels::{ClusterPlan, PlanMatrices};

use super::{Call, Mask};
use crate::{Mechanism, Result, Shape, mechanism, ops::fused::host_mask};

/// The plan as tensors, in the storage type of the arithmetic.
struct Matrices {
    log_weight: Tensor<4>,
    far: Tensor<4>,
    member: Tensor<4>,
    count: Tensor<4>,
}

impl Matrices {
    fn new(call: &Call, all: PlanMatrices) -> Self {
        let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
        let tensor = |data: Vec<f32>, rows: usize, cols: usize| {
            let data = TensorData::new(data, [batch, heads, rows, cols]);
            Tensor::<4>::from_data(data, &call.q.device()).cast(FloatDType::from(call.q.dtype()))
        };
        Self {
            log_weight: tensor(all.log_weight, seq_q, seq_kv),
            far: tensor(all.far, seq_q, seq_kv),
            member: tensor(all.member, seq_kv, all.clusters),
            count: tensor(all.count, seq_q, all.clusters),
        }
    }
}

/// Attention along `plan`, and the log-sum-exp of its rows, `[batch, heads, seq_q]`.
pub(super) fn ssa(call: &Call, m: &mechanism::Ssa, plan: &ClusterPlan, mask: &Mask) -> Result<(Tensor<4>, Tensor<3>)> {
    let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
    let (key, query) = (mask.key.as_ref().map(host_mask), mask.query.as_ref().map(host_mask));
    let host = resolvent_kernels::Mask { causal: call.causal, key: key.as_deref(), query: query.as_deref() };
    let Matrices { log_weight, far, member, count } =
        Matrices::new(call, plan.matrices(&Mechanism::Ssa(m.clone()), &call.shape, &host)?);
    let scores = (call.q.clone() * call.scale(m.scale)).matmul(call.k.clone().swap_dims(2, 3));
    let numbers = count.clone().clamp_min(1.0);
    let means = (scores.clone() * far.clone()).matmul(member.clone()) / numbers.clone() + numbers.clone().log();
    let absent = Tensor::cat(vec![log_weight.clone().equal_elem(f32::NEG_INFINITY), count.equal_elem(0.0)], 3);
    let near = scores + log_weight.mask_fill(absent.clone().narrow(3, 0, seq_kv), 0.0);
    let logits = Tensor::cat(vec![near, means], 3).mask_fill(absent.clone(), f32::MIN);
    let highest = logits.clone().detach().max_dim(3);
    let powers = (logits - highest.clone()).exp().mask_fill(absent, 0.0);
    let sums = powers.clone().sum_dim(3);
    let empty = sums.clone().equal_elem(0.0);
    let lse = (highest + sums.clone().detach().log()).mask_fill(empty.clone(), f32::NEG_INFINITY);
    let near = powers.clone().narrow(3, 0, seq_kv);
    let shares = powers.slice_dim(3, seq_kv..) / numbers;
    let weights = near + shares.matmul(member.swap_dims(2, 3)) * far;
    let out = weights.matmul(call.v.clone()) / sums.mask_fill(empty, 1.0);
    Ok((out, lse.cast(FloatDType::F32).reshape([batch, heads, seq_q])))
}
