//! A run of queries as the backward pass holds it, and the products of a tile of keys with it.

use pulp::{Simd, WithSimd};

use super::{forward::pack, graph::Window};
use crate::{
    Shape,
    call::{Saved, View},
    parallel,
    score::Exp,
    scratch::cut,
    simd::product::{Add, Left, Right, Size, Store, Term, add_product, store_sums},
    structure::dense::{
        Head, KEYS, PANEL, Pairs, QUERIES, Row, Rows, TILE_STRIDE, Visible, log_sum::LogSums, padded, transpose,
    },
};

/// The rows that the forward pass made, and the gradient that comes in.
#[derive(Clone, Copy)]
pub(super) struct Finished<'a> {
    pub out: View<'a>,
    pub dout: View<'a>,
    /// What to take out of the base-2 logits of every row, and the factor on what `exp2` then gives: see [`LogSums::split`].
    pub shift: &'a [f32],
    pub factor: &'a [f32],
}

impl<'a> Finished<'a> {
    /// `shift` and `factor` are room for a number per row.
    pub fn new(saved: &Saved<'a>, [shift, factor]: [&'a mut [f32]; 2]) -> Self {
        let logs = LogSums::of(saved.stats);
        let rows = shift.chunks_mut(QUERIES).zip(factor.chunks_mut(QUERIES)).enumerate();
        parallel::each(rows, |(chunk, (shift, factor))| {
            for (row, (shift, factor)) in (chunk * QUERIES..).zip(shift.iter_mut().zip(factor)) {
                // A row without entries has no pair that its terms could enter.
                (*shift, *factor) = logs.split(row).unwrap_or((0.0, 1.0));
            }
        });
        Self { out: saved.out, dout: saved.dout, shift, factor }
    }
}

/// f32 of the buffers of [`Held`].
pub(super) fn sizes(shape: &Shape) -> [usize; 10] {
    let queries = padded(shape.seq_q.min(QUERIES));
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    let tile = shape.seq_kv.min(KEYS) * TILE_STRIDE;
    // panels of q, dout and out; rows of q, of dout; shift, delta, limits; weights, gradients of the logits
    [
        queries * (shape.head_dim + 1),
        queries * shape.value_dim,
        PANEL * shape.value_dim,
        queries * d,
        queries * dv,
        queries,
        queries,
        queries,
        tile,
        tile,
    ]
}

/// At most [`QUERIES`] queries with their output gradients, times the factor on the weights of their rows.
pub(super) struct Held<'a> {
    pub queries: &'a [u32],
    q_panels: &'a [f32],
    g_panels: &'a [f32],
    q: Rows<'a>,
    pub g: Rows<'a>,
    pub shift: &'a [f32],
    pub delta: &'a [f32],
    limits: &'a [u32],
    weights: &'a mut [f32],
    slopes: &'a mut [f32],
    head: Head<'a>,
}

/// Lays out the output gradients, times the factors of their rows, and outputs of a panel of queries, and writes their
/// products `delta`: summed as the products with single values are, so that a query with one entry has no gradient at all.
#[inline(always)]
pub(super) fn deltas<S: Simd>(
    simd: S,
    head: &Head<'_>,
    finished: &Finished<'_>,
    queries: &[u32],
    [g_panel, out_panel]: [&mut [f32]; 2],
    delta: &mut [f32],
) {
    if queries.is_empty() {
        return;
    }
    let (dv, width) = (head.value_dim, padded(queries.len()));
    let factor = head.rows(finished.factor);
    transpose(head.outputs(finished.dout), queries, |n| factor[queries[n] as usize], g_panel);
    transpose(head.outputs(finished.out), queries, |_| 1.0, out_panel);
    let delta = S::as_mut_simd_f32s(&mut delta[..width]).0;
    delta.fill(simd.splat_f32s(0.0));
    for (g, out) in g_panel.chunks_exact(width).zip(out_panel.chunks_exact(width)).take(dv) {
        let terms = S::as_simd_f32s(g).0.iter().zip(S::as_simd_f32s(out).0);
        for (delta, (g, out)) in delta.iter_mut().zip(terms) {
            *delta = simd.mul_add_e_f32s(*out, *g, *delta);
        }
    }
}

/// A tile of keys.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub k: Rows<'a>,
    pub v: Rows<'a>,
    /// Channels of the logits: one more than a key's for mean tokens.
    pub depth: usize,
    pub positions: &'a [u32],
}

/// Where the products of a tile go; rows of whole vectors.
pub(super) struct Sums<'a> {
    /// Of the held queries.
    pub dq: Option<&'a mut [f32]>,
    /// Of the tile's keys and values.
    pub dkv: Option<[&'a mut [f32]; 2]>,
}

