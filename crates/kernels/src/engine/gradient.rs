//! The gradients of one slice of a graph: which rows and columns are worked on together, and what is taken out.

use std::ops::Range;

use super::{
    bias::{BiasSums, Sums},
    columns::Block,
    graph::{Graph, TASKS, density, parameter, split},
    head::{Head, Slice},
    sweep::{Channels, Gradients, Sweep, Taken, Weights},
    tile::KEYS,
};
use crate::{
    Parameter, Shape,
    call::TokenRows,
    mechanism::Normalisation,
    parallel,
    score::{contract::MOST_PARAMETERS, map::Map},
    structure::dense::{contractions, padded},
};

/// f32 of columns and their gradients that are worked on at a time: a quarter of a second-level cache of 2 MiB.
const CACHED: usize = 1 << 17;

/// Which gradients are wanted beside those of the tokens, and how many slices are worked on at once.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub parameters: bool,
    pub bias: bool,
    pub at_once: usize,
}

/// The gradients of a slice's score: of its parameters, and sums of those of the bias.
#[derive(Default)]
pub(super) struct OfScore {
    pub parameters: [f64; MOST_PARAMETERS],
    pub bias: Vec<Sums>,
}

impl OfScore {
    /// Adds those of a task.
    fn add(&mut self, (parameters, of_bias): ([f64; MOST_PARAMETERS], Option<Sums>)) {
        self.parameters.iter_mut().zip(parameters).for_each(|(to, x)| *to += x);
        self.bias.extend(of_bias);
    }
}

