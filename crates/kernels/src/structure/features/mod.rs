//! `W = phi(Q) phi(K)^T`, rows normalised, in O(N) time and memory: sums over keys of products of their features and values, and
//! of features alone, stand for all keys.
//!
//! `out_i = phi(q_i).S_i / phi(q_i).z_i`, `S_i = sum_j phi(k_j) v_j^T` and `z_i = sum_j phi(k_j)` over the keys that query `i` sees.
//! "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", eq. 5 to 9 and 13 to 15; "Rethinking Attention with
//! Performers".

mod decode;
mod drive;
mod head;
mod map;
mod plan;
mod product;
mod state;
mod sweep;
mod tile;

use std::sync::Arc;

pub(crate) use decode::{Decoder, Past};
pub(crate) use plan::plan;

use self::{
    drive::{Cut, Drive},
    head::{Head, Incoming, Side, Sums},
    map::{Directions, Map},
    state::FLOOR,
    sweep::{Pass, Workspace},
};
use crate::{
    Error, Parameter, Result, Shape,
    call::{
        Call, View,
        magnitude::{Masked, largest},
    },
    mechanism::Features,
    parallel::Parts,
    simd::bf16::Bf16Products,
    structure::dense::dot,
};

const FORWARD: Pass = Pass { sinks: Side::Queries, values: true, features: false };
const QUERIES: Pass = Pass { sinks: Side::Queries, values: false, features: true };

/// The pass that ends in keys.
const fn keys(values: bool, features: bool) -> Pass {
    Pass { sinks: Side::Keys, values, features }
}

/// The operator of a call: its queries and keys through a map.
pub(crate) struct Operator<'a> {
    call: &'a Call<'a>,
    directions: Option<Arc<Directions>>,
    cut: Cut,
    /// The score's scale where the call gives none.
    scale: f64,
    /// The same of what multiplies the rows; none where nothing does.
    gamma: Option<f64>,
}

/// A gradient of outputs that comes in, and what the forward pass wrote and saved.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'x> {
    pub v: &'x [f32],
    /// Needed for gradients of queries and keys.
    pub out: Option<&'x [f32]>,
    pub dout: &'x [f32],
    pub stats: &'x [f32],
}

/// Where gradients go, those that are wanted. Those of tied keys are added to what there is.
#[derive(Default)]
pub(crate) struct Targets<'x> {
    pub dq: Option<&'x mut [f32]>,
    pub dk: Option<&'x mut [f32]>,
    pub dv: Option<&'x mut [f32]>,
}

impl<'a> Operator<'a> {
    /// `scale` and `gamma` stand for those of the heads that the call does not give; without a `gamma` there is none.
    ///
    /// # Errors
    /// [`Error::Range`] where products with random directions have no digits in f32.
    pub fn new(call: &'a Call<'a>, m: &Features, scale: f64, gamma: Option<f64>) -> Result<Self> {
        let (shape, dim) = (&call.shape, call.shape.head_dim);
        let cut = Cut::of(shape, map::count(m, dim), call.bf16.map_or(0, Bf16Products::parts));
        let new = Self { call, directions: Directions::of(m, dim), cut, scale, gamma };
        if new.directions.is_some() {
            (0..shape.slices()).try_for_each(|slice| check_lengths(call, slice, new.scale(slice)))?;
        }
        Ok(new)
    }

