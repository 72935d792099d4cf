//! The operators themselves, measured: time and memory of every mechanism against the number of tokens, beside what this
//! machine can do at best and beside what people use otherwise: Burn's own attention, candle's (feature `candle`), and PyTorch.
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
pub use named::{Carried, Instructions, Pass, TensorType};
pub use options::{BenchOptions, Keep};
pub use ratios::Crossover;
use results::Work;
pub use results::{BenchReport, PlanSummary, Point, Timing};
pub(crate) use results::{milliseconds, three_digits};

/// The file in a benchmark's folder that holds its [`BenchReport`].
pub const RESULTS: &str = "bench.json";

/// A mechanism, and the rivals that compute it.
type Contest<'a> = (&'a Candidate, Vec<Rival>);

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
        if !size(options, &rivals, &contests, &Call::new(options, n)?, &mut report) {
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
        arrangement: options.arrangement.clone(),
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
    for candidate in &options.mechanisms {
        if options.stop.load(Ordering::Relaxed) {
            break;
        }
        let (ours, theirs) = check(candidate, rivals, options);
        let checks = [&ours].into_iter().chain(theirs.iter().map(|(_, check)| check));
        checks.for_each(|check| (options.progress)(&check.to_string()));
        report.rivals.extend(theirs.iter().map(|(_, check)| check.clone()));
        if ours.passed {
            let agree = theirs.into_iter().filter(|(_, check)| check.passed).map(|(rival, _)| rival);
            contests.push((candidate, agree.collect()));
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
    call: &Call,
    report: &mut BenchReport,
) -> bool {
    let known = report.points.len();
    let planned = cases_of(options, rivals, contests, call, report);
    if planned.is_empty() {
        return true;
    }
    if let Some(why) = beyond_memory("its tensors take", Buffers::bytes(call)) {
        planned.into_iter().for_each(|case| skip(options, report, case, &why));
        return true;
    }
    let mut cases = Vec::new();
    let mut buffers = Buffers::new(call);
    for case in planned {
        if options.stop.load(Ordering::Relaxed) {
            report.points.truncate(known);
            return false;
        }
        let probe = options.memory.as_deref();
        cases.extend(attempt(options, case, report, |case| case.warm(&mut buffers, probe)));
    }
    for _ in 0..options.rounds {
        let mut left = Vec::new();
        for case in cases {
            if options.stop.load(Ordering::Relaxed) {
                report.points.truncate(known);
                return false;
            }
            left.extend(attempt(options, case, report, |case| case.turn(&mut buffers, options.turn)));
        }
        cases = left;
    }
    if options.stop.load(Ordering::Relaxed) {
        // What a peer was stopped at is no measurement.
        report.points.truncate(known);
        return false;
    }
    for case in cases {
        let point = case.finish(&report.ceilings);
        (options.progress)(&point.to_string());
        report.points.push(point);
    }
    // A peer that is lost has nothing left to give back, and its points say why.
    let _ = rivals.clear();
    true
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
    call: &Call,
    report: &mut BenchReport,
) -> Vec<Case> {
    let ours = contests.iter().map(|(candidate, _)| Case::ours(candidate, call, options.precision));
    let theirs = contests.iter().flat_map(|(candidate, of)| of.iter().map(|rival| (*candidate, rival)));
    let theirs = theirs.map(|(candidate, rival)| Case::rival(rivals, rival, candidate, call));
    let mut cases = Vec::new();
    for case in ours.chain(theirs) {
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
    cases
}
