//! The tensors of a call as structures read and write them: rows of channels, by slice (batch element and head of the queries) and
//! token, wherever they lie.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::Strided;
use crate::{
    Element, Error, Result,
    parallel::{self, Parts},
};

/// Where the rows of a tensor lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// How many of them a head of the tensor serves.
    pub serves: usize,
    pub tokens: usize,
    pub channels: usize,
    /// The first element of the first row.
    first: usize,
    batch_stride: usize,
    head_stride: usize,
    token_stride: usize,
}

impl Layout {
    /// Of `tensor`, of which each of `[batch, heads, tokens, channels]` heads serves `serves`.
    pub fn of<D>(tensor: &Strided<D>, [batch, heads, tokens, channels]: [usize; 4], serves: usize) -> Self {
        let Strided { batch_stride, head_stride, token_stride, .. } = *tensor;
        Self {
            batch,
            heads: heads * serves,
            serves,
            tokens,
            channels,
            first: 0,
            batch_stride,
            head_stride,
            token_stride,
        }
    }

    /// Of `[slices, tokens, channels]` in one piece.
    pub fn in_one_piece(slices: usize, [tokens, channels]: [usize; 2]) -> Self {
        Self::of(&Strided::heads_first((), [slices, tokens, channels]), [1, slices, tokens, channels], 1)
    }

    /// The same of these tokens alone.
    pub fn part(self, tokens: Range<usize>) -> Self {
        let first = self.first + tokens.start * self.token_stride;
        Self { tokens: tokens.len(), first, ..self }
    }

    /// The same with its first row at `first`.
    pub fn from(self, first: usize) -> Self {
        Self { first, ..self }
    }

    pub fn slices(&self) -> usize {
        self.batch * self.heads
    }

    /// Elements of all slices.
    pub fn len(&self) -> usize {
        self.slices() * self.tokens * self.channels
    }

    /// Whether f32 can be written to a tensor of `T` itself.
    pub fn is_direct<T: Element>(&self, in_place: bool) -> bool {
        T::NAME == f32::NAME && (in_place || self.is_in_one_piece())
    }

    /// The place of a row's first channel.
    pub fn row(&self, slice: usize, token: usize) -> usize {
        let (batch, head) = (slice / self.heads, slice % self.heads / self.serves);
        self.first + batch * self.batch_stride + head * self.head_stride + token * self.token_stride
    }

    /// Whether rows follow each other without gaps, every slice its own.
    pub fn is_in_one_piece(&self) -> bool {
        let per_head = self.tokens * self.channels;
        let axes = [
            (self.tokens, self.token_stride, self.channels),
            (self.heads, self.head_stride, per_head),
            (self.batch, self.batch_stride, self.heads * per_head),
        ];
        self.serves == 1 && axes.into_iter().all(|(n, stride, dense)| n <= 1 || stride == dense)
    }
}

/// A tensor that is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a, T = f32> {
    data: &'a [T],
    layout: Layout,
}

impl<'a, T: Element> View<'a, T> {
    /// Of a tensor that was found to hold `layout`.
    pub fn new(data: &'a [T], layout: Layout) -> Self {
        Self { data, layout }
    }

    /// `[slices, tokens, channels]` in one piece.
    pub fn in_one_piece(data: &'a [T], slices: usize, sizes: [usize; 2]) -> Self {
        Self { data, layout: Layout::in_one_piece(slices, sizes) }
    }

    /// No slice.
    pub fn none() -> Self {
        Self::in_one_piece(&[], 0, [0; 2])
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The same of these tokens alone.
    pub fn part(self, tokens: Range<usize>) -> Self {
        Self { layout: self.layout.part(tokens), ..self }
    }

    pub fn row(&self, slice: usize, token: usize) -> &'a [T] {
        &self.data[self.layout.row(slice, token)..][..self.layout.channels]
    }

