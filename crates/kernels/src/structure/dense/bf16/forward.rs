//! The forward stream: see [`super::super::forward`], whose blocks and tiles these are.

use pulp::{Simd, WithSimd};

use super::{
    layout::{Source, deep, numbers, panel},
    pairing::{PlacedPanel, Rounded},
};
use crate::{
    Dropped, Shape,
    call::Target,
    parallel::workers,
    scratch::{cut, scratch_len},
    simd::{
        bf16::{Bf16Products, Output, Size, pairs},
        product::{vectors, vectors_mut},
    },
    structure::dense::{
        forward::{Block, KEYS, QUERIES, Stream, TILE_STRIDE, finish},
        head::{PANEL, Visible, padded, positions},
        normalise::{RowState, Tile},
        pairing::{Pass, Tokens as Placed},
    },
};

/// [`Stream::run`] with bf16 products.
pub(super) fn run<P: Rounded>(
    stream: &Stream<'_, impl Fn(usize) -> P + Sync>,
    products: Bf16Products,
    out: &Target<'_>,
    stats: &mut [f64],
    work: &mut [f32],
) {
    let level = stream.call.level;
    stream.each(memory::<P>(&stream.call.shape, products.parts()), out, stats, work, |block| {
        level.dispatch(Task { block, products })
    });
}

/// f32 of working memory for `shape` in the current thread pool, with operands of so many parts.
pub(super) fn work<P: Rounded>(shape: &Shape, parts: usize) -> usize {
    workers(shape.slices() * shape.seq_q.div_ceil(QUERIES)) * memory::<P>(shape, parts)
}

/// f32 of working memory per task.
fn memory<P: Rounded>(shape: &Shape, parts: usize) -> usize {
    scratch_len(sizes::<P>([shape.seq_q, shape.seq_kv], [shape.head_dim, shape.value_dim], parts))
}

type Tokens<'a> = Source<'a, fn(usize) -> f32>;

fn sizes<P: Rounded>([seq_q, seq_kv]: [usize; 2], [head_dim, value_dim]: [usize; 2], parts: usize) -> [usize; 21] {
    let (queries, keys, row) = (padded(seq_q.min(QUERIES)), seq_kv.min(KEYS), head_dim.max(value_dim));
    let panel = PANEL.min(queries);
    [
        // positions, queries, one panel of them as rows, sums, outputs
        queries,
        parts * Tokens::panels_len(queries, head_dim),
        parts * panel * pairs(head_dim),
        queries * deep(value_dim),
        queries * padded(value_dim),
        // peak, part, rescale, total (f64); limits, draws
        queries,
        queries,
        queries,
        2 * queries,
        queries,
        queries,
        // positions, keys, pairs of values, channels of values; scores; two rows
        padded(keys),
        parts * Tokens::rows_len(keys, head_dim),
        parts * Tokens::woven_len(keys, value_dim),
        parts * Tokens::woven_len(keys, value_dim),
        deep(keys) * TILE_STRIDE,
        padded(row),
        padded(row),
        // queries and keys laid out, and their numbers
        P::placed_queries_len(queries, head_dim, Pass::Forward),
        P::placed_keys_len(keys, head_dim),
        if P::PLACED { queries.max(padded(keys)) } else { 0 },
    ]
}

struct Task<'a, P> {
    block: Block<'a, P>,
    products: Bf16Products,
}

