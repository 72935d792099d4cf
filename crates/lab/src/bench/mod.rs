//! The operators themselves, measured: time and memory of every mechanism against the number of tokens, beside what this
//! machine can do at best and beside what people use otherwise: Burn's own attention, candle's (feature `candle`), and PyTorch.
//!
//! Nothing is timed that has not been compared with the f64 reference first. All mechanisms and rivals of one size run in turns,
//! so that a disturbance of the machine hits all alike.

mod case;
mod ceilings;
mod changes;
mod check;
mod contender;
mod ratios;
mod results;
mod rivals;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use resolvent::Calibration;
use resolvent_kernels::{Mechanism, Precision, Shape};

use crate::{
    Error, Result,
    candidate::Candidate,
    environment::{Environment, beyond_memory},
    memory::MemoryProbe,
};
use case::Case;
use check::check;
use contender::Buffers;
use rivals::{Rival, Rivals};

pub use ceilings::Ceilings;
pub use changes::{Change, changes, differences};
pub use check::Check;
pub use ratios::Crossover;
use results::Work;
pub use results::{BenchReport, PlanSummary, Point, Timing};
pub(crate) use results::{PASSES, Pass, milliseconds, three_digits};

/// The file in a benchmark's folder that holds its [`BenchReport`].
pub const RESULTS: &str = "bench.json";

/// What [`BenchOptions::keep`] does with a report, such as [`BenchReport::save`].
pub type Keep = dyn Fn(&BenchReport) -> Result<()> + Send + Sync;

/// What to measure, and how.
#[derive(Clone)]
pub struct BenchOptions {
    /// The mechanisms, each name once; one mechanism may be there in several configurations. Default: all presets.
    pub mechanisms: Vec<Candidate>,
    /// Numbers of tokens. Default 512 to 65,536 in powers of two, and 331,776.
    pub tokens: Vec<usize>,
    /// Sequences of one call. Default 1.
    pub batch: usize,
    /// Heads. Default 8.
    pub heads: usize,
    /// Channels of a head. Default 64.
    pub head_dim: usize,
    /// The precision of our products. Default full. What does not run in it says so and runs in full.
    pub precision: Precision,
    /// Turns of every point; the median of their times counts. Default 5, >= 1.
    pub rounds: usize,
    /// How long a turn lasts at least: what takes less is run several times. Default 0.3 s, longer than the threads of others
    /// look for work before they sleep.
    pub turn: Duration,
    /// A point whose forward and backward pass would take longer, in seconds, is left out and says so. Default 5.
    pub max_seconds: f64,
    /// Whether Burn's own attention, and with the feature `candle` candle's, run beside our softmax. Default true.
    pub rivals: bool,
    /// A Python interpreter with PyTorch, which then runs beside ours. Default none.
    pub peers: Option<PathBuf>,
    /// Whether PyTorch also compiles its formulas (`torch.compile`), which takes a while for each. Default false.
    pub compiled: bool,
    /// How long an answer of a peer may take. Default five minutes.
    pub patience: Duration,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Who keeps what there is after every size, marked as interrupted: a machine may go down before the last. Progress tells where
    /// it fails, and measuring goes on.
    pub keep: Arc<Keep>,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the benchmark, for the report.
    pub commands: Vec<String>,
}

impl Default for BenchOptions {
    fn default() -> Self {
        let preset = |id: &&str| Mechanism::preset(id).expect("the ids name presets").into();
        Self {
            mechanisms: Mechanism::IDS.iter().map(preset).collect(),
            tokens: vec![512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 331_776],
            batch: 1,
            heads: 8,
            head_dim: 64,
            precision: Precision::Full,
            rounds: 5,
            turn: Duration::from_millis(300),
            max_seconds: 5.0,
            rivals: true,
            peers: None,
            compiled: false,
            patience: Duration::from_secs(300),
            stop: Arc::default(),
            progress: Arc::new(|_| {}),
            keep: Arc::new(|_| Ok(())),
            memory: None,
            commands: Vec::new(),
        }
    }
}

/// A mechanism, and the rivals that compute it.
type Contest<'a> = (&'a Candidate, Vec<Rival>);

