//! Tensors of a storage type as f32, in which everything is computed.

use std::borrow::Cow;

use crate::Element;

/// f32 elements of scratch that a tensor of `T` needs: none when it is f32 already.
pub(super) fn widened<T: Element>(x: &[T]) -> usize {
    if T::NAME == f32::NAME { 0 } else { x.len() }
}

/// `x` as f32: itself, or widened into `buffer`.
pub(super) fn widen<'a, T: Element>(x: &'a [T], buffer: &'a mut [f32]) -> &'a [f32] {
    if T::NAME == f32::NAME {
        return bytemuck::cast_slice(x);
    }
    buffer.iter_mut().zip(x).for_each(|(r, x)| *r = x.widen());
    buffer
}

/// `x` as f32: itself, or a copy.
pub(super) fn as_f32<T: Element>(x: &[T]) -> Cow<'_, [f32]> {
    match bytemuck::try_cast_slice(x) {
        Ok(x) if T::NAME == f32::NAME => Cow::Borrowed(x),
        _ => Cow::Owned(x.iter().map(|x| x.widen()).collect()),
    }
}

pub(super) fn narrow<T: Element>(x: &[f32], out: &mut [T]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = T::narrow(*x));
}
