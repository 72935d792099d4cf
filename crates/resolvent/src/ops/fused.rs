//! The kernels of `resolvent-kernels` as operations of Burn's Flex backend: tensors go in and out as slices, without a
//! copy unless they are strided, in their own storage type.

use std::sync::{Arc, Mutex};

use burn::{
    backend::{
        Backend, DType, Dispatch, ExtensionType, TensorMetadata, backend_extension,
        flex::{Flex, FlexTensor, Layout},
        tensor::FloatTensor,
    },
    tensor::{Bool, Bytes, Device, Element, Tensor, bf16, f16},
};
use resolvent_kernels as kernels;

use super::{
    Extras, Inputs, Mask, Output,
    bound::Bound,
    clusters::clusters,
    packed,
    rows::{contiguous, in_rows, is_tokens_first, rows, slice, strided, tensor, tokens_first},
};
use crate::Result;

/// Applies the mechanism through the kernels, fused or naive as the operator was planned.
pub(super) fn attend(inputs: &Inputs, mask: &Mask, operator: kernels::Operator) -> Result<Output> {
    apply(inputs, Call::new(inputs, mask, operator)?)
}

/// Carries out a call.
pub(super) fn apply(inputs: &Inputs, call: Call) -> Result<Output> {
    let q = inputs.q.clone();
    // A tied call has no keys: any tensor holds the place.
    let k = inputs.k.as_ref().unwrap_or(&q).clone();
    let parameters = flattened(&inputs.extras, &q.device());
    let [q, k, v] = [q, k, inputs.v.clone()].map(Tensor::into_dispatch);
    match Dispatch::fused_attention(q, k, v, parameters.into_dispatch(), call) {
        Outcome::Done { out, lse, .. } => {
            // Of no rows where the mechanism has none.
            let lse = Some(Tensor::<3>::from_dispatch(lse)).filter(|lse| lse.dims()[0] > 0);
            Ok(Output { out: Tensor::from_dispatch(out), lse })
        }
        Outcome::Failed(error) => Err(error.into()),
    }
}

/// The mechanism's own tensors end to end, as [`Call::parameters`] lists them; any tensor where there are none.
pub(super) fn flattened(extras: &Extras, device: &Device) -> Tensor<1> {
    let mut tensors: Vec<_> = extras.parameters.values().map(|extra| extra.flat.clone()).collect();
    match tensors.len() {
        0 => Tensor::empty([1], device),
        1 => tensors.remove(0),
        _ => Tensor::cat(tensors, 0),
    }
}

/// Everything about a call but its differentiable tensors.
#[derive(Debug, Clone)]
pub struct Call {
    /// The mechanism bound to its sizes.
    pub operator: Bound,
    /// `[batch, seq_kv]`.
    pub key_mask: Option<Arc<[bool]>>,
    /// `[batch, seq_q]`.
    pub query_mask: Option<Arc<[bool]>>,
    /// The mechanism's own tensors that the call gives, and their numbers of elements.
    pub parameters: Arc<[(kernels::Parameter, usize)]>,
    /// The plan of a clustered call.
    pub clusters: Option<Arc<kernels::ClusterPlan>>,
    /// The tokens that are the landmarks, `[batch, count]`.
    pub landmark_indices: Option<Arc<[i64]>>,
    /// Pairs left out at random.
    pub dropout: Option<kernels::Dropout>,
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

/// What the forward pass leaves for the backward pass, and the gradient that comes in.
#[derive(Debug)]
pub struct Saved<'a, F> {
    /// The result.
    pub out: F,
    /// Statistics, O(N).
    pub stats: &'a [f32],
    /// The gradient of the result.
    pub dout: F,
}

