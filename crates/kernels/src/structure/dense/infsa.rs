//! Pure InfSA: dot + activation, the whole matrix over its Frobenius norm. "Infinite Self-Attention", eq. 11 and 12.
//!
//! The norm is proof against overflow: a homogeneous activation lets each head work on logits divided by a power of two
//! close to `max|q| max|k|` (exact, and without `scale`), with `eps` divided likewise; GELU squares in f64.

use rayon::prelude::*;

use super::{
    backward::{self, Sums, Targets, Terms},
    forward,
    head::{Head, positions},
    normalise::Frobenius,
    pairing::Dot,
};
use crate::{
    Gradients, Parameter, Result, Shape,
    mechanism::{Activation, Infsa},
    operator::{Call, Saved},
    rescale::largest,
    score::{Abs, Gelu, Relu},
    scratch::{cut, room},
};

/// What one batch element and head is computed in, and what its norm then means.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    /// Factor on `q.k`.
    pub logit: f64,
    /// `eps` in units of the logits.
    eps: f64,
    /// A norm of the logits' activations times this is the norm of the mechanism's affinities.
    norm: f64,
    /// A saved norm times this is a norm of the logits' activations.
    saved: f64,
    gamma: f64,
}

impl Unit {
    /// From the saved exponent: of the logits' unit, or, where they have none, of the saved norms'. `units`: the part of it
    /// by which queries and keys have been divided already.
    pub fn new(m: &Infsa, head_dim: usize, exponent: f32, units: [i32; 2], gamma: f64) -> Self {
        let scale = m.scale.unwrap_or((head_dim as f64).powf(-0.5));
        let power = 2f64.powi(exponent as i32);
        match homogeneous(m) {
            true => Self {
                logit: 2f64.powi(units[0] + units[1]) / power,
                eps: m.eps / (scale * power),
                norm: scale * power,
                saved: 1.0,
                gamma,
            },
            false => Self { logit: scale, eps: m.eps, norm: 1.0, saved: power, gamma },
        }
    }

    /// A norm as it is saved.
    pub fn save(&self, norm: f64) -> f32 {
        (norm / self.saved) as f32
    }

    /// A saved norm.
    pub fn restore(&self, saved: f32) -> f64 {
        f64::from(saved) * self.saved
    }

    /// `gamma / (F + eps)`, the factor on activations of logits whose norm is `norm`; 0 where there are none.
    pub fn factor(&self, norm: f64) -> f64 {
        if norm == 0.0 { 0.0 } else { self.gamma / (norm + self.eps) }
    }

    /// The weight of one row's `c = <dout, out>` in the projection: `c / (f F)`; 0 where the norm is 0.
    pub fn projection(&self, norm: f64, c: f64) -> f64 {
        if norm == 0.0 { 0.0 } else { c / ((norm + self.eps) * norm) }
    }
}

/// The exponent to be saved with the largest norm of a head: `exponent`, or one that makes the norm fit f32.
pub(crate) fn saved_exponent(m: &Infsa, exponent: f32, norm: f64) -> f32 {
    if homogeneous(m) || norm < 1e30 { exponent } else { norm.log2().floor() as f32 }
}

fn homogeneous(m: &Infsa) -> bool {
    m.activation != Activation::Gelu
}

/// The decay of a head.
pub(crate) fn gamma(call: &Call<'_>, m: &Infsa, slice: usize) -> f64 {
    call.extras.get(Parameter::Gamma).map_or(m.gamma, |gamma| gamma[slice % call.shape.heads].into())
}

/// Norms saved per batch element and head: one, or one per row when causal.
pub(crate) fn norms(shape: &Shape, causal: bool) -> usize {
    if causal { shape.seq_q } else { 1 }
}

/// The power of two that brings the logits of a head to order 1; 0 where they cannot be rescaled.
pub(crate) fn exponent(call: &Call<'_>, m: &Infsa, slice: usize) -> f32 {
    if !homogeneous(m) {
        return 0.0;
    }
    let [q, k] = largest(call, slice);
    // Only zeros (or no tokens): any unit will do. The bounds keep the unit a normal f32.
    let power = |x: f32| if x > 0.0 { f64::from(x).log2().floor() } else { 0.0 };
    let units = call.units(slice);
    (power(q) + power(k)).clamp(-126.0, 126.0) as f32 + (units[0] + units[1]) as f32
}

