//! SOFT and SOFT++ through landmarks: two passes over the tokens forward, two backward. "Softmax-free Linear Transformers".
//!
//! With `P` the kernel from landmarks to tokens, `Y` the inverse among landmarks and `c` the inverse square roots of the
//! degrees: `Z = P V`, `W = c Y c Z`, `out = P^T W`. Tiles of `P` are computed when they are needed, in every pass again.

mod backward;
mod forward;
mod middle;
mod plan;

pub(crate) use backward::backward;
pub(crate) use forward::forward;
pub(crate) use plan::plan;

use std::ops::Range;

use super::{
    activation::Norm,
    marks::Producer,
    pass::TOKENS,
    tile::{Marks, Tile, width},
};
use crate::{
    Parameter, Shape,
    call::Call,
    linalg::{Method, Order},
    mechanism::{Inverse, Landmarks, Soft},
    score::Squared,
    scratch::{cut, parts, room},
    simd::{Level, product::Store},
    structure::dense::{Rows, padded, positions},
};

/// What a call is about, and its sizes.
#[derive(Clone, Copy)]
struct Core<'a> {
    call: &'a Call<'a>,
    m: &'a Soft,
    mechanism: &'static str,
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
    activated: bool,
    /// Whether the inverse is kept to more than f32.
    exact: bool,
}

impl Sizes {
    fn of(m: &Soft, shape: &Shape) -> Self {
        let marks = m.landmarks.count(shape.seq_kv, m.grid, false);
        let (dp, dvp, mp) = (padded(shape.head_dim), padded(shape.value_dim), padded(marks));
        let exact = matches!(m.inverse, Inverse::Cholesky | Inverse::Eigen);
        Self { shape: *shape, dp, dvp, mp, marks, activated: m.landmark_act, exact }
    }

    /// What a slice saves: landmarks, before they were activated too; `Y`, and what f32 leaves off; `c`; `Z`; `W`.
    fn saved(&self) -> [usize; 7] {
        let (rows, square, values) = (self.marks * self.dp, self.marks * self.mp, self.marks * self.dvp);
        let [raw, low] = [(self.activated, rows), (self.exact, square)].map(|(kept, len)| if kept { len } else { 0 });
        [rows, raw, square, low, self.mp, values, values]
    }

    /// Landmarks of a slice, transposed.
    fn transposed(&self) -> usize {
        self.shape.head_dim * self.mp
    }
}

/// What the forward pass of a slice saved.
#[derive(Clone, Copy)]
struct SavedSlice<'a> {
    u: &'a [f32],
    raw: &'a [f32],
    y: [&'a [f32]; 2],
    c: &'a [f32],
    z: &'a [f32],
    w: &'a [f32],
}

impl<'a> SavedSlice<'a> {
    fn of(sizes: &Sizes, stats: &'a [f32], slice: usize) -> Self {
        let len = room(sizes.saved());
        let [u, raw, high, low, c, z, w] = parts(&stats[slice * len..][..len], sizes.saved());
        Self { u, raw, y: [high, low], c, z, w }
    }
}

impl<'a> Core<'a> {
    fn new(call: &'a Call<'a>, m: &'a Soft, mechanism: &'static str) -> Self {
        let producer = Producer::new(m.landmarks, m.grid, true, call);
        Self { call, m, mechanism, producer, sizes: Sizes::of(m, &call.shape) }
    }

    fn method(&self) -> Method {
        method(self.m, self.mechanism)
    }

    fn scale(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Scale).map(|scale| f64::from(scale[slice % self.call.shape.heads]));
        given.unwrap_or(self.m.scale_for(self.call.shape.head_dim))
    }

    fn order(&self, slice: usize) -> Order {
        Order { n: self.producer.live(slice), stride: self.sizes.mp }
    }

    fn norm(&self) -> Option<Norm<'a>> {
        let get = |parameter| self.call.extras.get(parameter).unwrap_or_default();
        let (gamma, beta) = (get(Parameter::LandmarkNormGamma), get(Parameter::LandmarkNormBeta));
        self.m.landmark_act.then_some(Norm { gamma, beta })
    }

    fn keep(&self, slice: usize) -> Option<&'a [bool]> {
        let seq = self.call.shape.seq_q;
        self.call.mask.key.map(|keep| &keep[slice / self.call.shape.heads * seq..][..seq])
    }

    /// One slice's part of a tensor of the sequence.
    fn part<'x>(&self, x: &'x [f32], slice: usize, dim: usize) -> &'x [f32] {
        let len = self.call.shape.seq_q * dim;
        &x[slice * len..][..len]
    }

    /// One slice's part of the landmarks of all, transposed.
    fn transposed<'x>(&self, all: &'x [f32], slice: usize) -> &'x [f32] {
        &all[slice * self.sizes.transposed()..][..self.sizes.transposed()]
    }

    /// One slice's landmarks; `transposed` has its alone.
    fn marks<'x>(&self, transposed: &'x [f32], slice: usize) -> Marks<'x, Squared> {
        Marks {
            metric: Squared,
            rate: (self.scale(slice) * std::f64::consts::LOG2_E) as f32,
            transposed,
            dim: self.call.shape.head_dim,
            stride: self.sizes.mp,
            count: self.producer.live(slice),
        }
    }

    /// Sizes of a tile's positions, tokens, values and kernel.
    fn tile_sizes(&self) -> [usize; 4] {
        tile_sizes(&self.sizes)
    }

    /// Loads the kept tokens of `range`, their rows of `x` (shaped as the values), and their kernel; `transposed` has the landmarks of all slices.
    fn load<'t>(
        &self,
        level: Level,
        slice: usize,
        range: Range<usize>,
        transposed: &[f32],
        x: &'t [f32],
        memory: &'t mut [f32],
    ) -> Loaded<'t>
    where
        'a: 't,
    {
        let (d, dv) = (self.call.shape.head_dim, self.call.shape.value_dim);
        let ([at, q_room, x_room, tile], _) = cut(memory, self.tile_sizes());
        let kept = positions(range, self.keep(slice), at);
        let q = Rows::gather(self.part(self.call.q, slice, d), d, kept, false, q_room);
        let x = Rows::gather(self.part(x, slice, dv), dv, kept, true, x_room);
        let marks = self.marks(self.transposed(transposed, slice), slice);
        let stride = width(marks.count);
        marks.kernel(level, q.as_left(), kept.len(), Store { data: tile, stride });
        Loaded { kept, q, x, tile: Tile { data: tile, stride, tokens: kept.len(), marks: marks.count } }
    }
}

/// A tile of kept tokens.
struct Loaded<'t> {
    kept: &'t [u32],
    q: Rows<'t>,
    x: Rows<'t>,
    tile: Tile<'t>,
}

fn tile_sizes(sizes: &Sizes) -> [usize; 4] {
    [TOKENS, TOKENS * sizes.dp, TOKENS * sizes.dvp, TOKENS * sizes.mp]
}

fn method(m: &Soft, mechanism: &'static str) -> Method {
    Method {
        mechanism,
        inverse: m.inverse,
        steps: m.newton_iterations,
        init: Some(m.newton_init),
        start: None,
        ridge: m.ridge,
        gradient: m.gradient,
        cutoff: m.eigen_cutoff,
    }
}

/// f32 of memory that making landmarks takes.
fn producer_work(m: &Soft, sizes: &Sizes) -> usize {
    debug_assert!(m.landmarks != Landmarks::All);
    Producer::work(m.landmarks, true, &sizes.shape, sizes.marks)
}
