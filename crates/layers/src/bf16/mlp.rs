//! The MLP: its hidden layer is rounded, and in the backward pass laid out for both products, while it lies in the cache.

use std::mem::MaybeUninit;

use rayon::prelude::*;
use resolvent_kernels::{
    parallel::Parts,
    simd::{
        Simd, WithSimd,
        bf16::{Left, Multiplier, Output, ROWS, pairs},
    },
};

use super::{
    Bf16Layers,
    operands::{Columns, LeftRows, Memory, Panels, SPAN},
    product::{Depth, Multiply, Rows},
};
use crate::{
    MlpGradients, MlpWeights, Result,
    gelu::{gelu, gelu_backward, value, value_and_derivative},
    linear::column_sums,
    rows::{area, sums},
};

/// Rows from which blocks of them keep the threads busy; fewer go layer by layer.
const LEAST: usize = 1024;

impl Bf16Layers {
    /// [`crate::mlp`] with products of bf16: x, the weights and what the GELU makes of the hidden layer are rounded, the hidden layer
    /// itself is not.
    ///
    /// # Errors
    /// As [`crate::mlp`].
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn mlp(&self, rows: usize, x: &[f32], weights: &MlpWeights<'_>, kept: bool) -> Result<(Vec<f32>, Vec<f32>)> {
        let MlpWeights { weight_in, bias_in, weight_out, bias_out } = *weights;
        let sizes @ [inputs, width, outputs] = sizes(rows, x, weights);
        if rows < LEAST || sizes.contains(&0) {
            let hidden = self.linear(rows, x, weight_in, bias_in);
            let out = self.linear(rows, &gelu(&hidden)?, weight_out, bias_out);
            return Ok((out, if kept { hidden } else { Vec::new() }));
        }
        let mut memory = [Memory::default(), Memory::default()];
        let [first, second] = &mut memory;
        let weight_in = Panels::of(self.products, weight_in, [inputs, width], first);
        let weight_out = Panels::of(self.products, weight_out, [width, outputs], second);
        let held = if kept { rows * width } else { 0 };
        let (mut out, mut hidden) = (Vec::with_capacity(rows * outputs), Vec::with_capacity(held));
        let results = &Parts::new(&mut out.spare_capacity_mut()[..rows * outputs]);
        let all = &Parts::new(&mut hidden.spare_capacity_mut()[..held]);
        let depth = Depth::of(rows);
        (0..depth.blocks()).into_par_iter().for_each_init(Room::default, |room, index| {
            let (tiles, at) = (self.products.enter(), index * depth.block);
            let x = Columns::all(&x[at * inputs..], depth.rows(index), inputs);
            let Block { x, hidden: activated, tiles: [tile, _], .. } = room.of(&tiles, x, width);
            for col in (0..width).step_by(SPAN) {
                let into = Output { data: &mut *tile, stride: SPAN, add: false };
                self.level.dispatch(Multiply { tiles: &tiles, left: x, right: weight_in.part(col, SPAN), into });
                let bias = &bias_in[col..width.min(col + SPAN)];
                let hidden = kept.then_some((all, [at * width + col, width]));
                self.level.dispatch(Activate { tile: &mut *tile, bias, hidden, rows: x.rows });
                let part = Columns { data: tile, stride: SPAN, rows: x.rows, cols: bias.len() };
                part.round(&tiles, (&mut activated[col / 2..], weight_out.pairs));
            }
            let left = LeftRows { rows: x.rows, left: Left::new(activated, weight_out.pairs) };
            let rows = Rows { tiles: &tiles, left, right: weight_out, bias: Some(bias_out), out: results, first: at };
            self.write_rows(&rows, 0..outputs, tile);
        });
        // SAFETY: the tasks have written all of their rows.
        unsafe {
            out.set_len(rows * outputs);
            hidden.set_len(held);
        }
        Ok((out, hidden))
    }

