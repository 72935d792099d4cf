//! The forward stream: a block of queries is held, tiles of keys and values pass by.

use pulp::{Simd, WithSimd};

use super::{
    head::{Head, PANEL, Rows, Visible, padded, positions},
    normalise::{Normalisation, RowState, Tile},
    pairing::{Pairing, Pass, score},
};
use crate::{
    Dropped, Shape,
    call::{Call, Target},
    parallel::{Parts, for_each, workers},
    scratch::{cut, scratch_len},
    simd::product::{Add, Left, Right, Size, product},
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
pub(super) struct Stream<'a, F> {
    pub call: &'a Call<'a>,
    /// The [`Pairing`] of a batch element and head.
    pub pairing: F,
    /// The batch elements and heads to work on; the others' parts of the outputs are not written.
    pub slices: &'a [u32],
}

impl<P: Pairing, F: Fn(usize) -> P + Sync> Stream<'_, F> {
    /// Writes `out [slices, seq_q, value_dim]` and `stats [slices, seq_q]` (of masked queries: zeros, and the statistic
    /// of a row without keys).
    pub fn run(&self, out: &Target<'_>, stats: &mut [f64], work: &mut [f32]) {
        let level = self.call.level;
        self.each(memory::<P>(&self.call.shape), out, stats, work, |block| level.dispatch(block));
    }

    /// As [`Stream::run`]: calls `run` with every block, with `per_worker` f32 of working memory.
    pub fn each(
        &self,
        per_worker: usize,
        out: &Target<'_>,
        stats: &mut [f64],
        work: &mut [f32],
        run: impl Fn(Block<'_, P>) + Sync,
    ) {
        let shape = self.call.shape;
        let blocks = shape.seq_q.div_ceil(QUERIES);
        let stats = Parts::new(stats);
        for_each(self.slices.len() * blocks, work, per_worker, |task, memory| {
            // Causal: the last blocks see the most keys; first come the heavy ones.
            let (slice, block) = (self.slices[task / blocks] as usize, blocks - 1 - task % blocks);
            let (start, end) = (block * QUERIES, ((block + 1) * QUERIES).min(shape.seq_q));
            let rows = slice * shape.seq_q + start..slice * shape.seq_q + end;
            // SAFETY: tasks differ in slice (no slice is listed twice) or block, so that their rows are disjoint.
            let stats = unsafe { stats.part(rows) };
            let head = Head::of(self.call, slice);
            let pairing = (self.pairing)(slice);
            run(Block { head, pairing, start, end, out, slice, stats, memory });
        });
    }
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work<P: Pairing>(shape: &Shape) -> usize {
    workers(shape.slices() * shape.seq_q.div_ceil(QUERIES)) * memory::<P>(shape)
}

/// f32 of working memory per task.
fn memory<P: Pairing>(shape: &Shape) -> usize {
    scratch_len(sizes::<P>(shape.seq_q, shape.seq_kv, shape.head_dim, shape.value_dim))
}

fn sizes<P: Pairing>(seq_q: usize, seq_kv: usize, head_dim: usize, value_dim: usize) -> [usize; 13] {
    let (queries, keys, dv) = (padded(seq_q.min(QUERIES)), seq_kv.min(KEYS), padded(value_dim));
    let (q, k) = (P::query_buffer_len(queries, head_dim, Pass::Forward), P::key_buffer_len(keys, head_dim));
    // positions, queries, outputs; peak, part, rescale, total (f64); limits, draws; positions, keys, values; scores
    let [row, total] = [queries, 2 * queries];
    [row, q, queries * dv, row, row, row, total, row, row, keys, k, keys * dv, keys * TILE_STRIDE]
}

/// One task.
pub(super) struct Block<'a, P> {
    pub head: Head<'a>,
    pub pairing: P,
    pub start: usize,
    pub end: usize,
    /// The rows from `start` to `end` of the slice are its own.
    pub out: &'a Target<'a>,
    pub slice: usize,
    pub stats: &'a mut [f64],
    pub memory: &'a mut [f32],
}

