//! The backward stream: a tile of keys and values is held, panels of queries and output gradients pass by.
//!
//! One pass makes all five products of a tile: the scores `K Q^T` and `V G^T` again, then `dV += P^T G`,
//! `dK += dS^T Q`, `dQ += dS K`, with the scores held as `[key][query]` throughout.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{
    forward::TILE_STRIDE,
    head::{Head, PANEL, Rows, Visible, padded, positions, transpose},
    pairing::{Margins, PairTile, Pairing, Pass, Tokens},
};
use crate::{
    Dropped, Shape,
    call::{Call, Target, TokenRows, View},
    parallel::{Parts, for_each, workers},
    scratch::{cut, scratch_len},
    simd::product::{Add, Left, Right, Size, product},
};

/// Keys of one tile: at 64 channels the tile, its gradients and the two tiles of scores (2 x 40 KiB) take 210 KiB of a
/// 2 MiB L2, while a panel (16 KiB) stays in L1.
pub(super) const KEYS: usize = 128;
/// Tasks that a call is split into where batch and heads are fewer: each takes a range of the keys, so that every split
/// but the first costs one more partial `dq`. A constant, lest results depend on the machine.
const TASKS: usize = 16;

/// What the backward stream needs to know per query; `[slices, seq_q]` each.
pub(super) struct Terms<'a> {
    /// Subtracted from the logit's value: the base-2 log-sum-exp, where rows are normalised.
    pub shift: &'a [f32],
    /// Weight of the projection taken out of the gradient.
    pub delta: &'a [f32],
    /// Factor on the output gradient.
    pub factor: &'a [f32],
}

/// Where the gradients go.
pub(crate) struct Targets<'a> {
    pub dq: Target<'a>,
    /// `None` when tied: `dq` then gets both paths.
    pub dk: Option<Target<'a>>,
    /// `None` when it is not wanted.
    pub dv: Option<Target<'a>>,
}

/// What a [`Pairing`] sums up beside the gradients of the tokens.
#[derive(Default)]
pub(super) struct Sums<'a> {
    /// Per key, `[slices, seq_kv]`, over the queries ([`Margins::key`]), in place of `dq` and `dk`.
    pub columns: Option<&'a mut [f32]>,
    /// [`Pairing::PARAMETERS`] numbers per task; see [`splits`].
    pub parameters: &'a mut [f64],
}

/// The gradients of one hop.
pub(super) struct Stream<'a, F> {
    pub call: &'a Call<'a>,
    /// The [`Pairing`] of a batch element and head.
    pub pairing: F,
    /// Factor on the gradients of `v`, per batch element and head.
    pub value: &'a [f32],
    pub dout: View<'a>,
    pub terms: Terms<'a>,
}

