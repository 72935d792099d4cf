//! The MLP of a transformer block, block by block of tokens: its hidden layer, the widest of the block's tensors, is worked on
//! while it lies in the cache.

use std::mem::MaybeUninit;

use faer::MatRef;
use rayon::prelude::*;
use resolvent_kernels::simd::{Level, Simd, WithSimd};

use crate::{
    Result,
    gelu::{gelu, gelu_backward, value, value_and_derivative},
    linear::{ROWS, add_product, block, linear, linear_backward, product},
    rows::area,
};

/// The most parts that sums over the tokens are taken in, and the fewest that keep the threads busy without a product being
/// shared among them.
const GROUPS: [usize; 2] = [16, 8];

/// Weights and biases of an MLP.
#[derive(Debug, Clone, Copy)]
pub struct MlpWeights<'a> {
    /// `[inputs, hidden]`.
    pub weight_in: &'a [f32],
    /// `[hidden]`.
    pub bias_in: &'a [f32],
    /// `[hidden, outputs]`.
    pub weight_out: &'a [f32],
    /// `[outputs]`.
    pub bias_out: &'a [f32],
}

/// The gradients of [`mlp`].
#[derive(Debug, Clone, PartialEq)]
pub struct MlpGradients {
    /// `[rows, inputs]`.
    pub dx: Vec<f32>,
    /// `[inputs, hidden]`.
    pub dweight_in: Vec<f32>,
    /// `[hidden]`.
    pub dbias_in: Vec<f32>,
    /// `[hidden, outputs]`.
    pub dweight_out: Vec<f32>,
    /// `[outputs]`.
    pub dbias_out: Vec<f32>,
}

/// `gelu(x W + b) W' + b'`, `[rows, outputs]`, for `x [rows, inputs]`, with the exact [`gelu`]; and the hidden layer before it,
/// `x W + b` `[rows, hidden]`, which the gradients need. Where it is not to be `kept` it is never whole, and empty.
///
/// ```
/// use resolvent_layers::{MlpWeights, mlp};
///
/// let weights = MlpWeights { weight_in: &[1.0, 0.0], bias_in: &[0.0, 1.0], weight_out: &[1.0, 10.0], bias_out: &[0.5] };
/// let (y, hidden) = mlp(1, &[-30.0], &weights, true)?;
/// assert!((y[0] - 0.5 - 8.413_447).abs() < 1e-5 && hidden == [-30.0, 1.0]);
/// # Ok::<(), resolvent_layers::Error>(())
/// ```
///
/// # Errors
/// As [`Level::selected`].
///
/// # Panics
/// If the lengths do not fit.
pub fn mlp(rows: usize, x: &[f32], weights: &MlpWeights<'_>, kept: bool) -> Result<(Vec<f32>, Vec<f32>)> {
    let MlpWeights { weight_in, bias_in, weight_out, bias_out } = *weights;
    let Some(sizes) = Sizes::of(rows, x, weights) else {
        let hidden = linear(rows, x, weight_in, bias_in);
        let out = linear(rows, &gelu(&hidden)?, weight_out, bias_out);
        return Ok((out, if kept { hidden } else { Vec::new() }));
    };
    let (level, Sizes { block, inputs, hidden: width, outputs }) = (Level::selected()?, sizes);
    let [weight_in, weight_out] = sizes.matrices(weights);
    let held = if kept { rows * width } else { 0 };
    let (mut out, mut all) = (Vec::with_capacity(rows * outputs), Vec::with_capacity(held));
    let mut hidden = all.spare_capacity_mut()[..held].chunks_mut(block * width);
    let parts = out.spare_capacity_mut()[..rows * outputs].chunks_mut(block * outputs);
    let parts: Vec<_> = parts.map(|out| (out, hidden.next())).collect();
    // The hidden layer of a block, unless it is kept, and what the GELU makes of it.
    let room = || (if kept { Box::default() } else { Box::new_uninit_slice(block * width) }, vec![0.0; block * width]);
    parts.into_par_iter().enumerate().for_each_init(room, |(unkept, activated), (index, (out, kept))| {
        let rows = out.len() / outputs;
        let x = MatRef::from_row_major_slice(&x[index * block * inputs..][..rows * inputs], rows, inputs);
        let hidden = kept.unwrap_or(unkept);
        let hidden = product(&mut hidden[..rows * width], x, weight_in, false);
        let activated = &mut activated[..rows * width];
        level.dispatch(Forward { hidden, bias: bias_in, activated: &mut *activated });
        let out = product(out, MatRef::from_row_major_slice(activated, rows, width), weight_out, false);
        add_to_rows(out, bias_out);
    });
    // SAFETY: the parts are the first elements of either capacity, all of them written by `product`.
    unsafe {
        out.set_len(rows * outputs);
        all.set_len(held);
    }
    Ok((out, all))
}

