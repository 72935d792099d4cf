//! Self-attention on projections that lie side by side, as one linear layer writes them.
//!
//! The fused path gathers the heads into memory that is reused and scatters the results: neither pass makes tensors in
//! between.

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
    fused::{self, Call, FusedAttention, Outcome, Saved, Storage, contiguous, slice, tensor, with_scratch},
    plan,
    sequences::{attend_sequences, bound},
};
use crate::{Mechanism, Result, Sequences, Shape};

/// How many projections the mechanism has: queries, keys, values; queries are keys when tied, and `uniform` reads
/// neither.
pub(crate) fn projections(mechanism: &Mechanism) -> usize {
    match mechanism {
        Mechanism::Uniform(_) => 1,
        _ if mechanism.tied() => 2,
        _ => 3,
    }
}

/// Self-attention from `packed [batch, seq, parts * d_model]` to `[batch, seq, d_model]`.
pub(crate) fn attend_packed(
    packed: Tensor<3>,
    heads: usize,
    extras: Extras,
    mechanism: &Mechanism,
    mask: &Mask,
    strategy: Strategy,
) -> Result<Tensor<3>> {
    let mut views = split_heads(packed.clone().detach(), heads, mechanism);
    views.extras = extras.clone();
    let plan = plan(&views, mechanism, mask, strategy)?;
    if plan.kernel.is_some() {
        return carry_out(packed, &extras, Call::new(&views, mechanism, mask, &plan)?);
    }
    let mut inputs = split_heads(packed, heads, mechanism);
    inputs.extras = extras;
    Ok(merge_heads(super::attend(&inputs, mechanism, mask, plan.strategy)?.out))
}

/// As [`attend_packed`], for sequences that lie end to end in a batch of one.
pub(crate) fn attend_packed_sequences(
    packed: Tensor<3>,
    heads: usize,
    extras: Extras,
    mechanism: &Mechanism,
    sequences: &Sequences,
    causal: bool,
    strategy: Strategy,
) -> Result<Tensor<3>> {
    let mut views = split_heads(packed.clone().detach(), heads, mechanism);
    views.extras = extras.clone();
    if let Some(operator) = bound(&views, mechanism, sequences, causal, strategy)? {
        return carry_out(packed, &extras, Call::bound(&views, operator));
    }
    let mut inputs = split_heads(packed, heads, mechanism);
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
    let parts = projections(mechanism);
    let packed = packed.reshape([batch, seq, parts, heads, width / parts / heads]).permute([2, 0, 3, 1, 4]);
    let part = |i: usize| packed.clone().narrow(0, i, 1).squeeze_dim::<4>(0);
    let (q, v) = (part(0), part(parts - 1));
    if mechanism.tied() { Inputs::tied(q, v) } else { Inputs::new(q, part(parts / 2), v) }
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
    with_scratch(|memory| {
        let sizes = [projections(call.operator.mechanism()) * shape.q_len(), call.operator.out_len()];
        let [heads, out] = cut::<T, 2>(memory, sizes);
        gather(slice(&qkv), shape, shape.seq_q, heads);
        let stats = fused::run_forward(&inputs(heads, &parameters, call), call, out)?;
        let mut merged = zeros(out.len());
        scatter(&[out], shape, out_seq, &mut merged);
        let out = tensor(merged, [shape.batch, out_seq, shape.heads * shape.value_dim]);
        Ok(Outcome::Done { out, lse: tensor(Vec::<f32>::new(), [0, 0, 0]), stats })
    })
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
    let (shape, mechanism) = (&call.operator.shape(), call.operator.mechanism());
    let (part, out_seq, out_len) = (shape.q_len(), call.operator.out_seq(), call.operator.out_len());
    let parts = projections(mechanism);
    with_scratch(|memory| {
        let [heads, o, g, dq, dk, dv] = cut::<T, 6>(memory, [parts * part, out_len, out_len, part, part, part]);
        gather(slice(&qkv), shape, shape.seq_q, heads);
        gather(slice(&out), shape, out_seq, o);
        gather(slice(&dout), shape, out_seq, g);
        let saved = Saved { out: &*o, stats: saved.stats, dout: &*g };
        let untied = (!mechanism.tied()).then_some(&mut *dk);
        let dparameters =
            fused::run_backward(&inputs(heads, &parameters, call), saved, call, (&mut *dq, untied, &mut *dv))?;
        let gradients: &[&[T]] = match parts {
            1 => &[dv],
            2 => &[dq, dv],
            _ => &[dq, dk, dv],
        };
        let mut merged = zeros(parts * part);
        scatter(gradients, shape, shape.seq_q, &mut merged);
        let dqkv = tensor(merged, [shape.batch, shape.seq_q, parts * shape.heads * shape.head_dim]);
        Ok([Some(dqkv), dparameters.map(|gradient| tensor(gradient, parameters.shape()))])
    })
}

