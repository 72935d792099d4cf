//! Affinities centred, divided by deviations, scaled and shifted. "LaplacianFormer: Rethinking Linear Attention with Laplacian
//! Kernel", eq. 4 to 6.

use burn::tensor::{Bool, Tensor};
use resolvent_kernels::{Error, Result};

use super::{Call, absent};
use crate::{
    Shape,
    mechanism::{Centering, WeightScale, Whitened, Whitening},
};

/// From affinities `g [batch, heads, seq_q, seq_kv]` to weights.
pub(super) fn weights(
    call: &Call,
    m: &Whitened,
    mechanism: &'static str,
    g: Tensor<4>,
    blocked: &Option<Tensor<4, Bool>>,
) -> Result<Tensor<4>> {
    if m.whitening == Whitening::Full {
        let why = "its eigenvalues are taken on the CPU; move the tensors to Device::flex()";
        return Err(Error::Unsupported { mechanism, what: "whitening full with Strategy::Composed", why });
    }
    let Shape { batch, seq_q, seq_kv, .. } = call.shape;
    let seen = |x: Tensor<4>| absent(x, blocked);
    let ones = Tensor::ones([batch, 1, seq_q, seq_kv], (&g.device(), g.dtype()));
    let allowed = seen(ones);
    let n = allowed.clone().sum_dim(3).clamp_min(1.0);
    let queries = allowed.clone().sum_dim(2).clamp_min(1.0);
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
    Ok(seen(z))
}
