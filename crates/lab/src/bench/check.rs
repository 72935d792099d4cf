//! Nothing is timed before it has been compared with the f64 reference.

use std::fmt;

use half::bf16;
use resolvent_kernels::{Extras, Inputs, Mask, Mechanism, Precision, Shape, Tol, reference, relative_distance};
use serde::{Deserialize, Serialize};

use super::{
    BenchOptions,
    contender::{Buffers, Contender, Local, Ours},
    rivals::{Rival, Rivals},
};
use crate::{Result, candidate::Candidate, environment::beyond_memory};

/// Fewest and most tokens of the comparison: of fewer, gradients are differences of nearly equal numbers.
const TOKENS: [usize; 2] = [16, 192];
/// Most heads of it.
const HEADS: usize = 2;
/// Relative distances that a rival may have: three digits tell that it computes the same thing, and inverses by iteration
/// lose some in f32.
const RIVAL: (f64, f64) = (1e-3, 1e-2);

/// One mechanism, or a rival, against the f64 reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Its id, or the rival's name.
    pub label: String,
    /// Tokens compared.
    pub tokens: usize,
    /// Relative distance of the output; absent where it is not finite, or there was nothing to compare.
    pub forward: Option<f64>,
    /// The largest relative distance of a gradient; absent likewise.
    pub backward: Option<f64>,
    /// Whether both are within tolerance.
    pub passed: bool,
    /// Why there was nothing to compare.
    pub refused: Option<String>,
}

impl Check {
    /// The outcome of a comparison, and the tolerances of output and gradients.
    pub(super) fn new(label: &str, tokens: usize, forward: f64, backward: f64, tol: (f64, f64)) -> Self {
        let passed = forward <= tol.0 && backward <= tol.1;
        let [forward, backward] = [forward, backward].map(|distance| Some(distance).filter(|d| d.is_finite()));
        Self { label: label.into(), tokens, forward, backward, passed, refused: None }
    }

    pub(super) fn refused(label: &str, why: String) -> Self {
        let (label, refused) = (label.into(), Some(why));
        Self { label, tokens: 0, forward: None, backward: None, passed: false, refused }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, tokens, forward, backward, passed, refused } = self;
        match refused {
            Some(why) => write!(f, "{label}: not compared with the reference: {why}"),
            None => {
                let verdict = if *passed { "agrees with" } else { "DIFFERS from" };
                let [forward, backward] =
                    [forward, backward].map(|d| d.map_or("not finite".into(), |distance| format!("{distance:.0e}")));
                write!(
                    f,
                    "{label}: {verdict} the reference on {tokens} tokens (output {forward}, gradients {backward})"
                )
            }
        }
    }
}

/// Compares forward and backward of a mechanism, and of those rivals that compute it, with the f64 reference.
pub(super) fn check(
    Candidate { name, mechanism }: &Candidate,
    rivals: &Rivals,
    options: &BenchOptions,
) -> Result<(Check, Vec<(Rival, Check)>)> {
    let shape = |tokens| Shape::square(1, HEADS.min(options.heads), tokens, options.head_dim);
    let ours = |tokens| Ours::new(mechanism, shape(tokens), options.precision).map(|ours| (ours, shape(tokens)));
    let asked = options.tokens.iter().copied().max().unwrap_or(1);
    // A mechanism with a grid has but one size.
    let (mut ours, shape) = match ours(asked.clamp(TOKENS[0], TOKENS[1])).or_else(|_| ours(asked)) {
        Ok(case) => case,
        Err(why) => return Ok((Check::refused(name, why.to_string()), Vec::new())),
    };
    let needed = Comparison::bytes(shape).saturating_add(Local::needs(&ours, shape));
    if let Some(why) = beyond_memory("the comparison with the reference takes", needed) {
        return Ok((Check::refused(name, format!("{why}; ask for fewer --heads or a smaller --head-dim")), Vec::new()));
    }
    let mut comparison = Comparison::new(mechanism, shape, ours.plan().arithmetic.runs)?;
    let tol = match ours.plan().arithmetic.runs {
        Precision::Full => Tol::f32(mechanism),
        _ => Tol::HALF,
    };
    let own = comparison.check(name, &mut ours, (tol.forward, tol.backward))?;
    let of_rivals = rivals.of(name, mechanism).into_iter().map(|rival| {
        let mut contender = rivals.contender(&rival, mechanism, shape);
        let check = comparison.check(&rival.label, &mut *contender, RIVAL);
        let check = check.unwrap_or_else(|why| Check::refused(&rival.label, why.to_string()));
        (rival, check)
    });
    let of_rivals = of_rivals.collect();
    Ok((own, of_rivals))
}

/// A small call and its exact results.
struct Comparison {
    buffers: Buffers,
    out: Vec<f64>,
    dq: Vec<f64>,
    dk: Option<Vec<f64>>,
    dv: Vec<f64>,
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

impl Comparison {
    /// What a comparison at this size holds: tensors in f32, and in f64 inputs, results, weights with what a reference keeps of them,
    /// and gradients.
    fn bytes(shape: Shape) -> u64 {
        let tensors = 16 * (size_of::<f64>() as u64).saturating_mul(shape.q_len() as u64);
        let weights =
            8 * (size_of::<f64>() as u64).saturating_mul((shape.slices() * shape.seq_q * shape.seq_kv) as u64);
        Buffers::bytes(shape).saturating_add(tensors).saturating_add(weights)
    }

    fn new(mechanism: &Mechanism, shape: Shape, precision: Precision) -> Result<Self> {
        let mut buffers = Buffers::new(shape);
        if precision != Precision::Full {
            // Inputs that bf16 holds: rounding others would turn the signs of small scores, and with them whole gradients of a ReLU.
            let Buffers { q, k, v, dout, .. } = &mut buffers;
            for x in [q, k, v, dout].into_iter().flatten() {
                *x = bf16::from_f32(*x).to_f32();
            }
        }
        let [q, k, v, dout] = [&buffers.q, &buffers.k, &buffers.v, &buffers.dout].map(|x| wide(x));
        let k = (!mechanism.tied()).then_some(&k[..]);
        let inputs = Inputs { q: &q, k, v: &v, extras: Extras::default() };
        let out = reference::forward(mechanism, &shape, &inputs, &Mask::NONE)?.out;
        let exact = reference::backward(mechanism, &shape, &inputs, &Mask::NONE, &dout[..out.len()])?;
        Ok(Self { buffers, out, dq: exact.dq, dk: exact.dk, dv: exact.dv })
    }

    fn check(&mut self, label: &str, contender: &mut dyn Contender, tol: (f64, f64)) -> Result<Check> {
        let Self { buffers: b, out, dq, dk, dv } = self;
        b.poison();
        contender.solve(b)?;
        let far = |got: &[f32], expected: &[f64]| relative_distance(&wide(&got[..expected.len()]), expected);
        let mut worst = far(&b.dq, dq).max(far(&b.dv, dv));
        if let Some(dk) = dk {
            worst = worst.max(far(&b.dk, dk));
        }
        Ok(Check::new(label, b.shape.seq_q, far(&b.out, out), worst, tol))
    }
}
