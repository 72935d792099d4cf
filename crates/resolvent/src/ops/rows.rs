//! Tensors of Flex as the kernels take them: in one piece, or rows of channels that lie anywhere.

use burn::{
    backend::flex::{FlexTensor, Layout},
    tensor::{Bytes, Shape},
};
use resolvent_kernels::Strided;

use super::fused::Storage;

/// The same tensor in one piece of memory; a copy only if it is strided.
pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The same tensor with channels side by side; a copy only if they are not.
pub(super) fn in_rows(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let (strides, sizes) = (layout.strides(), layout.shape());
    let apart = strides.len() != 4 || strides.iter().any(|&stride| stride < 0) || strides[3] != 1 && sizes[3] > 1;
    if apart { contiguous(tensor) } else { tensor }
}

/// The rows of a tensor of [`in_rows`].
pub(super) fn rows<T: Storage>(tensor: &FlexTensor) -> Strided<&[T]> {
    let layout = tensor.layout();
    strided(&tensor.storage::<T>()[layout.start_offset()..], layout)
}

/// `[batch, heads, tokens, channels]` as a layout has it.
pub(super) fn strided<D>(data: D, layout: &Layout) -> Strided<D> {
    let [batch_stride, head_stride, token_stride] = [0, 1, 2].map(|axis| layout.strides()[axis].unsigned_abs());
    Strided { data, batch_stride, head_stride, token_stride }
}

/// `[batch, heads, tokens, channels]` that lies as `[batch, tokens, heads, channels]`.
pub(super) fn tokens_first([batch, heads, tokens, channels]: [usize; 4]) -> Layout {
    Layout::contiguous(Shape::from([batch, tokens, heads, channels])).transpose(1, 2)
}

/// Whether heads lie within tokens.
pub(super) fn is_tokens_first(layout: &Layout) -> bool {
    !layout.is_contiguous() && layout.num_dims() == 4 && layout.strides()[1] < layout.strides()[2]
}

pub(super) fn slice<T: Storage>(tensor: &FlexTensor) -> &[T] {
    tensor.as_slice().expect("the storage type is checked and the memory contiguous")
}

pub(super) fn tensor<T: Storage>(data: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape.into()), T::dtype())
}