/// Ranges of keys that `shape` is split into: tasks per batch element and head.
pub(super) fn splits(shape: &Shape) -> usize {
    TASKS.div_ceil(shape.slices()).min(shape.seq_kv.div_ceil(4 * KEYS)).max(1)
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work<P: Pairing>(shape: &Shape, tied: bool) -> usize {
    work_of(shape, tied, scratch_len(sizes::<P>(shape)))
}

/// [`work`], with `per_worker` f32 for every thread.
pub(super) fn work_of(shape: &Shape, tied: bool, per_worker: usize) -> usize {
    scratch_len(partials(shape, tied)) + workers(shape.slices() * splits(shape)) * per_worker
}

/// Partial `dq` of all splits but the first, and `dk` when tied.
fn partials(shape: &Shape, tied: bool) -> [usize; 2] {
    [(splits(shape) - 1) * shape.q_len(), if tied { shape.k_len() } else { 0 }]
}

fn sizes<P: Pairing>(shape: &Shape) -> [usize; 18] {
    let (queries, keys) = (padded(shape.seq_q), shape.seq_kv.min(KEYS));
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    let tile = keys * TILE_STRIDE;
    let [query_margin, key_margin] = if P::MARGINS { [queries, keys] } else { [0; 2] };
    [
        // positions, limits, draws, shift, delta; queries; panels and rows of dout; dq, its margin
        queries,
        queries,
        queries,
        queries,
        queries,
        P::query_buffer_len(queries, shape.head_dim, Pass::Backward),
        queries * shape.value_dim,
        queries * dv,
        queries * d,
        query_margin,
        // positions, keys, rows of v; dk, its margin; dv; logits then weights, gradients of the logits
        keys,
        P::key_buffer_len(keys, shape.head_dim),
        keys * dv,
        keys * d,
        key_margin,
        keys * dv,
        tile,
        tile,
    ]
}

impl<P: Pairing, F: Fn(usize) -> P + Sync> Stream<'_, F> {
    pub fn run(&self, targets: Targets<'_>, sums: Sums<'_>, work: &mut [f32]) {
        let level = self.call.level;
        self.each(scratch_len(sizes::<P>(&self.call.shape)), targets, sums, work, |task| level.dispatch(task));
    }

    /// As [`Stream::run`]: calls `run` with every task, with `per_worker` f32 of working memory.
    pub fn each(
        &self,
        per_worker: usize,
        mut targets: Targets<'_>,
        sums: Sums<'_>,
        work: &mut [f32],
        run: impl Fn(Task<'_, P>) + Sync,
    ) {
        let shape = self.call.shape;
        let (splits, tied, slices) = (splits(&shape), targets.dk.is_none(), shape.slices());
        let ([partial, tied_dk], work) = cut(work, partials(&shape, tied));
        let with_tokens = sums.columns.is_none();
        {
            let dq = &targets.dq;
            let partial = Target::in_one_piece(&mut *partial, (splits - 1) * slices, [shape.seq_q, shape.head_dim]);
            let tied_dk = Target::in_one_piece(&mut *tied_dk, slices, [shape.seq_kv, shape.head_dim]);
            let dk = targets.dk.as_ref().unwrap_or(&tied_dk);
            let (dv, columns) = (targets.dv.as_ref(), sums.columns.map(Parts::new));
            let parameters = Parts::new(sums.parameters);
            for_each(slices * splits, work, per_worker, |task, memory| {
                let (slice, split) = (task / splits, task % splits);
                let share = shape.seq_kv.div_ceil(KEYS).div_ceil(splits) * KEYS;
                let keys = (split * share).min(shape.seq_kv)..((split + 1) * share).min(shape.seq_kv);
                let dq = match split.checked_sub(1) {
                    None => (dq, slice),
                    Some(n) => (&partial, n * slices + slice),
                };
                let of_keys = slice * shape.seq_kv + keys.start..slice * shape.seq_kv + keys.end;
                // SAFETY: tasks differ in slice or split: each split has its own range of keys.
                let (columns, parameters) = unsafe {
                    let columns = columns.as_ref().map(|columns| columns.part(of_keys));
                    (columns, parameters.part(task * P::PARAMETERS..(task + 1) * P::PARAMETERS))
                };
                let into = Outputs { tokens: with_tokens.then_some((dq, dk)), dv, columns, parameters };
                let pairing = (self.pairing)(slice);
                let (call, value) = (self.call, self.value[slice]);
                let (dout, terms) = (self.dout, &self.terms);
                run(Task { call, pairing, value, dout, terms, slice, keys, into, memory });
            });
        }
        if with_tokens {
            for extra in partial.chunks_exact(shape.q_len()).chain(tied.then_some(&*tied_dk)) {
                let extra = View::in_one_piece(extra, slices, [shape.seq_q, shape.head_dim]);
                targets.dq.for_each_row(|slice, i, dq| {
                    dq.iter_mut().zip(extra.row(slice, i)).for_each(|(dq, &x)| *dq += x);
                });
            }
        }
    }
}

/// Where one task writes: its range of keys, and a `dq` of its own.
pub(super) struct Outputs<'a> {
    /// `dq` and the slice of it; `dk`.
    pub tokens: Option<((&'a Target<'a>, usize), &'a Target<'a>)>,
    pub dv: Option<&'a Target<'a>>,
    pub columns: Option<&'a mut [f32]>,
    pub parameters: &'a mut [f64],
}

