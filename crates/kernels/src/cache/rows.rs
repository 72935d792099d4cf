//! The row of a new token over all keys and values that are kept.

use crate::{
    Extras, mechanism,
    score::gate,
    simd::{Level, rows},
    structure::dense::Decoder,
};

/// The kernel of head `h`, as the configuration or the call has it.
pub(super) fn decoder<'a>(
    m: &'a mechanism::Fna,
    extras: &Extras<'_>,
    head_dim: usize,
    heads: usize,
    h: usize,
) -> Decoder<'a> {
    let [kappa, power] = m.of_head(extras, head_dim, heads, h);
    Decoder { m, kappa, power }
}

/// `sum = sum_j exp(z_j - max z) v_j` over all keys; returns what it has to be multiplied by.
pub(super) fn softmax(
    level: Level,
    m: &mechanism::Softmax,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    z: &mut [f32],
    sum: &mut [f64],
) -> f64 {
    rows::dots(level, k, q, z);
    let scale = m.scale.unwrap_or((q.len() as f64).powf(-0.5)) as f32;
    let most = z.iter().fold(f32::NEG_INFINITY, |most, z| most.max(*z));
    z.iter_mut().for_each(|z| *z = (scale * (*z - most)).exp());
    sum.fill(0.0);
    rows::accumulate(level, z, v, 1.0, sum);
    1.0 / z.iter().map(|z| f64::from(*z)).sum::<f64>()
}

/// `q` divided by a power of two, which makes its largest entry one, and that power.
pub(super) fn scale_down<'s>(q: &[f32], scaled: &'s mut [f32]) -> (&'s [f32], f64) {
    let down = rows::power_of_two(q.iter().fold(0.0, |most: f32, x| most.max(x.abs())));
    scaled.iter_mut().zip(q).for_each(|(s, q)| *s = q / down);
    (scaled, down.into())
}

/// `sum = sum_j w_j v_j`, `w` the affinities of `down q` over a power of two; adds their energy to `norm`, the squared norm
/// of all rows so far, and returns what the sum has to be multiplied by, decay aside.
#[allow(clippy::too_many_arguments)] // one query, the past, and what is carried along
pub(super) fn infsa(
    level: Level,
    m: &mechanism::Infsa,
    (q, down): (&[f32], f64),
    k: &[f32],
    v: &[f32],
    w: &mut [f32],
    norm: &mut f64,
    sum: &mut [f64],
) -> f64 {
    let gain = m.scale.unwrap_or((q.len() as f64).powf(-0.5)) * down;
    rows::dots(level, k, q, w);
    gate::activate(level, m.activation, gain as f32, w);
    let unit = gain * rows::normalise(level, w).factor;
    *norm += unit * unit * w.iter().map(|w| f64::from(w * w)).sum::<f64>();
    sum.fill(0.0);
    rows::accumulate(level, w, v, 1.0, sum);
    let over = norm.sqrt() + m.eps;
    if over > 0.0 { unit / over } else { 0.0 }
}
