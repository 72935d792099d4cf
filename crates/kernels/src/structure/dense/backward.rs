//! The backward stream: a tile of keys and values is held, panels of queries and output gradients pass by.
//!
//! One pass makes all five products of a tile: the scores `K Q^T` and `V G^T` again, then `dV += P^T G`,
//! `dK += dS^T Q`, `dQ += dS K`, with the scores held as `[key][query]` throughout.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{
    forward::TILE_STRIDE,
    head::{Head, PANEL, Rows, Visible, padded, positions, transpose},
    normalise::Normalisation,
};
use crate::{
    Shape,
    operator::Call,
    parallel::{Parts, for_each, workers},
    scratch::{cut, room},
    simd::product::{Add, Left, Right, Sink, Size, Store, product, vectors, vectors_mut},
};

/// Keys of one tile: at 64 channels the tile, its gradients and the two tiles of scores (2 x 40 KiB) take 210 KiB of a
/// 2 MiB L2, while a panel (16 KiB) stays in L1.
const KEYS: usize = 128;
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
    pub dq: &'a mut [f32],
    /// `None` when tied: `dq` then gets both paths.
    pub dk: Option<&'a mut [f32]>,
    /// `None` when it is not wanted.
    pub dv: Option<&'a mut [f32]>,
}

/// The gradients of one hop.
pub(super) struct Stream<'a, N> {
    pub call: &'a Call<'a>,
    pub norm: N,
    /// Factor on the product of query and key, and on its gradient, per batch element and head.
    pub logit: &'a [f32],
    /// Factor on the gradients of `q` and `k`, per batch element and head.
    pub chain: &'a [f32],
    /// Factor on the gradients of `v`, per batch element and head.
    pub value: &'a [f32],
    pub dout: &'a [f32],
    pub terms: Terms<'a>,
}

/// Ranges of keys that `shape` is split into.
fn splits(shape: &Shape) -> usize {
    TASKS.div_ceil(shape.slices()).min(shape.seq_kv.div_ceil(4 * KEYS)).max(1)
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work(shape: &Shape, tied: bool) -> usize {
    let tasks = shape.slices() * splits(shape);
    room(partials(shape, tied)) + workers(tasks) * room(sizes(shape))
}

/// Partial `dq` of all splits but the first, and `dk` when tied.
fn partials(shape: &Shape, tied: bool) -> [usize; 2] {
    [(splits(shape) - 1) * shape.q_len(), if tied { shape.k_len() } else { 0 }]
}

fn sizes(shape: &Shape) -> [usize; 16] {
    let (queries, keys) = (padded(shape.seq_q), shape.seq_kv.min(KEYS));
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    let tile = keys * TILE_STRIDE;
    [
        // positions, limits, shift, delta; panels of q and dout; rows of q, of dout; dq
        queries,
        queries,
        queries,
        queries,
        queries * shape.head_dim,
        queries * shape.value_dim,
        queries * d,
        queries * dv,
        queries * d,
        // positions, rows of k, of v; dk, dv; logits then weights, gradients of the logits
        keys,
        keys * d,
        keys * dv,
        keys * d,
        keys * dv,
        tile,
        tile,
    ]
}

impl<N: Normalisation> Stream<'_, N> {
    pub fn run(&self, targets: Targets<'_>, work: &mut [f32]) {
        let shape = self.call.shape;
        let (splits, tied) = (splits(&shape), targets.dk.is_none());
        let ([partial, tied_dk], work) = cut(work, partials(&shape, tied));
        {
            let (dq, partial) = (Parts::new(&mut *targets.dq), Parts::new(&mut *partial));
            let dk = Parts::new(targets.dk.unwrap_or(&mut *tied_dk));
            let dv = targets.dv.map(Parts::new);
            for_each(shape.slices() * splits, work, room(sizes(&shape)), |task, memory| {
                let (slice, split) = (task / splits, task % splits);
                let share = shape.seq_kv.div_ceil(KEYS).div_ceil(splits) * KEYS;
                let keys = (split * share).min(shape.seq_kv)..((split + 1) * share).min(shape.seq_kv);
                let rows = |r: Range<usize>, seq: usize, dim: usize| {
                    (slice * seq + r.start) * dim..(slice * seq + r.end) * dim
                };
                let all = rows(0..shape.seq_q, shape.seq_q, shape.head_dim);
                // SAFETY: tasks differ in slice or split: each split has its own `dq`, and its own range of keys.
                let (dq, dk, dv) = unsafe {
                    let dq = match split.checked_sub(1) {
                        None => dq.part(all),
                        Some(n) => partial.part(n * shape.q_len() + all.start..n * shape.q_len() + all.end),
                    };
                    let dk = dk.part(rows(keys.clone(), shape.seq_kv, shape.head_dim));
                    (dq, dk, dv.as_ref().map(|dv| dv.part(rows(keys.clone(), shape.seq_kv, shape.value_dim))))
                };
                self.call.level.dispatch(Task { stream: self, slice, keys, dq, dk, dv, memory });
            });
        }
        let extra = partial.chunks_exact(shape.q_len()).chain(tied.then_some(&*tied_dk));
        extra.for_each(|extra| targets.dq.par_iter_mut().zip(extra).with_min_len(4096).for_each(|(dq, &x)| *dq += x));
    }
}