/// Runs the benchmark. What was measured until it was stopped is in the report, size by size.
///
/// A rival that cannot be asked, differs from the reference, or fails is told of in the report; ours are measured all the same.
///
/// # Errors
/// [`Error::Recipe`] for an option out of range, [`Error::Kernels`] for a mechanism that is not valid.
pub fn run(options: &BenchOptions) -> Result<BenchReport> {
    validate(options)?;
    let (rivals, missing) = Rivals::find(options);
    let mut report = empty(options);
    report.peer = rivals.peer();
    report.rivals.extend(missing.map(|why| Check::refused("torch", why)));
    report.rivals.iter().for_each(|check| (options.progress)(&check.to_string()));
    let contests = checked(options, &rivals, &mut report)?;
    let stopped = options.stop.load(Ordering::Relaxed);
    if stopped || contests.is_empty() {
        report.interrupted = stopped;
        return Ok(report);
    }
    report.ceilings = Ceilings::measure(options.rounds);
    (options.progress)(&report.ceilings.to_string());
    (options.progress)(&report.auto());
    let mut tokens = options.tokens.clone();
    tokens.sort_unstable();
    tokens.dedup();
    for n in tokens {
        let shape = Shape::square(options.batch, options.heads, n, options.head_dim);
        if !size(options, &rivals, &contests, shape, &mut report)? {
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
fn checked<'a>(options: &'a BenchOptions, rivals: &Rivals, report: &mut BenchReport) -> Result<Vec<Contest<'a>>> {
    let mut contests = Vec::new();
    for candidate in &options.mechanisms {
        if options.stop.load(Ordering::Relaxed) {
            break;
        }
        let (ours, theirs) = check(candidate, rivals, options)?;
        let checks = [&ours].into_iter().chain(theirs.iter().map(|(_, check)| check));
        checks.for_each(|check| (options.progress)(&check.to_string()));
        report.rivals.extend(theirs.iter().map(|(_, check)| check.clone()));
        if ours.passed {
            let agree = theirs.into_iter().filter(|(_, check)| check.passed).map(|(rival, _)| rival);
            contests.push((candidate, agree.collect()));
        }
        report.checks.push(ours);
    }
    Ok(contests)
}

/// Measures everything at one size; false when stopped before, and then nothing of it is in the report.
fn size(
    options: &BenchOptions,
    rivals: &Rivals,
    contests: &[Contest<'_>],
    shape: Shape,
    report: &mut BenchReport,
) -> Result<bool> {
    let known = report.points.len();
    let planned = cases_of(options, rivals, contests, shape, report);
    if planned.is_empty() {
        return Ok(true);
    }
    if let Some(why) = beyond_memory("its tensors take", Buffers::bytes(shape)) {
        planned.into_iter().for_each(|case| skip(options, report, case, &why));
        return Ok(true);
    }
    let mut cases = Vec::new();
    let mut buffers = Buffers::new(shape);
    for case in planned {
        if options.stop.load(Ordering::Relaxed) {
            report.points.truncate(known);
            return Ok(false);
        }
        let probe = options.memory.as_deref();
        cases.extend(attempt(options, case, report, |case| case.warm(&mut buffers, probe))?);
    }
    for _ in 0..options.rounds {
        let mut left = Vec::new();
        for case in cases {
            if options.stop.load(Ordering::Relaxed) {
                report.points.truncate(known);
                return Ok(false);
            }
            left.extend(attempt(options, case, report, |case| case.turn(&mut buffers, options.turn))?);
        }
        cases = left;
    }
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

/// Leaves a case out, and says why.
fn skip(options: &BenchOptions, report: &mut BenchReport, case: Case, why: &str) {
    let point = case.skipped(why.into());
    (options.progress)(&point.to_string());
    report.points.push(point);
}

/// The case, unless it is a rival's and failed, which is a point that says why.
fn attempt(
    options: &BenchOptions,
    mut case: Case,
    report: &mut BenchReport,
    step: impl FnOnce(&mut Case) -> Result<()>,
) -> Result<Option<Case>> {
    match step(&mut case) {
        Ok(()) => Ok(Some(case)),
        Err(why) if case.is_rival() => {
            skip(options, report, case, &why.to_string());
            Ok(None)
        }
        Err(why) => Err(why),
    }
}

/// What is to be measured at one size; the rest are points that say why not.
fn cases_of(
    options: &BenchOptions,
    rivals: &Rivals,
    contests: &[Contest<'_>],
    shape: Shape,
    report: &mut BenchReport,
) -> Vec<Case> {
    let ours = contests.iter().map(|(candidate, _)| Case::ours(candidate, shape, options.precision));
    let theirs = contests.iter().flat_map(|(candidate, of)| of.iter().map(|rival| (*candidate, rival)));
    let theirs = theirs.map(|(candidate, rival)| Case::rival(rivals, rival, candidate, shape));
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

fn validate(options: &BenchOptions) -> Result<()> {
    let fail = |field: &str, problem: String| {
        Err(Error::Recipe { file: "benchmark".into(), field: field.into(), problem: format!("is {problem}") })
    };
    let sizes = [("batch", options.batch), ("heads", options.heads), ("head-dim", options.head_dim)];
    for (field, got) in sizes.into_iter().chain([("rounds", options.rounds)]) {
        if got == 0 {
            return fail(field, "0, must be at least 1".into());
        }
    }
    if options.tokens.is_empty() || options.tokens.contains(&0) {
        return fail("tokens", "empty or has a 0; every number of tokens must be at least 1".into());
    }
    // As many elements as a tensor can have in memory at all.
    let widest = options.batch.checked_mul(options.heads).and_then(|n| n.checked_mul(options.head_dim));
    for &n in &options.tokens {
        if widest.and_then(|w| w.checked_mul(n)).is_none_or(|elements| elements > 1 << 36) {
            let BenchOptions { batch, heads, head_dim, .. } = options;
            let problem =
                format!("{n} x {batch} x {heads} x {head_dim}, must be at most 2^36, the elements of a tensor");
            return fail("tokens x batch x heads x head-dim", problem);
        }
    }
    for (n, Candidate { name, .. }) in options.mechanisms.iter().enumerate() {
        if options.mechanisms[..n].iter().any(|known| known.name == *name) {
            let problem = format!("`{name}` twice; give configurations of one mechanism as files of different names");
            return fail("mechanisms", problem);
        }
    }
    if options.patience.is_zero() {
        return fail("peer-timeout", "0, must be above 0".into());
    }
    if options.max_seconds.is_nan() || options.max_seconds <= 0.0 {
        return fail("max-seconds", format!("{}, must be above 0", options.max_seconds));
    }
    Ok(())
}
