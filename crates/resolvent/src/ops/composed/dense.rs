//! Mechanisms that hold every pair: `softmax`, `uniform`, `infsa`.

use burn::tensor::{Bool, FloatDType, Tensor};

use super::{
    Call, absent,
    affinity::{Scaled, activate},
    magnitude, root,
};
use crate::{Shape, mechanism};

/// Softmax attention and the log-sum-exp of its rows, `[batch, heads, seq_q]`.
pub(super) fn softmax(call: &Call, m: &mechanism::Softmax) -> (Tensor<4>, Tensor<3>) {
    let Shape { batch, heads, seq_q, .. } = call.shape;
    let blocked = call.blocked();
    let logits = (call.q.clone() * call.scale(m.scale)).matmul(call.k.clone().swap_dims(2, 3));
    let highest = fill(logits.clone().detach(), &blocked, f32::MIN).max_dim(3);
    let powers = absent((fill(logits, &blocked, f32::MIN) - highest.clone()).exp(), &blocked);
    let sums = powers.clone().sum_dim(3);
    let empty = sums.clone().equal_elem(0.0);
    let lse = (highest + sums.clone().detach().log()).mask_fill(empty.clone(), f32::NEG_INFINITY);
    let out = call.thinned(powers).matmul(call.v.clone()) / sums.mask_fill(empty, 1.0);
    (out, lse.cast(FloatDType::F32).reshape([batch, heads, seq_q]))
}

/// The mean of the allowed values.
pub(super) fn uniform(call: &Call) -> Tensor<4> {
    let Shape { batch, heads, seq_q, seq_kv, .. } = call.shape;
    let ones = Tensor::ones([batch, 1, seq_q, seq_kv], (&call.v.device(), call.v.dtype()));
    let allowed = absent(ones, &call.blocked());
    let counts = allowed.clone().sum_dim(3).clamp_min(1.0);
    (allowed / counts).expand([batch, heads, seq_q, seq_kv]).matmul(call.v.clone())
}

/// Activated affinities over their Frobenius norm. "Infinite Self-Attention", eq. 11 and 12.
pub(super) fn infsa(call: &Call, m: &mechanism::Infsa, gamma: Tensor<4>) -> Tensor<4> {
    operator(call, m).matmul(call.v.clone()) * gamma
}

/// `A / (|A|_F + eps)`; causal: row `i` is divided by the norm of the leading block of `i + 1` rows.
pub(super) fn operator(call: &Call, m: &mechanism::Infsa) -> Tensor<4> {
    let scaled = Scaled::new(call, m.activation, m.scale, m.eps);
    let logits = scaled.logits(scaled.q.clone().matmul(scaled.k.clone().swap_dims(2, 3)));
    let affinity = absent(activate(logits, m.activation), &call.future());
    // Without homogeneity the affinities can still be large: divided once more, their squares cannot overflow.
    let (affinity, eps) = match scaled.factor {
        Some(_) => {
            let unit = magnitude(&affinity);
            (affinity / unit.clone(), scaled.eps / unit)
        }
        None => (affinity, scaled.eps),
    };
    let energy = affinity.clone().square().sum_dim(3);
    let energy = if call.causal { energy.cumsum(2) } else { energy.sum_dim(2) };
    let norm = root(energy) + eps;
    // A zero norm with eps = 0 belongs to affinities that are all zero.
    let zero = norm.clone().equal_elem(0.0);
    affinity / norm.mask_fill(zero, 1.0)
}

/// `x` with `value` in place of the masked elements.
pub(super) fn fill(x: Tensor<4>, mask: &Option<Tensor<4, Bool>>, value: f32) -> Tensor<4> {
    match mask {
        Some(mask) => {
            let shape = x.shape();
            x.mask_fill(mask.clone().expand(shape), value)
        }
        None => x,
    }
}
