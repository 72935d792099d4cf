//! Rows of f32 as operands of bf16 products, and products into rows that are no whole tiles.

use pulp::{Simd, WithSimd};

use super::{Left, Multiplier, Output, ROWS, Right, Size, pairs};
use crate::{scratch::Aligned, simd::Level, structure::dense::padded};

/// Scratch as pairs.
pub(crate) fn pairs_of(x: &mut Aligned, len: usize) -> &mut [u32] {
    x.resize(len);
    bytemuck::cast_slice_mut(x)
}

/// Rows of f32: the first `channels` of each, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub channels: usize,
    pub count: usize,
}

impl<'a> Rows<'a> {
    /// All rows that lie in `data`.
    pub fn new(data: &'a [f32], stride: usize, channels: usize) -> Self {
        Self { data, stride, channels, count: data.len() / stride.max(1) }
    }

    fn row(&self, n: usize) -> &'a [f32] {
        &self.data[n * self.stride..][..self.channels]
    }

    /// Pairs of channels, row by row, zeros up to whole tiles of rows.
    pub fn rounded<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut Aligned) -> Left<'t> {
        let len = self.count.next_multiple_of(ROWS) * tiles.parts() * pairs(self.channels);
        self.round_into(level, tiles, pairs_of(out, len))
    }

    /// The same, with zeros up to the end.
    pub fn round_into<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut [u32]) -> Left<'t> {
        let second = pairs(self.channels);
        let stride = tiles.parts() * second;
        level.dispatch(|| {
            for (n, out) in out.chunks_exact_mut(stride.max(1)).enumerate() {
                if n < self.count { tiles.round(self.row(n), out) } else { out.fill(0) }
            }
        });
        Left { data: out, stride, second }
    }

    /// Pairs of rows, channels side by side, zeros up to whole tiles of pairs.
    pub fn woven<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut Aligned) -> Right<'t> {
        let len = pairs(self.count) * tiles.parts() * padded(self.channels);
        self.weave_into(level, tiles, pairs_of(out, len))
    }

    /// The same, with zeros up to the end.
    pub fn weave_into<'t>(&self, level: Level, tiles: &Multiplier, out: &'t mut [u32]) -> Right<'t> {
        let second = padded(self.channels);
        let stride = tiles.parts() * second;
        level.dispatch(|| {
            for (pair, out) in out.chunks_exact_mut(stride.max(1)).enumerate() {
                match self.count.saturating_sub(2 * pair) {
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
        Right { data: out, stride, second }
    }

    /// A panel of `width` columns, one for each row. `rows` is scratch.
    pub fn panel(&self, level: Level, tiles: &Multiplier, width: usize, rows: &mut Aligned, out: &mut Aligned) {
        let left = self.rounded(level, tiles, rows);
        let out = pairs_of(out, left.stride * width);
        level.dispatch(|| tiles.transpose([width, left.stride], (left.data, left.stride), (out, width)));
    }
}

impl Right<'_> {
    /// Writes its columns as rows of pairs, parts beside each other.
    #[inline(always)]
    pub(crate) fn turn(&self, tiles: &Multiplier, [depth, width]: [usize; 2], out: &mut [u32]) {
        for part in 0..tiles.parts() {
            let from = (&self.data[part * self.second..], self.stride);
            tiles.transpose([depth, width], from, (&mut out[part * depth..], tiles.parts() * depth));
        }
    }
}

/// Writes or adds a product to the rows `into`, which may be fewer than whole tiles; `product` then holds it.
pub(crate) fn write(
    level: Level,
    tiles: &Multiplier,
    size: Size,
    (left, right): (Left<'_>, Right<'_>),
    (into, stride, add): (&mut [f32], usize, bool),
    product: &mut [f32],
) {
    if size.rows.is_multiple_of(ROWS) {
        return multiply(level, tiles, size, (left, right, false), Output { data: into, stride, add });
    }
    multiply(level, tiles, size, (left, right, false), Output { data: product, stride: size.cols, add: false });
    for (row, product) in into.chunks_mut(stride).zip(product.chunks_exact(size.cols)).take(size.rows) {
        let row = row.iter_mut().zip(product);
        if add { row.for_each(|(x, y)| *x += y) } else { row.for_each(|(x, y)| *x = *y) }
    }
}

/// A product; of two parts `all`, or without that of the second ones.
pub(crate) fn multiply(
    level: Level,
    tiles: &Multiplier,
    size: Size,
    operands: (Left<'_>, Right<'_>, bool),
    into: Output<'_>,
) {
    level.dispatch(Multiply { tiles, size, operands, into });
}

struct Multiply<'a> {
    tiles: &'a Multiplier,
    size: Size,
    operands: (Left<'a>, Right<'a>, bool),
    into: Output<'a>,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (left, right, all) = self.operands;
        self.tiles.multiply_parts(simd, self.size, (left, right), all, self.into);
    }
}
