//! Innermost loops on their own, for the benches that compare them; no part of the interface.

use crate::{
    Result,
    linalg::{Entries, Method, Order},
    mechanism::{Inverse, InverseGradient},
    score::{Manhattan, Squared},
    simd::{
        Level,
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

/// Writes `out [rows, marks]` from `x [rows, dim]` and `marks [dim, marks]`, tile by tile as a call does; `marks` is a
/// multiple of 16.
pub fn pairs(level: Level, pair: Pair, x: &[f32], marks: &[f32], dim: usize, out: &mut [f32]) {
    let cols = marks.len() / dim;
    for (x, out) in x.chunks(64 * dim).zip(out.chunks_mut(64 * cols)) {
        let size = Size { rows: x.len() / dim, cols, depth: dim };
        let (x, marks) = (Left { data: x, row_stride: dim, depth_stride: 1 }, Right { data: marks, stride: cols });
        let out = Store { data: out, stride: cols };
        let rate = std::f32::consts::LOG2_E;
        match pair {
            Pair::Product => multiply(level, size, x, marks, out),
            Pair::Laplacian => tile::kernel(level, (Manhattan, rate), x, size, marks, out),
            Pair::Gaussian => tile::kernel(level, (Squared, rate), x, size, marks, out),
        }
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
        let method = Method { mechanism: "bench", inverse, steps, init: None, ridge, gradient, cutoff: 0.0 };
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
        self.method.invert(level, self.order, &self.a, y, &mut self.work)
    }
}