/// `out` before the division by the norm, and the sum of squares of every row's affinities, of the given `slices`.
pub(crate) fn unnormalised(
    call: &Call<'_>,
    m: &Infsa,
    logit: &[f32],
    slices: &[u32],
    out: &mut [f32],
    squares: &mut [f64],
    work: &mut [f32],
) {
    match m.activation {
        Activation::Relu => forward::Stream { call, pairing: |n| Dot::scaled(Frobenius(Relu), logit[n]), slices }
            .run(out, squares, work),
        Activation::Abs => {
            forward::Stream { call, pairing: |n| Dot::scaled(Frobenius(Abs), logit[n]), slices }.run(out, squares, work)
        }
        Activation::Gelu => forward::Stream { call, pairing: |n| Dot::scaled(Frobenius(Gelu), logit[n]), slices }
            .run(out, squares, work),
    }
}

/// f32 of working memory of [`unnormalised`].
pub(crate) fn unnormalised_work(shape: &Shape) -> usize {
    forward::work::<Dot<Frobenius<Gelu>>>(shape)
}

/// Writes `out` and, as `stats`, per batch element and head, the exponent and the norms, in units of the logits.
pub(crate) fn infsa_forward(
    call: &Call<'_>,
    m: &Infsa,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let shape = call.shape;
    let ([logit, squares, slices], work) = cut(work, forward_sizes(&shape));
    let all = positions(0..shape.slices(), None, slices);
    let per_slice = 1 + norms(&shape, call.mask.causal);
    logit.par_iter_mut().zip(stats.par_chunks_mut(per_slice)).enumerate().for_each(|(slice, (logit, stats))| {
        stats[0] = exponent(call, m, slice);
        *logit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), 1.0).logit as f32;
    });
    let squares: &mut [f64] = bytemuck::cast_slice_mut(squares);
    unnormalised(call, m, logit, all, out, squares, work);
    let slices = out.par_chunks_mut(shape.seq_q * shape.value_dim).zip(stats.par_chunks_mut(per_slice));
    slices.zip(squares.par_chunks(shape.seq_q)).enumerate().for_each(|(slice, ((out, stats), squares))| {
        let (mut sum, total) = (0.0, squares.iter().sum::<f64>());
        stats[0] = saved_exponent(m, stats[0], total.sqrt());
        let unit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), gamma(call, m, slice));
        for (i, row) in out.chunks_exact_mut(shape.value_dim).enumerate() {
            sum += squares[i];
            let norm = if call.mask.causal { sum.sqrt() } else { total.sqrt() };
            stats[1 + if call.mask.causal { i } else { 0 }] = unit.save(norm);
            let factor = unit.factor(norm) as f32;
            row.iter_mut().for_each(|x| *x *= factor);
        }
    });
    Ok(())
}

/// Factors on the logits; sums of squares (f64); slices.
fn forward_sizes(shape: &Shape) -> [usize; 3] {
    [shape.slices(), 2 * shape.slices() * shape.seq_q, shape.slices()]
}

/// f32 of working memory of [`infsa_forward`].
pub(super) fn forward_work(shape: &Shape) -> usize {
    room(forward_sizes(shape)) + unnormalised_work(shape)
}

/// `dA = (gamma/f) G V^T - t A`, `t = c / (f F)`, `c = <G, out>`; causal: per row, `t` a reverse cumulative sum.
pub(crate) fn infsa_backward(
    call: &Call<'_>,
    m: &Infsa,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let Gradients { dq, dk, dv, mut extras } = gradients;
    hop_backward(call, m, saved, Targets { dq, dk, dv: Some(dv) }, extras.get(Parameter::Gamma), work);
    Ok(())
}

