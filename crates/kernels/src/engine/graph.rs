//! The weighted graph of a call: one hop over it, its transpose, and the gradients.

use std::sync::Arc;

use rayon::prelude::*;

use super::{
    head::{Head, Sight, Slice},
    series::{Hop, Tokens},
    sweep::{Channels, Gradients, Sweep, Taken, Weights},
    whiten::Statistics,
};
use crate::{
    Error, Parameter, Result, Shape,
    call::Call,
    mechanism::{Composed, Factor, Normalisation, Structure, Whitening},
    score::{
        builtin,
        contract::{MOST_PARAMETERS, TileScore},
        map::Map,
    },
    structure::{clustered, dense::padded},
};

/// Tasks that a call's backward pass is split into where batch and heads are fewer. A constant, lest results depend on the machine.
const TASKS: usize = 16;

/// Pairs of a dense or clustered structure, and what weighs them.
pub(super) struct Graph<'a> {
    call: &'a Call<'a>,
    m: &'a Composed,
    map: Map,
    heads: Vec<Head>,
    /// Of every head of the call, not of every slice.
    scores: Vec<Arc<dyn TileScore>>,
    weights: Vec<Weights>,
    /// Of a Frobenius norm, per slice and row: the divisor over the norm that it comes from.
    shares: Vec<Vec<f64>>,
}

/// Whether the engine has the composition.
pub(super) fn is_fused(m: &Composed, causal: bool) -> bool {
    let density = matches!(&m.normalisation, Normalisation::Row(row) if row.density_exponent != 0.0);
    let whitened = matches!(m.normalisation, Normalisation::Whitened(_));
    match &m.structure {
        Structure::Dense(dense) => {
            let full = matches!(&m.normalisation, Normalisation::Whitened(m) if m.whitening == Whitening::Full);
            !density && !full && !(whitened && (causal || dense.window.is_some()))
        }
        Structure::Clustered(s) => {
            let centroid = s.ssa(None, causal).estimator == crate::mechanism::Estimator::Centroid;
            let columns = matches!(m.normalisation, Normalisation::Symmetric(_));
            !(density || whitened || columns || causal && centroid)
        }
        _ => false,
    }
}

/// A parameter of one head: the call's, or the configured one.
pub(super) fn parameter(call: &Call<'_>, m: &Composed, parameter: Parameter, head: usize) -> f64 {
    let shape = &call.shape;
    let configured = || match parameter {
        Parameter::Gamma => m.series.gamma(),
        _ => m.score.value(parameter, shape.head_dim, shape.heads),
    };
    call.extras.get(parameter).map_or_else(configured, |values| values[head].into())
}

impl<'a> Graph<'a> {
    pub fn new(call: &'a Call<'a>, m: &'a Composed) -> Result<Self> {
        let shape = call.shape;
        let map = Map::of(&m.score);
        let score = |head| builtin::of_head(&m.score, shape.head_dim, shape.heads, |p| parameter(call, m, p, head));
        let scores: Vec<_> = (0..shape.heads).map(score).collect();
        let scale = |slice: usize| parameter(call, m, Parameter::Scale, slice % shape.heads) as f32;
        let causal = call.mask.causal;
        let heads = match &m.structure {
            Structure::Clustered(structure) => {
                let ssa = structure.ssa(m.planned_scale(), causal);
                let made = if call.extras.clusters.is_none() { Some(clustered::make(call, &ssa)?) } else { None };
                let plan = call.extras.clusters.or(made.as_ref());
                let head = |slice: usize| {
                    let plan = plan.map(|plan| plan.head(slice).clone()).unwrap_or_default();
                    Head::clustered(Slice::of(call, slice), &plan, &ssa, causal, map, scale(slice))
                };
                (0..shape.slices()).into_par_iter().map(head).collect()
            }
            structure => {
                let dense = if let Structure::Dense(dense) = structure { dense.clone() } else { Default::default() };
                let sight = Sight::dense(&dense, &shape, causal);
                let head = |slice: usize| Head::dense(Slice::of(call, slice), sight, map, scale(slice));
                (0..shape.slices()).into_par_iter().map(head).collect()
            }
        };
        let mut graph = Self { call, m, map, heads, scores, weights: Vec::new(), shares: Vec::new() };
        (graph.weights, graph.shares) = (0..shape.slices()).map(|slice| graph.weigh(slice)).unzip();
        // Sums that left f32 would divide in silence.
        let unbounded = |x: &&f32| !x.is_finite() || **x == 0.0 && !graph.scores[0].is_log();
        if let Some(index) = graph.weights.iter().flat_map(|w| &w.rows).position(|x| unbounded(&x)) {
            return Err(Error::Overflow { tensor: "row sums", index });
        }
        Ok(graph)
    }

