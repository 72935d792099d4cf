//! The whitened Laplacian kernel through landmarks, or whole: `laplacian`, `laplacian-exact`.

use burn::tensor::Tensor;
use resolvent_kernels::{Error, Parameter, Result};

use super::{
    Call, absent,
    landmarks::{Marks, Method, Producer, identity},
};
use crate::{
    Shape,
    mechanism::{Centering, Inverse, InverseGradient, Laplacian, LaplacianExact, WeightScale, Whitening},
    ops::Extras,
};

/// `exp(-|x_i - y_j|_1 / lambda)`.
fn kernel(x: &Tensor<4>, y: &Tensor<4>, lambda: Tensor<4>) -> Tensor<4> {
    let difference = x.clone().unsqueeze_dim::<5>(3) - y.clone().unsqueeze_dim::<5>(2);
    (difference.abs().sum_dim(4).squeeze_dim::<4>(4) / lambda).neg().exp()
}

fn bandwidth(call: &Call, configured: f64, extras: &Extras) -> Tensor<4> {
    match extras.get(Parameter::Lambda) {
        Some(lambda) => lambda.clone().reshape([1, call.shape.heads, 1, 1]),
        None => Tensor::full([1, 1, 1, 1], configured, (&call.q.device(), call.q.dtype())),
    }
}

/// `laplacian-exact`.
pub(super) fn exact(call: &Call, m: &LaplacianExact, extras: &Extras) -> Result<Tensor<4>> {
    let g = kernel(&call.q, &call.k, bandwidth(call, m.lambda, extras));
    weigh(call, m, "laplacian-exact", g)
}

/// `laplacian`.
pub(super) fn laplacian(call: &Call, m: &Laplacian, extras: &Extras) -> Result<Tensor<4>> {
    let lambda = bandwidth(call, m.lambda, extras);
    let producer = Producer { landmarks: m.landmarks, grid: m.grid, full: false, extras, keep: call.keep_key() };
    let Marks { u, live } = producer.make(&call.k, "laplacian")?;
    let across = live.clone().swap_dims(2, 3);
    let cq = kernel(&call.q, &u, lambda.clone()) * across.clone();
    let ck = kernel(&call.k, &u, lambda.clone()) * across.clone();
    let w = kernel(&u, &u, lambda) * (live.clone() * across);
    // A landmark without tokens is the identity's.
    let w = w.clone() + identity(&w) * (live.neg() + 1.0);
    let gradient = match m.inverse {
        Inverse::NewtonSchulz => InverseGradient::Unrolled,
        _ => InverseGradient::Implicit,
    };
    let (inverse, steps, ridge) = (m.inverse, m.newton_iterations, m.ridge);
    let x = Method { mechanism: "laplacian", inverse, steps, init: None, ridge, gradient }.invert(w)?;
    let g = cq.matmul(x).matmul(ck.swap_dims(2, 3));
    weigh(call, &m.exact(), "laplacian", g)
}

/// From similarities `g [batch, heads, seq_q, seq_kv]` to the output.
fn weigh(call: &Call, m: &LaplacianExact, mechanism: &'static str, g: Tensor<4>) -> Result<Tensor<4>> {
    if m.whitening == Whitening::Full {
        let why = "its eigenvalues are taken on the CPU; move the tensors to Device::flex()";
        return Err(Error::Unsupported { mechanism, what: "whitening full with Strategy::Composed", why });
    }
    let Shape { batch, seq_q, seq_kv, .. } = call.shape;
    let blocked = call.blocked();
    let seen = |x: Tensor<4>| absent(x, &blocked);
    let ones = Tensor::ones([batch, 1, seq_q, seq_kv], (&g.device(), g.dtype()));
    let allowed = seen(ones);
    let n = allowed.clone().sum_dim(3).clamp_min(1.0);
    let queries = absent(Tensor::ones([batch, 1, seq_q, 1], (&g.device(), g.dtype())), &call.no_query);
    let queries = queries.sum_dim(2).clamp_min(1.0);
    let g = seen(g);
    let by_key = seen(g.clone() - g.clone().sum_dim(2) / queries.clone());
    let centred = match m.centering {
        Centering::PerKey => by_key.clone(),
        Centering::PerQuery => seen(g.clone() - g.sum_dim(3) / n.clone()),
        Centering::None => g,
    };
    let white = match m.whitening {
        Whitening::Diagonal => centred / (by_key.square().sum_dim(2) / queries + m.whiten_eps).sqrt(),
        _ => centred,
    };
    let white = match m.weight_scale {
        WeightScale::Unit => white,
        WeightScale::InvSqrtN => white / n.clone().sqrt(),
        WeightScale::InvN => white / n.clone(),
    };
    let z = if m.bias_one_over_n { white + allowed / n } else { white };
    Ok(seen(z).matmul(call.v.clone()))
}
