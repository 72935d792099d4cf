//! `linear-infsa` on a sequence's own tokens, in the cheaper order: pool the tokens, then project the pooled row.
//!
//! Every token gets the same `h = gamma sum_j a_j v_j`, and `v_j = x_j W_V + b_V`, so that
//! `h = gamma ((sum_j a_j x_j) W_V + (sum_j a_j) b_V)`: the value and output projections act on one row per sequence
//! in place of one per token.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{HELD_TOKENS, MhaInput, MultiHeadAttention};
use crate::{
    Mask, Parameter, Result,
    mechanism::LinearInfsa,
    ops::{linear_in, token_weights},
};

impl MultiHeadAttention {
    /// The mechanism, where tokens are pooled before they are projected.
    pub(super) fn pooled(&self, input: &MhaInput) -> Option<LinearInfsa> {
        let alone = self.pool_first && input.memory.is_none() && !input.causal && input.dropout.is_none();
        // These need what pooling first leaves out: projections of every token.
        let plain = !self.rotary && !self.ternary && self.value_filter.is_none();
        let whole = self.kv_heads == self.n_heads && self.observer.is_none();
        self.mechanism.pooling().filter(|_| alone && plain && whole)
    }

    /// What all tokens get, `[batch, seq, d_model]`, or `[batch, 1, d_model]` with `broadcast` off.
    pub(super) fn pool_first(&self, x: Tensor<3>, m: &LinearInfsa, mask: &Mask) -> Result<Tensor<3>> {
        let [batch, seq, d_model] = x.dims();
        let (heads, head_dim) = (self.n_heads, d_model / self.n_heads);
        // Heads do not meet: where nothing is learned, queries and keys of a long sequence are held for some of them at a time.
        let whole = seq <= HELD_TOKENS || x.device().is_autodiff();
        let at_once = if whole { heads } else { (heads * HELD_TOKENS / seq).max(1) };
        let weights = |first: usize| {
            let some = first..heads.min(first + at_once);
            let q = self.project_heads(x.clone(), 0, some.clone());
            let k = (!m.tied).then(|| self.project_heads(x.clone(), 1, some.clone()));
            Ok(token_weights(q, k, m, mask, self.strategy)?.reshape([batch, some.len(), seq]))
        };
        let a = Tensor::cat((0..heads).step_by(at_once).map(weights).collect::<Result<_>>()?, 1);
        // What masked tokens hold must not meet their zero weights.
        let x = match &mask.key {
            Some(keep) => x.clone().mask_fill(keep.clone().bool_not().unsqueeze_dim::<3>(2).expand(x.shape()), 0.0),
            None => x,
        };
        let rows = a.clone().matmul(x).swap_dims(0, 1);
        let columns = if m.tied { d_model } else { 2 * d_model };
        let weight = self.projection.weight.val().narrow(1, columns, d_model);
        let weight = weight.reshape([d_model, heads, head_dim]).swap_dims(0, 1);
        // One row per sequence: in f32 whatever the precision.
        let mut pooled = rows.matmul(weight);
        if let Some(bias) = &self.projection.bias {
            let bias = bias.val().narrow(0, columns, d_model).reshape([heads, 1, head_dim]);
            pooled = pooled + a.sum_dim(2).swap_dims(0, 1) * bias;
        }
        let pooled = match self.learned.value(Parameter::Gamma) {
            Some(gamma) => pooled * gamma.reshape([heads, 1, 1]),
            None => pooled * m.gamma,
        };
        let context = self.output(pooled.swap_dims(0, 1).reshape([batch, 1, d_model]));
        Ok(if m.broadcast { context.expand([batch, seq, d_model]) } else { context })
    }

    /// `[batch, heads, seq, head_dim]` of some heads of the queries (`part` 0) or keys (1).
    fn project_heads(&self, x: Tensor<3>, part: usize, heads: Range<usize>) -> Tensor<4> {
        let [.., d_model] = x.dims();
        let head_dim = d_model / self.n_heads;
        let (first, width) = (part * d_model + heads.start * head_dim, heads.len() * head_dim);
        let (weight, bias) = self.input_maps();
        let bias = bias.map(|bias| bias.narrow(0, first, width));
        self.heads(linear_in(self.precision, x, weight.narrow(1, first, width), bias))
    }
}
