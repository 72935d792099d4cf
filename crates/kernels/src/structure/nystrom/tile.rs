//! Kernels between a tile of tokens and the landmarks, and what is made of them.

use pulp::{Simd, WithSimd};

use crate::{
    score::Metric,
    simd::{
        Level,
        math::exp2,
        product::{Add, Left, Right, Sink, Size, Store, Term, combine, multiply, multiply_add, vectors_mut},
    },
    structure::dense::{Rows, padded},
};

/// A tile of one number per token and landmark: rows of `stride`, which is [`width`].
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub tokens: usize,
    pub landmarks: usize,
}

impl Tile<'_> {
    /// `sums [landmarks, x.stride] += tile^T x`, `x` by token.
    pub fn gather(self, level: Level, x: Rows<'_>, sums: &mut [f32]) {
        let left = Left { data: self.data, row_stride: 1, depth_stride: self.stride };
        let size = Size { rows: self.landmarks, cols: x.stride, depth: self.tokens };
        multiply_add(level, size, left, x.as_right(0..self.tokens), Add { data: sums, stride: x.stride });
    }

    /// `out [tokens, width] = tile x`, `x [landmarks, width]` by landmark.
    pub fn spread(self, level: Level, x: &[f32], width: usize, out: &mut [f32]) {
        let left = Left { data: self.data, row_stride: self.stride, depth_stride: 1 };
        let size = Size { rows: self.tokens, cols: width, depth: self.landmarks };
        multiply(level, size, left, Right { data: x, stride: width }, Store { data: out, stride: width });
    }

    /// Adds up the rows into `sums`.
    pub fn add_columns(self, level: Level, sums: &mut [f32]) {
        for row in self.data.chunks_exact(self.stride).take(self.tokens) {
            zip(level, &mut sums[..row.len()], row, Zip::Add);
        }
    }
}

/// Writes `exp2(-rate distance(x_i, mark_l))` for tokens `x` and the landmarks `landmarks [dim, stride]`, transposed.
pub(crate) fn kernel<D: Metric>(
    level: Level,
    (_, rate): (D, f32),
    x: Left<'_>,
    size: Size,
    landmarks: Right<'_>,
    out: Store<'_>,
) {
    level.dispatch(Kernel { term: D::TERM, rate, x, size, landmarks, out });
}

/// Columns of a tile of `landmarks` landmarks: whole vectors, and never none.
pub(crate) fn width(landmarks: usize) -> usize {
    padded(landmarks.max(1))
}

struct Kernel<'a> {
    term: Term,
    rate: f32,
    x: Left<'a>,
    size: Size,
    landmarks: Right<'a>,
    out: Store<'a>,
}

impl WithSimd for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Store { data, stride } = self.out;
        let mut sink = Decay { rate: simd.splat_f32s(-self.rate), out: data, stride };
        combine(simd, self.term, self.size, self.x, self.landmarks, &mut sink);
    }
}

struct Decay<'a, V> {
    rate: V,
    out: &'a mut [f32],
    stride: usize,
}

impl<S: Simd<f32s = V>, V: Copy> Sink<S> for Decay<'_, V> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        for (m, block) in block.iter().enumerate() {
            let out = vectors_mut::<S, N>(self.out, (row + m) * self.stride + col);
            for n in 0..N {
                out[n] = exp2(simd, simd.mul_f32s(self.rate, block[n]));
            }
        }
    }
}

/// Writes `x [rows, stride]` transposed, `[dim, out_stride]`; zeros beyond the last row.
pub(crate) fn transpose(x: &[f32], stride: usize, dim: usize, out: &mut [f32], out_stride: usize) {
    let rows = x.len() / stride;
    for (c, out) in out.chunks_exact_mut(out_stride).take(dim).enumerate() {
        let (head, pad) = out.split_at_mut(rows);
        head.iter_mut().zip(x[c.min(x.len())..].iter().step_by(stride)).for_each(|(out, &x)| *out = x);
        pad.fill(0.0);
    }
}

/// What [`zip`] does to an element.
#[derive(Clone, Copy)]
pub(crate) enum Zip {
    Add,
    Subtract,
    Multiply,
}

/// `x = x op y`, whole vectors; the row `y` again and again where `x` has several.
pub(crate) fn zip(level: Level, x: &mut [f32], y: &[f32], op: Zip) {
    level.dispatch(Zipped { x, y, op });
}

struct Zipped<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    op: Zip,
}

impl WithSimd for Zipped<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if self.y.is_empty() {
            return;
        }
        let y = S::as_simd_f32s(self.y).0;
        for x in self.x.chunks_exact_mut(self.y.len()) {
            for (x, &y) in S::as_mut_simd_f32s(x).0.iter_mut().zip(y) {
                *x = match self.op {
                    Zip::Add => simd.add_f32s(*x, y),
                    Zip::Subtract => simd.sub_f32s(*x, y),
                    Zip::Multiply => simd.mul_f32s(*x, y),
                };
            }
        }
    }
}

/// Writes rows of `width` back to their positions, zeros to the masked ones; the first row of `out` is token `start`.
pub(crate) fn scatter(rows: &[f32], width: usize, kept: &[u32], start: usize, out: &mut [f32], dim: usize) {
    if kept.len() * dim < out.len() {
        out.fill(0.0);
    }
    for (&i, row) in kept.iter().zip(rows.chunks_exact(width)) {
        out[(i as usize - start) * dim..][..dim].copy_from_slice(&row[..dim]);
    }
}
