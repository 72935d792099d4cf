//! The layer norm, on Flex in one pass forward and one backward.

use burn::{
    backend::{
        Autodiff, Backend, DType, Dispatch, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops},
        },
        backend_extension,
        flex::{Flex, FlexTensor},
        tensor::FloatTensor,
    },
    tensor::{Tensor, module},
};
use resolvent_layers as layers;

use super::{
    autodiff::{attach, register},
    plan::is_flex,
    rows::{contiguous, slice, tensor},
};

/// `gain (x - mean) / sqrt(variance + epsilon) + bias` over the last axis of `x [.., width]`, with `gain` and `bias [width]`. On
/// Flex in f32 by `resolvent_layers`, elsewhere Burn's own operation.
///
/// # Panics
/// If the sizes do not fit; if the environment asks for an instruction set that the processor lacks.
pub fn layer_norm<const D: usize>(x: Tensor<D>, gain: Tensor<1>, bias: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let [width] = gain.dims();
    assert_eq!(x.dims()[D - 1], width, "layer_norm: the last axis of x must be as wide as the gain");
    if is_flex(&x.device()) && [x.dtype(), gain.dtype(), bias.dtype()] == [DType::F32; 3] {
        let [x, gain, bias] = [x.into_dispatch(), gain.into_dispatch(), bias.into_dispatch()];
        return Tensor::from_dispatch(Dispatch::fused_layer_norm(x, gain, bias, epsilon));
    }
    // Sums of squares leave the range of half precision.
    match x.dtype() {
        half @ (DType::F16 | DType::BF16) => {
            let (x, gain, bias) = (x.cast(DType::F32), gain.cast(DType::F32), bias.cast(DType::F32));
            layer_norm(x, gain, bias, epsilon).cast(half)
        }
        _ => module::layer_norm(x, gain, Some(bias), epsilon),
    }
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedLayerNorm: Backend {
    /// See [`layer_norm`].
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// A backend that has the kernel of the gradients too.
pub trait LayerNormKernel: FusedLayerNorm {
    /// The gradients of x, gain and bias.
    fn fused_layer_norm_backward(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3];
}

impl FusedLayerNorm for Flex {
    fn fused_layer_norm(x: FlexTensor, gain: FlexTensor, bias: FlexTensor, epsilon: f64) -> FlexTensor {
        let [x, gain, bias] = [x, gain, bias].map(contiguous);
        let out = layers::layer_norm(slice(&x), slice(&gain), slice(&bias), epsilon as f32);
        tensor(out.unwrap_or_else(|e| panic!("layer norm: {e}")), x.shape())
    }
}

impl LayerNormKernel for Flex {
    fn fused_layer_norm_backward(x: FlexTensor, gain: FlexTensor, dout: FlexTensor, epsilon: f64) -> [FlexTensor; 3] {
        let [x, gain, dout] = [x, gain, dout].map(contiguous);
        let layers::LayerNormGradients { dx, dgain, dbias } =
            layers::layer_norm_backward(slice(&x), slice(&gain), slice(&dout), epsilon as f32)
                .unwrap_or_else(|e| panic!("layer norm: {e}"));
        [tensor(dx, x.shape()), tensor(dgain, gain.shape()), tensor(dbias, gain.shape())]
    }
}

/// Saves input and gain; recomputes mean and variance.
#[derive(Debug)]
struct LayerNormBackward;

impl<B: LayerNormKernel> Backward<B, 3> for LayerNormBackward {
    type State = ([NodeId; 2], f64);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let (saved, epsilon) = ops.state;
        let [x, gain] = saved.map(|id| checkpointer.retrieve_node_output(id));
        let gradients = B::fused_layer_norm_backward(x, gain, dout, epsilon).map(Some);
        register::<B, 3>(grads, ops.parents.map(|node| node.map(|node| node.id)), gradients);
    }
}

impl<B: LayerNormKernel, C: CheckpointStrategy> FusedLayerNorm for Autodiff<B, C> {
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let [own_x, own_gain, own_bias] = [&x, &gain, &bias].map(|x| x.primitive().clone());
        let out = B::fused_layer_norm(own_x, own_gain, own_bias, epsilon);
        attach::<B, C, _, 3, 2>(LayerNormBackward, [&x, &gain, &bias], [&x, &gain], out, |saved| (saved, epsilon))
    }
}