impl<P: Rounded> WithSimd for Task<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { block: Block { head, pairing, start, end, out, slice, stats, memory }, products } = self;
        let (seqs, dims) = ([head.seq_q, head.seq_kv], [head.head_dim, head.value_dim]);
        let parts = cut(memory, sizes::<P>(seqs, dims, products.parts())).0;
        let [at, q_panels, q_rows, sums, outputs, peak, part, rescale, total, limits, draws, parts @ ..] = parts;
        let [key_at, k_rows, v_woven, v_columns, tile, row, other, q_buffer, k_buffer, all] = parts;
        let [q_panels, q_rows, k_rows] = [q_panels, q_rows, k_rows].map(pairs_of);
        let [v_woven, v_columns] = [v_woven, v_columns].map(pairs_of);
        let (dim, value_dim, channels) = (head.head_dim, head.value_dim, deep(head.value_dim));
        let (tiles, all) = (products.enter(), numbers(all));
        let one: fn(usize) -> f32 = |_| 1.0;

        let queries = positions(start..end, head.keep_query, at);
        let (mut placed_q, mut q) = (Placed::NONE, (head.q, queries));
        if P::PLACED {
            placed_q = pairing.queries(&head, queries, Pass::Forward, q_buffer);
            q = (placed_q.rows.as_tokens(dim), &all[..queries.len()]);
        }
        let factor = |n: usize| pairing.score_factor() * pairing.query_factor(queries[n]);
        Source { tensor: q.0, kept: q.1, factor }.panels(&tiles, row, q_rows, q_panels);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        limits.iter_mut().zip(queries).for_each(|(limit, &i)| *limit = head.limit(i as usize) as u32);
        let dropout = head.panel_dropout(queries, draws);
        let mut state = RowState { peak, part, rescale, total: bytemuck::cast_slice_mut(total) };
        state.clear();
        sums[..padded(queries.len()) * channels].fill(0.0);
        let last = queries.len().checked_sub(1).map_or(0, |n| limits[n] as usize);
        for from in (0..last).step_by(KEYS) {
            let keys = positions(from..(from + KEYS).min(last), head.keep_key, key_at);
            let (mut k, mut source) = (Placed::NONE, (head.k, keys));
            if P::PLACED {
                k = pairing.keys(&head, keys, Pass::Forward, &mut *k_buffer);
                source = (k.rows.as_tokens(dim), &all[..keys.len()]);
            }
            let k_rows = Source { tensor: source.0, kept: source.1, factor: one }.rows(&tiles, row, k_rows);
            let v = Source { tensor: head.v, kept: keys, factor: one };
            let v = v.columns(&tiles, [&mut *row, &mut *other], v_woven, v_columns);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let columns = first..first + padded(count);
                let limits = &limits[columns.clone()];
                // Keys beyond the last query of the panel are absent for all of it.
                let seen = keys.partition_point(|&key| key < limits[count - 1]);
                let dropout = dropout.map(|dropout| dropout.panel(columns.clone()));
                let dropped_pairs = dropout.filter(|dropout| dropout.dropped == Dropped::Pairs);
                let visible = Visible { keys: &keys[..seen], limits, dropped_pairs };
                let sums = &mut sums[first * channels..][..columns.len() * channels];
                let mut state = RowState {
                    peak: &mut state.peak[columns.clone()],
                    part: &mut state.part[columns.clone()],
                    rescale: &mut state.rescale[columns.clone()],
                    total: &mut state.total[columns.clone()],
                };
                let mut tile = Tile { data: &mut *tile, stride: TILE_STRIDE, keys: seen, queries: columns.len() };
                let visible = (!visible.complete()).then_some(visible);
                let operands = (k_rows, panel(&tiles, q_panels, dim, first, columns.len()), pairs(dim));
                let of = PlacedPanel { head_dim: dim, columns: columns.clone(), tokens: [&placed_q, &k] };
                pairing.weigh_rounded(simd, &tiles, operands, of, visible, &mut tile, &mut state);
                if let Some(dropout) = dropout.filter(|dropout| dropout.dropped == Dropped::Weights) {
                    dropout.scale(simd, &keys[..seen], &mut tile);
                }
                if channels == 0 {
                    continue; // only the rows' statistics are wanted
                }
                scale_columns(simd, state.rescale, sums);
                let weights = tiles.weave_in_place((tile.data, tile.stride), [seen, columns.len()]);
                let size = Size { rows: channels, cols: columns.len(), pairs: pairs(seen) };
                tiles.multiply(simd, size, v, weights, Output { data: sums, stride: columns.len(), add: true });
            }
        }
        for first in (0..queries.len()).step_by(PANEL) {
            let width = padded(PANEL.min(queries.len() - first));
            let sums: &[u32] = bytemuck::cast_slice(&sums[first * channels..][..width * channels]);
            let (rows, stride) = (bytemuck::cast_slice_mut(outputs), padded(value_dim));
            tiles.transpose([stride, width], (sums, width), (&mut rows[first * stride..], stride));
        }
        // SAFETY: the rows of this block are its own.
        let out = |row: usize| unsafe { out.row(slice, start + row) };
        finish(pairing, start, queries, &state, outputs, padded(value_dim), out, stats);
    }
}

/// Scratch as pairs.
pub(super) fn pairs_of(x: &mut [f32]) -> &mut [u32] {
    bytemuck::cast_slice_mut(x)
}

/// Multiplies the columns of a panel of sums.
#[inline(always)]
fn scale_columns<S: Simd>(simd: S, factors: &[f32], sums: &mut [f32]) {
    if factors.iter().all(|&factor| factor == 1.0) {
        return;
    }
    for row in sums.chunks_exact_mut(factors.len()) {
        for col in (0..factors.len()).step_by(S::F32_LANES) {
            let factor = vectors::<S, 1>(factors, col)[0];
            let sum = &mut vectors_mut::<S, 1>(row, col)[0];
            *sum = simd.mul_f32s(*sum, factor);
        }
    }
}
