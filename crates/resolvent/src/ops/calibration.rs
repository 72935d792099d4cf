//! Where tensor operations overtake the fused kernels on this machine.

use std::{collections::BTreeMap, fmt, hint::black_box, sync::OnceLock, time::Instant};

use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::{Inputs, Mask, Strategy, attend};
use crate::{Mechanism, Result, mechanism::Series};

/// Batch, heads and channels of the calls that are timed.
const CALL: [usize; 3] = [16, 4, 32];
/// Numbers of tokens, ascending; the full matrices of the last are still small.
const TOKENS: [usize; 5] = [16, 32, 64, 128, 256];
/// Runs of each; the fastest counts, which what else the machine does disturbs least.
const RUNS: usize = 7;
/// How many times as fast tensor operations must be. Less would be chosen today and not tomorrow, and bits with it.
const MARGIN: f64 = 1.25;

static INSTALLED: OnceLock<Calibration> = OnceLock::new();

/// Up to how many tokens each mechanism is faster composed of tensor operations than fused, as measured on one machine.
///
/// A program measures or reads one, and [installs](Calibration::install) it; [`Strategy::Auto`] then follows it on the CPU in
/// f32. Without one, `Auto` is fused wherever there are kernels.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// By the mechanism's id.
    pub crossings: BTreeMap<String, Crossing>,
}

/// What was measured of one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crossing {
    /// Tensor operations are faster up to so many tokens, forward and in training; 0: nowhere.
    pub composed_up_to: usize,
    /// The sizes that were timed, until the kernels won.
    pub sizes: Vec<Timed>,
}

/// Seconds of both ways at one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timed {
    /// Tokens.
    pub tokens: usize,
    /// The fused kernels: a forward pass, and a forward and backward pass.
    pub fused: [f64; 2],
    /// Tensor operations, likewise.
    pub composed: [f64; 2],
}

impl Timed {
    fn composed_wins(&self) -> bool {
        self.fused.iter().zip(self.composed).all(|(fused, composed)| composed * MARGIN < *fused)
    }
}

impl Calibration {
    /// Times both ways for every mechanism, from few tokens on until the kernels are faster: about a second.
    ///
    /// # Errors
    /// As [`crate::attend`].
    pub fn measure() -> Result<Self> {
        let crossing = |id: &&str| Ok(((*id).to_owned(), measure(&Mechanism::preset(id)?)?));
        Ok(Self { crossings: Mechanism::IDS.iter().map(crossing).collect::<Result<_>>()? })
    }

    /// Makes `Auto` follow it, in the whole program and for good: whether it was the first.
    pub fn install(self) -> bool {
        INSTALLED.set(self).is_ok()
    }

    /// What `Auto` follows.
    pub fn installed() -> Option<&'static Self> {
        INSTALLED.get()
    }

    /// Up to how many tokens `mechanism` is faster composed; 0: nowhere, or not measured.
    pub fn composed_up_to(&self, mechanism: &Mechanism) -> usize {
        match &mechanism.series {
            // The limit counts the steps of the fused solver.
            Series::Resolvent(m) if m.max_iter.is_some() => 0,
            _ => self.crossings.get(mechanism.id()).map_or(0, |crossing| crossing.composed_up_to),
        }
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("auto: the fused kernels")?;
        for (id, Crossing { composed_up_to, sizes }) in &self.crossings {
            let Some(Timed { fused, composed, .. }) = sizes.iter().find(|timed| timed.tokens == *composed_up_to) else {
                continue;
            };
            let times = |passes: [f64; 2]| format!("{:.2} and {:.2}", passes[0] * 1e3, passes[1] * 1e3);
            write!(
                f,
                "; {id} as tensor operations up to {composed_up_to} tokens, where a forward and a training pass take {} ms \
                 against {} fused",
                times(*composed),
                times(*fused)
            )?;
        }
        f.write_str(" (measured on this machine)")
    }
}

fn measure(mechanism: &Mechanism) -> Result<Crossing> {
    let mut sizes = Vec::new();
    for tokens in TOKENS {
        let timed = at(mechanism, tokens)?;
        sizes.push(timed);
        if !timed.composed_wins() {
            break;
        }
    }
    let last = sizes.iter().rfind(|timed| timed.composed_wins());
    Ok(Crossing { composed_up_to: last.map_or(0, |timed| timed.tokens), sizes })
}

fn at(mechanism: &Mechanism, tokens: usize) -> Result<Timed> {
    let (device, [batch, heads, channels]) = (Device::flex(), CALL);
    let dims = [batch, heads, tokens, channels];
    // The device's own random numbers belong to the program.
    let number = |i: usize| (i as f32 * 0.618_034).fract() * 4.0 - 2.0;
    let len: usize = dims.iter().product();
    let tensors: [Tensor<4>; 4] = std::array::from_fn(|part| {
        let numbers: Vec<_> = (part * len..).take(len).map(number).collect();
        Tensor::from_data(TensorData::new(numbers, dims), &device)
    });
    let mut best = [[f64::INFINITY; 2]; 2];
    // The first run touches memory; the others take turns.
    for run in 0..=RUNS {
        for (best, strategy) in best.iter_mut().zip([Strategy::Fused, Strategy::Composed]) {
            let seconds = run_once(mechanism, strategy, &tensors)?;
            if run > 0 {
                best.iter_mut().zip(seconds).for_each(|(best, seconds)| *best = best.min(seconds));
            }
        }
    }
    let [fused, composed] = best;
    Ok(Timed { tokens, fused, composed })
}

/// Seconds of a forward pass, and of a forward and backward pass.
fn run_once(mechanism: &Mechanism, strategy: Strategy, [q, k, v, dout]: &[Tensor<4>; 4]) -> Result<[f64; 2]> {
    let attended = |q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>| {
        let k = (!mechanism.tied).then(|| k.clone());
        let inputs = Inputs { k, ..Inputs::tied(q.clone(), v.clone()) };
        attend(&inputs, mechanism, &Mask::none(), strategy).map(|output| output.out)
    };
    let start = Instant::now();
    drop(black_box(attended(q, k, v)?));
    let forward = start.elapsed().as_secs_f64();
    let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
    let dout = dout.clone().autodiff();
    let start = Instant::now();
    let gradients = (attended(&q, &k, &v)? * dout).sum().backward();
    drop(black_box(q.grad(&gradients)));
    Ok([forward, start.elapsed().as_secs_f64()])
}
