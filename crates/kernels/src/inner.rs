//! Innermost loops on their own, for the benches that compare them, and constants of mechanisms, for other forms of them; no part of
//! the interface.

use pulp::{Simd, WithSimd};

pub use crate::call::HeadGroups;
use crate::{
    Result, Shape,
    linalg::{Entries, Method, Order},
    mechanism::{Bias, Inverse, InverseGradient, Score},
    random, random_features,
    score::{Manhattan, Squared},
    simd::{
        Level,
        math::exp2,
        product::{Left, Right, Size, Store, multiply},
    },
    structure::{dense::padded, nystrom::tile},
};

/// What is made of two rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pair {
    /// Their inner product.
    Product,
    /// `exp(-|x - y|_1)`.
    Laplacian,
    /// `exp(-|x - y|_2^2)`.
    Gaussian,
}

/// Writes `out [rows, landmarks]` from `x [rows, dim]` and `landmarks [dim, landmarks]`, tile by tile as a call does; `landmarks` is a
/// multiple of 16.
pub fn pairs(level: Level, pair: Pair, x: &[f32], landmarks: &[f32], dim: usize, out: &mut [f32]) {
    let cols = landmarks.len() / dim;
    for (x, out) in x.chunks(64 * dim).zip(out.chunks_mut(64 * cols)) {
        let size = Size { rows: x.len() / dim, cols, depth: dim };
        let (x, landmarks) =
            (Left { data: x, row_stride: dim, depth_stride: 1 }, Right { data: landmarks, stride: cols });
        let out = Store { data: out, stride: cols };
        let rate = std::f32::consts::LOG2_E;
        match pair {
            Pair::Product => multiply(level, size, x, landmarks, out),
            Pair::Laplacian => tile::kernel(level, (Manhattan, rate), x, size, landmarks, out),
            Pair::Gaussian => tile::kernel(level, (Squared, rate), x, size, landmarks, out),
        }
    }
}

/// Writes `2^x` for every `x`: what softmax does most beside products. Both lengths are the same multiple of 16.
pub fn exponentials(level: Level, x: &[f32], out: &mut [f32]) {
    level.dispatch(Exponentials { x, out });
}

struct Exponentials<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (x, out) = (S::as_simd_f32s(self.x).0, S::as_mut_simd_f32s(self.out).0);
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp2(simd, x));
    }
}

/// Inverts matrices of one size, again and again in the same memory.
#[derive(Debug)]
pub struct Inverter {
    method: Method,
    order: Order,
    a: Vec<f32>,
    y: Vec<f32>,
    work: Vec<f32>,
}

impl Inverter {
    /// For `a [n, n]` with `ridge` on its diagonal, by `steps` steps where `inverse` takes steps.
    pub fn new(inverse: Inverse, steps: usize, ridge: f64, a: &[f32], n: usize) -> Self {
        let gradient = InverseGradient::Implicit;
        let method =
            Method { mechanism: "bench", inverse, steps, init: None, start: None, ridge, gradient, cutoff: 0.0 };
        let order = Order { n, stride: padded(n) };
        let mut rows = vec![0.0; order.len()];
        for (row, a) in rows.chunks_exact_mut(order.stride).zip(a.chunks_exact(n)) {
            row[..n].copy_from_slice(a);
        }
        Self { method, order, a: rows, y: vec![0.0; order.len()], work: vec![0.0; method.work(order)] }
    }

    /// Computes the inverse.
    ///
    /// # Errors
    /// [`crate::Error::Singular`] where a factorisation needs a positive definite matrix and has none.
    pub fn run(&mut self, level: Level) -> Result<()> {
        let y = Entries { high: &mut self.y, low: &mut [] };
        self.method.invert(level, self.order, &self.a, y, &mut self.work).map(|_| ())
    }
}

/// Of every pair of a query and a key: where among the numbers of a head that of the bias is, and the factor on it.
pub fn bias_entries(bias: &Bias, shape: &Shape) -> (Vec<i64>, Vec<f32>) {
    let pairs = (0..shape.seq_q).flat_map(|i| (0..shape.seq_kv).map(move |j| (i, j)));
    pairs.map(|(i, j)| bias.entry(shape, i, j)).map(|(at, factor)| (at as i64, factor as f32)).unzip()
}

/// The intrinsic dimension of a power law, for `heads` heads of `head_dim` channels.
pub fn intrinsic_dim(score: &Score, head_dim: usize, heads: usize) -> f64 {
    score.as_fna().resolve(head_dim, heads).intrinsic_dim
}

/// The directions of random features, `[count, dim]`.
pub fn feature_directions(seed: u64, count: usize, dim: usize) -> Vec<f64> {
    random_features::directions(seed, count, dim)
}

/// The tokens among `len` that are the `count` random landmarks of every batch element, `[batch, count]`.
pub fn random_landmarks(seed: u64, batch: usize, len: usize, count: usize) -> Vec<usize> {
    (0..batch).flat_map(|b| random::sample(seed, b, len, count)).collect()
}