/// The operations as Burn dispatches them; `parameters` are the mechanism's own tensors end to end, read
/// only as far as the call says.
#[backend_extension(Autodiff, Flex)]
pub trait FusedAttention: Backend {
    /// `out = A(q, k) v`; `k` is not read when tied.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        call: Call,
    ) -> Outcome<Self>;

    /// The same from the projections `qkv [batch, seq, parts * heads * head_dim]` to `[batch, seq, heads * head_dim]`;
    /// without `lse`.
    fn fused_packed(qkv: FloatTensor<Self>, parameters: FloatTensor<Self>, call: Call) -> Outcome<Self>;
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
    /// The mechanism's own tensors, end to end.
    pub parameters: T,
}

/// A backend that has the kernels, forward and backward. The gradients are of `<dout, out>`, where the call has them.
pub trait FusedKernel: Backend {
    /// Forward pass of [`FusedAttention::fused_attention`].
    fn forward(leaves: Leaves<FloatTensor<Self>>, call: &Call) -> Outcome<Self>;

    /// Its backward pass.
    fn backward(
        leaves: Leaves<FloatTensor<Self>>,
        saved: Saved<'_, FloatTensor<Self>>,
        call: &Call,
    ) -> kernels::Result<Leaves<Option<FloatTensor<Self>>>>;

    /// Forward pass of [`FusedAttention::fused_packed`].
    fn forward_packed(qkv: FloatTensor<Self>, parameters: FloatTensor<Self>, call: &Call) -> Outcome<Self>;

    /// Its backward pass: the gradients of `qkv` and `parameters`.
    fn backward_packed(
        qkv: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        saved: Saved<'_, FloatTensor<Self>>,
        call: &Call,
    ) -> kernels::Result<[Option<FloatTensor<Self>>; 2]>;
}

impl FusedAttention for Flex {
    fn fused_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        parameters: FlexTensor,
        call: Call,
    ) -> Outcome<Self> {
        Self::forward(Leaves { q, k, v, parameters }, &call)
    }

    fn fused_packed(qkv: FlexTensor, parameters: FlexTensor, call: Call) -> Outcome<Self> {
        Self::forward_packed(qkv, parameters, &call)
    }
}

/// Calls a function that is generic over the storage type with that of a tensor, which `plan` has checked.
macro_rules! by_dtype {
    ($dtype:expr, $($function:ident)::+, $($argument:expr),+) => {
        match $dtype {
            DType::F16 => $($function)::+::<f16>($($argument),+),
            DType::BF16 => $($function)::+::<bf16>($($argument),+),
            _ => $($function)::+::<f32>($($argument),+),
        }
    };
}

impl FusedKernel for Flex {
    fn forward(leaves: Leaves<FlexTensor>, call: &Call) -> Outcome<Self> {
        by_dtype!(leaves.q.dtype(), forward, leaves, call).unwrap_or_else(Outcome::Failed)
    }

    fn backward(
        leaves: Leaves<FlexTensor>,
        saved: Saved<'_, FlexTensor>,
        call: &Call,
    ) -> kernels::Result<Leaves<Option<FlexTensor>>> {
        by_dtype!(leaves.q.dtype(), backward, leaves, saved, call)
    }

    fn forward_packed(qkv: FlexTensor, parameters: FlexTensor, call: &Call) -> Outcome<Self> {
        by_dtype!(qkv.dtype(), packed::forward, qkv, parameters, call).unwrap_or_else(Outcome::Failed)
    }

    fn backward_packed(
        qkv: FlexTensor,
        parameters: FlexTensor,
        saved: Saved<'_, FlexTensor>,
        call: &Call,
    ) -> kernels::Result<[Option<FlexTensor>; 2]> {
        by_dtype!(qkv.dtype(), packed::backward, qkv, parameters, saved, call)
    }
}

/// A storage type of both worlds.
pub(super) trait Storage: Element + kernels::Element {}
impl<T: Element + kernels::Element> Storage for T {}

