//! Tensors of heads that lie in memory in any order.

use crate::{Error, Result};

/// A tensor `[heads, tokens, channels]` whose channels lie side by side, and whose heads and tokens lie anywhere: a view of what one
/// layer projected, tokens before heads, a part of something larger.
///
/// ```
/// use resolvent_kernels::Strided;
/// let projected = vec![0.0; 5 * 3 * 2 * 4]; // [tokens, (q, k, v), heads, channels]
/// let keys = Strided { data: &projected[2 * 4..], head_stride: 4, token_stride: 3 * 2 * 4 };
/// # let _ = keys;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Strided<D> {
    /// From the first element on.
    pub data: D,
    /// Elements from a head to the next.
    pub head_stride: usize,
    /// Elements from a token to the next.
    pub token_stride: usize,
}

impl<D> Strided<D> {
    /// `[heads, tokens, channels]` in one piece.
    pub const fn heads_first(data: D, tokens: usize, channels: usize) -> Self {
        Self { data, head_stride: tokens * channels, token_stride: channels }
    }

    /// `[tokens, heads, channels]` in one piece.
    pub const fn tokens_first(data: D, heads: usize, channels: usize) -> Self {
        Self { data, head_stride: channels, token_stride: heads * channels }
    }

    /// The place of the first channel.
    pub(crate) const fn row(&self, head: usize, token: usize) -> usize {
        head * self.head_stride + token * self.token_stride
    }

    /// Whether `len` elements hold all of `[heads, tokens, channels]`.
    fn check_len(&self, op: &'static str, tensor: &'static str, len: usize, sizes: [usize; 3]) -> Result<()> {
        let [heads, tokens, channels] = sizes;
        let along = |n: usize, stride: usize| n.saturating_sub(1).checked_mul(stride);
        let last = along(heads, self.head_stride).zip(along(tokens, self.token_stride));
        let end = last.and_then(|(head, token)| head.checked_add(token)?.checked_add(channels));
        match end.unwrap_or(usize::MAX) {
            end if end <= len => Ok(()),
            expected => {
                let remedy = "the strides lead beyond the tensor's end";
                Err(Error::Length { op, tensor, got: len, expected, remedy })
            }
        }
    }
}

impl<T> Strided<&[T]> {
    /// Refuses strides that lead beyond the end.
    pub(crate) fn check(&self, op: &'static str, tensor: &'static str, sizes: [usize; 3]) -> Result<()> {
        self.check_len(op, tensor, self.data.len(), sizes)
    }
}

impl<T> Strided<&mut [T]> {
    /// Refuses strides that lead beyond the end, or to one element twice.
    pub(crate) fn check(&self, op: &'static str, tensor: &'static str, sizes: [usize; 3]) -> Result<()> {
        self.check_len(op, tensor, self.data.len(), sizes)?;
        let [heads, tokens, channels] = sizes;
        let mut axes = [(self.head_stride, heads), (self.token_stride, tokens)];
        axes.sort_unstable();
        let [inner, outer] = axes;
        // What lies within one step of an axis: the channels, or all of the axis inside.
        let within = (inner.1 - 1) * inner.0 + channels;
        let apart = |(stride, n): (usize, usize), least: usize| n == 1 || stride >= least;
        if apart(inner, channels) && apart(outer, within) {
            return Ok(());
        }
        let problem = "has strides that write elements twice; rows and heads must lie apart";
        Err(Error::Tensor { op, tensor, problem })
    }

    /// The same memory for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Strided<&mut [T]> {
        Strided { data: self.data, head_stride: self.head_stride, token_stride: self.token_stride }
    }
}
