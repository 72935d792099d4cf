//! What every mechanism makes of the values of one sequence, and what that is compared with.

use std::time::Instant;

use resolvent_kernels::{
    ClusterPlan, Error, Extras, Inputs, Mask, Mechanism, Operator, Parameter, Scratch, Shape, Strategy,
};
use resolvent_lab::{memory::peak_above, stats::finite_median};

use super::{AnalyzeOptions, CallResult, OutputError, Sequence, learned::extras, window};

/// Softmax's rows are shares to within this.
const WHOLE: f32 = 1e-3;

/// One mechanism's call on all heads.
pub(super) struct Applied {
    /// Its output, `[heads, tokens, value_dim]`.
    pub out: Vec<f32>,
    /// The plan of a clustered mechanism.
    pub plan: Option<ClusterPlan>,
}

/// A mechanism's forward pass over all heads of a sequence, to be made as often as is asked.
pub(super) struct Call<'a> {
    pub operator: Operator,
    inputs: Inputs<'a, f32>,
}

/// What passes write to.
#[derive(Default)]
pub(super) struct Buffers {
    /// The output of the last one.
    pub out: Vec<f32>,
    stats: Vec<f32>,
    scratch: Scratch,
}

impl<'a> Call<'a> {
    /// Of `mechanism`, with what was `learned` for it.
    pub(super) fn new(
        mechanism: &Mechanism,
        causal: bool,
        learned: &'a [(Parameter, Vec<f32>)],
        sequence: &'a Sequence,
        values: &'a [f32],
    ) -> resolvent_kernels::Result<Self> {
        if !sequence.same_tokens {
            // As many keys as queries are still other tokens: what cannot do with another number cannot do with these.
            let other = Shape { seq_kv: sequence.shape.seq_q + 1, ..sequence.shape };
            Operator::new(mechanism, other, causal, Strategy::Auto)?;
        }
        let windowed = window(mechanism).is_some();
        if sequence.shifted && (causal || mechanism.causal || windowed || mechanism.bias.is_some()) {
            return Err(Error::Unsupported {
                mechanism: mechanism.id(),
                what: "keys whose mask leaves out the last",
                why: "causality, windows and biases place queries by the last key; leave the mask out",
            });
        }
        let operator = Operator::new(mechanism, sequence.shape, causal, Strategy::Auto)?;
        Ok(Self {
            operator,
            inputs: Inputs {
                extras: extras(learned).with_first_sequence(sequence.number),
                ..inputs(mechanism, sequence, values)
            },
        })
    }

    /// One pass, and its seconds, which are no number where f32 refused it.
    pub(super) fn pass(&self, buffers: &mut Buffers) -> resolvent_kernels::Result<f64> {
        let Buffers { out, stats, scratch } = buffers;
        out.resize(self.operator.out_len(), 0.0);
        stats.resize(self.operator.plan().stats, 0.0);
        let begun = Instant::now();
        let whole = told(self.operator.forward(&self.inputs, &Mask::NONE, out, stats, scratch), out)?;
        Ok(if whole { begun.elapsed().as_secs_f64() } else { f64::NAN })
    }

    /// The output of the last pass, a common row per head repeated for every token.
    pub(super) fn output(&self, buffers: &Buffers) -> Vec<f32> {
        whole(&self.operator, buffers.out.clone())
    }
}

/// Applies `mechanism`, with what was `learned` for it, and writes into `call` what it costs.
pub(super) fn apply(
    options: &AnalyzeOptions,
    mechanism: &Mechanism,
    learned: &[(Parameter, Vec<f32>)],
    sequence: &Sequence,
    values: &[f32],
    call: &mut CallResult,
) -> resolvent_kernels::Result<Applied> {
    let own = Call::new(mechanism, options.causal, learned, sequence, values)?;
    let mut buffers = Buffers::default();
    match options.memory.as_deref() {
        Some(probe) => call.peak_bytes = Some(peak_above(probe, probe.held(), || own.pass(&mut buffers).map(drop))?),
        None => drop(own.pass(&mut buffers)?),
    }
    let times = (0..options.rounds).map(|_| own.pass(&mut buffers)).collect::<resolvent_kernels::Result<Vec<_>>>()?;
    call.seconds = finite_median(times);
    let plan = mechanism.clustering().is_some().then(|| own.operator.clusters(&own.inputs, &Mask::NONE)).transpose()?;
    Ok(Applied { plan: plan.map(|plan| plan.into_owned()), out: whole(&own.operator, buffers.out) })
}