/// One head and range of keys.
struct Task<'a, N> {
    stream: &'a Stream<'a, N>,
    slice: usize,
    keys: Range<usize>,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: Option<&'a mut [f32]>,
    memory: &'a mut [f32],
}

impl<N: Normalisation> WithSimd for Task<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { stream, slice, keys, dq, dk, mut dv, memory } = self;
        let head = &Head::of(stream.call, slice);
        let (d, dv_dim) = (head.head_dim, head.value_dim);
        let parts = cut(memory, sizes(&stream.call.shape)).0;
        let [at, limits, shift, delta, q_panels, g_panels, q_room, g_room, dq_sums, parts @ ..] = parts;
        let [key_at, k_room, v_room, dk_sums, dv_sums, weights, slopes] = parts;

        let (logit, chain) = (stream.logit[slice], stream.chain[slice]);
        let queries = positions(0..head.seq_q, head.keep_query, at);
        let row = |n: usize| slice * head.seq_q + queries[n] as usize;
        let factor = |n: usize| stream.terms.factor[row(n)];
        let dout = &stream.dout[slice * head.seq_q * dv_dim..][..head.seq_q * dv_dim];
        transpose(head.q, d, queries, |_| logit, q_panels);
        transpose(dout, dv_dim, queries, factor, g_panels);
        let q = Rows::gather(head.q, d, queries, true, q_room);
        let g = Rows::copy(dout, dv_dim, queries, factor, g_room);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        for (n, &i) in queries.iter().enumerate() {
            limits[n] = head.limit(i as usize) as u32;
            shift[n] = stream.terms.shift[row(n)];
            delta[n] = stream.terms.delta[row(n)];
        }
        shift[queries.len()..].fill(0.0);
        delta[queries.len()..].fill(0.0);
        dq_sums[..queries.len() * q.stride].fill(0.0);

        for from in keys.clone().step_by(KEYS) {
            let tile_keys = from..(from + KEYS).min(keys.end);
            let kept = positions(tile_keys.clone(), head.keep_key, key_at);
            let k = Rows::gather(head.k, d, kept, true, k_room);
            let v = Rows::gather(head.v, dv_dim, kept, false, v_room);
            dk_sums[..kept.len() * k.stride].fill(0.0);
            dv_sums[..kept.len() * v.stride].fill(0.0);
            for first in (0..queries.len()).step_by(PANEL) {
                let count = PANEL.min(queries.len() - first);
                let width = padded(count);
                let limits = &limits[first..first + width];
                let seen = kept.partition_point(|&key| key < limits[count - 1]);
                let pairs = Pairs {
                    norm: stream.norm,
                    weights: &mut *weights,
                    slopes: &mut *slopes,
                    shift: &shift[first..first + width],
                    delta: &delta[first..first + width],
                    visible: Visible { keys: &kept[..seen], limits },
                    complete: kept[..seen].last().is_none_or(|&key| key < limits[0]),
                };
                let panel =
                    |panels, dim| Right { data: &(panels as &[f32])[first * dim..][..width * dim], stride: width };
                let panels = [panel(&*q_panels, d), panel(&*g_panels, dv_dim)];
                let naturals = [q.as_right(first..first + count), g.as_right(first..first + count)];
                let sums = [&mut *dk_sums, &mut *dv_sums, &mut dq_sums[first * q.stride..(first + count) * q.stride]];
                tile(simd, [d, dv_dim], count, [k, v], panels, naturals, pairs, sums, dv.is_some());
            }
            let into = |rows: Range<usize>, dim: usize| (rows.start - keys.start) * dim..(rows.end - keys.start) * dim;
            scatter(dk_sums, d, kept, tile_keys.start, chain, &mut dk[into(tile_keys.clone(), d)]);
            if let Some(dv) = &mut dv {
                scatter(dv_sums, dv_dim, kept, tile_keys.start, stream.value[slice], &mut dv[into(tile_keys, dv_dim)]);
            }
        }
        scatter(dq_sums, d, queries, 0, chain, dq);
    }
}