impl Graph<'_> {
    /// Runs the backward pass over one slice's blocks; `weights` and `taken` as in [`Sweep::backward`]. Adds the gradients of the images of
    /// rows and columns (where `taken`) and of the values (unless there is no room for them), in the order of the head; returns the
    /// others, that of the bias where it is `wanted` and there is no room for its `pairs`, `[seq_q, seq_kv]`.
    fn slice_backward(
        &self,
        slice: usize,
        (weights, taken, wanted): (&Weights, Option<&Taken>, Wanted),
        x: Channels<'_>,
        [dq, dk, dv]: [&mut [f32]; 3],
        pairs: Option<&mut [f32]>,
    ) -> OfScore {
        let (head, seq_kv) = (&self.heads[slice], self.call.shape.seq_kv);
        let [q, k, gradients] = [&head.q[..], &head.k[..], x.gradients].map(|x| self.pool.aligned(x));
        let (sweep, x) = (Sweep { q: &q, k: &k, ..self.sweep(slice) }, Channels { gradients: &gradients, ..x });
        let shared = sweep.share((x.values, padded(x.dim)), true);
        let sweep = Sweep { shared: shared.as_ref(), ..sweep };
        // The columns that blocks pass by at a time stay in the second cache with their gradients.
        let length = (CACHED / (2 * (head.stride + padded(x.dim)))).next_multiple_of(KEYS);
        let spans: Vec<_> = (0..head.keys.len().max(1)).step_by(length).map(|first| first..first + length).collect();
        let per_row = if taken.is_some() { head.stride } else { 0 };
        let run =
            |blocks: &[Block], dq: &mut [f32], (first_column, [dk, dv]): OfColumns<'_>, pairs: Option<&mut [f32]>| {
                let mut parameters = wanted.parameters.then_some([0.0; MOST_PARAMETERS]);
                let bias = head.bias.as_ref().filter(|_| wanted.bias);
                let mut of_bias = bias.map(|bias| match pairs {
                    Some(out) => BiasSums::Pairs { out, first: first_of(head, blocks), stride: seq_kv },
                    None => BiasSums::Sums(Sums::new(bias, rows_of(blocks))),
                });
                for span in &spans {
                    for (block, dq) in blocks.iter().zip(split(blocks, dq, per_row)) {
                        let (dk, dv, first) = (&mut *dk, &mut *dv, block.rows.start);
                        let (parameters, bias) = (parameters.as_mut(), of_bias.as_mut());
                        let mut into = Gradients { dq, first, dk, dv, first_column, parameters, bias };
                        sweep.backward((block, span), (weights, taken), x, &mut into);
                    }
                }
                (parameters.unwrap_or_default(), of_bias.and_then(BiasSums::sums))
            };
        let count = head.blocks.len().div_ceil(TASKS.div_ceil(wanted.at_once)).max(1);
        if count >= head.blocks.len() {
            let pairs = pairs.map(|all| &mut all[first_of(head, &head.blocks) * seq_kv..]);
            let (parameters, of_bias) = run(&head.blocks, dq, (0, [dk, dv]), pairs);
            return OfScore { parameters, bias: of_bias.into_iter().collect() };
        }
        let rows = head.blocks.chunks(count).map(|blocks| rows_of(blocks).len() * per_row);
        let tasks = head.blocks.chunks(count).zip(parallel::split(dq, rows));
        let tasks = tasks.zip(split_pairs(head, count, pairs, seq_kv));
        let task = |((blocks, dq), pairs): Task<'_>| {
            let columns = columns_of(blocks);
            let [mut dk, mut dv] =
                [dk.len(), dv.len()].map(|len| self.pool.zeros(columns.len() * (len / head.keys.len().max(1))));
            let of_score = run(blocks, dq, (columns.start, [&mut dk, &mut dv]), pairs);
            (columns.start, [dk, dv], of_score)
        };
        let done = parallel::map(tasks, task);
        let mut all = OfScore::default();
        for (first, parts, of_score) in done {
            for (to, part) in [&mut *dk, &mut *dv].into_iter().zip(parts) {
                let width = to.len() / head.keys.len().max(1);
                to[first * width..].iter_mut().zip(&*part).for_each(|(to, x)| *to += x);
            }
            all.add(of_score);
        }
        all
    }

    /// The gradients of a slice's values alone, added to `dv`.
    pub fn transpose_slice(&self, slice: usize, gradients: &[f32], dim: usize, dv: &mut [f32]) {
        let x = Channels { values: &[], gradients, dim };
        let none = Wanted { parameters: false, bias: false, at_once: self.call.shape.slices() };
        self.slice_backward(slice, (&self.weighed(slice).weights, None, none), x, [&mut [], &mut [], dv], None);
    }

    /// [`Graph::slice_backward`] by the slice's own weights, with a sweep for each of the [`Taken::halves`].
    fn weighed_backward(
        &self,
        slice: usize,
        (taken, wanted): (&Taken, Wanted),
        x: Channels<'_>,
        [dq, dk, dv]: [&mut [f32]; 3],
        mut pairs: Option<&mut [f32]>,
    ) -> OfScore {
        let weights = &self.weighed(slice).weights;
        let into = [&mut *dq, &mut *dk, dv];
        let mut all = self.slice_backward(slice, (weights, Some(taken), wanted), x, into, pairs.as_deref_mut());
        let Some(halves) = &taken.halves else { return all };
        let twice = |x: &[f32]| x.iter().map(|x| 2.0 * x).collect::<Vec<_>>();
        let [rows, columns] = halves.each_ref().map(|half| vec![0.0; half.len()]);
        let [ones_of_rows, ones] = halves.each_ref().map(|half| vec![1.0; half.len()]);
        let of_rows = Taken { a: halves[0].clone(), p: ones, c: rows.clone(), d: columns.clone(), ..taken.clone() };
        let of_columns =
            Taken { a: rows.clone(), p: columns.clone(), c: ones_of_rows, d: halves[1].clone(), ..taken.clone() };
        let by = [(twice(&weights.rows), columns, of_rows), (rows, twice(&weights.columns), of_columns)];
        let none = vec![0.0; x.gradients.len()];
        for (rows, columns, taken) in by {
            let weights = Weights { rows, columns, ..weights.clone() };
            let (x, into) = (Channels { gradients: &none, ..x }, [&mut *dq, &mut *dk, &mut []]);
            let part = self.slice_backward(slice, (&weights, Some(&taken), wanted), x, into, pairs.as_deref_mut());
            all.parameters.iter_mut().zip(part.parameters).for_each(|(to, x)| *to += x);
            all.bias.extend(part.bias);
        }
        all
    }

    /// Subtracts `sum_i w_ij delta_i` from the columns' numbers.
    fn take_projections(&self, slice: usize, delta: &[f64], columns: &mut [f64]) {
        let stride = padded(1);
        let [mut rows, mut sums] = [delta.len(), columns.len()].map(|len| self.pool.zeros(len * stride));
        rows.chunks_exact_mut(stride).zip(delta).for_each(|(row, &x)| row[0] = x as f32);
        self.transpose_slice(slice, &rows, 1, &mut sums);
        columns.iter_mut().zip(sums.chunks_exact(stride)).for_each(|(x, sum)| *x -= f64::from(sum[0]));
    }

    /// `<out_i, dout_i>` by the queries' own rows. Rows that sum to one take it out of single products: it is summed as these are.
    fn projections(&self, results: &[f32], gradients: &[f32], dim: usize) -> Vec<f64> {
        if !matches!(self.m.normalisation, Normalisation::Row(_)) {
            return products(results, gradients, dim);
        }
        let mut sums = vec![0.0; results.len() / dim.max(1)];
        let [results, gradients] = [results, gradients].map(|x| TokenRows::in_one_piece(x, dim));
        contractions(self.call.level, results, (gradients, None), &mut sums);
        sums.into_iter().map(f64::from).collect()
    }

    /// Adds the gradients of one slice: of its queries, keys and values; returns the others.
    pub fn backward_slice(
        &self,
        slice: usize,
        wanted: Wanted,
        [x, y, dout]: [&[f32]; 3],
        [dq, dk, dx]: [&mut [f32]; 3],
        pairs: Option<&mut [f32]>,
    ) -> OfScore {
        let Shape { head_dim: d, value_dim: dim, seq_q, seq_kv, heads, .. } = self.call.shape;
        let (head, raw) = (&self.heads[slice], Slice::of(self.call, slice));
        let [x, y, dout] = [x, y, dout].map(|x| TokenRows::in_one_piece(x, dim));
        let (values, mut gradients, results) = (head.of_columns(x), head.of_rows(dout), head.of_rows(y));
        if let Some(products) = self.call.bf16 {
            // As the products read them, so that what is taken out of a row cancels what they make.
            gradients = gradients.map(|x| products.read(x));
        }
        let channels = Channels { values: &values, gradients: &gradients, dim };
        let mut delta = self.projections(&results, &gradients, padded(dim));
        delta.resize(head.queries.len(), 0.0);
        head.spread(&mut delta);
        let (weighed, log) = (self.weighed(slice), self.sweep(slice).score.is_log());
        // Where sums over columns depend on the gradients of the values, these are known before all others.
        let (dv_len, before) = (head.keys.len() * padded(dim), !self.is_streamed());
        let mut dv = self.pool.zeros(if before { dv_len } else { 0 });
        if before {
            self.transpose_slice(slice, &gradients, dim, &mut dv);
        }
        let mut epsilon = products(&values, &dv, padded(dim));
        if density(self.m).is_some() {
            self.take_projections(slice, &delta, &mut epsilon);
        }
        let mut taken = weighed.taken(&self.m.normalisation, head, log, &delta, &epsilon);
        let statistics = weighed.weights.whitened.as_ref();
        taken.whitened = statistics.map(|s| s.back(head, &values, &gradients, &dv, padded(dim)));
        if before {
            head.add_columns(&dv, padded(dim), dx, dim, None);
        }
        drop(dv);
        let taken = (&taken, wanted);
        let in_place = self.map == Map::Identity && head.lies_like(seq_q, d) && head.columns_lie_like(seq_kv, d);
        if in_place && padded(dim) == dim {
            let dx = if before { &mut [] } else { dx };
            return self.weighed_backward(slice, taken, channels, [dq, dk, dx], pairs);
        }
        let [mut of_rows, mut of_columns, mut of_values] =
            [head.queries.len() * head.stride, head.k.len(), if before { 0 } else { dv_len }]
                .map(|len| self.pool.zeros(len));
        let into: [&mut [f32]; 3] = [&mut of_rows, &mut of_columns, &mut of_values];
        let mut of_score = self.weighed_backward(slice, taken, channels, into, pairs);
        if !before {
            head.add_columns(&of_values, padded(dim), dx, dim, None);
        }
        head.add_columns(&of_columns, head.stride, dk, d, Some((self.map, raw.k)));
        head.add_rows(&of_rows, head.stride, dq, d, Some((self.map, raw.q)));
        if self.map == Map::Offset && wanted.parameters {
            // The term holds the query's own offset, which does not depend on the scale, and outweighs the products of a small one: the gradients
            // of the rows know the sums of these alone.
            let scale = parameter(self.call, self.m, Parameter::Scale, slice % heads);
            let query = |row: usize| &head.q[head.own_row(row) * head.stride..][..d];
            let product = |(row, dq): (usize, &[f32])| {
                dq[..d].iter().zip(query(row)).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>()
            };
            of_score.parameters[0] = of_rows.chunks_exact(head.stride).enumerate().map(product).sum::<f64>() / scale;
        }
        of_score
    }
}

