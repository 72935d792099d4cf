//! What can be wrong with a recipe, a run or a checkpoint, as typed data.

pub(crate) mod data;

use std::{io, path::Path, path::PathBuf};

use resolvent_kernels::Parameter;

/// The result of training, evaluating and comparing.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a run could not be started, continued or read. Every message is one line that names the file and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A recipe does not parse, or a field is outside its range.
    #[error("{file}: `{field}` {problem}")]
    Recipe {
        /// The recipe's file, or `recipe` where it does not come from one.
        file: String,
        /// Dotted path of the field (`schedule.epochs`); `.` for the document.
        field: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The data set is described wrongly, not found or damaged.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// The model cannot be built or applied.
    #[error(transparent)]
    Model(#[from] resolvent::Error),
    /// The kernels.
    #[error(transparent)]
    Kernels(#[from] resolvent_kernels::Error),
    /// The data set does not suit the recipe.
    #[error("data set `{name}`: {problem}")]
    Unfit {
        /// The data set.
        name: String,
        /// Why, and the remedy.
        problem: String,
    },
    /// A command is given a model that was trained on another kind of data than it asks for.
    #[error("{}: the model was trained on {trained}, not on {wanted}; name a run on {wanted}", path.display())]
    OtherModel {
        /// The run or checkpoint.
        path: PathBuf,
        /// What it was trained on.
        trained: &'static str,
        /// What it should have been trained on.
        wanted: &'static str,
    },
    /// A trained model cannot have another attention on its weights.
    #[error("{}: `{exchanged}` cannot stand in for `{trained}`: {problem}", path.display())]
    Exchange {
        /// The checkpoint.
        path: PathBuf,
        /// What it was trained with.
        trained: &'static str,
        /// What was to stand in.
        exchanged: &'static str,
        /// What does not fit.
        problem: String,
    },
    /// A parameter of the checkpoint that a run is to begin with has another shape than the model's.
    #[error(
        "{}: the parameter `{parameter}` has the shape {found:?}, the model's is {expected:?}; set `model` to the sizes of the checkpoint, with `model.tied` as its mechanism has it{more}",
        path.display()
    )]
    Shape {
        /// The file of weights.
        path: PathBuf,
        /// The parameter's path in the model.
        parameter: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// Its shape in the model.
        expected: Vec<usize>,
        /// What else of the data must be as the checkpoint has it, as the end of a sentence; empty where nothing is.
        more: &'static str,
    },
    /// A device that is not there, or that the program was not built for.
    #[error("device `{asked}`: {problem}")]
    Device {
        /// What was asked for.
        asked: String,
        /// Why it cannot be had, and the remedy.
        problem: String,
    },
    /// Another framework, which was to be measured beside ours, cannot be asked or failed.
    #[error("{name}: {problem}")]
    Rival {
        /// The framework, or the program that runs it.
        name: String,
        /// Why, and the remedy.
        problem: String,
    },
    /// The work was asked to stop before it came to an end.
    #[error("stopped before the end; run the command again")]
    Stopped,
    /// The operating system refused to read or write.
    #[error("{}: {action}: {source}{}", path.display(), remedy(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A file that a run left is damaged or of another program.
    #[error("{}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// The folder already holds a run.
    #[error("{} already holds a run ({state}); resume it, or name another folder", path.display())]
    Occupied {
        /// The run's folder.
        path: PathBuf,
        /// How far that run is.
        state: String,
    },
    /// The folder holds files of someone else's that would be overwritten.
    #[error("{} holds a {file} that is not of a run of this program; name another folder", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// The file.
        file: &'static str,
    },
    /// The folder holds the results of another command.
    #[error("{} holds {holds}; name another folder for {wanted}", path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
        /// What it holds.
        holds: &'static str,
        /// What was to be written to it.
        wanted: &'static str,
    },
    /// Another process writes to the folder.
    #[error("{} is being written to by another process; wait for it, or name another folder", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume or to evaluate.
    #[error("{} holds no checkpoint; train into it first, or name a run's folder", path.display())]
    NoCheckpoint {
        /// The folder searched.
        path: PathBuf,
    },
    /// A checkpoint belongs to another recipe, data set or seed.
    #[error("{}: the checkpoint was made with {field} = {saved}, now it is {now}; use the same {field}, or another folder", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// Dotted path of what differs.
        field: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value in this call.
        now: String,
    },
    /// The loss is no longer a number, or the norm of its gradients is none.
    #[error("step {step}: {}; {STEADIER}", diverged(*loss))]
    Diverged {
        /// The step.
        step: usize,
        /// The loss.
        loss: f32,
    },
    /// No run of a comparison ended: there is nothing to compare.
    #[error("{}: all {runs} runs diverged ({first} the first); {STEADIER}", path.display())]
    AllDiverged {
        /// The comparison's folder.
        path: PathBuf,
        /// How many there were.
        runs: usize,
        /// The first of them, and its step.
        first: String,
    },
}

/// What is no number, of a loss or its gradients.
fn diverged(loss: f32) -> String {
    match loss.is_finite() {
        true => format!("the loss is {loss}, but its gradients are beyond f32"),
        false => format!("the loss is {loss}"),
    }
}

/// What the user can do about a loss that is no number.
const STEADIER: &str = "lower `optimiser.lr`, lengthen `schedule.warmup_epochs` or set `optimiser.clip_norm`";

impl Error {
    /// Whether it is the end of one training run and says nothing of others: the loss is no number, tokens or results of the model left
    /// what f32 can hold, or a number that it learns what its mechanism takes.
    pub(crate) fn is_divergence(&self) -> bool {
        use resolvent_kernels::Error::{OutOfRange, Overflow, Range};
        match self {
            Self::Diverged { .. } | Self::Model(resolvent::Error::Mechanism(Overflow { .. } | Range { .. })) => true,
            Self::Model(resolvent::Error::Mechanism(OutOfRange { field, .. })) => {
                Parameter::ALL.iter().any(|parameter| parameter.name() == *field)
            }
            _ => false,
        }
    }

    /// Wraps a failure of the operating system: what was being done to `path`.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Error::Io { path, action, source }
    }

    /// A damaged file: what is wrong with it, and the remedy.
    pub fn damaged(path: &Path, problem: impl Into<String>) -> Self {
        Error::Damaged { path: path.to_path_buf(), problem: problem.into() }
    }
}

/// What the user can do about the commonest failures of a file system.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space first, what was there before is intact"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; name a folder that you may write to",
        _ => "",
    }
}
