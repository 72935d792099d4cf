//! Tokens mapped to a fixed number of combinations of all of them, and what flows back. "Linformer: Self-Attention with Linear
//! Complexity", eq. 7: the pairs of queries and projected keys are any dense structure's.

use super::dense::padded;
use crate::{
    parallel::{self, for_each_item, workers},
    scratch::{cut, scratch_len},
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
};

/// Tokens that are worked on at a time: 128 of 64 channels are 32 KiB, which stay in a first-level cache of 48 KiB.
const TOKENS: usize = 128;

/// Sizes of a map and of what it maps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub tokens: usize,
    pub dim: usize,
    /// One map for all heads, or one for each.
    pub maps: usize,
    pub count: usize,
    /// Columns of a map, of which those beyond the tokens are not read.
    pub columns: usize,
}

/// A map `[maps, count, columns]` of tokens `x [batch, heads, tokens, dim]`, of which masked ones enter nothing.
#[derive(Clone, Copy)]
pub(crate) struct Projection<'a> {
    pub sizes: Sizes,
    pub x: &'a [f32],
    pub map: &'a [f32],
    /// `[batch, tokens]`.
    pub keep: Option<&'a [bool]>,
    pub level: Level,
}

impl Sizes {
    const fn slices(&self) -> usize {
        self.batch * self.heads
    }

    /// f32 of what is mapped to: `[batch, heads, count, dim]`.
    pub const fn out_len(&self) -> usize {
        self.slices() * self.count * self.dim
    }

    /// Some tokens, and rows of what is mapped to.
    const fn tiles(&self) -> [usize; 2] {
        [TOKENS * padded(self.dim), self.count * padded(self.dim)]
    }

    /// Gradients of outputs and of maps, both transposed.
    const fn turned(&self) -> [usize; 2] {
        let rows = padded(self.count);
        [self.slices() * self.dim * rows, self.maps * self.tokens * rows]
    }

    /// f32 of working memory of [`Projection::apply`] and [`Projection::transpose`].
    pub fn work(&self) -> usize {
        workers(self.slices()) * scratch_len(self.tiles())
    }

    /// f32 of working memory of [`Projection::gradient`].
    pub fn gradient_work(&self) -> usize {
        scratch_len(self.turned()) + workers(self.maps * self.tokens.div_ceil(TOKENS)) * self.tiles()[0]
    }
}

