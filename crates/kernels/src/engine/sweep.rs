//! A sweep over the pairs of one head: tiles of terms and values, and what is summed of them.

use std::ops::Range;

use super::{
    head::{Block, Edges, Head},
    tile::{Factors, KEYS, Pairs, Projection, QUERIES, STRIDE, Sums, differentiate, terms, weigh},
    whiten::{Back, Statistics, add_deviations},
};
use crate::{
    score::{
        self,
        contract::{MOST_PARAMETERS, ParameterSums, Term, Tile, TileScore},
    },
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::dense::padded,
};

/// One head, the score of its pairs and the instruction set.
#[derive(Clone, Copy)]
pub(super) struct Sweep<'a> {
    pub head: &'a Head,
    pub score: &'a dyn TileScore,
    pub level: Level,
}

/// What weighs the pairs of a head: numbers per row and per column, see [`Factors`].
#[derive(Debug, Clone, Default)]
pub(super) struct Weights {
    pub rows: Vec<f32>,
    pub fine: Vec<f32>,
    pub columns: Vec<f32>,
    /// Of rows that are normalised: the terms of their heaviest pairs.
    pub typical: Vec<f32>,
    /// In place of both, where weights are whitened.
    pub whitened: Option<Statistics>,
}

/// What is taken out of the gradients, per row (`a`, `c`, `tau`) and per column (`p`, `d`); see [`Projection`].
#[derive(Debug, Clone, Default)]
pub(super) struct Taken {
    pub a: Vec<f32>,
    pub c: Vec<f32>,
    pub tau: Vec<f32>,
    pub p: Vec<f32>,
    pub d: Vec<f32>,
    /// Where the gradients of a row's values add up to nothing: the term of each row's heaviest pair.
    pub typical: Vec<f32>,
    /// In place of all, where weights are whitened.
    pub whitened: Option<Back>,
}

/// Tensors of a head whose rows are whole vectors: values by column; output gradients by row.
#[derive(Clone, Copy)]
pub(super) struct Channels<'a> {
    pub values: &'a [f32],
    pub gradients: &'a [f32],
    pub dim: usize,
}

/// Gradients of a head's images and values, in the order of its rows and columns.
pub(super) struct Gradients {
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    pub parameters: [f64; MOST_PARAMETERS],
}

/// Buffers of a task.
struct Buffers {
    /// Images of the queries, `[stride][width]`.
    panel: Vec<f32>,
    /// Output gradients, `[dim][width]`.
    dout: Vec<f32>,
    terms: Vec<f32>,
    values: Vec<f32>,
    products: Vec<f32>,
    /// Differences of a tile's gradients.
    differences: Vec<f32>,
}

impl Buffers {
    fn new(stride: usize, dim: usize) -> Self {
        let tile = || vec![0.0; KEYS * STRIDE];
        Self {
            panel: vec![0.0; stride * QUERIES],
            dout: vec![0.0; padded(dim) * QUERIES],
            terms: tile(),
            values: tile(),
            products: tile(),
            differences: vec![0.0; KEYS * stride],
        }
    }
}

/// The columns of a tile: as they lie, or gathered.
struct Columns<'t> {
    /// Where they are among all: the first of a run, or each.
    first: usize,
    list: Option<&'t [u32]>,
    k: &'t [f32],
    v: &'t [f32],
    counts: &'t [f32],
    factors: &'t [f32],
    p: &'t [f32],
    d: &'t [f32],
    /// Added to the logarithms, by which affinities are multiplied.
    weights: Option<&'t [f32]>,
}

impl Columns<'_> {
    fn len(&self) -> usize {
        self.counts.len()
    }

    fn at(&self, n: usize) -> usize {
        self.list.map_or(self.first + n, |list| list[n] as usize)
    }
}

/// Rows of queries, and their panel's width.
#[derive(Clone)]
struct Rows {
    range: Range<usize>,
    width: usize,
}

