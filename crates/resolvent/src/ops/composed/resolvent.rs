//! All hops at once: `infsa-resolvent`.

use burn::tensor::Tensor;
use resolvent_kernels::Error;

use super::{Call, dense};
use crate::{Result, mechanism::InfsaResolvent};

/// `((I - M)^-1 - I) V` with `M = gamma A`, by the product form of the Neumann series:
/// `(I + M)(I + M^2)(I + M^4) ...` sums twice as many hops with every factor. As `|M|_2 <= gamma`, the number of factors
/// that `tol` needs is known beforehand and nothing is read back from the device.
pub(super) fn infsa_resolvent(call: &Call, m: &InfsaResolvent, gamma: Tensor<4>) -> Result<Tensor<4>> {
    let largest = gamma.clone().detach().max().into_scalar::<f64>();
    let factors = check_factors(m, largest)?;
    let mut hops = dense::operator(call, &m.hop()) * gamma;
    let mut solution = call.v.clone() + hops.clone().matmul(call.v.clone());
    for _ in 1..factors {
        hops = hops.clone().matmul(hops);
        solution = solution.clone() + hops.clone().matmul(solution);
    }
    Ok(solution - call.v.clone())
}

/// The number of factors for the largest decay.
fn check_factors(m: &InfsaResolvent, gamma: f64) -> Result<usize> {
    let hops = InfsaResolvent::worst_case_iterations(gamma, m.tol);
    // `n` factors sum the hops 0 to 2^n - 1.
    let factors = ((hops + 1) as f64).log2().ceil() as usize;
    match m.max_iter {
        Some(limit) if limit < factors => {
            let residual = gamma.powi(1 << limit.min(30)) / (1.0 - gamma);
            Err(Error::NotConverged { mechanism: "infsa-resolvent", iterations: limit, residual, tol: m.tol }.into())
        }
        _ => Ok(factors),
    }
}
