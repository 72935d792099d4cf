//! One weight per token, one pooled value per head: `uniform`, `linear-infsa`.

use burn::tensor::Tensor;

use super::{
    Call, absent,
    affinity::{Scaled, activate},
    root,
};
use crate::{
    Shape,
    mechanism::{LinearInfsa, PowerOperator},
};

/// The mean of the allowed values.
pub(super) fn uniform(call: &Call) -> Tensor<4> {
    let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
    let ones = Tensor::ones([batch, 1, seq_q, seq_kv], (&call.v.device(), call.v.dtype()));
    let allowed = absent(ones, &call.blocked());
    let counts = allowed.clone().sum_dim(3).clamp_min(1.0);
    (allowed / counts).expand([batch, heads, seq_q, seq_kv]).matmul(call.v.clone())
}

/// "Infinite Self-Attention", eq. 16 to 21.
pub(super) fn linear_infsa(call: &Call, m: &LinearInfsa, gamma: Tensor<4>) -> Tensor<4> {
    let Shape { batch, heads, seq_q, value_dim, .. } = call.shape;
    let pooled = weights(call, m).matmul(call.v.clone()) * gamma;
    if !m.broadcast {
        return pooled;
    }
    absent(pooled.expand([batch, heads, seq_q, value_dim]), &call.no_query)
}

/// The token weights `a`, `[batch, heads, 1, seq_kv]`.
pub(super) fn weights(call: &Call, m: &LinearInfsa) -> Tensor<4> {
    let scaled = Scaled::new(call, m.activation, m.scale, m.eps);
    let bias = m.norm_bias.value(call.shape.head_dim);
    let q_norms = norms(&scaled.q);
    let start = q_norms.clone().swap_dims(2, 3);
    let alpha_eps = scaled.q_unit.clone().recip() * m.eps;
    let mut weights = share(start, alpha_eps);
    // The rank-one term |q_i| |k_j| is one more channel of the vectors.
    let (q, k) = match bias {
        0.0 => (scaled.q.clone(), scaled.k.clone()),
        _ => {
            let extend = |x: &Tensor<4>, norms| Tensor::cat(vec![x.clone(), norms], 3);
            (extend(&scaled.q, q_norms * bias), extend(&scaled.k, norms(&scaled.k)))
        }
    };
    let k = k.swap_dims(2, 3);
    let step: Box<dyn Fn(Tensor<4>) -> Tensor<4>> = match m.operator {
        PowerOperator::Factored => {
            Box::new(|u| activate(scaled.logits(u.matmul(q.clone()).matmul(k.clone())), m.activation))
        }
        PowerOperator::Exact => {
            let affinity = activate(scaled.logits(q.matmul(k)), m.activation);
            Box::new(move |u| u.matmul(affinity.clone()))
        }
    };
    let no_query = call.no_query.clone().map(|mask| mask.swap_dims(2, 3));
    for _ in 0..m.iterations {
        weights = share(step(weights), scaled.eps.clone());
        if m.iterations > 1 {
            weights = absent(weights, &no_query);
        }
    }
    weights
}

/// `x / (sum |x| + eps)` over the last axis; zero where all is zero.
fn share(x: Tensor<4>, eps: Tensor<4>) -> Tensor<4> {
    let sums = x.clone().abs().sum_dim(3) + eps;
    let zero = sums.clone().equal_elem(0.0);
    x / sums.mask_fill(zero, 1.0)
}

/// Euclidean norms over the last axis, with derivative 0 at 0.
fn norms(x: &Tensor<4>) -> Tensor<4> {
    root(x.clone().square().sum_dim(3))
}
