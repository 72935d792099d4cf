//! Self-attention on projections that lie side by side, as one linear layer writes them.
//!
//! The fused path reads and writes every head where it lies: neither pass makes tensors in between.

use burn::{
    backend::{
        Dispatch, TensorMetadata,
        flex::{Flex, FlexTensor},
    },
    tensor::Tensor,
};
use rayon::prelude::*;
use resolvent_kernels as kernels;

use super::{
    Extras, Inputs, Mask, Strategy,
    fused::{self, Call, FusedAttention, Outcome, Saved, Storage},
    plan::decide,
    rows::{contiguous, slice, tensor},
    sequences::{attend_sequences, bound},
};
use crate::{Mechanism, Result, Sequences};

/// What one layer has projected of tokens, side by side.
#[derive(Debug, Clone)]
pub(crate) struct Projected {
    /// `[batch, seq, channels of queries, of keys, of values]`.
    pub packed: Tensor<3>,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
}

impl Projected {
    fn head_dim(&self, mechanism: &Mechanism) -> usize {
        let [_, _, width] = self.packed.dims();
        match mechanism.projections() {
            1 => width / self.kv_heads,
            parts => width / (self.heads + (parts - 1) * self.kv_heads),
        }
    }

    /// With every head of keys and values as often as heads of queries share it.
    pub fn repeated(self, mechanism: &Mechanism) -> Tensor<3> {
        let (head_dim, sharing) = (self.head_dim(mechanism), self.heads / self.kv_heads);
        let Self { packed, heads, kv_heads } = self;
        if sharing == 1 {
            return packed;
        }
        let [_, _, width] = packed.dims();
        let queries = if mechanism.projections() > 1 { heads * head_dim } else { 0 };
        let keys = kv_heads * head_dim;
        let repeated = (queries..width).step_by(keys);
        let repeated = repeated.map(|first| repeat_heads(packed.clone().narrow(2, first, keys), kv_heads, sharing));
        let queries = (queries > 0).then(|| packed.clone().narrow(2, 0, queries));
        Tensor::cat(queries.into_iter().chain(repeated).collect(), 2)
    }

    /// What is planned with: tensors of the sizes of the call, of which a clustered mechanism reads the content.
    fn views(&self, extras: &Extras, mechanism: &Mechanism) -> Inputs {
        let packed = self.packed.clone().detach();
        let mut views = match self.heads == self.kv_heads {
            true => split_heads(packed, self.heads, mechanism),
            false => {
                let ([batch, seq, _], head_dim) = (packed.dims(), self.head_dim(mechanism));
                let of = |first: usize, heads: usize| {
                    let channels = packed.clone().narrow(2, first * head_dim, heads * head_dim);
                    channels.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2)
                };
                let alone = mechanism.projections() == 1;
                let k = of(if alone { 0 } else { self.heads }, self.kv_heads);
                // `uniform` reads but the sizes of queries.
                let q = match alone {
                    true => k.clone().narrow(1, 0, 1).expand([batch, self.heads, seq, head_dim]),
                    false => of(0, self.heads),
                };
                Inputs::new(q, k.clone(), k)
            }
        };
        views.extras = extras.clone();
        views
    }
}

/// `x [batch, seq, heads * head_dim]` with every head `times` in a row.
pub(crate) fn repeat_heads(x: Tensor<3>, heads: usize, times: usize) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    let x = x.reshape([batch, seq, heads, 1, width / heads]).expand([batch, seq, heads, times, width / heads]);
    x.reshape([batch, seq, times * width])
}

/// Self-attention from projections to `[batch, seq, d_model]`.
pub(crate) fn attend_packed(
    projected: Projected,
    extras: Extras,
    mechanism: &Mechanism,
    mask: &Mask,
    strategy: Strategy,
) -> Result<Tensor<3>> {
    let views = projected.views(&extras, mechanism);
    let decision = decide(&views, mechanism, mask, strategy)?;
    if let Some(operator) = decision.operator {
        let call = Call::new(&views, mask, operator)?.with_kv_heads(projected.kv_heads)?;
        return carry_out(projected.packed, &extras, call);
    }
    let heads = projected.heads;
    let mut inputs = split_heads(projected.repeated(mechanism), heads, mechanism);
    inputs.extras = extras;
    Ok(merge_heads(super::attend(&inputs, mechanism, mask, decision.strategy)?.out))
}

