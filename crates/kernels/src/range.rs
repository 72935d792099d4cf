//! What f32 has room for: calls whose numbers leave it are refused, in words that name the tensor.
//!
//! Before a call, the largest queries and keys bound every score. After it, results have to be finite where the inputs were.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{
    Error, Parameter, Result, Shape,
    call::{
        Call, Layout, Target, View,
        magnitude::{Masked, largest},
    },
    mechanism::{
        Activation, Centering, DistanceKernel, Estimator, Fna, Form, Infsa, InfsaResolvent, Laplacian, LaplacianExact,
        Manifold, Ssa, Whitening,
    },
    parallel,
    simd::{Level, rows},
};

/// Largest score, a scaled product of a query and a key, of `softmax` and `ssa`. f32 rounds a score by up to 6e-8 of it: weights of
/// keys whose scores are nearer to each other are wrong, all others are exact, and the log-sum-exp, saved in two parts, keeps
/// four digits.
const MOST_SCORE: f64 = (1_u64 << 34) as f64;
/// Largest squared distance of `soft`, times its scale.
const MOST_SQUARE: f64 = (1_u64 << 46) as f64;
/// A row whose log-sum-exp is smaller in magnitude has no larger score (and larger negative ones have no weight).
const ORDINARY_SCORE: f32 = 1e4;
/// Largest logit of GELU, which cannot be computed in units of the largest as the other activations are.
const MOST_LOGIT: f64 = 1e36;
/// The same of causal calls, whose gradients are sums over rows with norms of very different size.
const MOST_CAUSAL_LOGIT: f64 = 1e12;
/// Magnitudes of tokens that are clustered: f32 holds squares of their differences.
const CLUSTERED: std::ops::RangeInclusive<f64> = 1e-15..=1e15;
/// Largest magnitude in causal clustering, which compares every token with running means in f32.
const MOST_RUNNING: f64 = 1e5;
/// Largest distance of `fna` in units of `kappa`.
const FARTHEST: f64 = 1e30;
/// Smallest distance in units of `lambda`: similarities `exp(-r / lambda)` near one then differ by a thousand of their roundings.
const LEAST_DIFFERENCE: f64 = 1e-4;
/// The same where what is added to a variance is too little to stand in for it: the gradient is divided by that.
const LEAST_WHITENED: f64 = 1e-2;
/// The variance from which on it is not.
const LARGE_VARIANCE: f64 = 1e-8;
/// Powers of two by which the largest token of a causal `infsa` may exceed the first, in whose unit the call is computed.
const MOST_GROWTH: i32 = 60;
/// [`Error::Range::bound`] of a limit from above.
const UP_TO: &str = "up to";

/// Whether f32 has room for what a preset makes of the queries and keys.
pub(crate) fn check(form: &Form, call: &Call<'_>) -> Result<()> {
    let dim = call.shape.head_dim;
    // The first slice that does not fit is named, whatever the threads.
    let each = |fits: &(dyn Fn(usize) -> Result<()> + Sync)| parallel::try_each(0..call.shape.slices(), fits);
    match form {
        // Without a plan each head is looked at where it is planned, while it is in the caches.
        Form::Ssa(m) if call.extras.clusters.is_some() => each(&|slice| check_clustered(call, m, slice)),
        Form::Infsa(Infsa { activation: Activation::Gelu, scale: factor, .. })
        | Form::InfsaResolvent(InfsaResolvent { activation: Activation::Gelu, scale: factor, .. }) => {
            let most = if call.mask.causal { MOST_CAUSAL_LOGIT } else { MOST_LOGIT };
            each(&|slice| products(largest(call, slice), dim, *factor, most))
        }
        Form::Infsa(_) if call.mask.causal => each(&|slice| growth(call, slice)),
        Form::Fna(m) => each(&|slice| distances(m, call, slice)),
        Form::Soft(m) | Form::SoftPp(m) => each(&|slice| squares(call, slice, m.scale_for(dim))),
        Form::Laplacian(Laplacian { lambda, centering, whitening, whiten_eps, .. })
        | Form::LaplacianExact(LaplacianExact { lambda, centering, whitening, whiten_eps, .. }) => {
            let variance = if *whitening == Whitening::None { 1.0 } else { *whiten_eps };
            each(&|slice| similarities(call, slice, *lambda, *centering, variance))
        }
        _ => Ok(()),
    }
}

/// Whether f32 has room for the scores of a slice of `ssa`, and for what is clustered.
pub(crate) fn check_clustered(call: &Call<'_>, m: &Ssa, slice: usize) -> Result<()> {
    let (largest, dim) = (largest(call, slice), call.shape.head_dim);
    products(largest, dim, m.scale, MOST_SCORE)?;
    // Along a given plan nothing is clustered, but means of tokens may be taken.
    let planned = call.extras.clusters.is_some() && m.estimator != Estimator::Centroid;
    if planned { Ok(()) } else { entries(largest, call.mask.causal) }
}

