//! Attention as it happened in a model: queries, keys and values from a file, read as token graphs, and every mechanism
//! tried on them in place of softmax.
//!
//! The file is read one sequence of one layer at a time, and what is found in it is written as it comes, so that a dump
//! may be larger than memory.

mod capture;
mod distances;
mod dump;
mod fit;
mod graph;
mod graph_report;
mod headline;
mod landmarks;
mod learned;
mod matched;
mod options;
mod outputs;
mod paths;
mod quantities;
mod results;
mod sentence;
mod spool;
mod stored;
mod tally;
mod verdict;
mod walks;

use std::{path::Path, sync::atomic::Ordering, time::Instant};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use resolvent_graph::HeadExtras;
use resolvent_kernels::{Mechanism, Parameter, mechanism::Structure};
use resolvent_lab::{Error, Result, candidate::Candidate, environment::Environment};

use graph::{Baseline, Head, diagnose};
use outputs::{Applied, Reference};
use spool::Spools;

pub use capture::capture;
pub use distances::{Components, DistanceStats, HeadDistances};
pub use dump::{Dump, Layer, Sequence};
pub use fit::{CurvePoint, Fit, FitOptions, HeadFit, LayerFit, Single, TriedCandidate, fit};
pub use graph_report::{FullReport, GraphReport, Subspace};
pub use landmarks::LandmarkReport;
pub use learned::Learned;
pub use options::{AnalyzeOptions, ssa_with_centroids};
pub use paths::{HOP_MATRIX_MAX, PathReport};
pub use quantities::{
    DIRECTIONS, Format, GAP, HOPS, IMPORTANCE, LARGEST_ROW, NEGATIVE, QUANTITIES, Quantity, ROWS, SUBSPACE,
};
pub use results::{Analysis, CallResult, DiffusionMap, HeadResult, LayerSummary, OutputError};
pub use tally::{Curve, DistanceTally, LISTED, LayerTally, Remarks, Sample, Tally};
pub use verdict::{CLOSE, Finding, Numbers, Verdict};
pub use walks::WalkReport;

/// The file in an analysis' folder that holds its [`Analysis`].
pub const RESULTS: &str = "results.json";

/// Runs the analysis and writes [`RESULTS`] into `folder`, which is there. `None` when it was stopped; then nothing is
/// written.
///
/// # Errors
/// [`Error::Io`], [`Error::Damaged`] for a file that cannot be read, naming the tensor; [`Error::Recipe`] for an option
/// that names nothing. A mechanism that refuses a call is part of the result.
pub fn run(options: &AnalyzeOptions, folder: &Path) -> Result<Option<Analysis>> {
    let mut dump = Dump::open(&options.input)?;
    let chosen = chosen(options, dump.layers())?;
    paths::check(options, chosen.iter().map(|&index| &dump.layers()[index]))?;
    let mechanisms = mechanisms(options)?;
    let mut spools = Spools::new(folder)?;
    let mut analysis = Analysis {
        input: options.called(),
        layers: Vec::new(),
        unread: dump.unread().to_vec(),
        cut: options.cut,
        causal: options.causal,
        full: options.full,
        verdicts: Vec::new(),
        environment: Environment::current(),
        commands: options.commands.clone(),
        tallies: vec![Tally::default(); mechanisms.len()],
        distances: vec![DistanceTally::default(); chosen.len()],
        listed: Vec::new(),
        maps: Vec::new(),
        heads: 0,
    };
    for &index in &chosen {
        let layer = dump.layers()[index].clone();
        let sequences = options.sequences.map_or(layer.shape.batch, |most| most.min(layer.shape.batch));
        analysis.layers.push(LayerSummary::new(&layer, sequences));
        for number in 0..sequences {
            let begun = Instant::now();
            let sequence = dump.sequence(index, number)?;
            let nth = analysis.layers.len() - 1;
            let mapped = number == 0 && (nth == 0 || nth + 1 == chosen.len());
            let place = Place { layer: &layer.name, index: nth, sequence: number, mapped };
            let apart = options.full.then(|| distances::distances(&layer.name, number, &sequence));
            for head in apart.into_iter().flatten() {
                analysis.distances[place.index].add(&head);
                spools.distances.add(&head).map_err(spooled(folder))?;
            }
            let Some(found) = analyze(options, &mechanisms, place, &sequence) else { return Ok(None) };
            record(&mut analysis, &mut spools, place.index, &options.words, found).map_err(spooled(folder))?;
            let done = format!("{}, sequence {} of {sequences}", layer.name, number + 1);
            (options.progress)(&format!("{done}: {:.1} s", begun.elapsed().as_secs_f64()));
        }
    }
    let tokens = analysis.layers.iter().map(|layer| layer.tokens.max(layer.keys)).max().unwrap_or(0);
    analysis.verdicts = verdict::verdicts(&mechanisms, &analysis.tallies, tokens, options.causal);
    spools.write(folder, &analysis)?;
    Ok(Some(analysis))
}

