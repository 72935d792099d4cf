//! What a trained classifier or language model looks at: maps of its attention, how much its answers rest on what the maps find, and how well they
//! find objects whose boxes are known.

mod deletion;
mod localisation;
mod maps;
pub(crate) mod overlay;
mod query;
mod results;
mod rule;
mod run;
mod weights;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use burn::tensor::Device;
use resolvent_lab::{Error, Result};

use crate::subject::{Example, Material, Subject};
use run::Run;

pub use deletion::Deletion;
pub use localisation::Localisation;
pub use maps::{LayerAttention, rollout};
pub use query::Query;
pub use results::{ExampleScores, Explanation, LayerMaps, LayerScores, MapKind, MapScores, QueryRow, Shown, Spread};
pub use rule::MapRule;
pub use weights::{breadth, ceiling, scaled};

/// The file in an explanation's folder that holds its [`Explanation`].
pub const RESULTS: &str = "results.json";

/// What to explain, and how.
#[derive(Clone)]
pub struct ExplainOptions {
    /// The run or checkpoint.
    pub checkpoint: PathBuf,
    /// What it is shown.
    pub material: Material,
    /// The same in words.
    pub data: String,
    /// Examples at most, evenly spread over the material. Default: 100 pictures, or 20 texts.
    pub examples: Option<usize>,
    /// Examples whose maps are in the report. Default 6.
    pub shown: usize,
    /// The layer whose map is scored. Default: the last with at least 16 places.
    pub layer: Option<String>,
    /// How the heads of a layer make one map. Default: every head counts alike.
    pub map_rule: MapRule,
    /// A place whose own rows are drawn too, on the examples shown. Default none.
    pub query: Option<Query>,
    /// Score the map through all layers too. Default false.
    pub rollout: bool,
    /// Seed of random maps and orders. Default 0.
    pub seed: u64,
    /// Where the model runs. Default: the CPU.
    pub device: Device,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Commands that repeat the explanation, for the report.
    pub commands: Vec<String>,
}

impl ExplainOptions {
    /// The defaults.
    pub fn new(checkpoint: impl Into<PathBuf>, material: Material, data: impl Into<String>) -> Self {
        Self {
            checkpoint: checkpoint.into(),
            material,
            data: data.into(),
            examples: None,
            shown: 6,
            layer: None,
            map_rule: MapRule::default(),
            query: None,
            rollout: false,
            seed: 0,
            device: Device::flex(),
            stop: Arc::default(),
            progress: Arc::new(|_| {}),
            commands: Vec::new(),
        }
    }
}

/// The model, and the examples that it is to be shown. Not stopped by [`ExplainOptions::stop`]: nothing is written, and a process may end.
///
/// # Errors
/// Those of [`Subject::load`] and [`Subject::examples`].
pub fn load(options: &ExplainOptions) -> Result<(Subject, Vec<Example>)> {
    let subject = Subject::load(&options.checkpoint, &options.device)?;
    let count = options.examples.unwrap_or(if subject.sees_pictures() { 100 } else { 20 });
    let examples = subject.examples(&options.material, count)?;
    if examples.is_empty() {
        let problem = "there is nothing to explain; give at least one example".into();
        return Err(Error::Unfit { name: options.data.clone(), problem });
    }
    Ok((subject, examples))
}

/// Checks that `subject` has what the options ask for, by the first of `examples`.
///
/// # Errors
/// As [`run`].
pub fn check(options: &ExplainOptions, subject: &Subject, examples: &[Example]) -> Result<()> {
    examples.first().map_or(Ok(()), |first| Run::new(options, subject).check(first))
}

/// Explains what `subject` looks at in `examples`. `None` when it was stopped.
///
/// # Errors
/// [`Error::Recipe`] for a layer that is none; [`Error::Model`].
pub fn run(options: &ExplainOptions, subject: &Subject, examples: &[Example]) -> Result<Option<Explanation>> {
    let mut run = Run::new(options, subject);
    for (index, example) in examples.iter().enumerate() {
        if options.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        run.explain(index, example)?;
        if (index + 1) % 10 == 0 || index + 1 == examples.len() {
            (options.progress)(&format!("{} of {} examples", index + 1, examples.len()));
        }
    }
    Ok(Some(run.finish()))
}