/// The same of new tokens of a cache: a query beside all keys so far, with entries up to `largest`.
pub(crate) fn check_decoded(m: &Ssa, dim: usize, largest: [f32; 2]) -> Result<()> {
    decoded_scores(dim, m.scale, largest)?;
    entries(largest, true)
}

/// Whether the scores of a query beside all keys so far, with entries up to `largest`, are at most [`MOST_SCORE`].
pub(crate) fn decoded_scores(dim: usize, scale: Option<f64>, largest: [f32; 2]) -> Result<()> {
    products(largest, dim, scale, MOST_SCORE)
}

/// Refuses a call of `softmax` with scores beyond [`MOST_SCORE`]: the log-sum-exps that it saved tell which heads may have one, and
/// the tokens of these alone are scanned.
pub(crate) fn check_rows(form: &Form, call: &Call<'_>, stats: &[f32]) -> Result<()> {
    let (Form::Softmax(m), Shape { seq_q, head_dim, .. }) = (form, call.shape) else { return Ok(()) };
    let logs = Masked::of_queries(
        call,
        View::in_one_piece(&stats[..call.shape.slices() * seq_q], call.shape.slices(), [seq_q, 1]),
    );
    let is_conspicuous = |log: &[f32]| log[0].is_nan() || log[0].abs() > ORDINARY_SCORE;
    let mut conspicuous = (0..logs.slices()).filter(|&slice| logs.rows(slice).any(is_conspicuous));
    conspicuous.try_for_each(|slice| products(largest(call, slice), head_dim, m.scale, MOST_SCORE))
}

/// Whether all products of queries and keys of `dim` channels, with entries up to `largest`, times `scale` (`dim^-1/2` unless it is given),
/// are at most `most`.
fn products(largest: [f32; 2], dim: usize, scale: Option<f64>, most: f64) -> Result<()> {
    let scale = scale.unwrap_or((dim as f64).powf(-0.5));
    let [q, k] = largest.map(f64::from);
    let of_one = scale * dim as f64;
    // Infinities and NaN among the inputs come out as they went in.
    if !(q * k).is_finite() || of_one * q * k <= most {
        return Ok(());
    }
    let (tensor, largest, other) = if q >= k { ("q", q, k) } else { ("k", k, q) };
    let remedy = "scale or normalise queries and keys, or set a smaller `scale`";
    Err(Error::Range { tensor, largest, bound: UP_TO, limit: most / of_one / other, remedy })
}

/// Whether squares of the differences between tokens fit, whose entries are up to `largest`.
fn entries(largest: [f32; 2], causal: bool) -> Result<()> {
    let (least, most) = (*CLUSTERED.start(), if causal { MOST_RUNNING } else { *CLUSTERED.end() });
    for (tensor, largest) in ["q", "k"].into_iter().zip(largest.map(f64::from)) {
        if largest == 0.0 || !largest.is_finite() || (least..=most).contains(&largest) {
            continue;
        }
        let (bound, limit) = if largest > 1.0 { (UP_TO, most) } else { ("from", least) };
        let remedy = "scale queries and keys: squares of what is clustered are summed and compared";
        return Err(Error::Range { tensor, largest, bound, limit, remedy });
    }
    Ok(())
}

/// Whether a causal slice can be computed in units that no token takes from a later one.
fn growth(call: &Call<'_>, slice: usize) -> Result<()> {
    for (tensor, side) in [("q", Masked::queries(call)), ("k", Masked::keys(call))] {
        let [first, last] = side.first_and_largest(call.level, slice);
        if last - first > MOST_GROWTH && last < 128 {
            let [largest, limit] = [last, first + MOST_GROWTH].map(|exponent| 2f64.powi(exponent));
            let remedy =
                "no row may know of later tokens, so that the first sets the unit; scale or normalise the tokens";
            return Err(Error::Range { tensor, largest, bound: UP_TO, limit, remedy });
        }
    }
    Ok(())
}

/// Whether the squared distances of `soft` have a slope in the scale: that of far pairs is nothing, but the rounding of what it is
/// summed from grows with them.
fn squares(call: &Call<'_>, slice: usize, scale: f64) -> Result<()> {
    let scale = of_head(call, Parameter::Scale, slice).unwrap_or(scale);
    let limit = (MOST_SQUARE / (4.0 * scale * call.shape.head_dim as f64)).sqrt();
    for (tensor, largest) in [("q", largest(call, slice)[0]), largest_landmark(call, slice)] {
        let largest = f64::from(largest);
        if largest > limit && largest.is_finite() {
            let remedy = "squared distances times `scale` are too large: scale the tokens, or set a smaller `scale`";
            return Err(Error::Range { tensor, largest, bound: UP_TO, limit, remedy });
        }
    }
    Ok(())
}

