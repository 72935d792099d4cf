//! Which path carries out a call, and what it costs.

use super::{naive, projected};
use crate::{
    Arithmetic, Error, Mechanism, Plan, Precision, Result, Shape, Strategy, engine,
    mechanism::{Form, Landmarks, LaplacianExact, Whitening},
    series,
    simd::Level,
    structure::{self, nystrom},
};

/// What a call of `mechanism` on `shape` would do and need. `causal` is OR-ed with the configuration's.
///
/// # Errors
/// As [`crate::Operator::new`].
pub fn plan(mechanism: &Mechanism, shape: &Shape, causal: bool, strategy: Strategy) -> Result<Plan> {
    let plan = costs(mechanism, shape, causal, strategy, Precision::Full)?;
    let reason = "nothing is rounded unless a call asks for it";
    Ok(Plan { arithmetic: Arithmetic::full(Precision::Full, Level::selected()?, reason), ..plan })
}

/// [`plan`] but for the arithmetic, with products of a precision in which the mechanism runs.
pub(super) fn costs(
    mechanism: &Mechanism,
    shape: &Shape,
    causal: bool,
    strategy: Strategy,
    precision: Precision,
) -> Result<Plan> {
    mechanism.check(shape, causal)?;
    let (causal, form) = (causal || mechanism.causal, mechanism.form());
    let fused = match &form {
        Form::Composed(m) => return composed(mechanism, m, shape, causal, strategy, precision),
        Form::Softmax(_) | Form::Infsa(_) => structure::dense::plan(&form, shape, causal, precision),
        Form::Fna(m) => structure::dense::fna_plan(m, shape, causal, precision),
        Form::InfsaResolvent(m) => series::resolvent::plan(m, shape),
        Form::Ssa(m) => structure::clustered::plan(m, shape, causal),
        Form::LaplacianExact(_) => by_engine(&mechanism.values(), shape, causal),
        Form::Soft(m) | Form::SoftPp(m) if m.landmarks == Landmarks::All => {
            by_engine(&mechanism.values(), shape, causal)
        }
        Form::Soft(_) | Form::SoftPp(_) | Form::Laplacian(_) => {
            nystrom::with_preset(mechanism, |values, preset| nystrom::plan(values, preset, shape))?
        }
        Form::Uniform(_) | Form::LinearInfsa(_) => structure::pooled::plan(&form, shape, causal),
    };
    if let Form::LaplacianExact(LaplacianExact { whitening: Whitening::Full, .. }) = &form {
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

/// The plan of a composition: that of the preset that it is, of the engine that serves all others, or of the reference.
fn composed(
    mechanism: &Mechanism,
    m: &Mechanism,
    shape: &Shape,
    causal: bool,
    strategy: Strategy,
    precision: Precision,
) -> Result<Plan> {
    let preset = m.as_preset().and_then(|form| costs(&form.into(), shape, causal, strategy, precision).ok());
    let fused = fused(m, shape, causal, precision)?;
    let cost = fused.unwrap_or_else(|| engine::nearest(m, shape, causal));
    let own = match (strategy, fused) {
        (Strategy::Reference, _) => naive::plan(cost, shape),
        (_, Some(fused)) => fused,
        (Strategy::Auto, None) if mechanism.is_custom() => {
            let why = "only dense graphs, clustered graphs without densities, and landmarks take a score from outside";
            return Err(Error::Unsupported { mechanism: mechanism.id(), what: "a score from outside here", why });
        }
        (Strategy::Fused, None) if preset.is_none() => {
            let why = "these values run on the reference alone; use strategy auto or reference";
            return Err(Error::Unsupported {
                mechanism: mechanism.id(),
                what: "a fused path for this composition",
                why,
            });
        }
        (_, None) => {
            let reason = "no fused path holds these values: the naive f64 path, which stores whole matrices";
            Plan { reason, ..naive::plan(cost, shape) }
        }
    };
    Ok(preset.map_or(own, |preset| Plan {
        scratch_forward: preset.scratch_forward.max(own.scratch_forward),
        scratch_backward: preset.scratch_backward.max(own.scratch_backward),
        stats: preset.stats.max(own.stats),
        ..preset
    }))
}

/// The plan of a preset that is carried out as the four values that it is, or what is nearest to it.
fn by_engine(m: &Mechanism, shape: &Shape, causal: bool) -> Plan {
    engine::plan(m, shape, causal, Precision::Full).unwrap_or_else(|| engine::nearest(m, shape, causal))
}

/// The plan of a composition where there is a fused path.
fn fused(m: &Mechanism, shape: &Shape, causal: bool, precision: Precision) -> Result<Option<Plan>> {
    match projected::plan(m, shape) {
        Some(plan) => plan.map(Some),
        None => Ok(engine::plan(m, shape, causal, precision)),
    }
}

/// Whether calls that no preset serves go through the reference.
pub(super) fn by_reference(form: &Form, plan: &Plan, causal: bool, shape: &Shape, strategy: Strategy) -> bool {
    match form {
        Form::Composed(m) => {
            strategy == Strategy::Reference || !matches!(fused(m, shape, causal, Precision::Full), Ok(Some(_)))
        }
        _ => plan.strategy == Strategy::Reference,
    }
}
