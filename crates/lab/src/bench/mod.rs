//! The operators themselves, measured: time and memory of every mechanism against the number of tokens, beside what this
//! machine can do at best and beside what people use otherwise: Burn's own attention, candle's (feature `candle`), and PyTorch.
//!
//! Beside them whole models of pictures, with any mechanism in them ([`run_models`]).
//!
//! Nothing is timed that has not been compared with the f64 reference first. All mechanisms and rivals of one size run in turns,
//! so that a disturbance of the machine hits all alike.

mod buffers;
mod call;
mod case;
mod ceilings;
mod changes;
mod check;
mod comparison;
mod contender;
mod model_results;
mod models;
mod named;
mod options;
mod ours;
mod ratios;
mod results;
mod rivals;

use std::sync::atomic::Ordering;

use resolvent::Calibration;

use crate::{
    Result,
    candidate::Candidate,
    environment::{Environment, beyond_memory},
};
use buffers::Buffers;
use call::Call;
use case::Case;
use check::check;
use rivals::{Rival, Rivals};

pub use call::{Arrangement, TensorLayout};
pub use ceilings::Ceilings;
pub use changes::{Change, changes, differences};
pub use check::Check;
pub use model_results::{Cost, MODEL_RESULTS, ModelPoint, ModelReport};
pub use models::{KeepModels, ModelBenchOptions, run_models};
pub use named::{Carried, Instructions, Pass, TensorType};
pub use options::{BenchOptions, Keep};
pub use ratios::Crossover;
use results::Work;
pub use results::{BenchReport, PlanSummary, Point, Timing};
pub(crate) use results::{milliseconds, three_digits};

/// The file in a benchmark's folder that holds its [`BenchReport`].
pub const RESULTS: &str = "bench.json";

/// A mechanism, how its calls are arranged, and the rivals that compute it.
struct Contest<'a> {
    of: Candidate,
    arrangement: &'a Arrangement,
    rivals: Vec<Rival>,
}

/// Runs the benchmark. What was measured until it was stopped is in the report, size by size.
///
/// What cannot be asked, differs from the reference, or fails, a rival or one of ours, is told of in the report and left out; the
/// others are measured all the same.
///
/// # Errors
/// [`crate::Error::Recipe`] for an option out of range.
pub fn run(options: &BenchOptions) -> Result<BenchReport> {
    options::validate(options)?;
    let mut report = empty(options);
    if let Some(load) = options.load.filter(|load| load.is_busy()) {
        (options.progress)(&format!("warning: {load}"));
    }
    let (rivals, missing) = Rivals::find(options);
    report.peer = rivals.peer();
    report.rivals.extend(missing);
    report.rivals.iter().for_each(|check| (options.progress)(&check.to_string()));
    let contests = checked(options, &rivals, &mut report);
    let stopped = options.stop.load(Ordering::Relaxed);
    if stopped || contests.is_empty() {
        report.interrupted = stopped;
        return Ok(report);
    }
    report.ceilings = Ceilings::measure(options.rounds);
    (options.progress)(&report.ceilings.to_string());
    (options.progress)(&report.auto());
    for n in options.sizes() {
        if !size(options, &rivals, &contests, n, &mut report)? {
            return Ok(report);
        }
        if let Err(why) = (options.keep)(&report) {
            (options.progress)(&format!("not kept so far: {why}"));
        }
    }
    report.interrupted = false;
    Ok(report)
}

fn empty(options: &BenchOptions) -> BenchReport {
    BenchReport {
        batch: options.batch,
        heads: options.heads,
        head_dim: options.head_dim,
        arrangement: Arrangement::common(&options.arrangements),
        load: options.load,
        rounds: options.rounds,
        ceilings: Ceilings::default(),
        checks: Vec::new(),
        rivals: Vec::new(),
        peer: None,
        interrupted: true,
        calibration: Calibration::installed().cloned(),
        points: Vec::new(),
        environment: Environment::current(),
        commands: options.commands.clone(),
    }
}

/// Compares everything with the reference; what agrees is measured.
fn checked<'a>(options: &'a BenchOptions, rivals: &Rivals, report: &mut BenchReport) -> Vec<Contest<'a>> {
    let mut contests = Vec::new();
    let several = options.arrangements.len() > 1;
    let all = options.mechanisms.iter().flat_map(|of| options.arrangements.iter().map(move |how| (of, how)));
    for (candidate, arrangement) in all {
        if options.stop.load(Ordering::Relaxed) {
            break;
        }
        let of = if several { arrangement.named(candidate) } else { candidate.clone() };
        let (ours, theirs) = check(&of, arrangement, rivals, options);
        let checks = [&ours].into_iter().chain(theirs.iter().map(|(_, check)| check));
        checks.for_each(|check| (options.progress)(&check.to_string()));
        report.rivals.extend(theirs.iter().map(|(_, check)| check.clone()));
        if ours.passed {
            let agree = theirs.into_iter().filter(|(_, check)| check.passed).map(|(rival, _)| rival);
            let rivals = agree.collect();
            contests.push(Contest { of, arrangement, rivals });
        }
        report.checks.push(ours);
    }
    contests
}