fn spooled(folder: &Path) -> impl FnOnce(std::io::Error) -> Error {
    Error::io(folder, "cannot hold the results")
}

fn chosen(options: &AnalyzeOptions, layers: &[Layer]) -> Result<Vec<usize>> {
    let refuse = |field: &str, problem: String| Error::Recipe { file: options.called(), field: field.into(), problem };
    if options.sequences == Some(0) || options.rounds == 0 {
        let field = if options.rounds == 0 { "rounds" } else { "sequences" };
        return Err(refuse(field, "is 0, must be at least 1".into()));
    }
    if options.layers.is_empty() {
        return Ok((0..layers.len()).collect());
    }
    if let Some(name) = options.layers.iter().enumerate().find(|(at, name)| options.layers[..*at].contains(name)) {
        return Err(refuse("layers", format!("names `{}` twice", name.1)));
    }
    let place = |name: &String| {
        let there = || layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = layers.iter().position(|layer| layer.name == *name);
        found.ok_or_else(|| refuse("layers", format!("names `{name}`, which is not there; it has {}", there())))
    };
    options.layers.iter().map(place).collect()
}

/// The mechanisms with the options' causality, softmax first.
fn mechanisms(options: &AnalyzeOptions) -> Result<Vec<Candidate>> {
    let fail = |problem: String| Error::Recipe { file: "analysis".into(), field: "mechanisms".into(), problem };
    let asked = &options.mechanisms;
    let first = asked.iter().position(|candidate| candidate.mechanism.id() == "softmax");
    let softmax = first.map_or_else(|| Mechanism::default().into(), |at| asked[at].clone());
    let others = asked.iter().enumerate().filter(|(at, _)| first != Some(*at)).map(|(_, candidate)| candidate.clone());
    let mut all: Vec<Candidate> = Vec::new();
    for Candidate { name, mechanism } in std::iter::once(softmax).chain(others) {
        if all.iter().any(|known| known.name == name) {
            return Err(fail(format!(
                "name `{name}` twice; give configurations of one mechanism as files of different names"
            )));
        }
        let causal = with(&mechanism, "causal");
        if mechanism.causal && !options.causal {
            return Err(fail(format!(
                "hold a causal `{name}`, which softmax over all tokens would not be compared with on equal terms; say --causal"
            )));
        }
        let mechanism = if options.causal { causal } else { mechanism };
        let mechanism = match options.seed {
            Some(seed) => mechanism.with_seed(seed),
            None => mechanism,
        };
        all.push(Candidate { name, mechanism });
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
    /// Its number among those analysed.
    index: usize,
    sequence: usize,
    /// Whether the diffusion map of its first head is drawn.
    mapped: bool,
}

/// The values of a sequence; where the dump has none, normal numbers by the seed.
fn values_of(options: &AnalyzeOptions, sequence: &Sequence) -> Vec<f32> {
    let noise = || {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed.unwrap_or(0));
        (0..sequence.shape.v_len()).map(|_| StandardNormal.sample(&mut rng)).collect()
    };
    sequence.v.clone().unwrap_or_else(noise)
}

/// A mechanism on one sequence: its call, and its heads where it was not refused.
type Found = (CallResult, Vec<HeadResult>);

/// All mechanisms on one sequence, softmax first; `None` when stopped.
fn analyze(
    options: &AnalyzeOptions,
    mechanisms: &[Candidate],
    place: Place<'_>,
    sequence: &Sequence,
) -> Option<Vec<Found>> {
    let values = values_of(options, sequence);
    let mut reference: Option<Reference> = None;
    let mut baselines: Vec<Option<Baseline>> = Vec::new();
    let mut found = Vec::new();
    for Candidate { name, mechanism: asked } in mechanisms {
        if options.stop.load(Ordering::Relaxed) {
            return None;
        }
        let mechanism = &if sequence.k.is_none() { with(asked, "tied") } else { asked.clone() };
        let mut call = CallResult::new(place.layer, place.sequence, name, mechanism);
        let own = options.learned.as_ref().map_or(&[][..], |learned| learned.of(place.layer, asked));
        let made = outputs::apply(options, mechanism, own, sequence, &values, &mut call).and_then(|applied| {
            // Softmax's, which is first: where it is refused nothing can be compared.
            if found.is_empty() {
                reference = Some(Reference::new(options, mechanism, sequence, &values, &applied.out)?);
            }
            Ok(applied)
        });
        let heads = match (made, &reference) {
            (Ok(applied), Some(reference)) => {
                let (heads, made) =
                    heads(options, (name, mechanism, own), place, sequence, &applied, reference, &baselines);
                if baselines.is_empty() {
                    baselines = made;
                }
                heads
            }
            (Err(why), _) => {
                call.refused = Some(why.to_string());
                Vec::new()
            }
            (Ok(_), None) => {
                call.refused = Some("softmax, which it would be compared with, has no result".into());
                Vec::new()
            }
        };
        found.push((call, heads));
    }
    Some(found)
}

