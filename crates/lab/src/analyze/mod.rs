//! Attention as it happened in a model: queries, keys and values from a file, read as token graphs, and every mechanism
//! tried on them in place of softmax.
//!
//! The file is read one sequence of one layer at a time, so that a dump may be larger than memory.

mod capture;
mod distances;
mod dump;
mod graph;
mod results;
mod verdict;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use resolvent_kernels::{Extras, Inputs, Mask, Mechanism, Operator, Scratch, Strategy};

use crate::{
    Error, Result,
    compare::{MemoryProbe, peak_above},
    environment::Environment,
};
use graph::{Baseline, Head, diagnose};

pub use capture::capture;
pub use distances::{DistanceStats, HeadDistances};
pub use dump::{Dump, Layer, Sequence};
pub use graph::{FullReport, GraphReport};
pub(crate) use results::median;
pub use results::{Analysis, CallResult, HeadResult, LayerSummary, OutputError};
pub use verdict::{CLOSE, Finding, Numbers, Verdict};

/// The file in an analysis' folder that holds its [`Analysis`].
pub const RESULTS: &str = "results.json";

/// What to analyse, and how.
#[derive(Clone)]
pub struct AnalyzeOptions {
    /// The dump.
    pub input: PathBuf,
    /// What the results call it. Default: the path.
    pub name: Option<String>,
    /// The mechanisms. Default: all presets. Softmax is there whether named or not.
    pub mechanisms: Vec<Mechanism>,
    /// Layers by name. Default: all.
    pub layers: Vec<String>,
    /// Sequences of every layer, from the first. Default: all.
    pub sequences: Option<usize>,
    /// Tokens see earlier ones only. Default false.
    pub causal: bool,
    /// Dense spectra of the graphs as they are, paths from every token, exact mixing times. Default false.
    pub full: bool,
    /// Runs of every call; their median counts. Default 3, >= 1.
    pub rounds: usize,
    /// Seed of the values where the dump has none. Default 0.
    pub seed: u64,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the analysis, for the report.
    pub commands: Vec<String>,
}

impl AnalyzeOptions {
    /// All mechanisms on all of `input`.
    pub fn new(input: impl Into<PathBuf>) -> Self {
        let preset = |id: &&str| Mechanism::preset(id).expect("the ids name presets");
        Self {
            input: input.into(),
            name: None,
            mechanisms: Mechanism::IDS.iter().map(preset).collect(),
            layers: Vec::new(),
            sequences: None,
            causal: false,
            full: false,
            rounds: 3,
            seed: 0,
            stop: Arc::default(),
            progress: Arc::new(|_| {}),
            memory: None,
            commands: Vec::new(),
        }
    }
}

/// Runs the analysis. `None` when it was stopped.
///
/// # Errors
/// [`Error::Io`], [`Error::Damaged`] for a file that cannot be read, naming the tensor; [`Error::Recipe`] for an option
/// that names nothing. A mechanism that refuses a call is part of the result.
pub fn run(options: &AnalyzeOptions) -> Result<Option<Analysis>> {
    let mut dump = Dump::open(&options.input)?;
    let chosen = chosen(options, dump.layers())?;
    let mechanisms = mechanisms(options)?;
    let mut analysis = Analysis {
        input: options.name.clone().unwrap_or_else(|| options.input.display().to_string()),
        layers: Vec::new(),
        unread: dump.unread().to_vec(),
        causal: options.causal,
        full: options.full,
        verdicts: Vec::new(),
        calls: Vec::new(),
        heads: Vec::new(),
        distances: Vec::new(),
        environment: Environment::current(),
        commands: options.commands.clone(),
    };
    for &index in &chosen {
        let layer = dump.layers()[index].clone();
        let sequences = options.sequences.map_or(layer.shape.batch, |most| most.min(layer.shape.batch));
        analysis.layers.push(LayerSummary::new(&layer, sequences));
        for number in 0..sequences {
            let begun = Instant::now();
            let sequence = dump.sequence(index, number)?;
            analysis.distances.extend(distances::distances(&layer.name, number, &sequence));
            let place = Place { layer: &layer.name, sequence: number };
            if !analyze(options, &mechanisms, place, &sequence, &mut analysis)? {
                return Ok(None);
            }
            let done = format!("{}, sequence {} of {sequences}", layer.name, number + 1);
            (options.progress)(&format!("{done}: {:.1} s", begun.elapsed().as_secs_f64()));
        }
    }
    analysis.verdicts = verdict::verdicts(&mechanisms, &analysis.heads, &analysis.calls);
    Ok(Some(analysis))
}

