//! `fna`: power laws and Gaussians of the distance.
//!
//! The distances are exact: squared differences, channel by channel. Their gradients go through the matrix product of centred
//! tokens, so that what Burn keeps for them stays O(N^2).

use burn::tensor::{Bool, FloatDType, Tensor};

use super::{Call, absent, dense::fill, root};
use crate::{
    Extras, Parameter, Shape,
    mechanism::{DistanceKernel, Fna, Manifold},
};

/// Fractional neural attention and the log-sum-exp of its rows, `[batch, heads, seq_q]`.
pub(super) fn fna(call: &Call, m: &Fna, extras: &Extras) -> (Tensor<4>, Tensor<3>) {
    let Shape { batch, heads, seq_q, head_dim, .. } = call.shape;
    let resolved = m.resolve(head_dim, heads);
    let per_head = |parameter, otherwise: f64| match extras.get(parameter) {
        Some(values) => values.clone().cast(FloatDType::from(call.q.dtype())).reshape([1, heads, 1, 1]),
        None => Tensor::full([1, 1, 1, 1], otherwise, (&call.q.device(), call.q.dtype())),
    };
    let power = per_head(Parameter::Alpha, m.alpha) + resolved.intrinsic_dim;
    let kappa = per_head(Parameter::Kappa, resolved.kappa);
    let r = match m.manifold {
        Manifold::Euclidean => plane(call),
        Manifold::Sphere => sphere(call),
    };
    let z = r / kappa;
    let scores = match m.kernel {
        _ if m.is_gaussian() => z.square().neg(),
        DistanceKernel::Levy => z.log1p() * power.neg(),
        DistanceKernel::Student => z.square().log1p() * power * -0.5,
    };
    let blocked = call.blocked();
    let mut rows = Rows::of(scores.clone(), &blocked);
    if m.norm_exponent != 0.0 {
        let degrees = rows.lse().mask_fill(rows.empty(), 0.0).swap_dims(2, 3);
        rows = Rows::of(scores - degrees * m.norm_exponent, &blocked);
    }
    let lse = rows.lse().detach().mask_fill(rows.empty(), f32::NEG_INFINITY);
    let out = call.thinned(rows.powers.clone()).matmul(call.v.clone()) / rows.sums.clone().mask_fill(rows.empty(), 1.0);
    (out, lse.cast(FloatDType::F32).reshape([batch, heads, seq_q]))
}

/// `exp(scores - highest)` and its sums over the keys.
struct Rows {
    powers: Tensor<4>,
    sums: Tensor<4>,
    highest: Tensor<4>,
}

impl Rows {
    fn of(scores: Tensor<4>, blocked: &Option<Tensor<4, Bool>>) -> Self {
        let highest = fill(scores.clone().detach(), blocked, f32::MIN).max_dim(3);
        let powers = absent((fill(scores, blocked, f32::MIN) - highest.clone()).exp(), blocked);
        Self { sums: powers.clone().sum_dim(3), powers, highest }
    }

    /// Rows without keys, `[batch, heads, seq_q, 1]`.
    fn empty(&self) -> Tensor<4, Bool> {
        self.sums.clone().equal_elem(0.0)
    }

    /// The logarithms of the sums; of no meaning for empty rows.
    fn lse(&self) -> Tensor<4> {
        self.highest.clone() + self.sums.clone().mask_fill(self.empty(), 1.0).log()
    }
}

/// `|q - k|`, with derivative 0 at 0.
fn plane(call: &Call) -> Tensor<4> {
    let (q, k) = (call.q.clone(), call.k.clone());
    let r = root(chords(&q, &k, -1.0));
    let centre = centre(call, k.clone());
    let (q, k) = (q - centre.clone(), k - centre);
    let squares = |x: &Tensor<4>| x.clone().square().sum_dim(3);
    let expanded = squares(&q) + squares(&k).swap_dims(2, 3) - q.matmul(k.swap_dims(2, 3)) * 2.0;
    let slope = quotient(0.5, r.clone());
    along(r, expanded, slope)
}

/// The mean of the kept keys, `[batch, heads, 1, head_dim]`, a constant.
fn centre(call: &Call, k: Tensor<4>) -> Tensor<4> {
    let total = k.detach().sum_dim(2);
    match &call.no_key {
        Some(no_key) => {
            let kept = no_key.clone().bool_not().float().cast(FloatDType::from(total.dtype())).sum_dim(3);
            total / kept.clamp_min(1.0)
        }
        None => total / call.shape.seq_kv as f64,
    }
}

/// The angle between `q` and `k`, with derivative 0 at both poles; a right angle where either has no length.
fn sphere(call: &Call) -> Tensor<4> {
    let ((q, no_q), (k, no_k)) = (unit(call.q.clone()), unit(call.k.clone()));
    let (minus, plus) = (root(chords(&q, &k, -1.0)), root(chords(&q, &k, 1.0)));
    let [batch, heads, seq_q, seq_kv] = minus.dims();
    let full = |x: Tensor<4, Bool>| x.expand([batch, heads, seq_q, seq_kv]);
    let flat = full(no_q).bool_or(full(no_k.swap_dims(2, 3)));
    let r = (minus.atan2(plus) * 2.0).mask_fill(flat, std::f64::consts::FRAC_PI_2);
    // sin r from the half angles: exactly 0 at both poles.
    let half = r.clone() * 0.5;
    let sine = (half.clone().sin() * half.cos() * 2.0).clamp_min(0.0);
    let inside = sine.clone().lower_elem(1e-6);
    let slope = quotient(-1.0, sine.mask_fill(inside, 0.0));
    along(r, q.matmul(k.swap_dims(2, 3)), slope)
}

/// The rows at length one, and which of them have none.
fn unit(x: Tensor<4>) -> (Tensor<4>, Tensor<4, Bool>) {
    let length = root(x.clone().square().sum_dim(3));
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