    /// The scale of a slice's head.
    fn scale(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Scale);
        given.map_or(self.scale, |given| given[slice % given.len()].into())
    }

    /// What multiplies the rows of a slice.
    fn gamma(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Gamma).filter(|_| self.gamma.is_some());
        given.map_or(self.gamma.unwrap_or(1.0), |given| given[slice % given.len()].into())
    }

    /// f32 of `stats` that [`Operator::forward`] writes: of every query what its weights sum to, and in which unit.
    pub fn stats(shape: &Shape) -> usize {
        2 * shape.slices() * shape.seq_q
    }

    fn head<'x>(&'x self, slice: usize, v: &'x [f32]) -> Head<'x> {
        let Cut { sizes, .. } = self.cut;
        let map = Map {
            level: self.call.level,
            bf16: self.call.bf16,
            dim: sizes.dim,
            count: sizes.features,
            directions: self.directions.as_deref(),
            root: self.scale(slice).sqrt() as f32,
        };
        Head::of(self.call, slice, v, (map, sizes), self.gamma(slice) as f32)
    }

    /// Writes `gamma W v` and what [`Operator::backward`] needs; `v` may be any values of the call's shape.
    ///
    /// # Errors
    /// [`Error::Range`] where row sums have no digits in f32.
    pub fn forward(&self, v: &[f32], out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        let Shape { seq_q, value_dim, .. } = self.call.shape;
        let columns = self.cut.sizes.columns();
        let (sums, levels) = stats.split_at_mut(stats.len() / 2);
        {
            let (out, sums, levels) = (Parts::new(out), Parts::new(&mut *sums), Parts::new(&mut *levels));
            let write = |slice: usize, head: &Head<'_>, tokens: std::ops::Range<usize>, from: &mut Workspace<'_>| {
                let rows = slice * seq_q + tokens.start..slice * seq_q + tokens.end;
                // SAFETY: every token of every slice is written once.
                let (sums, levels) = unsafe { (sums.part(rows.clone()), levels.part(rows.clone())) };
                // SAFETY: as above.
                let out = unsafe { out.part(rows.start * value_dim..rows.end * value_dim) };
                levels.copy_from_slice(&from.sink.levels[..tokens.len()]);
                for (n, (token, out)) in tokens.zip(out.chunks_exact_mut(value_dim)).enumerate() {
                    sums[n] = if head.keeps(Side::Queries, token) { from.sums[n] } else { 0.0 };
                    let factor = head.gamma / sums[n];
                    match sums[n] == 0.0 {
                        true => out.fill(0.0),
                        false => out.iter_mut().zip(&from.out[n * columns..]).for_each(|(out, x)| *out = factor * x),
                    }
                }
            };
            let head = |slice| self.head(slice, v);
            Drive { cut: self.cut, pass: FORWARD, head: &head, write: &write }.run(work);
        }
        check_sums(self.call, sums, levels)
    }

    /// Writes the gradients of `<dout, gamma W v>` that are wanted.
    pub fn backward<'x>(&'x self, from: Backward<'x>, targets: Targets<'_>, tied: bool, work: &mut [f32]) {
        let Shape { seq_q, seq_kv, value_dim, .. } = self.call.shape;
        let (sums, levels) = from.stats.split_at(from.stats.len() / 2);
        let head = |slice: usize| {
            let part = |x: &'x [f32], len: usize| &x[slice * len..][..len];
            let rows = Sums { sums: part(sums, seq_q), levels: part(levels, seq_q) };
            let out = from.out.map(|out| part(out, seq_q * value_dim));
            self.head(slice, from.v).with_incoming(Incoming { dout: part(from.dout, seq_q * value_dim), out, rows })
        };
        let Targets { dq, dk, dv } = targets;
        // One of both where queries are keys.
        let (mut dq, mut dk) = (dq, dk);
        if let Some(dq) = dq.as_deref_mut() {
            let dq = Parts::new(dq);
            let write = |slice: usize, head: &Head<'_>, tokens: std::ops::Range<usize>, from: &mut Workspace<'_>| {
                pull_back(head, Side::Queries, slice * seq_q, tokens, from, &dq, false);
            };
            Drive { cut: self.cut, pass: QUERIES, head: &head, write: &write }.run(work);
        }
        let add = tied && dk.is_none();
        let of_keys = if add { dq.take() } else { dk.take() };
        let pass = keys(dv.is_some(), of_keys.is_some());
        let (of_keys, dv) = (of_keys.map(Parts::new), dv.map(Parts::new));
        let columns = self.cut.sizes.columns();
        let write = |slice: usize, head: &Head<'_>, tokens: std::ops::Range<usize>, from: &mut Workspace<'_>| {
            if let Some(dv) = &dv {
                let rows = slice * seq_kv + tokens.start..slice * seq_kv + tokens.end;
                // SAFETY: every token of every slice is written once.
                let dv = unsafe { dv.part(rows.start * value_dim..rows.end * value_dim) };
                let rows = tokens.clone().zip(dv.chunks_exact_mut(value_dim)).zip(from.out.chunks_exact(columns));
                for ((token, dv), x) in rows {
                    if head.keeps(Side::Keys, token) { dv.copy_from_slice(&x[..value_dim]) } else { dv.fill(0.0) }
                }
            }
            if let Some(dk) = &of_keys {
                pull_back(head, Side::Keys, slice * seq_kv, tokens, from, dk, add);
            }
        };
        Drive { cut: self.cut, pass, head: &head, write: &write }.run(work);
    }

    /// The gradient of every slice's factor `gamma`, of what it has made.
    pub fn decay_gradients(&self, out: &[f32], dout: &[f32]) -> Vec<f64> {
        let call = self.call;
        let of_slice = |slice: usize| -> f64 {
            let rows = |x| {
                let x = View::in_one_piece(x, call.shape.slices(), [call.shape.seq_q, call.shape.value_dim]);
                Masked::of_queries(call, x).rows(slice)
            };
            let sum: f64 = rows(out).zip(rows(dout)).map(|(x, y)| dot(x, y)).sum();
            sum / self.gamma(slice)
        };
        (0..call.shape.slices()).map(of_slice).collect()
    }

    /// The gradient of every slice's scale from those of its queries and keys, or of both at once: rows are multiplied by its root.
    pub fn scale_gradients(&self, dq: &[f32], dk: Option<&[f32]>) -> Vec<f64> {
        let Shape { seq_q, seq_kv, head_dim, .. } = self.call.shape;
        let of = |side: Side, seq: usize, dx: &[f32], slice: usize| -> f64 {
            let head = self.head(slice, self.call.v.dense());
            let rows =
                head.rows(side, &(0..seq)).chunks_exact(head_dim).zip(dx[slice * seq * head_dim..].chunks(head_dim));
            let counts = |n: usize| head.keeps(side, n) || dk.is_none() && head.keeps(Side::Keys, n);
            rows.enumerate().filter(|(n, _)| counts(*n)).map(|(_, (x, dx))| dot(x, dx)).sum()
        };
        (0..self.call.shape.slices())
            .map(|slice| {
                let of_keys = dk.map_or(0.0, |dk| of(Side::Keys, seq_kv, dk, slice));
                (of(Side::Queries, seq_q, dq, slice) + of_keys) / (2.0 * self.scale(slice))
            })
            .collect()
    }
}