fn chosen(options: &AnalyzeOptions, layers: &[Layer]) -> Result<Vec<usize>> {
    let refuse = |field: &str, problem: String| Error::Recipe {
        file: options.input.display().to_string(),
        field: field.into(),
        problem,
    };
    if options.sequences == Some(0) || options.rounds == 0 {
        let field = if options.rounds == 0 { "rounds" } else { "sequences" };
        return Err(refuse(field, "is 0, must be at least 1".into()));
    }
    if options.layers.is_empty() {
        return Ok((0..layers.len()).collect());
    }
    let place = |name: &String| {
        let there = || layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = layers.iter().position(|layer| layer.name == *name);
        found.ok_or_else(|| {
            refuse("layers", format!("names `{name}`, which the file does not hold; it has {}", there()))
        })
    };
    options.layers.iter().map(place).collect()
}

/// The mechanisms with the options' causality, softmax first.
fn mechanisms(options: &AnalyzeOptions) -> Result<Vec<Mechanism>> {
    let softmax = || Mechanism::Softmax(Default::default());
    let named = options.mechanisms.iter().find(|m| m.id() == "softmax").cloned().unwrap_or_else(softmax);
    let others = options.mechanisms.iter().filter(|m| m.id() != "softmax").cloned();
    let mut all: Vec<Mechanism> = Vec::new();
    for mechanism in std::iter::once(named).chain(others) {
        if all.iter().any(|known| known.id() == mechanism.id()) {
            let problem =
                format!("name `{}` twice; analyse one configuration of a mechanism at a time", mechanism.id());
            return Err(Error::Recipe { file: "analysis".into(), field: "mechanisms".into(), problem });
        }
        all.push(if options.causal { with(&mechanism, "causal") } else { mechanism });
    }
    Ok(all)
}

/// The mechanism with a field of its configuration set, where it has that field.
fn with(mechanism: &Mechanism, field: &str) -> Mechanism {
    let mut config = serde_json::to_value(mechanism).expect("a mechanism is plain data");
    config[field] = true.into();
    Mechanism::from_value(config).unwrap_or_else(|_| mechanism.clone())
}

/// Where in the dump one is.
#[derive(Clone, Copy)]
struct Place<'a> {
    layer: &'a str,
    sequence: usize,
}

/// All mechanisms on one sequence; false when stopped.
fn analyze(
    options: &AnalyzeOptions,
    mechanisms: &[Mechanism],
    place: Place<'_>,
    sequence: &Sequence,
    analysis: &mut Analysis,
) -> Result<bool> {
    let noise = || {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        (0..sequence.shape.v_len()).map(|_| StandardNormal.sample(&mut rng)).collect::<Vec<f32>>()
    };
    let values = sequence.v.clone().unwrap_or_else(noise);
    let mut softmax: Option<Vec<f32>> = None;
    let mut baselines: Vec<Option<Baseline>> = Vec::new();
    for mechanism in mechanisms {
        if options.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let mechanism = &if sequence.k.is_none() { with(mechanism, "tied") } else { mechanism.clone() };
        let (call, out) = apply(options, mechanism, place, sequence, &values);
        analysis.calls.push(call);
        let Some(out) = out else { continue };
        let reference = softmax.get_or_insert_with(|| out.clone());
        let (heads, made) = heads(options, mechanism, place, sequence, (&out, reference), &baselines);
        analysis.heads.extend(heads);
        if baselines.is_empty() {
            baselines = made;
        }
    }
    Ok(true)
}

