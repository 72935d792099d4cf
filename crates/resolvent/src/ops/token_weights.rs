//! The token weights of `linear-infsa` as an operation of their own, for pooling before projecting.

use std::sync::Arc;

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, ExtensionType,
        autodiff::checkpoint::strategy::CheckpointStrategy,
        backend_extension,
        flex::{Flex, FlexTensor},
        tensor::FloatTensor,
    },
    tensor::{FloatDType, Tensor},
};
use resolvent_kernels as kernels;

use super::{
    Inputs, Mask, Strategy,
    autodiff::{WeightsBackward, track_weights},
    composed,
    fused::{host_mask, with_scratch},
    plan::{of_kernels, plan},
    rows::{contiguous, slice, tensor},
};
use crate::{Result, mechanism::LinearInfsa};

/// One weight per token and head, `[batch, heads, 1, seq_kv]` in f32, before the decay; 0 at masked tokens. `k` is `None`
/// iff tied. "Infinite Self-Attention", eq. 19.
///
/// # Errors
/// As [`crate::attend`].
pub fn token_weights(
    q: Tensor<4>,
    k: Option<Tensor<4>>,
    mechanism: &LinearInfsa,
    mask: &Mask,
    strategy: Strategy,
) -> Result<Tensor<4>> {
    let [batch, heads, seq_q, _] = q.dims();
    let seq_kv = k.as_ref().map_or(seq_q, |k| k.dims()[2]);
    // The values play no part: one channel of them for the checks.
    let v = Tensor::zeros([batch, heads, seq_kv, 1], (&q.device(), q.dtype()));
    let inputs = Inputs { q, k, v, extras: Default::default() };
    let plan = plan(&inputs, &mechanism.clone().into(), mask, strategy)?;
    if plan.kernel.is_none() {
        return Ok(composed::token_weights(&inputs, mechanism, mask, plan.shape));
    }
    let weights = kernels::TokenWeights::new(mechanism, plan.shape, of_kernels(plan.strategy))?;
    let call = Call { weights, key: mask.key.as_ref().map(host_mask), query: mask.query.as_ref().map(host_mask) };
    let q = inputs.q.cast(FloatDType::F32);
    let k = inputs.k.map_or_else(|| q.clone(), |k| k.cast(FloatDType::F32));
    match Dispatch::fused_token_weights(q.into_dispatch(), k.into_dispatch(), call) {
        Outcome::Done { a, .. } => Ok(Tensor::from_dispatch(a)),
        Outcome::Failed(error) => Err(error.into()),
    }
}

/// Everything about a call but its differentiable tensors.
#[derive(Debug, Clone)]
pub struct Call {
    weights: kernels::TokenWeights,
    key: Option<Arc<[bool]>>,
    query: Option<Arc<[bool]>>,
}

impl Call {
    fn mask(&self) -> kernels::Mask<'_> {
        kernels::Mask { causal: false, key: self.key.as_deref(), query: self.query.as_deref() }
    }
}

/// What the forward pass returns.
#[derive(ExtensionType)]
pub enum Outcome<B: Backend> {
    /// It ran.
    Done {
        /// `[batch, heads, 1, seq_kv]`.
        a: FloatTensor<B>,
        /// What the backward pass needs beside the inputs and `a`.
        stats: Arc<[f32]>,
    },
    /// It did not.
    Failed(kernels::Error),
}

/// The operation as Burn dispatches it; `k` is not read when tied.
#[backend_extension(Autodiff, Flex)]
pub trait FusedTokenWeights: Backend {
    /// `a [batch, heads, 1, seq_kv]`.
    fn fused_token_weights(q: FloatTensor<Self>, k: FloatTensor<Self>, call: Call) -> Outcome<Self>;
}

/// A backend that has the kernels, forward and backward.
pub trait TokenWeightsKernel: Backend {
    /// Forward pass.
    fn weigh(q: FloatTensor<Self>, k: FloatTensor<Self>, call: &Call) -> Outcome<Self>;

    /// The gradients of `<da, a>` for `q` and, untied, `k`.
    fn weigh_backward(
        inputs: [FloatTensor<Self>; 2],
        a: FloatTensor<Self>,
        stats: &[f32],
        da: FloatTensor<Self>,
        call: &Call,
    ) -> kernels::Result<[Option<FloatTensor<Self>>; 2]>;
}

impl FusedTokenWeights for Flex {
    fn fused_token_weights(q: FlexTensor, k: FlexTensor, call: Call) -> Outcome<Self> {
        Self::weigh(q, k, &call)
    }
}

impl TokenWeightsKernel for Flex {
    fn weigh(q: FlexTensor, k: FlexTensor, call: &Call) -> Outcome<Self> {
        forward(q, k, call).unwrap_or_else(Outcome::Failed)
    }

    fn weigh_backward(
        [q, k]: [FlexTensor; 2],
        a: FlexTensor,
        stats: &[f32],
        da: FlexTensor,
        call: &Call,
    ) -> kernels::Result<[Option<FlexTensor>; 2]> {
        let [q, k, a, da] = [q, k, a, da].map(contiguous);
        let (weights, shape) = (&call.weights, call.weights.shape());
        let keys = (!weights.tied()).then(|| slice::<f32>(&k));
        let mut dq = vec![0.0; shape.q_len()];
        let mut dk = keys.map(|k| vec![0.0; k.len()]);
        let into = (&mut dq[..], dk.as_deref_mut());
        let (a, da) = (slice(&a), slice(&da));
        with_scratch(|scratch| weights.backward((slice(&q), keys), &call.mask(), a, stats, da, into, scratch))?;
        let gradient = |d: Vec<f32>, seq| tensor(d, [shape.batch, shape.heads, seq, shape.head_dim]);
        Ok([Some(gradient(dq, shape.seq_q)), dk.map(|dk| gradient(dk, shape.seq_kv))])
    }
}

fn forward(q: FlexTensor, k: FlexTensor, call: &Call) -> kernels::Result<Outcome<Flex>> {
    let [q, k] = [q, k].map(contiguous);
    let (weights, shape) = (&call.weights, call.weights.shape());
    let (mut a, mut stats) = (vec![0.0; weights.len()], vec![0.0; weights.plan().stats]);
    let keys = (!weights.tied()).then(|| slice(&k));
    with_scratch(|scratch| weights.forward(slice(&q), keys, &call.mask(), &mut a, &mut stats, scratch))?;
    Ok(Outcome::Done { a: tensor(a, [shape.batch, shape.heads, 1, shape.seq_kv]), stats: stats.into() })
}

impl<B: FusedTokenWeights + TokenWeightsKernel, C: CheckpointStrategy> FusedTokenWeights for Autodiff<B, C> {
    fn fused_token_weights(q: FloatTensor<Self>, k: FloatTensor<Self>, call: Call) -> Outcome<Self> {
        match B::weigh(q.primitive().clone(), k.primitive().clone(), &call) {
            Outcome::Failed(error) => Outcome::Failed(error),
            Outcome::Done { a, stats } => {
                let a = track_weights::<B, C>(WeightsBackward, [q, k], a, stats.clone(), call);
                Outcome::Done { a, stats }
            }
        }
    }
}
