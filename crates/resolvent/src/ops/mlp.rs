//! The MLP of a transformer block, on Flex with its hidden layer in the cache.

use burn::{
    backend::{
        Autodiff, Backend, DType, Dispatch, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        flex::{Flex, FlexTensor},
        tensor::FloatTensor,
    },
    nn::Linear,
    tensor::Tensor,
};
use resolvent_kernels::Precision;
use resolvent_layers as layers;

use super::{
    autodiff::register,
    gelu::gelu,
    linear::{bf16_layers, linear_layer, rows},
    plan::is_flex,
    rows::{contiguous, slice, tensor},
};

/// `gelu(x W + b) W' + b'` for `x [.., inputs]`: two layers of a model with the exact GELU between them. On Flex in f32 by the
/// kernels, if both have a bias, elsewhere layer by layer; with products of this precision as [`super::linear_in`].
///
/// # Panics
/// If the sizes do not fit; if the environment asks for an instruction set that the processor lacks.
pub(crate) fn mlp<const D: usize>(precision: Precision, x: Tensor<D>, [first, second]: [&Linear; 2]) -> Tensor<D> {
    let f32s = |layer: &Linear| {
        layer.weight.dtype() == DType::F32 && layer.bias.as_ref().is_none_or(|bias| bias.dtype() == DType::F32)
    };
    let plain = is_flex(&x.device()) && x.dtype() == DType::F32 && f32s(first) && f32s(second);
    let (Some(bias_in), Some(bias_out), true) = (&first.bias, &second.bias, plain) else {
        return linear_layer(precision, second, gelu(linear_layer(precision, first, x)));
    };
    let [weight_in, weight_out] = [first, second].map(|layer| layer.weight.val().into_dispatch());
    let [bias_in, bias_out] = [bias_in, bias_out].map(|bias| bias.val().into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_mlp(x.into_dispatch(), weight_in, bias_in, weight_out, bias_out, precision))
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedMlp: Backend {
    /// See [`mlp`].
    fn fused_mlp(
        x: FloatTensor<Self>,
        weight_in: FloatTensor<Self>,
        bias_in: FloatTensor<Self>,
        weight_out: FloatTensor<Self>,
        bias_out: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self>;
}

/// A backend that has the kernels of the gradients too. Its tensors are input, weight, bias, weight and bias.
pub trait MlpKernel: FusedMlp {
    /// The result, and the hidden layer before the GELU.
    fn fused_mlp_kept(inputs: [FloatTensor<Self>; 5], precision: Precision) -> [FloatTensor<Self>; 2];

    /// The gradients of all inputs.
    fn fused_mlp_backward(
        inputs: [FloatTensor<Self>; 5],
        hidden: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        precision: Precision,
    ) -> [FloatTensor<Self>; 5];
}

impl FusedMlp for Flex {
    fn fused_mlp(
        x: FlexTensor,
        weight_in: FlexTensor,
        bias_in: FlexTensor,
        weight_out: FlexTensor,
        bias_out: FlexTensor,
        precision: Precision,
    ) -> FlexTensor {
        forward([x, weight_in, bias_in, weight_out, bias_out].map(contiguous), false, precision).0
    }
}

impl MlpKernel for Flex {
    fn fused_mlp_kept(inputs: [FlexTensor; 5], precision: Precision) -> [FlexTensor; 2] {
        let inputs = inputs.map(contiguous);
        let [_, width] = inputs[1].shape().dims();
        let rows = rows(&inputs[0], inputs[1].shape().dims());
        let (out, hidden) = forward(inputs, true, precision);
        [out, tensor(hidden, [rows, width])]
    }

    fn fused_mlp_backward(
        inputs: [FlexTensor; 5],
        hidden: FlexTensor,
        dout: FlexTensor,
        precision: Precision,
    ) -> [FlexTensor; 5] {
        let (inputs, dout) = (inputs.map(contiguous), contiguous(dout));
        let rows = rows(&inputs[0], inputs[1].shape().dims());
        let (x, hidden, weights, dout) = (slice(&inputs[0]), slice(&hidden), weights(&inputs), slice(&dout));
        let gradients = match bf16_layers(precision) {
            Some(bf16) => bf16.mlp_backward(rows, x, hidden, &weights, dout),
            None => layers::mlp_backward(rows, x, hidden, &weights, dout),
        };
        let layers::MlpGradients { dx, dweight_in, dbias_in, dweight_out, dbias_out } =
            gradients.unwrap_or_else(|e| panic!("mlp: {e}"));
        let mut gradients = [dx, dweight_in, dbias_in, dweight_out, dbias_out].into_iter();
        inputs.map(|input| tensor(gradients.next().expect("as many gradients as inputs"), input.shape()))
    }
}

fn weights([_, weight_in, bias_in, weight_out, bias_out]: &[FlexTensor; 5]) -> layers::MlpWeights<'_> {
    layers::MlpWeights {
        weight_in: slice(weight_in),
        bias_in: slice(bias_in),
        weight_out: slice(weight_out),
        bias_out: slice(bias_out),
    }
}

/// The result and the hidden layer, which is empty unless it is `kept`.
fn forward(inputs: [FlexTensor; 5], kept: bool, precision: Precision) -> (FlexTensor, Vec<f32>) {
    let x = &inputs[0];
    let rows = rows(x, inputs[1].shape().dims());
    let result = match bf16_layers(precision) {
        Some(bf16) => bf16.mlp(rows, slice(x), &weights(&inputs), kept),
        None => layers::mlp(rows, slice(x), &weights(&inputs), kept),
    };
    let (out, hidden) = result.unwrap_or_else(|e| panic!("mlp: {e}"));
    let mut shape = x.shape();
    let last = shape.num_dims() - 1;
    let [outputs] = inputs[4].shape().dims();
    shape[last] = outputs;
    (tensor(out, shape), hidden)
}

/// Saves the inputs and the hidden layer; recomputes what the GELU made of it.
#[derive(Debug)]
struct MlpBackward;

impl<B: MlpKernel> Backward<B, 5> for MlpBackward {
    type State = ([NodeId; 5], FloatTensor<B>, Precision);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let (inputs, hidden, precision) = ops.state;
        let inputs = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let gradients = B::fused_mlp_backward(inputs, hidden, dout, precision).map(Some);
        register::<B, 5>(grads, ops.parents.map(|node| node.map(|node| node.id)), gradients);
    }
}

impl<B: MlpKernel, C: CheckpointStrategy> FusedMlp for Autodiff<B, C> {
    fn fused_mlp(
        x: FloatTensor<Self>,
        weight_in: FloatTensor<Self>,
        bias_in: FloatTensor<Self>,
        weight_out: FloatTensor<Self>,
        bias_out: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        let inputs = [x, weight_in, bias_in, weight_out, bias_out];
        let nodes = [0, 1, 2, 3, 4].map(|n| inputs[n].node());
        match MlpBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prepared) => {
                let [out, hidden] =
                    B::fused_mlp_kept([0, 1, 2, 3, 4].map(|n| inputs[n].primitive().clone()), precision);
                let reads = [0, 1, 2, 3, 4].map(|n| prepared.checkpoint(&inputs[n]));
                prepared.finish((reads, hidden, precision), out)
            }
            OpsKind::UnTracked(prepared) => {
                let [x, weight_in, bias_in, weight_out, bias_out] =
                    [0, 1, 2, 3, 4].map(|n| inputs[n].primitive().clone());
                prepared.finish(B::fused_mlp(x, weight_in, bias_in, weight_out, bias_out, precision))
            }
        }
    }
}
