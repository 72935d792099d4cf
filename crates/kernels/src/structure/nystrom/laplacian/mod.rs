//! The whitened Laplacian kernel through landmarks: three passes over the tokens forward, three backward. "LaplacianFormer:
//! Rethinking Linear Attention with Laplacian Kernel".
//!
//! With `Cq` and `Ck` the kernels from queries and keys to the landmarks and `X` the inverse among these, similarities are
//! `Cq X Ck^T`. The variance of a column is the quadratic form of the covariance `S` of the rows of `Cq`, so that centring
//! and whitening cost no more than products with matrices of the landmarks.

mod backward;
mod coinciding;
mod forward;
mod keys;
mod plan;
mod queries;

pub(crate) use backward::backward;
pub(crate) use forward::forward;
pub(crate) use plan::plan;

use std::ops::Range;

use super::{
    marks::Producer,
    pass::TOKENS,
    tile::{Marks, Tile, Zip, width, zip},
};
use crate::{
    Parameter, Shape,
    call::Call,
    linalg::{Method, Order},
    mechanism::{Centering, InverseGradient, Laplacian, Whitening},
    score::Manhattan,
    scratch::{cut, parts, room},
    simd::{Level, product::Store},
    structure::dense::{Rows, padded, positions},
};

/// What a call is about, and its sizes.
#[derive(Clone, Copy)]
struct Core<'a> {
    call: &'a Call<'a>,
    m: &'a Laplacian,
    producer: Producer<'a>,
    sizes: Sizes,
}

/// Sizes of the parts of a call. `marks` counts dead landmarks too: it is the same for all slices.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    shape: Shape,
    /// Channels of tokens and of values, and landmarks, in whole vectors.
    dp: usize,
    dvp: usize,
    mp: usize,
    marks: usize,
}

impl Sizes {
    fn of(m: &Laplacian, shape: &Shape) -> Self {
        let marks = m.landmarks.count(shape.seq_kv, m.grid, true);
        let (dp, dvp, mp) = (padded(shape.head_dim), padded(shape.value_dim), padded(marks));
        Self { shape: *shape, dp, dvp, mp, marks }
    }

    /// What a slice saves: landmarks, `X`, `S`, the means of the rows of `Cq` and of `Ck`, `B`, `T = X B`, the mean of the
    /// whitened values and the bias; of landmarks that coincide the factors on their columns, the first of each, and how near others
    /// are. Behind those of all slices come the factors on the values, `[slices, seq_kv]`.
    fn saved(&self) -> [usize; 12] {
        let (square, values) = (self.marks * self.mp, self.marks * self.dvp);
        let rows = self.marks * self.dp;
        [rows, square, square, self.mp, self.mp, values, values, self.dvp, self.dvp, self.mp, self.mp, 1]
    }

    /// f32 that all slices save, but for the factors.
    fn heads(&self) -> usize {
        self.shape.slices() * room(self.saved())
    }

    /// Landmarks of a slice, transposed, and the factors on their columns.
    fn transposed(&self) -> usize {
        (self.shape.head_dim + 1) * self.mp
    }
}

/// What the forward pass of a slice saved.
#[derive(Clone, Copy)]
struct SavedSlice<'a> {
    u: &'a [f32],
    x: &'a [f32],
    s: &'a [f32],
    query_mean: &'a [f32],
    key_mean: &'a [f32],
    b: &'a [f32],
    t: &'a [f32],
    value_mean: &'a [f32],
    bias: &'a [f32],
    /// On the columns of landmarks, of which several may count as one.
    column_factors: &'a [f32],
    /// The first of those that a landmark coincides with.
    first: &'a [f32],
    /// By how much the largest similarity of two landmarks is below one.
    nearest: f32,
    factors: &'a [f32],
}

impl<'a> SavedSlice<'a> {
    fn of(sizes: &Sizes, stats: &'a [f32], slice: usize) -> Self {
        let (len, seq) = (room(sizes.saved()), sizes.shape.seq_kv);
        let [u, x, s, query_mean, key_mean, b, t, value_mean, bias, column_factors, first, nearest] =
            parts(&stats[slice * len..][..len], sizes.saved());
        let nearest = nearest[0];
        let factors = &stats[sizes.heads() + slice * seq..][..seq];
        Self { u, x, s, query_mean, key_mean, b, t, value_mean, bias, column_factors, first, nearest, factors }
    }
}

/// Queries or keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Query,
    Key,
}

/// A tile of kept tokens, with the rows of a tensor of theirs, and their kernel.
struct Loaded<'t> {
    kept: &'t [u32],
    tokens: Rows<'t>,
    rows: Rows<'t>,
    count: usize,
    c: &'t mut [f32],
    stride: usize,
    marks: usize,
}

impl Loaded<'_> {
    fn tile(&self) -> Tile<'_> {
        Tile { data: self.c, stride: self.stride, tokens: self.count, marks: self.marks }
    }
}