fn forward<T: Storage>(leaves: Leaves<FlexTensor>, call: &Call) -> kernels::Result<Outcome<Flex>> {
    let operator = &call.operator;
    let shape = operator.shape();
    let sizes = [shape.batch, shape.heads, operator.out_seq(), shape.value_dim];
    let leaves = InRows::new(leaves);
    // As PyTorch does: heads within tokens where those of the queries are, so that merging them copies nothing.
    let layout =
        if is_tokens_first(leaves.0.q.layout()) { tokens_first(sizes) } else { Layout::contiguous(sizes.into()) };
    let mut out = vec![T::default(); operator.out_len()];
    let into = strided(&mut out[..], &layout);
    let stats = run_forward(&leaves.inputs::<T>(call), call, into)?;
    let lse = operator.lse(&stats).unwrap_or_default();
    let lse_shape = if lse.is_empty() { [0, 0, 0] } else { [shape.batch, shape.heads, shape.seq_q] };
    Ok(Outcome::Done {
        out: FlexTensor::new(Bytes::from_elems(out), layout, T::dtype()),
        lse: tensor(lse, lse_shape),
        stats,
    })
}

fn backward<T: Storage>(
    leaves: Leaves<FlexTensor>,
    saved: Saved<'_, FlexTensor>,
    call: &Call,
) -> kernels::Result<Leaves<Option<FlexTensor>>> {
    let leaves = InRows::new(leaves);
    let inputs = leaves.inputs::<T>(call);
    let (out, dout) = (in_rows(saved.out), in_rows(saved.dout));
    let saved = Saved { out: rows::<T>(&out), stats: saved.stats, dout: rows(&dout) };
    let Leaves { q, k, v, parameters } = &leaves.0;
    // As their tensors lie, where these are in one piece or heads within tokens.
    let layout = |x: &FlexTensor| match is_tokens_first(x.layout()) {
        true => tokens_first(x.shape().dims()),
        false => Layout::contiguous(x.shape()),
    };
    let zeros = |x: &FlexTensor| (vec![T::default(); x.shape().num_elements()], layout(x));
    let (mut dq, mut dk, mut dv) = (zeros(q), inputs.k.is_some().then(|| zeros(k)), zeros(v));
    let dparameters = run_backward(call, |extras, scratch| {
        let dk = dk.as_mut().map(rows_of);
        let mut gradients = kernels::StridedGradients { dq: rows_of(&mut dq), dk, dv: rows_of(&mut dv), extras };
        call.operator.backward(&inputs, &call.mask(), saved, &mut gradients, scratch)
    })?;
    let made = |(x, layout): (Vec<T>, Layout)| FlexTensor::new(Bytes::from_elems(x), layout, T::dtype());
    Ok(Leaves {
        q: Some(made(dq)),
        k: dk.map(made),
        v: Some(made(dv)),
        parameters: dparameters.map(|gradient| tensor(gradient, parameters.shape())),
    })
}

fn rows_of<T>((data, layout): &mut (Vec<T>, Layout)) -> kernels::Strided<&mut [T]> {
    strided(&mut data[..], layout)
}

/// Writes `out` and returns what the backward pass needs.
pub(super) fn run_forward<T: Storage>(
    inputs: &kernels::StridedInputs<'_, T>,
    call: &Call,
    out: kernels::Strided<&mut [T]>,
) -> kernels::Result<Arc<[f32]>> {
    call.operator.check_memory()?;
    let mut stats = vec![0.0; call.operator.stats()];
    with_scratch(|scratch| call.operator.forward(inputs, &call.mask(), out, &mut stats, scratch))?;
    Ok(stats.into())
}