    fn sweep(&self, slice: usize) -> Sweep<'_> {
        let score = &*self.scores[slice % self.call.shape.heads];
        Sweep { head: &self.heads[slice], score, level: self.call.level }
    }

    /// `ln sum |g|^p` of the rows of `sweep`'s head, and the terms of their largest values.
    fn row_logs(sweep: Sweep<'_>, power: f32) -> (Vec<f64>, Vec<f32>) {
        let blocks: Vec<Vec<(f64, f32)>> =
            sweep.head.blocks.par_iter().map(|block| sweep.row_logs(block, power)).collect();
        // Blocks are in the order of the rows.
        blocks.into_iter().flatten().unzip()
    }

    /// What makes weights of a slice's values.
    fn weigh(&self, slice: usize) -> (Weights, Vec<f64>) {
        let (sweep, head) = (self.sweep(slice), &self.heads[slice]);
        let log = sweep.score.is_log();
        let neutral = if log { 0.0 } else { 1.0 };
        // From the logarithm of a divisor; what is divided by nothing is nothing.
        let factor = |ln: f64| match ln == f64::NEG_INFINITY {
            true => neutral,
            false if log => ln as f32,
            false => (-ln).exp() as f32,
        };
        let rows_of = |logs: &[f64]| {
            let rows: Vec<f32> = logs.iter().map(|&ln| factor(ln)).collect();
            let lost =
                |(&ln, &row): (&f64, &f32)| if ln.is_finite() { (f64::from(row) - ln).exp() as f32 } else { 1.0 };
            let fine = if log { logs.iter().zip(&rows).map(lost).collect() } else { Vec::new() };
            Weights { rows, fine, ..Weights::default() }
        };
        let columns = vec![neutral; head.keys.len()];
        match &self.m.normalisation {
            // Each of the factors by its rows.
            Normalisation::Row(_) | Normalisation::Factors(_) => {
                let (logs, terms) = Self::row_logs(sweep, 1.0);
                let typical = if log { terms } else { Vec::new() };
                (Weights { columns, typical, ..rows_of(&logs) }, Vec::new())
            }
            Normalisation::Frobenius(m) => {
                let (squares, _) = Self::row_logs(sweep, 2.0);
                let norms = if self.call.mask.causal { prefix_logs(head, &squares) } else { total_log(&squares) };
                let divisor = |norm: &f64| add_logs(norm / 2.0, m.eps.ln());
                let share =
                    |norm: &f64| if *norm == f64::NEG_INFINITY { 0.0 } else { (divisor(norm) - norm / 2.0).exp() };
                let divisors: Vec<f64> = norms.iter().map(divisor).collect();
                (Weights { columns, ..rows_of(&divisors) }, norms.iter().map(share).collect())
            }
            Normalisation::Symmetric(_) => {
                let half = |logs: Vec<f64>| logs.into_iter().map(|ln| factor(ln / 2.0)).collect();
                let transposed = head.transposed();
                let rows = half(Self::row_logs(sweep, 1.0).0);
                let columns = half(Self::row_logs(Sweep { head: &transposed, ..sweep }, 1.0).0);
                (Weights { rows, columns, ..Weights::default() }, Vec::new())
            }
            Normalisation::None(m) => {
                let ln = |seen: &f64| if m.factor == Factor::InvN { seen.max(1.0).ln() } else { 0.0 };
                (
                    Weights {
                        rows: head.seen.iter().map(|seen| factor(ln(seen))).collect(),
                        columns,
                        ..Weights::default()
                    },
                    Vec::new(),
                )
            }
            Normalisation::Whitened(m) => {
                let statistics = Statistics::of(sweep, &Self::row_logs(sweep, 1.0).0, m);
                (Weights { columns, whitened: Some(statistics), ..Weights::default() }, Vec::new())
            }
        }
    }

    /// What the normalisation takes out of the gradients, from `delta_i = <dout_i, out_i>` and, where columns are divided,
    /// `epsilon_j = <v_j, dv_j>`.
    fn taken(&self, slice: usize, delta: &[f64], epsilon: &[f64]) -> Taken {
        let (head, weights) = (&self.heads[slice], &self.weights[slice]);
        let log = self.scores[slice % self.call.shape.heads].is_log();
        let (rows, columns) = (head.queries.len(), head.keys.len());
        let zeros = |n: usize| vec![0.0; n];
        let mut taken = Taken {
            a: zeros(rows),
            c: zeros(rows),
            tau: zeros(rows),
            p: zeros(columns),
            d: zeros(columns),
            typical: Vec::new(),
            whitened: None,
        };
        match &self.m.normalisation {
            Normalisation::Row(_) => {
                taken.a = delta.iter().map(|&x| x as f32).collect();
                taken.p.fill(1.0);
                taken.typical = weights.typical.clone();
            }
            Normalisation::Frobenius(_) => {
                taken.tau = frobenius(head, &self.shares[slice], weights, delta, log, self.call.mask.causal);
            }
            Normalisation::Symmetric(_) => {
                // The root of a sum: its logarithm is half of the sum's. They are taken relative to the largest of the rows.
                let most = weights.rows.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let root = |x: f32| if log { f64::from(x - most).exp() } else { 1.0 / f64::from(x) };
                let ratio = |x: f64, root: f64| if root > 0.0 { (0.5 * x / root) as f32 } else { 0.0 };
                for (n, &x) in weights.rows.iter().enumerate() {
                    (taken.a[n], taken.c[n]) = (ratio(delta[n], root(x)), root(x) as f32);
                }
                for (n, &x) in weights.columns.iter().enumerate() {
                    (taken.p[n], taken.d[n]) = (root(x) as f32, ratio(epsilon[n], root(x)));
                }
            }
            _ => {}
        }
        taken
    }

    /// Runs the backward pass over one slice's blocks; `taken` as in [`Sweep::backward`].
    fn slice_backward(&self, slice: usize, taken: Option<&Taken>, x: Channels<'_>) -> Gradients {
        let (sweep, head) = (self.sweep(slice), &self.heads[slice]);
        let tasks = TASKS.div_ceil(self.call.shape.slices()).min(head.blocks.len()).max(1);
        let new = || {
            let tokens = |len: usize| vec![0.0; if taken.is_some() { len } else { 0 }];
            Gradients {
                dq: tokens(head.q.len()),
                dk: tokens(head.k.len()),
                dv: vec![0.0; head.keys.len() * padded(x.dim)],
                parameters: [0.0; MOST_PARAMETERS],
            }
        };
        let task = |task: usize| {
            let mut part = new();
            for block in head.blocks.iter().skip(task).step_by(tasks) {
                sweep.backward(block, (&self.weights[slice], taken), x, &mut part);
            }
            part
        };
        let parts: Vec<Gradients> = (0..tasks).into_par_iter().map(task).collect();
        parts.into_iter().reduce(Gradients::plus).unwrap_or_else(new)
    }

    /// Sums over the channels of rows of two tensors, by row of the head.
    fn contractions(x: &[f32], y: &[f32], dim: usize) -> Vec<f64> {
        let rows = x.chunks_exact(dim.max(1)).zip(y.chunks_exact(dim.max(1)));
        rows.map(|(x, y)| crate::structure::dense::dot(x, y)).collect()
    }
}