impl<'a> Core<'a> {
    fn new(call: &'a Call<'a>, m: &'a Laplacian) -> Self {
        let producer = Producer::new(m.landmarks, m.grid, false, call);
        Self { call, m, producer, sizes: Sizes::of(m, &call.shape) }
    }

    fn lambda(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Lambda).map(|x| f64::from(x[slice % self.call.shape.heads]));
        given.unwrap_or(self.m.lambda)
    }

    fn order(&self, slice: usize) -> Order {
        Order { n: self.producer.live(slice), stride: self.sizes.mp }
    }

    fn whitens(&self) -> bool {
        self.m.whitening == Whitening::Diagonal
    }

    fn centres(&self, centering: Centering) -> bool {
        self.m.centering == centering
    }

    /// Whether moments of the queries are needed.
    fn takes_moments(&self) -> bool {
        self.whitens() || self.centres(Centering::PerKey)
    }

    fn keep(&self, side: Side, slice: usize) -> Option<&'a [bool]> {
        let shape = &self.call.shape;
        let (mask, seq) = match side {
            Side::Query => (self.call.mask.query, shape.seq_q),
            Side::Key => (self.call.mask.key, shape.seq_kv),
        };
        mask.map(|keep| &keep[slice / shape.heads * seq..][..seq])
    }

    /// How many tokens of a slice are kept.
    fn kept(&self, side: Side, slice: usize) -> usize {
        let seq = if side == Side::Query { self.call.shape.seq_q } else { self.call.shape.seq_kv };
        self.keep(side, slice).map_or(seq, |keep| keep.iter().filter(|&&keep| keep).count())
    }

    /// The factor on whitened weights.
    fn weight_scale(&self, slice: usize) -> f64 {
        self.m.weight_scale.value(self.kept(Side::Key, slice).max(1))
    }

    /// One slice's part of a tensor with `seq` tokens.
    fn part<'x>(&self, x: &'x [f32], slice: usize, seq: usize, dim: usize) -> &'x [f32] {
        &x[slice * seq * dim..][..seq * dim]
    }

    /// One slice's part of the landmarks of all, transposed.
    fn transposed<'x>(&self, all: &'x [f32], slice: usize) -> &'x [f32] {
        &all[slice * self.sizes.transposed()..][..self.sizes.transposed()]
    }

    /// One slice's landmarks; `transposed` has its alone.
    fn marks<'x>(&self, transposed: &'x [f32], slice: usize) -> Marks<'x, Manhattan> {
        Marks {
            metric: Manhattan,
            rate: (std::f64::consts::LOG2_E / self.lambda(slice)) as f32,
            transposed,
            dim: self.call.shape.head_dim,
            stride: self.sizes.mp,
            count: self.producer.live(slice),
        }
    }

    /// Loads the kept tokens of `range`, their rows of `x` (`[seq, value_dim]` per slice), and their kernel; `transposed` has the landmarks of all slices.
    fn load<'t>(
        &self,
        level: Level,
        (side, slice): (Side, usize),
        range: Range<usize>,
        transposed: &[f32],
        x: Option<&'t [f32]>,
        memory: &'t mut [f32],
    ) -> Loaded<'t>
    where
        'a: 't,
    {
        let shape = &self.call.shape;
        let (d, dv) = (shape.head_dim, shape.value_dim);
        let (tokens, seq) = match side {
            Side::Query => (self.call.q, shape.seq_q),
            Side::Key => (self.call.k, shape.seq_kv),
        };
        let ([at, token_room, x_room, c], _) = cut(memory, tile_sizes(&self.sizes));
        let kept = positions(range, self.keep(side, slice), at);
        let tokens = Rows::gather(self.part(tokens, slice, seq, d), d, kept, false, token_room);
        let rows = match x {
            Some(x) => Rows::gather(self.part(x, slice, seq, dv), dv, kept, false, x_room),
            None => Rows { data: &[], stride: self.sizes.dvp },
        };
        let transposed = self.transposed(transposed, slice);
        let (marks, count) = (self.marks(transposed, slice), kept.len());
        let stride = width(marks.count);
        marks.kernel(level, tokens.as_left(), count, Store { data: &mut *c, stride });
        if let Some(factors) = self.factors(transposed) {
            zip(level, &mut c[..count * stride], &factors[..stride], Zip::Multiply);
        }
        Loaded { kept, tokens, rows, count, c: &mut c[..count * stride], stride, marks: marks.count }
    }
}

/// Sizes of a tile's positions, tokens, rows of another tensor, and kernel.
fn tile_sizes(sizes: &Sizes) -> [usize; 4] {
    [TOKENS, TOKENS * sizes.dp, TOKENS * sizes.dvp, TOKENS * sizes.mp]
}

fn method(m: &Laplacian, gradient: InverseGradient) -> Method {
    let (inverse, steps, ridge) = (m.inverse, m.newton_iterations, m.ridge);
    Method { mechanism: "laplacian", inverse, steps, init: None, start: None, ridge, gradient, cutoff: 0.0 }
}