/// Runs a backward pass, and returns the gradients of the mechanism's own tensors end to end, where the call has such.
pub(super) fn run_backward(
    call: &Call,
    pass: impl FnOnce(kernels::ExtraGradients<'_>, &mut kernels::Scratch) -> kernels::Result<()>,
) -> kernels::Result<Option<Vec<f32>>> {
    let mut parameters = vec![0.0; call.parameters.iter().map(|(_, len)| len).sum()];
    let extras = kernels::ExtraGradients::of_parts(&mut parameters, call.parameters.iter().copied());
    // A training that scales its loss looks for gradients beyond f32, and leaves out the step: they stay as they are. So do those
    // of landmarks that lie too close together to be exact, of which a step of training has others.
    match with_scratch(|scratch| pass(extras, scratch)) {
        Err(error) if !matches!(error.cause(), kernels::Error::Overflow { .. } | kernels::Error::Close { .. }) => {
            return Err(error);
        }
        _ => {}
    }
    Ok((!parameters.is_empty()).then_some(parameters))
}

impl Call {
    /// The call of a batch by `operator`.
    pub(super) fn new(inputs: &Inputs, mask: &Mask, operator: kernels::Operator) -> Result<Self> {
        let (key_mask, query_mask) = (mask.key.as_ref().map(host_mask), mask.query.as_ref().map(host_mask));
        let clusters = clusters(inputs, operator.mechanism(), mask, operator.shape())?;
        Ok(Self { key_mask, query_mask, clusters, ..Self::bound(inputs, Bound::Batch(operator)) })
    }

    /// The same call on fewer heads of keys and values.
    pub(super) fn with_kv_heads(self, kv_heads: usize) -> Result<Self> {
        let operator = match self.operator {
            Bound::Batch(operator) => Bound::Batch(operator.with_kv_heads(kv_heads)?),
            sequences => sequences,
        };
        Ok(Self { operator, ..self })
    }

    /// The call of an operator without masks.
    pub(super) fn bound(inputs: &Inputs, operator: Bound) -> Self {
        let parameters = inputs.extras.parameters.iter().map(|(&p, extra)| (p, extra.shape.iter().product())).collect();
        let Extras { landmark_indices, dropout, .. } = inputs.extras.clone();
        Self { operator, key_mask: None, query_mask: None, parameters, clusters: None, landmark_indices, dropout }
    }

    /// The mechanism's own tensors out of `flat`, where they lie end to end.
    pub(super) fn extras<'a>(&'a self, mut flat: &'a [f32]) -> kernels::Extras<'a> {
        let extras = self.parameters.iter().fold(kernels::Extras::default(), |extras, &(parameter, len)| {
            let (values, rest) = flat.split_at(len);
            flat = rest;
            extras.with(parameter, values)
        });
        let extras = self.clusters.iter().fold(extras, |extras, plan| extras.with_clusters(plan));
        let extras = self.dropout.iter().fold(extras, |extras, dropout| extras.with_dropout(*dropout));
        self.landmark_indices.iter().fold(extras, |mut extras, indices| {
            extras.landmark_indices = Some(indices);
            extras
        })
    }

    pub(super) fn mask(&self) -> kernels::Mask<'_> {
        // Causality is part of the operator.
        kernels::Mask { causal: false, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }
}

/// A mask in the kernels' form.
pub(super) fn host_mask(mask: &Tensor<2, Bool>) -> Arc<[bool]> {
    mask.to_data().iter::<bool>().collect()
}

/// The tensors of a call, each with channels side by side.
struct InRows(Leaves<FlexTensor>);

impl InRows {
    fn new(Leaves { q, k, v, parameters }: Leaves<FlexTensor>) -> Self {
        let [q, k, v] = [q, k, v].map(in_rows);
        Self(Leaves { q, k, v, parameters: contiguous(parameters) })
    }

    fn inputs<'a, T: Storage>(&'a self, call: &'a Call) -> kernels::StridedInputs<'a, T> {
        let Leaves { q, k, v, parameters } = &self.0;
        let k = (!call.operator.mechanism().tied).then(|| rows(k));
        kernels::StridedInputs { q: rows(q), k, v: rows(v), extras: call.extras(slice(parameters)) }
    }
}

/// Runs `f` on working memory that outlives the call: calls that run at the same time have one each, and after the
/// first few nothing is allocated.
pub(super) fn with_scratch<R>(f: impl FnOnce(&mut kernels::Scratch) -> R) -> R {
    static POOL: Mutex<Vec<kernels::Scratch>> = Mutex::new(Vec::new());
    let pool = || POOL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut scratch = pool().pop().unwrap_or_default();
    let result = f(&mut scratch);
    pool().push(scratch);
    result
}
