//! What f32 has room for in a composition: calls whose scores leave it are refused, in words that name the tensor.

use super::graph::parameter;
use crate::{
    Error, Mechanism, Parameter, Result, Shape,
    call::{Call, magnitude::largest},
    mechanism::{Manifold, Score},
    parallel,
    range::largest_landmark,
};

/// Largest logarithm of an affinity: f32 rounds it by up to 6e-8 of it, so that keys whose scores are nearer to each other are wrong.
const MOST_LOG: f64 = (1_u64 << 34) as f64;
/// Logits of linear scores, whose affinities are squared and summed.
const LOGITS: [f64; 2] = [1e-15, 1e15];
/// The same where the affinity is a square already.
const SQUARED_LOGITS: [f64; 2] = [1e-7, 1e7];
/// Squared distances in units of the score's, of which the kernels have a gradient.
const MOST_SQUARE: f64 = (1_u64 << 46) as f64;
/// What the largest distance is at least: f32 then has room for the squares of those that are a hundred times smaller.
const LEAST_DISTANCE: f64 = 1e-16;
/// Largest distance in units of the score's.
const MOST_DISTANCE: f64 = 1e17;
/// Largest distance, whatever its units: f32 holds its square.
const FARTHEST: f64 = 1e18;

/// What a score makes of the largest entries of queries and keys, and between what bounds it has to be.
struct Bound {
    got: f64,
    least: f64,
    most: f64,
    /// By which power of one tensor's entries `got` grows.
    power: f64,
    /// The largest entries of two tensors: queries and keys, or tokens and given landmarks.
    largest: [f64; 2],
    /// The names of both, as errors tell them.
    tensors: [&'static str; 2],
}

/// Whether f32 has room for what the score makes of the queries and keys that count.
pub(super) fn check(call: &Call<'_>, m: &Mechanism) -> Result<()> {
    // The first slice that does not fit is named, whatever the threads.
    parallel::try_each(0..call.shape.slices(), |slice| check_slice(call, m, slice))
}

fn check_slice(call: &Call<'_>, m: &Mechanism, slice: usize) -> Result<()> {
    let Shape { heads, head_dim, .. } = call.shape;
    let of = |p| parameter(call, m, p, slice % heads);
    let [q, k] = largest(call, slice).map(f64::from);
    bound(&m.score, head_dim, of, [q, k]).map_or(Ok(()), |bound| bound.check())?;
    // Landmarks may lie on tokens: how small they are is no matter.
    let (name, landmark) = largest_landmark(call, slice);
    let tensors = [if q >= k { "q" } else { "k" }, name];
    let bound = bound(&m.score, head_dim, of, [q.max(k), landmark.into()]);
    bound.map_or(Ok(()), |bound| Bound { least: 0.0, tensors, ..bound }.check())
}

/// The same of one query beside all keys so far, with entries up to `[q, k]`. What is too small is only so for gradients, and for sums
/// over queries.
pub(crate) fn check_row(score: &Score, dim: usize, of: impl Fn(Parameter) -> f64, largest: [f32; 2]) -> Result<()> {
    let bound = bound(score, dim, of, largest.map(f64::from));
    bound.map_or(Ok(()), |bound| Bound { least: 0.0, ..bound }.check())
}

impl Bound {
    fn check(self) -> Result<()> {
        let Self { got, least, most, power, largest: [q, k], tensors } = self;
        // Infinities and NaN among the inputs come out as they went in.
        if got == 0.0 || !got.is_finite() || (least..=most).contains(&got) {
            return Ok(());
        }
        let (bound, limit) = if got > most { ("up to", most) } else { ("from", least) };
        let (tensor, largest) = if q >= k { (tensors[0], q) } else { (tensors[1], k) };
        let limit = largest * (limit / got).powf(1.0 / power);
        let remedy = "scale or normalise queries and keys, or change the score's scale";
        Err(Error::Range { tensor, largest, bound, limit, remedy })
    }
}

/// `of` says what a parameter is.
fn bound(score: &Score, dim: usize, of: impl Fn(Parameter) -> f64, largest: [f64; 2]) -> Option<Bound> {
    let ([q, k], d) = (largest, dim as f64);
    let within = |got: f64, [least, most]: [f64; 2], power: f64| {
        Some(Bound { got, least, most, power, largest, tensors: ["q", "k"] })
    };
    let products = |limits: [f64; 2]| within(of(Parameter::Scale) * d * q * k, limits, 1.0);
    let apart = q.max(k) * 2.0;
    match score {
        Score::DotExp(_) => products([0.0, MOST_LOG]),
        Score::DotSigmoid(_) => products([0.0, LOGITS[1]]),
        Score::DotRelu(_) | Score::DotAbs(_) | Score::DotGelu(_) => products(LOGITS),
        Score::DotSquaredRelu(_) => products(SQUARED_LOGITS),
        Score::Gaussian(_) => within(of(Parameter::Scale) * d * apart * apart, [0.0, MOST_SQUARE], 2.0),
        Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Euclidean => {
            let (kappa, distance) = (of(Parameter::Kappa), apart * d.sqrt());
            let most = if score.is_gaussian() { MOST_SQUARE.sqrt() } else { MOST_DISTANCE };
            within(distance / kappa, [LEAST_DISTANCE / kappa, most.min(FARTHEST / kappa)], 1.0)
        }
        Score::Laplacian(_) => within(apart * d / of(Parameter::Lambda), [0.0, 1e30], 1.0),
        // Rows at length one, constants, and what a score from outside makes of its terms is its own to know.
        _ => None,
    }
}
