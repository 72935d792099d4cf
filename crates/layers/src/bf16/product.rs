//! Products of whole matrices, block by block. What a block computes does not depend on how many there are: every sum goes along the
//! whole depth in one order, so that neither threads nor blocks change a bit.

use std::{mem::MaybeUninit, ops::Range};

use rayon::prelude::*;
use resolvent_kernels::{
    parallel::Parts,
    simd::{
        Simd, WithSimd,
        bf16::{Left, Multiplier, Output, ROWS, Size, pairs},
    },
};

use super::{
    Bf16Layers,
    operands::{Columns, LeftRows, Memory, PANEL, Panels, SPAN},
};
use crate::rows::area;

/// Rows of a block at most: a multiple of two tiles.
const BLOCK: usize = 512;

/// Rows of a block of so many: even shares for up to four threads, a multiple of two tiles.
pub(super) fn block(rows: usize) -> usize {
    crate::linear::even(rows, BLOCK).next_multiple_of(2 * ROWS)
}

/// `left` times panels, `[rows][stride]`, written or added.
pub(super) struct Multiply<'a> {
    pub tiles: &'a Multiplier,
    pub left: LeftRows<'a>,
    pub right: Panels<'a>,
    pub into: Output<'a>,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Output { data, stride, add } = self.into;
        for (first, width, right) in self.right.each() {
            let size = Size { rows: self.left.rows, cols: width, pairs: self.right.pairs };
            let into = Output { data: &mut data[first..], stride, add };
            self.tiles.multiply(simd, size, self.left.left, right, into);
        }
    }
}

/// Rows of a product, from number `first` of the result on, and the bias of its columns where there is one.
pub(super) struct Rows<'a, 'p> {
    pub tiles: &'a Multiplier,
    pub left: LeftRows<'a>,
    pub right: Panels<'a>,
    pub bias: Option<&'a [f32]>,
    pub out: &'a Parts<'p, MaybeUninit<f32>>,
    pub first: usize,
}

/// Rows of a product and their bias, none where `None`, to rows of the result.
struct Finish<'a, 'p> {
    tile: &'a [f32],
    stride: usize,
    bias: Option<&'a [f32]>,
    out: &'a Parts<'p, MaybeUninit<f32>>,
    /// Where the first row begins in `out`, and how far apart they are.
    at: [usize; 2],
    rows: usize,
    cols: usize,
}

impl WithSimd for Finish<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (row, tile) in self.tile.chunks_exact(self.stride).take(self.rows).enumerate() {
            let from = self.at[0] + row * self.at[1];
            // SAFETY: every task has rows or columns of its own.
            let out = unsafe { self.out.part(from..from + self.cols) };
            match self.bias {
                Some(bias) => {
                    for ((out, x), bias) in out.iter_mut().zip(tile).zip(bias) {
                        out.write(x + bias);
                    }
                }
                None => {
                    for (out, x) in out.iter_mut().zip(tile) {
                        out.write(*x);
                    }
                }
            }
        }
    }
}

impl Bf16Layers {
    /// `x [rows, inputs]` times `right`, with the `bias` of each column where there is one.
    pub(super) fn times(&self, rows: usize, x: &[f32], right: Panels<'_>, bias: Option<&[f32]>) -> Vec<f32> {
        let (inputs, outputs) = (x.len().checked_div(rows).unwrap_or(0), right.cols);
        let len = area(rows, outputs);
        let mut out = Vec::with_capacity(len);
        if len == 0 {
            return out;
        }
        let (block, whole) = (block(rows), &Parts::new(&mut out.spare_capacity_mut()[..len]));
        // Of few rows the columns are shared among the threads.
        let span = if rows < 2 * BLOCK { SPAN } else { outputs.next_multiple_of(SPAN) };
        let tasks: Vec<_> =
            (0..rows).step_by(block).flat_map(|row| (0..outputs).step_by(span).map(move |col| (row, col))).collect();
        tasks.into_par_iter().for_each_init(Default::default, |(packed, sums): &mut (Memory, Memory), (row, col)| {
            let tiles = self.products.enter();
            let (count, depth) = (block.min(rows - row), right.pairs);
            let packed = packed.pairs(count.next_multiple_of(ROWS) * depth);
            Columns::all(&x[row * inputs..], count, inputs).round(&tiles, (&mut *packed, depth));
            let left = LeftRows { rows: count, left: Left::new(packed, depth) };
            let sums = bytemuck::cast_slice_mut(sums.pairs(count.next_multiple_of(ROWS) * SPAN));
            let rows = Rows { tiles: &tiles, left, right, bias, out: whole, first: row };
            self.write_rows(&rows, col..outputs.min(col + span), sums);
        });
        // SAFETY: the tasks have written every column of every row.
        unsafe { out.set_len(len) };
        out
    }

    /// Writes some columns of rows of a product. `tile` holds [`SPAN`] columns of them.
    pub(super) fn write_rows(&self, x: &Rows<'_, '_>, cols: Range<usize>, tile: &mut [f32]) {
        let outputs = x.right.cols;
        for col in cols.step_by(SPAN) {
            let into = Output { data: &mut *tile, stride: SPAN, add: false };
            self.level.dispatch(Multiply { tiles: x.tiles, left: x.left, right: x.right.part(col, SPAN), into });
            self.level.dispatch(Finish {
                tile,
                stride: SPAN,
                bias: x.bias.map(|bias| &bias[col..]),
                out: x.out,
                at: [x.first * outputs + col, outputs],
                rows: x.left.rows,
                cols: SPAN.min(outputs - col),
            });
        }
    }

