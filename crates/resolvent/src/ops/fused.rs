//! The kernels of `resolvent-kernels` as operations of Burn's Flex backend: tensors go in and out as slices, without a
//! copy unless they are strided, in their own storage type.

use std::sync::{Arc, Mutex};

use burn::{
    backend::{
        Backend, DType, Dispatch, ExtensionType, TensorMetadata, backend_extension,
        flex::{Flex, FlexTensor, Layout},
        tensor::FloatTensor,
    },
    tensor::{Bool, Bytes, Element, Shape, Tensor, bf16, f16},
};
use resolvent_kernels as kernels;

use super::{Inputs, Mask, Output, Plan, Strategy};
use crate::{Mechanism, Result};

/// Applies the mechanism through the kernels, forward or naive as `plan` says.
pub(super) fn attend(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, plan: &Plan) -> Result<Output> {
    let strategy = match plan.strategy {
        Strategy::Reference => kernels::Strategy::Reference,
        _ => kernels::Strategy::Fused,
    };
    let call = Call {
        operator: kernels::Operator::new(mechanism, plan.shape, mask.causal, strategy)?,
        key_mask: mask.key.as_ref().map(host),
        query_mask: mask.query.as_ref().map(host),
        has_gamma: inputs.extras.gamma.is_some(),
    };
    let q = inputs.q.clone();
    // A tied call has no keys and most calls no decay: any tensor holds the place.
    let k = inputs.k.as_ref().unwrap_or(&q).clone();
    let gamma = inputs.extras.gamma.clone().unwrap_or_else(|| Tensor::empty([1], &q.device()));
    let [q, k, v] = [q, k, inputs.v.clone()].map(Tensor::into_dispatch);
    match Dispatch::fused_attention(q, k, v, gamma.into_dispatch(), call) {
        Outcome::Done { out, lse, .. } => {
            let lse = matches!(mechanism, Mechanism::Softmax(_)).then(|| Tensor::from_dispatch(lse));
            Ok(Output { out: Tensor::from_dispatch(out), lse })
        }
        Outcome::Failed(error) => Err(error.into()),
    }
}

fn host(mask: &Tensor<2, Bool>) -> Arc<[bool]> {
    mask.to_data().iter::<bool>().collect()
}

/// Everything about a call but its differentiable tensors.
#[derive(Debug, Clone)]
pub struct Call {
    /// The mechanism bound to its sizes.
    pub operator: kernels::Operator,
    /// `[batch, seq_kv]`.
    pub key_mask: Option<Arc<[bool]>>,
    /// `[batch, seq_q]`.
    pub query_mask: Option<Arc<[bool]>>,
    /// Whether the call's `gamma` replaces the configured one.
    pub has_gamma: bool,
}

/// What the forward pass returns.
#[derive(ExtensionType)]
pub enum Outcome<B: Backend> {
    /// It ran.
    Done {
        /// `[batch, heads, out_seq, value_dim]`.
        out: FloatTensor<B>,
        /// `[batch, heads, seq_q]`; empty where the mechanism has none.
        lse: FloatTensor<B>,
        /// What the backward pass needs beside inputs and `out`.
        stats: Arc<[f32]>,
    },
    /// It did not.
    Failed(kernels::Error),
}

/// The operation as Burn dispatches it; `gamma` is `[heads]` and read only if the call says so, `k` is not read when tied.
#[backend_extension(Autodiff, Flex)]
pub trait FusedAttention: Backend {
    /// `out = A(q, k) v`.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: Call,
    ) -> Outcome<Self>;
}

/// The four differentiable tensors of a call, or their gradients.
#[derive(Debug, Clone)]
pub struct Leaves<T> {
    /// Queries.
    pub q: T,
    /// Keys.
    pub k: T,
    /// Values.
    pub v: T,
    /// Decay per head.
    pub gamma: T,
}

/// A backend that has the kernels, forward and backward.
pub trait FusedKernel: Backend {
    /// The forward pass.
    fn forward(leaves: Leaves<FloatTensor<Self>>, call: &Call) -> Outcome<Self>;

    /// The gradients of `<dout, out>`, where the call has them (no `k` when tied).
    fn backward(
        leaves: Leaves<FloatTensor<Self>>,
        out: FloatTensor<Self>,
        stats: &[f32],
        dout: FloatTensor<Self>,
        call: &Call,
    ) -> kernels::Result<Leaves<Option<FloatTensor<Self>>>>;
}

impl FusedAttention for Flex {
    fn fused_attention(q: FlexTensor, k: FlexTensor, v: FlexTensor, gamma: FlexTensor, call: Call) -> Outcome<Self> {
        Self::forward(Leaves { q, k, v, gamma }, &call)
    }
}

impl FusedKernel for Flex {
    fn forward(leaves: Leaves<FlexTensor>, call: &Call) -> Outcome<Self> {
        let done = match leaves.q.dtype() {
            DType::F16 => forward::<f16>(leaves, call),
            DType::BF16 => forward::<bf16>(leaves, call),
            _ => forward::<f32>(leaves, call),
        };
        done.unwrap_or_else(Outcome::Failed)
    }

