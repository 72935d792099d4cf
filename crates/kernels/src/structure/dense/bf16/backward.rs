//! The backward stream: see [`super::super::backward`], whose tasks and tiles these are.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{
    Scaled,
    forward::pairs_of,
    layout::{Source, deep, panel},
    take_rows,
};
use crate::{
    Dropped, Shape,
    scratch::{cut, scratch_len},
    simd::bf16::{Bf16Products, Left, Multiplier, Output, Right, Size, pairs},
    structure::dense::{
        backward::{KEYS, Stream, Sums, Targets, Task, work_of},
        forward::TILE_STRIDE,
        head::{Head, PANEL, Visible, padded, positions},
        normalise::Normalisation,
        pairing::{Dot, Pairs},
    },
};

/// [`Stream::run`] with bf16 products.
pub(super) fn run<'s, N: Normalisation>(
    stream: &Stream<'_, impl Fn(usize) -> Dot<'s, N> + Sync>,
    products: Bf16Products,
    targets: Targets<'_>,
    work: &mut [f32],
) {
    let (shape, level) = (&stream.call.shape, stream.call.level);
    let run = |task: Task<'_, Dot<'s, N>>| level.dispatch(Products { task, products });
    stream.each(scratch_len(sizes(shape)), targets, Sums::default(), work, run);
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work(shape: &Shape, tied: bool) -> usize {
    work_of(shape, tied, scratch_len(sizes(shape)))
}

type Tokens<'a> = Source<'a, fn(usize) -> f32>;

fn sizes(shape: &Shape) -> [usize; 24] {
    let Shape { head_dim, value_dim, .. } = *shape;
    let (queries, keys, row) = (padded(shape.seq_q), shape.seq_kv.min(KEYS), head_dim.max(value_dim));
    let (panel, tile) = (PANEL.min(queries), deep(keys) * TILE_STRIDE);
    [
        // positions, limits, draws, shift, delta
        queries,
        queries,
        queries,
        queries,
        queries,
        // queries and output gradients: panels, and pairs of tokens; a panel of rows; dq
        Tokens::panels_len(queries, head_dim),
        Tokens::woven_len(queries, head_dim),
        Tokens::panels_len(queries, value_dim),
        Tokens::woven_len(queries, value_dim),
        panel * pairs(row),
        queries * deep(head_dim),
        // positions; rows of keys and values; pairs of keys, and their channels; dk, dv
        padded(keys),
        Tokens::rows_len(keys, head_dim),
        Tokens::rows_len(keys, value_dim),
        Tokens::woven_len(keys, head_dim),
        Tokens::woven_len(keys, head_dim),
        padded(keys) * deep(head_dim),
        padded(keys) * deep(value_dim),
        // logits then weights, gradients of the logits; either as rows of pairs of queries
        tile,
        tile,
        padded(keys) * PANEL / 2,
        // two rows; a panel of dq
        padded(row),
        padded(row),
        panel * padded(head_dim),
    ]
}

/// One task.
struct Products<'a, 's, N> {
    task: Task<'a, Dot<'s, N>>,
    products: Bf16Products,
}

impl<N: Normalisation> WithSimd for Products<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { task: Task { call, pairing, value, dout, terms, slice, keys, into, memory }, products } = self;
        let head = &Head::of(call, slice);
        let (dim, value_dim) = (head.head_dim, head.value_dim);
        let (channels, value_channels) = (deep(dim), deep(value_dim));
        let parts = cut(memory, sizes(&call.shape)).0;
        let [at, limits, draws, shift, delta, q_panels, q_woven, g_panels, g_woven, rows, dq_sums, parts @ ..] = parts;
        let [key_at, k_rows, v_rows, k_woven, k_columns, dk_sums, dv_sums, parts @ ..] = parts;
        let [weights, slopes, rounded, row, other, turned] = parts;
        let [q_panels, q_woven, g_panels, g_woven, rows] = [q_panels, q_woven, g_panels, g_woven, rows].map(pairs_of);
        let [k_rows, v_rows, k_woven, k_columns] = [k_rows, v_rows, k_woven, k_columns].map(pairs_of);
        let rounded = pairs_of(rounded);
        let (tiles, norm) = (products.enter(), Scaled::of(&pairing));
        let one: fn(usize) -> f32 = |_| 1.0;

        let queries = positions(0..head.seq_q, head.keep_query, at);
        let line = |n: usize| slice * head.seq_q + queries[n] as usize;
        let q = Source { tensor: head.q, kept: queries, factor: |n: usize| pairing.row(queries[n]) };
        q.panels(&tiles, row, rows, q_panels);
        let q_pairs = q.woven(&tiles, [&mut *row, &mut *other], q_woven);
        let g = Source { tensor: dout.slice(slice), kept: queries, factor: |n: usize| terms.factor[line(n)] };
        g.panels(&tiles, row, rows, g_panels);
        let g_pairs = g.woven(&tiles, [&mut *row, &mut *other], g_woven);
        let dropout = head.panel_dropout(queries, draws);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        for (n, &i) in queries.iter().enumerate() {
            limits[n] = head.limit(i as usize) as u32;
            shift[n] = terms.shift[line(n)];
            delta[n] = terms.delta[line(n)];
        }
        shift[queries.len()..].fill(0.0);
        delta[queries.len()..].fill(0.0);
        dq_sums[..padded(queries.len()) * channels].fill(0.0);

        for from in keys.clone().step_by(KEYS) {
            let tile_keys = from..(from + KEYS).min(keys.end);
            let kept = positions(tile_keys.clone(), head.keep_key, key_at);
            let k = Source { tensor: head.k, kept, factor: one };
            let columns = k.columns(&tiles, [&mut *row, &mut *other], k_woven, k_columns);
            let k = k.rows(&tiles, row, k_rows);
            let v = Source { tensor: head.v, kept, factor: one }.rows(&tiles, row, v_rows);
            dk_sums[..padded(kept.len()) * channels].fill(0.0);
            dv_sums[..padded(kept.len()) * value_channels].fill(0.0);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let (width, range) = (padded(count), first..first + padded(count));
                let limits = &limits[range.clone()];
                let seen = kept.partition_point(|&key| key < limits[count - 1]);
                if seen == 0 {
                    continue;
                }
                let dropout = dropout.map(|dropout| dropout.panel(range.clone()));
                let dropped_pairs = dropout.filter(|dropout| dropout.dropped == Dropped::Pairs);
                let visible = Visible { keys: &kept[..seen], limits, dropped_pairs };
                let pairs_of_tile = Pairs {
                    norm,
                    weights: &mut *weights,
                    slopes: &mut *slopes,
                    shift: &shift[range.clone()],
                    delta: &delta[range],
                    visible,
                    complete: visible.complete(),
                    dropout: dropout.filter(|dropout| dropout.dropped == Dropped::Weights),
                };
                let q_panel = (k, panel(q_panels, dim, first, width), pairs(dim));
                let g_panel = (v, panel(g_panels, value_dim, first, width), pairs(value_dim));
                pull_back(simd, &tiles, [q_panel, g_panel], pairs_of_tile);

                // The scores of a tile, rounded, times what belongs to its queries.
                let mut add_by_key = |scores: &[f32], of_queries: Right<'_>, sums: &mut [f32]| {
                    tiles.round_tile((scores, TILE_STRIDE), [seen, width], (&mut *rounded, PANEL / 2));
                    let (cols, left) = (of_queries.stride, Left { data: &*rounded, stride: PANEL / 2 });
                    let size = Size { rows: seen, cols, pairs: pairs(width) };
                    let sums = Output { data: sums, stride: cols, add: true };
                    tiles.multiply(simd, size, left, of_queries.from(first / 2), sums);
                };
                if into.dv.is_some() {
                    add_by_key(&*weights, g_pairs, &mut *dv_sums);
                }
                if into.tokens.is_some() {
                    add_by_key(&*slopes, q_pairs, &mut *dk_sums);
                    let woven = tiles.weave_in_place((&mut *slopes, TILE_STRIDE), [seen, width]);
                    let size = Size { rows: channels, cols: width, pairs: pairs(seen) };
                    let sums = Output { data: &mut dq_sums[first * channels..], stride: width, add: true };
                    tiles.multiply(simd, size, columns, woven, sums);
                }
            }
            let position = |n: usize| kept[n] as usize;
            if let Some((_, dk)) = into.tokens {
                // SAFETY: no other task has these keys of this slice.
                let dk = |key: usize| unsafe { dk.row(slice, key) };
                let write = Write { count: kept.len(), sums: dk_sums, stride: channels };
                write.zeros(tile_keys.clone(), dk).rows(position, |_| pairing.chain, dk);
            }
            if let Some(dv) = into.dv {
                // SAFETY: as above.
                let dv = |key: usize| unsafe { dv.row(slice, key) };
                let write = Write { count: kept.len(), sums: dv_sums, stride: value_channels };
                write.zeros(tile_keys, dv).rows(position, |_| value, dv);
            }
        }
        if let Some(((dq, slice), _)) = into.tokens {
            // SAFETY: no other task has this `dq` of this slice.
            let dq = |query: usize| unsafe { dq.row(slice, query) };
            Write { count: queries.len(), sums: &[], stride: 0 }.zeros(0..head.seq_q, dq);
            for first in (0..queries.len()).step_by(PANEL) {
                let (count, stride) = (PANEL.min(queries.len() - first), padded(dim));
                let width = padded(count);
                let sums = bytemuck::cast_slice(&dq_sums[first * channels..][..width * channels]);
                tiles.transpose([stride, width], (sums, width), (pairs_of(turned), stride));
                let factor = |n: usize| pairing.chain * pairing.row(queries[first + n]);
                Write { count, sums: turned, stride }.rows(|n| queries[first + n] as usize, factor, dq);
            }
        }
    }
}