/// One head and range of keys.
pub(super) struct Task<'a, P> {
    pub call: &'a Call<'a>,
    pub pairing: P,
    pub value: f32,
    pub dout: View<'a>,
    pub terms: &'a Terms<'a>,
    pub slice: usize,
    pub keys: Range<usize>,
    pub into: Outputs<'a>,
    pub memory: &'a mut [f32],
}

impl<P: Pairing> WithSimd for Task<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { call, pairing, value, dout, terms, slice, keys, mut into, memory } = self;
        let head = &Head::of(call, slice);
        let (d, dv_dim) = (head.head_dim, head.value_dim);
        let parts = cut(memory, sizes::<P>(&call.shape)).0;
        let [at, limits, draws, shift, delta, q_buffer, g_panels, g_buffer, dq_sums, dq_margin, parts @ ..] = parts;
        let [key_at, k_buffer, v_buffer, dk_sums, dk_margin, dv_sums, weights, slopes] = parts;

        let queries = positions(0..head.seq_q, head.keep_query, at);
        let row = |n: usize| slice * head.seq_q + queries[n] as usize;
        let factor = |n: usize| terms.factor[row(n)];
        let dout: TokenRows<'_> = dout.slice(slice);
        let q = pairing.queries(head, queries, Pass::Backward, q_buffer);
        transpose(dout, queries, factor, g_panels);
        let g = Rows::copy(dout, queries, factor, g_buffer);
        let dropout = head.panel_dropout(queries, draws);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        for (n, &i) in queries.iter().enumerate() {
            limits[n] = head.limit(i as usize) as u32;
            shift[n] = terms.shift[row(n)];
            delta[n] = terms.delta[row(n)];
        }
        shift[queries.len()..].fill(0.0);
        delta[queries.len()..].fill(0.0);
        dq_sums[..queries.len() * padded(d)].fill(0.0);
        dq_margin.fill(0.0);
        into.parameters.fill(0.0);

        for from in keys.clone().step_by(KEYS) {
            let tile_keys = from..(from + KEYS).min(keys.end);
            let kept = positions(tile_keys.clone(), head.keep_key, key_at);
            let k = pairing.keys(head, kept, Pass::Backward, &mut *k_buffer);
            let v = Rows::gather(head.v, kept, false, v_buffer);
            dk_sums[..kept.len() * padded(d)].fill(0.0);
            dv_sums[..kept.len() * v.stride].fill(0.0);
            dk_margin.fill(0.0);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let columns = first..first + padded(count);
                let limits = &limits[columns.clone()];
                let seen = kept.partition_point(|&key| key < limits[count - 1]);
                let margin = if P::MARGINS { columns.clone() } else { 0..0 };
                let rows = first * padded(d)..(first + count) * padded(d);
                let dropout = dropout.map(|dropout| dropout.panel(columns.clone()));
                let dropped_pairs = dropout.filter(|dropout| dropout.dropped == Dropped::Pairs);
                let visible = Visible { keys: &kept[..seen], limits, dropped_pairs };
                let pairs = PairTile {
                    head_dim: d,
                    value_dim: dv_dim,
                    queries: &q,
                    keys: &k,
                    values: v,
                    gradients: Tokens::panel(g_panels, dv_dim, &columns),
                    shift: &shift[columns.clone()],
                    delta: &delta[columns.clone()],
                    visible,
                    complete: visible.complete(),
                    dropout: dropout.filter(|dropout| dropout.dropped == Dropped::Weights),
                    weights: &mut *weights,
                    slopes: &mut *slopes,
                    margins: Margins {
                        query: &mut dq_margin[margin],
                        key: &mut *dk_margin,
                        dq: &mut dq_sums[rows.clone()],
                        dk: &mut *dk_sums,
                        parameters: &mut *into.parameters,
                    },
                    columns,
                };
                pairing.pull_back(simd, pairs);
                let tile = Products { weights: &*weights, slopes: &*slopes, keys: seen, queries: count };
                if into.dv.is_some() {
                    tile.values(simd, g.as_right(first..first + count), dv_sums);
                }
                if into.tokens.is_some() {
                    tile.tokens(simd, q.rows.as_right(first..first + count), k.rows, dk_sums, &mut dq_sums[rows]);
                }
            }
            let position = |n: usize| kept[n] as usize;
            if let Some((_, dk)) = into.tokens {
                // SAFETY: no other task has these keys of this slice.
                let dk = |key: usize| unsafe { dk.row(slice, key) };
                let finish = Finish { pairing, tokens: &k, margin: dk_margin, sums: dk_sums, dim: d };
                finish.scatter(kept.len(), position, tile_keys.clone(), dk);
            }
            if let Some(dv) = into.dv {
                // SAFETY: as above.
                let dv = |key: usize| unsafe { dv.row(slice, key) };
                scatter(dv_sums, dv_dim, kept.len(), position, value, tile_keys.clone(), dv);
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
            let finish = Finish { pairing, tokens: &q, margin: dq_margin, sums: dq_sums, dim: d };
            finish.scatter(queries.len(), |n| queries[n] as usize, 0..head.seq_q, dq);
        }
    }
}

