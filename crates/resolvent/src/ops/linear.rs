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
use resolvent_kernels::Precision;
use resolvent_layers::{self as layers, bf16::Bf16Layers};

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
    linear_in(Precision::Full, x, weight, bias)
}

/// As [`linear`], with products of this precision. Where Burn's own operation is used, it is that of the tensors: who asks for less checks
/// that they are for the kernels.
///
/// # Panics
/// As [`linear`]; in bf16 if the environment asks for an instruction set that the processor lacks.
pub(crate) fn linear_in<const D: usize>(
    precision: Precision,
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let wide = bias.as_ref().is_none_or(|bias| bias.dtype() == DType::F32);
    if is_flex(&x.device()) && [x.dtype(), weight.dtype()] == [DType::F32; 2] && wide {
        let [_, outputs] = weight.dims();
        let bias = bias.unwrap_or_else(|| Tensor::zeros([outputs], &weight.device()));
        let [x, weight, bias] = [x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch()];
        return Tensor::from_dispatch(Dispatch::fused_linear(x, weight, bias, precision));
    }
    module::linear(x, weight, bias)
}

/// A layer of a model, by [`linear_in`].
///
/// # Panics
/// As [`linear_in`].
pub(crate) fn linear_layer<const D: usize>(precision: Precision, layer: &Linear, x: Tensor<D>) -> Tensor<D> {
    linear_in(precision, x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()))
}

/// What multiplies in bf16, where that is asked for.
///
/// # Panics
/// If the environment asks for an instruction set that the processor lacks.
pub(super) fn bf16_layers(precision: Precision) -> Option<Bf16Layers> {
    (precision == Precision::Bf16).then(|| Bf16Layers::selected().unwrap_or_else(|e| panic!("products of bf16: {e}")))
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedLinear: Backend {
    /// See [`linear`].
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self>;
}

/// A backend that has the kernels of the gradients too.
pub trait LinearKernel: FusedLinear {
    /// The gradients of x, weight and bias that are `wanted`.
    fn fused_linear_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        wanted: [bool; 3],
        precision: Precision,
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
    fn fused_linear(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, precision: Precision) -> FlexTensor {
        let [x, weight, bias] = [x, weight, bias].map(contiguous);
        let sizes: [usize; 2] = weight.shape().dims();
        let (rows, values, weight, bias) = (rows(&x, sizes), slice(&x), slice(&weight), slice(&bias));
        let out = match bf16_layers(precision) {
            Some(bf16) => bf16.linear(rows, values, weight, bias),
            None => layers::linear(rows, values, weight, bias),
        };
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
        precision: Precision,
    ) -> [Option<FlexTensor>; 3] {
        let [x, weight, dout] = [x, weight, dout].map(contiguous);
        let sizes: [usize; 2] = weight.shape().dims();
        let (rows, values, weight, dout) = (rows(&x, sizes), slice(&x), slice(&weight), slice(&dout));
        let layers::LinearGradients { dx, dweight, dbias } = match bf16_layers(precision) {
            Some(bf16) => bf16.linear_backward(rows, values, weight, dout, sizes[1], wanted),
            None => layers::linear_backward(rows, values, weight, dout, sizes[1], wanted),
        };
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
    type State = ([NodeId; 2], Precision);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let (saved, precision) = ops.state;
        let [x, weight] = saved.map(|id| checkpointer.retrieve_node_output(id));
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        let gradients = B::fused_linear_backward(x, weight, dout, parents.map(|node| node.is_some()), precision);
        register::<B, 3>(grads, parents, gradients);
    }
}

impl<B: LinearKernel, C: CheckpointStrategy> FusedLinear for Autodiff<B, C> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        let [of_x, of_weight, of_bias] = [&x, &weight, &bias].map(|tensor| tensor.primitive().clone());
        let out = B::fused_linear(of_x, of_weight, of_bias, precision);
        attach::<B, C, _, 3, 2>(LinearBackward, [&x, &weight, &bias], [&x, &weight], out, |saved| (saved, precision))
    }
}