/// Blocks, with the gradients of their rows and of their pairs.
type Task<'t> = ((&'t [Block], &'t mut [f32]), Option<&'t mut [f32]>);

/// The gradients of keys and of values, from some column on.
type OfColumns<'g> = (usize, [&'g mut [f32]; 2]);

/// What the columns of some blocks lie within.
fn columns_of(blocks: &[Block]) -> Range<usize> {
    let edges = blocks.iter().flat_map(|block| &block.edges).flat_map(|edges| &edges.columns);
    let single = edges.map(|&column| column as usize..column as usize + 1);
    let all = blocks.iter().flat_map(|block| block.columns.iter().cloned()).chain(single);
    all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// The rows of some blocks in a row.
fn rows_of(blocks: &[Block]) -> Range<usize> {
    blocks.first().map_or(0, |block| block.rows.start)..blocks.last().map_or(0, |block| block.rows.end)
}

/// The position of the first row of some blocks.
fn first_of(head: &Head<'_>, blocks: &[Block]) -> usize {
    head.queries.get(rows_of(blocks).start).map_or(0, |&position| position as usize)
}

/// Numbers of pairs, `stride` per query, for tasks of `count` blocks each: from a task's first query to the next one's.
fn split_pairs<'x>(
    head: &Head<'_>,
    count: usize,
    pairs: Option<&'x mut [f32]>,
    stride: usize,
) -> Vec<Option<&'x mut [f32]>> {
    let mut tasks = head.blocks.chunks(count).peekable();
    let Some(mut rest) = pairs else { return tasks.map(|_| None).collect() };
    let mut parts = Vec::new();
    let mut begun = 0;
    while let Some(blocks) = tasks.next() {
        let first = first_of(head, blocks);
        let until = tasks.peek().map(|next| first_of(head, next) * stride);
        let (_, mine) = std::mem::take(&mut rest).split_at_mut(first * stride - begun);
        let len = until.map_or(mine.len(), |until| until - first * stride);
        let (part, after) = mine.split_at_mut(len);
        (rest, begun) = (after, first * stride + len);
        parts.push(Some(part));
    }
    parts
}

/// Sums over the channels of rows of two tensors, by row of the head.
fn products(x: &[f32], y: &[f32], dim: usize) -> Vec<f64> {
    let rows = x.chunks_exact(dim.max(1)).zip(y.chunks_exact(dim.max(1)));
    rows.map(|(x, y)| crate::structure::dense::dot(x, y)).collect()
}
