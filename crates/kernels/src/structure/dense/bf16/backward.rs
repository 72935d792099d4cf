//! The backward stream: see [`super::super::backward`], whose tasks and tiles these are.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{
    forward::pairs_of,
    layout::{Source, deep, numbers, panel},
    pairing::Rounded,
};
use crate::{
    Dropped, Shape,
    scratch::{cut, scratch_len},
    simd::{
        bf16::{Bf16Products, Output, Right, Size, pairs},
        product,
    },
    structure::dense::{
        backward::{KEYS, Stream, Sums, Targets, Task, work_of},
        forward::TILE_STRIDE,
        head::{Head, PANEL, Rows, Visible, padded, positions},
        pairing::{Margins, PairTile, Pass, Tokens as Placed},
    },
};

/// [`Stream::run`] with bf16 products.
pub(super) fn run<P: Rounded>(
    stream: &Stream<'_, impl Fn(usize) -> P + Sync>,
    products: Bf16Products,
    targets: Targets<'_>,
    sums: Sums<'_>,
    work: &mut [f32],
) {
    let (shape, level) = (&stream.call.shape, stream.call.level);
    let run = |task: Task<'_, P>| level.dispatch(Products { task, products });
    stream.each(scratch_len(sizes::<P>(shape, products.parts())), targets, sums, work, run);
}

/// f32 of working memory for `shape` in the current thread pool, with operands of so many parts.
pub(super) fn work<P: Rounded>(shape: &Shape, tied: bool, parts: usize) -> usize {
    work_of(shape, tied, scratch_len(sizes::<P>(shape, parts)))
}

type Tokens<'a> = Source<'a, fn(usize) -> f32>;

fn sizes<P: Rounded>(shape: &Shape, parts: usize) -> [usize; 31] {
    let Shape { head_dim, value_dim, .. } = *shape;
    let (queries, keys, row) = (padded(shape.seq_q), shape.seq_kv.min(KEYS), head_dim.max(value_dim));
    let (panel, tile) = (PANEL.min(queries), deep(keys) * TILE_STRIDE);
    let [query_margin, key_margin] = if P::MARGINS { [queries, padded(keys)] } else { [0; 2] };
    [
        // positions, limits, draws, shift, delta
        queries,
        queries,
        queries,
        queries,
        queries,
        // queries and output gradients: panels, and pairs of tokens; a panel of rows; dq
        parts * Tokens::panels_len(queries, head_dim),
        parts * Tokens::woven_len(queries, head_dim),
        parts * Tokens::panels_len(queries, value_dim),
        parts * Tokens::woven_len(queries, value_dim),
        parts * panel * pairs(row),
        queries * deep(head_dim),
        // positions; rows of keys and values; pairs of keys, and their channels; dk, dv
        padded(keys),
        parts * Tokens::rows_len(keys, head_dim),
        parts * Tokens::rows_len(keys, value_dim),
        parts * Tokens::woven_len(keys, head_dim),
        parts * Tokens::woven_len(keys, head_dim),
        padded(keys) * deep(head_dim),
        padded(keys) * deep(value_dim),
        // logits then weights, gradients of the logits; either as rows of pairs of queries
        tile,
        tile,
        parts * padded(keys) * PANEL / 2,
        // two rows; a panel of dq
        padded(row),
        padded(row),
        panel * padded(head_dim),
        // queries and keys laid out, and their numbers; margins, and gradients that no product makes
        P::placed_queries_len(queries, head_dim, Pass::Backward),
        P::placed_keys_len(keys, head_dim),
        if P::PLACED { queries.max(padded(keys)) } else { 0 },
        query_margin,
        key_margin,
        query_margin * padded(head_dim),
        key_margin * padded(head_dim),
    ]
}

/// One task.
struct Products<'a, P> {
    task: Task<'a, P>,
    products: Bf16Products,
}

