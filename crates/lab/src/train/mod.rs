//! Training: one process, one device, exact resume.
//!
//! The loop is our own, over Burn's modules, autodiff and optimisers: burn-train restores neither the order of a shuffled
//! epoch nor the state of the augmentation, clips each parameter's gradient by itself, and knows neither soft targets nor
//! averaged weights. Here every random number is a function of (seed, epoch, picture) or (seed, step), so that a
//! checkpoint needs no generator state, and an interrupted and resumed run ends with the bits of an uninterrupted one.

mod ablation;
mod begin;
mod bench;
mod clip;
mod corpus;
mod ema;
mod judged;
mod loss;
mod model;
mod optimiser;
mod packed;
mod pairs;
mod picture_model;
mod pictures;
mod recall;
mod run;
mod samples;
mod session;
mod task;
mod text_model;
mod texts;
mod tokens;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use burn::tensor::Device;
use resolvent::Precision;
use serde::{Deserialize, Serialize};

use crate::{
    Recipe, Result,
    checkpoint::{Best, DataIdentity, Origin, State},
    columns::counted,
    evaluation::Evaluation,
    metrics::{Record, Scalars},
    progress::{Observer, Silent},
    schedule::Plan,
};

pub use crate::clock::Breakdown;
pub(crate) use ablation::Ablation;
pub use ablation::Lost;
pub(crate) use begin::check_fit;
pub use bench::seconds_per_step;
pub(crate) use bench::{Bench, time_steps};
pub use clip::{clip_by_global_norm, clip_on_device};
pub(crate) use corpus::language_config;
pub use corpus::{Corpus, WindowBatch, WindowInputs};
pub use ema::{decay_at, update};
pub use loss::soft_cross_entropy;
pub use model::{build, device_of};
pub(crate) use model::{build_for, check_model, drawn};
pub use optimiser::{LayerRates, decayed_parameters, optimiser};
pub use packed::PackedWeights;
pub(crate) use packed::packed_weights;
pub use pairs::{PairBatch, PairInputs, Pairs};
pub(crate) use pairs::{search, translator};
pub use picture_model::{PictureModel, block_name};
pub use pictures::{LandmarkCount, Pictures};
pub(crate) use pictures::{landmark_counts, model_size, picture_model};
pub use recall::{Recall, RecallBatch, RecallInputs};
pub(crate) use run::read_summary;
pub use run::{SUMMARY, run};
pub use samples::{Continuation, Errors, Samples, Seen, Translation, WrongAnswer};
pub use task::{Part, Task, TaskData};
pub use text_model::ExampleTexts;
pub(crate) use text_model::text_config;
pub use texts::{Matches, TextBatch, Texts};
pub use tokens::TokenInputs;
pub(crate) use tokens::{BATCH_TOKENS, token_inputs};

/// What to do with a run that the folder already holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Resume {
    /// Refuse to touch it.
    #[default]
    Never,
    /// Continue it; there must be one.
    Always,
    /// Continue it if there is one.
    IfPresent,
}

