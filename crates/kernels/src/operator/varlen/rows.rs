//! Rows of one sequence: read into one piece of memory, and written back to where they lie.

use std::ops::Range;

use crate::{Element, Strided, parallel::Parts};

/// Where a sequence's rows lie, and how many heads of queries each of their heads serves.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub tokens: Range<usize>,
    pub heads: usize,
    pub serves: usize,
    pub channels: usize,
}

impl Rows {
    /// Writes `[heads * serves, tokens, channels]`.
    pub fn gather<T: Element>(&self, from: &Strided<&[T]>, into: &mut [f32]) {
        let of_head = |head: usize| self.tokens.clone().map(move |token| (head / self.serves, token));
        let rows = (0..self.heads * self.serves).flat_map(of_head);
        for (into, (head, token)) in into.chunks_exact_mut(self.channels).zip(rows) {
            let row = &from.data[from.row(head, token)..][..self.channels];
            into.iter_mut().zip(row).for_each(|(into, x)| *into = x.widen());
        }
    }

    /// Writes the sum over the heads that each serves, from the first on, of `each [heads * serves, tokens, channels]`.
    ///
    /// # Safety
    /// Nobody else reads or writes the rows meanwhile, no two of which may overlap.
    pub unsafe fn scatter<T: Element>(&self, each: &mut [f32], into: &Target<'_, T>) {
        let head_len = self.tokens.len() * self.channels;
        for (head, each) in each.chunks_exact_mut(self.serves * head_len).enumerate() {
            let (sums, others) = each.split_at_mut(head_len);
            for other in others.chunks_exact(head_len) {
                sums.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
            }
            for (row, token) in sums.chunks_exact(self.channels).zip(self.tokens.clone()) {
                let at = head * into.head_stride + token * into.token_stride;
                // SAFETY: the caller's.
                let out = unsafe { into.parts.part(at..at + self.channels) };
                out.iter_mut().zip(row).for_each(|(out, x)| *out = T::narrow(*x));
            }
        }
    }
}

/// A tensor whose rows are written by several threads.
pub(super) struct Target<'a, T> {
    parts: Parts<'a, T>,
    head_stride: usize,
    token_stride: usize,
}

impl<'a, T> Target<'a, T> {
    pub fn new(tensor: Strided<&'a mut [T]>) -> Self {
        let Strided { data, head_stride, token_stride } = tensor;
        Self { parts: Parts::new(data), head_stride, token_stride }
    }
}