impl<P: Rounded> WithSimd for Products<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { task: Task { call, pairing, value, dout, terms, slice, keys, mut into, memory }, products } = self;
        let head = &Head::of(call, slice);
        let (dim, value_dim) = (head.head_dim, head.value_dim);
        let (channels, value_channels) = (deep(dim), deep(value_dim));
        let parts = cut(memory, sizes::<P>(&call.shape, products.parts())).0;
        let [at, limits, draws, shift, delta, q_panels, q_woven, g_panels, g_woven, rows, dq_sums, parts @ ..] = parts;
        let [key_at, k_rows, v_rows, k_woven, k_columns, dk_sums, dv_sums, parts @ ..] = parts;
        let [weights, slopes, rounded, row, other, turned, q_buffer, k_buffer, all, parts @ ..] = parts;
        let [dq_margin, dk_margin, dq_close, dk_close] = parts;
        let [q_panels, q_woven, g_panels, g_woven, rows] = [q_panels, q_woven, g_panels, g_woven, rows].map(pairs_of);
        let [k_rows, v_rows, k_woven, k_columns] = [k_rows, v_rows, k_woven, k_columns].map(pairs_of);
        let rounded = pairs_of(rounded);
        let (tiles, all) = (products.enter(), numbers(all));
        let one: fn(usize) -> f32 = |_| 1.0;

        let queries = positions(0..head.seq_q, head.keep_query, at);
        let line = |n: usize| slice * head.seq_q + queries[n] as usize;
        let (mut placed_q, mut q) = (Placed::NONE, (head.q, queries));
        if P::PLACED {
            placed_q = pairing.queries(head, queries, Pass::Backward, q_buffer);
            q = (placed_q.rows.as_tokens(dim), &all[..queries.len()]);
        }
        let factor = |n: usize| pairing.query_factor(queries[n]);
        let of_scores = |n: usize| pairing.score_factor() * factor(n);
        Source { tensor: q.0, kept: q.1, factor: of_scores }.panels(&tiles, row, rows, q_panels);
        let q_pairs = Source { tensor: q.0, kept: q.1, factor }.woven(&tiles, [&mut *row, &mut *other], q_woven);
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
        dq_margin.fill(0.0);
        dq_close.fill(0.0);
        into.parameters.fill(0.0);

        for from in keys.clone().step_by(KEYS) {
            let tile_keys = from..(from + KEYS).min(keys.end);
            let kept = positions(tile_keys.clone(), head.keep_key, key_at);
            let (mut placed_k, mut k) = (Placed::NONE, (head.k, kept));
            if P::PLACED {
                placed_k = pairing.keys(head, kept, Pass::Backward, &mut *k_buffer);
                k = (placed_k.rows.as_tokens(dim), &all[..kept.len()]);
            }
            let k = Source { tensor: k.0, kept: k.1, factor: one };
            let columns = k.columns(&tiles, [&mut *row, &mut *other], k_woven, k_columns);
            let k = k.rows(&tiles, row, k_rows);
            let v = Source { tensor: head.v, kept, factor: one }.rows(&tiles, row, v_rows);
            dk_sums[..padded(kept.len()) * channels].fill(0.0);
            dv_sums[..padded(kept.len()) * value_channels].fill(0.0);
            dk_margin.fill(0.0);
            dk_close.fill(0.0);
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
                let margin = if P::MARGINS { range.clone() } else { 0..0 };
                let pairs_of_tile = PairTile {
                    head_dim: dim,
                    value_dim,
                    queries: &placed_q,
                    keys: &placed_k,
                    columns: range.clone(),
                    values: Rows::NONE,
                    gradients: product::Right { data: &[], stride: 0 },
                    shift: &shift[range.clone()],
                    delta: &delta[range],
                    visible,
                    complete: visible.complete(),
                    dropout: dropout.filter(|dropout| dropout.dropped == Dropped::Weights),
                    weights: &mut *weights,
                    slopes: &mut *slopes,
                    margins: Margins {
                        query: &mut dq_margin[margin.clone()],
                        key: &mut *dk_margin,
                        dq: &mut dq_close[margin.start * padded(dim)..margin.end * padded(dim)],
                        dk: &mut *dk_close,
                        parameters: &mut *into.parameters,
                    },
                };
                let q_panel = (k, panel(&tiles, q_panels, dim, first, width), pairs(dim));
                let g_panel = (v, panel(&tiles, g_panels, value_dim, first, width), pairs(value_dim));
                pairing.pull_back_rounded(simd, &tiles, [q_panel, g_panel], pairs_of_tile);

                // The scores of a tile, rounded, times what belongs to its queries.
                let mut add_by_key = |scores: &[f32], of_queries: Right<'_>, sums: &mut [f32]| {
                    let rounded = (&mut *rounded, tiles.parts() * PANEL / 2);
                    let left = tiles.round_tile((scores, TILE_STRIDE), [seen, width], rounded);
                    let cols = of_queries.stride / tiles.parts();
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
                let mut write = Write { count: kept.len(), sums: &mut *dk_sums, stride: channels };
                write.zeros(tile_keys.clone(), dk);
                write.add(dk_close, padded(dim));
                write.rows(position, dk, |n, sums, out| {
                    pairing.rounded_gradient(&placed_k, (n, None), margin_of::<P>(dk_margin, n), sums, out);
                });
            }
            if let Some(dv) = into.dv {
                // SAFETY: as above.
                let dv = |key: usize| unsafe { dv.row(slice, key) };
                let write = Write { count: kept.len(), sums: &mut *dv_sums, stride: value_channels };
                write.zeros(tile_keys.clone(), dv);
                write.rows(position, dv, |_, sums, out| {
                    out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * value);
                });
            }
            if let Some(columns) = &mut into.columns {
                let columns = &mut columns[tile_keys.start - keys.start..tile_keys.end - keys.start];
                columns.fill(0.0);
                (0..kept.len()).for_each(|n| columns[position(n) - tile_keys.start] = dk_margin[n]);
            }
        }
        if let Some(((dq, slice), _)) = into.tokens {
            // SAFETY: no other task has this `dq` of this slice.
            let dq = |query: usize| unsafe { dq.row(slice, query) };
            Write { count: queries.len(), sums: &mut [], stride: 0 }.zeros(0..head.seq_q, dq);
            for first in (0..queries.len()).step_by(PANEL) {
                let (count, stride) = (PANEL.min(queries.len() - first), padded(dim));
                let width = padded(count);
                let sums = bytemuck::cast_slice(&dq_sums[first * channels..][..width * channels]);
                tiles.transpose([stride, width], (sums, width), (pairs_of(turned), stride));
                let mut write = Write { count, sums: &mut *turned, stride };
                write.add(dq_close.get(first * stride..).unwrap_or_default(), stride);
                write.rows(
                    |n| queries[first + n] as usize,
                    dq,
                    |n, sums, out| {
                        let (n, position) = (first + n, queries[first + n]);
                        let margin = margin_of::<P>(dq_margin, n);
                        pairing.rounded_gradient(&placed_q, (n, Some(position)), margin, sums, out);
                    },
                );
            }
        }
    }
}

