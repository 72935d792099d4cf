//! `resolvent bench`: time and memory of the operators against the number of tokens, and of whole models.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use resolvent_kernels::Precision;
use resolvent_lab::{
    bench::{self, Arrangement, BenchOptions, BenchReport, TensorLayout},
    environment::Load,
    folder::{Claim, Contents, REPORT},
    progress::tell,
    recipe::Setting,
    report::write_bench,
    source::Document,
};
use serde_json::json;

use super::{
    bench_models,
    compare::command_line,
    recipe::{Attention, candidates},
};
use crate::{
    Error,
    args::{Global, precision},
    calibrate,
    destination::folder,
    error::Result,
    interrupt::Deferred,
    memory, output,
};

/// Measure the operators: time and memory of each mechanism against the number of tokens; or whole models (--model)
///
/// Every mechanism is compared with the f64 reference first; one that differs is not timed, and the command fails. In turns
/// with them run others' ways to the same results, likewise compared: Burn's own attention, candle's (if built with the feature
/// `candle`), and PyTorch, onnxruntime and OpenVINO (--peers). Beside them stands what this machine reaches in a plain matrix product, in exponentials
/// and in copying memory. bench.json (of --model models.json) and report.html are written after every size; a table ends it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Bench {
    /// Mechanisms: ids, or files M.json, called by their names, of one mechanism as many as you like [default: all; of a model its
    /// own]
    #[arg(long, value_name = "ID,ID", value_delimiter = ',', hide_possible_values = true)]
    pub(super) mechanisms: Vec<Attention>,
    /// A whole model in place of operators, a vision transformer or a pyramid: a recipe, a built-in one by its name or a file in TOML. A
    /// forward pass and a training step on generated pictures, in time, memory and multiply-adds
    #[arg(long, value_name = "NAME|FILE.toml", conflicts_with_all = OF_OPERATORS)]
    model: Option<String>,
    /// With --model: sides of the square pictures [default: 224,512,1024]
    #[arg(long, value_name = "N,N", value_delimiter = ',', requires = "model", conflicts_with_all = OF_OPERATORS)]
    pub(super) pixels: Vec<usize>,
    /// With --model: set a field of its recipe, by its dotted name, such as model.depth=12 or precision=bf16; may be repeated
    #[arg(long, value_name = "KEY=VALUE", requires = "model", conflicts_with_all = OF_OPERATORS)]
    pub(super) set: Vec<Setting>,
    /// With --model: joules of a picture too, where the machine tells (RAPL, the processor's own counters; elsewhere an error)
    #[arg(long, requires = "model", conflicts_with_all = OF_OPERATORS)]
    pub(super) joules: bool,
    /// Numbers of tokens [default: 512 to 65536, and 331776]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Sequences of one call, or pictures of one batch
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) batch: usize,
    /// Heads
    #[arg(long, value_name = "N", default_value_t = 8)]
    heads: usize,
    /// Channels of a head
    #[arg(long, value_name = "N", default_value_t = 64)]
    head_dim: usize,
    /// Heads of keys and values, each of which serves as many heads of queries in a row; of several numbers, every one in turns [default:
    /// as many as of queries]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    kv_heads: Vec<usize>,
    /// Where tensors lie: heads ([batch, heads, tokens, channels]), tokens ([batch, tokens, heads, channels]) or packed (queries, keys
    /// and values of a token side by side, as one layer projects them); of several, every one in turns
    #[arg(long, value_name = "LAYOUT,LAYOUT", value_delimiter = ',', default_value = "heads", value_parser = TensorLayout::from_str)]
    layout: Vec<TensorLayout>,
    /// One call of sequences that lie end to end, of so many tokens each
    #[arg(long, value_name = "LEN,LEN", value_delimiter = ',', conflicts_with_all = ["tokens", "batch"])]
    sequences: Vec<usize>,
    /// Precision of our products: full (f32), bf16 or bf16x3 (three of bf16 for each of f32); the table says what ran, and by which
    /// instructions
    #[arg(long, value_name = "PRECISION", default_value = "full", value_parser = precision)]
    precision: Precision,
    /// Turns of every point; the median of their times counts
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) rounds: usize,
    /// How long a turn lasts at least; what takes less is run several times, and the later half counts
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 300)]
    pub(super) turn: u32,
    /// Leave out points whose forward and backward pass would take longer than this [default: 5; of a model 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub(super) max_seconds: Option<f64>,
    /// Leave out Burn's own attention, and candle's
    #[arg(long)]
    no_rivals: bool,
    /// A Python interpreter with PyTorch, to be measured in turns with ours: eager formulas, and its own softmax attention, with
    /// --precision bf16 in bf16 too; forward, onnxruntime's and OpenVINO's where they are installed
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// With --peers: the formulas through torch.compile too, which takes up to minutes each at every size
    #[arg(long, requires = "peers")]
    compiled: bool,
    /// With --peers: give a peer up that has not answered for so long
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "peers")]
    peer_timeout: u32,
    /// Folder of the results
    #[arg(long, value_name = "DIR", default_value = "runs/bench")]
    pub(super) out: PathBuf,
    /// Measure nothing; show what changed from one bench.json to another beyond the noise
    #[arg(long, value_names = ["BEFORE.json", "AFTER.json"], num_args = 2, conflicts_with_all = MEASURING)]
    compare: Option<Vec<PathBuf>>,
}

