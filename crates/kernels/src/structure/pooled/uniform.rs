//! The mean of the allowed values: the control that every comparison carries. Causal, a running mean.

use std::ops::Range;

use super::{
    broadcast, cut_work,
    linear::{inverse, part, shift, token_rows},
    tiles::{Buffers, ONES, PerToken, TILE, blocks, parallel, partial_len, runs, sum_tiles},
};
use crate::{
    Gradients, Result, Shape,
    call::{Call, Saved, View, magnitude::Masked},
    range,
    simd::{Level, rows},
};

/// Rows `x [tokens, dim]` of one head and which of them count.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    dim: usize,
    keep: Option<&'a [bool]>,
    level: Level,
}

impl<'a> Rows<'a> {
    fn keeps(&self, j: usize) -> bool {
        self.keep.is_none_or(|keep| keep[j])
    }

    fn row(&self, j: usize) -> &'a [f32] {
        token_rows(self.x, self.dim, j..j + 1)
    }

    fn len(&self) -> usize {
        self.x.len() / self.dim
    }

    /// Rows from `start` on.
    fn from(&self, start: usize) -> Self {
        Self { x: &self.x[start * self.dim..], keep: self.keep.map(|keep| &keep[start..]), ..*self }
    }

    /// Rows before `end`.
    fn until(&self, end: usize) -> Self {
        Self { x: &self.x[..end * self.dim], keep: self.keep.map(|keep| &keep[..end]), ..*self }
    }

    /// Adds the number of the kept rows of `tile` and their sum.
    fn add_to(&self, tile: Range<usize>, sums: &mut [f64]) {
        for block in blocks(tile, self.dim) {
            for run in runs(block.clone(), |j| self.keeps(j)) {
                sums[0] += run.len() as f64;
                let x = token_rows(self.x, self.dim, shift(&run, block.start));
                rows::accumulate(self.level, &ONES[..run.len()], x, 1.0, &mut sums[1..]);
            }
        }
    }

    /// The number of the kept rows and their sum.
    fn total<'p>(&self, partial: &'p mut [f64]) -> &'p mut [f64] {
        sum_tiles(self.len(), 1 + self.dim, partial, [], &|tile, sums, []| self.add_to(tile, sums))
    }
}

fn keep_of(keep: Option<&[bool]>, batch: usize, seq: usize) -> Option<&[bool]> {
    keep.map(|keep| part(keep, batch, seq))
}

/// The values of one head.
fn values<'a>(call: &Call<'a>, slice: usize) -> Rows<'a> {
    let Shape { heads, seq_kv, value_dim: dim, .. } = call.shape;
    let keep = keep_of(call.mask.key, slice / heads, seq_kv);
    Rows { x: part(call.v.dense(), slice, seq_kv * dim), dim, keep, level: call.level }
}

/// f64 of scratch per head: the sums of every tile, and those of the keys before the first query.
pub(super) const fn wide_len(shape: &Shape) -> usize {
    let longest = if shape.seq_q > shape.seq_kv { shape.seq_q } else { shape.seq_kv };
    partial_len(longest, 1 + shape.value_dim) + 1 + shape.value_dim
}

/// f32 of scratch per head: one row.
pub(super) const fn narrow_len(shape: &Shape) -> usize {
    shape.value_dim
}

