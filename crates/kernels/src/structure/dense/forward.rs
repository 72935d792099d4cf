//! The forward stream: a block of queries is held, tiles of keys and values pass by.

use pulp::{Simd, WithSimd};

use super::{
    head::{Head, PANEL, Rows, Visible, padded, positions, transpose},
    normalise::{Normalisation, RowState, Tile},
};
use crate::{
    Shape,
    operator::Call,
    parallel::{Parts, for_each, workers},
    scratch::{cut, room},
    simd::product::{Add, Left, Right, Sink, Size, product, vectors, vectors_mut},
};

/// Queries of one task: their outputs (64 KiB at 64 channels) stay in a 2 MiB L2 beside the tiles of keys and values,
/// which are read `seq_q / QUERIES` times from main memory, a hundredth of its bandwidth.
pub(in crate::structure) const QUERIES: usize = 256;
/// Keys of one tile: at 64 channels a tile of values (32 KiB) stays in a 48 KiB L1 beside the 8 KiB of weights that the
/// product with it reads at a time, and a micro-tile is loaded and stored once per 128 multiply-adds.
pub(in crate::structure) const KEYS: usize = 128;
/// Distance of the rows of a tile of scores: one cache line more than a panel, so that the rows do not fall into the
/// same L1 sets.
pub(in crate::structure) const TILE_STRIDE: usize = PANEL + 16;

/// The operator applied to `call.v`: `out` and one statistic per query.
pub(super) struct Stream<'a, N> {
    pub call: &'a Call<'a>,
    pub norm: N,
    /// Factor on the product of query and key, per batch element and head.
    pub logit: &'a [f32],
    /// The batch elements and heads to work on; the others' parts of the outputs are not written.
    pub slices: &'a [u32],
}

impl<N: Normalisation> Stream<'_, N> {
    /// Writes `out [slices, seq_q, value_dim]` and `stats [slices, seq_q]` (of masked queries: zeros, and the statistic
    /// of a row without keys).
    pub fn run(&self, out: &mut [f32], stats: &mut [f64], work: &mut [f32]) {
        let shape = self.call.shape;
        let blocks = shape.seq_q.div_ceil(QUERIES);
        let (out, stats) = (Parts::new(out), Parts::new(stats));
        for_each(self.slices.len() * blocks, work, memory(&shape), |task, memory| {
            // Causal: the last blocks see the most keys; first come the heavy ones.
            let (slice, block) = (self.slices[task / blocks] as usize, blocks - 1 - task % blocks);
            let (start, end) = (block * QUERIES, ((block + 1) * QUERIES).min(shape.seq_q));
            let rows = slice * shape.seq_q + start..slice * shape.seq_q + end;
            // SAFETY: tasks differ in slice (no slice is listed twice) or block, so that their rows are disjoint.
            let stats = unsafe { stats.part(rows.clone()) };
            // SAFETY: as above.
            let out = unsafe { out.part(rows.start * shape.value_dim..rows.end * shape.value_dim) };
            let head = Head::of(self.call, slice);
            let logit = self.logit[slice];
            self.call.level.dispatch(Block { head, norm: self.norm, logit, start, end, out, stats, memory });
        });
    }
}

/// f32 of working memory for `shape` in the current thread pool.
pub(crate) fn work(shape: &Shape) -> usize {
    workers(shape.slices() * shape.seq_q.div_ceil(QUERIES)) * memory(shape)
}

/// f32 of working memory per task.
fn memory(shape: &Shape) -> usize {
    room(sizes(shape.seq_q, shape.seq_kv, shape.head_dim, shape.value_dim))
}

fn sizes(seq_q: usize, seq_kv: usize, head_dim: usize, value_dim: usize) -> [usize; 12] {
    let (queries, keys) = (padded(seq_q.min(QUERIES)), seq_kv.min(KEYS));
    let (d, dv) = (padded(head_dim), padded(value_dim));
    let tile = keys * TILE_STRIDE;
    // positions, panels, outputs; peak, part, rescale, total (f64); limits; positions, rows of keys, of values; scores
    let [row, total] = [queries, 2 * queries];
    [row, queries * head_dim, queries * dv, row, row, row, total, row, keys, keys * d, keys * dv, tile]
}

/// One task.
struct Block<'a, N> {
    head: Head<'a>,
    norm: N,
    logit: f32,
    start: usize,
    end: usize,
    out: &'a mut [f32],
    stats: &'a mut [f64],
    memory: &'a mut [f32],
}