/// The gradients of [`mlp`] for `dout [rows, outputs]`, from `x` and the `hidden` layer that it kept.
///
/// # Errors
/// As [`Level::selected`].
///
/// # Panics
/// If the lengths do not fit.
pub fn mlp_backward(
    rows: usize,
    x: &[f32],
    hidden: &[f32],
    weights: &MlpWeights<'_>,
    dout: &[f32],
) -> Result<MlpGradients> {
    let (width, outputs) = (weights.bias_in.len(), weights.bias_out.len());
    assert!(hidden.len() == area(rows, width), "mlp_backward: hidden must be [rows, hidden]");
    assert!(dout.len() == area(rows, outputs), "mlp_backward: dout must be [rows, outputs]");
    let Some(sizes) = Sizes::of(rows, x, weights) else {
        let outer = linear_backward(rows, &gelu(hidden)?, weights.weight_out, dout, outputs, [true; 3]);
        let dhidden = gelu_backward(hidden, &outer.dx.unwrap_or_default())?;
        let inner = linear_backward(rows, x, weights.weight_in, &dhidden, width, [true; 3]);
        let [dx, dweight_in, dbias_in, dweight_out, dbias_out] =
            [inner.dx, inner.dweight, inner.dbias, outer.dweight, outer.dbias].map(Option::unwrap_or_default);
        return Ok(MlpGradients { dx, dweight_in, dbias_in, dweight_out, dbias_out });
    };
    let (level, inputs) = (Level::selected()?, sizes.inputs);
    // As many sums as take no more memory than the hidden layer.
    let groups = (rows / (inputs + outputs)).clamp(1, GROUPS[0]);
    let of_group = rows.div_ceil(sizes.block).div_ceil(groups) * sizes.block;
    let pass = Backward { level, sizes, weights, shared: groups < GROUPS[1] };
    let mut dx = Vec::with_capacity(rows * inputs);
    let parts = dx.spare_capacity_mut()[..rows * inputs].par_chunks_mut(of_group * inputs).enumerate();
    let sums = parts.map(|(index, dx)| {
        let (first, rows) = (index * of_group, dx.len() / inputs);
        let part = |all, width| part(all, first, rows, width);
        pass.group(part(x, inputs), part(hidden, width), part(dout, outputs), dx)
    });
    let [dweight_in, dbias_in, dweight_out, dbias_out] = total(sums.collect());
    // SAFETY: the parts are the first elements of the capacity, all of them written by `Backward::group`.
    unsafe { dx.set_len(rows * inputs) };
    Ok(MlpGradients { dx, dweight_in, dbias_in, dweight_out, dbias_out })
}

/// Rows of a block, and the widths of the layers.
#[derive(Clone, Copy)]
struct Sizes {
    block: usize,
    inputs: usize,
    hidden: usize,
    outputs: usize,
}

impl Sizes {
    /// `None` for so few rows that their products are to be shared among the threads, and where there is nothing to compute.
    fn of(rows: usize, x: &[f32], weights: &MlpWeights<'_>) -> Option<Self> {
        let (hidden, outputs) = (weights.bias_in.len(), weights.bias_out.len());
        let inputs = x.len().checked_div(rows).or(weights.weight_in.len().checked_div(hidden)).unwrap_or(0);
        assert!(x.len() == area(rows, inputs), "mlp: x must be [rows, inputs]");
        assert!(weights.weight_in.len() == area(inputs, hidden), "mlp: weight_in must be [inputs, hidden]");
        assert!(weights.weight_out.len() == area(hidden, outputs), "mlp: weight_out must be [hidden, outputs]");
        let block = block(rows);
        (rows >= 2 * ROWS && inputs * hidden * outputs > 0).then_some(Self { block, inputs, hidden, outputs })
    }

    fn matrices<'a>(&self, weights: &MlpWeights<'a>) -> [MatRef<'a, f32>; 2] {
        [
            MatRef::from_row_major_slice(weights.weight_in, self.inputs, self.hidden),
            MatRef::from_row_major_slice(weights.weight_out, self.hidden, self.outputs),
        ]
    }
}

/// `rows` of `width` from number `first` on.
fn part(all: &[f32], first: usize, rows: usize, width: usize) -> &[f32] {
    &all[first * width..][..rows * width]
}