/// The five products of one tile of keys and one panel of `count` queries.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one tile's operands
fn tile<S: Simd, N: Normalisation>(
    simd: S,
    [head_dim, value_dim]: [usize; 2],
    count: usize,
    [k, v]: [Rows<'_>; 2],
    [q_panel, g_panel]: [Right<'_>; 2],
    [q, g]: [Right<'_>; 2],
    mut pairs: Pairs<'_, N>,
    [dk, dv, dq]: [&mut [f32]; 3],
    wants_dv: bool,
) {
    let keys = pairs.visible.keys.len();
    let size = |rows, cols, depth| Size { rows, cols, depth };
    let mut logits = Store { data: &mut *pairs.weights, stride: TILE_STRIDE };
    product(simd, size(keys, q_panel.stride, head_dim), k.as_left(), q_panel, &mut logits);
    product(simd, size(keys, g_panel.stride, value_dim), v.as_left(), g_panel, &mut pairs);
    let Pairs { weights, slopes, .. } = pairs;
    let of_key = |data| Left { data, row_stride: TILE_STRIDE, depth_stride: 1 };
    if wants_dv {
        let mut sums = Add { data: dv, stride: v.stride };
        product(simd, size(keys, v.stride, count), of_key(&*weights), g, &mut sums);
    }
    product(simd, size(keys, k.stride, count), of_key(&*slopes), q, &mut Add { data: dk, stride: k.stride });
    let of_query = Left { data: &*slopes, row_stride: 1, depth_stride: TILE_STRIDE };
    product(simd, size(count, k.stride, keys), of_query, k.as_right(0..keys), &mut Add { data: dq, stride: k.stride });
}

/// Writes sums times `factor` back to the positions of their rows (the first row of `out` is at `start`), zeros to the
/// masked ones.
fn scatter(sums: &[f32], dim: usize, kept: &[u32], start: usize, factor: f32, out: &mut [f32]) {
    if kept.len() * dim < out.len() {
        out.fill(0.0);
    }
    for (&i, sums) in kept.iter().zip(sums.chunks_exact(padded(dim))) {
        let row = &mut out[(i as usize - start) * dim..][..dim];
        row.iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}

/// Makes weights and gradients of the logits, as soon as the product of values and output gradients is in registers.
pub(in crate::structure) struct Pairs<'a, N> {
    pub norm: N,
    /// Holds the logits, and then the weights.
    pub weights: &'a mut [f32],
    pub slopes: &'a mut [f32],
    pub shift: &'a [f32],
    pub delta: &'a [f32],
    pub visible: Visible<'a>,
    pub complete: bool,
}

impl<S: Simd, T: Normalisation> Sink<S> for Pairs<'_, T> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let mut rows = [[simd.splat_f32s(0.0); 2]; N];
        for (n, row) in rows.iter_mut().enumerate() {
            *row = [vectors::<S, N>(self.shift, col)[n], vectors::<S, N>(self.delta, col)[n]];
        }
        let limits = vectors::<S, N>(bytemuck::cast_slice(self.visible.limits), col);
        let zero = simd.splat_f32s(0.0);
        for (m, products) in block.iter().enumerate() {
            let at = (row + m) * TILE_STRIDE + col;
            let (weights, slopes) = (vectors_mut::<S, N>(self.weights, at), vectors_mut::<S, N>(self.slopes, at));
            for n in 0..N {
                let (mut weight, mut slope) = self.norm.pair(simd, weights[n], products[n], rows[n]);
                if !self.complete {
                    let key = simd.splat_u32s(self.visible.keys[row + m]);
                    let seen = simd.less_than_u32s(key, simd.transmute_u32s_f32s(limits[n]));
                    weight = simd.select_f32s(seen, weight, zero);
                    slope = simd.select_f32s(seen, slope, zero);
                }
                (weights[n], slopes[n]) = (weight, slope);
            }
        }
    }
}
