//! Pure InfSA: dot + activation, the whole matrix over its Frobenius norm. "Infinite Self-Attention", eq. 11 and 12.
//!
//! The norm is proof against overflow: a homogeneous activation lets each head work on logits divided by a power of two
//! close to `max|q| max|k|` (exact, and without `scale`), with `eps` divided likewise; GELU squares in f64. A causal row is
//! worked on in units of its own, by the tokens up to it, so that no later token changes a bit of it; its norm is saved in
//! units of the whole head.

use super::{
    backward::{self, Sums, Targets, Terms},
    bf16, forward,
    head::{Head, positions},
    normalise::Frobenius,
    pairing::Dot,
};
use crate::{
    Parameter, Precision, Result, Shape,
    call::{Call, GradientTargets, Saved, Target, magnitude},
    mechanism::{Activation, Infsa},
    parallel, range, rescale,
    score::{Abs, Gelu, Relu},
    scratch::{cut, scratch_len},
    simd::bf16::Bf16Products,
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
    homogeneous: bool,
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
                homogeneous: true,
            },
            false => Self { logit: scale, eps: m.eps, norm: 1.0, saved: power, gamma, homogeneous: false },
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

    /// `gamma / (F + eps)`, the factor on activations of logits whose norm is `norm`. Where that is 0, so are all activations, and
    /// all slopes but those of GELU.
    pub fn factor(&self, norm: f64) -> f64 {
        let nothing = norm == 0.0 && (self.homogeneous || self.eps == 0.0);
        if nothing { 0.0 } else { self.gamma / (norm + self.eps) }
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
    rescale::homogeneous(m.activation)
}

/// Whether every row has a unit of its own.
fn by_row(call: &Call<'_>, m: &Infsa) -> bool {
    call.mask.causal && homogeneous(m)
}

/// Elements of the factors on the queries' products, one per query where every row has a unit of its own.
fn row_len(shape: &Shape, m: &Infsa, causal: bool) -> usize {
    if causal && homogeneous(m) { shape.slices() * shape.seq_q } else { 0 }
}

/// Writes one over the unit of every row of a head, a power of two. Returns the exponent of the last, the largest.
fn write_units(call: &Call<'_>, slice: usize, rows: &mut [f32]) -> i32 {
    let mut last = 0;
    for (row, exponent) in rows.iter_mut().zip(magnitude::row_exponents(call, slice)) {
        (*row, last) = (2f32.powi(-exponent), exponent);
    }
    last
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
    // Only zeros (or no tokens): any unit will do. The bounds keep the unit a normal f32.
    let [q, k] = magnitude::largest(call, slice).map(magnitude::exponent_of);
    let units = call.units(slice);
    ((q + k).clamp(-126, 126) + units[0] + units[1]) as f32
}

/// `out` before the division by the norm, and the sum of squares of every row's affinities, of the given `slices`.
pub(crate) fn unnormalised(
    call: &Call<'_>,
    m: &Infsa,
    (logit, rows): (&[f32], &[f32]),
    slices: &[u32],
    out: &Target<'_>,
    squares: &mut [f64],
    work: &mut [f32],
) {
    let rows = |n: usize| rows_of(rows, call.shape.seq_q, n);
    macro_rules! run {
        ($score:expr) => {{
            let pairing = |n: usize| Dot { norm: Frobenius($score), logit: logit[n], rows: rows(n), chain: 1.0 };
            forward::Stream { call, pairing, slices }.run_products(out, squares, work)
        }};
    }
    match m.activation {
        Activation::Relu => run!(Relu),
        Activation::Abs => run!(Abs),
        Activation::Gelu => run!(Gelu),
    }
}

/// A head's part of the factors on its rows, where there are any.
fn rows_of(rows: &[f32], seq: usize, slice: usize) -> &[f32] {
    if rows.is_empty() { rows } else { &rows[slice * seq..][..seq] }
}

/// f32 of working memory of [`unnormalised`].
pub(crate) fn unnormalised_work(shape: &Shape, precision: Precision) -> usize {
    bf16::forward_work::<Dot<'_, Frobenius<Gelu>>>(shape, precision)
}