    /// The tokens of a slice.
    pub fn slice(&self, slice: usize) -> TokenRows<'a, T> {
        let Layout { tokens, channels, token_stride, .. } = self.layout;
        let data = if tokens == 0 { &[] } else { &self.data[self.layout.row(slice, 0)..] };
        TokenRows { data, tokens, channels, stride: token_stride }
    }

    /// All of it as it lies, where rows follow each other without gaps.
    pub fn as_slice(&self) -> Option<&'a [T]> {
        let layout = &self.layout;
        layout.is_in_one_piece().then(|| &self.data[layout.first.min(self.data.len())..][..layout.len()])
    }

    /// Elements of a buffer of f32 that is read in its place: none where it can be as it lies. Heads that are read in place stay shared.
    pub fn widened_len(&self, in_place: bool) -> usize {
        let layout = &self.layout;
        match T::NAME == f32::NAME {
            true if in_place || layout.is_in_one_piece() => 0,
            _ => layout.len() / if in_place { layout.serves } else { 1 },
        }
    }

    /// The tensor in f32: as it lies, or in a buffer of [`View::widened_len`].
    pub fn widened(&self, in_place: bool, buffer: &'a mut [f32]) -> View<'a> {
        let layout = self.layout;
        if let (true, Ok(data)) = (self.widened_len(in_place) == 0, bytemuck::try_cast_slice(self.data)) {
            return View { data, layout };
        }
        let (heads, serves) = if in_place { (layout.heads / layout.serves, layout.serves) } else { (layout.heads, 1) };
        let own = Self { layout: Layout { heads, serves: layout.serves / serves, ..layout }, ..*self };
        own.gather(buffer);
        let sizes = [layout.batch, heads, layout.tokens, layout.channels];
        let dense = Strided::heads_first((), [heads, layout.tokens, layout.channels]);
        View { data: buffer, layout: Layout::of(&dense, sizes, serves) }
    }

    /// Writes `[slices, tokens, channels]` in f32, every slice its own.
    pub fn gather(&self, into: &mut [f32]) {
        let Layout { tokens, channels, .. } = self.layout;
        if self.layout.len() == 0 {
            return;
        }
        parallel::each(into.chunks_mut(tokens * channels).enumerate(), |(slice, into)| {
            let rows = self.slice(slice);
            for (token, into) in into.chunks_exact_mut(channels).enumerate() {
                into.iter_mut().zip(rows.row(token)).for_each(|(into, x)| *into = x.widen());
            }
        });
    }
}

impl<'a> View<'a> {
    /// As [`View::as_slice`], for structures that are given nothing else.
    pub fn dense(&self) -> &'a [f32] {
        self.as_slice().expect("gathered for a structure that reads one piece")
    }
}

/// The tokens of one head: rows of channels, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenRows<'a, T = f32> {
    data: &'a [T],
    pub tokens: usize,
    pub channels: usize,
    stride: usize,
}

impl<'a, T> TokenRows<'a, T> {
    /// `[tokens, channels]` in one piece.
    pub fn in_one_piece(data: &'a [T], channels: usize) -> Self {
        Self { data, tokens: data.len() / channels.max(1), channels, stride: channels }
    }

    /// Rows of `channels`, `stride` apart.
    pub fn strided(data: &'a [T], channels: usize, stride: usize) -> Self {
        Self { data, tokens: data.len() / stride.max(1), channels, stride }
    }

    #[inline(always)]
    pub fn row(&self, token: usize) -> &'a [T] {
        &self.data[token * self.stride..][..self.channels]
    }

    pub fn rows(self) -> impl DoubleEndedIterator<Item = &'a [T]> + ExactSizeIterator {
        (0..self.tokens).map(move |token| self.row(token))
    }

    /// These tokens as they lie, where they follow each other without gaps.
    #[inline(always)]
    pub fn as_slice(&self, tokens: Range<usize>) -> Option<&'a [T]> {
        let dense = self.stride == self.channels || tokens.len() < 2;
        dense.then(|| &self.data[tokens.start * self.stride..][..tokens.len() * self.channels])
    }
}

/// A tensor that is written, no row of which overlaps another.
pub(crate) struct Target<'a, T = f32> {
    parts: Parts<'a, T>,
    layout: Layout,
}

impl<'a, T: Element> Target<'a, T> {
    /// Of a tensor whose strides were checked for `sizes`.
    pub fn new(tensor: Strided<&'a mut [T]>, sizes: [usize; 4]) -> Self {
        let layout = Layout::of(&tensor, sizes, 1);
        Self { parts: Parts::new(tensor.data), layout }
    }

    /// Some rows of a buffer.
    ///
    /// # Safety
    /// They do not overlap, and no other target that is alive at the same time has one of them.
    pub unsafe fn of_parts(parts: &'a Parts<'a, T>, layout: Layout) -> Self {
        Self { parts: parts.share(), layout }
    }

    /// `[slices, tokens, channels]` in one piece.
    pub fn in_one_piece(data: &'a mut [T], slices: usize, sizes: [usize; 2]) -> Self {
        Self { parts: Parts::new(data), layout: Layout::in_one_piece(slices, sizes) }
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// In one piece, of the sizes of `like`.
    pub fn like(data: &'a mut [T], like: &Layout) -> Self {
        Self::in_one_piece(data, like.slices(), [like.tokens, like.channels])
    }

    /// The tensor itself, where f32 is to be written as it lies.
    pub fn as_f32(&mut self, in_place: bool) -> Option<Target<'_>> {
        self.layout.is_direct::<T>(in_place).then(|| Target { parts: self.parts.share().cast(), layout: self.layout })
    }

    /// Elements of a buffer for the gradient of every head of the input `of`: none where `into` can take them itself.
    pub fn each_len(into: Option<&Self>, of: &Layout, in_place: bool) -> usize {
        let direct = of.serves == 1 && into.is_some_and(|into| into.layout.is_direct::<T>(in_place));
        if direct { 0 } else { of.len() }
    }