/// [`Held::attend`], compiled once for all its calls.
struct Meeting<'h, 'a, 'k> {
    held: &'h mut Held<'a>,
    keys: Keys<'k>,
    sums: Sums<'k>,
}

impl WithSimd for Meeting<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.held.products(simd, self.keys, self.sums);
    }
}

impl<'a> Held<'a> {
    /// Lays out `queries` in `memory` of [`sizes`].
    #[inline(always)]
    pub fn new<S: Simd>(
        simd: S,
        head: Head<'a>,
        finished: &Finished<'a>,
        window: Window,
        logit: f32,
        queries: &'a [u32],
        memory: &'a mut [f32],
    ) -> Self {
        let dv = head.value_dim;
        let parts = cut(memory, sizes(&head.shape())).0;
        let [q_panels, g_panels, out_panel, q_buffer, g_buffer, shift, delta, limits, weights, slopes] = parts;
        let dout = head.outputs(finished.dout);
        let (shifts, factors) = (head.rows(finished.shift), head.rows(finished.factor));
        pack(&head, queries, logit, q_panels);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        shift.fill(0.0);
        let panels = g_panels.chunks_mut(PANEL * dv).zip(delta.chunks_mut(PANEL));
        for (queries, (g_panel, delta)) in queries.chunks(PANEL).zip(panels) {
            deltas(simd, &head, finished, queries, [&mut *g_panel, &mut *out_panel], delta);
        }
        for (n, &i) in queries.iter().enumerate() {
            limits[n] = window.limit(i as usize) as u32;
            shift[n] = shifts[i as usize];
        }
        Self {
            queries,
            q_panels,
            g_panels,
            q: Rows::copy(head.q, queries, |_| 1.0, q_buffer),
            g: Rows::copy(dout, queries, |n| factors[queries[n] as usize], g_buffer),
            shift,
            delta,
            limits,
            weights,
            slopes,
            head,
        }
    }

    /// Adds what the queries and a tile of keys mean to each other.
    pub fn attend<S: Simd>(&mut self, simd: S, keys: Keys<'_>, sums: Sums<'_>) {
        simd.vectorize(Meeting { held: self, keys, sums });
    }

    #[inline(always)]
    fn products<S: Simd>(&mut self, simd: S, keys: Keys<'_>, mut sums: Sums<'_>) {
        let Head { head_dim, value_dim, .. } = self.head;
        let (d, dv) = (padded(head_dim), padded(value_dim));
        let size = |rows, cols, depth| Size { rows, cols, depth };
        for first in (0..self.queries.len()).step_by(PANEL) {
            let count = PANEL.min(self.queries.len() - first);
            let width = padded(count);
            let limits = &self.limits[first..first + width];
            let seen = keys.positions.partition_point(|&key| key < limits[count - 1]);
            if seen == 0 {
                continue;
            }
            let q_panel =
                Right { data: &self.q_panels[first * (head_dim + 1)..][..width * (head_dim + 1)], stride: width };
            let g_panel = Right { data: &self.g_panels[first * value_dim..][..width * value_dim], stride: width };
            let logits = Store { data: &mut *self.weights, stride: TILE_STRIDE };
            // Summed as the forward pass sums them, whatever the depth.
            store_sums(simd, Term::Product, size(seen, width, keys.depth), keys.k.as_left(), q_panel, logits);
            let pairs = Pairs {
                norm: Row(Exp),
                weights: &mut *self.weights,
                slopes: &mut *self.slopes,
                shift: &self.shift[first..first + width],
                delta: &self.delta[first..first + width],
                visible: Visible { keys: &keys.positions[..seen], limits, dropped_pairs: None },
                complete: keys.positions[seen - 1] < limits[0],
                dropout: None,
            };
            pairs.differentiate(simd, size(seen, width, value_dim), keys.v.as_left(), g_panel);
            if let Some([dk, dv_sums]) = &mut sums.dkv {
                let of_key = |data| Left { data, row_stride: TILE_STRIDE, depth_stride: 1 };
                let (q, g) = (self.q.as_right(first..first + count), self.g.as_right(first..first + count));
                let add = Add { data: dv_sums, stride: dv };
                add_product(simd, size(seen, dv, count), of_key(&*self.weights), g, add);
                add_product(simd, size(seen, d, count), of_key(&*self.slopes), q, Add { data: dk, stride: d });
            }
            if let Some(dq) = &mut sums.dq {
                let of_query = Left { data: &*self.slopes, row_stride: 1, depth_stride: TILE_STRIDE };
                let add = Add { data: &mut dq[first * d..(first + count) * d], stride: d };
                add_product(simd, size(count, d, seen), of_query, keys.k.as_right(0..seen), add);
            }
        }
    }
}
