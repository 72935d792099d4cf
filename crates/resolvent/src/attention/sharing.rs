//! Fitting what is projected to what the operator takes: keys and values for every head of queries, and as many rows as a plan is
//! made for.

use burn::tensor::{Bool, Tensor};

use super::MultiHeadAttention;
use crate::{
    Mask,
    ops::{Projected, repeat_heads},
};

impl MultiHeadAttention {
    /// Channels of one head.
    pub(super) fn head_dim(&self) -> usize {
        let [d_model, _] = self.output.weight.dims();
        d_model / self.n_heads
    }

    /// Channels of all keys of a token.
    pub(super) fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim()
    }

    /// `x [batch, seq, kv_heads * head_dim]` with every head as often as heads of queries share it: `[batch, seq, d_model]`.
    pub(super) fn shared(&self, x: Tensor<3>) -> Tensor<3> {
        match self.n_heads / self.kv_heads {
            1 => x,
            sharing => repeat_heads(x, self.kv_heads, sharing),
        }
    }

    /// Projections side by side, with as many heads of keys and values as the module has.
    pub(super) fn projected(&self, packed: Tensor<3>) -> Projected {
        Projected { packed, heads: self.n_heads, kv_heads: self.kv_heads }
    }

    /// Projections side by side, those of keys and values as wide as that of the queries.
    pub(super) fn shared_packed(&self, packed: Tensor<3>) -> Projected {
        let packed = self.projected(packed).repeated(&self.mechanism);
        Projected { packed, heads: self.n_heads, kv_heads: self.n_heads }
    }
}

/// `x [batch, seq, width]` followed by zeros: `[batch, rows, width]`. In a causal call nothing before them changes.
pub(super) fn lengthened(x: Tensor<3>, rows: usize) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    if seq == rows {
        return x;
    }
    let zeros = Tensor::zeros([batch, rows - seq, width], &x.device());
    Tensor::cat(vec![x, zeros], 1)
}

/// The mask of [`lengthened`] tokens.
pub(super) fn lengthened_mask(mask: &Mask, rows: usize) -> Mask {
    let longer = |keep: &Tensor<2, Bool>| {
        let [batch, seq] = keep.dims();
        if seq == rows {
            return keep.clone();
        }
        let new = Tensor::<2, Bool>::full([batch, rows - seq], true, &keep.device());
        Tensor::cat(vec![keep.clone(), new], 1)
    };
    let longer = |keep: &Option<Tensor<2, Bool>>| keep.as_ref().map(longer);
    Mask { causal: mask.causal, key: longer(&mask.key), query: longer(&mask.query) }
}
