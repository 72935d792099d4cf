//! Linear layers with weights of -1, 0 and 1 times one scale, and activations of eight bits: "Spectral Sparse Attention",
//! appendix C, by the rule of BitNet b1.58. Products are sums of integers.

mod products;

use rayon::prelude::*;

use self::products::Tokens;
use crate::{
    Error, Result,
    parallel::{Parts, grain},
    simd::Level,
};

/// Weights in one byte: `3^5 = 243` fits.
const PER_BYTE: usize = 5;
const POWERS: [u8; PER_BYTE] = [1, 3, 9, 27, 81];
/// Scales are at least this (activations': 127 of it), so that a row of zeros has one.
const LEAST: f32 = 1e-5;
/// Tokens of one task: their codes stay in a cache of the first or second level while all rows of weights pass.
const TOKENS: usize = 32;
/// Products that are worth a thread: about 50 us, which waking one takes.
const PRODUCTS: usize = 1 << 20;
/// Rows whose sums are held at once, which a cache of the first level does.
const HELD: usize = 64;
/// Products of 128 with digits of at most 2, of so many inputs, fit 31 bits.
const MOST_INPUTS: usize = (i32::MAX / 256) as usize;

/// The weights of every byte.
static WEIGHTS: [[i8; PER_BYTE]; 243] = weights();

const fn weights() -> [[i8; PER_BYTE]; 243] {
    let mut all = [[0; PER_BYTE]; 243];
    let mut byte = 0;
    while byte < 243 {
        let mut n = 0;
        while n < PER_BYTE {
            all[byte][n] = (byte as u8 / POWERS[n] % 3) as i8 - 1;
            n += 1;
        }
        byte += 1;
    }
    all
}