/// Adds `bias` to every row.
fn add_to_rows(rows: &mut [f32], bias: &[f32]) {
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
    }
}

/// Gradients of weights and biases, in the order of [`MlpWeights`].
type Sums = [Vec<f32>; 4];

/// The gradients of all groups together, added in their order.
fn total(mut groups: Vec<Sums>) -> Sums {
    let mut sums = groups.remove(0);
    for (n, sum) in sums.iter_mut().enumerate() {
        sum.par_chunks_mut(ROWS).enumerate().for_each(|(index, sum)| {
            for group in &groups {
                sum.iter_mut().zip(&group[n][index * ROWS..]).for_each(|(sum, x)| *sum += x);
            }
        });
    }
    sums
}

/// The backward pass of some rows after the other.
struct Backward<'a> {
    level: Level,
    sizes: Sizes,
    weights: &'a MlpWeights<'a>,
    /// Whether the threads share each product.
    shared: bool,
}

impl Backward<'_> {
    /// Writes `dx` of as many rows; sums of the others' gradients.
    fn group(&self, x: &[f32], hidden: &[f32], dout: &[f32], dx: &mut [MaybeUninit<f32>]) -> Sums {
        let Sizes { block, inputs, hidden: width, outputs } = self.sizes;
        let [weight_in, weight_out] = self.sizes.matrices(self.weights);
        let mut sums = [inputs * width, width, width * outputs, outputs].map(|len| vec![0.0; len]);
        let [dweight_in, dbias_in, dweight_out, dbias_out] = &mut sums;
        let (mut room, mut activated) = (Box::new_uninit_slice(block * width), vec![0.0; block * width]);
        for (index, dx) in dx.chunks_mut(block * inputs).enumerate() {
            let (first, rows) = (index * block, dx.len() / inputs);
            let [x, dout] = [(x, inputs), (dout, outputs)]
                .map(|(all, width)| MatRef::from_row_major_slice(part(all, first, rows, width), rows, width));
            let dhidden = product(&mut room[..rows * width], dout, weight_out.transpose(), self.shared);
            let (hidden, activated) = (part(hidden, first, rows, width), &mut activated[..rows * width]);
            self.level.dispatch(Through {
                hidden,
                activated: &mut *activated,
                dhidden: &mut *dhidden,
                dbias: dbias_in,
            });
            let [activated, dhidden] = [&*activated, dhidden].map(|x| MatRef::from_row_major_slice(x, rows, width));
            add_product(dweight_out, activated.transpose(), dout, self.shared);
            add_product(dweight_in, x.transpose(), dhidden, self.shared);
            product(dx, dhidden, weight_in.transpose(), self.shared);
        }
        for row in dout.chunks_exact(outputs) {
            dbias_out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        sums
    }
}

/// Adds the bias to the hidden layer, and applies the GELU.
struct Forward<'a> {
    hidden: &'a mut [f32],
    bias: &'a [f32],
    activated: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.bias.len();
        let (bias, bias_tail) = S::as_simd_f32s(self.bias);
        for (hidden, out) in self.hidden.chunks_exact_mut(width).zip(self.activated.chunks_exact_mut(width)) {
            let ((hidden, hidden_tail), (out, out_tail)) = (S::as_mut_simd_f32s(hidden), S::as_mut_simd_f32s(out));
            for ((hidden, out), &bias) in hidden.iter_mut().zip(out).zip(bias) {
                *hidden = simd.add_f32s(*hidden, bias);
                *out = value(simd, *hidden);
            }
            let sum = simd.add_f32s(simd.partial_load_f32s(hidden_tail), simd.partial_load_f32s(bias_tail));
            simd.partial_store_f32s(hidden_tail, sum);
            simd.partial_store_f32s(out_tail, value(simd, sum));
        }
    }
}

/// Writes what the GELU made of the hidden layer, and passes the gradient of that back through it, with its sum over rows.
struct Through<'a> {
    hidden: &'a [f32],
    activated: &'a mut [f32],
    dhidden: &'a mut [f32],
    dbias: &'a mut [f32],
}

