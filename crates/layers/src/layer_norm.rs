//! The layer norm ("Layer Normalization"): rows of mean 0 and variance 1, times a gain, plus a bias.

use resolvent_kernels::simd::{Level, Simd, WithSimd};

use crate::{
    Result,
    rows::{sums, written},
};

/// Rows of a task: they stay in the cache from their mean to their result.
const ROWS: usize = 16;

/// The gradients of [`layer_norm`].
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNormGradients {
    /// `[rows, width]`.
    pub dx: Vec<f32>,
    /// `[width]`.
    pub dgain: Vec<f32>,
    /// `[width]`.
    pub dbias: Vec<f32>,
}

/// `y = gain (x - mean) / sqrt(variance + epsilon) + bias` for every row of `x [rows, width]`; `gain` and `bias` are `[width]`.
///
/// ```
/// let y = resolvent_layers::layer_norm(&[1.0, 3.0, 5.0, 5.0], &[1.0, 2.0], &[0.0, 1.0], 0.0)?;
/// assert_eq!(y[..2], [-1.0, 3.0]);
/// # Ok::<(), resolvent_layers::Error>(())
/// ```
///
/// # Errors
/// As [`Level::selected`].
///
/// # Panics
/// If the lengths do not fit.
pub fn layer_norm(x: &[f32], gain: &[f32], bias: &[f32], epsilon: f32) -> Result<Vec<f32>> {
    let width = width(x, gain);
    assert_eq!(bias.len(), width, "layer_norm: gain and bias differ in length");
    let level = Level::selected()?;
    let part = ROWS * width;
    let rows = |index: usize, out: &mut [f32]| {
        let x = &x[index * part..][..out.len()];
        level.dispatch(Forward { x, gain, bias, epsilon, out });
    };
    Ok(written(x.len(), part, bias, rows).0)
}

/// The gradients of [`layer_norm`] for `dout [rows, width]`.
///
/// # Errors
/// As [`Level::selected`].
///
/// # Panics
/// If the lengths do not fit.
pub fn layer_norm_backward(x: &[f32], gain: &[f32], dout: &[f32], epsilon: f32) -> Result<LayerNormGradients> {
    let width = width(x, gain);
    assert_eq!(dout.len(), x.len(), "layer_norm_backward: x and dout differ in length");
    let level = Level::selected()?;
    let part = ROWS * width;
    let rows = |index: usize, dx: &mut [f32]| {
        let [x, dout] = [x, dout].map(|all| &all[index * part..][..dx.len()]);
        let (mut dgain, mut dbias) = (vec![0.0; width], vec![0.0; width]);
        level.dispatch(Backward { x, gain, dout, epsilon, dx, dgain: &mut dgain, dbias: &mut dbias });
        (dgain, dbias)
    };
    let (dx, partial) = written(x.len(), part, gain, rows);
    let (dgain, dbias): (Vec<_>, Vec<_>) = partial.into_iter().unzip();
    Ok(LayerNormGradients { dx, dgain: sums(&dgain, width), dbias: sums(&dbias, width) })
}

fn width(x: &[f32], gain: &[f32]) -> usize {
    let whole = x.is_empty() || (!gain.is_empty() && x.len().is_multiple_of(gain.len()));
    assert!(whole, "layer_norm: x must be [rows, width] for a gain of [width]");
    gain.len()
}

/// Writes `x - mean` to `out` and returns `1 / sqrt(variance + epsilon)`.
#[inline(always)]
fn centre<S: Simd>(simd: S, x: &[f32], epsilon: f32, out: &mut [f32]) -> S::f32s {
    let share = 1.0 / x.len() as f32;
    let ((x, x_tail), (out, out_tail)) = (S::as_simd_f32s(x), S::as_mut_simd_f32s(out));
    let mut sum = simd.partial_load_f32s(x_tail);
    for x in x {
        sum = simd.add_f32s(sum, *x);
    }
    let mean = simd.splat_f32s(simd.reduce_sum_f32s(sum) * share);
    // What is read back has zeros where the row has ended.
    simd.partial_store_f32s(out_tail, simd.sub_f32s(simd.partial_load_f32s(x_tail), mean));
    let last = simd.partial_load_f32s(out_tail);
    let mut squares = simd.mul_f32s(last, last);
    for (out, x) in out.iter_mut().zip(x) {
        *out = simd.sub_f32s(*x, mean);
        squares = simd.mul_add_e_f32s(*out, *out, squares);
    }
    simd.splat_f32s(1.0 / (simd.reduce_sum_f32s(squares) * share + epsilon).sqrt())
}

