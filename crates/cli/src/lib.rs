//! The command line of Resolvent: it parses, wires and prints; the work is done by `resolvent-kernels`,
//! `resolvent-lab` and `resolvent-probe`.
//!
//! Results go to standard output (`--json` makes them machine-readable), notes and progress to standard error. The exit
//! code is 0 when done, 1 when something failed (one line `error: ...` says what and how to mend it), 2 for a usage
//! error, 3 when runs of a comparison diverged and the others have a result, and 130 when interrupted.

mod args;
mod commands;
mod destination;
mod elapsed;
mod error;
mod interrupt;
mod log;
mod memory;
mod output;
mod tensors;

use std::{ffi::OsString, process::ExitCode};

use clap::Parser;
use resolvent_lab::{
    budget::set_limit,
    calibration::{Place, calibration},
    environment::built_from,
    progress::tell,
};

use args::{Cli, Command};
pub use error::Error;

/// Runs the program on its command-line arguments (the first is the program's name).
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(usage) => {
            // Nobody is left to tell when not even this can be printed.
            let _ = usage.print();
            return ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(2));
        }
    };
    match dispatch(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("error: {}", error.one_line()));
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(cli: &Cli) -> Result<(), Error> {
    memory::keep_freed();
    interrupt::listen();
    if let Some(commit) = option_env!("RESOLVENT_COMMIT") {
        built_from(commit);
    }
    log::init(&cli.global);
    if let Some(bytes) = cli.global.decode_limit {
        set_limit(bytes);
    }
    if let Some(threads) = cli.global.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global()
            .map_err(|e| Error::Threads { threads, problem: e.to_string() })?;
    }
    match &cli.command {
        Command::Attend(args) => commands::attend::run(args, &cli.global),
        Command::Train(args) => commands::train::run(args, &cli.global),
        Command::Eval(args) => commands::eval::run(args, &cli.global),
        Command::Classify(args) => commands::classify::run(args, &cli.global),
        Command::Translate(args) => commands::translate::run(args, &cli.global),
        Command::Generate(args) => commands::generate::run(args, &cli.global),
        Command::Compare(args) => commands::compare::run(args, &cli.global),
        Command::Bench(args) => commands::bench::run(args, &cli.global),
        Command::Analyze(args) => commands::analyze::run(args, &cli.global),
        Command::Explain(args) => commands::explain::run(args, &cli.global),
        Command::Mechanisms(args) => commands::mechanisms::run(args, &cli.global),
        Command::Recipes(args) => commands::recipes::run(args, &cli.global),
        Command::Report(args) => commands::report::run(args, &cli.global),
        Command::Devices(args) => commands::devices::run(args, &cli.global),
        Command::Completions(args) => commands::completions::run(args, &cli.global),
    }
}

/// Makes modules on the CPU follow what is faster on this machine, measured at the first time.
fn calibrate() -> Result<(), Error> {
    if let Some(calibration) = calibration(&Place::of_environment(), &|note| tracing::info!("{note}"))? {
        calibration.install();
    }
    Ok(())
}
