//! Rows of f32 as operands of bf16 products.

use super::super::{columns::Columns, pool::Zeros};
use crate::{
    scratch::Aligned,
    simd::{
        Level,
        bf16::{Left, Multiplier, PAIRS, ROWS, Right, pairs},
    },
    structure::dense::padded,
};

/// Scratch as pairs.
pub(super) fn pairs_of(x: &mut Aligned, len: usize) -> &mut [u32] {
    x.resize(len);
    bytemuck::cast_slice_mut(x)
}

/// Rows of f32: the first `channels` of each, `stride` apart.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub channels: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn count(&self) -> usize {
        self.data.len() / self.stride.max(1)
    }

    fn row(&self, n: usize) -> &'a [f32] {
        &self.data[n * self.stride..][..self.channels]
    }

    /// Pairs of channels, row by row, zeros up to whole tiles of rows.
    pub(super) fn rounded<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut Aligned) -> Left<'t> {
        let second = pairs(self.channels);
        let stride = tiles.parts() * second;
        let out = pairs_of(out, self.count().next_multiple_of(ROWS) * stride);
        self.round_into(level, tiles, out);
        Left { data: out, stride, second }
    }

    /// The same, with zeros up to the end.
    pub(super) fn round_into(&self, level: Level, tiles: &Multiplier, out: &mut [u32]) {
        let (stride, count) = (tiles.parts() * pairs(self.channels), self.count());
        level.dispatch(|| {
            for (n, out) in out.chunks_exact_mut(stride.max(1)).enumerate() {
                if n < count { tiles.round(self.row(n), out) } else { out.fill(0) }
            }
        });
    }

    /// Pairs of rows, channels side by side, zeros up to whole tiles of pairs.
    pub(super) fn woven<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut Aligned) -> Right<'t> {
        let second = padded(self.channels);
        let stride = tiles.parts() * second;
        let out = pairs_of(out, pairs(self.count()) * stride);
        self.weave_into(level, tiles, out);
        Right { data: out, stride, second }
    }

    /// The same, with zeros up to the end.
    pub(super) fn weave_into(&self, level: Level, tiles: &Multiplier, out: &mut [u32]) {
        let (stride, count) = (tiles.parts() * padded(self.channels), self.count());
        level.dispatch(|| {
            for (pair, out) in out.chunks_exact_mut(stride.max(1)).enumerate() {
                match count.saturating_sub(2 * pair) {
                    0 => out.fill(0),
                    // Above the last row is nothing.
                    1 => {
                        tiles.weave([self.row(2 * pair); 2], out);
                        out.iter_mut().for_each(|x| *x &= 0xffff);
                    }
                    _ => tiles.weave([self.row(2 * pair), self.row(2 * pair + 1)], out),
                }
            }
        });
    }

    /// A panel of `width` columns, one for each row. `rows` is scratch.
    pub(super) fn panel(&self, level: Level, tiles: &Multiplier, width: usize, rows: &mut Aligned, out: &mut Aligned) {
        let left = self.rounded(level, tiles, rows);
        let out = pairs_of(out, left.stride * width);
        level.dispatch(|| tiles.transpose([width, left.stride], (left.data, left.stride), (out, width)));
    }
}

/// Operands of columns that all blocks of a slice share: rows of images and of values, and pairs of these rows; empty where a pass
/// does not take them.
pub(in crate::engine) struct Shared<'p> {
    pub(super) columns: usize,
    pub(super) parts: usize,
    pub keys: Zeros<'p>,
    pub key_pairs: Zeros<'p>,
    pub values: Zeros<'p>,
    pub value_pairs: Zeros<'p>,
}

/// f32 of [`Shared`] in either pass, of each part.
pub(in crate::engine) fn shared_len(columns: usize, [dim, value_dim]: [usize; 2]) -> [usize; 2] {
    let [rows, woven] = [rows_len(columns), pairs_len(columns)];
    let forward = rows * pairs(dim) + woven * padded(value_dim);
    [forward, rows * (pairs(dim) + pairs(value_dim)) + woven * padded(dim)]
}

/// Rows that a tile of columns, wherever it begins, may read.
pub(super) fn rows_len(columns: usize) -> usize {
    (columns + ROWS).next_multiple_of(ROWS)
}

/// The same of pairs.
pub(super) fn pairs_len(columns: usize) -> usize {
    pairs(columns) + PAIRS
}

impl Shared<'_> {
    /// The rows of a tile's columns.
    pub fn rows<'x>(&self, of: &'x [f32], columns: &Columns<'_>, channels: usize) -> Option<Left<'x>> {
        let Columns::Run(range) = columns else { return None };
        let (data, second) = (bytemuck::cast_slice(of), pairs(channels));
        let stride = self.parts * second;
        (!data.is_empty()).then(|| Left { data: &data[range.start * stride..], stride, second })
    }

    /// The pairs of a tile's columns, where these begin with a pair and nothing but zeros is read behind them.
    pub fn pairs<'x>(&self, of: &'x [f32], columns: &Columns<'_>, channels: usize) -> Option<Right<'x>> {
        let Columns::Run(range) = columns else { return None };
        let (data, second) = (bytemuck::cast_slice(of), padded(channels));
        let stride = self.parts * second;
        let whole = range.len().is_multiple_of(2 * PAIRS) || range.end == self.columns;
        let fits = !data.is_empty() && range.start.is_multiple_of(2) && whole;
        fits.then(|| Right { data: &data[range.start / 2 * stride..], stride, second })
    }
}