struct Forward<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    bias: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, gain, bias, epsilon, out } = self;
        let width = gain.len();
        let ((gain, gain_tail), (bias, bias_tail)) = (S::as_simd_f32s(gain), S::as_simd_f32s(bias));
        let (last_gain, last_bias) = (simd.partial_load_f32s(gain_tail), simd.partial_load_f32s(bias_tail));
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let inverse = centre(simd, x, epsilon, out);
            let (out, tail) = S::as_mut_simd_f32s(out);
            for ((out, gain), bias) in out.iter_mut().zip(gain).zip(bias) {
                *out = simd.mul_add_e_f32s(simd.mul_f32s(*out, inverse), *gain, *bias);
            }
            let last = simd.mul_f32s(simd.partial_load_f32s(tail), inverse);
            simd.partial_store_f32s(tail, simd.mul_add_e_f32s(last, last_gain, last_bias));
        }
    }
}

struct Backward<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    dout: &'a [f32],
    epsilon: f32,
    dx: &'a mut [f32],
    dgain: &'a mut [f32],
    dbias: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, gain, dout, epsilon, dx, dgain, dbias } = self;
        let width = gain.len();
        for ((x, dout), dx) in x.chunks_exact(width).zip(dout.chunks_exact(width)).zip(dx.chunks_exact_mut(width)) {
            let inverse = centre(simd, x, epsilon, dx);
            row_backward(simd, inverse, gain, dout, dx, [&mut *dgain, &mut *dbias]);
        }
    }
}

/// With `n = (x - mean) / deviation` and `g = gain dout`: `dx = (g - mean(g) - n mean(g n)) / deviation`, written over
/// `x - mean`; `dgain += n dout`, `dbias += dout`.
#[inline(always)]
fn row_backward<S: Simd>(
    simd: S,
    inverse: S::f32s,
    gain: &[f32],
    dout: &[f32],
    dx: &mut [f32],
    [dgain, dbias]: [&mut [f32]; 2],
) {
    let share = 1.0 / gain.len() as f32;
    let ((gain, gain_tail), (dout, dout_tail)) = (S::as_simd_f32s(gain), S::as_simd_f32s(dout));
    let ((dgain, dgain_tail), (dbias, dbias_tail)) = (S::as_mut_simd_f32s(dgain), S::as_mut_simd_f32s(dbias));
    let (dx, dx_tail) = S::as_mut_simd_f32s(dx);
    let [last_gain, last_dout] = [simd.partial_load_f32s(gain_tail), simd.partial_load_f32s(dout_tail)];
    let last_n = simd.mul_f32s(simd.partial_load_f32s(dx_tail), inverse);
    let mut sum = simd.mul_f32s(last_gain, last_dout);
    let mut moment = simd.mul_f32s(sum, last_n);
    for (((gain, dout), n), (dgain, dbias)) in gain.iter().zip(dout).zip(dx.iter_mut()).zip(dgain.iter_mut().zip(dbias))
    {
        *n = simd.mul_f32s(*n, inverse);
        let g = simd.mul_f32s(*gain, *dout);
        sum = simd.add_f32s(sum, g);
        moment = simd.mul_add_e_f32s(g, *n, moment);
        *dgain = simd.mul_add_e_f32s(*n, *dout, *dgain);
        *dbias = simd.add_f32s(*dbias, *dout);
    }
    let of_tail = simd.mul_add_e_f32s(last_n, last_dout, simd.partial_load_f32s(dgain_tail));
    simd.partial_store_f32s(dgain_tail, of_tail);
    simd.partial_store_f32s(dbias_tail, simd.add_f32s(last_dout, simd.partial_load_f32s(dbias_tail)));
    let mean = simd.splat_f32s(simd.reduce_sum_f32s(sum) * share);
    let slope = simd.splat_f32s(simd.reduce_sum_f32s(moment) * share);
    for ((gain, dout), dx) in gain.iter().zip(dout).zip(dx) {
        *dx = of_norm(simd, simd.mul_f32s(*gain, *dout), *dx, [mean, slope, inverse]);
    }
    let last = of_norm(simd, simd.mul_f32s(last_gain, last_dout), last_n, [mean, slope, inverse]);
    simd.partial_store_f32s(dx_tail, last);
}