/// `out_i` = the mean of the allowed `v_j`.
pub(crate) fn uniform_forward(call: &Call<'_>, out: &mut [f32], _stats: &mut [f32], work: &mut [f32]) -> Result<()> {
    let Shape { heads, seq_q, value_dim: dim, .. } = call.shape;
    let (row, wide) = cut_work(work, call.shape.slices() * narrow_len(&call.shape));
    let buffers = Buffers { wide: (wide_len(&call.shape), wide), rows: [(seq_q * dim, &mut *out), (dim, row)] };
    parallel(0..call.shape.slices(), 1, buffers, &|slice, part| {
        let [(_, out), (_, row)] = part.rows;
        let (values, queries) = (values(call, slice.start), keep_of(call.mask.query, slice.start / heads, seq_q));
        if call.mask.causal {
            return running_mean(&values, queries, out, part.wide.1);
        }
        let total = values.total(part.wide.1);
        let over = inverse(total[0]);
        row.iter_mut().zip(&total[1..]).for_each(|(row, sum)| *row = (sum * over) as f32);
        broadcast(call.level, row, queries, out);
    });
    range::check_ends(
        call,
        None,
        "out",
        Masked::of_queries(call, View::in_one_piece(out, call.shape.slices(), [seq_q, dim])),
    )
}

/// The gradients of [`uniform_forward`]: `q` and `k` have no part in it.
pub(crate) fn uniform_backward(
    call: &Call<'_>,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let Shape { heads, seq_q, seq_kv, head_dim, value_dim: dim, .. } = call.shape;
    let (row, wide) = cut_work(work, call.shape.slices() * narrow_len(&call.shape));
    let keys = gradients.dk.unwrap_or_default();
    let dv = gradients.dv;
    let rows = [(seq_q * head_dim, gradients.dq), (seq_kv * head_dim, keys), (seq_kv * dim, &mut *dv), (dim, row)];
    let buffers = Buffers { wide: (wide_len(&call.shape), wide), rows };
    parallel(0..call.shape.slices(), 1, buffers, &|slice, buffers| {
        let [(_, dq), (_, dk), (_, dv), (_, row)] = buffers.rows;
        dq.fill(0.0);
        dk.fill(0.0);
        let keep = keep_of(call.mask.query, slice.start / heads, seq_q);
        let dout = Rows { x: part(saved.dout.dense(), slice.start, seq_q * dim), dim, keep, level: call.level };
        let keys = keep_of(call.mask.key, slice.start / heads, seq_kv);
        if call.mask.causal {
            return running_mean_backward(&dout, keys, dv, row, buffers.wide.1);
        }
        let over = inverse(count(keys, 0..seq_kv) as f64);
        let total = dout.total(buffers.wide.1);
        row.iter_mut().zip(&total[1..]).for_each(|(row, sum)| *row = (sum * over) as f32);
        broadcast(call.level, row, keys, dv);
    });
    range::check_ends(
        call,
        Some(saved.dout),
        "dv",
        Masked::of_keys(call, View::in_one_piece(dv, call.shape.slices(), [seq_kv, dim])),
    )
}

fn count(keep: Option<&[bool]>, tokens: Range<usize>) -> usize {
    keep.map_or(tokens.len(), |keep| keep[tokens].iter().filter(|&&keep| keep).count())
}

/// Queries that see no key, keys that every query sees, and pairs of a query and the newest key it sees (bottom-right
/// alignment).
fn align(queries: usize, keys: usize) -> (usize, usize, usize) {
    let pairs = queries.min(keys);
    (queries - pairs, keys - pairs, pairs)
}

/// Sums per tile, each replaced by the sums before it; then every tile runs through its rows.
fn running_mean(values: &Rows<'_>, queries: Option<&[bool]>, out: &mut [f32], wide: &mut [f64]) {
    let dim = values.dim;
    let (blind, shared, pairs) = align(out.len() / dim, values.len());
    let (before, partial) = wide.split_at_mut(1 + dim);
    before.copy_from_slice(values.until(shared).total(partial));
    let values = values.from(shared);
    let (blind_rows, out) = out.split_at_mut(blind * dim);
    blind_rows.fill(0.0);
    let partial = &mut partial[..partial_len(pairs, 1 + dim)];
    partial.fill(0.0);
    parallel(0..pairs, TILE, Buffers { wide: (1 + dim, &mut *partial), rows: [] }, &|tile, part| {
        values.add_to(tile, part.wide.1);
    });
    for sums in partial.chunks_exact_mut(1 + dim) {
        for (sum, before) in sums.iter_mut().zip(&mut *before) {
            (*sum, *before) = (*before, *before + *sum);
        }
    }
    parallel(0..pairs, TILE, Buffers { wide: (1 + dim, partial), rows: [(dim, out)] }, &|tile, part| {
        let (count, sums) = part.wide.1.split_at_mut(1);
        let [(_, out)] = part.rows;
        for (i, out) in tile.zip(out.chunks_exact_mut(dim)) {
            if values.keeps(i) {
                count[0] += 1.0;
                sums.iter_mut().zip(values.row(i)).for_each(|(sum, v)| *sum += f64::from(*v));
            }
            let over = if queries.is_none_or(|keep| keep[blind + i]) { inverse(count[0]) } else { 0.0 };
            out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out = (sum * over) as f32);
        }
    });
}

