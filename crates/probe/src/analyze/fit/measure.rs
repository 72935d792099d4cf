//! What every candidate costs on the sequences of a layer, and how far its heads are from softmax's.

use std::sync::atomic::Ordering;

use resolvent_kernels::{Mechanism, Shape};
use resolvent_lab::{
    candidate::Candidate,
    fit::{Cost, FittedLayer, Measure},
    stats::finite_median,
};

use super::{FitOptions, choice::Offer};
use crate::analyze::{
    OutputError, Sequence,
    outputs::{Buffers, Call, Reference},
    values_of,
};

/// Sequences of a layer on which passes are timed.
const TIMED: usize = 2;

/// Means over sequences, of which heads may have none on some.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    pub fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    pub fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// One candidate on the sequences of a layer.
#[derive(Debug)]
pub(super) struct Trial {
    pub candidate: Candidate,
    /// Why it cannot be had, if it cannot.
    pub refused: Option<String>,
    /// Its cost as a share of softmax's, of every pass.
    costs: Vec<f64>,
    /// How far every head is from softmax: on the sequences that choices are made by, and on those held out.
    distances: Vec<[Mean; 2]>,
    /// Sequences on which a head has a finite output that can be compared.
    told: Vec<usize>,
}

impl Trial {
    pub fn new(candidate: Candidate, heads: usize) -> Self {
        let distances = vec![[Mean::default(); 2]; heads];
        Self { candidate, refused: None, costs: Vec::new(), distances, told: vec![0; heads] }
    }

    /// The median of its costs.
    pub fn cost(&self) -> Option<f64> {
        finite_median(self.costs.iter().copied()).filter(|_| self.refused.is_none())
    }

    /// How far `head` is on what choices are made by, or on what is held out.
    pub fn distance(&self, head: usize, held_out: bool) -> Option<f64> {
        self.distances[head][usize::from(held_out)].get()
    }

    /// What it offers to `head`, if its output could be compared on all of the `sequences`.
    pub fn offer(&self, candidate: usize, head: usize, sequences: usize) -> Option<Offer> {
        let distance = self.distance(head, false).filter(|_| self.told[head] == sequences)?;
        Some(Offer { candidate, cost: self.cost()?, distance })
    }
}

/// How far an output is, in the options' measure.
pub(super) fn distance(measure: Measure, error: &OutputError) -> f64 {
    match measure {
        Measure::Cosine => (1.0 - error.cosine).max(0.0),
        Measure::Error => error.relative,
    }
}

/// Tries all on sequence `number`, in turns, softmax first. `None` when stopped; else what softmax costs, seconds or operations. Times are of
/// the first [`TIMED`] sequences: all are of one shape.
pub(super) fn attempt(
    options: &FitOptions,
    trials: &mut [Trial],
    sequence: &Sequence,
    number: usize,
    held_out: bool,
) -> Option<Option<f64>> {
    let values = values_of(&options.analyze, sequence);
    let mechanisms: Vec<Mechanism> = trials.iter().map(|trial| trial.candidate.mechanism.clone()).collect();
    let mut calls = Vec::new();
    for (trial, mechanism) in trials.iter_mut().zip(&mechanisms) {
        let made = Call::new(mechanism, options.analyze.causal, &[], sequence, &values);
        calls.push(made.map_err(|why| trial.refused = Some(why.to_string())).ok());
    }
    let (mut buffers, mut reference) = (Buffers::default(), None);
    let mut costs = vec![Vec::new(); trials.len()];
    let rounds = if options.cost == Cost::Time && number < TIMED { options.analyze.rounds } else { 0 };
    for round in 0..=rounds {
        for (at, trial) in trials.iter_mut().enumerate() {
            if options.analyze.stop.load(Ordering::Relaxed) {
                return None;
            }
            let Some(call) = calls[at].as_ref().filter(|_| trial.refused.is_none()) else { continue };
            match call.pass(&mut buffers) {
                Err(why) => trial.refused = Some(why.to_string()),
                // The first pass of each is for its output, and warms what it reads.
                Ok(_) if round == 0 => {
                    let out = call.output(&buffers);
                    if at == 0 {
                        reference = Reference::new(&options.analyze, &mechanisms[0], sequence, &values, &out)
                            .map_err(|why| trial.refused = Some(why.to_string()))
                            .ok();
                    }
                    compare(options, trial, reference.as_ref(), &out, held_out);
                }
                Ok(seconds) => costs[at].push(seconds),
            }
        }
    }
    let cost = |at: usize| match options.cost {
        Cost::Time => finite_median(costs[at].iter().copied()),
        Cost::Operations => calls[at].as_ref().map(|call| {
            let plan = call.operator.plan();
            (plan.flops_forward + plan.exps_forward) as f64
        }),
    };
    let dense = cost(0);
    for (at, trial) in trials.iter_mut().enumerate() {
        trial.costs.extend(cost(at).zip(dense).map(|(own, dense)| own / dense));
    }
    Some(dense)
}

