//! The linear layer, on Flex with its bias added while the product lies in the cache, and one pass per gradient.

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
    nn::Linear,
    tensor::{Tensor, module},
};
use resolvent_layers as layers;

use super::{
    autodiff::{attach, register},
    plan::is_flex,
    rows::{contiguous, slice, tensor},
};

/// `x W + b` for `x [.., inputs]`, `weight [inputs, outputs]` and `bias [outputs]`, none where `None`. On Flex in f32 by the
/// kernels, elsewhere by Burn's own operation.
///
/// # Panics
/// If the sizes do not fit, as Burn's own layer does.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    let wide = bias.as_ref().is_none_or(|bias| bias.dtype() == DType::F32);
    if is_flex(&x.device()) && [x.dtype(), weight.dtype()] == [DType::F32; 2] && wide {
        let [_, outputs] = weight.dims();
        let bias = bias.unwrap_or_else(|| Tensor::zeros([outputs], &weight.device()));
        let [x, weight, bias] = [x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch()];
        return Tensor::from_dispatch(Dispatch::fused_linear(x, weight, bias));
    }
    module::linear(x, weight, bias)
}

/// A layer of a model, by [`linear`].
///
/// # Panics
/// As [`linear`].
pub(crate) fn linear_layer<const D: usize>(layer: &Linear, x: Tensor<D>) -> Tensor<D> {
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()))
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedLinear: Backend {
    /// See [`linear`].
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// A backend that has the kernels of the gradients too.
pub trait LinearKernel: FusedLinear {
    /// The gradients of x, weight and bias that are `wanted`.
    fn fused_linear_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3];
}

/// Rows of `x [.., inputs]`.
pub(super) fn rows(x: &FlexTensor, [inputs, _]: [usize; 2]) -> usize {
    let shape = x.shape();
    let [last] = shape.as_slice()[shape.num_dims() - 1..] else { unreachable!("a tensor has an axis") };
    assert_eq!(last, inputs, "linear: the last axis of x must be the inputs of the weight");
    shape.as_slice()[..shape.num_dims() - 1].iter().product()
}

impl FusedLinear for Flex {
    fn fused_linear(x: FlexTensor, weight: FlexTensor, bias: FlexTensor) -> FlexTensor {
        let [x, weight, bias] = [x, weight, bias].map(contiguous);
        let sizes: [usize; 2] = weight.shape().dims();
        let out = layers::linear(rows(&x, sizes), slice(&x), slice(&weight), slice(&bias));
        let mut shape = x.shape();
        let last = shape.num_dims() - 1;
        shape[last] = sizes[1];
        tensor(out, shape)
    }
}

impl LinearKernel for Flex {
    fn fused_linear_backward(
        x: FlexTensor,
        weight: FlexTensor,
        dout: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [x, weight, dout] = [x, weight, dout].map(contiguous);
        let sizes: [usize; 2] = weight.shape().dims();
        let layers::LinearGradients { dx, dweight, dbias } =
            layers::linear_backward(rows(&x, sizes), slice(&x), slice(&weight), slice(&dout), sizes[1], wanted);
        [
            dx.map(|dx| tensor(dx, x.shape())),
            dweight.map(|dweight| tensor(dweight, sizes)),
            dbias.map(|dbias| tensor(dbias, [sizes[1]])),
        ]
    }
}

/// Saves input and weight.
#[derive(Debug)]
struct LinearBackward;

impl<B: LinearKernel> Backward<B, 3> for LinearBackward {
    type State = [NodeId; 2];

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let [x, weight] = ops.state.map(|id| checkpointer.retrieve_node_output(id));
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        let gradients = B::fused_linear_backward(x, weight, dout, parents.map(|node| node.is_some()));
        register::<B, 3>(grads, parents, gradients);
    }
}

impl<B: LinearKernel, C: CheckpointStrategy> FusedLinear for Autodiff<B, C> {
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        let out = B::fused_linear(x.primitive().clone(), weight.primitive().clone(), bias.primitive().clone());
        attach::<B, C, _, 3, 2>(LinearBackward, [&x, &weight, &bias], [&x, &weight], out, |saved| saved)
    }
}