    /// Where the gradient of every head of the input `of` is written: to `into`, or to a buffer of [`Target::each_len`].
    pub fn each<'s>(into: Option<&'s mut Self>, of: &Layout, in_place: bool, buffer: &'s mut [f32]) -> Target<'s> {
        match into.filter(|_| of.serves == 1).and_then(|into| into.as_f32(in_place)) {
            Some(itself) => itself,
            None => Target::like(buffer, of),
        }
    }

    /// The same memory for a shorter time.
    pub fn reborrow(&mut self) -> Target<'_, T> {
        self.part_unchecked(0..self.layout.tokens)
    }

    /// Of these tokens alone.
    ///
    /// # Safety
    /// No two that are alive at the same time may have a token in common.
    pub unsafe fn part(&self, tokens: Range<usize>) -> Target<'_, T> {
        self.part_unchecked(tokens)
    }

    fn part_unchecked(&self, tokens: Range<usize>) -> Target<'_, T> {
        Target { parts: self.parts.share(), layout: self.layout.part(tokens) }
    }

    /// A row.
    ///
    /// # Safety
    /// Nobody else may read or write it meanwhile.
    #[allow(clippy::mut_from_ref)] // as of `Parts`
    #[inline(always)]
    pub unsafe fn row(&self, slice: usize, token: usize) -> &mut [T] {
        let at = self.layout.row(slice, token);
        // SAFETY: rows do not overlap; the caller's for one row.
        unsafe { self.parts.part(at..at + self.layout.channels) }
    }

    /// Runs `f(slice, token, row)` for every row, in parallel.
    pub fn for_each_row(&mut self, f: impl Fn(usize, usize, &mut [T]) + Sync) {
        /// Rows from which on another thread is worth it.
        const GRAIN: usize = 64;
        let (all, tokens) = (&*self, self.layout.tokens);
        let rows = all.layout.slices() * tokens;
        parallel::each((0..rows).step_by(GRAIN), |from| {
            for row in from..(from + GRAIN).min(rows) {
                let (slice, token) = (row / tokens, row % tokens);
                // SAFETY: every row is visited once, and `self` is borrowed for it alone.
                f(slice, token, unsafe { all.row(slice, token) });
            }
        });
    }

    /// Takes the numbers of `x`, in one piece, that are finite.
    pub fn take_finite(&mut self, x: &[T]) {
        let Layout { tokens, channels, .. } = self.layout;
        self.for_each_row(|slice, token, row| {
            let from = &x[(slice * tokens + token) * channels..][..channels];
            let finite = row.iter_mut().zip(from).filter(|(_, x)| x.widen().is_finite());
            finite.for_each(|(row, &x)| *row = x);
        });
    }

    /// Writes what the heads of queries have, `[batch, heads, tokens, channels]` in f32, `serves` of them summed, from the first on.
    ///
    /// # Errors
    /// [`Error::Overflow`] of `tensor` where numbers lead to what the storage type has no room for; all the same, everything is written.
    pub fn scatter(&mut self, tensor: &'static str, each: &[f32], serves: usize) -> Result<()> {
        /// Channels that are summed together.
        const WIDTH: usize = 16;
        let Layout { tokens, channels, .. } = self.layout;
        let row = |slice: usize, token: usize| &each[(slice * tokens + token) * channels..][..channels];
        let beyond = AtomicUsize::new(usize::MAX);
        self.for_each_row(|head, token, into| {
            for (c, into) in into.chunks_mut(WIDTH).enumerate() {
                let columns = c * WIDTH..c * WIDTH + into.len();
                let part = |n: usize| &row(head * serves + n, token)[columns.clone()];
                let mut sums = [0.0; WIDTH];
                sums[..into.len()].copy_from_slice(part(0));
                (1..serves).for_each(|n| sums.iter_mut().zip(part(n)).for_each(|(sum, x)| *sum += x));
                into.iter_mut().zip(sums).for_each(|(into, x)| *into = T::narrow(x));
                let lost = |n: usize| !into[n].widen().is_finite() && (0..serves).all(|of| part(of)[n].is_finite());
                if let Some(n) = (0..into.len()).find(|&n| lost(n)) {
                    beyond.fetch_min((head * tokens + token) * channels + c * WIDTH + n, Ordering::Relaxed);
                }
            }
        });
        match beyond.into_inner() {
            usize::MAX => Ok(()),
            index => Err(Error::Overflow { tensor, index }),
        }
    }

    /// All of it as it lies, where rows follow each other without gaps.
    pub fn as_slice(&mut self) -> Option<&mut [T]> {
        if !self.layout.is_in_one_piece() {
            return None;
        }
        let all = self.layout.first..self.layout.first + self.layout.len();
        // SAFETY: these are its own rows, all of them, and `self` is borrowed for them alone.
        Some(unsafe { self.parts.part(all) })
    }
}

impl Target<'_> {
    /// As [`Target::as_slice`], for structures that are given nothing else.
    pub fn dense(&mut self) -> &mut [f32] {
        self.as_slice().expect("gathered for a structure that writes one piece")
    }
}