/// Every head's output beside softmax's, and its graph; where the mechanism is softmax, what the others need of it.
fn heads(
    options: &AnalyzeOptions,
    (name, mechanism, learned): (&str, &Mechanism, &[(Parameter, Vec<f32>)]),
    place: Place<'_>,
    sequence: &Sequence,
    applied: &Applied,
    reference: &Reference,
    baselines: &[Option<Baseline>],
) -> (Vec<HeadResult>, Vec<Option<Baseline>>) {
    let s = sequence.shape;
    let of_one_head = mechanism.clone().of_one_head(s.head_dim, s.heads);
    let alone = |head: usize| learned::settled(&of_one_head, learned, head);
    let one = |head: usize| {
        let (output, mean_of_values) = reference.errors(head, &applied.out);
        let comparable = reference.wrong(head).is_none();
        let mut notes: Vec<String> = Vec::new();
        match reference.wrong(head) {
            Some(wrong) if baselines.is_empty() => notes.push(wrong.into()),
            None if output.is_none() => notes.push("its output is not finite".into()),
            _ => {}
        }
        if baselines.is_empty() && sequence.same_tokens && sequence.first > 0 {
            notes.push(format!("the first {} tokens are left out: tokens are counted from the next", sequence.first));
        }
        let q = &sequence.q[head * s.seq_q * s.head_dim..][..s.seq_q * s.head_dim];
        let k = sequence.k.as_deref().map(|k| &k[head * s.seq_kv * s.head_dim..][..s.seq_kv * s.head_dim]);
        let plan = applied.plan.as_ref().map(|plan| (plan, head));
        let baseline = baselines.get(head).and_then(Option::as_ref);
        let named = place.sequence == 0 && options.words.len() == s.seq_q;
        let words = if named { &options.words[..] } else { &[] };
        let extras = HeadExtras::of(mechanism, &s, head, learned, sequence.number);
        let mapped = place.mapped && head == 0;
        let own = Head { tokens: s.seq_q, q, k, extras: &extras, plan, mapped, words };
        let (graph, made) = match sequence.same_tokens.then(|| diagnose(&alone(head), own, baseline, options)) {
            Some(Ok((report, made))) => (Some(report), made),
            Some(Err(why)) => (Some(GraphReport::none(why.to_string())), None),
            None => {
                notes.push("queries and keys are different tokens, which are no graph".into());
                (None, None)
            }
        };
        let (layer, name, mechanism) = (place.layer.to_owned(), name.to_owned(), mechanism.id());
        let sequence = place.sequence;
        (HeadResult { layer, sequence, head, name, mechanism, output, comparable, mean_of_values, notes, graph }, made)
    };
    (0..s.heads).into_par_iter().map(one).unzip()
}

/// Writes what was found on one sequence, and keeps its numbers.
fn record(
    analysis: &mut Analysis,
    spools: &mut Spools,
    layer: usize,
    words: &[String],
    found: Vec<Found>,
) -> std::io::Result<()> {
    let softmax = found.first().map_or_else(Vec::new, |(_, heads)| heads.clone());
    let seconds = found.first().and_then(|(call, _)| call.seconds);
    for ((call, heads), tally) in found.into_iter().zip(&mut analysis.tallies) {
        spools.calls.add(&call)?;
        tally.call(&call, seconds);
        tally.refused_heads += if heads.is_empty() { softmax.len() } else { 0 };
        tally.tied |= call.mechanism.tied && !analysis.layers[layer].tied;
        for (mut head, softmax) in heads.into_iter().zip(&softmax) {
            spools.heads.add(&head)?;
            tally.add(layer, &head, softmax);
            analysis.heads += 1;
            analysis.maps.extend(DiffusionMap::taken(&mut head, words));
            if analysis.listed.len() < LISTED {
                paths::keep_drawn(&mut head);
                if let Some(full) = head.graph.as_mut().and_then(|graph| graph.full.as_mut()) {
                    (full.moduli, full.singular_values) = Default::default();
                }
                analysis.listed.push(head);
            }
        }
    }
    Ok(())
}

/// The window of a mechanism of all pairs.
fn window(mechanism: &Mechanism) -> Option<usize> {
    match mechanism.values().structure {
        Structure::Dense(dense) => dense.window,
        _ => None,
    }
}