    /// [`crate::mlp_backward`] with products of bf16: x, dout, the weights, what the GELU makes of the hidden layer and its gradient
    /// are rounded. Gradients of biases are sums in f32.
    ///
    /// # Errors
    /// As [`crate::mlp_backward`].
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn mlp_backward(
        &self,
        rows: usize,
        x: &[f32],
        hidden: &[f32],
        weights: &MlpWeights<'_>,
        dout: &[f32],
    ) -> Result<MlpGradients> {
        let sizes @ [inputs, width, outputs] = sizes(rows, x, weights);
        assert!(hidden.len() == area(rows, width), "mlp_backward: hidden must be [rows, hidden]");
        assert!(dout.len() == area(rows, outputs), "mlp_backward: dout must be [rows, outputs]");
        if rows < LEAST || sizes.contains(&0) {
            return self.by_layers(rows, x, hidden, weights, dout);
        }
        let mut memory: [Memory; 6] = Default::default();
        let [first, second, operands @ ..] = &mut memory;
        let weight_out = Panels::of_transposed(self.products, weights.weight_out, [outputs, width], first);
        let weight_in = Panels::of_transposed(self.products, weights.weight_in, [width, inputs], second);
        let depth = Depth::of(rows);
        let [x_columns, activated, dhidden, dout_panels] = depth.buffers(operands, [inputs, width, width, outputs]);
        let mut dx = Vec::with_capacity(rows * inputs);
        let results = &Parts::new(&mut dx.spare_capacity_mut()[..rows * inputs]);
        let pass = Pass { layers: self, weights: [weight_out, weight_in], results };
        let parts = (depth.chunks(x_columns, inputs).zip(depth.chunks(activated, width)))
            .zip(depth.chunks(dhidden, width).zip(depth.chunks(dout_panels, outputs)));
        let dbias_in: Vec<_> = parts
            .enumerate()
            .map_init(Room::default, |room, (index, ((x_columns, activated), (dhidden, dout_panels)))| {
                let (at, count) = (index * depth.block, depth.rows(index));
                let [x, hidden, dout] = [(x, inputs), (hidden, width), (dout, outputs)]
                    .map(|(all, width)| Columns::all(&all[at * width..][..count * width], count, width));
                let tiles = self.products.enter();
                x.transpose(&tiles, room.woven.pairs(depth.woven()), x_columns);
                dout.panels(&tiles, dout_panels);
                pass.block(&tiles, room.of(&tiles, dout, width), at, hidden, [activated, dhidden])
            })
            .collect();
        // SAFETY: the tasks have written all of their rows.
        unsafe { dx.set_len(rows * inputs) };
        let (dweight_in, dweight_out) = rayon::join(
            || self.summed(&depth, (x_columns, inputs), (dhidden, width)),
            || self.summed(&depth, (activated, width), (dout_panels, outputs)),
        );
        let (dbias_in, dbias_out) = (sums(&dbias_in, width), column_sums(dout, outputs));
        Ok(MlpGradients { dx, dweight_in, dbias_in, dweight_out, dbias_out })
    }

    /// The gradients, one layer after the other.
    fn by_layers(
        &self,
        rows: usize,
        x: &[f32],
        hidden: &[f32],
        weights: &MlpWeights<'_>,
        dout: &[f32],
    ) -> Result<MlpGradients> {
        let (width, outputs) = (weights.bias_in.len(), weights.bias_out.len());
        let outer = self.linear_backward(rows, &gelu(hidden)?, weights.weight_out, dout, outputs, [true; 3]);
        let dhidden = gelu_backward(hidden, &outer.dx.unwrap_or_default())?;
        let inner = self.linear_backward(rows, x, weights.weight_in, &dhidden, width, [true; 3]);
        let [dx, dweight_in, dbias_in, dweight_out, dbias_out] =
            [inner.dx, inner.dweight, inner.dbias, outer.dweight, outer.dbias].map(Option::unwrap_or_default);
        Ok(MlpGradients { dx, dweight_in, dbias_in, dweight_out, dbias_out })
    }
}

/// Inputs, hidden channels and outputs.
fn sizes(rows: usize, x: &[f32], weights: &MlpWeights<'_>) -> [usize; 3] {
    let (hidden, outputs) = (weights.bias_in.len(), weights.bias_out.len());
    let inputs = crate::linear::inputs(rows, x, weights.weight_in, hidden);
    assert!(weights.weight_out.len() == area(hidden, outputs), "mlp: weight_out must be [hidden, outputs]");
    [inputs, hidden, outputs]
}

/// Working memory of a thread.
#[derive(Default)]
struct Room {
    left: Memory,
    hidden: Memory,
    tiles: [Memory; 2],
    woven: Memory,
}

/// A block's tensor as a left operand, memory for its hidden layer as one, and two tiles of [`SPAN`] columns.
struct Block<'r> {
    x: LeftRows<'r>,
    hidden: &'r mut [u32],
    tiles: [&'r mut [f32]; 2],
    woven: &'r mut [u32],
}

