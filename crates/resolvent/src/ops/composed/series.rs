//! Series of a hop.

use burn::tensor::Tensor;
use resolvent_kernels::{Error, Result};

use super::{Call, hop::Hop, unsupported};
use crate::mechanism::{InfsaResolvent, Resolvent, Series};

/// What the series makes of the values; `gamma` is `[1, heads or 1, 1, 1]`.
pub(super) fn apply(
    call: &Call,
    series: &Series,
    hop: &Hop<'_>,
    gamma: Tensor<4>,
    mechanism: &'static str,
) -> Result<Tensor<4>> {
    let v = &call.v;
    match series {
        Series::OneHop(_) => Ok(hop.apply(v) * gamma),
        Series::Hops(m) => {
            // By Horner's scheme: M (v + M (v + ...)).
            let first = hop.apply(v) * gamma.clone();
            Ok((1..m.count).fold(first, |sum, _| hop.apply(&(v.clone() + sum)) * gamma.clone()))
        }
        Series::Resolvent(m) => resolvent(v, m, hop, gamma, mechanism),
        _ => Err(unsupported(mechanism, "this series with Strategy::Composed")),
    }
}

/// `((I - M)^-1 - I) V` with `M = gamma W`, by the product form of the Neumann series:
/// `(I + M)(I + M^2)(I + M^4) ...` sums twice as many hops with every factor. As `|M| <= gamma`, the number of factors
/// that `tol` needs is known beforehand and nothing is read back from the device. The values themselves are left out from the start,
/// which would cancel where `M` is small.
fn resolvent(
    v: &Tensor<4>,
    m: &Resolvent,
    hop: &Hop<'_>,
    gamma: Tensor<4>,
    mechanism: &'static str,
) -> Result<Tensor<4>> {
    let largest = gamma.clone().detach().max().into_scalar::<f64>();
    let factors = check_factors(m, largest, mechanism)?;
    let mut sum = hop.apply(v) * gamma.clone();
    let mut hops = hop.matrix() * gamma;
    for _ in 1..factors {
        hops = hops.clone().matmul(hops);
        sum = sum.clone() + hops.clone().matmul(v.clone() + sum);
    }
    Ok(sum)
}

/// The number of factors for the largest decay.
fn check_factors(m: &Resolvent, gamma: f64, mechanism: &'static str) -> Result<usize> {
    let hops = InfsaResolvent::worst_case_iterations(gamma, m.tol);
    // `n` factors sum the hops 0 to 2^n - 1.
    let factors = ((hops + 1) as f64).log2().ceil() as usize;
    match m.max_iter {
        Some(limit) if limit < factors => {
            let residual = gamma.powi(1 << limit.min(30)) / (1.0 - gamma);
            Err(Error::NotConverged { mechanism, iterations: limit, residual, tol: m.tol })
        }
        _ => Ok(factors),
    }
}
