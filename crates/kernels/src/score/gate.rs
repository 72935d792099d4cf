//! The activation on a vector of scores. Every one is a gated identity, `phi(x) = x gate(x)`; so `phi(gain z) = gain z
//! gate(gain z)`, and a gain that would overflow never has to be multiplied in.

use crate::{mechanism::Activation, simd::Level};

/// `z gate(gain z)` in place, which is `phi(gain z) / gain`.
pub(crate) fn activate(level: Level, activation: Activation, gain: f32, z: &mut [f32]) {
    match activation {
        // NaN stays NaN: it must not pass for a gated token.
        Activation::Relu => level.dispatch(|| z.iter_mut().for_each(|z| *z = if *z <= 0.0 { 0.0 } else { *z })),
        Activation::Abs => level.dispatch(|| z.iter_mut().for_each(|z| *z = z.abs())),
        Activation::Gelu => z.iter_mut().for_each(|z| *z *= normal_cdf(gain * *z) as f32),
    }
}

/// The derivative of [`activate`] with respect to `z`, which is `phi'(gain z)`.
pub(crate) fn slopes(level: Level, activation: Activation, gain: f32, z: &[f32], slopes: &mut [f32]) {
    let pairs = slopes.iter_mut().zip(z);
    match activation {
        Activation::Relu => level.dispatch(|| pairs.for_each(|(s, &z)| *s = if z > 0.0 { 1.0 } else { 0.0 })),
        Activation::Abs => level.dispatch(|| pairs.for_each(|(s, &z)| *s = if z == 0.0 { 0.0 } else { z.signum() })),
        Activation::Gelu => pairs.for_each(|(s, &z)| *s = gelu_slope(gain * z)),
    }
}

fn gelu_slope(x: f32) -> f32 {
    // Where the density is 0 in f64 too, x may be infinite.
    let x = x.clamp(-40.0, 40.0);
    let density = (-0.5 * f64::from(x).powi(2)).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (normal_cdf(x) + f64::from(x) * density) as f32
}

/// The share of a standard normal variable below `x`.
fn normal_cdf(x: f32) -> f64 {
    0.5 * libm::erfc(-f64::from(x) * std::f64::consts::FRAC_1_SQRT_2)
}
