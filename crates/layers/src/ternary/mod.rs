//! Linear layers with weights of -1, 0 and 1 times one scale, and activations of eight bits: "Spectral Sparse Attention",
//! appendix C, by the rule of BitNet b1.58. Products are sums of integers.

mod products;

use rayon::prelude::*;
use resolvent_kernels::{
    parallel::{Parts, grain},
    simd::Level,
};

use self::products::{Columns, Tokens};
use crate::{Error, Result};

/// Weights in one byte: `3^5 = 243` fits.
const PER_BYTE: usize = 5;
const POWERS: [u8; PER_BYTE] = [1, 3, 9, 27, 81];
/// Values of a byte.
const BYTES: usize = 243;
/// Rows of a *panel*, whose weights lie together: 16 sums of 32 bits are 512.
const ROWS: usize = 16;
/// Inputs of a *group* of a panel: four bytes of each row.
const GROUP: usize = 4 * PER_BYTE;
/// Scales are at least this (activations': 127 of it), so that a row of zeros has one.
const LEAST: f32 = 1e-5;
/// Tokens of one task: their codes stay in a cache of the second level while all rows of weights pass, and there are enough to
/// make unpacking a row little beside its products.
const TOKENS: usize = 256;
/// Products that are worth a thread: about 50 us, which waking one takes.
const PRODUCTS: usize = 1 << 22;
/// Products of 128 with digits of at most 2, of so many inputs, fit 31 bits.
const MOST_INPUTS: usize = (i32::MAX / 256) as usize;
/// A matrix of these sizes has more weights than any machine holds, and as many can be counted.
const MOST_OUTPUTS: usize = 1 << 24;

/// A matrix `[outputs, inputs]` of weights in {-1, 0, 1} times one scale, five to a byte.
///
/// ```
/// use resolvent_layers::TernaryMatrix;
/// let matrix = TernaryMatrix::quantise(&[0.9, -0.1, 0.0, -1.0], [2, 2])?;
/// assert_eq!((matrix.codes(), matrix.scale()), (vec![1, 0, 0, -1], 0.5));
/// let mut out = [f32::NAN; 2];
/// matrix.forward(&[2.0, 1.0], None, &mut out)?;
/// assert_eq!(out.map(|x| (x * 100.0).round()), [100.0, -50.0]);
/// # Ok::<(), resolvent_layers::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct TernaryMatrix {
    outputs: usize,
    inputs: usize,
    scale: f32,
    /// See [`TernaryMatrix::packed`].
    packed: Vec<u8>,
}

impl TernaryMatrix {
    /// The nearest ternary matrix by the rule of BitNet b1.58: `scale = max(mean |w|, 1e-5)`, codes
    /// `clip(round(w / scale), -1, 1)`, halves rounded to even. `weight [outputs, inputs]`.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::NonFinite`]; [`Error::OutOfRange`] for more inputs than a sum of 32 bits can take.
    pub fn quantise(weight: &[f32], [outputs, inputs]: [usize; 2]) -> Result<Self> {
        check_sizes(outputs, inputs)?;
        length("weight", weight.len(), outputs * inputs)?;
        finite("weight", weight)?;
        let sum: f64 = weight.iter().map(|&w| f64::from(w.abs())).sum();
        let scale = ((sum / weight.len() as f64) as f32).max(LEAST);
        let code = |w: f32| (w / scale).round_ties_even().clamp(-1.0, 1.0) as i8;
        let code_at = |row: usize, input: usize| match row < outputs && input < inputs {
            true => code(weight[row * inputs + input]),
            false => 0,
        };
        let byte = |at: usize| {
            let digits = places([outputs, inputs], at).zip(POWERS);
            digits.map(|((row, input), power)| (code_at(row, input) + 1) as u8 * power).sum::<u8>()
        };
        let packed = (0..packed_len([outputs, inputs])).map(byte).collect();
        Ok(Self { outputs, inputs, scale, packed })
    }

    /// A matrix from its stored form: [`TernaryMatrix::packed`] and [`TernaryMatrix::scale`].
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Index`] for a byte that no five weights have; [`Error::NonFinite`].
    pub fn from_packed(packed: Vec<u8>, [outputs, inputs]: [usize; 2], scale: f32) -> Result<Self> {
        check_sizes(outputs, inputs)?;
        length("packed", packed.len(), packed_len([outputs, inputs]))?;
        finite("scale", &[scale])?;
        if let Some(index) = packed.iter().position(|&byte| usize::from(byte) >= BYTES) {
            return Err(Error::Index { tensor: "packed", index, value: packed[index].into(), limit: BYTES });
        }
        Ok(Self { outputs, inputs, scale, packed })
    }

    /// The weights without their scale, `[outputs, inputs]`.
    pub fn codes(&self) -> Vec<i8> {
        let mut codes = vec![0; self.outputs * self.inputs];
        for (at, &byte) in self.packed.iter().enumerate() {
            for ((row, input), power) in places(self.shape(), at).zip(POWERS) {
                if row < self.outputs && input < self.inputs {
                    codes[row * self.inputs + input] = (byte / power % 3) as i8 - 1;
                }
            }
        }
        codes
    }

    /// The factor of all weights.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The codes, five to a byte: its digits to base 3, lowest first, less 1. Panels of 16 rows follow one another, in each its
    /// groups of 20 inputs, in each four bytes per row; byte `b` of a row holds the inputs `b, b + 4, .. b + 16` of the group.
    /// Weights that fill up the last panel and the last groups are 0.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// `[outputs, inputs]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// Bytes that a matrix of `[outputs, inputs]` takes, with its scale.
    pub fn bytes(shape: [usize; 2]) -> usize {
        packed_len(shape).saturating_add(size_of::<f32>())
    }

