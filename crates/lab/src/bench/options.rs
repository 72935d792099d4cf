//! What to measure, and how.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use resolvent_kernels::{Mechanism, Precision};

use super::{Arrangement, BenchReport};
use crate::{Error, Result, candidate::Candidate, environment::Load, memory::MemoryProbe};

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
    /// Heads of keys and values, where tensors lie, and sequences end to end: with these, `tokens` are not read and `batch` is 1. Every
    /// mechanism is measured in each, all in turns; sequences are the same in all. Default the usual one.
    pub arrangements: Vec<Arrangement>,
    /// How busy the machine was before anything ran, for the report; [`Load::current`] tells. Default unknown.
    pub load: Option<Load>,
    /// The precision of our products, and beside [`Precision::Bf16`] peers that have it. Default full. What of ours does not run in it
    /// says so and runs in full.
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
    /// A Python interpreter with PyTorch, which then runs beside ours; onnxruntime and OpenVINO too where it has them. Default none.
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
            arrangements: vec![Arrangement::default()],
            load: None,
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

impl BenchOptions {
    /// Tokens of the sequences that lie end to end.
    pub(super) fn sequences(&self) -> &[usize] {
        self.arrangements.first().map_or(&[], |first| &first.sequences)
    }

    /// The numbers of tokens that are measured, ascending, each once: of sequences, all of them.
    pub(super) fn sizes(&self) -> Vec<usize> {
        let sequences = self.sequences();
        if !sequences.is_empty() {
            return vec![sequences.iter().fold(0, |all, &n| all.saturating_add(n))];
        }
        let mut tokens = self.tokens.clone();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }
}

pub(super) fn fail(field: &str, problem: String) -> Result<()> {
    Err(Error::Recipe { file: "benchmark".into(), field: field.into(), problem: format!("is {problem}") })
}

/// Refuses mechanisms of one name.
pub(super) fn validate_names(mechanisms: &[Candidate]) -> Result<()> {
    for (n, Candidate { name, .. }) in mechanisms.iter().enumerate() {
        if mechanisms[..n].iter().any(|known| known.name == *name) {
            let problem = format!("`{name}` twice; give configurations of one mechanism as files of different names");
            return fail("mechanisms", problem);
        }
    }
    Ok(())
}

/// Refuses a limit that nothing could keep.
pub(super) fn validate_limit(max_seconds: f64) -> Result<()> {
    if max_seconds.is_nan() || max_seconds <= 0.0 {
        return fail("max-seconds", format!("{max_seconds}, must be above 0"));
    }
    Ok(())
}

/// Refuses arrangements of which there is none, or one twice, and what does not fit the heads.
fn validate_arrangements(options: &BenchOptions) -> Result<()> {
    let (BenchOptions { batch, heads, arrangements, .. }, sequences) = (options, options.sequences());
    let call = |arrangement: &Arrangement| (arrangement.layout, arrangement.kv_heads.unwrap_or(*heads));
    for (n, arrangement) in arrangements.iter().enumerate() {
        let (layout, kv_heads) = call(arrangement);
        if arrangements[..n].iter().any(|earlier| call(earlier) == (layout, kv_heads)) {
            let problem = format!("`{layout}` with {kv_heads} heads of keys and values twice; name each once");
            return fail("layout", problem);
        }
    }
    if arrangements.iter().any(|other| other.sequences != sequences) {
        return fail("sequences", "not the same in all arrangements".into());
    }
    if arrangements.is_empty() {
        return fail("arrangements", "empty; the default is the usual one".into());
    }
    if sequences.contains(&0) {
        return fail("sequences", "with a 0; every sequence must have at least one token".into());
    }
    if !sequences.is_empty() && *batch != 1 {
        return fail("batch", format!("{batch} beside sequences, must be 1: they lie end to end"));
    }
    let mut kv_heads = arrangements.iter().filter_map(|arrangement| arrangement.kv_heads);
    match kv_heads.find(|&n| n == 0 || !heads.is_multiple_of(n)) {
        Some(n) => fail("kv-heads", format!("{n}, must divide the {heads} heads")),
        None => Ok(()),
    }
}

/// Refuses what cannot be measured.
pub(super) fn validate(options: &BenchOptions) -> Result<()> {
    let sizes = [("batch", options.batch), ("heads", options.heads), ("head-dim", options.head_dim)];
    for (field, got) in sizes.into_iter().chain([("rounds", options.rounds)]) {
        if got == 0 {
            return fail(field, "0, must be at least 1".into());
        }
    }
    validate_arrangements(options)?;
    let (BenchOptions { batch, heads, head_dim, .. }, sequences) = (options, options.sequences());
    if sequences.is_empty() && (options.tokens.is_empty() || options.tokens.contains(&0)) {
        return fail("tokens", "empty or has a 0; every number of tokens must be at least 1".into());
    }
    // As many elements as a tensor can have in memory at all.
    let widest = batch.checked_mul(*heads).and_then(|n| n.checked_mul(*head_dim));
    for n in options.sizes() {
        if widest.and_then(|w| w.checked_mul(n)).is_none_or(|elements| elements > 1 << 36) {
            let problem =
                format!("{n} x {batch} x {heads} x {head_dim}, must be at most 2^36, the elements of a tensor");
            return fail("tokens x batch x heads x head-dim", problem);
        }
    }
    validate_names(&options.mechanisms)?;
    if options.patience.is_zero() {
        return fail("peer-timeout", "0, must be above 0".into());
    }
    validate_limit(options.max_seconds)
}