/// Writes `out` and, as `stats`, per batch element and head, the exponent and the norms, in units of the logits.
pub(crate) fn infsa_forward(
    call: &Call<'_>,
    m: &Infsa,
    out: &Target<'_>,
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let shape = call.shape;
    let by_row = by_row(call, m);
    let ([logit, squares, slices, rows], work) = cut(work, forward_sizes(&shape, m, call.mask.causal));
    let all = positions(0..shape.slices(), None, slices);
    let per_slice = 1 + norms(&shape, call.mask.causal);
    parallel::each(logit.iter_mut().zip(stats.chunks_mut(per_slice)).enumerate(), |(slice, (logit, stats))| {
        stats[0] = exponent(call, m, slice);
        *logit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), 1.0).logit as f32;
    });
    if by_row {
        logit.fill(1.0);
        parallel::each(rows.chunks_mut(shape.seq_q).enumerate(), |(slice, rows)| _ = write_units(call, slice, rows));
    }
    let squares: &mut [f64] = bytemuck::cast_slice_mut(squares);
    unnormalised(call, m, (logit, rows), all, out, squares, work);
    let slices = stats.chunks_mut(per_slice).zip(squares.chunks_mut(shape.seq_q));
    parallel::each(slices.enumerate(), |(slice, (stats, squares))| {
        let shares = Shares::of(rows_of(rows, shape.seq_q, slice));
        squares.iter_mut().enumerate().for_each(|(i, square)| *square *= shares.at(i).powi(2));
        let (mut sum, total) = (0.0, squares.iter().sum::<f64>());
        stats[0] = saved_exponent(m, stats[0], total.sqrt());
        let unit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), gamma(call, m, slice));
        for i in 0..shape.seq_q {
            sum += squares[i];
            let norm = if call.mask.causal { sum.sqrt() } else { total.sqrt() };
            stats[1 + if call.mask.causal { i } else { 0 }] = unit.save(norm);
            let factor = (unit.factor(norm) * shares.at(i)) as f32;
            // SAFETY: every slice has rows of its own.
            unsafe { out.row(slice, i) }.iter_mut().for_each(|x| *x *= factor);
        }
    });
    check_norms(call, m, rows, stats)
}

/// Whether norms, as `stats` holds them, are of squares that f32 has in the units of their `rows`.
pub(crate) fn check_norms(call: &Call<'_>, m: &Infsa, rows: &[f32], stats: &[f32]) -> Result<()> {
    if !homogeneous(m) {
        return Ok(());
    }
    let mut slices = stats.chunks_exact(stats.len() / call.shape.slices()).enumerate();
    slices.try_for_each(|(slice, stats)| {
        let (shares, norms) = (Shares::of(rows_of(rows, call.shape.seq_q, slice)), &stats[1..]);
        let tokens = |i: usize| if norms.len() == 1 { usize::MAX } else { i + 1 };
        let norms = norms.iter().enumerate().map(|(i, &norm)| (tokens(i), f64::from(norm) / shares.at(i)));
        range::check_norms(call, slice, norms)
    })
}

/// The units of a head's rows in that of the whole head.
struct Shares<'a> {
    rows: &'a [f32],
    whole: f64,
}

impl<'a> Shares<'a> {
    /// From one over the units, of which the last row has the head's; none where all rows have it.
    fn of(rows: &'a [f32]) -> Self {
        Self { rows, whole: rows.last().map_or(1.0, |&last| last.into()) }
    }

    fn at(&self, i: usize) -> f64 {
        self.rows.get(i).map_or(1.0, |&row| self.whole / f64::from(row))
    }
}

/// Factors on the logits; sums of squares (f64); slices; factors on the rows.
fn forward_sizes(shape: &Shape, m: &Infsa, causal: bool) -> [usize; 4] {
    [shape.slices(), 2 * shape.slices() * shape.seq_q, shape.slices(), row_len(shape, m, causal)]
}

/// f32 of working memory of [`infsa_forward`].
pub(super) fn forward_work(shape: &Shape, m: &Infsa, causal: bool, precision: Precision) -> usize {
    scratch_len(forward_sizes(shape, m, causal)) + unnormalised_work(shape, precision)
}

