//! How a long row of tokens is cut: into tiles, which are what threads share out, and within a tile into blocks, which
//! are what stays in the first-level cache. Both depend on the sizes alone, so sums do not depend on the threads.

use std::ops::Range;

use super::linear::token_rows_mut;
use crate::simd::{
    Level,
    rows::{self, Store},
    stream::fence,
};

/// Tokens of one tile: some microseconds of work, so that handing it to a thread costs little beside it.
pub(super) const TILE: usize = 1024;

/// Most tokens of one block, and so the length of a buffer with one number per token.
pub(super) const BLOCK: usize = 256;

/// Channels of one tensor's block: 16 KiB, so that the blocks of two tensors fit a 48 KiB first-level cache.
const BLOCK_CHANNELS: usize = 4096;

/// One number per token of a block.
pub(super) type PerToken = [f32; BLOCK];

/// Weights that sum.
pub(super) const ONES: PerToken = [1.0; BLOCK];

/// The blocks of a tile whose rows have at most `dim` channels.
pub(super) fn blocks(tile: Range<usize>, dim: usize) -> impl Iterator<Item = Range<usize>> {
    let rows = (BLOCK_CHANNELS / dim).clamp(8, BLOCK);
    tile.clone().step_by(rows).map(move |start| start..(start + rows).min(tile.end))
}

/// The maximal runs of tokens of `block` that `keep` keeps, relative to the block's start. Kernels are called run by
/// run, so that nothing of a masked token is ever read.
pub(super) fn runs(block: Range<usize>, keep: impl Fn(usize) -> bool) -> impl Iterator<Item = Range<usize>> {
    let (base, end) = (block.start, block.end);
    let mut next = base;
    std::iter::from_fn(move || {
        let start = (next..end).find(|&j| keep(j))?;
        next = (start..end).find(|&j| !keep(j)).unwrap_or(end);
        Some(start - base..next - base)
    })
}

/// Buffers that are cut along with a range of items: `wide` per started `grain` of items, `rows` per item. A buffer may
/// be empty, and then is so for every part.
pub(super) struct Buffers<'a, const N: usize> {
    /// Numbers per grain, and the buffer.
    pub wide: (usize, &'a mut [f64]),
    /// Numbers per item, and the buffer.
    pub rows: [(usize, &'a mut [f32]); N],
}

impl<const N: usize> Buffers<'_, N> {
    fn split(self, grains: usize, items: usize) -> (Self, Self) {
        let (width, wide) = self.wide;
        let (wide_a, wide_b) = wide.split_at_mut((width * grains).min(wide.len()));
        let mut tails = self.rows.each_ref().map(|&(width, _)| (width, <&mut [f32]>::default()));
        let mut tail = tails.iter_mut();
        let heads = self.rows.map(|(width, rows)| {
            let (a, b) = rows.split_at_mut((width * items).min(rows.len()));
            if let Some(tail) = tail.next() {
                tail.1 = b;
            }
            (width, a)
        });
        (Self { wide: (width, wide_a), rows: heads }, Self { wide: (width, wide_b), rows: tails })
    }
}

/// Calls `work` for every grain of `items` with its part of the buffers, on all threads of the pool. What `work` streamed
/// is in order afterwards.
pub(super) fn parallel<const N: usize>(
    items: Range<usize>,
    grain: usize,
    buffers: Buffers<'_, N>,
    work: &(impl Fn(Range<usize>, Buffers<'_, N>) + Sync),
) {
    let grains = items.len().div_ceil(grain);
    if grains <= 1 {
        work(items, buffers);
        return fence();
    }
    let middle = grains / 2;
    let (left, right) = buffers.split(middle, middle * grain);
    let cut = items.start + middle * grain;
    rayon::join(|| parallel(items.start..cut, grain, left, work), || parallel(cut..items.end, grain, right, work));
}

/// Lets `tile` add the share of every tile of `tokens` to its own `width` sums, along with its rows of the buffers, and
/// returns the totals. They are added in the order of the tiles.
pub(super) fn sum_tiles<'p, const N: usize>(
    tokens: usize,
    width: usize,
    partial: &'p mut [f64],
    rows: [(usize, &mut [f32]); N],
    tile: &(impl Fn(Range<usize>, &mut [f64], [&mut [f32]; N]) + Sync),
) -> &'p mut [f64] {
    let partial = &mut partial[..partial_len(tokens, width)];
    partial.fill(0.0);
    let buffers = Buffers { wide: (width, &mut *partial), rows };
    parallel(0..tokens, TILE, buffers, &|range, part: Buffers<'_, N>| {
        tile(range, part.wide.1, part.rows.map(|(_, rows)| rows));
    });
    let (total, rest) = partial.split_at_mut(width);
    for part in rest.chunks_exact(width) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
    total
}

/// f64 that [`sum_tiles`] needs for `tokens` and `width` sums; without tokens, those of the empty tile.
pub(super) const fn partial_len(tokens: usize, width: usize) -> usize {
    if tokens == 0 { width } else { tokens.div_ceil(TILE) * width }
}

/// `into_j = w_j y` for the tokens of `block` that `keep` keeps, as `store` says; the others' rows become 0, or stay
/// where rows are added to.
pub(super) fn write_outer(
    level: Level,
    block: &Range<usize>,
    keep: impl Fn(usize) -> bool + Copy,
    w: &PerToken,
    y: &[f32],
    into: &mut [f32],
    store: Store,
) {
    if store != Store::Add {
        for gap in runs(block.clone(), |j| !keep(j)) {
            token_rows_mut(into, y.len(), gap).fill(0.0);
        }
    }
    for run in runs(block.clone(), keep) {
        rows::outer(level, &w[run.clone()], y, token_rows_mut(into, y.len(), run), store);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_maximal_and_relative() {
        let keep = [false, true, true, false, true];
        assert_eq!(runs(10..15, |j| keep[j - 10]).collect::<Vec<_>>(), [1..3, 4..5]);
        assert_eq!(runs(10..15, |_| false).count(), 0);
        assert!(runs(10..15, |_| true).eq(std::iter::once(0..5)));
    }

    #[test]
    fn tiles_cover_every_token_once_and_in_order() {
        let tokens = 2 * TILE + 7;
        let mut rows = vec![f32::NAN; tokens * 2];
        let mut partial = vec![f64::NAN; partial_len(tokens, 1)];
        let total = sum_tiles(tokens, 1, &mut partial, [(2, &mut rows), (3, &mut [])], &|tile, sum, [rows, none]| {
            assert!(none.is_empty() && rows.len() == 2 * tile.len());
            rows.chunks_mut(2).zip(tile.clone()).for_each(|(row, j)| row.fill(j as f32));
            sum[0] += tile.map(|j| j as f64).sum::<f64>();
        });
        assert_eq!(total[0], (tokens * (tokens - 1) / 2) as f64);
        assert!(rows.chunks(2).enumerate().all(|(j, row)| row == [j as f32; 2]));
    }
}
