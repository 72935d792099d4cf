//! Distances of all pairs of rows.
//!
//! They are exact: squared differences, channel by channel. Their gradients go through the matrix product of centred
//! tokens, so that what Burn keeps for them stays O(N^2).

use burn::tensor::{Bool, FloatDType, Tensor};

use super::{Call, root};

/// `|x - y|^2`; `centre [.., 1, dim]` is near the rows.
pub(super) fn squared(x: &Tensor<4>, y: &Tensor<4>, centre: &Tensor<4>) -> Tensor<4> {
    let one = Tensor::ones([1, 1, 1, 1], (&x.device(), x.dtype()));
    along(chords(x, y, -1.0), expanded(x, y, centre), one)
}

/// `|x - y|`, with derivative 0 at 0.
pub(super) fn plane(x: &Tensor<4>, y: &Tensor<4>, centre: &Tensor<4>) -> Tensor<4> {
    let r = root(chords(x, y, -1.0));
    let slope = quotient(0.5, r.clone());
    along(r, expanded(x, y, centre), slope)
}

/// `|x - y|^2` by the matrix product.
fn expanded(x: &Tensor<4>, y: &Tensor<4>, centre: &Tensor<4>) -> Tensor<4> {
    let (x, y) = (x.clone() - centre.clone(), y.clone() - centre.clone());
    let squares = |x: &Tensor<4>| x.clone().square().sum_dim(3);
    squares(&x) + squares(&y).swap_dims(2, 3) - x.matmul(y.swap_dims(2, 3)) * 2.0
}

/// The mean of the kept keys, `[batch, heads, 1, head_dim]`, a constant.
pub(super) fn centre(call: &Call) -> Tensor<4> {
    let total = call.k.clone().detach().sum_dim(2);
    match &call.no_key {
        Some(no_key) => {
            let kept = no_key.clone().bool_not().float().cast(FloatDType::from(total.dtype())).sum_dim(3);
            total / kept.clamp_min(1.0)
        }
        None => total / call.shape.seq_kv as f64,
    }
}

/// The angle between `x` and `y`, with derivative 0 at both poles; a right angle where either has no length.
pub(super) fn sphere(x: &Tensor<4>, y: &Tensor<4>) -> Tensor<4> {
    let ((x, no_x), (y, no_y)) = (unit(x.clone()), unit(y.clone()));
    let products = x.clone().matmul(y.clone().swap_dims(2, 3));
    let shape = products.dims();
    let full = |x: Tensor<4, Bool>| x.expand(shape);
    let flat = full(no_x).bool_or(full(no_y.swap_dims(2, 3)));
    angle([chords(&x, &y, -1.0), chords(&x, &y, 1.0)], products, flat)
}

/// The angle by the squared lengths of `x - y` and `x + y`, constants, and its gradient through `products`; a right angle where `flat`.
pub(super) fn angle([minus, plus]: [Tensor<4>; 2], products: Tensor<4>, flat: Tensor<4, Bool>) -> Tensor<4> {
    let r = (root(minus).atan2(root(plus)) * 2.0).mask_fill(flat, std::f64::consts::FRAC_PI_2);
    // sin r from the half angles: exactly 0 at both poles.
    let half = r.clone() * 0.5;
    let sine = (half.clone().sin() * half.cos() * 2.0).clamp_min(0.0);
    let inside = sine.clone().lower_elem(1e-6);
    let slope = quotient(-1.0, sine.mask_fill(inside, 0.0));
    along(r, products, slope)
}

/// The rows at length one, and which of them have none.
pub(super) fn unit<const D: usize>(x: Tensor<D>) -> (Tensor<D>, Tensor<D, Bool>) {
    let length = root(x.clone().square().sum_dim(D - 1));
    let none = length.clone().detach().lower_equal_elem(1e-12);
    let unit = x / length.mask_fill(none.clone(), 1.0);
    let shape = unit.shape();
    (unit.mask_fill(none.clone().expand(shape), 0.0), none)
}

/// `sum_c (q_c + sign k_c)^2`, a constant.
fn chords(q: &Tensor<4>, k: &Tensor<4>, sign: f64) -> Tensor<4> {
    let (q, k) = (q.clone().detach(), k.clone().detach().swap_dims(2, 3) * sign);
    let [_, _, _, dim] = q.dims();
    let channel = |c: usize| (q.clone().narrow(3, c, 1) + k.clone().narrow(2, c, 1)).square();
    (1..dim).fold(channel(0), |sum, c| sum + channel(c))
}

/// `value`, with the gradient of `path` times `slope`.
fn along(value: Tensor<4>, path: Tensor<4>, slope: Tensor<4>) -> Tensor<4> {
    value.detach() + (path.clone() - path.detach()) * slope.detach()
}

/// `x / y`, and 0 where `y` is 0.
fn quotient(x: f64, y: Tensor<4>) -> Tensor<4> {
    let zero = y.clone().equal_elem(0.0);
    (y.mask_fill(zero.clone(), 1.0).recip() * x).mask_fill(zero, 0.0)
}
