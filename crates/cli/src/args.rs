//! The arguments that every command shares, and the list of commands.

use clap::{Args, Parser, Subcommand};
use resolvent_kernels::Precision;
use resolvent_lab::sizes::parse_size;

use crate::commands::{
    analyze::Analyze, attend::Attend, bench::Bench, classify::Classify, compare::Compare, completions::Completions,
    devices::Devices, eval::Eval, explain::Explain, generate::Generate, mechanisms::Mechanisms, recipes::Recipes,
    report::Report, train::Train, translate::Translate,
};

/// Attention as an operator on the graph of tokens: apply, train, evaluate and compare attention mechanisms.
///
/// Results go to standard output, notes and progress to standard error. Exit code: 0 done, 1 failed (one line says what
/// and how to mend it), 2 usage error, 3 done but for runs that diverged, 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "resolvent", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Arguments of every command.
    #[command(flatten)]
    pub global: Global,
}

const EXAMPLES: &str = "\
Examples:
  resolvent compare                         the usual mechanisms, generated pictures
  resolvent train --data mnist:DIR          one model on your data
  resolvent attend --config M.json --input IN.safetensors --output OUT.safetensors
  resolvent help attend                     everything about one command";

/// Arguments of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Print the result as one JSON document on standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// Number of threads [default: one per core]; results do not depend on it
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Seed of everything random; the same seed gives the same bits [default: the recipe's or the mechanism's, else 0]
    #[arg(long, global = true, value_name = "N")]
    pub seed: Option<u64>,
    /// Most memory that files may take when they are decoded, such as 2GiB or 500MB: pictures, archives, compressed texts and
    /// what is made of them, all threads together [default: half of the memory]
    #[arg(long, global = true, value_name = "SIZE", env = "RESOLVENT_DECODE_LIMIT", value_parser = parse_size)]
    pub decode_limit: Option<u64>,
    /// Only errors on standard error
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// More on standard error; twice for everything
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The commands; each is described where it is implemented.
#[derive(Debug, Subcommand)]
pub enum Command {
    Attend(Attend),
    Train(Train),
    Eval(Eval),
    Classify(Classify),
    Translate(Translate),
    Generate(Generate),
    Compare(Compare),
    Bench(Bench),
    Analyze(Analyze),
    Explain(Explain),
    Mechanisms(Mechanisms),
    Devices(Devices),
    Recipes(Recipes),
    Report(Report),
    Completions(Completions),
}

/// The precision of that name.
pub fn precision(name: &str) -> Result<Precision, String> {
    Precision::named(name).ok_or_else(|| {
        let names: Vec<_> = Precision::ALL.iter().map(|precision| precision.name()).collect();
        format!("expected {}", names.join(" or "))
    })
}