/// [`infsa_backward`], with the gradient of the values left out on demand.
pub(crate) fn hop_backward(
    call: &Call<'_>,
    m: &Infsa,
    saved: &Saved<'_>,
    targets: Targets<'_>,
    dgamma: Option<&mut [f32]>,
    work: &mut [f32],
) {
    let shape = call.shape;
    let ([logit, chain, value, delta, factor, c], work) = cut(work, backward_sizes(&shape));
    let c: &mut [f64] = bytemuck::cast_slice_mut(c);
    let per_slice = 1 + norms(&shape, call.mask.causal);
    let rows = delta.par_chunks_mut(shape.seq_q).zip(factor.par_chunks_mut(shape.seq_q));
    let factors = logit.par_iter_mut().zip(chain.par_iter_mut()).zip(value.par_iter_mut());
    let slices = rows.zip(factors).zip(c.par_iter_mut()).zip(saved.stats.par_chunks(per_slice)).enumerate();
    slices.for_each(|(slice, ((((delta, factor), ((logit, chain), value)), c), stats))| {
        let unit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), gamma(call, m, slice));
        let (contraction, peak) =
            terms(&Head::of(call, slice), call.mask.causal, &unit, &stats[1..], saved, delta, factor);
        (*logit, *chain, *value) = (unit.logit as f32, (unit.logit * peak) as f32, peak as f32);
        *c = contraction;
    });
    if let Some(dgamma) = dgamma {
        for (h, dgamma) in dgamma.iter_mut().enumerate() {
            let total: f64 = (0..shape.batch).map(|b| c[b * shape.heads + h]).sum();
            *dgamma = (total / gamma(call, m, h)) as f32;
        }
    }
    let terms = Terms { shift: delta, delta, factor };
    let (dout, sums) = (saved.dout, Sums::default());
    let (logit, chain) = (&*logit, &*chain);
    match m.activation {
        Activation::Relu => {
            let pairing = |n: usize| Dot { norm: Frobenius(Relu), logit: logit[n], chain: chain[n] };
            backward::Stream { call, pairing, value, dout, terms }.run(targets, sums, work)
        }
        Activation::Abs => {
            let pairing = |n: usize| Dot { norm: Frobenius(Abs), logit: logit[n], chain: chain[n] };
            backward::Stream { call, pairing, value, dout, terms }.run(targets, sums, work)
        }
        Activation::Gelu => {
            let pairing = |n: usize| Dot { norm: Frobenius(Gelu), logit: logit[n], chain: chain[n] };
            backward::Stream { call, pairing, value, dout, terms }.run(targets, sums, work)
        }
    }
}

/// Fills one head's rows of [`Terms`], in units of the largest factor; returns `<dout, out>` and that factor. Where `eps`
/// dwarfs the norm it is so small that its product with small queries or keys would underflow: it is multiplied in last.
fn terms(
    head: &Head<'_>,
    causal: bool,
    unit: &Unit,
    norms: &[f32],
    saved: &Saved<'_>,
    delta: &mut [f32],
    factor: &mut [f32],
) -> (f64, f64) {
    let norm = |i: usize| unit.restore(norms[if causal { i } else { 0 }]);
    let rows = if causal { head.seq_q } else { 1 };
    let peak = match (0..rows).map(|i| unit.factor(norm(i))).fold(0.0, f64::max) {
        0.0 => 1.0,
        peak => peak,
    };
    let (mut c, mut t) = (0.0, 0.0);
    for i in (0..head.seq_q).rev() {
        let row = head.contraction(i, saved.dout, saved.out);
        c += row;
        t += unit.projection(norm(i), row) / peak;
        delta[i] = t as f32;
        factor[i] = (unit.factor(norm(i)) / peak) as f32;
    }
    if !causal {
        delta.fill(t as f32);
    }
    (c, peak)
}

/// Factors on the logits, on their gradients and on those of the values; delta and factor per row; contractions (f64).
fn backward_sizes(shape: &Shape) -> [usize; 6] {
    let (slices, rows) = (shape.slices(), shape.slices() * shape.seq_q);
    [slices, slices, slices, rows, rows, 2 * slices]
}

/// f32 of working memory of [`infsa_backward`].
pub(super) fn backward_work(shape: &Shape, tied: bool) -> usize {
    room(backward_sizes(shape)) + backward::work::<Dot<Frobenius<Gelu>>>(shape, tied)
}

/// The norms before `eps`, as `stats` holds them, in units of the affinities.
pub(crate) fn frobenius(m: &Infsa, shape: &Shape, causal: bool, stats: &[f32]) -> Vec<f64> {
    let slices = stats.chunks_exact(1 + norms(shape, causal));
    let unit = |exponent| Unit::new(m, shape.head_dim, exponent, [0; 2], 1.0);
    slices.flat_map(|s| s[1..].iter().map(move |&norm| unit(s[0]).restore(norm) * unit(s[0]).norm)).collect()
}
