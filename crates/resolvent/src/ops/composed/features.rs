//! Maps of features: `phi(Q) phi(K)^T`, rows normalised.

use burn::tensor::Tensor;
use resolvent_kernels::inner;

use super::{Call, absent, hop::Hop, landmarks::constant};
use crate::{
    Shape,
    mechanism::{FeatureMap, Features},
};

/// One hop; `scale` is `[1, heads or 1, 1, 1]`.
pub(super) fn hop<'a>(call: &Call, m: &Features, scale: Tensor<4>) -> Hop<'a> {
    let root = scale.sqrt();
    let (q, k) = (call.q.clone() * root.clone(), call.k.clone() * root);
    let (q, k) = match m.map {
        FeatureMap::Elu => (elu(q), elu(k)),
        FeatureMap::Favor => favor(call, m, [q, k]),
    };
    let (q, k) = (absent(q, &call.no_query), call.of_keys(k).swap_dims(2, 3));
    if call.causal {
        let g = absent(q.matmul(k), &call.future());
        let sums = g.clone().sum_dim(3);
        return Hop::whole(g).divided(sums);
    }
    let sums = q.clone().matmul(k.clone().sum_dim(3));
    Hop::factors(q, k).divided(sums)
}

/// `elu(x) + 1`.
fn elu(x: Tensor<4>) -> Tensor<4> {
    x.clone().clamp_max(0.0).exp() + x.clamp_min(0.0)
}

/// `exp(w.x - |x|^2 / 2 - shift)` for every direction `w`. A query's shift is its largest exponent, a key's that of all keys: both
/// cancel in the sums of rows.
fn favor(call: &Call, m: &Features, [q, k]: [Tensor<4>; 2]) -> (Tensor<4>, Tensor<4>) {
    let Shape { head_dim, .. } = call.shape;
    let count = m.count(head_dim);
    let directions = inner::feature_directions(m.seed, count, head_dim).into_iter().map(|x| x as f32).collect();
    let directions = constant::<4>(directions, [1, 1, count, head_dim], &q).swap_dims(2, 3);
    let exponents = |x: Tensor<4>| {
        let [batch, heads, ..] = x.dims();
        let products = x.clone().matmul(directions.clone().expand([batch, heads, head_dim, count]));
        products - x.square().sum_dim(3) * 0.5
    };
    let (q, k) = (exponents(q), exponents(k));
    let own = q.clone().detach().max_dim(3);
    let no_key = call.no_key.clone().map(|gone| gone.swap_dims(2, 3));
    let most = super::fill(k.clone().detach(), &no_key, f32::MIN).max_dim(3).max_dim(2);
    // A key that does not exist may be larger, and is left out afterwards.
    let k = super::fill(k, &no_key, f32::MIN) - most;
    let size = (count as f64).powf(-0.5);
    ((q - own).exp() * size, k.exp() * size)
}