    /// `out = x W^T + bias`: `x [tokens, inputs]`, `bias [outputs]`, `out [tokens, outputs]`. Every token is rounded to eight
    /// bits, `a = max(max |x|, 1e-5) / 127`, codes `clip(round(x / a), -128, 127)`; products are summed in 32-bit integers.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::NonFinite`], as no integer stands for such a value; parts of `out` are then written.
    pub fn forward(&self, x: &[f32], bias: Option<&[f32]>, out: &mut [f32]) -> Result<()> {
        Self::forward_all(std::slice::from_ref(self), x, bias, out)
    }

    /// As [`TernaryMatrix::forward`] of several matrices of the same inputs, at least one, whose outputs lie side by side in
    /// `bias` and in the rows of `out`. Tokens are rounded once.
    ///
    /// # Errors
    /// As [`TernaryMatrix::forward`]; [`Error::Length`] for no matrix, or different inputs.
    pub fn forward_all(matrices: &[Self], x: &[f32], bias: Option<&[f32]>, out: &mut [f32]) -> Result<()> {
        let inputs = matrices.first().map_or(0, |matrix| matrix.inputs);
        let width = matrices.iter().map(|matrix| matrix.outputs).sum::<usize>();
        let alike = matrices.iter().filter(|matrix| matrix.inputs == inputs).count();
        length("matrices", alike, matrices.len().max(1))?;
        let tokens = x.len() / inputs;
        length("x", x.len(), tokens * inputs)?;
        length("out", out.len(), tokens * width)?;
        length("bias", bias.map_or(width, <[f32]>::len), width)?;
        let level = Level::selected()?;
        let parts = x.par_chunks(TOKENS * inputs).zip(out.par_chunks_mut(TOKENS * width));
        let written = parts.try_for_each(|(x, out)| {
            let (tokens, out) = (Tokens::round(level, x, inputs)?, Parts::new(out));
            let mut first = 0;
            for matrix in matrices {
                let columns = first..first + matrix.outputs;
                matrix.multiply(level, &tokens, bias.map(|bias| &bias[columns.clone()]), (&out, first, width));
                first = columns.end;
            }
            Some(())
        });
        written.map_or_else(|| finite("x", x), Ok)
    }

    /// Writes the columns from `first` on of `out [tokens, width]`.
    fn multiply(
        &self,
        level: Level,
        tokens: &Tokens,
        bias: Option<&[f32]>,
        (out, first, width): (&Parts<'_, f32>, usize, usize),
    ) {
        let bytes = packed_len([ROWS, self.inputs]);
        let least = PRODUCTS.div_ceil(ROWS * tokens.count() * self.inputs);
        self.packed.par_chunks_exact(bytes).enumerate().with_min_len(grain(least)).for_each(|(panel, packed)| {
            let rows = panel * ROWS..self.outputs.min((panel + 1) * ROWS);
            let mut offsets = [0.0; ROWS];
            offsets.iter_mut().zip(bias.map_or(&[][..], |bias| &bias[rows.clone()])).for_each(|(to, &bias)| *to = bias);
            let columns = first + rows.start..first + rows.end;
            tokens.multiply(level, packed, Columns { out, width, columns, scale: self.scale, offsets });
        });
    }
}

/// Bytes of the packed weights.
fn packed_len([outputs, inputs]: [usize; 2]) -> usize {
    // Saturating: no matrix has as many bytes.
    let rows = outputs.div_ceil(ROWS).saturating_mul(ROWS);
    rows.saturating_mul(inputs.div_ceil(GROUP)).saturating_mul(GROUP / PER_BYTE)
}

/// The rows and inputs whose weights byte `at` holds, some of them perhaps beyond the matrix.
fn places([_, inputs]: [usize; 2], at: usize) -> impl Iterator<Item = (usize, usize)> {
    let bytes = GROUP / PER_BYTE;
    let (group, row, byte) = (at / (ROWS * bytes), at / bytes % ROWS, at % bytes);
    let groups = inputs.div_ceil(GROUP);
    let (panel, group) = (group / groups, group % groups);
    (0..PER_BYTE).map(move |n| (panel * ROWS + row, group * GROUP + n * bytes + byte))
}

fn check_sizes(outputs: usize, inputs: usize) -> Result<()> {
    for (field, got, most) in [("outputs", outputs, MOST_OUTPUTS), ("inputs", inputs, MOST_INPUTS)] {
        if got == 0 || got > most {
            let expected =
                "at least 1; at most 8388607 inputs, as products are summed in 32 bits, and 16777216 outputs";
            return Err(Error::OutOfRange { field, got: got.to_string(), expected });
        }
    }
    Ok(())
}

fn length(tensor: &'static str, got: usize, expected: usize) -> Result<()> {
    let (op, remedy) = ("ternary", "see the shape of the matrix");
    if got == expected { Ok(()) } else { Err(Error::Length { op, tensor, got, expected, remedy }) }
}

fn finite(tensor: &'static str, x: &[f32]) -> Result<()> {
    match x.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(Error::NonFinite { tensor, index, value: x[index].into() }),
        None => Ok(()),
    }
}