/// The options that a comparison of results makes no use of.
const MEASURING: [&str; 21] = [
    "mechanisms",
    "model",
    "pixels",
    "set",
    "joules",
    "tokens",
    "batch",
    "heads",
    "head_dim",
    "kv_heads",
    "layout",
    "sequences",
    "precision",
    "rounds",
    "turn",
    "max_seconds",
    "no_rivals",
    "peers",
    "compiled",
    "peer_timeout",
    "out",
];

/// The options that say what calls of operators are like.
const OF_OPERATORS: [&str; 11] = [
    "tokens",
    "heads",
    "head_dim",
    "kv_heads",
    "layout",
    "sequences",
    "precision",
    "no_rivals",
    "peers",
    "compiled",
    "peer_timeout",
];

const EXAMPLES: &str = "\
Examples:
  resolvent bench                                      all mechanisms, a few minutes
  resolvent bench --mechanisms softmax,linear-infsa --tokens 4096,65536,331776 --heads 64 --head-dim 16
  resolvent bench --mechanisms M.json --tokens 197 --batch 64 --out runs/mine
  resolvent bench --mechanisms softmax,infsa --precision bf16
  resolvent bench --mechanisms softmax --layout heads,packed --kv-heads 8,2
  resolvent bench --mechanisms softmax,ssa --sequences 512,77,1300
  resolvent bench --model infvit-linear-4 --mechanisms linear-infsa,softmax --pixels 224,512
  resolvent bench --peers ~/torch/bin/python           PyTorch beside ours
  resolvent bench --compare before/bench.json after/bench.json";

/// Runs the command.
pub fn run(args: &Bench, global: &Global) -> Result<()> {
    if let Some(files) = &args.compare {
        return compare(&files[0], &files[1], global);
    }
    if let Some(model) = &args.model {
        return bench_models::run(args, model, global);
    }
    let load = Load::current();
    calibrate()?;
    let (_claim, [file, page]) = claimed(&args.out, bench::RESULTS)?;
    let deferred = Deferred::begin();
    let options = BenchOptions { load, ..options(args, global, &deferred)? };
    let report = bench::run(&options)?;
    if report.interrupted && report.points.is_empty() {
        return Err(Error::Interrupted("nothing was measured; run the command again".into()));
    }
    (options.keep)(&report)?;
    let json = serde_json::to_value(&report).map_err(|e| Error::file(&file, e.to_string()))?;
    output::result(global, &json, &format!("{}\n{}\nreport: {}", report.table(), report.headline(), page.display()))?;
    if report.interrupted {
        let sizes = report.sizes().len();
        return Err(Error::Interrupted(format!("{} has the first {sizes} of the sizes asked for", file.display())));
    }
    let red = report.checks.iter().find(|check| !check.passed && check.refused.is_none());
    if let Some(check) = red {
        return Err(Error::file(&file, format!("{check}; it was not timed")));
    }
    if report.points.iter().any(|point| point.forward.is_some()) {
        return Ok(());
    }
    let refused = report.checks.first().filter(|check| check.refused.is_some()).map(ToString::to_string);
    let skipped =
        || report.points.iter().find_map(|point| Some(format!("`{}` {}", point.label, point.skipped.as_ref()?)));
    let why = refused.or_else(skipped).map_or_else(String::new, |why| format!(": {why}"));
    Err(Error::file(&file, format!("nothing was measured{why}")))
}