impl<'a> Sweep<'a> {
    /// `ln sum_j |g_ij|^p` of every row of a block, and the term of its largest value.
    pub fn row_logs(&self, block: &Block, power: f32) -> Vec<(f64, f32)> {
        let head = self.head;
        let mut buffers = Buffers::new(head.stride, 0);
        let log = self.score.is_log();
        let mut all = Sums::new(log);
        self.tiles(block, None, &[], &mut buffers, &mut |rows, columns, buffers| {
            let mut pairs = self.pairs(columns, rows.width, &buffers.terms, &mut buffers.values);
            if block.rows.len() == rows.range.len() {
                all.add(self.level, &mut pairs, power);
                return;
            }
            // A row of edges, alone.
            let at = rows.range.start - block.rows.start;
            let mut one = Sums::new(log);
            one.add(self.level, &mut pairs, power);
            all.merge(at, &one, power);
        });
        all.logs(log, power.into()).zip(all.terms.iter().copied()).take(block.rows.len()).collect()
    }

    /// `sum_j (g_ij - centre_i)^2` of every row of a block, of a log score without edges.
    pub fn row_deviations(&self, block: &Block, centres: &[f32]) -> Vec<f64> {
        let mut buffers = Buffers::new(self.head.stride, 0);
        let mut sums = [0.0; QUERIES];
        self.tiles(block, None, &[], &mut buffers, &mut |rows, columns, buffers| {
            let centres = lanes(centres, rows).unwrap_or([0.0; QUERIES]);
            let mut pairs = self.pairs(columns, rows.width, &buffers.terms, &mut buffers.values);
            add_deviations(self.level, &mut pairs, &centres, &mut sums);
        });
        sums[..block.rows.len()].to_vec()
    }

    /// Makes weights of a tile's values.
    fn weigh(&self, rows: &Rows, columns: &Columns<'_>, weights: &Weights, buffers: &mut Buffers) {
        let mut pairs = self.pairs(columns, rows.width, &buffers.terms, &mut buffers.values);
        match &weights.whitened {
            Some(statistics) => statistics.weigh(self.level, &mut pairs, &rows.range, columns.first),
            None => {
                let (factors, fine) = row_factors(weights, rows, self.score.is_log());
                weigh(self.level, &mut pairs, Factors { rows: &factors, fine: &fine, columns: columns.factors });
            }
        }
    }

    /// Writes `W v` of a block's rows, rows of whole vectors.
    pub fn apply(&self, block: &Block, weights: &Weights, x: Channels<'_>) -> Vec<f32> {
        let stride = padded(x.dim);
        let mut out = vec![0.0; block.rows.len() * stride];
        let mut buffers = Buffers::new(self.head.stride, 0);
        self.tiles(block, Some((weights, None)), x.values, &mut buffers, &mut |rows, columns, buffers| {
            self.weigh(rows, columns, weights, buffers);
            let at = (rows.range.start - block.rows.start) * stride;
            let size = Size { rows: rows.range.len(), cols: stride, depth: columns.len() };
            let left = Left { data: &buffers.values, row_stride: 1, depth_stride: STRIDE };
            let right = Right { data: columns.v, stride };
            multiply_add(self.level, size, left, right, Add { data: &mut out[at..], stride });
        });
        out
    }

    /// Adds what the pairs of a block give to the gradients; of the values alone where nothing is `taken`.
    pub fn backward(
        &self,
        block: &Block,
        (weights, taken): (&Weights, Option<&Taken>),
        x: Channels<'_>,
        into: &mut Gradients,
    ) {
        let (head, stride) = (self.head, padded(x.dim));
        let mut buffers = Buffers::new(head.stride, x.dim);
        self.tiles(block, Some((weights, taken)), x.values, &mut buffers, &mut |rows, columns, buffers| {
            let dout = &x.gradients[rows.range.start * stride..rows.range.end * stride];
            match taken {
                None => self.weigh(rows, columns, weights, buffers),
                Some(taken) => {
                    self.differentiate(rows, columns, (weights, taken), (dout, stride), buffers);
                    let typical = lanes(&taken.typical, rows);
                    self.tokens(rows, columns, buffers, typical, into);
                }
            }
            let size = Size { rows: columns.len(), cols: stride, depth: rows.range.len() };
            let left = Left { data: &buffers.values, row_stride: STRIDE, depth_stride: 1 };
            let right = Right { data: dout, stride };
            add(self.level, size, left, right, columns, (&mut into.dv, stride));
        });
    }

