//! `resolvent analyze`: the token graphs of a model's queries and keys, and what could take softmax's place.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use clap::Args;
use resolvent_kernels::{Mechanism, mechanism::KappaRule};
use resolvent_lab::{
    candidate::Candidate,
    data::DataSpec,
    device::Device,
    disk,
    fit::{Cost, FIT, Measure},
    folder::{Claim, Contents, REPORT},
    progress::tell,
    recipe::with_length_scale,
    stop,
};
use resolvent_probe::{
    analyze::{self, AnalyzeOptions, FitOptions, Learned, ssa_with_centroids},
    report,
    subject::{Example, Subject},
};
use tempfile::TempPath;

use super::{
    compare::command_line,
    devices::DeviceArg,
    material::Given,
    recipe::{Attention, candidates},
};
use crate::{Error, args::Global, destination::folder, error::Result, interrupt::Deferred, memory, output};

/// The options that say what an analysis tells of graphs, at which a fit does not look.
const OF_GRAPHS: [&str; 3] = ["full", "path", "hop_matrix"];

/// Analyse a model's queries and keys: their token graphs, and which mechanism could replace softmax on them
///
/// The input is a dump with tensors q, k and v, [B, H, N, D], [H, N, D] or [N, D], from any framework: a safetensors file, a
/// NumPy archive (.npz), a folder of .npy files or one of them; layers are told by a prefix, as in `layers.3.q`. Without k, keys
/// are the queries; without v, errors are those of the weights. Or, with --checkpoint, a model trained here is shown examples.
/// Every mechanism is applied as it is: the error of its output against dense softmax, its time and memory here, and thirteen
/// numbers of its graph, with --full all. A dump is read one sequence at a time. Ends in a table, results.json and report.html.
/// Mechanisms are measured on the CPU; --device is where the model of --checkpoint runs.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Analyze {
    /// The queries, keys and values; with --checkpoint, a picture, a folder of pictures, or a file of texts, one a line
    #[arg(long, value_name = "PATH", required_unless_present = "checkpoint", conflicts_with_all = ["data", "text"])]
    input: Option<PathBuf>,
    /// Folder of a run or of one checkpoint, whose model is shown the examples
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Data set whose test part the model is shown [default: the one trained on]
    #[arg(long, value_name = "KIND:PATH", requires = "checkpoint", conflicts_with = "text")]
    data: Option<DataSpec>,
    /// A text that the model is shown; may be given several times
    #[arg(long, value_name = "TEXT", requires = "checkpoint")]
    text: Vec<String>,
    /// Keep the model's queries, keys and values in a file, for --input
    #[arg(long, value_name = "DUMP.safetensors", requires = "checkpoint")]
    save_dump: Option<PathBuf>,
    /// Mechanisms: ids, or files M.json, called by their names [default: all, and ssa with centroids]; softmax is always there
    #[arg(long, value_name = "ID,ID", value_delimiter = ',', hide_possible_values = true)]
    mechanisms: Vec<Attention>,
    /// Layers, by the prefix of their tensors [default: all]
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    layers: Vec<String>,
    /// Analyse the first N sequences of each layer [default: all]; with --checkpoint, N examples, evenly spread [default: 4, of --text all]
    #[arg(long, value_name = "N")]
    sequences: Option<usize>,
    /// Tokens see themselves and earlier ones only, as in a language model; its checkpoint says so itself
    #[arg(long)]
    causal: bool,
    /// Tell all there is of a graph in place of thirteen numbers: walks, mixing, diffusion and its maps, singular values and all eigenvalues, what
    /// clusters, landmarks and token weights lose, paths from every token; and how far queries are from keys. Takes several times as long
    #[arg(long)]
    full: bool,
    /// Tell the shortest path from one token to another, counted from 0, by edges as long as one over their weights: its tokens, weights and
    /// length, in every graph; may be given several times. With --causal paths lead to earlier tokens
    #[arg(long, value_name = "FROM,TO", value_parser = pair)]
    path: Vec<[usize; 2]>,
    /// Add the number of hops of the shortest paths between all tokens, of graphs of at most 256, to results.json
    #[arg(long)]
    hop_matrix: bool,
    /// In place of diagnostics, find for every head the cheapest mechanism that keeps to this cosine with softmax's output, and write
    /// fit.json, which attend and the Python wheel apply. --mechanisms are what is tried [default: routed clusters, windows, centroids,
    /// nystromformer, performer, linear-infsa, uniform]; a third of the sequences is held out to check the choice
    #[arg(long, value_name = "TARGET", conflicts_with_all = OF_GRAPHS)]
    fit: Option<f64>,
    /// What the target is of: cosine (at least), or error (at most), the length of the difference over that of softmax's output
    #[arg(long, value_name = "MEASURE", requires = "fit", conflicts_with_all = OF_GRAPHS, default_value = "cosine", value_parser = Measure::from_str)]
    measure: Measure,
    /// What is saved: time on this machine, or operations, which are the same on every one
    #[arg(long, value_name = "COST", requires = "fit", conflicts_with_all = OF_GRAPHS, default_value = "time", value_parser = Cost::from_str)]
    cost: Cost,
    /// The most that all heads together may cost, as a share of dense softmax; for it heads leave the target, those first that lose least
    #[arg(long, value_name = "SHARE", requires = "fit", conflicts_with_all = OF_GRAPHS)]
    budget: Option<f64>,
    /// Folder of the results
    #[arg(long, value_name = "DIR", default_value = "runs/analyze")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent analyze --input dump.safetensors
  resolvent analyze --input dump.safetensors --causal --layers layers.0,layers.11 --sequences 2
  resolvent analyze --checkpoint runs/imdb --sequences 8 --save-dump imdb.safetensors
  resolvent analyze --checkpoint runs/shapes --input photographs
  resolvent analyze --input dump.npz --mechanisms ssa,fna,M.json --full --out runs/mine
  resolvent analyze --input dump.safetensors --mechanisms fna --path 3,17 --path 17,3 --hop-matrix
  resolvent analyze --input dump.safetensors --fit 0.99 --out runs/fit
  resolvent analyze --input dump.safetensors --fit 0.99 --cost operations --budget 0.2

