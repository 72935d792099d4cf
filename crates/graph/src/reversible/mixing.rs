//! How long a walker remembers where it started.

use super::{Reversible, Spectrum};
use crate::{Dense, Error, LinearOperator, Result, dense::product};

/// Walks longer than this are not followed.
const LONGEST: u32 = 20;

/// The least number of steps after which every walker's distribution is within `eps` of the stationary one in total
/// variation, by squaring and bisection on the powers; `None` beyond 2^20 steps, as in a graph that is not connected.
/// Holds a matrix per squaring.
///
/// # Errors
/// [`Error::Range`] unless `0 < eps < 1`.
pub fn mixing_time(graph: &Reversible, eps: f64) -> Result<Option<u64>> {
    check_eps(eps)?;
    let pi = graph.stationary();
    let far = |rows: &Dense| {
        let distance = |row: &[f64]| 0.5 * row.iter().zip(&pi).map(|(p, pi)| (p - pi).abs()).sum::<f64>();
        rows.rows().map(distance).fold(0.0, f64::max) > eps
    };
    if !far(&Dense::from_fn(graph.len(), |i, j| f64::from(u8::from(i == j)))) {
        return Ok(Some(0));
    }
    let mut powers = vec![graph.transition()];
    while far(&powers[powers.len() - 1]) {
        if powers.len() as u32 > LONGEST {
            return Ok(None);
        }
        powers.push(product(&powers[powers.len() - 1], &powers[powers.len() - 1]));
    }
    // The last power is near, the one before is far: walk on from it as far as it stays far.
    let Some(mut exponent) = powers.len().checked_sub(2) else { return Ok(Some(1)) };
    let (mut steps, mut reached) = (1_u64 << exponent, powers[exponent].clone());
    while exponent > 0 {
        exponent -= 1;
        let further = product(&reached, &powers[exponent]);
        if far(&further) {
            (steps, reached) = (steps + (1 << exponent), further);
        }
    }
    Ok(Some(steps + 1))
}

/// Bounds on [`mixing_time`] from the absolute gap `g`: `(1/g - 1) ln(1/(2 eps))` and `ln(1/(eps pi_min)) / g`.
///
/// # Errors
/// [`Error::Range`] unless `0 < eps < 1`.
pub fn mixing_bounds(graph: &Reversible, spectrum: &Spectrum, eps: f64) -> Result<(f64, f64)> {
    check_eps(eps)?;
    let gap = spectrum.absolute_gap();
    let rarest = graph.stationary().into_iter().fold(1.0, f64::min);
    Ok((((1.0 / gap - 1.0) * (0.5 / eps).ln()).max(0.0), (1.0 / (eps * rarest)).ln() / gap))
}

fn check_eps(eps: f64) -> Result<()> {
    let inside = eps > 0.0 && eps < 1.0;
    if inside { Ok(()) } else { Err(Error::Range { what: "eps", value: eps, expected: "between 0 and 1" }) }
}
