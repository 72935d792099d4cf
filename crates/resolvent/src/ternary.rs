//! Linear layers with ternary weights and activations of eight bits: "Spectral Sparse Attention", appendix C, by the rule of
//! BitNet b1.58.
//!
//! Training keeps real weights and rounds them in every pass; gradients pass the rounding as if it were not there. Without
//! autodiff, products on Flex are sums of integers, of weights packed as [`TernaryMatrix`] stores them.

use burn::{
    nn::Linear,
    tensor::{Tensor, TensorData, module::linear as real_linear},
};
use resolvent_kernels::TernaryMatrix;

use crate::{Result, ops::is_flex};

/// The least scale of weights, and 127 times that of activations.
const LEAST: f64 = 1e-5;

/// `x W + b` in ternary weights and activations of eight bits: `x [batch, seq, inputs]`, `weight [inputs, outputs]`, `bias
/// [outputs]`. The columns of `weight` are several layers side by side, `widths` wide, each with a scale of its own.
///
/// # Panics
/// If the sizes do not fit, as Burn's own layer does.
pub fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>, widths: &[usize]) -> Tensor<3> {
    let device = x.device();
    // Values that are not finite have no integers: they show in the result as in that of any layer.
    if is_flex(&device)
        && !device.is_autodiff()
        && let Ok(out) = integers(x.clone(), weight.clone(), bias.clone(), widths)
    {
        return out;
    }
    let first = |n: usize| widths[..n].iter().sum::<usize>();
    let part = |(n, &width): (usize, &usize)| ternary(weight.clone().narrow(1, first(n), width));
    let weights = widths.iter().enumerate().map(part).collect();
    real_linear(int8(x), Tensor::cat(weights, 1), bias)
}

/// A layer, its weights rounded to three values if `ternary`.
pub(crate) fn layer(layer: &Linear, x: Tensor<3>, ternary: bool) -> Tensor<3> {
    if !ternary {
        return layer.forward(x);
    }
    let [_, width] = layer.weight.dims();
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()), &[width])
}

/// The matrices that [`linear`] multiplies with, one for each of `widths`.
///
/// # Errors
/// [`crate::Error::Mechanism`] for weights that are not finite.
pub fn matrices(weight: Tensor<2>, widths: &[usize]) -> Result<Vec<TernaryMatrix>> {
    let [inputs, _] = weight.dims();
    let mut first = 0;
    let matrix = |&width: &usize| {
        let rows = weight.clone().narrow(1, first, width).transpose();
        first += width;
        let values: Vec<f32> = rows.to_data().iter::<f32>().collect();
        Ok(TernaryMatrix::quantise(&values, [width, inputs])?)
    };
    widths.iter().map(matrix).collect()
}

/// [`linear`] in integers.
fn integers(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>, widths: &[usize]) -> Result<Tensor<3>> {
    let ([batch, seq, _], dtype, device) = (x.dims(), x.dtype(), x.device());
    let host = |x: TensorData| x.iter::<f32>().collect::<Vec<_>>();
    let bias = bias.map(|bias| host(bias.to_data()));
    let (x, width) = (host(x.to_data()), widths.iter().sum::<usize>());
    let mut out = vec![0.0; batch * seq * width];
    let mut first = 0;
    for matrix in matrices(weight, widths)? {
        let [outputs, _] = matrix.shape();
        let mut part = vec![0.0; batch * seq * outputs];
        matrix.forward(&x, bias.as_ref().map(|bias| &bias[first..first + outputs]), &mut part)?;
        let rows = out.chunks_exact_mut(width).zip(part.chunks_exact(outputs));
        rows.for_each(|(out, part)| out[first..first + outputs].copy_from_slice(part));
        first += outputs;
    }
    Ok(Tensor::<3>::from_data(TensorData::new(out, [batch, seq, width]), &device).cast(dtype))
}

/// `scale clip(round(w / scale), -1, 1)` with `scale = max(mean |w|, 1e-5)`, of which the gradient is that of `w`.
fn ternary(w: Tensor<2>) -> Tensor<2> {
    let real = w.clone().detach();
    let scale = real.clone().abs().mean().clamp_min(LEAST).unsqueeze::<2>();
    let rounded = (real.clone() / scale.clone()).round().clamp(-1.0, 1.0) * scale;
    w + (rounded - real)
}

/// Every token in eight bits, `a clip(round(x / a), -128, 127)` with `a = max(max |x|, 1e-5) / 127`, of which the gradient is
/// that of `x`.
fn int8(x: Tensor<3>) -> Tensor<3> {
    let real = x.clone().detach();
    let scale = real.clone().abs().max_dim(2).clamp_min(LEAST) / 127.0;
    let rounded = (real.clone() / scale.clone()).round().clamp(-128.0, 127.0) * scale;
    x + (rounded - real)
}