    /// `x^T dout`, `[inputs, outputs]`, for `x [rows, inputs]` and `dout [rows, outputs]`.
    pub(super) fn weight_gradient(
        &self,
        rows: usize,
        x: &[f32],
        inputs: usize,
        dout: &[f32],
        outputs: usize,
    ) -> Vec<f32> {
        let mut memory = [Memory::default(), Memory::default()];
        let depth = Depth::of(rows);
        let [left, right] = depth.buffers(&mut memory, [inputs, outputs]);
        let parts = depth.chunks(left, inputs).zip(depth.chunks(right, outputs)).enumerate();
        parts.for_each_init(Memory::default, |woven, (index, (left, right))| {
            let tiles = self.products.enter();
            let (first, count) = (index * depth.block, depth.rows(index));
            Columns::all(&x[first * inputs..], count, inputs).transpose(&tiles, woven.pairs(depth.woven()), left);
            Columns::all(&dout[first * outputs..], count, outputs).panels(&tiles, right);
        });
        self.summed(&depth, (left, inputs), (right, outputs))
    }

    /// The sum over the blocks of `left right`, `[left.1, right.1]`.
    pub(super) fn summed(&self, depth: &Depth, left: (&[u32], usize), right: (&[u32], usize)) -> Vec<f32> {
        let ((left, rows), (right, cols)) = (left, right);
        let len = area(rows, cols);
        let mut out = Vec::with_capacity(len);
        if len == 0 || depth.rows == 0 {
            return vec![0.0; len];
        }
        let whole = &Parts::new(&mut out.spare_capacity_mut()[..len]);
        let tile = tile(rows, cols);
        let tasks: Vec<_> =
            (0..rows).step_by(tile[0]).flat_map(|row| (0..cols).step_by(tile[1]).map(move |col| (row, col))).collect();
        tasks.into_par_iter().for_each_init(Memory::default, |sums, (row, col)| {
            let tiles = self.products.enter();
            let count = tile[0].min(rows - row);
            let sums = bytemuck::cast_slice_mut(sums.pairs(count.next_multiple_of(ROWS) * tile[1]));
            for index in 0..depth.blocks() {
                let pairs = pairs(depth.rows(index));
                let left = &left[depth.start(index, rows) + row * pairs..];
                let left = LeftRows { rows: count, left: Left::new(left, pairs) };
                let right = Panels { data: &right[depth.start(index, cols)..], pairs, cols }.part(col, tile[1]);
                let into = Output { data: &mut *sums, stride: tile[1], add: index > 0 };
                self.level.dispatch(Multiply { tiles: &tiles, left, right, into });
            }
            let (at, cols) = ([row * cols + col, cols], tile[1].min(cols - col));
            self.level.dispatch(Finish { tile: sums, stride: tile[1], bias: None, out: whole, at, rows: count, cols });
        });
        // SAFETY: the tasks have written every column of every row.
        unsafe { out.set_len(len) };
        out
    }
}

/// Rows and columns of a task of [`Bf16Layers::summed`]: its sums lie in the second-level cache, and there are some tasks for every
/// thread.
fn tile(rows: usize, cols: usize) -> [usize; 2] {
    let many = rows * cols >= 16 * SPAN * SPAN;
    [SPAN.min(rows.next_multiple_of(ROWS)), if many { 2 * SPAN } else { 2 * PANEL }]
}

/// The blocks of rows over which gradients of weights are summed, and where the operands of each lie, end to end.
#[derive(Clone, Copy)]
pub(super) struct Depth {
    rows: usize,
    pub block: usize,
}

impl Depth {
    pub fn of(rows: usize) -> Self {
        Self { rows, block: block(rows).max(1) }
    }

    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block)
    }

    /// Rows of a block.
    pub fn rows(&self, index: usize) -> usize {
        self.block.min(self.rows - index * self.block)
    }

    /// Pairs that [`Columns::transpose`] weaves.
    pub fn woven(&self) -> usize {
        pairs(self.block) * SPAN
    }

    /// Where the operand of a block begins.
    fn start(&self, index: usize, width: usize) -> usize {
        index * Panels::len(pairs(self.block), width)
    }

    /// Memory for operands of these widths.
    pub fn buffers<'m, const N: usize>(&self, memory: &'m mut [Memory; N], widths: [usize; N]) -> [&'m mut [u32]; N] {
        let len = |width| match self.blocks() {
            0 => 0,
            blocks => self.start(blocks - 1, width) + Panels::len(pairs(self.rows(blocks - 1)), width),
        };
        let mut widths = widths.into_iter();
        memory.each_mut().map(|memory| memory.pairs(widths.next().map_or(0, len)))
    }

    /// The operands of the blocks.
    pub fn chunks<'m>(&self, operand: &'m mut [u32], width: usize) -> rayon::slice::ChunksMut<'m, u32> {
        operand.par_chunks_mut(self.start(1, width).max(1))
    }
}
