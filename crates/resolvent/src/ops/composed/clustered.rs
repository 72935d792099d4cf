//! The plan of a clustered call as tensors.

use burn::tensor::{Bool, FloatDType, Tensor, TensorData};
use resolvent_kernels::ClusterPlan;

use super::{Call, Mask};
use crate::{
    Mechanism, Result, Shape,
    mechanism::{Clustered, Estimator},
    ops::fused::host_mask,
};

/// Which pairs there are, `[batch, heads, seq_q, seq_kv]`.
pub(super) struct Clusters {
    /// What is added to the logarithm of the affinity of a sampled edge; 0 elsewhere.
    pub log_weight: Tensor<4>,
    /// Neither pair of single tokens nor of a query and a mean.
    pub absent: Tensor<4, Bool>,
    /// Means of clusters, where there are any.
    pub means: Option<Means>,
}

/// What every query sees of clusters that it sees no single token of.
pub(super) struct Means {
    /// 1 where the query sees the key in the mean of its cluster, `[batch, heads, seq_q, seq_kv]`.
    far: Tensor<4>,
    /// 1 where the key is in the cluster, `[batch, heads, seq_kv, clusters]`.
    member: Tensor<4>,
    /// How many keys each mean is of, at least 1, `[batch, heads, seq_q, clusters]`.
    count: Tensor<4>,
}

impl Clusters {
    pub fn of(
        call: &Call,
        structure: &Clustered,
        plan: &ClusterPlan,
        mechanism: &Mechanism,
        mask: &Mask,
    ) -> Result<Self> {
        let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
        let (key, query) = (mask.key.as_ref().map(host_mask), mask.query.as_ref().map(host_mask));
        let host = resolvent_kernels::Mask { causal: call.causal, key: key.as_deref(), query: query.as_deref() };
        let all = plan.matrices(mechanism, &call.shape, &host)?;
        let tensor = |data: Vec<f32>, rows: usize, cols: usize| {
            let data = TensorData::new(data, [batch, heads, rows, cols]);
            Tensor::<4>::from_data(data, &call.q.device()).cast(FloatDType::from(call.q.dtype()))
        };
        let log_weight = tensor(all.log_weight, seq_q, seq_kv);
        let no_single = log_weight.clone().equal_elem(f32::NEG_INFINITY);
        let log_weight = log_weight.mask_fill(no_single.clone(), 0.0);
        let centroid = structure.ssa(None, false).estimator == Estimator::Centroid;
        let means = centroid.then(|| Means {
            far: tensor(all.far, seq_q, seq_kv),
            member: tensor(all.member, seq_kv, all.clusters),
            count: tensor(all.count, seq_q, all.clusters).clamp_min(1.0),
        });
        let absent = match &means {
            Some(means) => no_single.bool_and(means.is_far().bool_not()),
            None => no_single,
        };
        Ok(Self { log_weight, absent, means })
    }
}

impl Means {
    pub fn is_far(&self) -> Tensor<4, Bool> {
        self.far.clone().greater_elem(0.5)
    }

    /// Means over clusters of what every query and key have, `[.., seq_q, clusters]`.
    pub fn mean(&self, x: Tensor<4>) -> Tensor<4> {
        (x * self.far.clone()).matmul(self.member.clone()) / self.count.clone()
    }

    /// The mean keys that every query sees, `[.., seq_q, clusters, dim]`.
    pub fn means(&self, k: &Tensor<4>) -> Tensor<5> {
        let [batch, heads, seq_q, clusters] = self.count.dims();
        let [.., seq_kv, dim] = k.dims();
        // Every key in the columns of its cluster.
        let apart = self.member.clone().unsqueeze_dim::<5>(4) * k.clone().unsqueeze_dim::<5>(3);
        let sums = self.far.clone().matmul(apart.reshape([batch, heads, seq_kv, clusters * dim]));
        sums.reshape([batch, heads, seq_q, clusters, dim]) / self.count.clone().unsqueeze_dim::<5>(4)
    }

    /// What clusters have, at their keys, `[.., seq_q, seq_kv]`.
    pub fn spread(&self, x: Tensor<4>) -> Tensor<4> {
        x.matmul(self.member.clone().swap_dims(2, 3))
    }
}
