//! Tokens of a head as pairs of bf16.

use crate::{
    call::TokenRows,
    simd::bf16::{Left, Multiplier, Right, pairs},
    structure::dense::head::PANEL,
};

/// Fills `buffer` with the numbers from 0 on.
pub(super) fn numbers(buffer: &mut [f32]) -> &[u32] {
    let buffer: &mut [u32] = bytemuck::cast_slice_mut(buffer);
    (0..).zip(&mut *buffer).for_each(|(n, x)| *x = n);
    buffer
}

/// `n` channels or tokens, padded to whole tiles along a depth.
pub(super) const fn deep(n: usize) -> usize {
    2 * pairs(n)
}

/// The rows `kept` of `tensor`, the `n`-th of them times `factor(n)`.
#[derive(Clone, Copy)]
pub(super) struct Source<'a, F> {
    pub tensor: TokenRows<'a>,
    pub kept: &'a [u32],
    pub factor: F,
}

impl<'a, F: Fn(usize) -> f32> Source<'a, F> {
    /// Row `n`, through `buffer` where it has a factor.
    fn row<'t>(&self, n: usize, buffer: &'t mut [f32]) -> &'t [f32]
    where
        'a: 't,
    {
        let (row, factor) = (self.tensor.row(self.kept[n] as usize), (self.factor)(n));
        if factor == 1.0 {
            return row;
        }
        let buffer = &mut buffer[..row.len()];
        buffer.iter_mut().zip(row).for_each(|(x, &y)| *x = y * factor);
        buffer
    }

    /// u32 of [`Source::rows`] for `count` tokens, of each part.
    pub const fn rows_len(count: usize, dim: usize) -> usize {
        count.next_multiple_of(16) * pairs(dim)
    }

    /// The tokens as rows of pairs of channels; `buffer` holds a row of f32.
    pub fn rows<'t>(&self, tiles: &Multiplier, buffer: &mut [f32], out: &'t mut [u32]) -> Left<'t> {
        let second = pairs(self.tensor.channels);
        let stride = tiles.parts() * second;
        for (n, out) in out.chunks_exact_mut(stride).enumerate().take(self.kept.len()) {
            tiles.round(self.row(n, buffer), out);
        }
        Left { data: out, stride, second }
    }

    /// u32 of [`Source::woven`] for `count` tokens, of each part.
    pub const fn woven_len(count: usize, dim: usize) -> usize {
        pairs(count) * deep(dim)
    }

    /// Pairs of tokens, channels side by side; zeros for tokens up to a whole tile. Each of `buffers` holds a row of f32.
    pub fn woven<'t>(&self, tiles: &Multiplier, buffers: [&mut [f32]; 2], out: &'t mut [u32]) -> Right<'t> {
        let (second, count) = (deep(self.tensor.channels), self.kept.len());
        let ([even, odd], stride) = (buffers, tiles.parts() * second);
        if stride == 0 {
            return Right { data: out, stride, second };
        }
        for (pair, out) in out.chunks_exact_mut(stride).enumerate().take(pairs(count)) {
            match (2 * pair, 2 * pair + 1) {
                (first, second) if second < count => {
                    tiles.weave([self.row(first, even), self.row(second, odd)], out);
                }
                (last, _) if last < count => {
                    odd[..self.tensor.channels].fill(0.0);
                    tiles.weave([self.row(last, even), &odd[..self.tensor.channels]], out);
                }
                _ => out.fill(0),
            }
        }
        Right { data: out, stride, second }
    }

    /// [`Source::woven`], transposed: channels as rows of pairs of tokens. `woven` is scratch.
    pub fn columns<'t>(
        &self,
        tiles: &Multiplier,
        buffers: [&mut [f32]; 2],
        woven: &mut [u32],
        out: &'t mut [u32],
    ) -> Left<'t> {
        let stride = pairs(self.kept.len());
        let woven = self.woven(tiles, buffers, woven);
        tiles.transpose([stride, woven.stride], (woven.data, woven.stride), (out, stride));
        Left { data: out, stride, second: woven.second * stride }
    }

    /// u32 of [`Source::panels`] for `count` tokens, of each part.
    pub const fn panels_len(count: usize, dim: usize) -> usize {
        count.next_multiple_of(16) * pairs(dim)
    }

    /// The tokens as panels of [`PANEL`] columns, pairs of channels above each other; zeros beyond the last token. `rows` holds a
    /// panel.
    pub fn panels(&self, tiles: &Multiplier, buffer: &mut [f32], rows: &mut [u32], out: &mut [u32]) {
        let depth = tiles.parts() * pairs(self.tensor.channels);
        for first in (0..self.kept.len()).step_by(PANEL) {
            let count = PANEL.min(self.kept.len() - first);
            let width = count.next_multiple_of(16);
            for (n, row) in rows.chunks_exact_mut(depth).enumerate().take(width) {
                match n < count {
                    true => tiles.round(self.row(first + n, buffer), row),
                    false => row.fill(0),
                }
            }
            tiles.transpose([width, depth], (rows, depth), (&mut out[first * depth..][..width * depth], width));
        }
    }
}

/// The panel from token `first` on, `width` columns of it: of [`Source::panels`].
pub(super) fn panel<'t>(tiles: &Multiplier, panels: &'t [u32], dim: usize, first: usize, width: usize) -> Right<'t> {
    let depth = tiles.parts() * pairs(dim);
    Right { data: &panels[first * depth..][..width * depth], stride: width, second: width * pairs(dim) }
}
