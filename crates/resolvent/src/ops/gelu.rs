//! The exact GELU, vectorised on Flex.

use std::f64::consts::FRAC_1_SQRT_2;

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
    tensor::Tensor,
};
use resolvent_layers as layers;

use super::{
    autodiff::attach,
    plan::is_flex,
    rows::{contiguous, slice, tensor},
};

/// `x Phi(x)`, element by element, with its exact derivative. On Flex in f32 by `resolvent_layers`, elsewhere by Burn's error
/// function.
///
/// # Panics
/// If the environment asks for an instruction set that the processor lacks.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.dtype() == DType::F32 && is_flex(&x.device()) {
        return Tensor::from_dispatch(Dispatch::fused_gelu(x.into_dispatch()));
    }
    composed_gelu(x)
}

/// [`gelu`] out of tensor operations. Burn's own gelu has the exact value too, but on most backends the derivative of the
/// tanh approximation, which is off by up to 3e-4.
pub(super) fn composed_gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let twice = (x.clone() * FRAC_1_SQRT_2).erf() + 1.0;
    x * twice * 0.5
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedGelu: Backend {
    /// `x Phi(x)`.
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// A backend that has the kernel of the gradient too.
pub trait GeluKernel: FusedGelu {
    /// `dout (Phi(x) + x Phi'(x))`.
    fn fused_gelu_backward(x: FloatTensor<Self>, dout: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl FusedGelu for Flex {
    fn fused_gelu(x: FlexTensor) -> FlexTensor {
        let x = contiguous(x);
        tensor(layers::gelu(slice(&x)).unwrap_or_else(|e| panic!("gelu: {e}")), x.shape())
    }
}

impl GeluKernel for Flex {
    fn fused_gelu_backward(x: FlexTensor, dout: FlexTensor) -> FlexTensor {
        let (x, dout) = (contiguous(x), contiguous(dout));
        let dx = layers::gelu_backward(slice(&x), slice(&dout)).unwrap_or_else(|e| panic!("gelu: {e}"));
        tensor(dx, x.shape())
    }
}

/// Saves the input; recomputes the normal distribution.
#[derive(Debug)]
struct GeluBackward;

impl<B: GeluKernel> Backward<B, 1> for GeluBackward {
    type State = NodeId;

    fn backward(self, ops: Ops<NodeId, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let x = checkpointer.retrieve_node_output(ops.state);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::fused_gelu_backward(x, dout));
        }
    }
}

impl<B: GeluKernel, C: CheckpointStrategy> FusedGelu for Autodiff<B, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let out = B::fused_gelu(x.primitive().clone());
        attach::<B, C, _, 1, 1>(GeluBackward, [&x], [&x], out, |[x]| x)
    }
}
