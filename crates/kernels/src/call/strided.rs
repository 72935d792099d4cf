//! Tensors of heads that lie in memory in any order.

use crate::{Error, Result};

/// A tensor `[batch, heads, tokens, channels]` whose channels lie side by side, and whose other axes lie anywhere: a view of what one
/// layer projected, tokens before heads, a part of something larger.
///
/// ```
/// use resolvent_kernels::Strided;
/// let projected = vec![0.0; 2 * 5 * 3 * 2 * 4]; // [batch, tokens, (q, k, v), heads, channels]
/// let keys = Strided { data: &projected[2 * 4..], batch_stride: 5 * 3 * 2 * 4, head_stride: 4, token_stride: 3 * 2 * 4 };
/// # let _ = keys;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Strided<D> {
    /// From the first element on.
    pub data: D,
    /// Elements from a batch element to the next. Not read where there is one.
    pub batch_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
    /// Elements from a token to the next.
    pub token_stride: usize,
}

impl<D> Strided<D> {
    /// `[batch, heads, tokens, channels]` in one piece, of the last three sizes.
    pub const fn heads_first(data: D, [heads, tokens, channels]: [usize; 3]) -> Self {
        let head_stride = tokens.saturating_mul(channels);
        Self { data, batch_stride: heads.saturating_mul(head_stride), head_stride, token_stride: channels }
    }

    /// `[batch, tokens, heads, channels]` in one piece, of the sizes of `[heads, tokens, channels]`.
    pub const fn tokens_first(data: D, [heads, tokens, channels]: [usize; 3]) -> Self {
        let token_stride = heads.saturating_mul(channels);
        Self { data, batch_stride: tokens.saturating_mul(token_stride), head_stride: channels, token_stride }
    }

    /// Steps along the axes of `sizes`, but for the channels.
    fn axes(&self, [batch, heads, tokens, _]: [usize; 4]) -> [(usize, usize); 3] {
        [(self.batch_stride, batch), (self.head_stride, heads), (self.token_stride, tokens)]
    }

    /// Whether `len` elements hold all of `[batch, heads, tokens, channels]`.
    fn check_len(&self, op: &'static str, tensor: &'static str, len: usize, sizes: [usize; 4]) -> Result<()> {
        let last = self
            .axes(sizes)
            .into_iter()
            .try_fold(sizes[3], |last, (stride, n)| last.checked_add(stride.checked_mul(n.saturating_sub(1))?));
        match last.unwrap_or(usize::MAX) {
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
    pub(crate) fn check(&self, op: &'static str, tensor: &'static str, sizes: [usize; 4]) -> Result<()> {
        self.check_len(op, tensor, self.data.len(), sizes)
    }
}

impl<T> Strided<&mut [T]> {
    /// Refuses strides that lead beyond the end, or to one element twice.
    pub(crate) fn check(&self, op: &'static str, tensor: &'static str, sizes: [usize; 4]) -> Result<()> {
        self.check_len(op, tensor, self.data.len(), sizes)?;
        let mut axes = self.axes(sizes);
        axes.sort_unstable();
        // What lies within one step of an axis: the channels, or all of the axes inside.
        let mut within = sizes[3];
        for (stride, n) in axes.into_iter().filter(|&(_, n)| n > 1) {
            if stride < within {
                let problem = "has strides that write elements twice; rows, heads and batch elements must lie apart";
                return Err(Error::Tensor { op, tensor, problem });
            }
            within += (n - 1) * stride;
        }
        Ok(())
    }

    /// The same memory for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Strided<&mut [T]> {
        Strided { data: self.data, ..*self }
    }
}
