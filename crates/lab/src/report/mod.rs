//! Reports: one HTML file with everything in it, no network, for screens of any width and for paper.

mod bench;
mod comparison;
mod models;
mod run;
mod samples;

use std::path::Path;

use crate::{
    Error, Result,
    bench::{BenchReport, ModelReport},
    checkpoint::Checkpoint,
    compare::{self, Comparison, Entry},
    disk::write_atomically,
    folder::{Claim, Contents, REPORT},
    metrics::{self, Record},
    train::{self, Standing},
};

pub use bench::bench_page;
pub use comparison::comparison_page;
pub use models::models_page;
pub use run::{progress_page, run_page};

/// Writes the report of a training run into its folder, wherever the run stands.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn write_run(folder: &Path, standing: Standing<'_>, metrics: &[Record]) -> Result<()> {
    let page = match standing {
        Standing::UnderWay(state) => progress_page(state, metrics)?,
        Standing::Finished(summary) => run_page(summary, metrics)?,
    };
    write_atomically(&folder.join(REPORT), page.as_bytes())
}

/// Writes the report of a benchmark into its folder.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn write_bench(folder: &Path, report: &BenchReport) -> Result<()> {
    write_atomically(&folder.join(REPORT), bench_page(report).as_bytes())
}

/// Writes the report of a benchmark of whole models into its folder.
///
/// # Errors
/// [`crate::Error::Io`]; those of a recipe that cannot be put as TOML.
pub fn write_model_bench(folder: &Path, report: &ModelReport) -> Result<()> {
    write_atomically(&folder.join(REPORT), models_page(report)?.as_bytes())
}

/// Writes the report of the run or the comparison in `folder` anew, from the results that it holds. What it is of.
///
/// # Errors
/// [`crate::Error::NoCheckpoint`] for a folder with neither, [`crate::Error::Taken`] for one of other results, [`crate::Error::Damaged`],
/// [`crate::Error::Io`].
pub fn write_anew(folder: &Path) -> Result<Contents> {
    let contents = match Contents::of(folder) {
        Some(contents @ (Contents::Run | Contents::Comparison)) => contents,
        Some(other) => {
            let (holds, wanted) = (other.words(), "the report of a run or a comparison");
            return Err(Error::Taken { path: folder.into(), holds, wanted });
        }
        None => return Err(Error::NoCheckpoint { path: folder.into() }),
    };
    let _claim = Claim::take(folder, &[REPORT], contents)?;
    if contents == Contents::Comparison {
        write_comparison(folder, &compare::read_results(folder)?)?;
    } else if let Some(summary) = train::read_summary(folder)? {
        write_run(folder, Standing::Finished(&summary), &metrics::read(folder)?)?;
    } else {
        let state = Checkpoint::newest(folder)?.state;
        write_run(folder, Standing::UnderWay(&state), &metrics::read(folder)?)?;
    }
    Ok(contents)
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