    fn backward(
        leaves: Leaves<FlexTensor>,
        out: FlexTensor,
        stats: &[f32],
        dout: FlexTensor,
        call: &Call,
    ) -> kernels::Result<Leaves<Option<FlexTensor>>> {
        match leaves.q.dtype() {
            DType::F16 => backward::<f16>(leaves, out, stats, dout, call),
            DType::BF16 => backward::<bf16>(leaves, out, stats, dout, call),
            _ => backward::<f32>(leaves, out, stats, dout, call),
        }
    }
}

/// A storage type of both worlds.
trait Storage: Element + kernels::Element {}
impl<T: Element + kernels::Element> Storage for T {}

fn forward<T: Storage>(leaves: Leaves<FlexTensor>, call: &Call) -> kernels::Result<Outcome<Flex>> {
    let operator = &call.operator;
    let shape = *operator.shape();
    let leaves = Contiguous::new(leaves);
    let mut out = vec![T::default(); operator.out_len()];
    let mut stats = vec![0.0; operator.plan().stats];
    with_scratch(|scratch| operator.forward(&leaves.inputs::<T>(call), &call.mask(), &mut out, &mut stats, scratch))?;
    let lse = operator.lse(&stats).unwrap_or(&[]).to_vec();
    let lse_shape = if lse.is_empty() { [0, 0, 0] } else { [shape.batch, shape.heads, shape.seq_q] };
    Ok(Outcome::Done {
        out: tensor(out, [shape.batch, shape.heads, operator.out_seq(), shape.value_dim]),
        lse: tensor(lse, lse_shape),
        stats: stats.into(),
    })
}

fn backward<T: Storage>(
    leaves: Leaves<FlexTensor>,
    out: FlexTensor,
    stats: &[f32],
    dout: FlexTensor,
    call: &Call,
) -> kernels::Result<Leaves<Option<FlexTensor>>> {
    let operator = &call.operator;
    let leaves = Contiguous::new(leaves);
    let inputs = leaves.inputs::<T>(call);
    let (out, dout) = (contiguous(out), contiguous(dout));
    let mut dq = vec![T::default(); inputs.q.len()];
    let mut dk = inputs.k.map(|k| vec![T::default(); k.len()]);
    let mut dv = vec![T::default(); inputs.v.len()];
    let mut dgamma = call.has_gamma.then(|| vec![0.0; operator.shape().heads]);
    let mut gradients =
        kernels::Gradients { dq: &mut dq, dk: dk.as_deref_mut(), dv: &mut dv, dgamma: dgamma.as_deref_mut() };
    let (out, dout) = (slice::<T>(&out), slice::<T>(&dout));
    with_scratch(|scratch| operator.backward(&inputs, &call.mask(), out, stats, dout, &mut gradients, scratch))?;
    let Leaves { q, k, v, gamma } = &leaves.0;
    Ok(Leaves {
        q: Some(tensor(dq, q.shape())),
        k: dk.map(|dk| tensor(dk, k.shape())),
        v: Some(tensor(dv, v.shape())),
        gamma: dgamma.map(|dgamma| tensor(dgamma, gamma.shape())),
    })
}

impl Call {
    fn mask(&self) -> kernels::Mask<'_> {
        // Causality is part of the operator.
        kernels::Mask { causal: false, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }
}

/// The tensors of a call, each in one piece of memory.
struct Contiguous(Leaves<FlexTensor>);

impl Contiguous {
    fn new(Leaves { q, k, v, gamma }: Leaves<FlexTensor>) -> Self {
        let [q, k, v, gamma] = [q, k, v, gamma].map(contiguous);
        Self(Leaves { q, k, v, gamma })
    }

    fn inputs<T: Storage>(&self, call: &Call) -> kernels::Inputs<'_, T> {
        let Leaves { q, k, v, gamma } = &self.0;
        let k = (!call.operator.mechanism().tied()).then(|| slice(k));
        let extras = if call.has_gamma { kernels::Extras::gamma(slice(gamma)) } else { kernels::Extras::default() };
        kernels::Inputs { q: slice(q), k, v: slice(v), extras }
    }
}

/// The same tensor in one piece of memory; a copy only if it is strided.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

fn slice<T: Storage>(tensor: &FlexTensor) -> &[T] {
    tensor.as_slice().expect("the storage type is checked and the memory contiguous")
}

fn tensor<T: Storage>(data: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape.into()), T::dtype())
}

/// Runs `f` on working memory that outlives the call: calls that run at the same time have one each, and after the
/// first few nothing is allocated.
fn with_scratch<R>(f: impl FnOnce(&mut kernels::Scratch) -> R) -> R {
    static POOL: Mutex<Vec<kernels::Scratch>> = Mutex::new(Vec::new());
    let pool = || POOL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut scratch = pool().pop().unwrap_or_default();
    let result = f(&mut scratch);
    pool().push(scratch);
    result
}