docs/analyze.md shows how to write such a file from PyTorch.";

/// Examples that a model is shown where no number is asked for.
const EXAMPLES_SHOWN: usize = 4;

/// Two tokens, as in `3,17`.
fn pair(text: &str) -> std::result::Result<[usize; 2], String> {
    let tokens = text.split_once(',').and_then(|(from, to)| Some([from.parse().ok()?, to.parse().ok()?]));
    tokens.ok_or_else(|| "two tokens are numbers from 0 with a comma between, as in 3,17".into())
}

/// Runs the command.
pub fn run(args: &Analyze, global: &Global) -> Result<()> {
    if !args.device.is_cpu() && args.checkpoint.is_none() {
        let problem = "--device is for the model of --checkpoint: mechanisms are measured on the CPU; leave it out";
        return Err(Error::file(args.input.as_deref().unwrap_or(Path::new("")), problem));
    }
    let device = args.device.choose(global)?;
    folder(&args.out)?;
    let _claim = Claim::take(&args.out, &[analyze::RESULTS, FIT, REPORT], Contents::Analysis)?;
    let shown = shown(args, &device, global)?;
    // Reading ends at once when asked to stop; from here on files are written.
    let deferred = Deferred::begin();
    let dump = stop::until(&deferred.stop(), || dump(args, shown))?;
    let mut options = AnalyzeOptions {
        name: dump.name.clone(),
        cut: dump.cut,
        learned: dump.learned.clone(),
        words: dump.words.clone(),
        layers: args.layers.clone(),
        sequences: args.sequences,
        causal: args.causal || dump.causal,
        full: args.full,
        paths: args.path.clone(),
        hop_matrix: args.hop_matrix,
        seed: global.seed,
        stop: deferred.stop(),
        memory: Some(Arc::new(memory::Probe)),
        commands: vec![command_line()],
        ..AnalyzeOptions::new(&dump.path)
    };
    if !args.mechanisms.is_empty() || dump.own.is_some() {
        let asked = if args.mechanisms.is_empty() { &[Attention::All] } else { &args.mechanisms[..] };
        let mut candidates = candidates(asked, dump.own.as_ref(), None)?;
        if args.mechanisms.is_empty() {
            candidates.extend(ssa_with_centroids(dump.own.as_ref()));
        }
        options.mechanisms = candidates.into_iter().map(|candidate| dump.settled(candidate)).collect();
    }
    if !global.quiet {
        options.progress = Arc::new(|line| tell(line));
    }
    if let Some(target) = args.fit {
        return fit(args, &dump, FitOptions::new(options, target), global);
    }
    let Some(analysis) = analyze::run(&options, &args.out)? else { return Err(stopped()) };
    let page = report::write_analysis(&args.out, &analysis)?;
    // Of an earlier fit, which is not of these results.
    disk::remove(&args.out.join(FIT))?;
    match global.json {
        true => output::file(&args.out.join(analyze::RESULTS)),
        false => output::print(&format!("{}{}\nreport: {}", analysis.table(), cut_line(dump.cut), page.display())),
    }
}

fn stopped() -> Error {
    Error::Interrupted("nothing was written; run the command again".into())
}