/// `(g - mean - n slope) inverse`.
#[inline(always)]
fn of_norm<S: Simd>(simd: S, g: S::f32s, n: S::f32s, [mean, slope, inverse]: [S::f32s; 3]) -> S::f32s {
    simd.mul_f32s(simd.sub_f32s(simd.sub_f32s(g, mean), simd.mul_f32s(n, slope)), inverse)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value, and gradients of x, gain and bias, of one row in f64.
    fn reference(x: &[f32], gain: &[f32], bias: &[f32], dout: &[f32], epsilon: f64) -> [Vec<f64>; 4] {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let [x, gain, bias, dout] = [x, gain, bias, dout].map(wide);
        let mean_of = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        let mean = mean_of(&x);
        let deviation = (mean_of(&x.iter().map(|x| (x - mean).powi(2)).collect::<Vec<_>>()) + epsilon).sqrt();
        let n: Vec<f64> = x.iter().map(|x| (x - mean) / deviation).collect();
        let times = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).collect::<Vec<_>>();
        let g = times(&gain, &dout);
        let (of_g, slope) = (mean_of(&g), mean_of(&times(&g, &n)));
        let dx = g.iter().zip(&n).map(|(g, n)| (g - of_g - n * slope) / deviation).collect();
        [times(&gain, &n).iter().zip(&bias).map(|(y, b)| y + b).collect(), dx, times(&n, &dout), dout]
    }

    #[test]
    fn values_and_gradients_are_the_definition_s() {
        let numbers = |len: usize, seed: f32| (0..len).map(|i| ((i as f32 + seed) * 0.7311).sin()).collect::<Vec<_>>();
        for width in [1, 3, 16, 17, 48, 192] {
            for rows in [1, 5, ROWS + 3] {
                let (x, dout) = (numbers(rows * width, 0.1), numbers(rows * width, 0.7));
                let x: Vec<f32> = x.iter().map(|x| 3.0 + 2.0 * x).collect();
                let (gain, bias) = (numbers(width, 0.2), numbers(width, 0.4));
                let y = layer_norm(&x, &gain, &bias, 1e-5).unwrap();
                let LayerNormGradients { dx, dgain, dbias } = layer_norm_backward(&x, &gain, &dout, 1e-5).unwrap();
                let (mut wide_gain, mut wide_bias) = (vec![0.0; width], vec![0.0; width]);
                let close = |got: f32, expected: f64, of: &str| {
                    let far = (f64::from(got) - expected).abs();
                    assert!(far <= 2e-5 * (1.0 + expected.abs()), "{of} of {rows} x {width}: {got}, not {expected}");
                };
                for row in 0..rows {
                    let of = |all: &[f32]| all[row * width..][..width].to_vec();
                    let [value, slope, to_gain, to_bias] = reference(&of(&x), &gain, &bias, &of(&dout), 1e-5);
                    of(&y).iter().zip(value).for_each(|(got, expected)| close(*got, expected, "y"));
                    // A row of one element has no variance: its gradient is a difference of equals over sqrt(epsilon).
                    let scale = if width == 1 { 1e-2 } else { 1.0 };
                    of(&dx)
                        .iter()
                        .zip(slope)
                        .for_each(|(got, expected)| close(got * scale, expected * f64::from(scale), "dx"));
                    wide_gain.iter_mut().zip(to_gain).for_each(|(sum, x)| *sum += x);
                    wide_bias.iter_mut().zip(to_bias).for_each(|(sum, x)| *sum += x);
                }
                dgain.iter().zip(wide_gain).for_each(|(got, expected)| close(*got, expected, "dgain"));
                dbias.iter().zip(wide_bias).for_each(|(got, expected)| close(*got, expected, "dbias"));
            }
        }
    }
}