/// Measures everything at one size; false when stopped before, and then nothing of it is in the report.
fn size(
    options: &BenchOptions,
    rivals: &Rivals,
    contests: &[Contest<'_>],
    tokens: usize,
    report: &mut BenchReport,
) -> Result<bool> {
    let known = report.points.len();
    let planned = cases_of(options, rivals, contests, tokens, report)?;
    let mut calls: Vec<Call> = Vec::new();
    for case in &planned {
        if !calls.iter().any(|call| call.lies_as(case.call())) {
            calls.push(case.call().clone());
        }
    }
    let bytes = calls.iter().map(Buffers::bytes).fold(0, u64::saturating_add);
    if let Some(why) = beyond_memory("its tensors take", bytes) {
        let fewer = if calls.len() > 1 { "; ask for fewer arrangements at a time" } else { "" };
        planned.into_iter().for_each(|case| skip(options, report, case, &format!("{why}{fewer}")));
        return Ok(true);
    }
    let mut buffers: Vec<Buffers> = calls.iter().map(Buffers::new).collect();
    let cases = timed(options, planned, &mut buffers, report);
    if options.stop.load(Ordering::Relaxed) {
        // What a peer was stopped at is no measurement.
        report.points.truncate(known);
        return Ok(false);
    }
    for case in cases {
        let point = case.finish(&report.ceilings);
        (options.progress)(&point.to_string());
        report.points.push(point);
    }
    // A peer that is lost has nothing left to give back, and its points say why.
    let _ = rivals.clear();
    Ok(true)
}

/// The cases after their turns, as many of these as there are until it is stopped. One that failed is a point that says why.
fn timed(options: &BenchOptions, planned: Vec<Case>, buffers: &mut [Buffers], report: &mut BenchReport) -> Vec<Case> {
    let stopped = || options.stop.load(Ordering::Relaxed);
    let mut cases = Vec::new();
    for case in planned {
        if stopped() {
            break;
        }
        let probe = options.memory.as_deref();
        cases.extend(attempt(options, case, report, |case| case.warm(buffers, probe)));
    }
    for _ in 0..options.rounds {
        let mut left = Vec::new();
        for case in cases {
            if stopped() {
                break;
            }
            left.extend(attempt(options, case, report, |case| case.turn(buffers, options.turn)));
        }
        cases = left;
    }
    cases
}

/// Leaves a case out, and says why.
fn skip(options: &BenchOptions, report: &mut BenchReport, case: Case, why: &str) {
    let point = case.skipped(why.into());
    (options.progress)(&point.to_string());
    report.points.push(point);
}

/// The case, unless it failed, which is a point that says why.
fn attempt(
    options: &BenchOptions,
    mut case: Case,
    report: &mut BenchReport,
    step: impl FnOnce(&mut Case) -> Result<()>,
) -> Option<Case> {
    match step(&mut case) {
        Ok(()) => Some(case),
        Err(why) => {
            skip(options, report, case, &why.to_string());
            None
        }
    }
}

/// What is to be measured at one size; the rest are points that say why not.
fn cases_of(
    options: &BenchOptions,
    rivals: &Rivals,
    contests: &[Contest<'_>],
    tokens: usize,
    report: &mut BenchReport,
) -> Result<Vec<Case>> {
    let call = |arrangement| Call::new(options, arrangement, tokens);
    let mut planned = Vec::new();
    for Contest { of, arrangement, .. } in contests {
        planned.push(Case::ours(of, &call(arrangement)?, options.precision));
    }
    for Contest { of, arrangement, rivals: theirs } in contests {
        let call = call(arrangement)?;
        planned.extend(theirs.iter().map(|rival| Case::rival(rivals, rival, of, &call)));
    }
    let mut cases = Vec::new();
    for case in planned {
        let case = match case {
            Ok(case) => case,
            Err(refused) => {
                (options.progress)(&refused.to_string());
                report.points.push(*refused);
                continue;
            }
        };
        let (seconds, needed) = (case.predicted_seconds(report), case.needs());
        if seconds > options.max_seconds {
            let limit = options.max_seconds;
            let why =
                format!("forward and backward would take about {seconds:.0} s; the limit is {limit} s (--max-seconds)");
            skip(options, report, case, &why);
        } else if let Some(why) = beyond_memory("it would hold about", needed) {
            skip(options, report, case, &why);
        } else {
            cases.push(case);
        }
    }
    Ok(cases)
}