/// The name of given landmarks, and the largest magnitude of those of a slice; 0 where none are given.
pub(crate) fn largest_landmark(call: &Call<'_>, slice: usize) -> (&'static str, f32) {
    let given = call.extras.get(Parameter::GivenLandmarks).unwrap_or_default();
    let part = if given.is_empty() { 0..0 } else { Parameter::GivenLandmarks.part(given.len(), &call.shape, slice) };
    (Parameter::GivenLandmarks.name(), rows::max_abs(call.level, &given[part]))
}

/// Whether similarities of the Laplacian kernel, all near one where tokens are close, still differ when their mean is taken off: that
/// over the queries of each key, or over the keys of each query. `added` is added to variances.
fn similarities(call: &Call<'_>, slice: usize, lambda: f64, centering: Centering, added: f64) -> Result<()> {
    let (tensor, side) = match centering {
        Centering::PerKey => ("q", Masked::queries(call)),
        Centering::PerQuery => ("k", Masked::keys(call)),
        Centering::None => return Ok(()),
    };
    let least = if added < LARGE_VARIANCE { LEAST_WHITENED } else { LEAST_DIFFERENCE };
    differences(call, slice, lambda, least, (tensor, side))
}

/// Whether one of the tokens of a side is at least `least` times the bandwidth from the first. Those that coincide with it are
/// no matter: their differences have no rounding.
fn differences(call: &Call<'_>, slice: usize, lambda: f64, least: f64, side: (&'static str, Masked<'_>)) -> Result<()> {
    let (tensor, side) = side;
    let Some(origin) = side.rows(slice).next() else { return Ok(()) };
    let lambda = of_head(call, Parameter::Lambda, slice).unwrap_or(lambda);
    let limit = least * lambda / call.shape.head_dim as f64;
    if side.leaves(slice, origin, limit) {
        return Ok(());
    }
    let apart = side.extent(slice, origin);
    if apart == 0.0 || !origin.iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    let remedy = "similarities differ by too little of their rounding: scale the tokens, or set a smaller `lambda`";
    Err(Error::Close { tensor, apart, limit, remedy })
}

/// What a call gives for the head of a slice.
fn of_head(call: &Call<'_>, parameter: Parameter, slice: usize) -> Option<f64> {
    call.extras.get(parameter).map(|values| values[slice % call.shape.heads].into())
}

/// Whether the distances in units of kappa, and what the kernel makes of them, fit.
fn distances(m: &Fna, call: &Call<'_>, slice: usize) -> Result<()> {
    let Shape { head_dim, heads, .. } = call.shape;
    let [kappa, _] = m.of_head(&call.extras, head_dim, heads, slice % heads);
    let [q, k] = largest(call, slice).map(f64::from);
    let most = q.max(k);
    let plane = m.manifold == Manifold::Euclidean;
    if !most.is_finite() || most == 0.0 {
        return Ok(());
    }
    let tensor = if q >= k { "q" } else { "k" };
    // Distances are at most this many times the largest entry.
    let farthest = if plane { 2.0 * (call.shape.head_dim as f64).sqrt() } else { std::f64::consts::PI / most };
    let limit = kappa / farthest * if m.is_gaussian() { MOST_SCORE.sqrt() } else { FARTHEST };
    if most > limit {
        let remedy = "distances are too many times `kappa`: scale the tokens, or set a larger `kappa`";
        return Err(Error::Range { tensor, largest: most, bound: UP_TO, limit, remedy });
    }
    let limit = kappa * if m.kernel == DistanceKernel::Levy && !m.is_gaussian() { 1e-40 } else { 1e-24 };
    if plane && most < limit {
        let remedy = "distances are too small a part of `kappa`: scale the tokens, or set a smaller `kappa`";
        return Err(Error::Range { tensor, largest: most, bound: "from", limit, remedy });
    }
    Ok(())
}