    /// Leaves weights in the values, and the gradients of the terms in the products.
    fn differentiate(
        &self,
        rows: &Rows,
        columns: &Columns<'_>,
        (weights, taken): (&Weights, &Taken),
        (dout, stride): (&[f32], usize),
        buffers: &mut Buffers,
    ) {
        let Buffers { dout: panel, terms, values, products, .. } = buffers;
        transpose(dout, stride, rows.width, panel);
        let size = Size { rows: columns.len(), cols: rows.width, depth: stride };
        let left = Left { data: columns.v, row_stride: stride, depth_stride: 1 };
        let right = Right { data: panel, stride: rows.width };
        multiply(self.level, size, left, right, Store { data: products, stride: STRIDE });
        if let (Some(statistics), Some(back)) = (&weights.whitened, &taken.whitened) {
            let mut pairs = self.pairs(columns, rows.width, terms, values);
            return statistics.differentiate(self.level, &mut pairs, &rows.range, columns.first, back, products);
        }
        let (factors, fine) = row_factors(weights, rows, self.score.is_log());
        let [a, c, tau] = [&taken.a, &taken.c, &taken.tau].map(|x| lanes(x, rows).unwrap_or([0.0; QUERIES]));
        let projection = Projection { a: &a, c: &c, tau: &tau, p: columns.p, d: columns.d };
        let mut pairs = self.pairs(columns, rows.width, terms, values);
        let factors = Factors { rows: &factors, fine: &fine, columns: columns.factors };
        differentiate(self.level, &mut pairs, factors, projection, products);
        if !self.score.is_log() {
            self.hide(rows, columns, 0.0, products);
            // The constant of an edge is a factor on its affinity.
            scale_edges(columns, products);
        }
    }

    /// Adds the gradients of the images.
    fn tokens(
        &self,
        rows: &Rows,
        columns: &Columns<'_>,
        buffers: &mut Buffers,
        typical: Option<[f32; QUERIES]>,
        into: &mut Gradients,
    ) {
        let (head, level) = (self.head, self.level);
        let (stride, keys) = (head.stride, columns.len());
        let Buffers { terms, products, differences, .. } = buffers;
        let tile = Tile { data: products, stride: STRIDE, rows: keys, width: rows.width };
        self.score.gradients(
            level,
            terms,
            tile,
            ParameterSums { sums: &mut into.parameters, typical: typical.as_ref().map(|x| &x[..]) },
        );
        let q = &head.q[rows.range.start * stride..rows.range.end * stride];
        let dq = &mut into.dq[rows.range.start * stride..rows.range.end * stride];
        if self.score.term() == Term::Product {
            let size = Size { rows: rows.range.len(), cols: stride, depth: keys };
            let left = Left { data: products, row_stride: 1, depth_stride: STRIDE };
            multiply_add(level, size, left, Right { data: columns.k, stride }, Add { data: dq, stride });
            let size = Size { rows: keys, cols: stride, depth: rows.range.len() };
            let left = Left { data: products, row_stride: STRIDE, depth_stride: 1 };
            add(level, size, left, Right { data: q, stride }, columns, (&mut into.dk, stride));
            return;
        }
        let pairs =
            score::Pairs { tokens: &columns.k[..keys * stride], marks: q, dim: stride, e: products, stride: STRIDE };
        let mut dmarks = vec![0.0; dq.len()];
        let differences = &mut differences[..keys * stride];
        let factor = match self.score.term() {
            Term::SquaredDifference => {
                score::gradients(level, score::Squared, pairs, differences, &mut dmarks);
                2.0
            }
            _ => {
                score::gradients(level, score::Manhattan, pairs, differences, &mut dmarks);
                1.0
            }
        };
        dq.iter_mut().zip(&dmarks).for_each(|(dq, x)| *dq -= factor * x);
        for (n, row) in differences.chunks_exact(stride).enumerate() {
            let dk = &mut into.dk[columns.at(n) * stride..][..stride];
            dk.iter_mut().zip(row).for_each(|(dk, x)| *dk += factor * x);
        }
    }