impl Gradients {
    fn plus(mut self, other: Self) -> Self {
        let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        add(&mut self.dq, &other.dq);
        add(&mut self.dk, &other.dk);
        add(&mut self.dv, &other.dv);
        self.parameters.iter_mut().zip(other.parameters).for_each(|(to, x)| *to += x);
        self
    }
}

impl Hop for Graph<'_> {
    fn shape(&self) -> Shape {
        self.call.shape
    }

    fn apply(&self, x: &[f32], out: &mut [f32]) {
        let s = self.call.shape;
        let dim = s.value_dim;
        out.fill(0.0);
        let slices = out.par_chunks_mut(s.seq_q * dim).zip(x.par_chunks(s.seq_kv * dim)).enumerate();
        slices.for_each(|(slice, (out, x))| {
            let (head, sweep) = (&self.heads[slice], self.sweep(slice));
            let values = head.of_columns(x, dim);
            let channels = Channels { values: &values, gradients: &[], dim };
            let rows = |block| sweep.apply(block, &self.weights[slice], channels);
            let blocks: Vec<Vec<f32>> = head.blocks.par_iter().map(rows).collect();
            for (row, &i) in blocks.iter().flat_map(|rows| rows.chunks_exact(padded(dim))).zip(&head.queries) {
                out[i as usize * dim..][..dim].copy_from_slice(&row[..dim]);
            }
        });
    }

    fn transpose(&self, y: &[f32], out: &mut [f32]) {
        let s = self.call.shape;
        let dim = s.value_dim;
        out.fill(0.0);
        let slices = out.par_chunks_mut(s.seq_kv * dim).zip(y.par_chunks(s.seq_q * dim)).enumerate();
        slices.for_each(|(slice, (out, y))| {
            let head = &self.heads[slice];
            let (gradients, zeros) = (head.of_rows(y, dim), vec![0.0; head.keys.len() * padded(dim)]);
            let x = Channels { values: &zeros, gradients: &gradients, dim };
            let dv = self.slice_backward(slice, None, x).dv;
            head.add_columns(&dv, padded(dim), out, dim, out_source(s.seq_kv * dim).as_slice(), keep);
        });
    }

    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens) {
        let s = self.call.shape;
        let (d, dim) = (s.head_dim, s.value_dim);
        dx.fill(0.0);
        let [per_q, per_k] = [s.seq_q * d, s.seq_kv * d];
        let slices = dx.par_chunks_mut(s.seq_kv * dim).zip(tokens.dq.par_chunks_mut(per_q));
        let slices = slices.zip(tokens.dk.par_chunks_mut(per_k)).zip(tokens.parameters.par_iter_mut()).enumerate();
        slices.for_each(|(slice, (((dx, dq), dk), parameters))| {
            let head = &self.heads[slice];
            let of_queries = |x: &[f32]| head.of_rows(&x[slice * s.seq_q * dim..][..s.seq_q * dim], dim);
            let values = head.of_columns(&x[slice * s.seq_kv * dim..][..s.seq_kv * dim], dim);
            let (gradients, results) = (of_queries(dout), of_queries(y));
            let channels = Channels { values: &values, gradients: &gradients, dim };
            let delta = Self::contractions(&gradients, &results, padded(dim));
            let columns = matches!(self.m.normalisation, Normalisation::Symmetric(_) | Normalisation::Whitened(_));
            let dv = if columns { self.slice_backward(slice, None, channels).dv } else { Vec::new() };
            let epsilon = Self::contractions(&values, &dv, padded(dim));
            let mut taken = self.taken(slice, &delta, &epsilon);
            let statistics = self.weights[slice].whitened.as_ref();
            taken.whitened = statistics.map(|s| s.back(head, &values, &gradients, &dv, padded(dim)));
            let all = self.slice_backward(slice, Some(&taken), channels);
            head.add_columns(&all.dv, padded(dim), dx, dim, out_source(s.seq_kv * dim).as_slice(), keep);
            let pull = |row: &[f32], d: &[f32], out: &mut [f32]| self.map.pull_back(row, d, out);
            let raw = Slice::of(self.call, slice);
            head.add_columns(&all.dk, head.stride, dk, d, raw.k, pull);
            let mut part = vec![0.0; d];
            for (&i, image) in head.queries.iter().zip(all.dq.chunks_exact(head.stride)) {
                let at = i as usize * d..(i as usize + 1) * d;
                pull(&raw.q[at.clone()], image, &mut part);
                dq[at].iter_mut().zip(&part).for_each(|(dq, x)| *dq += x);
            }
            let mut of_score = all.parameters;
            if self.map == Map::Offset {
                // The term holds the query's own offset, which does not depend on the scale.
                let scale = parameter(self.call, self.m, Parameter::Scale, slice % s.heads) as f32;
                let offsets = all.dq.chunks_exact(head.stride).zip(head.q.chunks_exact(head.stride));
                of_score[0] -=
                    offsets.map(|(dq, q)| f64::from(dq[d]) * f64::from(q[d])).sum::<f64>() / f64::from(scale);
            }
            parameters.iter_mut().zip(of_score).for_each(|(sum, x)| *sum += x);
        });
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.m.score.parameters()
    }
}