/// Writes, or adds, the gradient of a side's tokens from those of their features. `first` is the slice's first row.
fn pull_back(
    head: &Head<'_>,
    side: Side,
    first: usize,
    tokens: std::ops::Range<usize>,
    from: &mut Workspace<'_>,
    into: &Parts<'_, f32>,
    add: bool,
) {
    let (dim, x) = (head.sizes.dim, head.rows(side, &tokens));
    // SAFETY: every token of every slice is written once in a pass.
    let dx = unsafe { into.part((first + tokens.start) * dim..(first + tokens.end) * dim) };
    let keeps = |row: usize| head.keeps(side, tokens.start + row);
    let Workspace { products, sink, dfeatures, pulled, .. } = from;
    head.map.pull_back((x, side == Side::Keys), (sink.features, dfeatures), (products, pulled), (dx, add), &keeps);
}

/// Largest `scale |x|^2` of a row that `favor` takes, as far as its largest entry tells: products with directions are then right to
/// some 1e-4, which are relative errors of features.
const MOST_LENGTH: f64 = (1 << 16) as f64;

/// Whether rows are short enough for `favor`.
fn check_lengths(call: &Call<'_>, slice: usize, scale: f64) -> Result<()> {
    check_entries(largest(call, slice), scale, call.shape.head_dim)
}

/// The same of rows of `dim` channels whose entries are up to `largest`.
fn check_entries(largest: [f32; 2], scale: f64, dim: usize) -> Result<()> {
    let limit = (MOST_LENGTH / (scale * dim as f64)).sqrt();
    for (tensor, largest) in ["q", "k"].into_iter().zip(largest.map(f64::from)) {
        if largest.is_finite() && largest > limit {
            let remedy = "exponents of random features are too large: scale or normalise queries and keys, or set a smaller `scale`";
            return Err(Error::Range { tensor, largest, bound: "up to", limit, remedy });
        }
    }
    Ok(())
}

/// Row sums that f32 holds beside what they are made of, and with digits left for gradients.
const SUMS: std::ops::RangeInclusive<f32> = 1e-24..=1e24;

/// Whether the row sums of queries that see a key are in range: features of queries are far from those of keys where they are small,
/// and large where entries of both are.
fn check_sums(call: &Call<'_>, sums: &[f32], levels: &[f32]) -> Result<()> {
    let shape = call.shape;
    let out_of_range = |n: usize| {
        let keeps = call.mask.query.is_none_or(|keep| {
            let (slice, token) = (n / shape.seq_q, n % shape.seq_q);
            keep[slice / shape.heads * shape.seq_q + token]
        });
        keeps && levels[n] > FLOOR && !sums[n].is_nan() && !SUMS.contains(&sums[n])
    };
    let Some(n) = (0..sums.len()).find(|&n| out_of_range(n)) else { return Ok(()) };
    let [q, k] = largest(call, n / shape.seq_q).map(f64::from);
    let (tensor, largest) = if q >= k { ("q", q) } else { ("k", k) };
    if !largest.is_finite() {
        return Ok(());
    }
    // Exponents grow with the entries, and sums of large entries with their product.
    let (sum, least, most) = (f64::from(sums[n]), f64::from(*SUMS.start()), f64::from(*SUMS.end()));
    let share = if sum < 1.0 { least.ln() / sum.max(1e-300).ln() } else { (most / sum.min(1e38)).sqrt() };
    let remedy =
        "features of queries and of keys have no product in f32: scale or normalise them, or set a smaller `scale`";
    Err(Error::Range { tensor, largest, bound: "up to", limit: largest * share, remedy })
}
