//! `resolvent analyze`: the token graphs of a model's queries and keys, and what could take softmax's place.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use resolvent_lab::{
    analyze::{self, AnalyzeOptions},
    disk::write_atomically,
    folder::Claim,
    report::{self, analysis_page},
};

use super::{
    compare::command_line,
    recipe::{Attention, mechanisms},
};
use crate::{Error, args::Global, error::Result, interrupt::Deferred, memory, output};

/// Analyse a model's queries and keys: their token graphs, and which mechanism could replace softmax on them
///
/// The input is a safetensors file with tensors q, k and v, [B, H, N, D], [H, N, D] or [N, D]; layers are told by a prefix,
/// as in `layers.3.q`. Without k, keys are the queries; without v, errors are those of the weights. Every mechanism is
/// applied as it is: the error of its output against dense softmax, its time and memory here, and the diagnostics of its
/// graph. The file is read one sequence at a time. Ends in a table, results.json and report.html.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Analyze {
    /// The queries, keys and values
    #[arg(long, value_name = "DUMP.safetensors")]
    input: PathBuf,
    /// Mechanisms: ids, or files M.json [default: all]; softmax is always there
    #[arg(long, value_name = "ID,ID", value_delimiter = ',')]
    mechanisms: Vec<Attention>,
    /// Layers, by the prefix of their tensors [default: all]
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    layers: Vec<String>,
    /// Analyse the first N sequences of each layer [default: all]
    #[arg(long, value_name = "N")]
    sequences: Option<usize>,
    /// Tokens see themselves and earlier ones only, as in a language model
    #[arg(long)]
    causal: bool,
    /// Add dense spectra without symmetry, paths from every token and exact mixing times
    #[arg(long)]
    full: bool,
    /// Folder of the results
    #[arg(long, value_name = "DIR", default_value = "runs/analyze")]
    out: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  resolvent analyze --input dump.safetensors
  resolvent analyze --input dump.safetensors --causal --layers layers.0,layers.11 --sequences 2
  resolvent analyze --input dump.safetensors --mechanisms ssa,fna,M.json --full --out runs/mine

docs/analyze.md shows how to write such a file from PyTorch.";

/// Runs the command.
pub fn run(args: &Analyze, global: &Global) -> Result<()> {
    let _claim = Claim::take(&args.out, &[analyze::RESULTS, report::REPORT], analyze::RESULTS)?;
    let deferred = Deferred::begin();
    let mut options = AnalyzeOptions {
        layers: args.layers.clone(),
        sequences: args.sequences,
        causal: args.causal,
        full: args.full,
        seed: global.seed.unwrap_or(0),
        stop: deferred.stop(),
        memory: Some(Arc::new(memory::Probe)),
        commands: vec![command_line()],
        ..AnalyzeOptions::new(&args.input)
    };
    if !args.mechanisms.is_empty() {
        options.mechanisms = mechanisms(&args.mechanisms, None)?;
    }
    if !global.quiet {
        options.progress = Arc::new(|line| eprintln!("{line}"));
    }
    let Some(analysis) = analyze::run(&options)? else {
        return Err(Error::Interrupted("nothing was written; run the command again".into()));
    };
    let (file, page) = (args.out.join(analyze::RESULTS), args.out.join(report::REPORT));
    let json = serde_json::to_value(&analysis).map_err(|e| Error::file(&file, e.to_string()))?;
    write_atomically(&file, format!("{json:#}\n").as_bytes())?;
    write_atomically(&page, analysis_page(&analysis).as_bytes())?;
    output::result(global, &json, &format!("{}\nreport: {}", analysis.table(), page.display()))
}
