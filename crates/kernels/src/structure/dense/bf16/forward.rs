//! The forward stream: see [`super::super::forward`], whose blocks and tiles these are.

use pulp::{Simd, WithSimd};

use super::{
    Scaled,
    layout::{Source, deep, panel},
    take_rows,
};
use crate::{
    Dropped, Shape,
    call::Target,
    parallel::workers,
    scratch::{cut, scratch_len},
    simd::{
        bf16::{Bf16Products, Left, Multiplier, Output, Right, Size, pairs},
        product::{vectors, vectors_mut},
    },
    structure::dense::{
        forward::{Block, KEYS, QUERIES, Stream, TILE_STRIDE, finish},
        head::{PANEL, Visible, padded, positions},
        normalise::{Normalisation, RowState, Tile},
        pairing::{Dot, Entries},
    },
};

/// [`Stream::run`] with bf16 products.
pub(super) fn run<'s, N: Normalisation>(
    stream: &Stream<'_, impl Fn(usize) -> Dot<'s, N> + Sync>,
    products: Bf16Products,
    out: &Target<'_>,
    stats: &mut [f64],
    work: &mut [f32],
) {
    let level = stream.call.level;
    stream.each(memory(&stream.call.shape), out, stats, work, |block| level.dispatch(Task { block, products }));
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work(shape: &Shape) -> usize {
    workers(shape.slices() * shape.seq_q.div_ceil(QUERIES)) * memory(shape)
}

/// f32 of working memory per task.
fn memory(shape: &Shape) -> usize {
    scratch_len(sizes(shape.seq_q, shape.seq_kv, shape.head_dim, shape.value_dim))
}

type Tokens<'a> = Source<'a, fn(usize) -> f32>;

fn sizes(seq_q: usize, seq_kv: usize, head_dim: usize, value_dim: usize) -> [usize; 18] {
    let (queries, keys, row) = (padded(seq_q.min(QUERIES)), seq_kv.min(KEYS), head_dim.max(value_dim));
    let panel = PANEL.min(queries);
    [
        // positions, queries, one panel of them as rows, sums, outputs
        queries,
        Tokens::panels_len(queries, head_dim),
        panel * pairs(head_dim),
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
        Tokens::rows_len(keys, head_dim),
        Tokens::woven_len(keys, value_dim),
        Tokens::woven_len(keys, value_dim),
        deep(keys) * TILE_STRIDE,
        padded(row),
        padded(row),
    ]
}

struct Task<'a, 's, N> {
    block: Block<'a, Dot<'s, N>>,
    products: Bf16Products,
}

impl<N: Normalisation> WithSimd for Task<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { block: Block { head, pairing, start, end, out, slice, stats, memory }, products } = self;
        let parts = cut(memory, sizes(head.seq_q, head.seq_kv, head.head_dim, head.value_dim)).0;
        let [at, q_panels, q_rows, sums, outputs, peak, part, rescale, total, limits, draws, parts @ ..] = parts;
        let [key_at, k_rows, v_woven, v_columns, tile, row, other] = parts;
        let [q_panels, q_rows, k_rows] = [q_panels, q_rows, k_rows].map(pairs_of);
        let [v_woven, v_columns] = [v_woven, v_columns].map(pairs_of);
        let (dim, value_dim, channels) = (head.head_dim, head.value_dim, deep(head.value_dim));
        let (tiles, norm) = (products.enter(), Scaled::of(&pairing));
        let one: fn(usize) -> f32 = |_| 1.0;

        let queries = positions(start..end, head.keep_query, at);
        let q = Source { tensor: head.q, kept: queries, factor: |n: usize| pairing.row(queries[n]) };
        q.panels(&tiles, row, q_rows, q_panels);
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
            let k = Source { tensor: head.k, kept: keys, factor: one }.rows(&tiles, row, k_rows);
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
                let q = panel(q_panels, dim, first, columns.len());
                score(simd, &tiles, norm, (k, q, pairs(dim)), visible, &mut tile, &mut state);
                if let Some(dropout) = dropout.filter(|dropout| dropout.dropped == Dropped::Weights) {
                    dropout.scale(simd, &keys[..seen], &mut tile);
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

/// Fills `tile` with the weights of a panel of queries and keys, whose pairs are so many.
#[inline(always)]
fn score<S: Simd, N: Normalisation>(
    simd: S,
    tiles: &Multiplier,
    norm: N,
    (k, q, pairs): (Left<'_>, Right<'_>, usize),
    visible: Option<Visible<'_>>,
    tile: &mut Tile<'_>,
    state: &mut RowState<'_>,
) {
    norm.open(state);
    for from in (0..tile.keys).step_by(tiles.band()) {
        let rows = from..(from + tiles.band()).min(tile.keys);
        let (stride, size) = (tile.stride, Size { rows: rows.len(), cols: tile.queries, pairs });
        let into = Output { data: &mut tile.data[from * stride..], stride, add: false };
        tiles.multiply(simd, size, k.from(from), q, into);
        let cols = tile.queries;
        let mut entries = Entries { norm, tile: &mut *tile, part: state.part, visible };
        take_rows::<S, 4>(simd, rows, cols, &mut entries);
    }
    norm.settle(simd, tile, state);
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
