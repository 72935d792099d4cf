//! Which path carries out a call, and what it costs.

use super::naive;
use crate::{
    Error, Mechanism, Plan, Result, Shape, Strategy,
    mechanism::{Landmarks, LaplacianExact, Whitening},
    series, structure,
};

/// What a call of `mechanism` on `shape` would do and need. `causal` is OR-ed with the configuration's.
///
/// # Errors
/// As [`crate::Operator::new`].
pub fn plan(mechanism: &Mechanism, shape: &Shape, causal: bool, strategy: Strategy) -> Result<Plan> {
    mechanism.check(shape, causal)?;
    let causal = causal || mechanism.causal();
    let fused = match mechanism {
        Mechanism::Softmax(_) | Mechanism::Infsa(_) => structure::dense::plan(mechanism, shape, causal),
        Mechanism::Fna(m) => structure::dense::fna_plan(m, shape, causal),
        Mechanism::InfsaResolvent(m) => series::resolvent::plan(m, shape),
        Mechanism::Ssa(m) => structure::clustered::plan(m, shape, causal),
        Mechanism::Soft(m) | Mechanism::SoftPp(m) if m.landmarks != Landmarks::All => {
            structure::nystrom::soft::plan(m, shape)
        }
        Mechanism::Laplacian(m) => structure::nystrom::laplacian::plan(m, shape),
        Mechanism::Soft(m) | Mechanism::SoftPp(m) => structure::dense::soft_all_plan(m, shape),
        Mechanism::LaplacianExact(m) => structure::dense::laplacian_exact_plan(m, shape),
        Mechanism::Uniform(_) | Mechanism::LinearInfsa(_) => structure::pooled::plan(mechanism, shape, causal),
    };
    if let Mechanism::LaplacianExact(LaplacianExact { whitening: Whitening::Full, .. }) = mechanism {
        if strategy == Strategy::Fused {
            let why = "the covariance of all keys is stored and decomposed; use strategy auto or reference";
            return Err(Error::Unsupported { mechanism: mechanism.id(), what: "a fused path for whitening full", why });
        }
        return Ok(naive::plan(fused, shape));
    }
    Ok(match strategy {
        Strategy::Auto | Strategy::Fused => fused,
        Strategy::Reference => naive::plan(fused, shape),
    })
}