/// Whether there is an output. Where f32 cannot tell the numbers there is none: that is a finding, not a failure.
fn told(done: resolvent_kernels::Result<()>, out: &mut [f32]) -> resolvent_kernels::Result<bool> {
    if matches!(done, Err(Error::Range { .. } | Error::Close { .. } | Error::Overflow { .. })) {
        out.fill(f32::NAN);
        return Ok(false);
    }
    done.map(|()| true)
}

fn inputs<'a>(mechanism: &Mechanism, sequence: &'a Sequence, values: &'a [f32]) -> Inputs<'a, f32> {
    let k = (!mechanism.tied).then(|| sequence.k.as_deref().unwrap_or(&sequence.q));
    Inputs { q: &sequence.q, k, v: values, extras: Extras::default() }
}

/// The output with a common row per head repeated for every token.
fn whole(operator: &Operator, out: Vec<f32>) -> Vec<f32> {
    let shape = operator.shape();
    match operator.out_seq() {
        1 if shape.seq_q > 1 => out.chunks(shape.value_dim).flat_map(|row| row.repeat(shape.seq_q)).collect(),
        _ => out,
    }
}

/// Softmax's output on one sequence, what is wrong with it, and the mean of all values.
pub(super) struct Reference {
    pub softmax: Vec<f32>,
    mean: Vec<f32>,
    /// One per head.
    wrong: Vec<Option<String>>,
    shape: Shape,
}

impl Reference {
    /// Of softmax's output `out` on `sequence`.
    pub(super) fn new(
        options: &AnalyzeOptions,
        mechanism: &Mechanism,
        sequence: &Sequence,
        values: &[f32],
        out: &[f32],
    ) -> resolvent_kernels::Result<Self> {
        let forward = |mechanism: &Mechanism, shape: Shape, values: &[f32]| {
            let operator = Operator::new(mechanism, shape, options.causal, Strategy::Auto)?;
            let (mut out, mut stats) = (vec![0.0; operator.out_len()], vec![0.0; operator.plan().stats]);
            let inputs = inputs(mechanism, sequence, values);
            told(operator.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut Scratch::default()), &mut out)?;
            Ok::<_, resolvent_kernels::Error>(whole(&operator, out))
        };
        let shape = sequence.shape;
        let uniform = Mechanism::uniform();
        let mean = forward(&uniform, shape, values)?;
        let ones = vec![1.0; shape.heads * shape.seq_kv];
        let sums = forward(mechanism, Shape { value_dim: 1, ..shape }, &ones)?;
        let rows = shape.seq_q * shape.value_dim;
        let wrong = (0..shape.heads)
            .map(|head| wrong(&sums[head * shape.seq_q..][..shape.seq_q], &out[head * rows..][..rows]))
            .collect();
        Ok(Self { softmax: out.to_vec(), mean, wrong, shape })
    }

    /// Why nothing can be compared with softmax on a head, where so.
    pub(super) fn wrong(&self, head: usize) -> Option<&str> {
        self.wrong[head].as_deref()
    }

    /// The error of `out`, and that of the mean of all values.
    pub(super) fn errors(&self, head: usize, out: &[f32]) -> (Option<OutputError>, Option<f64>) {
        if self.wrong[head].is_some() {
            return (None, None);
        }
        let rows = self.shape.seq_q * self.shape.value_dim;
        let of = |x: &[f32]| {
            let own = |x: &[f32]| x[head * rows..][..rows].to_vec();
            OutputError::new(&own(x), &own(&self.softmax), self.shape.value_dim)
        };
        (of(out), of(&self.mean).map(|error| error.scaled))
    }
}

/// What is wrong with softmax on a head, from the sums of its rows and its output.
fn wrong(sums: &[f32], out: &[f32]) -> Option<String> {
    if let Some(row) = sums.iter().position(|sum| (sum - 1.0).abs() > WHOLE || sum.is_nan()) {
        let sum = if sums[row].is_finite() { format!("sums to {}", sums[row]) } else { "has no sum".into() };
        return Some(format!("row {row} of softmax {sum}: the scores leave f32, and nothing can be compared with it"));
    }
    if out.iter().any(|x| !x.is_finite()) {
        return Some(
            "softmax's output is not finite: the values leave f32, and nothing can be compared with it".into(),
        );
    }
    (out.iter().all(|&x| x == 0.0)).then(|| "softmax's output is zero, and no error is a share of that".into())
}
