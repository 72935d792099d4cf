//! Linear layers with ternary weights and activations of eight bits: "Spectral Sparse Attention", appendix C, by the rule of
//! BitNet b1.58.
//!
//! Training keeps real weights and rounds them in every pass; gradients pass the rounding as if it were not there. Without
//! autodiff, products on Flex are sums of integers, of weights packed as [`TernaryMatrix`] stores them.

mod packed;

use std::ops::Range;

use burn::{
    backend::flex::Flex,
    nn::Linear,
    tensor::{Tensor, TensorData},
};
use resolvent_layers::TernaryMatrix;

pub use self::packed::Packed;
use crate::{
    Precision, Result,
    ops::{is_flex, linear, linear_layer},
};

/// The least scale of weights, and 127 times that of activations.
const LEAST: f64 = 1e-5;

/// Layers side by side, of ternary weights and activations of eight bits.
#[derive(Debug)]
pub struct Layers<'a> {
    /// `[inputs, outputs]`, the columns of one layer after those of another.
    pub weight: Tensor<2>,
    /// `[outputs]`.
    pub bias: Option<Tensor<1>>,
    /// Columns of every layer, each with a scale of its own.
    pub widths: &'a [usize],
    /// Where packed weights are kept from call to call.
    pub packed: &'a Packed,
}

impl Layers<'_> {
    /// `x W + b` of all layers: `x [batch, seq, inputs]`.
    ///
    /// # Panics
    /// If the sizes do not fit, as Burn's own layer does.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward_some(x, 0..self.widths.len())
    }

    /// As [`Layers::forward`], of some of the layers.
    ///
    /// # Panics
    /// As [`Layers::forward`], or where there are not so many layers.
    pub fn forward_some(&self, x: Tensor<3>, layers: Range<usize>) -> Tensor<3> {
        let first = |n: usize| self.widths[..n].iter().sum::<usize>();
        let (from, to) = (first(layers.start), first(layers.end));
        let bias = self.bias.clone().map(|bias| bias.narrow(0, from, to - from));
        let device = x.device();
        // Values that are not finite have no integers: they show in the result as in that of any layer.
        if is_flex(&device)
            && !device.is_autodiff()
            && let Ok(matrices) = self.packed.matrices(&self.weight, self.widths)
            && let Ok(out) = integers(&x, &matrices[layers.clone()], bias.clone())
        {
            return out;
        }
        let weights = layers.map(|n| ternary(self.weight.clone().narrow(1, first(n), self.widths[n]))).collect();
        linear(int8(x), Tensor::cat(weights, 1), bias)
    }
}

/// How the layers of a block multiply.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Products<'a> {
    /// Real weights, in this precision.
    Real(Precision),
    /// Weights that are rounded to three values, and where they are kept when packed.
    Ternary(&'a Packed),
}

/// A layer of a block.
pub(crate) fn layer(layer: &Linear, x: Tensor<3>, products: Products<'_>) -> Tensor<3> {
    let packed = match products {
        Products::Real(precision) => return linear_layer(precision, layer, x),
        Products::Ternary(packed) => packed,
    };
    let [_, width] = layer.weight.dims();
    let bias = layer.bias.as_ref().map(|bias| bias.val());
    Layers { weight: layer.weight.val(), bias, widths: &[width], packed }.forward(x)
}

/// A layer with nothing but its packed weights, those of `widths` side by side: see [`Packed::only`].
pub(crate) fn only_packed(mut layer: Linear, widths: &[usize], packed: &Packed) -> Result<Linear> {
    let stand_in = packed.only(layer.weight.val(), widths)?;
    layer.weight = layer.weight.map(|_| stand_in);
    Ok(layer)
}

/// The matrices that [`Layers`] multiply with, one for each of `widths`: `weight [inputs, outputs]`.
///
/// # Errors
/// [`crate::Error::Mechanism`] for weights that are not finite.
pub fn matrices(weight: Tensor<2>, widths: &[usize]) -> Result<Vec<TernaryMatrix>> {
    let [inputs, _] = weight.dims();
    let mut first = 0;
    let matrix = |&width: &usize| {
        let rows = weight.clone().narrow(1, first, width).transpose();
        first += width;
        let values = host(rows.into_data());
        Ok(TernaryMatrix::quantise(&values, [width, inputs])?)
    };
    widths.iter().map(matrix).collect()
}

/// Values as f32.
pub(crate) fn host(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().try_into_vec().expect("they were made of f32")
}

/// `x`, on Flex, times all matrices, in integers.
fn integers(x: &Tensor<3>, matrices: &[TernaryMatrix], bias: Option<Tensor<1>>) -> Result<Tensor<3>> {
    let ([batch, seq, _], dtype, device) = (x.dims(), x.dtype(), x.device());
    let bias = bias.map(|bias| host(bias.into_data()));
    let width = matrices.iter().map(|matrix| matrix.shape()[0]).sum::<usize>();
    let mut out = vec![0.0; batch * seq * width];
    let forward = |x: &[f32], out: &mut [f32]| TernaryMatrix::forward_all(matrices, x, bias.as_deref(), out);
    let plain = x.clone().try_into_primitive::<Flex>().ok();
    match plain.as_ref().and_then(|x| x.as_slice()) {
        Some(values) => forward(values, &mut out)?,
        None => forward(&host(x.to_data()), &mut out)?,
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
