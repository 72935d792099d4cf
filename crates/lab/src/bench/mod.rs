//! The operators themselves, measured: time and memory of every mechanism against the number of tokens, beside what this
//! machine can do at best and beside Burn's own attention.
//!
//! Nothing is timed that has not been compared with the f64 reference first. All mechanisms of one size run in turns, so
//! that a disturbance of the machine hits all alike.

mod case;
mod ceilings;
mod results;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use resolvent_kernels::{Mechanism, Shape};

use crate::{Error, Result, compare::MemoryProbe, environment::Environment};
use case::{Buffers, Case, check};

pub use ceilings::Ceilings;
pub use results::{BenchReport, Change, Check, Crossover, PlanSummary, Point, Timing, changes};
pub(crate) use results::{PASSES, milliseconds};

/// The file in a benchmark's folder that holds its [`BenchReport`].
pub const RESULTS: &str = "bench.json";

/// What to measure, and how.
#[derive(Clone)]
pub struct BenchOptions {
    /// The mechanisms. Default: all presets.
    pub mechanisms: Vec<Mechanism>,
    /// Numbers of tokens. Default 512 to 65,536.
    pub tokens: Vec<usize>,
    /// Sequences of one call. Default 1.
    pub batch: usize,
    /// Heads. Default 8.
    pub heads: usize,
    /// Channels of a head. Default 64.
    pub head_dim: usize,
    /// Runs of every point; their median counts. Default 5, >= 1.
    pub rounds: usize,
    /// A point whose forward and backward pass would take longer, in seconds, is left out and says so. Default 5.
    pub max_seconds: f64,
    /// Whether Burn's own attention runs beside ours. Default true.
    pub rivals: bool,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the benchmark, for the report.
    pub commands: Vec<String>,
}

impl Default for BenchOptions {
    fn default() -> Self {
        let preset = |id: &&str| Mechanism::preset(id).expect("the ids name presets");
        Self {
            mechanisms: Mechanism::IDS.iter().map(preset).collect(),
            tokens: vec![512, 1024, 2048, 4096, 8192, 16_384, 65_536],
            batch: 1,
            heads: 8,
            head_dim: 64,
            rounds: 5,
            max_seconds: 5.0,
            rivals: true,
            stop: Arc::default(),
            progress: Arc::new(|_| {}),
            memory: None,
            commands: Vec::new(),
        }
    }
}

/// Runs the benchmark. `None` when it was stopped.
///
/// # Errors
/// [`Error::Recipe`] for an option out of range, [`Error::Kernels`] for a mechanism that is not valid.
pub fn run(options: &BenchOptions) -> Result<Option<BenchReport>> {
    validate(options)?;
    let checks = options.mechanisms.iter().map(|m| check(m, options)).collect::<Result<Vec<_>>>()?;
    for check in &checks {
        (options.progress)(&check.to_string());
    }
    let sound: Vec<_> = options.mechanisms.iter().zip(&checks).filter(|(_, c)| c.passed).map(|(m, _)| m).collect();
    let mut report = BenchReport {
        batch: options.batch,
        heads: options.heads,
        head_dim: options.head_dim,
        rounds: options.rounds,
        ceilings: Ceilings::measure(options.rounds),
        checks,
        points: Vec::new(),
        environment: Environment::current(),
        commands: options.commands.clone(),
    };
    (options.progress)(&report.ceilings.to_string());
    let mut tokens = options.tokens.clone();
    tokens.sort_unstable();
    tokens.dedup();
    for n in tokens {
        let shape = Shape::square(options.batch, options.heads, n, options.head_dim);
        if !size(options, &sound, shape, &mut report)? {
            return Ok(None);
        }
    }
    Ok(Some(report))
}

/// Measures all mechanisms at one size; false when stopped.
fn size(options: &BenchOptions, mechanisms: &[&Mechanism], shape: Shape, report: &mut BenchReport) -> Result<bool> {
    let mut cases = Vec::new();
    let rivals = if options.rivals { vec![Case::burn(shape)] } else { Vec::new() };
    let ours = mechanisms.iter().map(|mechanism| Case::ours(mechanism, shape));
    for case in ours.chain(rivals) {
        let case = match case {
            Ok(case) => case,
            Err(refused) => {
                report.points.push(*refused);
                continue;
            }
        };
        let seconds = case.predicted_seconds(report);
        if seconds > options.max_seconds {
            let why = format!(
                "forward and backward would take about {seconds:.0} s; the limit is {} s (--max-seconds)",
                options.max_seconds
            );
            report.points.push(case.skipped(why));
        } else {
            cases.push(case);
        }
    }
    if cases.is_empty() {
        return Ok(true);
    }
    let mut buffers = Buffers::new(shape);
    let probe = options.memory.as_deref();
    for case in &mut cases {
        case.warm(&mut buffers, probe)?;
    }
    for _ in 0..options.rounds {
        for case in &mut cases {
            if options.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            case.round(&mut buffers)?;
        }
    }
    for case in cases {
        let point = case.finish(&report.ceilings);
        (options.progress)(&point.to_string());
        report.points.push(point);
    }
    Ok(true)
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
            return fail("tokens", format!("{n}, which makes tensors of more than 2^36 elements"));
        }
    }
    if options.max_seconds.is_nan() || options.max_seconds <= 0.0 {
        return fail("max-seconds", format!("{}, must be above 0", options.max_seconds));
    }
    Ok(())
}
