//! What f32 has room for: calls whose numbers leave it are refused, in words that name the tensor.
//!
//! Before a call, the largest queries and keys bound every score. After it, results have to be finite where the inputs were.
//! Between the two, output gradients are brought to an order of one where their products with values would be lost: the
//! gradients are linear in them.

use rayon::prelude::*;

use crate::{
    Error, Gradients, Mechanism, Parameter, Result, Shape,
    mechanism::{
        Activation, Centering, DistanceKernel, Estimator, Fna, Infsa, InfsaResolvent, Laplacian, LaplacianExact,
        Manifold,
    },
    operator::Call,
    rescale::{self, largest, largest_of, prefixes},
    simd::{Level, rows},
    structure::dense::fna_scale,
};

/// Scores of `softmax` and its like: the sums of rows, saved in two parts, keep four digits there. A score itself is rounded by some
/// 1e-7 of this; weights of keys that lie as near each other are off, those of all others exact.
const MOST_SCORE: f64 = (1_u64 << 34) as f64;
/// Squared distances of `soft`, times its scale.
const MOST_SQUARE: f64 = (1_u64 << 46) as f64;
/// Where no row has a larger score, no product that cancels in one had digits enough to matter either.
const ORDINARY_SCORE: f32 = 1e4;
/// Logits of an activation that has a unit.
const MOST_LOGIT: f64 = 1e36;
/// The same where every row has a norm of its own, and its gradient a sum over the rows behind it.
const MOST_CAUSAL_LOGIT: f64 = 1e12;
/// What clusters are made of: squares of it are summed, and squares of differences compared.
const CLUSTERED: std::ops::RangeInclusive<f64> = 1e-15..=1e15;
/// The same where means run along the tokens, from which a later one is told in f32.
const MOST_RUNNING: f64 = 1e5;
/// Distances in units of kappa whose logarithms are still taken of what f32 holds.
const FARTHEST: f64 = 1e30;
/// The distance, in units of lambda, at which similarities near one differ by a thousand of their roundings.
const LEAST_DIFFERENCE: f64 = 1e-4;
const UP_TO: &str = "up to";
/// By how many powers of two a causal sequence may grow beyond its first token, on either side.
const MOST_GROWTH: i32 = 60;

/// Whether f32 has room for what `mechanism` makes of the queries and keys.
pub(crate) fn check(mechanism: &Mechanism, call: &Call<'_>) -> Result<()> {
    let dim = call.shape.head_dim;
    let scale = |scale: Option<f64>| scale.unwrap_or((dim as f64).powf(-0.5));
    // The first slice that does not fit is named, whatever the threads.
    let each = |fits: &(dyn Fn(usize) -> Result<()> + Sync)| {
        (0..call.shape.slices()).into_par_iter().map(fits).find_first(Result::is_err).unwrap_or(Ok(()))
    };
    match mechanism {
        Mechanism::Ssa(m) => each(&|slice| {
            let largest = largest(call, slice);
            products(largest, dim, scale(m.scale), MOST_SCORE)?;
            // Along a given plan nothing is clustered, but means of tokens may be taken.
            let planned = call.extras.clusters.is_some() && m.estimator != Estimator::Centroid;
            if planned { Ok(()) } else { entries(largest, call.mask.causal) }
        }),
        Mechanism::Infsa(Infsa { activation: Activation::Gelu, scale: factor, .. })
        | Mechanism::InfsaResolvent(InfsaResolvent { activation: Activation::Gelu, scale: factor, .. }) => {
            let most = if call.mask.causal { MOST_CAUSAL_LOGIT } else { MOST_LOGIT };
            each(&|slice| products(largest(call, slice), dim, scale(*factor), most))
        }
        Mechanism::Infsa(_) if call.mask.causal => each(&|slice| growth(call, slice)),
        Mechanism::Fna(m) => each(&|slice| distances(m, call, slice)),
        Mechanism::Soft(m) | Mechanism::SoftPp(m) => each(&|slice| squares(call, slice, m.scale_for(dim))),
        Mechanism::Laplacian(Laplacian { lambda, centering, .. })
        | Mechanism::LaplacianExact(LaplacianExact { lambda, centering, .. })
            if *centering != Centering::None =>
        {
            each(&|slice| differences(call, slice, *lambda))
        }
        _ => Ok(()),
    }
}

