//! Every token's similarity to a few landmarks, and the inverse of the landmarks' similarities to each other: linear in the
//! tokens, forward and backward, where the number of landmarks is fixed ([`reason`]). Nothing of size tokens x landmarks is stored.
//!
//! With `Cq` and `Ck` the affinities of queries and keys to the landmarks and `X` the inverse among these, `G = Cq X Ck^T`, and
//! `out = Cq T` with `T = X B` and `B = Ck^T V`. A normalisation changes little of it: degrees multiply `X` from both sides; a
//! row sum is the same product with a value of one; the variance of a column is the quadratic form of the covariance of the rows
//! of `Cq`, so that centring and whitening cost no more than products with matrices of the landmarks.
//!
//! A call is a few passes over the tokens ([`pass`]) in tiles ([`pairs`]) of any score; between them stand small products per batch
//! element and head. Landmarks ([`source`]) and inverses ([`crate::linalg`]) are the same for all.

mod activation;
mod backward;
mod forward;
mod gradients;
mod layout;
mod merge;
mod middle;
mod moments;
mod operator;
mod pairs;
mod parameters;
pub(crate) mod pass;
mod pivot;
mod plan;
mod prepare;
mod row_sums;
mod source;
pub(crate) mod tile;
pub(crate) mod values;
mod variance;

pub(crate) use operator::Preset;
pub(crate) use plan::plan;

use operator::{Core, Images};

use crate::{
    Error, Gradients, Mechanism, Parameter, Result,
    call::{Call, Saved},
    mechanism::{Landmarks, Nystrom, Structure},
    structure::dense::dot,
};

/// Calls `f` with the values of a preset through landmarks.
pub(crate) fn with_preset<R>(mechanism: &Mechanism, f: impl FnOnce((&Mechanism, &Nystrom), Preset) -> R) -> Result<R> {
    let values = mechanism.values();
    match (&values.structure, Preset::of(mechanism)) {
        (Structure::Nystrom(structure), Some(preset)) => Ok(f((&values, structure), preset)),
        _ => {
            let why = "its structure has none; use nystrom";
            Err(Error::Unsupported { mechanism: mechanism.id(), what: "landmarks", why })
        }
    }
}

/// Writes `out = gamma W v`, and what the backward pass needs.
pub(crate) fn forward(
    call: &Call<'_>,
    (m, structure): (&Mechanism, &Nystrom),
    preset: Preset,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let images = Images::of(call, m);
    Core::new(call, m, structure, preset, &images).forward(out, stats, work)?;
    if preset.decays && decays(call, m) {
        scale(call, m, out, |gamma| gamma);
    }
    Ok(())
}

/// [`forward`] of a call whose landmarks and statistics `stats` has, with other values and without a decay. Without `out`, that is
/// not written.
pub(crate) fn again(
    call: &Call<'_>,
    (m, structure): (&Mechanism, &Nystrom),
    preset: Preset,
    out: Option<&mut [f32]>,
    stats: &mut [f32],
    work: &mut [f32],
) {
    let images = Images::of(call, m);
    Core::new(call, m, structure, preset, &images).again(out, stats, work);
}

/// Writes the gradients.
pub(crate) fn backward(
    call: &Call<'_>,
    (m, structure): (&Mechanism, &Nystrom),
    preset: Preset,
    saved: &Saved<'_>,
    mut gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    if let Some(out) = gradients.extras.get(Parameter::Gamma) {
        decay_gradient(call, m, saved, out);
    }
    let images = Images::of(call, m);
    let core = Core::new(call, m, structure, preset, &images);
    let decays = preset.decays && decays(call, m);
    if !(decays || core.sizes.by_row && structure.value_conv > 0) {
        return core.backward(saved.out.dense(), saved.stats, saved.dout.dense(), gradients, work);
    }
    let (mut out, mut dout) = (saved.out.dense().to_vec(), saved.dout.dense().to_vec());
    if decays {
        scale(call, m, &mut out, f64::recip);
        scale(call, m, &mut dout, |gamma| gamma);
    }
    // What the filter has added does not pass through the operator.
    let y = core.filter().removed(&out);
    core.backward(&y, saved.stats, &dout, gradients, work)
}

/// The decay of a head.
fn gamma(call: &Call<'_>, m: &Mechanism, slice: usize) -> f64 {
    let given = call.extras.get(Parameter::Gamma).map(|gamma| gamma[slice % call.shape.heads].into());
    given.unwrap_or(m.series.gamma())
}

fn decays(call: &Call<'_>, m: &Mechanism) -> bool {
    (0..call.shape.heads).any(|head| gamma(call, m, head) != 1.0)
}

/// Multiplies a tensor of outputs by what `f` makes of every head's decay.
fn scale(call: &Call<'_>, m: &Mechanism, x: &mut [f32], f: impl Fn(f64) -> f64) {
    for (slice, x) in x.chunks_exact_mut(call.shape.seq_q * call.shape.value_dim).enumerate() {
        let factor = f(gamma(call, m, slice)) as f32;
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// `<dout, out> / gamma` of every head, over the kept queries.
fn decay_gradient(call: &Call<'_>, m: &Mechanism, saved: &Saved<'_>, to: &mut [f32]) {
    let (s, mut sums) = (&call.shape, vec![0.0; to.len()]);
    let rows =
        saved.out.dense().chunks_exact(s.value_dim).zip(saved.dout.dense().chunks_exact(s.value_dim)).enumerate();
    for (n, (out, dout)) in rows {
        let (slice, query) = (n / s.seq_q, n % s.seq_q);
        if call.mask.query.is_none_or(|keep| keep[slice / s.heads * s.seq_q + query]) {
            sums[slice % s.heads] += dot(out, dout) / gamma(call, m, slice);
        }
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
}

/// What a plan says of how the cost grows.
const fn reason(landmarks: Landmarks) -> &'static str {
    if landmarks.grow() {
        "similarities to landmarks, computed tile by tile in every pass; more tokens make more windows of one side, and with them \
         more landmarks, so that the cost is not linear in the tokens: it is with pooled landmarks of a fixed `count`"
    } else {
        "similarities to a fixed number of landmarks, computed tile by tile in every pass: linear in the tokens"
    }
}
