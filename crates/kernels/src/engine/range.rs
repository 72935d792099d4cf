//! What f32 has room for in a composition: calls whose scores leave it are refused, in words that name the tensor.

use rayon::prelude::*;

use super::graph::parameter;
use crate::{
    Error, Parameter, Result,
    call::{Call, magnitude::largest},
    mechanism::{Composed, Manifold, Score},
};

/// Largest logarithm of an affinity: f32 rounds it by up to 6e-8 of it, so that keys whose scores are nearer to each other are wrong.
const MOST_LOG: f64 = (1_u64 << 34) as f64;
/// Logits of linear scores, whose affinities are squared and summed.
const LOGITS: [f64; 2] = [1e-15, 1e15];
/// The same where the affinity is a square already.
const SQUARED_LOGITS: [f64; 2] = [1e-7, 1e7];
/// Squared distances in units of the score's, of which the kernels have a gradient.
const MOST_SQUARE: f64 = (1_u64 << 46) as f64;
/// Distances in units of the score's.
const DISTANCES: [f64; 2] = [1e-29, 1e17];

/// What a score makes of the largest entries of queries and keys, and between what bounds it has to be.
struct Bound {
    got: f64,
    least: f64,
    most: f64,
    /// By which power of one tensor's entries `got` grows.
    power: f64,
}

/// Whether f32 has room for what the score makes of the queries and keys that count.
pub(super) fn check(call: &Call<'_>, m: &Composed) -> Result<()> {
    let slices = (0..call.shape.slices()).into_par_iter();
    // The first slice that does not fit is named, whatever the threads.
    slices.map(|slice| check_slice(call, m, slice)).find_first(Result::is_err).unwrap_or(Ok(()))
}

fn check_slice(call: &Call<'_>, m: &Composed, slice: usize) -> Result<()> {
    let [q, k] = largest(call, slice).map(f64::from);
    let Some(bound) = bound(call, m, slice, [q, k]) else { return Ok(()) };
    let Bound { got, least, most, power } = bound;
    // Infinities and NaN among the inputs come out as they went in.
    if got == 0.0 || !got.is_finite() || (least..=most).contains(&got) {
        return Ok(());
    }
    let (bound, limit) = if got > most { ("up to", most) } else { ("from", least) };
    let (tensor, largest) = if q >= k { ("q", q) } else { ("k", k) };
    let limit = largest * (limit / got).powf(1.0 / power);
    let remedy = "scale or normalise queries and keys, or change the score's scale";
    Err(Error::Range { tensor, largest, bound, limit, remedy })
}

fn bound(call: &Call<'_>, m: &Composed, slice: usize, [q, k]: [f64; 2]) -> Option<Bound> {
    let (heads, d) = (call.shape.heads, call.shape.head_dim as f64);
    let of = |p| parameter(call, m, p, slice % heads);
    let products =
        |[least, most]: [f64; 2]| Some(Bound { got: of(Parameter::Scale) * d * q * k, least, most, power: 1.0 });
    let apart = q.max(k) * 2.0;
    match &m.score {
        Score::DotExp(_) => products([0.0, MOST_LOG]),
        Score::DotSigmoid(_) => products([0.0, LOGITS[1]]),
        Score::DotRelu(_) | Score::DotAbs(_) | Score::DotGelu(_) => products(LOGITS),
        Score::DotSquaredRelu(_) => products(SQUARED_LOGITS),
        Score::Gaussian(_) => {
            Some(Bound { got: of(Parameter::Scale) * d * apart * apart, least: 0.0, most: MOST_SQUARE, power: 2.0 })
        }
        Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Euclidean => {
            let [least, most] = DISTANCES;
            Some(Bound { got: apart * d.sqrt() / of(Parameter::Kappa), least, most, power: 1.0 })
        }
        Score::Laplacian(_) => {
            Some(Bound { got: apart * d / of(Parameter::Lambda), least: 0.0, most: 1e30, power: 1.0 })
        }
        // Rows at length one, constants, and what a score from outside makes of its terms is its own to know.
        _ => None,
    }
}