impl WithSimd for Through<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.dbias.len();
        let rows = self.hidden.chunks_exact(width).zip(self.activated.chunks_exact_mut(width));
        let (dbias, dbias_tail) = S::as_mut_simd_f32s(self.dbias);
        for ((hidden, out), dhidden) in rows.zip(self.dhidden.chunks_exact_mut(width)) {
            let (hidden, hidden_tail) = S::as_simd_f32s(hidden);
            let ((out, out_tail), (dhidden, dhidden_tail)) = (S::as_mut_simd_f32s(out), S::as_mut_simd_f32s(dhidden));
            for (((hidden, out), dhidden), dbias) in hidden.iter().zip(out).zip(dhidden).zip(&mut *dbias) {
                (*out, *dhidden) = through(simd, *hidden, *dhidden);
                *dbias = simd.add_f32s(*dbias, *dhidden);
            }
            let (value, slope) =
                through(simd, simd.partial_load_f32s(hidden_tail), simd.partial_load_f32s(dhidden_tail));
            simd.partial_store_f32s(out_tail, value);
            simd.partial_store_f32s(dhidden_tail, slope);
            let sum = simd.add_f32s(simd.partial_load_f32s(dbias_tail), slope);
            simd.partial_store_f32s(dbias_tail, sum);
        }
    }
}

/// The GELU of `x`, and `dout` times its derivative.
#[inline(always)]
fn through<S: Simd>(simd: S, x: S::f32s, dout: S::f32s) -> (S::f32s, S::f32s) {
    let (value, slope) = value_and_derivative(simd, x);
    (value, simd.mul_f32s(dout, slope))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: f32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed) * 0.7311).sin()).collect()
    }

    /// Whether `got` is what a plain sum of as many products gives.
    fn assert_close(got: &[f32], expected: &[f32], of: &str) {
        assert_eq!(got.len(), expected.len(), "{of}");
        let largest = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= 1e-5 * largest, "{of}: {got}, not {expected}");
        }
    }

    #[test]
    fn blocks_are_the_layers_one_after_the_other() {
        // Few rows, those of several blocks, of several groups, of a group of all rows, and nothing.
        for [rows, inputs, hidden, outputs] in
            [[3, 5, 7, 4], [2 * ROWS, 3, 33, 5], [9 * ROWS + 7, 19, 40, 21], [2 * ROWS + 1, 700, 16, 500], [0, 3, 4, 5]]
        {
            let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
            let (weight_in, bias_in) = (numbers(inputs * hidden, 0.3), numbers(hidden, 0.4));
            let (weight_out, bias_out) = (numbers(hidden * outputs, 0.5), numbers(outputs, 0.6));
            let weights =
                MlpWeights { weight_in: &weight_in, bias_in: &bias_in, weight_out: &weight_out, bias_out: &bias_out };
            let (y, kept) = mlp(rows, &x, &weights, true).unwrap();
            let before = linear(rows, &x, &weight_in, &bias_in);
            let after = gelu(&before).unwrap();
            assert_close(&kept, &before, "hidden");
            assert_close(&y, &linear(rows, &after, &weight_out, &bias_out), "y");
            let (same, none) = mlp(rows, &x, &weights, false).unwrap();
            assert!(same == y && none.is_empty());
            let got = mlp_backward(rows, &x, &kept, &weights, &dout).unwrap();
            let outer = linear_backward(rows, &after, &weight_out, &dout, outputs, [true; 3]);
            let dhidden = gelu_backward(&before, &outer.dx.unwrap()).unwrap();
            let inner = linear_backward(rows, &x, &weight_in, &dhidden, hidden, [true; 3]);
            assert_close(&got.dx, &inner.dx.unwrap(), "dx");
            assert_close(&got.dweight_in, &inner.dweight.unwrap(), "dweight_in");
            assert_close(&got.dbias_in, &inner.dbias.unwrap(), "dbias_in");
            assert_close(&got.dweight_out, &outer.dweight.unwrap(), "dweight_out");
            assert_close(&got.dbias_out, &outer.dbias.unwrap(), "dbias_out");
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_threads() {
        for [rows, inputs, hidden, outputs] in [[6 * ROWS + 5, 32, 80, 24], [2 * ROWS + 5, 400, 96, 300]] {
            let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
            let (weight_in, bias_in) = (numbers(inputs * hidden, 0.3), numbers(hidden, 0.4));
            let (weight_out, bias_out) = (numbers(hidden * outputs, 0.5), numbers(outputs, 0.6));
            let weights =
                MlpWeights { weight_in: &weight_in, bias_in: &bias_in, weight_out: &weight_out, bias_out: &bias_out };
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let (y, kept) = mlp(rows, &x, &weights, true).unwrap();
                    (mlp_backward(rows, &x, &kept, &weights, &dout).unwrap(), y)
                })
            };
            let one = run(1);
            assert!(one == run(2) && one == run(5));
        }
    }
}