/// What the scores' gradients of one tile are multiplied with.
struct Products<'a> {
    weights: &'a [f32],
    slopes: &'a [f32],
    keys: usize,
    queries: usize,
}

impl Products<'_> {
    /// `dV += P^T G`.
    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, g: Right<'_>, dv: &mut [f32]) {
        let left = Left { data: self.weights, row_stride: TILE_STRIDE, depth_stride: 1 };
        let size = Size { rows: self.keys, cols: g.stride, depth: self.queries };
        product(simd, size, left, g, &mut Add { data: dv, stride: g.stride });
    }

    /// `dK += dS^T Q`, `dQ += dS K`.
    #[inline(always)]
    fn tokens<S: Simd>(&self, simd: S, q: Right<'_>, k: Rows<'_>, dk: &mut [f32], dq: &mut [f32]) {
        let of_key = Left { data: self.slopes, row_stride: TILE_STRIDE, depth_stride: 1 };
        let size = Size { rows: self.keys, cols: k.stride, depth: self.queries };
        product(simd, size, of_key, q, &mut Add { data: dk, stride: k.stride });
        let of_query = Left { data: self.slopes, row_stride: 1, depth_stride: TILE_STRIDE };
        let size = Size { rows: self.queries, cols: k.stride, depth: self.keys };
        product(simd, size, of_query, k.as_right(0..self.keys), &mut Add { data: dq, stride: k.stride });
    }
}

/// The sums of some tokens' gradients, about to be written.
struct Finish<'a, P> {
    pairing: P,
    tokens: &'a Tokens<'a>,
    margin: &'a [f32],
    sums: &'a [f32],
    dim: usize,
}

impl<P: Pairing> Finish<'_, P> {
    /// Writes the gradients of the `kept` ones of `tokens` to their rows `out`, zeros to those of the others.
    #[inline(always)]
    fn scatter<'o>(
        &self,
        kept: usize,
        position: impl Fn(usize) -> usize,
        tokens: Range<usize>,
        out: impl Fn(usize) -> &'o mut [f32],
    ) {
        if kept < tokens.len() {
            tokens.for_each(|token| out(token).fill(0.0));
        }
        for (n, sums) in self.sums.chunks_exact(padded(self.dim)).take(kept).enumerate() {
            let margin = if P::MARGINS { self.margin[n] } else { 0.0 };
            self.pairing.gradient(self.tokens, n, margin, sums, out(position(n)));
        }
    }
}

/// Writes sums times `factor` to the rows `out` of the `kept` ones of `tokens`, zeros to those of the masked ones.
fn scatter<'o>(
    sums: &[f32],
    dim: usize,
    kept: usize,
    position: impl Fn(usize) -> usize,
    factor: f32,
    tokens: Range<usize>,
    out: impl Fn(usize) -> &'o mut [f32],
) {
    if kept < tokens.len() {
        tokens.for_each(|token| out(token).fill(0.0));
    }
    for (n, sums) in sums.chunks_exact(padded(dim)).take(kept).enumerate() {
        out(position(n)).iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}