/// A matrix `[outputs, inputs]` of weights in {-1, 0, 1} times one scale, five to a byte.
///
/// ```
/// use resolvent_kernels::TernaryMatrix;
/// let matrix = TernaryMatrix::quantise(&[0.9, -0.1, 0.0, -1.0], [2, 2])?;
/// assert_eq!((matrix.codes(), matrix.scale()), (vec![1, 0, 0, -1], 0.5));
/// let mut out = [f32::NAN; 2];
/// matrix.forward(&[2.0, 1.0], None, &mut out)?;
/// assert_eq!(out.map(|x| (x * 100.0).round()), [100.0, -50.0]);
/// # Ok::<(), resolvent_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct TernaryMatrix {
    outputs: usize,
    inputs: usize,
    scale: f32,
    /// Every row starts with a byte of its own; weights that fill its last byte up are 0.
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
        let code = |w: &f32| (w / scale).round_ties_even().clamp(-1.0, 1.0) as i8;
        let byte = |weights: &[f32]| {
            let digits = POWERS.iter().enumerate();
            digits.map(|(n, power)| (weights.get(n).map_or(0, code) + 1) as u8 * power).sum::<u8>()
        };
        let packed = weight.chunks_exact(inputs).flat_map(|row| row.chunks(PER_BYTE).map(byte)).collect();
        Ok(Self { outputs, inputs, scale, packed })
    }

    /// A matrix from its stored form: [`TernaryMatrix::packed`] and [`TernaryMatrix::scale`].
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Index`] for a byte that no five weights have; [`Error::NonFinite`].
    pub fn from_packed(packed: Vec<u8>, [outputs, inputs]: [usize; 2], scale: f32) -> Result<Self> {
        check_sizes(outputs, inputs)?;
        length("packed", packed.len(), outputs * inputs.div_ceil(PER_BYTE))?;
        finite("scale", &[scale])?;
        let limit = WEIGHTS.len();
        if let Some(index) = packed.iter().position(|&byte| usize::from(byte) >= limit) {
            return Err(Error::Index { tensor: "packed", index, value: packed[index].into(), limit });
        }
        Ok(Self { outputs, inputs, scale, packed })
    }

    /// The weights without their scale, `[outputs, inputs]`.
    pub fn codes(&self) -> Vec<i8> {
        let mut codes = vec![0; self.outputs * self.inputs];
        codes.chunks_exact_mut(self.inputs).enumerate().for_each(|(o, row)| self.unpack(o, row));
        codes
    }

    /// The factor of all weights.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The codes, five to a byte, every row from a byte of its own: the digits of the byte to base 3, lowest first, less 1.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// `[outputs, inputs]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// Bytes that a matrix of `[outputs, inputs]` takes, with its scale.
    pub fn bytes([outputs, inputs]: [usize; 2]) -> usize {
        outputs * inputs.div_ceil(PER_BYTE) + size_of::<f32>()
    }

    /// `out = x W^T + bias`: `x [tokens, inputs]`, `bias [outputs]`, `out [tokens, outputs]`. Every token is rounded to eight
    /// bits, `a = max(max |x|, 1e-5) / 127`, codes `clip(round(x / a), -128, 127)`; products are summed in 32-bit integers.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::NonFinite`], as no integer stands for such a value.
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
        finite("x", x)?;
        let level = Level::selected()?;
        x.par_chunks(TOKENS * inputs).zip(out.par_chunks_mut(TOKENS * width)).for_each(|(x, out)| {
            let (tokens, out) = (Tokens::round(level, x, inputs), Parts::new(out));
            let mut first = 0;
            for matrix in matrices {
                let columns = first..first + matrix.outputs;
                matrix.multiply(level, &tokens, bias.map(|bias| &bias[columns.clone()]), (&out, first, width));
                first = columns.end;
            }
        });
        Ok(())
    }

    /// Writes the columns from `first` on of `out [tokens, width]`.
    fn multiply(
        &self,
        level: Level,
        tokens: &Tokens,
        bias: Option<&[f32]>,
        (out, first, width): (&Parts<'_, f32>, usize, usize),
    ) {
        let (bytes, count) = (self.row_bytes(), tokens.count());
        let rows = grain(PRODUCTS.div_ceil(count * self.inputs)).min(self.outputs);
        self.packed.par_chunks(rows * bytes).enumerate().for_each(|(task, packed)| {
            let mut sums = vec![0; HELD.min(rows) * count];
            for (n, packed) in packed.chunks(HELD * bytes).enumerate() {
                let (start, len) = (task * rows + n * HELD, packed.len() / bytes);
                let sums = &mut sums[..len * count];
                tokens.multiply(level, packed, sums);
                for (t, (scale, total)) in tokens.scales.iter().zip(&tokens.totals).enumerate() {
                    let place = t * width + first + start;
                    // SAFETY: a token's columns are each of one matrix, and its rows each of one task.
                    let out = unsafe { out.part(place..place + len) };
                    let factor = scale * self.scale;
                    for (o, (out, sums)) in out.iter_mut().zip(sums.chunks_exact(count)).enumerate() {
                        *out = factor * (sums[t] - total) as f32 + bias.map_or(0.0, |bias| bias[start + o]);
                    }
                }
            }
        });
    }

    fn row_bytes(&self) -> usize {
        self.inputs.div_ceil(PER_BYTE)
    }

    /// Writes the codes of one row.
    fn unpack(&self, o: usize, row: &mut [i8]) {
        for (codes, &byte) in row.chunks_mut(PER_BYTE).zip(&self.packed[o * self.row_bytes()..]) {
            codes.copy_from_slice(&WEIGHTS[usize::from(byte)][..codes.len()]);
        }
    }
}

fn check_sizes(outputs: usize, inputs: usize) -> Result<()> {
    for (field, got, most) in [("outputs", outputs, usize::MAX), ("inputs", inputs, MOST_INPUTS)] {
        if got == 0 || got > most {
            let expected = "at least 1, and at most 8388607 inputs, as products are summed in 32 bits";
            return Err(Error::OutOfRange { field, got: got.to_string(), expected });
        }
    }
    Ok(())
}

fn length(tensor: &'static str, got: usize, expected: usize) -> Result<()> {
    crate::check::length("ternary", tensor, got, expected, "see the shape of the matrix")
}

fn finite(tensor: &'static str, x: &[f32]) -> Result<()> {
    match x.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(Error::NonFinite { tensor, index, value: x[index].into() }),
        None => Ok(()),
    }
}