/// Fits a mechanism to every head.
fn fit(args: &Analyze, dump: &Input, options: FitOptions, global: &Global) -> Result<()> {
    if let Some(own) = dump.own.as_ref().filter(|own| own.id() != "softmax") {
        let problem = format!("its attention is {}; --fit finds what can stand for softmax", own.id());
        return Err(Error::file(args.checkpoint.as_deref().unwrap_or(&dump.path), problem));
    }
    let candidates = if args.mechanisms.is_empty() { Vec::new() } else { options.analyze.mechanisms.clone() };
    let options = FitOptions { candidates, measure: args.measure, cost: args.cost, budget: args.budget, ..options };
    let Some(fit) = analyze::fit(&options, &args.out)? else { return Err(stopped()) };
    let page = report::write_fit(&args.out, &fit)?;
    let file = args.out.join(FIT);
    match global.json {
        true => output::file(&args.out.join(analyze::RESULTS)),
        false => output::print(&format!(
            "{}\n{}\nfit: {}\nreport: {}",
            fit.table(),
            cut_line(dump.cut),
            file.display(),
            page.display()
        )),
    }
}

fn cut_line(cut: usize) -> String {
    if cut > 0 { format!("{cut} of the texts were cut to what the model reads\n") } else { String::new() }
}

/// What is analysed.
#[derive(Default)]
struct Input {
    path: PathBuf,
    /// What it is of, where it is a model's.
    name: Option<String>,
    /// The model's mechanism, whose settings count for its id.
    own: Option<Mechanism>,
    /// Whether its tokens see earlier ones only.
    causal: bool,
    /// The words of the first example, where it is a text.
    words: Vec<String>,
    /// What its layers have learned for it.
    learned: Option<Learned>,
    /// The rule for length scales that are not named, where it is known what the tokens are of.
    rule: Option<KappaRule>,
    /// Texts that were cut to what the model reads.
    cut: usize,
    /// A dump that nobody asked to keep is removed with it.
    _temporary: Option<TempPath>,
}

impl Input {
    /// `mechanism` with the length scale that suits the tokens; the model's own is as it was trained.
    fn settled(&self, Candidate { name, mechanism }: Candidate) -> Candidate {
        let mechanism = match self.rule {
            Some(rule) if self.own.as_ref() != Some(&mechanism) => with_length_scale(mechanism, rule),
            _ => mechanism,
        };
        Candidate { name, mechanism }
    }
}

/// A model, the examples that it is shown, and what these are.
type Shown = (Subject, Vec<Example>, String);

/// The model given, with its examples.
fn shown(args: &Analyze, device: &Device, global: &Global) -> Result<Option<Shown>> {
    let Some(checkpoint) = &args.checkpoint else { return Ok(None) };
    let given = Given { data: args.data.as_ref(), input: args.input.as_deref(), texts: &args.text, boxes: None };
    let (material, name) = given.material(checkpoint, global)?;
    let subject = Subject::load(checkpoint, device)?;
    let shown = if args.text.is_empty() { EXAMPLES_SHOWN } else { args.text.len() };
    let examples = subject.examples(&material, args.sequences.unwrap_or(shown))?;
    Ok(Some((subject, examples, name)))
}

/// The dump given, or that of the model given.
fn dump(args: &Analyze, shown: Option<Shown>) -> Result<Input> {
    let Some((subject, examples, name)) = shown else {
        return Ok(Input { path: args.input.clone().unwrap_or_default(), ..Input::default() });
    };
    let (path, temporary) = match &args.save_dump {
        Some(file) => (file.clone(), None),
        None => {
            let failed = |e: std::io::Error| Error::file(&args.out, format!("cannot hold a temporary file: {e}"));
            let file = tempfile::NamedTempFile::new_in(&args.out).map_err(failed)?.into_temp_path();
            (file.to_path_buf(), Some(file))
        }
    };
    if args.causal && subject.sees_pictures() {
        let problem = "holds a model of pictures, whose patches have no order: --causal is for others; leave it out";
        return Err(Error::file(args.checkpoint.as_deref().unwrap_or(&path), problem));
    }
    let (own, learned) = analyze::capture(&subject, &examples, &path)?;
    let cut = examples.iter().filter(|example| example.is_cut()).count();
    let words = match examples.first() {
        Some(Example::Text(text)) => text.words(),
        _ => Vec::new(),
    };
    let rule = Some(if subject.sees_pictures() { KappaRule::Vision } else { KappaRule::Text });
    let name = Some(format!("{} on {name}", subject.path));
    let (causal, learned) = (subject.is_causal() || own.causal, Some(learned));
    Ok(Input { path, name, own: Some(own), causal, words, learned, rule, cut, _temporary: temporary })
}
