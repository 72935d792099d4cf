//! The kept tokens of every batch element and head, laid out for products.

use std::ops::Range;

use crate::{
    score::Metric,
    simd::{
        Level,
        product::{Left, Right, Size, Store},
    },
    structure::{
        dense::{Rows, padded},
        nystrom::tile::kernel,
    },
};

/// Columns of a tile: with 64 rows its 32 KiB of weights fit a 48 KiB L1.
pub(super) const BLOCK: usize = 128;

/// Rows without gaps, and blocks of them transposed, of a tensor `[slices, seq, dim]`.
#[derive(Clone, Copy)]
pub(super) struct Compact<'a> {
    /// `[slices, seq, stride]`, the kept rows first.
    pub rows: &'a [f32],
    /// `[slices, blocks, dim, BLOCK]`.
    pub blocks: &'a [f32],
    pub seq: usize,
    pub dim: usize,
}

/// f32 of [`Compact::rows`] and [`Compact::blocks`].
pub(super) fn sizes(slices: usize, seq: usize, dim: usize) -> [usize; 2] {
    [slices * seq * padded(dim), slices * seq.div_ceil(BLOCK) * dim * BLOCK]
}

/// Which tokens are kept, per batch element; how many heads share it.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub mask: Option<&'a [bool]>,
    pub heads: usize,
    pub seq: usize,
}

impl<'a> Kept<'a> {
    /// The kept tokens of a slice.
    pub fn tokens(self, slice: usize) -> impl Iterator<Item = usize> + 'a {
        let entry = self.mask.map(|mask| &mask[slice / self.heads * self.seq..][..self.seq]);
        (0..self.seq).filter(move |&i| entry.is_none_or(|entry| entry[i]))
    }

    pub fn count(self, slice: usize) -> usize {
        if self.mask.is_none() { self.seq } else { self.tokens(slice).count() }
    }
}

impl<'a> Compact<'a> {
    /// Gathers the kept rows of `x [slices, seq, dim]`; what is stored of an element of the `n`-th kept row of a slice is
    /// `entry([slice, n, channel], element)`.
    pub fn of(
        x: &[f32],
        dim: usize,
        kept: Kept<'_>,
        entry: impl Fn([usize; 3], f32) -> f32,
        [rows, blocks]: [&'a mut [f32]; 2],
    ) -> Self {
        let (seq, stride) = (kept.seq, padded(dim));
        rows.fill(0.0);
        blocks.fill(0.0);
        let per_slice = blocks.len() / (x.len() / (seq * dim));
        for slice in 0..x.len() / (seq * dim) {
            let (rows, blocks) = (&mut rows[slice * seq * stride..], &mut blocks[slice * per_slice..]);
            for (n, token) in kept.tokens(slice).enumerate() {
                let from = &x[(slice * seq + token) * dim..][..dim];
                let row = &mut rows[n * stride..][..dim];
                row.iter_mut().zip(from).enumerate().for_each(|(c, (row, &x))| *row = entry([slice, n, c], x));
                let block = &mut blocks[n / BLOCK * dim * BLOCK + n % BLOCK..];
                block.iter_mut().step_by(BLOCK).zip(&*row).for_each(|(to, x)| *to = *x);
            }
        }
        Self { rows, blocks, seq, dim }
    }

    pub fn stride(&self) -> usize {
        padded(self.dim)
    }

    /// Some of a slice's rows.
    pub fn part(&self, slice: usize, range: Range<usize>) -> Rows<'a> {
        let stride = self.stride();
        let at = slice * self.seq + range.start;
        Rows { data: &self.rows[at * stride..(at + range.len()) * stride], stride }
    }

    /// The transposed block from row `first`.
    pub fn block(&self, slice: usize, first: usize) -> Right<'a> {
        let at = slice * self.seq.div_ceil(BLOCK) + first / BLOCK;
        Right { data: &self.blocks[at * self.dim * BLOCK..][..self.dim * BLOCK], stride: BLOCK }
    }
}

/// Writes the mean of the kept rows of every slice, `[slices, dim]`.
pub(super) fn means(x: &[f32], dim: usize, kept: Kept<'_>, out: &mut [f32]) {
    out.fill(0.0);
    for (slice, out) in out.chunks_exact_mut(dim).enumerate() {
        for token in kept.tokens(slice) {
            let row = &x[(slice * kept.seq + token) * dim..][..dim];
            out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        let count = kept.count(slice).max(1) as f32;
        out.iter_mut().for_each(|x| *x /= count);
    }
}

/// The blocks of `count` columns.
pub(super) fn blocks(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(BLOCK).map(move |from| from..(from + BLOCK).min(count))
}

/// Writes the kernel between some rows and a block of columns; rows of the tile are `padded(columns)` apart.
pub(super) fn tile<D: Metric>(
    level: Level,
    kernel_of: (D, f32),
    rows: Rows<'_>,
    (columns, count): (Right<'_>, usize),
    dim: usize,
    out: &mut [f32],
) {
    let size = Size { rows: rows.data.len() / rows.stride, cols: padded(count), depth: dim };
    let left: Left<'_> = rows.as_left();
    kernel(level, kernel_of, left, size, columns, Store { data: out, stride: padded(count) });
}