/// The projections in `heads` as the kernels take them.
fn inputs<'a, T: Storage>(heads: &'a [T], parameters: &'a FlexTensor, call: &'a Call) -> kernels::Inputs<'a, T> {
    let (len, mechanism) = (call.operator.shape().q_len(), call.operator.mechanism());
    let parts = projections(mechanism);
    let part = |i: usize| &heads[i * len..][..len];
    let extras = call.extras(slice(parameters));
    kernels::Inputs { q: part(0), k: (!mechanism.tied()).then(|| part(parts / 2)), v: part(parts - 1), extras }
}

/// `N` buffers of the given sizes out of reused memory.
fn cut<T: Storage, const N: usize>(memory: &mut kernels::Scratch, sizes: [usize; N]) -> [&mut [T]; N] {
    let bytes = sizes.iter().sum::<usize>() * size_of::<T>();
    let mut rest: &mut [T] = bytemuck::cast_slice_mut(memory.take(bytes.div_ceil(4)));
    sizes.map(|len| {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
        rest = tail;
        part
    })
}

/// Zeros, written by all threads.
fn zeros<T: Storage>(len: usize) -> Vec<T> {
    const PART: usize = 1 << 16;
    let mut zeros = Vec::new();
    (0..len).into_par_iter().with_min_len(PART).map(|_| T::default()).collect_into_vec(&mut zeros);
    zeros
}

/// `[batch, seq, parts, heads, dim]` to as many blocks of `[batch, heads, seq, dim]` as fill `into`.
fn gather<T: Storage>(from: &[T], shape: &Shape, seq: usize, into: &mut [T]) {
    let (heads, dim) = (shape.heads, shape.head_dim);
    let block = shape.batch * heads * seq * dim;
    let row = into.len() / block * heads * dim;
    for (part, into) in into.chunks_exact_mut(block).enumerate() {
        into.par_chunks_exact_mut(heads * seq * dim).zip(from.par_chunks_exact(seq * row)).for_each(|(into, from)| {
            for (head, into) in into.chunks_exact_mut(seq * dim).enumerate() {
                let first = (part * heads + head) * dim;
                for (into, from) in into.chunks_exact_mut(dim).zip(from.chunks_exact(row)) {
                    into.copy_from_slice(&from[first..first + dim]);
                }
            }
        });
    }
}

/// The inverse of [`gather`].
fn scatter<T: Storage>(from: &[&[T]], shape: &Shape, seq: usize, into: &mut [T]) {
    let (heads, dim) = (shape.heads, shape.head_dim);
    let (row, sequence) = (from.len() * heads * dim, heads * seq * dim);
    into.par_chunks_exact_mut(seq * row).enumerate().for_each(|(batch, into)| {
        for (part, from) in from.iter().enumerate() {
            for (head, from) in from[batch * sequence..][..sequence].chunks_exact(seq * dim).enumerate() {
                let first = (part * heads + head) * dim;
                for (into, from) in into.chunks_exact_mut(row).zip(from.chunks_exact(dim)) {
                    into[first..first + dim].copy_from_slice(from);
                }
            }
        }
    });
}
