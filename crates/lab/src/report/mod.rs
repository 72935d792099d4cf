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

use crate::{
    Result,
    compare::{Comparison, Entry},
    disk::write_atomically,
    metrics::{self, Record},
    train::TrainSummary,
};

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

/// Writes the report of a comparison into its folder, with the curves of the runs that lie there.
///
/// # Errors
/// [`crate::Error::Io`], [`crate::Error::Damaged`].
pub fn write_comparison(folder: &Path, comparison: &Comparison) -> Result<()> {
    let of_entry = |entry: &Entry| {
        entry.runs.iter().map(|run| metrics::read(&folder.join(&run.folder))).collect::<Result<Vec<_>>>()
    };
    let curves = comparison.entries.iter().map(of_entry).collect::<Result<Vec<_>>>()?;
    write_atomically(&folder.join(REPORT), comparison_page(comparison, &curves)?.as_bytes())
}