    fn pairs<'t>(&self, columns: &Columns<'t>, width: usize, terms: &'t [f32], values: &'t mut [f32]) -> Pairs<'t> {
        Pairs { terms, values, keys: columns.len(), width, log: self.score.is_log(), counts: columns.counts }
    }

    /// Calls `visit` with every tile of a block: its rows, its columns, and terms and values in the buffers.
    fn tiles(
        &self,
        block: &Block,
        weights: Option<(&Weights, Option<&Taken>)>,
        v: &[f32],
        buffers: &mut Buffers,
        visit: &mut dyn FnMut(&Rows, &Columns<'_>, &mut Buffers),
    ) {
        let head = self.head;
        let dim = v.len() / head.keys.len().max(1);
        let empty: &[f32] = &[];
        let rows = Rows { range: block.rows.clone(), width: padded(block.rows.len()) };
        self.panel(&rows, buffers);
        for run in &block.columns {
            for first in run.clone().step_by(KEYS) {
                let range = first..(first + KEYS).min(run.end);
                let (factors, p, d) = match weights {
                    Some((w, Some(t))) => (&w.columns[range.clone()], &t.p[range.clone()], &t.d[range.clone()]),
                    Some((w, None)) => (&w.columns[range.clone()], empty, empty),
                    None => (empty, empty, empty),
                };
                let columns = Columns {
                    first,
                    list: None,
                    k: &head.k[range.start * head.stride..range.end * head.stride],
                    v: &v[range.start * dim..range.end * dim],
                    counts: &head.counts[range],
                    factors,
                    p,
                    d,
                    weights: None,
                };
                self.tile(&rows, &columns, buffers);
                visit(&rows, &columns, buffers);
            }
        }
        for edges in &block.edges {
            let rows = Rows { range: edges.row..edges.row + 1, width: padded(1) };
            self.panel(&rows, buffers);
            self.edges(&rows, edges, weights, (v, dim), buffers, visit);
        }
    }

    /// The tiles of one row's edges.
    fn edges(
        &self,
        rows: &Rows,
        edges: &Edges,
        weights: Option<(&Weights, Option<&Taken>)>,
        (v, dim): (&[f32], usize),
        buffers: &mut Buffers,
        visit: &mut dyn FnMut(&Rows, &Columns<'_>, &mut Buffers),
    ) {
        let head = self.head;
        for (list, constants) in edges.columns.chunks(KEYS).zip(edges.weights.chunks(KEYS)) {
            let gather = |x: &[f32], width: usize| -> Vec<f32> {
                list.iter().flat_map(|&n| &x[n as usize * width..][..width]).copied().collect()
            };
            let per_column = |x: Option<&[f32]>| x.map_or(Vec::new(), |x| gather(x, 1));
            let (k, v) = (gather(&head.k, head.stride), gather(v, dim));
            let counts = gather(&head.counts, 1);
            let factors = per_column(weights.map(|(w, _)| &*w.columns));
            let taken = weights.and_then(|(_, taken)| taken);
            let (p, d) = (per_column(taken.map(|t| &*t.p)), per_column(taken.map(|t| &*t.d)));
            let columns = Columns {
                first: 0,
                list: Some(list),
                k: &k,
                v: &v,
                counts: &counts,
                factors: &factors,
                p: &p,
                d: &d,
                weights: Some(constants),
            };
            self.tile(rows, &columns, buffers);
            visit(rows, &columns, buffers);
        }
    }

    /// The images of some rows, transposed.
    fn panel(&self, rows: &Rows, buffers: &mut Buffers) {
        let stride = self.head.stride;
        let images = &self.head.q[rows.range.start * stride..rows.range.end * stride];
        transpose(images, stride, rows.width, &mut buffers.panel);
    }

    /// Fills terms and values of a tile.
    fn tile(&self, rows: &Rows, columns: &Columns<'_>, buffers: &mut Buffers) {
        let (stride, level) = (self.head.stride, self.level);
        let size = Size { rows: columns.len(), cols: rows.width, depth: stride };
        let left = Left { data: columns.k, row_stride: stride, depth_stride: 1 };
        let right = Right { data: &buffers.panel, stride: rows.width };
        terms(level, self.score.term(), size, left, right, &mut buffers.terms);
        let used = columns.len() * STRIDE;
        buffers.values[..used].copy_from_slice(&buffers.terms[..used]);
        let tile = Tile { data: &mut buffers.values, stride: STRIDE, rows: columns.len(), width: rows.width };
        self.score.values(level, tile);
        let absent = if self.score.is_log() { f32::NEG_INFINITY } else { 0.0 };
        self.hide(rows, columns, absent, &mut buffers.values);
        if let Some(constants) = columns.weights {
            for (row, &constant) in buffers.values.chunks_mut(STRIDE).zip(constants) {
                if self.score.is_log() {
                    row[..rows.width].iter_mut().for_each(|x| *x += constant);
                }
            }
            if !self.score.is_log() {
                scale_edges(columns, &mut buffers.values);
            }
        }
    }

    /// Writes `absent` to the pairs of a tile that may not meet.
    fn hide(&self, rows: &Rows, columns: &Columns<'_>, absent: f32, tile: &mut [f32]) {
        let Head { sight, queries, keys, .. } = self.head;
        if sight.is_complete() || columns.list.is_some() {
            return;
        }
        for (n, row) in tile.chunks_mut(STRIDE).take(columns.len()).enumerate() {
            let key = keys[columns.at(n)];
            for (x, &query) in row.iter_mut().zip(&queries[rows.range.clone()]) {
                if !sight.sees(query, key) {
                    *x = absent;
                }
            }
        }
    }
}

/// Multiplies the rows of a tile of edges by their weights.
fn scale_edges(columns: &Columns<'_>, tile: &mut [f32]) {
    let Some(constants) = columns.weights else { return };
    for (row, &constant) in tile.chunks_mut(STRIDE).zip(constants) {
        let factor = constant.exp();
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Some rows' numbers, and zeros; none where there are no numbers.
fn lanes(all: &[f32], rows: &Rows) -> Option<[f32; QUERIES]> {
    let mut lanes = [0.0; QUERIES];
    lanes[..rows.range.len()].copy_from_slice(all.get(rows.range.clone())?);
    Some(lanes)
}

/// The rows' factors, and beyond the last what makes weights zero.
fn row_factors(weights: &Weights, rows: &Rows, log: bool) -> ([f32; QUERIES], [f32; QUERIES]) {
    let mut factors = [if log { f32::MAX } else { 0.0 }; QUERIES];
    factors[..rows.range.len()].copy_from_slice(&weights.rows[rows.range.clone()]);
    (factors, lanes(&weights.fine, rows).unwrap_or([1.0; QUERIES]))
}

/// Writes rows `stride` apart as `[stride][width]`, zeros beyond the last.
fn transpose(rows: &[f32], stride: usize, width: usize, out: &mut [f32]) {
    out[..stride * width].fill(0.0);
    for (n, row) in rows.chunks_exact(stride.max(1)).enumerate() {
        out[n..].iter_mut().step_by(width).zip(row).for_each(|(x, &y)| *x = y);
    }
}

/// Adds a product whose rows are columns of the head, wherever these lie.
fn add(
    level: Level,
    size: Size,
    left: Left<'_>,
    right: Right<'_>,
    columns: &Columns<'_>,
    (into, stride): (&mut [f32], usize),
) {
    if columns.list.is_none() {
        return multiply_add(level, size, left, right, Add { data: &mut into[columns.first * stride..], stride });
    }
    let mut part = vec![0.0; columns.len() * stride];
    multiply(level, size, left, right, Store { data: &mut part, stride });
    for (n, part) in part.chunks_exact(stride.max(1)).enumerate() {
        let sums = &mut into[columns.at(n) * stride..][..stride];
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
}