/// One mechanism on all heads: what it costs, and its output, `[heads, tokens, value_dim]`.
fn apply(
    options: &AnalyzeOptions,
    mechanism: &Mechanism,
    place: Place<'_>,
    sequence: &Sequence,
    values: &[f32],
) -> (CallResult, Option<Vec<f32>>) {
    let mut call = CallResult {
        layer: place.layer.into(),
        sequence: place.sequence,
        mechanism: mechanism.clone(),
        refused: None,
        seconds: None,
        peak_bytes: None,
    };
    match measure(options, mechanism, sequence, values, &mut call) {
        Ok(out) => (call, Some(out)),
        Err(why) => (CallResult { refused: Some(why.to_string()), ..call }, None),
    }
}

fn measure(
    options: &AnalyzeOptions,
    mechanism: &Mechanism,
    sequence: &Sequence,
    values: &[f32],
    call: &mut CallResult,
) -> resolvent_kernels::Result<Vec<f32>> {
    let operator = Operator::new(mechanism, sequence.shape, options.causal, Strategy::Auto)?;
    let k = (!mechanism.tied()).then(|| sequence.k.as_deref().unwrap_or(&sequence.q));
    let inputs = Inputs { q: &sequence.q, k, v: values, extras: Extras::default() };
    let mut out = vec![0.0; operator.out_len()];
    let mut pass = || {
        let (mut stats, mut scratch) = (vec![0.0; operator.plan().stats], Scratch::default());
        operator.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut scratch)
    };
    match options.memory.as_deref() {
        Some(probe) => call.peak_bytes = Some(peak_above(probe, probe.held(), &mut pass)?),
        None => pass()?,
    }
    let mut times = Vec::new();
    for _ in 0..options.rounds {
        let start = Instant::now();
        pass()?;
        times.push(start.elapsed().as_secs_f64());
    }
    call.seconds = median(times);
    Ok(match operator.out_seq() {
        1 if sequence.shape.seq_q > 1 => repeated(&out, &sequence.shape),
        _ => out,
    })
}

/// A common row per head, once for every token.
fn repeated(rows: &[f32], shape: &resolvent_kernels::Shape) -> Vec<f32> {
    rows.chunks(shape.value_dim).flat_map(|row| row.repeat(shape.seq_q)).collect()
}

/// Every head's output beside softmax's, and its graph; where the mechanism is softmax, what the others need of it.
fn heads(
    options: &AnalyzeOptions,
    mechanism: &Mechanism,
    place: Place<'_>,
    sequence: &Sequence,
    (out, reference): (&[f32], &[f32]),
    baselines: &[Option<Baseline>],
) -> (Vec<HeadResult>, Vec<Option<Baseline>>) {
    let s = sequence.shape;
    let one = |head: usize| {
        let rows = head * s.seq_q * s.value_dim..(head + 1) * s.seq_q * s.value_dim;
        let output = OutputError::new(&out[rows.clone()], &reference[rows], s.value_dim);
        let keys = |k: &'_ [f32]| head * s.seq_kv * s.head_dim..(head + 1) * k.len() / s.heads;
        let q = &sequence.q[head * s.seq_q * s.head_dim..][..s.seq_q * s.head_dim];
        let k = sequence.k.as_deref().map(|k| &k[keys(k)]);
        let baseline = baselines.get(head).and_then(Option::as_ref);
        let square = s.seq_q == s.seq_kv;
        let found = square.then(|| diagnose(mechanism, Head { tokens: s.seq_q, q, k }, baseline, options.full));
        let (graph, made) = match found {
            Some(Ok((report, made))) => (Some(report), made),
            Some(Err(why)) => (Some(GraphReport { notes: vec![why.to_string()], ..GraphReport::default() }), None),
            None => (None, None),
        };
        let layer = place.layer.to_owned();
        (HeadResult { layer, sequence: place.sequence, head, mechanism: mechanism.id(), output, graph }, made)
    };
    (0..s.heads).into_par_iter().map(one).unzip()
}