/// Where a run stands, for its report.
#[derive(Debug, Clone, Copy)]
pub enum Standing<'a> {
    /// Under way: the state of its last checkpoint.
    UnderWay(&'a State),
    /// Finished.
    Finished(&'a TrainSummary),
}

/// Writes the report of a run into its folder, from where it stands and its metrics.
pub type Reporter = Arc<dyn Fn(&Path, Standing<'_>, &[Record]) -> Result<()> + Send + Sync>;

/// How to run, as opposed to what to compute (the [`Recipe`], seed included). Threads are those of rayon's global pool;
/// on the CPU results do not depend on their number.
#[derive(Clone)]
pub struct TrainOptions {
    /// The run's folder: recipe, metrics, checkpoints, summary and report. Created if need be.
    pub out_dir: PathBuf,
    /// What to do with a run that is there.
    pub resume: Resume,
    /// A run or a checkpoint whose weights a new run begins with, where the model has the same. Default: random weights.
    pub from: Option<PathBuf>,
    /// The steps, where they are decided elsewhere (a comparison plans once for all its runs). Default: planned from the
    /// recipe.
    pub plan: Option<Plan>,
    /// Where the model is trained and judged. Default: the CPU.
    pub device: Device,
    /// What progress calls the run. Default: its mechanism and seed.
    pub name: Option<String>,
    /// Raised by whoever wants the run to stop: at the next step it saves a checkpoint and returns.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub observer: Arc<dyn Observer>,
    /// Who writes the report, after every epoch and at the end, such as [`crate::report::write_run`]. Default: nobody.
    pub report: Option<Reporter>,
}

impl TrainOptions {
    /// A new run into `out_dir` that tells nobody.
    pub fn new(out_dir: impl Into<PathBuf>) -> Self {
        Self {
            out_dir: out_dir.into(),
            resume: Resume::Never,
            from: None,
            plan: None,
            device: Device::flex(),
            name: None,
            stop: Arc::default(),
            observer: Arc::new(Silent),
            report: None,
        }
    }
}

/// What became of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// It ended and was tested.
    Finished(Box<TrainSummary>),
    /// It was asked to stop, and can be resumed.
    Interrupted {
        /// Steps done.
        step: usize,
        /// Steps planned.
        steps: usize,
        /// Where it can be resumed.
        out_dir: PathBuf,
    },
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// All planned steps are done.
    Complete,
    /// No better score on the held-out examples for `regularisation.patience` epochs.
    Patience,
    /// `schedule.max_minutes` were over before the planned steps: the learning rate did not reach its end, and the
    /// result understates the model.
    OutOfTime,
}

/// The result of a run, as in its `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainSummary {
    /// The recipe, with mechanism and seed.
    pub recipe: Recipe,
    /// The data.
    pub data: DataIdentity,
    /// Parameters of the model, learned gammas included.
    pub parameters: usize,
    /// Steps planned.
    pub plan: Plan,
    /// Steps done.
    pub steps: usize,
    /// Why it ended there.
    pub ended: Ended,
    /// The GPU of the last session; none where it ran on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Seconds over all sessions of the run.
    pub seconds: f64,
    /// Training examples per second over all sessions, evaluation and writing left out. 0 where no step was timed: of a run that an older
    /// program trained to its last step.
    pub examples_per_second: f64,
    /// Where the time went, over all sessions.
    pub time: Breakdown,
    /// The best epoch on the held-out pictures, where there are some.
    pub best: Option<Best>,
    /// The weights that it began with, where they were learned by another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// What the model has learned in scalars.
    #[serde(default, alias = "gamma")]
    pub learned: Scalars,
    /// The ternary weights, where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ternary: Option<PackedWeights>,
    /// What the model that is tested says of some test examples: a classifier's worst errors, translations, continuations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<Samples>,
    /// On the test pictures: the average of the weights where the recipe asks for one, the best epoch's where it stops
    /// early, else the last.
    pub test: Evaluation,
}

impl TrainSummary {
    /// The result in one line.
    pub fn line(&self) -> String {
        let ended = match self.ended {
            Ended::Complete if self.plan.steps < self.plan.full_steps => {
                format!(" (planned {} of {} to fit the time)", self.plan.steps, self.plan.full_steps)
            }
            Ended::Complete => String::new(),
            Ended::Patience => " (stopped early: no better epoch)".into(),
            Ended::OutOfTime => format!(" of {} (out of time, the schedule is unfinished)", self.plan.steps),
        };
        let bleu = self.test.bleu.as_ref().map_or_else(String::new, |bleu| format!("BLEU {:.2}, ", bleu.score));
        let prediction = self.test.prediction.as_ref().map_or_else(String::new, |p| format!("{}, ", p.line()));
        let ternary = self.ternary.map_or_else(String::new, |packed| format!("; {}", packed.line()));
        let precision = if self.recipe.precision == Precision::Full { "" } else { "; products of bf16" };
        let accuracy =
            self.test.accuracy.map_or_else(String::new, |share| format!("accuracy {:.2} %, ", share * 100.0));
        format!(
            "{prediction}{bleu}test {accuracy}loss {:.3}; {}{ended} in {:.0} s, {:.0} examples/s{ternary}{precision}",
            self.test.loss,
            counted(self.steps, "step"),
            self.seconds,
            self.examples_per_second
        )
    }
}