/// The folder of a benchmark, held for its `results` and its report, and where these go.
pub(super) fn claimed(out: &Path, results: &'static str) -> Result<(Claim, [PathBuf; 2])> {
    let (file, page) = (out.join(results), out.join(REPORT));
    if page.exists() && !file.exists() {
        return Err(Error::file(&page, "is the report of another command; name another folder with --out"));
    }
    folder(out)?;
    Ok((Claim::take(out, &[results, REPORT], Contents::Bench)?, [file, page]))
}

/// Every layout with every number of heads of keys and values.
fn arrangements(args: &Bench) -> Vec<Arrangement> {
    let mut kv_heads: Vec<_> = args.kv_heads.iter().copied().map(Some).collect();
    if kv_heads.is_empty() {
        kv_heads.push(None);
    }
    let with = |&layout: &TensorLayout| {
        let sequences = &args.sequences;
        kv_heads.iter().map(move |&kv_heads| Arrangement { kv_heads, layout, sequences: sequences.clone() })
    };
    args.layout.iter().flat_map(with).collect()
}

fn options(args: &Bench, global: &Global, deferred: &Deferred) -> Result<BenchOptions> {
    let folder = args.out.clone();
    let mut options = BenchOptions {
        batch: args.batch,
        heads: args.heads,
        head_dim: args.head_dim,
        arrangements: arrangements(args),
        precision: args.precision,
        rounds: args.rounds,
        turn: Duration::from_millis(args.turn.into()),
        max_seconds: args.max_seconds.unwrap_or(BenchOptions::default().max_seconds),
        rivals: !args.no_rivals,
        peers: args.peers.clone(),
        compiled: args.compiled,
        patience: Duration::from_secs(args.peer_timeout.into()),
        stop: deferred.stop(),
        keep: Arc::new(move |report| {
            report.save(&folder)?;
            write_bench(&folder, report)
        }),
        memory: Some(Arc::new(memory::Probe)),
        commands: vec![command_line()],
        ..BenchOptions::default()
    };
    if !args.mechanisms.is_empty() {
        options.mechanisms = candidates(&args.mechanisms, None, None)?;
    }
    if let Some(seed) = global.seed {
        options
            .mechanisms
            .iter_mut()
            .for_each(|candidate| candidate.mechanism = candidate.mechanism.clone().with_seed(seed));
    }
    if !args.tokens.is_empty() {
        options.tokens.clone_from(&args.tokens);
    }
    if !global.quiet {
        options.progress = Arc::new(|line| tell(line));
    }
    Ok(options)
}

fn compare(before: &Path, after: &Path, global: &Global) -> Result<()> {
    let (old, new) = (read(before)?, read(after)?);
    let (notes, changes) = (bench::differences(&old, &new), bench::changes(&old, &new));
    if changes.is_empty() {
        let problem = format!("has no mechanism and size in common with {} that both have measured", before.display());
        return Err(Error::file(after, problem));
    }
    let lines: Vec<_> =
        notes.iter().map(|note| format!("note: {note}")).chain(changes.iter().map(ToString::to_string)).collect();
    let changes = serde_json::to_value(&changes).map_err(|e| Error::file(after, e.to_string()))?;
    let json = json!({"notes": notes, "changes": changes});
    output::result(global, &json, &lines.join("\n"))
}

fn read(path: &Path) -> Result<BenchReport> {
    let text = Document::read(path)?;
    let refused = |e| Error::file(path, format!("is no bench.json of operators, which alone are compared: {e}"));
    serde_json::from_str(&text).map_err(refused)
}