impl<N: Normalisation> WithSimd for Block<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, norm, logit, start, end, out, stats, memory } = self;
        let ([at, panels, sums, peak, part, rescale, total, limits, key_at, k_room, v_room, tile], _) =
            cut(memory, sizes(head.seq_q, head.seq_kv, head.head_dim, head.value_dim));
        let queries = positions(start..end, head.keep_query, at);
        transpose(head.q, head.head_dim, queries, |_| logit, panels);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        limits.iter_mut().zip(queries).for_each(|(limit, &i)| *limit = head.limit(i as usize) as u32);
        let mut state = RowState { peak, part, rescale, total: bytemuck::cast_slice_mut(total) };
        state.clear();
        let stride = padded(head.value_dim);
        sums[..queries.len() * stride].fill(0.0);
        let last = queries.len().checked_sub(1).map_or(0, |n| limits[n] as usize);
        for from in (0..last).step_by(KEYS) {
            let keys = positions(from..(from + KEYS).min(last), head.keep_key, key_at);
            let k = Rows::gather(head.k, head.head_dim, keys, false, k_room);
            let v = Rows::gather(head.v, head.value_dim, keys, true, v_room);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let width = padded(count);
                let columns = first..first + width;
                let limits = &limits[columns.clone()];
                // Keys beyond the last query of the panel are absent for all of it.
                let seen = keys.partition_point(|&key| key < limits[count - 1]);
                let visible = Visible { keys: &keys[..seen], limits };
                let mut state = RowState {
                    peak: &mut state.peak[columns.clone()],
                    part: &mut state.part[columns.clone()],
                    rescale: &mut state.rescale[columns.clone()],
                    total: &mut state.total[columns],
                };
                let tile = Tile { data: tile, stride: TILE_STRIDE, keys: seen, queries: width };
                let panel = Right { data: &panels[first * head.head_dim..][..width * head.head_dim], stride: width };
                let sums = &mut sums[first * stride..(first + count) * stride];
                advance(simd, norm, (panel, head.head_dim), (k, v), visible, tile, &mut state, count, sums);
            }
        }
        finish(norm, &head, start, queries, &state, sums, out, stats);
    }
}

/// One tile of keys against one panel of queries.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one tile's operands
pub(in crate::structure) fn advance<S: Simd, N: Normalisation>(
    simd: S,
    norm: N,
    (panel, head_dim): (Right<'_>, usize),
    (k, v): (Rows<'_>, Rows<'_>),
    visible: Visible<'_>,
    mut tile: Tile<'_>,
    state: &mut RowState<'_>,
    count: usize,
    sums: &mut [f32],
) {
    norm.open(state);
    let keys = tile.keys;
    let size = Size { rows: keys, cols: tile.queries, depth: head_dim };
    let complete = visible.keys.last().is_none_or(|&key| key < visible.limits[0]);
    let visible = (!complete).then_some(visible);
    let mut entries = Entries { norm, tile: &mut tile, part: state.part, visible };
    product(simd, size, k.as_left(), panel, &mut entries);
    norm.settle(simd, &mut tile, state);
    for (row, &rescale) in sums.chunks_exact_mut(v.stride).zip(&*state.rescale) {
        if rescale != 1.0 {
            row.iter_mut().for_each(|x| *x *= rescale);
        }
    }
    let size = Size { rows: count, cols: v.stride, depth: keys };
    let left = Left { data: tile.data, row_stride: 1, depth_stride: tile.stride };
    product(simd, size, left, v.as_right(0..keys), &mut Add { data: sums, stride: v.stride });
}

/// Writes the finished rows back to their positions, zeros to the masked ones.
#[allow(clippy::too_many_arguments)] // what a block carries to its end
#[inline(always)]
fn finish<N: Normalisation>(
    norm: N,
    head: &Head<'_>,
    start: usize,
    queries: &[u32],
    state: &RowState<'_>,
    sums: &[f32],
    out: &mut [f32],
    stats: &mut [f64],
) {
    let dim = head.value_dim;
    if queries.len() < stats.len() {
        out.fill(0.0);
        stats.fill(norm.close(f32::MIN, 0.0).1);
    }
    for (n, (&i, sums)) in queries.iter().zip(sums.chunks_exact(padded(dim))).enumerate() {
        let row = i as usize - start;
        let (factor, stat) = norm.close(state.peak[n], state.total[n]);
        stats[row] = stat;
        out[row * dim..][..dim].iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}

/// Makes entries of a product's logits, in registers.
struct Entries<'a, 't, N> {
    norm: N,
    tile: &'a mut Tile<'t>,
    part: &'a mut [f32],
    visible: Option<Visible<'a>>,
}

impl<S: Simd, T: Normalisation> Sink<S> for Entries<'_, '_, T> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        // Copied out and back: in memory, the running values would be a chain of stores and loads.
        let mut part = [simd.splat_f32s(0.0); N];
        part.copy_from_slice(vectors::<S, N>(self.part, col));
        for (m, logits) in block.iter().enumerate() {
            let entries = vectors_mut::<S, N>(self.tile.data, (row + m) * self.tile.stride + col);
            for n in 0..N {
                let mut entry = self.norm.entry(simd, logits[n]);
                if let Some(visible) = self.visible {
                    let limits: &[f32] = bytemuck::cast_slice(visible.limits);
                    let limit = simd.transmute_u32s_f32s(vectors::<S, N>(limits, col)[n]);
                    let seen = simd.less_than_u32s(simd.splat_u32s(visible.keys[row + m]), limit);
                    entry = simd.select_f32s(seen, entry, simd.splat_f32s(T::ABSENT));
                }
                entries[n] = entry;
                part[n] = self.norm.gather(simd, part[n], entry);
            }
        }
        vectors_mut::<S, N>(self.part, col).copy_from_slice(&part);
    }
}
