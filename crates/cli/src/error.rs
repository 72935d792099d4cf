//! Why a command failed, in one line.

use std::path::{Path, PathBuf};

use resolvent_kernels as kernels;

use crate::output::quoted;

/// Why a command failed. Every message names the file, field, tensor or shape, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written, or does not hold what it should.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// The kernels refuse what a file asks for.
    #[error("{}: {source}", path.display())]
    Kernels {
        /// The file that holds the configuration or the tensors.
        path: PathBuf,
        /// The refusal.
        source: Box<kernels::Error>,
    },
    /// Data, recipe, training or evaluation failed.
    #[error(transparent)]
    Lab(Box<resolvent_lab::Error>),
    /// A run ended on a failure of the system, and can go on from its last checkpoint.
    #[error("{source}; `resolvent train --out {} --resume` then goes on from step {step}", quoted(&folder.to_string_lossy()))]
    Unfinished {
        /// What failed.
        source: Box<resolvent_lab::Error>,
        /// The step of the last checkpoint.
        step: usize,
        /// The run's folder.
        folder: PathBuf,
    },
    /// An option that says nothing beside the others.
    #[error("{option} {problem}")]
    Option {
        /// As it is written.
        option: &'static str,
        /// What is wrong with it, and what to do.
        problem: &'static str,
    },
    /// The thread pool could not be started.
    #[error("--threads {threads}: {problem}; ask for fewer")]
    Threads {
        /// Number asked for.
        threads: u16,
        /// The system's answer.
        problem: String,
    },
    /// The result could not be printed.
    #[error("standard output: {0}; the result is lost, run again with another destination")]
    Stdout(std::io::Error),
    /// Ctrl-C or a request to terminate.
    #[error("interrupted; {0}")]
    Interrupted(String),
    /// Runs of a comparison whose other runs have a result, which is printed.
    #[error(
        "{runs} of {of} runs diverged ({first} the first): the result is of the others alone; lower `optimiser.lr` to have them all"
    )]
    Diverged {
        /// Runs without a result.
        runs: usize,
        /// Runs in all.
        of: usize,
        /// The first of them, and its step.
        first: String,
    },
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A problem with `path`.
    pub fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), problem: problem.into() }
    }

    /// `source`, caused by what `path` holds.
    pub fn kernels(path: &Path) -> impl FnOnce(kernels::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Kernels { path, source: Box::new(source) }
    }

    /// The exit code of the process: 130 (as a shell reports Ctrl-C) when interrupted, 3 when a part of the result is missing, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted(_) => 130,
            Self::Diverged { .. } => 3,
            _ => 1,
        }
    }

    /// The message on one line (parsers of other crates write several).
    pub fn one_line(&self) -> String {
        self.to_string().lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

impl From<resolvent_lab::data::Error> for Error {
    fn from(error: resolvent_lab::data::Error) -> Self {
        resolvent_lab::Error::from(error).into()
    }
}

impl From<resolvent_lab::Error> for Error {
    fn from(error: resolvent_lab::Error) -> Self {
        match error {
            resolvent_lab::Error::Stopped => Self::Interrupted("nothing was written; run the command again".into()),
            other => Self::Lab(Box::new(other)),
        }
    }
}
