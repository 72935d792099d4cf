//! The gradients of one slice of a graph: which rows and columns are worked on together, and what is taken out.

use rayon::prelude::*;

use super::{
    columns::Block,
    graph::{Graph, TASKS, density, parameter, split},
    head::Slice,
    sweep::{Channels, Gradients, Sweep, Taken},
    tile::KEYS,
};
use crate::{
    Parameter, Shape,
    score::{contract::MOST_PARAMETERS, map::Map},
    structure::dense::padded,
};

/// f32 of columns and their gradients that are worked on at a time: a quarter of a second-level cache of 2 MiB.
const CACHED: usize = 1 << 17;

impl Graph<'_> {
    /// Runs the backward pass over one slice's blocks; `taken` as in [`Sweep::backward`]. Adds the gradients of the images of
    /// rows and columns (where `taken`) and of the values, in the order of the head; returns those of the parameters.
    fn slice_backward(
        &self,
        slice: usize,
        (taken, wanted): (Option<&Taken>, bool),
        x: Channels<'_>,
        [dq, dk, dv]: [&mut [f32]; 3],
    ) -> [f64; MOST_PARAMETERS] {
        let (head, weights) = (&self.heads[slice], &self.weighed(slice).weights);
        let [q, k, gradients] = [&head.q[..], &head.k[..], x.gradients].map(|x| self.pool.aligned(x));
        let (sweep, x) = (Sweep { q: &q, k: &k, ..self.sweep(slice) }, Channels { gradients: &gradients, ..x });
        // The columns that blocks pass by at a time stay in the second cache with their gradients.
        let length = (CACHED / (2 * (head.stride + padded(x.dim)))).next_multiple_of(KEYS);
        let spans: Vec<_> = (0..head.keys.len().max(1)).step_by(length).map(|first| first..first + length).collect();
        let per_row = if taken.is_some() { head.stride } else { 0 };
        let run = |blocks: &[Block], dq: &mut [f32], [dk, dv]: [&mut [f32]; 2]| {
            let mut parameters = wanted.then_some([0.0; MOST_PARAMETERS]);
            for span in &spans {
                for (block, dq) in blocks.iter().zip(split(blocks, dq, per_row)) {
                    let (dk, dv, first) = (&mut *dk, &mut *dv, block.rows.start);
                    let mut into = Gradients { dq, first, dk, dv, parameters: parameters.as_mut() };
                    sweep.backward((block, span), (weights, taken), x, &mut into);
                }
            }
            parameters.unwrap_or_default()
        };
        let count = head.blocks.len().div_ceil(TASKS.div_ceil(self.call.shape.slices())).max(1);
        if count >= head.blocks.len() {
            return run(&head.blocks, dq, [dk, dv]);
        }
        let tasks: Vec<_> = head.blocks.chunks(count).zip(split_tasks(&head.blocks, dq, per_row, count)).collect();
        let task = |(blocks, dq): (&[Block], &mut [f32])| {
            let [mut dk, mut dv] = [dk.len(), dv.len()].map(|len| self.pool.zeros(len));
            let parameters = run(blocks, dq, [&mut dk, &mut dv]);
            (dk, dv, parameters)
        };
        let done: Vec<_> = tasks.into_par_iter().map(task).collect();
        let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        let mut parameters = [0.0; MOST_PARAMETERS];
        for (of_keys, of_values, part) in &done {
            add(dk, of_keys);
            add(dv, of_values);
            parameters.iter_mut().zip(part).for_each(|(to, x)| *to += x);
        }
        parameters
    }

    /// The gradients of a slice's values alone, added to `dv`.
    pub fn transpose_slice(&self, slice: usize, gradients: &[f32], dim: usize, dv: &mut [f32]) {
        let x = Channels { values: &[], gradients, dim };
        self.slice_backward(slice, (None, false), x, [&mut [], &mut [], dv]);
    }

    /// Subtracts `sum_i w_ij delta_i` from the columns' numbers.
    fn take_projections(&self, slice: usize, delta: &[f64], columns: &mut [f64]) {
        let stride = padded(1);
        let [mut rows, mut sums] = [delta.len(), columns.len()].map(|len| self.pool.zeros(len * stride));
        rows.chunks_exact_mut(stride).zip(delta).for_each(|(row, &x)| row[0] = x as f32);
        self.transpose_slice(slice, &rows, 1, &mut sums);
        columns.iter_mut().zip(sums.chunks_exact(stride)).for_each(|(x, sum)| *x -= f64::from(sum[0]));
    }

    /// Adds the gradients of one slice: of its queries, keys and values; returns those of the parameters.
    pub fn backward_slice(
        &self,
        slice: usize,
        wanted: bool,
        [x, y, dout]: [&[f32]; 3],
        [dq, dk, dx]: [&mut [f32]; 3],
    ) -> [f64; MOST_PARAMETERS] {
        let Shape { head_dim: d, value_dim: dim, seq_q, seq_kv, heads, .. } = self.call.shape;
        let (head, raw) = (&self.heads[slice], Slice::of(self.call, slice));
        let (values, gradients, results) = (head.of_columns(x, dim), head.of_rows(dout, dim), head.of_rows(y, dim));
        let channels = Channels { values: &values, gradients: &gradients, dim };
        let delta = contractions(&gradients, &results, padded(dim));
        let (weighed, log) = (self.weighed(slice), self.sweep(slice).score.is_log());
        let mut dv = self.pool.zeros(if self.is_streamed() { 0 } else { head.keys.len() * padded(dim) });
        if !self.is_streamed() {
            self.transpose_slice(slice, &gradients, dim, &mut dv);
        }
        let mut epsilon = contractions(&values, &dv, padded(dim));
        if density(self.m).is_some() {
            self.take_projections(slice, &delta, &mut epsilon);
        }
        let mut taken = weighed.taken(&self.m.normalisation, head, log, &delta, &epsilon);
        let statistics = weighed.weights.whitened.as_ref();
        taken.whitened = statistics.map(|s| s.back(head, &values, &gradients, &dv, padded(dim)));
        drop(dv);
        let taken = (Some(&taken), wanted);
        let in_place = self.map == Map::Identity && head.lies_like(seq_q, d) && head.columns_lie_like(seq_kv, d);
        if in_place && padded(dim) == dim {
            return self.slice_backward(slice, taken, channels, [dq, dk, dx]);
        }
        let [mut of_rows, mut of_columns, mut of_values] =
            [head.q.len(), head.k.len(), head.keys.len() * padded(dim)].map(|len| self.pool.zeros(len));
        let into: [&mut [f32]; 3] = [&mut of_rows, &mut of_columns, &mut of_values];
        let mut of_score = self.slice_backward(slice, taken, channels, into);
        head.add_columns(&of_values, padded(dim), dx, dim, None);
        head.add_columns(&of_columns, head.stride, dk, d, Some((self.map, raw.k)));
        head.add_rows(&of_rows, head.stride, dq, d, Some((self.map, raw.q)));
        if self.map == Map::Offset && wanted {
            // The term holds the query's own offset, which does not depend on the scale.
            let scale = parameter(self.call, self.m, Parameter::Scale, slice % heads) as f32;
            let offsets = of_rows.chunks_exact(head.stride).zip(head.q.chunks_exact(head.stride));
            of_score[0] -= offsets.map(|(dq, q)| f64::from(dq[d]) * f64::from(q[d])).sum::<f64>() / f64::from(scale);
        }
        of_score
    }
}

/// [`split`] for tasks of `count` blocks each.
fn split_tasks<'x>(blocks: &[Block], mut x: &'x mut [f32], stride: usize, count: usize) -> Vec<&'x mut [f32]> {
    let part = |blocks: &[Block]| {
        let rows: usize = blocks.iter().map(|block| block.rows.len()).sum();
        let (part, rest) = std::mem::take(&mut x).split_at_mut(rows * stride);
        x = rest;
        part
    };
    blocks.chunks(count).map(part).collect()
}

/// Sums over the channels of rows of two tensors, by row of the head.
fn contractions(x: &[f32], y: &[f32], dim: usize) -> Vec<f64> {
    let rows = x.chunks_exact(dim.max(1)).zip(y.chunks_exact(dim.max(1)));
    rows.map(|(x, y)| crate::structure::dense::dot(x, y)).collect()
}