/// What is summed of a token beside the products, where something is.
fn margin_of<P: Rounded>(margins: &[f32], n: usize) -> f32 {
    if P::MARGINS { margins[n] } else { 0.0 }
}

/// Sums of some tokens' gradients, about to be written.
struct Write<'a> {
    count: usize,
    sums: &'a mut [f32],
    stride: usize,
}

impl Write<'_> {
    /// Fills the rows of `tokens` with zeros where some of them will not be written.
    fn zeros<'o>(&self, tokens: Range<usize>, out: impl Fn(usize) -> &'o mut [f32]) {
        if self.count < tokens.len() {
            tokens.for_each(|token| out(token).fill(0.0));
        }
    }

    /// Adds rows, `stride` apart, which may be none.
    fn add(&mut self, rows: &[f32], stride: usize) {
        let sums = self.sums.chunks_exact_mut(self.stride).zip(rows.chunks_exact(stride));
        for (sums, row) in sums.take(self.count) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }

    /// Writes each row of sums by `write`, which is given its number.
    fn rows<'o>(
        &self,
        position: impl Fn(usize) -> usize,
        out: impl Fn(usize) -> &'o mut [f32],
        write: impl Fn(usize, &[f32], &mut [f32]),
    ) {
        for n in 0..self.count {
            write(n, &self.sums[n * self.stride..], out(position(n)));
        }
    }
}