/// Values need no rows to be pulled back along.
fn out_source(len: usize) -> Vec<f32> {
    vec![0.0; len]
}

/// The gradient of a value is that of its column.
fn keep(_: &[f32], dimage: &[f32], out: &mut [f32]) {
    out.copy_from_slice(&dimage[..out.len()]);
}

fn add_logs(a: f64, b: f64) -> f64 {
    let (low, high) = (a.min(b), a.max(b));
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// The logarithm of the sum of all rows' squares, for every row.
fn total_log(squares: &[f64]) -> Vec<f64> {
    let total = squares.iter().copied().fold(f64::NEG_INFINITY, add_logs);
    vec![total; squares.len()]
}

/// The rows in the order of their positions.
fn by_position(head: &Head) -> Vec<usize> {
    let mut order: Vec<usize> = (0..head.queries.len()).collect();
    order.sort_by_key(|&n| head.queries[n]);
    order
}

/// The logarithm of the sum of the squares of the rows so far.
fn prefix_logs(head: &Head, squares: &[f64]) -> Vec<f64> {
    let (mut sum, mut norms) = (f64::NEG_INFINITY, vec![0.0; squares.len()]);
    for n in by_position(head) {
        sum = add_logs(sum, squares[n]);
        norms[n] = sum;
    }
    norms
}

/// `tau`: the gradient of a norm is `c / f` with `c = sum delta` over the rows that it divides, and of a squared affinity's part
/// in it `g f / F`. Causal: `tau_i = sum_{r >= i} c_r f_i^2 / (f_r F_r)`, by recursion from the last row.
fn frobenius(head: &Head, shares: &[f64], weights: &Weights, delta: &[f64], log: bool, causal: bool) -> Vec<f32> {
    if !causal {
        let share = shares.first().copied().unwrap_or(0.0);
        return vec![(delta.iter().sum::<f64>() * share) as f32; delta.len()];
    }
    let ratio = |from: usize, to: usize| {
        let [from, to] = [weights.rows[from], weights.rows[to]].map(f64::from);
        if log { (from - to).exp() } else { to / from }
    };
    let (mut tau, mut next) = (vec![0.0; delta.len()], None);
    let mut sum = 0.0;
    for n in by_position(head).into_iter().rev() {
        sum = delta[n] * shares[n] + next.map_or(0.0, |next| sum * f64::powi(ratio(n, next), 2));
        tau[n] = sum as f32;
        next = Some(n);
    }
    tau
}