impl Projection<'_> {
    /// The first tokens of every group that is worked on at a time, and how many these are.
    fn groups(&self) -> impl Iterator<Item = (usize, usize)> {
        let tokens = self.sizes.tokens;
        (0..tokens).step_by(TOKENS).map(move |first| (first, TOKENS.min(tokens - first)))
    }

    /// The map of a slice.
    fn map(&self, slice: usize) -> &[f32] {
        let len = self.sizes.count * self.sizes.columns;
        &self.map[slice % self.sizes.heads % self.sizes.maps * len..][..len]
    }

    fn keeps(&self, slice: usize, token: usize) -> bool {
        self.keep.is_none_or(|keep| keep[slice / self.sizes.heads * self.sizes.tokens + token])
    }

    /// Writes tokens of a slice as rows of whole vectors, zeros for masked ones.
    fn load(&self, slice: usize, (first, len): (usize, usize), rows: &mut [f32]) {
        let Sizes { tokens, dim, .. } = self.sizes;
        for (token, row) in (first..first + len).zip(rows.chunks_exact_mut(padded(dim))) {
            row.fill(0.0);
            if self.keeps(slice, token) {
                row[..dim].copy_from_slice(&self.x[(slice * tokens + token) * dim..][..dim]);
            }
        }
    }

    /// Writes `map x` as `[batch, heads, count, dim]`.
    pub fn apply(&self, out: &mut [f32], work: &mut [f32]) {
        let Sizes { dim, count, columns, .. } = self.sizes;
        let (stride, tiles) = (padded(dim), self.sizes.tiles());
        let items = out.chunks_exact_mut(count * dim).enumerate();
        for_each_item(items, work, scratch_len(tiles), |(slice, out), memory| {
            let ([rows, sums], _) = cut(memory, tiles);
            sums.fill(0.0);
            for (first, len) in self.groups() {
                self.load(slice, (first, len), rows);
                let left = Left { data: &self.map(slice)[first..], row_stride: columns, depth_stride: 1 };
                let size = Size { rows: count, cols: stride, depth: len };
                multiply_add(self.level, size, left, Right { data: rows, stride }, Add { data: sums, stride });
            }
            let sums = sums.chunks_exact(stride);
            out.chunks_exact_mut(dim).zip(sums).for_each(|(out, sum)| out.copy_from_slice(&sum[..dim]));
        });
    }

    /// Adds `map^T dout` to the tokens' `dx`, but for masked ones.
    pub fn transpose(&self, dout: &[f32], dx: &mut [f32], work: &mut [f32]) {
        let Sizes { tokens, dim, count, columns, .. } = self.sizes;
        let (stride, tiles) = (padded(dim), self.sizes.tiles());
        let items = dx.chunks_exact_mut(tokens * dim).zip(dout.chunks_exact(count * dim)).enumerate();
        for_each_item(items, work, scratch_len(tiles), |(slice, (dx, dout)), memory| {
            let ([rows, whole], _) = cut(memory, tiles);
            whole.fill(0.0);
            whole.chunks_exact_mut(stride).zip(dout.chunks_exact(dim)).for_each(|(to, x)| to[..dim].copy_from_slice(x));
            for (first, len) in self.groups() {
                let left = Left { data: &self.map(slice)[first..], row_stride: 1, depth_stride: columns };
                let size = Size { rows: len, cols: stride, depth: count };
                multiply(self.level, size, left, Right { data: whole, stride }, Store { data: rows, stride });
                let tokens = (first..).zip(dx[first * dim..].chunks_exact_mut(dim)).zip(rows.chunks_exact(stride));
                for ((_, dx), row) in tokens.take(len).filter(|((token, _), _)| self.keeps(slice, *token)) {
                    dx.iter_mut().zip(row).for_each(|(dx, x)| *dx += x);
                }
            }
        });
    }

    /// Writes the map's gradient `dout x^T`, summed over the batch and over the heads that share it, in their order.
    pub fn gradient(&self, dout: &[f32], dmap: &mut [f32], work: &mut [f32]) {
        let Sizes { heads, tokens, dim, maps, count, columns, .. } = self.sizes;
        let ([turned, sums], work) = cut(work, self.sizes.turned());
        let (stride, rows_stride) = (padded(count), padded(dim));
        turned.fill(0.0);
        for (turned, dout) in turned.chunks_exact_mut(dim * stride).zip(dout.chunks_exact(count * dim)) {
            for (n, row) in dout.chunks_exact(dim).enumerate() {
                turned[n..].iter_mut().step_by(stride).zip(row).for_each(|(to, &x)| *to = x);
            }
        }
        let turned = &*turned;
        let of_maps = sums.chunks_exact_mut(tokens * stride).enumerate();
        let items = of_maps.flat_map(|(map, sums)| {
            self.groups().zip(sums.chunks_mut(TOKENS * stride)).map(move |(group, sums)| (map, group, sums))
        });
        for_each_item(items, work, TOKENS * rows_stride, |(map, group, sums), rows| {
            sums.fill(0.0);
            for slice in (0..self.sizes.slices()).filter(|slice| slice % heads % maps == map) {
                self.load(slice, group, rows);
                let left = Left { data: rows, row_stride: rows_stride, depth_stride: 1 };
                let right = Right { data: &turned[slice * dim * stride..][..dim * stride], stride };
                let size = Size { rows: group.1, cols: stride, depth: dim };
                multiply_add(self.level, size, left, right, Add { data: sums, stride });
            }
        });
        let sums = &*sums;
        parallel::each(dmap.chunks_exact_mut(columns).enumerate(), |(row, dmap)| {
            let (map, row) = (row / count, row % count);
            let column = sums[map * tokens * stride..][row..].iter().step_by(stride);
            let (read, beyond) = dmap.split_at_mut(tokens);
            read.iter_mut().zip(column).for_each(|(to, x)| *to = *x);
            beyond.fill(0.0);
        });
    }
}
