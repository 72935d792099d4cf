//! The Gaussian kernel through landmarks, or whole: `soft`, `soft-pp`.

use burn::tensor::{
    Tensor,
    module::{conv1d, conv2d},
    ops::ConvOptions,
};
use resolvent_kernels::{Parameter, Result};

use super::{
    Call,
    landmarks::{Marks, Method, Producer, activate, identity},
};
use crate::{
    Shape,
    mechanism::{Degree, Landmarks, Soft},
    ops::Extras,
};

/// `exp(-scale |x_i - y_j|^2)`.
fn gaussian(x: &Tensor<4>, y: &Tensor<4>, scale: Tensor<4>) -> Tensor<4> {
    let difference = x.clone().unsqueeze_dim::<5>(3) - y.clone().unsqueeze_dim::<5>(2);
    (difference.square().sum_dim(4).squeeze_dim::<4>(4) * scale).neg().exp()
}

/// `out`, `[batch, heads, seq, value_dim]`.
pub(super) fn soft(call: &Call, m: &Soft, mechanism: &'static str, extras: &Extras) -> Result<Tensor<4>> {
    let Shape { heads, head_dim, .. } = call.shape;
    let q = call.of_keys(call.q.clone());
    let scale = match extras.like(Parameter::Scale, &q) {
        Some(scale) => scale.reshape([1, heads, 1, 1]),
        None => Tensor::full([1, 1, 1, 1], m.scale_for(head_dim), (&q.device(), q.dtype())),
    };
    let out = if m.landmarks == Landmarks::All {
        whole(call, m, &q, scale)
    } else {
        through(call, m, mechanism, extras, &q, scale)?
    };
    let out = match extras.like(Parameter::ValueWeight, &call.v) {
        Some(weight) => out + filtered(call, &call.v, (m.value_conv, m.grid), &weight),
        None => out,
    };
    Ok(call.of_keys(out))
}

fn whole(call: &Call, m: &Soft, q: &Tensor<4>, scale: Tensor<4>) -> Tensor<4> {
    let kernel = gaussian(q, q, scale);
    let kernel = super::absent(call.of_keys(kernel), &call.no_key);
    if m.degree.is_none() {
        return kernel.matmul(call.v.clone());
    }
    let c = kernel.clone().sum_dim(3).clamp_min(f32::MIN_POSITIVE).sqrt().recip();
    kernel.matmul(call.v.clone() * c.clone()) * c
}

fn through(
    call: &Call,
    m: &Soft,
    mechanism: &'static str,
    extras: &Extras,
    q: &Tensor<4>,
    scale: Tensor<4>,
) -> Result<Tensor<4>> {
    let producer = Producer { landmarks: m.landmarks, grid: m.grid, full: true, extras, keep: call.keep_key() };
    let Marks { u, live } = producer.make(q);
    let u = if m.landmark_act { activate(u, extras) } else { u };
    let pairs = live.clone() * live.clone().swap_dims(2, 3);
    let a = gaussian(&u, &u, scale.clone()) * pairs;
    // A landmark without tokens is the identity's.
    let a = a.clone() + identity(&a) * (live.clone().neg() + 1.0);
    let p = super::absent(gaussian(&u, q, scale) * live, &call.no_key);
    let method = Method {
        mechanism,
        inverse: m.inverse,
        steps: m.newton_iterations,
        init: Some(m.newton_init),
        ridge: m.ridge,
        gradient: m.gradient,
    };
    let y = method.invert(a.clone())?;
    let c = match m.degree {
        None => None,
        Some(Degree::Landmark) => Some(a.sum_dim(3).sqrt().recip()),
        Some(Degree::Token) => Some(p.clone().sum_dim(3).clamp_min(1e-30).sqrt().recip()),
    };
    let scaled = |x: Tensor<4>| match &c {
        Some(c) => x * c.clone(),
        None => x,
    };
    let w = scaled(y.matmul(scaled(p.clone().matmul(call.v.clone()))));
    Ok(p.swap_dims(2, 3).matmul(w))
}

/// Every head's values `v` convolved with its one kernel of width `k`.
pub(super) fn filtered(
    call: &Call,
    v: &Tensor<4>,
    (k, grid): (usize, Option<[usize; 2]>),
    weight: &Tensor<1>,
) -> Tensor<4> {
    let Shape { batch, heads, seq_kv: seq, value_dim, .. } = call.shape;
    // Channels are independent: they join the batch.
    let v = call.of_keys(v.clone()).permute([0, 3, 1, 2]);
    let y = match grid {
        Some([height, width]) => {
            let v = v.reshape([batch * value_dim, heads, height, width]);
            let options = ConvOptions::new([1, 1], [k / 2, k / 2], [1, 1], heads);
            conv2d(v, weight.clone().reshape([heads, 1, k, k]), None, options).reshape([batch, value_dim, heads, seq])
        }
        None => {
            let v = v.reshape([batch * value_dim, heads, seq]);
            let options = ConvOptions::new([1], [k / 2], [1], heads);
            conv1d(v, weight.clone().reshape([heads, 1, k]), None, options).reshape([batch, value_dim, heads, seq])
        }
    };
    y.permute([0, 2, 3, 1])
}