/// `dA = (gamma/f) G V^T - t A`, `t = c / (f F)`, `c = <G, out>`; causal: per row, `t` a reverse cumulative sum.
pub(crate) fn infsa_backward(
    call: &Call<'_>,
    m: &Infsa,
    saved: &Saved<'_>,
    gradients: GradientTargets<'_>,
    work: &mut [f32],
) -> Result<()> {
    let GradientTargets { dq, dk, dv, mut extras } = gradients;
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
    let by_row = by_row(call, m);
    let ([logit, chain, value, delta, factor, c, units], work) = cut(work, backward_sizes(&shape, m, call.mask.causal));
    let [c, chain]: [&mut [f64]; 2] = [c, chain].map(bytemuck::cast_slice_mut);
    let per_slice = 1 + norms(&shape, call.mask.causal);
    if by_row {
        parallel::each(units.chunks_mut(shape.seq_q).enumerate(), |(slice, units)| _ = write_units(call, slice, units));
    }
    let units = &*units;
    let rows = delta.chunks_mut(shape.seq_q).zip(factor.chunks_mut(shape.seq_q));
    let factors = logit.iter_mut().zip(chain.iter_mut()).zip(value.iter_mut());
    let slices = rows.zip(factors).zip(c.iter_mut()).zip(saved.stats.chunks(per_slice)).enumerate();
    parallel::each(slices, |(slice, ((((delta, factor), ((logit, chain), value)), c), stats))| {
        let unit = Unit::new(m, shape.head_dim, stats[0], call.units(slice), gamma(call, m, slice));
        let shares = Shares::of(rows_of(units, shape.seq_q, slice));
        let peak;
        let head = (&Head::of(call, slice), call.bf16);
        (*c, peak) = terms(head, (&unit, &shares), &stats[1..], saved, [delta, factor]);
        let of_logit = if by_row { 1.0 } else { unit.logit };
        (*logit, *chain, *value) = (of_logit as f32, of_logit * peak, peak as f32);
    });
    let chain = &*chain;
    if let Some(dgamma) = dgamma {
        for (h, dgamma) in dgamma.iter_mut().enumerate() {
            let total: f64 = (0..shape.batch).map(|b| c[b * shape.heads + h]).sum();
            *dgamma = (total / gamma(call, m, h)) as f32;
        }
    }
    let terms = Terms { shift: delta, delta, factor };
    let dout = saved.dout;
    // With the units that queries and keys were divided by, the factor on their gradients may fit f32 where it alone does not.
    let apart = call.units.is_some();
    let (logit, rows) = (&*logit, |n: usize| rows_of(units, shape.seq_q, n));
    let factor_of = |n: usize| if apart { 1.0 } else { chain[n] as f32 };
    let Targets { mut dq, mut dk, dv } = targets;
    let targets = Targets { dq: dq.reborrow(), dk: dk.as_mut().map(Target::reborrow), dv };
    macro_rules! run {
        ($score:expr) => {{
            let pairing =
                |n: usize| Dot { norm: Frobenius($score), logit: logit[n], rows: rows(n), chain: factor_of(n) };
            backward::Stream { call, pairing, value, dout, terms }.run_products(targets, Sums::default(), work)
        }};
    }
    match m.activation {
        Activation::Relu => run!(Relu),
        Activation::Abs => run!(Abs),
        Activation::Gelu => run!(Gelu),
    }
    if apart {
        for (side, x) in [(0, Some(dq)), (1, dk)] {
            let factor = |n: usize| chain[n] * 2f64.powi(-call.units(n)[side]);
            x.into_iter().for_each(|mut x| rescale::multiply_rows(&mut x, factor));
        }
    }
}

/// Fills one head's rows of [`Terms`], in units of the largest factor; returns `<dout, out>` and that factor. Where `eps`
/// dwarfs the norm it is so small that its product with small queries or keys would underflow: it is multiplied in last.
fn terms(
    (head, bf16): (&Head<'_>, Option<Bf16Products>),
    (unit, shares): (&Unit, &Shares<'_>),
    norms: &[f32],
    saved: &Saved<'_>,
    [delta, factor]: [&mut [f32]; 2],
) -> (f64, f64) {
    let causal = norms.len() > 1;
    let norm = |i: usize| unit.restore(norms[if causal { i } else { 0 }]);
    let rows = if causal { head.seq_q } else { 1 };
    let peak = match (0..rows).map(|i| unit.factor(norm(i)) * shares.at(i)).fold(0.0, f64::max) {
        0.0 => 1.0,
        // A power of two, so that a later row, whose factor it may be, changes no bit of an earlier one.
        peak => 2f64.powf(peak.log2().ceil()),
    };
    let (mut c, mut t) = (0.0, 0.0);
    for i in (0..head.seq_q).rev() {
        factor[i] = (unit.factor(norm(i)) * shares.at(i) / peak) as f32;
        let row = match bf16 {
            // As the products with it read the gradient, so that both cancel.
            Some(products) if factor[i] != 0.0 => {
                head.rounded_contraction(products, i, (saved.dout, factor[i]), saved.out) / f64::from(factor[i])
            }
            _ => head.contraction(i, saved.dout, saved.out),
        };
        c += row;
        t += unit.projection(norm(i), row) / peak;
        delta[i] = (t * shares.at(i).powi(2)) as f32;
    }
    if !causal {
        delta.fill(t as f32);
    }
    (c, peak)
}

/// Factors on the logits, on their gradients (f64) and on those of the values; delta and factor per row; contractions (f64);
/// factors on the rows.
fn backward_sizes(shape: &Shape, m: &Infsa, causal: bool) -> [usize; 7] {
    let (slices, rows) = (shape.slices(), shape.slices() * shape.seq_q);
    [slices, 2 * slices, slices, rows, rows, 2 * slices, row_len(shape, m, causal)]
}

/// f32 of working memory of [`infsa_backward`].
pub(super) fn backward_work(shape: &Shape, m: &Infsa, causal: bool, precision: Precision) -> usize {
    let streams = bf16::backward_work::<Dot<'_, Frobenius<Gelu>>>(shape, m.tied, precision);
    scratch_len(backward_sizes(shape, m, causal)) + streams
}

/// The norms before `eps`, as `stats` holds them, in units of the affinities.
pub(crate) fn frobenius(m: &Infsa, shape: &Shape, causal: bool, stats: &[f32]) -> Vec<f64> {
    let slices = stats.chunks_exact(1 + norms(shape, causal));
    let unit = |exponent| Unit::new(m, shape.head_dim, exponent, [0; 2], 1.0);
    slices.flat_map(|s| s[1..].iter().map(move |&norm| unit(s[0]).restore(norm) * unit(s[0]).norm)).collect()
}