impl Room {
    fn of(&mut self, tiles: &Multiplier, x: Columns<'_>, width: usize) -> Block<'_> {
        let (all, depth) = (x.rows.next_multiple_of(ROWS), pairs(x.cols));
        let left = self.left.pairs(all * depth);
        x.round(tiles, (&mut *left, depth));
        let [first, second] = &mut self.tiles;
        Block {
            x: LeftRows { rows: x.rows, left: Left::new(left, depth) },
            hidden: self.hidden.pairs(all * pairs(width)),
            tiles: [first, second].map(|tile| bytemuck::cast_slice_mut(tile.pairs(all * SPAN))),
            woven: self.woven.pairs(pairs(x.rows) * SPAN),
        }
    }
}

/// The backward pass of one block after the other.
struct Pass<'a, 'p> {
    layers: &'a Bf16Layers,
    /// The transposed weights, outer and inner.
    weights: [Panels<'a>; 2],
    /// The gradient of x.
    results: &'a Parts<'p, MaybeUninit<f32>>,
}

impl Pass<'_, '_> {
    /// Writes the gradients of the rows from `at` on, and what the GELU made of their hidden layer, transposed, and its gradient as
    /// operands; returns the sums of that gradient.
    fn block(
        &self,
        tiles: &Multiplier,
        block: Block<'_>,
        at: usize,
        hidden: Columns<'_>,
        [activated, dhidden]: [&mut [u32]; 2],
    ) -> Vec<f32> {
        let [weight_out, weight_in] = self.weights;
        let Block { x: dout, hidden: rounded, tiles: [slopes, values], woven } = block;
        let (depth, mut dbias) = (pairs(hidden.rows), vec![0.0; hidden.cols]);
        for col in (0..hidden.cols).step_by(SPAN) {
            let into = Output { data: &mut *slopes, stride: SPAN, add: false };
            self.layers.level.dispatch(Multiply { tiles, left: dout, right: weight_out.part(col, SPAN), into });
            let hidden = hidden.part(col, SPAN);
            let dbias = &mut dbias[col..col + hidden.cols];
            self.layers.level.dispatch(Through { hidden, values: &mut *values, slopes: &mut *slopes, dbias });
            let [values, slopes] = [&*values, &*slopes].map(|data| Columns { data, stride: SPAN, ..hidden });
            values.transpose(tiles, woven, &mut activated[col * depth..]);
            slopes.panels(tiles, &mut dhidden[col * depth..]);
            slopes.round(tiles, (&mut rounded[col / 2..], weight_in.pairs));
        }
        let left = LeftRows { rows: hidden.rows, left: Left::new(rounded, weight_in.pairs) };
        let rows = Rows { tiles, left, right: weight_in, bias: None, out: self.results, first: at };
        self.layers.write_rows(&rows, 0..weight_in.cols, slopes);
        dbias
    }
}

/// Adds the bias to a tile of the hidden layer, stores it where it is to be kept, and applies the GELU.
struct Activate<'a, 'p> {
    tile: &'a mut [f32],
    bias: &'a [f32],
    /// Where the first row begins, and how far apart they are.
    hidden: Option<(&'a Parts<'p, MaybeUninit<f32>>, [usize; 2])>,
    rows: usize,
}

impl WithSimd for Activate<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.bias.len();
        for (row, tile) in self.tile.chunks_exact_mut(SPAN).take(self.rows).enumerate() {
            let tile = &mut tile[..width];
            for (x, bias) in tile.iter_mut().zip(self.bias) {
                *x += bias;
            }
            if let Some((hidden, [at, stride])) = self.hidden {
                // SAFETY: every task has rows of its own.
                let hidden = unsafe { hidden.part(at + row * stride..at + row * stride + width) };
                for (hidden, x) in hidden.iter_mut().zip(&*tile) {
                    hidden.write(*x);
                }
            }
            let (vectors, tail) = S::as_mut_simd_f32s(tile);
            for x in vectors {
                *x = value(simd, *x);
            }
            let last = value(simd, simd.partial_load_f32s(tail));
            simd.partial_store_f32s(tail, last);
        }
    }
}

/// Writes what the GELU made of a tile of the hidden layer, and passes the gradient of that back through it, with its sum over rows.
struct Through<'a> {
    hidden: Columns<'a>,
    values: &'a mut [f32],
    slopes: &'a mut [f32],
    dbias: &'a mut [f32],
}

impl WithSimd for Through<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Columns { data, stride, rows, cols } = self.hidden;
        let (dbias, dbias_tail) = S::as_mut_simd_f32s(self.dbias);
        let tiles = self.values.chunks_exact_mut(SPAN).zip(self.slopes.chunks_exact_mut(SPAN));
        for (hidden, (values, slopes)) in data.chunks(stride).take(rows).zip(tiles) {
            let (hidden, hidden_tail) = S::as_simd_f32s(&hidden[..cols]);
            let (values, values_tail) = S::as_mut_simd_f32s(&mut values[..cols]);
            let (slopes, slopes_tail) = S::as_mut_simd_f32s(&mut slopes[..cols]);
            for (((hidden, value), slope), dbias) in hidden.iter().zip(values).zip(slopes).zip(&mut *dbias) {
                let (activated, derivative) = value_and_derivative(simd, *hidden);
                *value = activated;
                *slope = simd.mul_f32s(*slope, derivative);
                *dbias = simd.add_f32s(*dbias, *slope);
            }
            let (activated, derivative) = value_and_derivative(simd, simd.partial_load_f32s(hidden_tail));
            let slope = simd.mul_f32s(simd.partial_load_f32s(slopes_tail), derivative);
            simd.partial_store_f32s(values_tail, activated);
            simd.partial_store_f32s(slopes_tail, slope);
            let sum = simd.add_f32s(simd.partial_load_f32s(dbias_tail), slope);
            simd.partial_store_f32s(dbias_tail, sum);
        }
    }
}