/// `dv_j = sum of dout_i / count_i` over the kept queries that see `j`: a running sum from the last query on.
fn running_mean_backward(dout: &Rows<'_>, keys: Option<&[bool]>, dv: &mut [f32], row: &mut [f32], wide: &mut [f64]) {
    let dim = dout.dim;
    let (blind, shared, pairs) = align(dout.len(), dv.len() / dim);
    let (after, partial) = wide.split_at_mut(1 + dim);
    let partial = &mut partial[..partial_len(pairs, 1 + dim)];
    partial.fill(0.0);
    let keeps_key = |i: usize| keys.is_none_or(|keep| keep[shared + i]);
    let dout = dout.from(blind);
    let mut before = count(keys, 0..shared);
    for (sums, start) in partial.chunks_exact_mut(1 + dim).zip((0..pairs).step_by(TILE)) {
        sums[0] = before as f64;
        before += count(keys, shared + start..shared + (start + TILE).min(pairs));
    }
    parallel(0..pairs, TILE, Buffers { wide: (1 + dim, &mut *partial), rows: [] }, &|tile, part| {
        let (mut count, sums) = (part.wide.1[0], &mut part.wide.1[1..]);
        for block in blocks(tile, dim) {
            let over: PerToken = std::array::from_fn(|n| {
                count += f64::from(u8::from(n < block.len() && keeps_key(block.start + n)));
                inverse(count) as f32
            });
            for run in runs(block.clone(), |i| dout.keeps(i)) {
                let x = token_rows(dout.x, dim, shift(&run, block.start));
                rows::accumulate(dout.level, &over[run], x, 1.0, sums);
            }
        }
    });
    after.fill(0.0);
    for sums in partial.chunks_exact_mut(1 + dim).rev() {
        for (sum, after) in sums[1..].iter_mut().zip(&mut after[1..]) {
            (*sum, *after) = (*after, *after + *sum);
        }
    }
    row.iter_mut().zip(&after[1..]).for_each(|(row, sum)| *row = *sum as f32);
    let (first, dv) = dv.split_at_mut(shared * dim);
    broadcast(dout.level, row, keys.map(|keep| &keep[..shared]), first);
    parallel(0..pairs, TILE, Buffers { wide: (1 + dim, partial), rows: [(dim, dv)] }, &|tile, part| {
        let (seen, sums) = part.wide.1.split_at_mut(1);
        let mut seen = seen[0] + count(keys, shift(&tile, shared)) as f64;
        let [(_, dv)] = part.rows;
        for (i, dv) in tile.zip(dv.chunks_exact_mut(dim)).rev() {
            if dout.keeps(i) {
                let over = inverse(seen);
                sums.iter_mut().zip(dout.row(i)).for_each(|(sum, g)| *sum += over * f64::from(*g));
            }
            if keeps_key(i) {
                seen -= 1.0;
                dv.iter_mut().zip(&*sums).for_each(|(dv, sum)| *dv = *sum as f32);
            } else {
                dv.fill(0.0);
            }
        }
    });
}
