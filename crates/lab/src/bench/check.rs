//! Nothing is timed before it has been compared with the f64 reference.

use std::fmt;

use resolvent_kernels::{Precision, Tol};
use serde::{Deserialize, Serialize};

use super::{
    Arrangement, BenchOptions,
    call::Call,
    comparison::Comparison,
    contender::Local,
    ours::Ours,
    rivals::{Rival, Rivals},
};
use crate::{Result, candidate::Candidate, environment::beyond_memory};

/// Fewest and most tokens of the comparison: of fewer, gradients are differences of nearly equal numbers.
const TOKENS: [usize; 2] = [16, 192];
/// Relative distances that a rival may have in f32: three digits tell that it computes the same thing, and inverses by iteration
/// lose some.
const RIVAL: (f64, f64) = (1e-3, 1e-2);

/// One mechanism, or a rival, against the f64 reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Its id, or the rival's name.
    pub label: String,
    /// Tokens compared.
    pub tokens: usize,
    /// Relative distance of the output; absent where it is not finite, or there was nothing to compare.
    pub forward: Option<f64>,
    /// The largest relative distance of a gradient; absent likewise.
    pub backward: Option<f64>,
    /// Whether it has no backward pass, so that the output alone was compared.
    #[serde(default)]
    pub forward_only: bool,
    /// The largest distances of output and gradients that pass; absent where there was nothing to compare, and in older results.
    #[serde(default)]
    pub tolerances: Option<(f64, f64)>,
    /// Whether all are within tolerance.
    pub passed: bool,
    /// Why there was nothing to compare.
    pub refused: Option<String>,
}

impl Check {
    /// The outcome of a comparison, and the tolerances of output and gradients. Without `backward` there are no gradients.
    pub(super) fn new(label: &str, tokens: usize, forward: f64, backward: Option<f64>, tol: (f64, f64)) -> Self {
        let passed = forward <= tol.0 && backward.is_none_or(|backward| backward <= tol.1);
        let forward_only = backward.is_none();
        let [forward, backward] = [Some(forward), backward].map(|distance| distance.filter(|d| d.is_finite()));
        let (label, tolerances) = (label.into(), Some(tol));
        Self { label, tokens, forward, backward, forward_only, tolerances, passed, refused: None }
    }

    pub(super) fn refused(label: &str, why: String) -> Self {
        Self { label: label.into(), refused: Some(why), ..Self::default() }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, tokens, forward, backward, forward_only, passed, refused, .. } = self;
        if let Some(why) = refused {
            return write!(f, "{label}: not compared with the reference: {why}");
        }
        let verdict = if *passed { "agrees with" } else { "DIFFERS from" };
        let [forward, backward] =
            [forward, backward].map(|d| d.map_or("not finite".into(), |distance| format!("{distance:.0e}")));
        let gradients = if *forward_only { "no backward pass".into() } else { format!("gradients {backward}") };
        write!(f, "{label}: {verdict} the reference on {tokens} tokens (output {forward}, {gradients})")
    }
}

/// Compares forward and backward of a mechanism, and of those rivals that compute it, with the f64 reference. What cannot be
/// compared says why.
pub(super) fn check(
    candidate: &Candidate,
    arrangement: &Arrangement,
    rivals: &Rivals,
    options: &BenchOptions,
) -> (Check, Vec<(Rival, Check)>) {
    let (mut ours, mut comparison) = match prepared(candidate, arrangement, options) {
        Ok(prepared) => prepared,
        Err(why) => return (Check::refused(&candidate.name, why), Vec::new()),
    };
    let Candidate { name, mechanism } = candidate;
    let tol = match ours.plan().arithmetic.runs {
        Precision::Full => Tol::f32(mechanism),
        Precision::Bf16x3 => Tol::SIXTEEN_BITS,
        _ => Tol::HALF,
    };
    let own = comparison.ours(name, &mut ours, (tol.forward, tol.backward));
    let own = own.unwrap_or_else(|why| Check::refused(name, why.to_string()));
    let of_rivals = rivals.of(name, mechanism).into_iter().map(|rival| {
        let tol = if rival.dtype.is_rounded() { (Tol::HALF.forward, Tol::HALF.backward) } else { RIVAL };
        let contender = rivals.contender(&rival, mechanism, ours.call());
        let check = contender.and_then(|mut contender| comparison.rival(&rival.label, &mut *contender, tol));
        let check = check.unwrap_or_else(|why| Check::refused(&rival.label, why.to_string()));
        (rival, check)
    });
    (own, of_rivals.collect())
}

/// The operator of a small call, or where a mechanism has but one size of a call that is measured, and what it is compared with.
fn prepared(
    Candidate { mechanism, .. }: &Candidate,
    arrangement: &Arrangement,
    options: &BenchOptions,
) -> std::result::Result<(Ours, Comparison), String> {
    let sizes = options.sizes();
    let most = sizes.last().copied().unwrap_or(1);
    let small = Call::small(options, arrangement, most.clamp(TOKENS[0], TOKENS[1]), TOKENS[0]);
    let bound = |call: Result<Call>| Ours::new(mechanism, &call?, options.precision);
    let measured = sizes.iter().rev().map(|&n| bound(Call::new(options, arrangement, n)));
    let mut ours = bound(small);
    for other in measured {
        if ours.is_ok() {
            break;
        }
        ours = other;
    }
    let mut ours = ours.map_err(|why| why.to_string())?;
    let needed = Comparison::bytes(ours.call()).saturating_add(Local::needs(&ours, ours.call().shape));
    if let Some(why) = beyond_memory("the comparison with the reference takes", needed) {
        return Err(format!("{why}; ask for fewer --heads or a smaller --head-dim"));
    }
    let comparison = Comparison::new(mechanism, &mut ours, options.precision == Precision::Bf16);
    comparison.map(|comparison| (ours, comparison)).map_err(|why| why.to_string())
}