/// Fills the weights and the gradients of the logits of a tile: the operands are those of the logits, and of the products of values and
/// output gradients.
#[inline(always)]
fn pull_back<S: Simd, N: Normalisation>(
    simd: S,
    tiles: &Multiplier,
    [logits, products]: [(Left<'_>, Right<'_>, usize); 2],
    mut tile: Pairs<'_, N>,
) {
    let (rows, cols) = (tile.visible.keys.len(), logits.1.stride);
    for from in (0..rows).step_by(tiles.band()) {
        let band = from..(from + tiles.band()).min(rows);
        let multiply = |(left, right, pairs): (Left<'_>, Right<'_>, usize), data: &mut [f32]| {
            let into = Output { data: &mut data[from * TILE_STRIDE..], stride: TILE_STRIDE, add: false };
            tiles.multiply(simd, Size { rows: band.len(), cols, pairs }, left.from(from), right, into);
        };
        multiply(logits, tile.weights);
        multiply(products, tile.slopes);
        take_rows::<S, 2>(simd, band, cols, &mut tile);
    }
}

/// Sums of some tokens' gradients, about to be written.
struct Write<'a> {
    count: usize,
    sums: &'a [f32],
    stride: usize,
}

impl Write<'_> {
    /// Fills the rows of `tokens` with zeros where some of them will not be written.
    fn zeros<'o>(self, tokens: Range<usize>, out: impl Fn(usize) -> &'o mut [f32]) -> Self {
        if self.count < tokens.len() {
            tokens.for_each(|token| out(token).fill(0.0));
        }
        self
    }

    /// Writes the sums times their factors.
    fn rows<'o>(
        &self,
        position: impl Fn(usize) -> usize,
        factor: impl Fn(usize) -> f32,
        out: impl Fn(usize) -> &'o mut [f32],
    ) {
        for n in 0..self.count {
            let factor = factor(n);
            let sums = &self.sums[n * self.stride..];
            out(position(n)).iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
        }
    }
}
