//! Reports: one HTML file with everything in it, no network, for screens of any width and for paper.

mod analysis;
mod bars;
mod bench;
pub mod chart;
mod comparison;
mod diffusion;
mod distances;
mod explanation;
mod fit;
mod frame;
mod page;
mod run;
mod thin;
mod ticks;

use std::path::Path;

use crate::{Result, compare::Comparison, disk::write_atomically, metrics::Record, train::TrainSummary};

pub use analysis::analysis_page;
pub use bench::bench_page;
pub use comparison::comparison_page;
pub use explanation::explanation_page;
pub use fit::fit_page;
pub use run::run_page;

/// The name of a report in its folder.
pub const REPORT: &str = "report.html";

/// Writes the report of a training run into its folder.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn write_run(folder: &Path, summary: &TrainSummary, metrics: &[Record]) -> Result<()> {
    write_atomically(&folder.join(REPORT), run_page(summary, metrics)?.as_bytes())
}

/// Writes the report of a comparison into its folder; `metrics` are those of each entry's runs.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn write_comparison(folder: &Path, comparison: &Comparison, metrics: &[Vec<Vec<Record>>]) -> Result<()> {
    write_atomically(&folder.join(REPORT), comparison_page(comparison, metrics)?.as_bytes())
}