/// What [`check`] is for `softmax`, from its log-sum-exps, which are fewer than the tokens' entries by their width: only where one is
/// large, or no number though its row counts, the tokens are looked at.
pub(crate) fn check_rows(mechanism: &Mechanism, call: &Call<'_>, stats: &[f32]) -> Result<()> {
    let (Mechanism::Softmax(m), Shape { seq_q, head_dim, heads, .. }) = (mechanism, call.shape) else { return Ok(()) };
    let scale = m.scale.unwrap_or((head_dim as f64).powf(-0.5));
    let logs = stats[..call.shape.slices() * seq_q].chunks_exact(seq_q).enumerate();
    let mut conspicuous = logs.filter(|(slice, logs)| {
        let counts = |i: usize| call.mask.query.is_none_or(|keep| keep[slice / heads * seq_q + i]);
        logs.iter().enumerate().any(|(i, log)| (log.is_nan() || log.abs() > ORDINARY_SCORE) && counts(i))
    });
    conspicuous.try_for_each(|(slice, _)| products(largest(call, slice), head_dim, scale, MOST_SCORE))
}

/// Whether all products of queries and keys of `dim` channels, with entries up to `largest`, times `scale`, are at most `most`.
fn products(largest: [f32; 2], dim: usize, scale: f64, most: f64) -> Result<()> {
    let [q, k] = largest.map(f64::from);
    let of_one = scale * dim as f64;
    if !(of_one * q * k > most && (q * k).is_finite()) {
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
    let [q, k] = prefixes(call, slice);
    for (tensor, [first, last]) in [("q", q), ("k", k)] {
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
    let given = call.extras.get(Parameter::GivenLandmarks);
    let given = given.map_or(0.0, |all| {
        largest_of(call.level, &all[Parameter::GivenLandmarks.part(all.len(), &call.shape, slice)], 1, None)
    });
    for (tensor, largest) in [("q", largest(call, slice)[0]), (Parameter::GivenLandmarks.name(), given)] {
        let largest = f64::from(largest);
        if largest > limit && largest.is_finite() {
            let remedy = "squared distances times `scale` are too large: scale the tokens, or set a smaller `scale`";
            return Err(Error::Range { tensor, largest, bound: UP_TO, limit, remedy });
        }
    }
    Ok(())
}

/// Whether similarities of the Laplacian kernel, all near one where tokens are close, still differ when their mean is taken off.
fn differences(call: &Call<'_>, slice: usize, lambda: f64) -> Result<()> {
    let lambda = of_head(call, Parameter::Lambda, slice).unwrap_or(lambda);
    let limit = LEAST_DIFFERENCE * lambda / call.shape.head_dim as f64;
    if rescale::reaches(call, slice, limit) {
        return Ok(());
    }
    let [q, k] = largest(call, slice).map(f64::from);
    let largest = q.max(k);
    if largest == 0.0 || largest.is_nan() {
        return Ok(());
    }
    let tensor = if q >= k { "q" } else { "k" };
    let remedy = "similarities differ by less than their rounding: scale the tokens, or set a smaller `lambda`";
    Err(Error::Range { tensor, largest, bound: "from", limit, remedy })
}

/// What a call gives for the head of a slice.
fn of_head(call: &Call<'_>, parameter: Parameter, slice: usize) -> Option<f64> {
    call.extras.get(parameter).map(|values| values[slice % call.shape.heads].into())
}

/// Whether the distances in units of kappa, and what the kernel makes of them, fit.
fn distances(m: &Fna, call: &Call<'_>, slice: usize) -> Result<()> {
    let kappa = fna_scale(call, m, slice).0;
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
    let limit = kappa * if m.kernel == DistanceKernel::Levy && !m.is_gaussian() { 1e-40 } else { 1e-29 };
    if plane && most < limit {
        let remedy = "distances are too small a part of `kappa`: scale the tokens, or set a smaller `kappa`";
        return Err(Error::Range { tensor, largest: most, bound: "from", limit, remedy });
    }
    Ok(())
}

/// Whether the squares of a slice's affinities, whose norm is `norm` in units of the largest product that its queries and keys
/// could have, kept their digits: they lose them where few tokens are far larger than all others, and meet no key.
pub(crate) fn check_norm(call: &Call<'_>, slice: usize, norm: f64) -> Result<()> {
    /// What squares of have digits.
    const LEAST_NORM: f64 = 1e-17;
    if norm.is_nan() || norm >= LEAST_NORM {
        return Ok(());
    }
    let spreads = rescale::spreads(call, slice).map(f64::from);
    let (tensor, spread) = if spreads[0] >= spreads[1] { ("q", spreads[0]) } else { ("k", spreads[1]) };
    if norm == 0.0 && spreads[0] * spreads[1] * LEAST_NORM < 1.0 {
        return Ok(());
    }
    let largest = f64::from(largest(call, slice)[usize::from(tensor == "k")]);
    let remedy = "nothing is left of tokens that are so much smaller: scale or normalise the tokens";
    Err(Error::Range { tensor, largest, bound: UP_TO, limit: largest / spread * 1e8, remedy })
}

/// [`Error::Overflow`] where results are no numbers although the call's tensors are.
pub(crate) fn check_results<'x>(
    call: &Call<'_>,
    dout: Option<&[f32]>,
    results: impl IntoIterator<Item = (&'static str, &'x [f32])>,
) -> Result<()> {
    results.into_iter().try_for_each(|(tensor, x)| check_finite(call.level, tensor, x, || inputs_finite(call, dout)))
}

/// [`Error::Overflow`] where a result is no number although the inputs are.
pub(crate) fn check_finite(
    level: Level,
    tensor: &'static str,
    x: &[f32],
    inputs_finite: impl Fn() -> bool,
) -> Result<()> {
    const INFINITE: u32 = 0x7f80_0000;
    // Of the bits without the sign the largest, which the compiler makes vectors of.
    let most = |x: &[f32]| x.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
    if x.par_chunks(1 << 15).all(|x| level.dispatch(|| most(x)) < INFINITE) || !inputs_finite() {
        return Ok(());
    }
    let index = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
    Err(Error::Overflow { tensor, index })
}

/// [`check_results`] of rows of which the first and the last kept one tell of all: copies, or sums that run along the tokens.
pub(crate) fn check_ends(
    call: &Call<'_>,
    dout: Option<&[f32]>,
    (tensor, x): (&'static str, &[f32]),
    (keep, seq): (Option<&[bool]>, usize),
) -> Result<()> {
    let Shape { heads, value_dim, .. } = call.shape;
    for (slice, x) in x.chunks_exact(seq * value_dim).enumerate() {
        let kept = |i: &usize| keep.is_none_or(|keep| keep[slice / heads * seq + i]);
        let ends = [(0..seq).find(kept), (0..seq).rev().find(kept)];
        let rows = ends.into_iter().flatten().map(|i| (tensor, &x[i * value_dim..][..value_dim]));
        check_results(call, dout, rows)?;
    }
    Ok(())
}

/// Whether all that counts of a call's tensors are numbers.
fn inputs_finite(call: &Call<'_>, dout: Option<&[f32]>) -> bool {
    let Shape { heads, seq_q, seq_kv, head_dim, value_dim, .. } = call.shape;
    let sides = [
        (call.q, call.mask.query, seq_q, head_dim),
        (call.k, call.mask.key, seq_kv, head_dim),
        (call.v, call.mask.key, seq_kv, value_dim),
        (dout.unwrap_or_default(), call.mask.query, seq_q, value_dim),
    ];
    let tokens = sides.into_iter().all(|(x, keep, seq, dim)| {
        let counts = |row: usize| keep.is_none_or(|keep| keep[row / seq / heads * seq + row % seq]);
        x.chunks(dim.max(1)).enumerate().all(|(row, x)| !counts(row) || x.iter().all(|x| x.is_finite()))
    });
    tokens && call.extras.iter().all(|(_, values)| values.iter().all(|x| x.is_finite()))
}

/// Powers of two between which products of values and output gradients have room on all sides.
const COMFORTABLE: std::ops::RangeInclusive<f64> = -40.0..=60.0;
/// The exponent of the least product of a value and an output gradient that leaves digits to what it is multiplied by.
const LEAST_PRODUCT: f64 = -60.0;

/// The exponent of a power of two by which to divide the output gradients, 0 if they may stay. Causal ones are not divided for
/// the sake of later tokens.
///
/// # Errors
/// [`Error::Range`] where of tokens with smaller products nothing would be left.
pub(crate) fn gradient_exponent(mechanism: &Mechanism, call: &Call<'_>, dout: &[f32]) -> Result<i32> {
    if matches!(mechanism, Mechanism::Uniform(_) | Mechanism::LinearInfsa(_)) {
        return Ok(0);
    }
    let Shape { heads, seq_q, seq_kv, value_dim, .. } = call.shape;
    let sides = [("dout", dout, call.mask.query, seq_q), ("v", call.v, call.mask.key, seq_kv)];
    let of_slices = |(_, x, keep, seq): (&str, &[f32], Option<&[bool]>, usize)| {
        let slices = x.par_chunks(seq * value_dim).enumerate();
        let largest = slices.map(|(slice, x)| {
            largest_of(call.level, x, value_dim, keep.map(|keep: &[bool]| &keep[slice / heads * seq..][..seq]))
        });
        largest.reduce(|| 0.0, f32::max)
    };
    let [g, v] = sides.map(of_slices).map(f64::from);
    let exponent = product_exponent(g, v);
    if exponent <= 0 || call.mask.causal {
        return Ok(exponent.min(0));
    }
    let least = |(_, x, keep, seq): (&str, &[f32], Option<&[bool]>, usize)| {
        let rows = x.chunks_exact(value_dim).enumerate();
        let kept = rows.filter(|(row, _)| keep.is_none_or(|keep| keep[row / seq / heads * seq + row % seq]));
        kept.map(|(_, x)| rows::max_abs(call.level, x)).filter(|&x| x > 0.0).fold(f32::INFINITY, f32::min)
    };
    let [least_g, least_v] = sides.map(least).map(f64::from);
    if (least_g * least_v).log2() - f64::from(exponent) >= LEAST_PRODUCT {
        return Ok(exponent);
    }
    let (tensor, largest) = if g / least_g >= v / least_v { ("dout", g) } else { ("v", v) };
    let limit = largest * (LEAST_PRODUCT + f64::from(exponent)).exp2().recip() * least_g * least_v;
    let remedy = "nothing is left of the gradients of tokens with far smaller values: scale them to be more alike";
    Err(Error::Range { tensor, largest, bound: UP_TO, limit, remedy })
}

/// The exponent of a power of two by which to divide `g`, for its products with `v` to have room; 0 if they have.
pub(crate) fn product_exponent(g: f64, v: f64) -> i32 {
    let product = g.log2() + v.log2();
    if !product.is_finite() || COMFORTABLE.contains(&product) {
        return 0;
    }
    // What is divided has to stay a number itself, and its sums over tokens, too.
    (g.log2() - (-v.log2()).clamp(-90.0, 90.0)).floor() as i32
}

/// `x` divided by a power of two.
pub(crate) fn divided(x: &[f32], exponent: i32) -> Vec<f32> {
    let by = 2f64.powi(-exponent);
    x.iter().map(|&x| (f64::from(x) * by) as f32).collect()
}

/// Multiplies all gradients by a power of two.
pub(crate) fn multiply(gradients: &mut Gradients<'_, f32>, exponent: i32) {
    rescale::multiply(gradients.dq, 1, |_| 2f64.powi(exponent));
    rescale::multiply(gradients.dv, 1, |_| 2f64.powi(exponent));
    let parameters = gradients.extras.iter().map(|(_, x)| x);
    parameters.chain(gradients.dk.as_deref_mut()).for_each(|x| rescale::multiply(x, 1, |_| 2f64.powi(exponent)));
}