/// Whether the squares of a slice's affinities kept their digits, of which every norm is given with the number of tokens that it is
/// over, in units of the largest product that their queries and keys could have: they lose them where few tokens are far larger
/// than all others, and meet no key.
pub(crate) fn check_norms(call: &Call<'_>, slice: usize, norms: impl Iterator<Item = (usize, f64)>) -> Result<()> {
    /// Smallest norm whose square f32 holds with all its digits.
    const LEAST_NORM: f64 = 1e-17;
    let sides = [Masked::queries(call), Masked::keys(call)];
    let spreads = |tokens| sides.map(|side| side.spread(call.level, slice, tokens));
    // Rows that meet nothing have no norm. They are many where tokens are padded, and right if no token is so large.
    let nothing = |norm: f64, [q, k]: [f64; 2]| norm == 0.0 && q * k * LEAST_NORM < 1.0;
    let mut of_all = None;
    for (tokens, norm) in norms.filter(|&(_, norm)| norm < LEAST_NORM) {
        if nothing(norm, *of_all.get_or_insert_with(|| spreads(usize::MAX))) {
            continue;
        }
        let of_these = spreads(tokens);
        if nothing(norm, of_these) {
            continue;
        }
        let side = usize::from(of_these[1] > of_these[0]);
        let unit = call.units.map_or(0, |units| units[slice][side]);
        let largest = f64::from(largest(call, slice)[side]) * 2f64.powi(unit);
        let remedy = "nothing is left of tokens that are so much smaller: scale or normalise the tokens";
        let limit = largest / of_these[side] * 1e8;
        return Err(Error::Range { tensor: ["q", "k"][side], largest, bound: UP_TO, limit, remedy });
    }
    Ok(())
}

/// [`Error::Overflow`] where results are no numbers although the call's tensors are.
pub(crate) fn check_results<'x>(
    call: &Call<'_>,
    dout: Option<View<'_>>,
    results: impl IntoIterator<Item = (&'static str, &'x [f32])>,
) -> Result<()> {
    results.into_iter().try_for_each(|(tensor, x)| check_finite(call.level, tensor, x, || inputs_finite(call, dout)))
}

/// [`check_results`] of a tensor that lies anywhere.
pub(crate) fn check_written(
    call: &Call<'_>,
    dout: Option<View<'_>>,
    tensor: &'static str,
    x: &mut Target<'_>,
) -> Result<()> {
    if let Some(x) = x.as_slice() {
        return check_results(call, dout, [(tensor, &*x)]);
    }
    let first = AtomicUsize::new(usize::MAX);
    let Layout { tokens, channels, .. } = *x.layout();
    x.for_each_row(|slice, token, row| {
        if call.level.dispatch(|| largest_bits(row)) >= INFINITE {
            let at = row.iter().position(|x| !x.is_finite()).unwrap_or(0);
            first.fetch_min((slice * tokens + token) * channels + at, Ordering::Relaxed);
        }
    });
    match first.into_inner() {
        usize::MAX => Ok(()),
        _ if !inputs_finite(call, dout) => Ok(()),
        index => Err(Error::Overflow { tensor, index }),
    }
}

/// The bits of infinity.
const INFINITE: u32 = 0x7f80_0000;

/// Of the bits without the sign the largest, which the compiler makes vectors of.
fn largest_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff))
}

/// [`Error::Overflow`] where a result is no number although the inputs are.
pub(crate) fn check_finite(
    level: Level,
    tensor: &'static str,
    x: &[f32],
    inputs_finite: impl Fn() -> bool,
) -> Result<()> {
    if parallel::all(x.chunks(1 << 15), |x| level.dispatch(|| largest_bits(x)) < INFINITE) || !inputs_finite() {
        return Ok(());
    }
    let index = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
    Err(Error::Overflow { tensor, index })
}

/// [`check_results`] of rows of which the first and the last kept one tell of all: copies, or sums that run along the tokens.
pub(crate) fn check_ends(call: &Call<'_>, dout: Option<View<'_>>, tensor: &'static str, x: Masked<'_>) -> Result<()> {
    (0..x.slices()).try_for_each(|slice| {
        let mut rows = x.rows(slice);
        let ends = [rows.next(), rows.next_back()];
        check_results(call, dout, ends.into_iter().flatten().map(|row| (tensor, row)))
    })
}

/// Whether all that counts of a call's tensors are numbers.
fn inputs_finite(call: &Call<'_>, dout: Option<View<'_>>) -> bool {
    let dout = Masked::of_queries(call, dout.unwrap_or(View::none()));
    let sides = [Masked::queries(call), Masked::keys(call), Masked::values(call), dout];
    let finite = |x: &[f32]| x.iter().all(|x| x.is_finite());
    let tokens = sides.into_iter().all(|side| (0..side.slices()).all(|slice| side.rows(slice).all(finite)));
    // An absent pair's bias is -inf.
    let absent = |parameter, x: f32| parameter == Parameter::Bias && x == f32::NEG_INFINITY;
    tokens && call.extras.iter().all(|(parameter, x)| x.iter().all(|&x| x.is_finite() || absent(parameter, x)))
}
