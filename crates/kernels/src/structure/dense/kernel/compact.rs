//! The kept tokens of every batch element and head, laid out for products.

use std::ops::Range;

use crate::{
    call::View,
    simd::product::Right,
    structure::dense::{Rows, padded},
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
    /// Gathers the kept rows of `x`.
    pub fn of(x: View<'_>, kept: Kept<'_>, [rows, blocks]: [&'a mut [f32]; 2]) -> Self {
        let (slices, dim) = (x.layout().slices(), x.layout().channels);
        let (seq, stride) = (kept.seq, padded(dim));
        rows.fill(0.0);
        blocks.fill(0.0);
        let per_slice = blocks.len() / slices;
        for slice in 0..slices {
            let (rows, blocks) = (&mut rows[slice * seq * stride..], &mut blocks[slice * per_slice..]);
            for (n, token) in kept.tokens(slice).enumerate() {
                let row = &mut rows[n * stride..][..dim];
                row.copy_from_slice(x.row(slice, token));
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

/// The blocks of `count` columns.
pub(super) fn blocks(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(BLOCK).map(move |from| from..(from + BLOCK).min(count))
}

/// Writes compact rows back to the places of their tokens, zeros to the masked ones.
pub(super) fn spread(rows: &[f32], stride: usize, kept: Kept<'_>, dim: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (slice, out) in out.chunks_exact_mut(kept.seq * dim).enumerate() {
        for (row, token) in rows[slice * kept.seq * stride..].chunks_exact(stride).zip(kept.tokens(slice)) {
            out[token * dim..][..dim].copy_from_slice(&row[..dim]);
        }
    }
}