fn compare(options: &FitOptions, trial: &mut Trial, reference: Option<&Reference>, out: &[f32], held_out: bool) {
    let Some(reference) = reference else { return };
    for head in 0..trial.told.len() {
        if let (Some(error), _) = reference.errors(head, out) {
            trial.distances[head][usize::from(held_out)].add(distance(options.measure, &error));
            trial.told[head] += 1;
        }
    }
}

/// A layer as it was fitted, on one sequence beside dense softmax.
pub(super) struct Checked {
    /// Seconds of dense softmax, and of the groups one after the other, heads taken out and put back.
    pub seconds: [f64; 2],
    /// How far every head is; none where nothing can be compared.
    pub distances: Vec<Option<f64>>,
}

/// Runs the groups of `layer` on `sequence`; `None` where softmax itself has no output.
pub(super) fn check(
    options: &FitOptions,
    layer: &FittedLayer,
    softmax: &Mechanism,
    sequence: &Sequence,
) -> Option<Checked> {
    let values = values_of(&options.analyze, sequence);
    let dense = Call::new(softmax, options.analyze.causal, &[], sequence, &values).ok()?;
    let (mut buffers, mut times) = (Buffers::default(), [Vec::new(), Vec::new()]);
    let mut out = Vec::new();
    let mut reference = Vec::new();
    for round in 0..=options.analyze.rounds {
        let seconds = dense.pass(&mut buffers).ok().filter(|seconds| seconds.is_finite())?;
        if round == 0 {
            reference = dense.output(&buffers);
        }
        let begun = std::time::Instant::now();
        out = grouped(options, layer, sequence, &values, &mut buffers).ok()?;
        if round > 0 {
            times[0].push(seconds);
            times[1].push(begun.elapsed().as_secs_f64());
        }
    }
    let reference = Reference::new(&options.analyze, softmax, sequence, &values, &reference).ok()?;
    let distances = (0..sequence.shape.heads)
        .map(|head| reference.errors(head, &out).0.map(|error| distance(options.measure, &error)))
        .collect();
    Some(Checked { seconds: times.map(|times| finite_median(times).unwrap_or(f64::NAN)), distances })
}

/// The output of a layer whose heads have mechanisms of their own, `[heads, tokens, value_dim]`.
fn grouped(
    options: &FitOptions,
    layer: &FittedLayer,
    sequence: &Sequence,
    values: &[f32],
    buffers: &mut Buffers,
) -> resolvent_kernels::Result<Vec<f32>> {
    let s = sequence.shape;
    if let [all] = &layer.groups[..] {
        let call = Call::new(&all.mechanism, options.analyze.causal, &[], sequence, values)?;
        call.pass(buffers)?;
        return Ok(call.output(buffers));
    }
    let mut out = vec![0.0; s.heads * s.seq_q * s.value_dim];
    for group in &layer.groups {
        let take = |tensor: &[f32], one: usize| -> Vec<f32> {
            group.heads.iter().flat_map(|&head| &tensor[head * one..][..one]).copied().collect()
        };
        let own = Sequence {
            shape: Shape { heads: group.heads.len(), ..s },
            same_tokens: sequence.same_tokens,
            shifted: sequence.shifted,
            first: sequence.first,
            number: sequence.number,
            q: take(&sequence.q, s.seq_q * s.head_dim),
            k: sequence.k.as_deref().map(|k| take(k, s.seq_kv * s.head_dim)),
            v: None,
        };
        let values = take(values, s.seq_kv * s.value_dim);
        let call = Call::new(&group.mechanism, options.analyze.causal, &[], &own, &values)?;
        call.pass(buffers)?;
        let (one, made) = (s.seq_q * s.value_dim, call.output(buffers));
        for (&head, rows) in group.heads.iter().zip(made.chunks(one)) {
            out[head * one..][..one].copy_from_slice(rows);
        }
    }
    Ok(out)
}