impl<P: Pairing> WithSimd for Block<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, pairing, start, end, out, slice, stats, memory } = self;
        let ([at, q_buffer, sums, peak, part, rescale, total, limits, draws, key_at, k_buffer, v_buffer, tile], _) =
            cut(memory, sizes::<P>(head.seq_q, head.seq_kv, head.head_dim, head.value_dim));
        let queries = positions(start..end, head.keep_query, at);
        let q = pairing.queries(&head, queries, Pass::Forward, q_buffer);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        limits.iter_mut().zip(queries).for_each(|(limit, &i)| *limit = head.limit(i as usize) as u32);
        let dropout = head.panel_dropout(queries, draws);
        let mut state = RowState { peak, part, rescale, total: bytemuck::cast_slice_mut(total) };
        state.clear();
        let stride = padded(head.value_dim);
        sums[..queries.len() * stride].fill(0.0);
        let last = queries.len().checked_sub(1).map_or(0, |n| limits[n] as usize);
        for from in (0..last).step_by(KEYS) {
            let keys = positions(from..(from + KEYS).min(last), head.keep_key, key_at);
            let k = pairing.keys(&head, keys, Pass::Forward, &mut *k_buffer);
            let v = Rows::gather(head.v, keys, true, v_buffer);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let width = padded(count);
                let columns = first..first + width;
                let limits = &limits[columns.clone()];
                // Keys beyond the last query of the panel are absent for all of it.
                let seen = keys.partition_point(|&key| key < limits[count - 1]);
                let dropout = dropout.map(|dropout| dropout.panel(columns.clone()));
                let dropped_pairs = dropout.filter(|dropout| dropout.dropped == Dropped::Pairs);
                let visible = Visible { keys: &keys[..seen], limits, dropped_pairs };
                let mut state = RowState {
                    peak: &mut state.peak[columns.clone()],
                    part: &mut state.part[columns.clone()],
                    rescale: &mut state.rescale[columns.clone()],
                    total: &mut state.total[columns],
                };
                let mut tile = Tile { data: &mut *tile, stride: TILE_STRIDE, keys: seen, queries: width };
                let visible = (!visible.complete()).then_some(visible);
                pairing.weigh(simd, head.head_dim, first..first + width, [&q, &k], visible, &mut tile, &mut state);
                if let Some(dropout) = dropout.filter(|dropout| dropout.dropped == Dropped::Weights) {
                    dropout.scale(simd, &keys[..seen], &mut tile);
                }
                accumulate(simd, &tile, v, state.rescale, count, &mut sums[first * stride..(first + count) * stride]);
            }
        }
        // SAFETY: the rows of this block are its own.
        let out = |row: usize| unsafe { out.row(slice, start + row) };
        finish(pairing, start, queries, &state, sums, stride, out, stats);
    }
}

/// One tile of keys against one panel of queries, paired by their products.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one tile's operands
pub(in crate::structure) fn advance<S: Simd, N: Normalisation>(
    simd: S,
    norm: N,
    panel: (Right<'_>, usize),
    (k, v): (Rows<'_>, Rows<'_>),
    visible: Visible<'_>,
    mut tile: Tile<'_>,
    state: &mut RowState<'_>,
    count: usize,
    sums: &mut [f32],
) {
    score(simd, norm, panel, k, (!visible.complete()).then_some(visible), &mut tile, state);
    accumulate(simd, &tile, v, state.rescale, count, sums);
}

/// Adds the values of a tile, by their weights, to the sums of a panel of `count` queries.
#[inline(always)]
fn accumulate<S: Simd>(simd: S, tile: &Tile<'_>, v: Rows<'_>, rescale: &[f32], count: usize, sums: &mut [f32]) {
    if v.stride == 0 {
        return; // only the rows' statistics are wanted
    }
    for (row, &rescale) in sums.chunks_exact_mut(v.stride).zip(rescale) {
        if rescale != 1.0 {
            row.iter_mut().for_each(|x| *x *= rescale);
        }
    }
    let size = Size { rows: count, cols: v.stride, depth: tile.keys };
    let left = Left { data: tile.data, row_stride: 1, depth_stride: tile.stride };
    product(simd, size, left, v.as_right(0..tile.keys), &mut Add { data: sums, stride: v.stride });
}

/// Writes the finished rows back to their positions, zeros to the masked ones.
#[allow(clippy::too_many_arguments)] // what a block carries to its end
#[inline(always)]
pub(super) fn finish<'o, P: Pairing>(
    pairing: P,
    start: usize,
    queries: &[u32],
    state: &RowState<'_>,
    sums: &[f32],
    stride: usize,
    out: impl Fn(usize) -> &'o mut [f32],
    stats: &mut [f64],
) {
    if queries.len() < stats.len() {
        (0..stats.len()).for_each(|row| out(row).fill(0.0));
        stats.fill(pairing.close(f32::MIN, 0.0).1);
    }
    for (n, &i) in queries.iter().enumerate() {
        let (row, sums) = (i as usize - start, &sums[n * stride..]);
        let (factor, stat) = pairing.close(state.peak[n], state.total[n]);
        stats[row] = stat;
        out(row).iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}
