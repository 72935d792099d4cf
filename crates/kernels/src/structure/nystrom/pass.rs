//! How work is shared out: over batch elements, heads and ranges of their tokens.

use std::ops::Range;

use crate::{
    parallel::{for_each_item, workers},
    scratch::scratch_len,
};

/// Tokens of one tile: with 64 landmarks its similarities (16 KiB) and their gradients fit a 48 KiB L1; with 1024 they
/// still fit a 2 MiB L2.
pub(crate) const TOKENS: usize = 64;
/// Tasks that a call is split into where batch and heads are fewer. A constant, lest results depend on the machine.
const TASKS: usize = 16;

/// Ranges that `tokens` tokens of each of `slices` batch elements and heads are split into.
pub(crate) fn splits(slices: usize, tokens: usize) -> usize {
    TASKS.div_ceil(slices).min(tokens.div_ceil(4 * TOKENS)).max(1)
}

/// A range of the tokens of one batch element and head.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub slice: usize,
    pub tokens: Range<usize>,
}

impl Part {
    /// The range's tiles.
    pub fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = self.tokens.end;
        self.tokens.clone().step_by(TOKENS).map(move |from| from..(from + TOKENS).min(end))
    }

    /// Where a tile's rows of `dim` elements lie among the range's.
    pub fn within(&self, tile: &Range<usize>, dim: usize) -> Range<usize> {
        (tile.start - self.tokens.start) * dim..(tile.end - self.tokens.start) * dim
    }

    /// Where the range's rows of `dim` elements lie in a tensor of `seq` tokens.
    pub fn rows(&self, seq: usize, dim: usize) -> Range<usize> {
        (self.slice * seq + self.tokens.start) * dim..(self.slice * seq + self.tokens.end) * dim
    }
}

/// f32 of working memory of a pass with `memory` per part.
pub(crate) fn work(slices: usize, tokens: usize, memory: usize) -> usize {
    workers(slices * splits(slices, tokens)) * scratch_len([memory])
}

/// Runs `task(item, memory)` for every item, with at least `memory` f32 for each worker.
pub(crate) fn share<T: Send>(
    items: impl Iterator<Item = T> + Send,
    work: &mut [f32],
    memory: usize,
    task: impl Fn(T, &mut [f32]) + Sync,
) {
    for_each_item(items, work, scratch_len([memory]), task);
}

/// The parts of `slices` times `tokens`, in their order.
pub(crate) fn of_tokens(slices: usize, tokens: usize) -> impl Iterator<Item = Part> + Send {
    let splits = splits(slices, tokens);
    let share = tokens.div_ceil(TOKENS).div_ceil(splits) * TOKENS;
    (0..slices * splits).map(move |index| {
        let (slice, split) = (index / splits, index % splits);
        Part { slice, tokens: (split * share).min(tokens)..((split + 1) * share).min(tokens) }
    })
}

/// The rows of `x [slices, tokens, dim]` that belong to each of [`of_tokens`].
pub(crate) fn rows_of<T: Send>(
    x: &mut [T],
    slices: usize,
    tokens: usize,
    dim: usize,
) -> impl Iterator<Item = &mut [T]> + Send {
    let mut rest = x;
    of_tokens(slices, tokens).map(move |part| {
        let (rows, behind) = std::mem::take(&mut rest).split_at_mut(part.tokens.len() * dim);
        rest = behind;
        rows
    })
}
