//! `resolvent report`: the report of a run or a comparison, anew.

use std::path::PathBuf;

use clap::Args;
use resolvent_lab::{folder::REPORT, report};
use serde_json::json;

use crate::{Error, args::Global, error::Result, output};

/// Write the report of a run or a comparison anew, from the results that its folder holds
///
/// While a run trains, its report is written after every epoch; this command writes it for one that was stopped, or by a newer
/// program for one that is done.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Report {
    /// Folder of the run or the comparison
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  resolvent report runs/fashion            writes runs/fashion/report.html
  resolvent report runs/compare";

/// Runs the command.
pub fn run(args: &Report, global: &Global) -> Result<()> {
    if !args.run.is_dir() {
        return Err(Error::file(&args.run, "is no folder; name that of a run or a comparison"));
    }
    let contents = report::write_anew(&args.run)?;
    let page = args.run.join(REPORT);
    let json = json!({ "report": page.display().to_string(), "of": contents.words() });
    output::result(global, &json, &format!("report of {}: {}", contents.words(), page.display()))
}