/// As [`attend_packed`], for sequences that lie end to end in a batch of one.
pub(crate) fn attend_packed_sequences(
    projected: Projected,
    extras: Extras,
    mechanism: &Mechanism,
    sequences: &Sequences,
    causal: bool,
    strategy: Strategy,
) -> Result<Tensor<3>> {
    let views = projected.views(&extras, mechanism);
    if let Some(operator) = bound(&views, projected.kv_heads, mechanism, sequences, causal, strategy)? {
        return carry_out(projected.packed, &extras, Call::bound(&views, operator));
    }
    let heads = projected.heads;
    let mut inputs = split_heads(projected.repeated(mechanism), heads, mechanism);
    inputs.extras = extras;
    Ok(merge_heads(attend_sequences(&inputs, mechanism, sequences, causal, strategy)?.out))
}

/// Runs the kernels on projections that lie side by side.
fn carry_out(packed: Tensor<3>, extras: &Extras, call: Call) -> Result<Tensor<3>> {
    let parameters = fused::flattened(extras, &packed.device());
    match Dispatch::fused_packed(packed.into_dispatch(), parameters.into_dispatch(), call) {
        Outcome::Done { out, .. } => Ok(Tensor::from_dispatch(out)),
        Outcome::Failed(error) => Err(error.into()),
    }
}

/// The projections as views of their heads.
pub(crate) fn split_heads(packed: Tensor<3>, heads: usize, mechanism: &Mechanism) -> Inputs {
    let [batch, seq, width] = packed.dims();
    let parts = mechanism.projections();
    let packed = packed.reshape([batch, seq, parts, heads, width / parts / heads]).permute([2, 0, 3, 1, 4]);
    let part = |i: usize| packed.clone().narrow(0, i, 1).squeeze_dim::<4>(0);
    let (q, v) = (part(0), part(parts - 1));
    if mechanism.tied { Inputs::tied(q, v) } else { Inputs::new(q, part(parts / 2), v) }
}

/// `[batch, heads, seq, head_dim]` as `[batch, seq, heads * head_dim]`.
pub(crate) fn merge_heads(x: Tensor<4>) -> Tensor<3> {
    let [batch, heads, seq, head_dim] = x.dims();
    x.swap_dims(1, 2).reshape([batch, seq, heads * head_dim])
}

/// Forward pass on Flex.
pub(super) fn forward<T: Storage>(
    qkv: FlexTensor,
    parameters: FlexTensor,
    call: &Call,
) -> kernels::Result<Outcome<Flex>> {
    let (qkv, parameters) = (contiguous(qkv), contiguous(parameters));
    let (shape, out_seq) = (&call.operator.shape(), call.operator.out_seq());
    let inputs = call.operator.packed_inputs::<T>(slice(&qkv), call.extras(slice(&parameters)))?;
    let mut out = zeros(call.operator.out_len());
    let stats = fused::run_forward(&inputs, call, merged(&mut out[..], call))?;
    let out = tensor(out, [shape.batch, out_seq, shape.heads * shape.value_dim]);
    Ok(Outcome::Done { out, lse: tensor(Vec::<f32>::new(), [0, 0, 0]), stats })
}

/// Backward pass on Flex.
pub(super) fn backward<T: Storage>(
    qkv: FlexTensor,
    parameters: FlexTensor,
    saved: Saved<'_, FlexTensor>,
    call: &Call,
) -> kernels::Result<[Option<FlexTensor>; 2]> {
    let (qkv, parameters, out, dout) =
        (contiguous(qkv), contiguous(parameters), contiguous(saved.out), contiguous(saved.dout));
    let inputs = call.operator.packed_inputs::<T>(slice(&qkv), call.extras(slice(&parameters)))?;
    let saved = Saved { out: merged(slice(&out), call), stats: saved.stats, dout: merged(slice(&dout), call) };
    let mut dqkv = zeros::<T>(slice::<T>(&qkv).len());
    let dparameters = fused::run_backward(call, |mut extras, scratch| {
        let into = (&mut dqkv[..], &mut extras);
        call.operator.backward_packed(&inputs, &call.mask(), saved, into, scratch)
    })?;
    Ok([Some(tensor(dqkv, qkv.shape())), dparameters.map(|gradient| tensor(gradient, parameters.shape()))])
}

/// The outputs of all heads side by side.
fn merged<D>(data: D, call: &Call) -> kernels::Strided<D> {
    let shape = call.operator.shape();
    kernels::Strided::tokens_first(data, [shape.heads, call.operator.out_seq(), shape.value_dim])
}

/// Zeros, written by all threads.
fn zeros<T: Storage>(len: usize) -> Vec<T> {
    const PART: usize = 1 << 16;
    let mut zeros = Vec::new();
    (0..len).into_par_iter().with_min_len(PART).map(|_| T::default()).collect_into_vec(&mut zeros);
    zeros
}
