//! Weights that another run learned, as the beginning of a new one.

use std::path::Path;

use burn::{
    module::Module,
    store::{ApplyError, PathFilter},
};
use serde::{Deserialize, Serialize};

use super::{Checkpoint, Expectation, listed, parts};
use crate::{Error, Result};

/// What a run began with, where it did not begin with random weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The checkpoint.
    pub path: String,
    /// Steps that it had learned for.
    pub step: usize,
    /// Number of parameters (tensors) taken over by name.
    pub taken: usize,
    /// Paths of the parameters that are new: the checkpoint does not have them, or they are the head for other classes.
    pub fresh: Vec<String>,
    /// Paths of those that the checkpoint has and the model does not.
    pub left: Vec<String>,
}

impl Origin {
    /// What was taken, what is new and what was left, in a line.
    pub fn line(&self) -> String {
        let Self { path, step, taken, fresh, left } = self;
        let list = |what: &str, paths: &[String]| match paths.len() {
            0 => String::new(),
            count => format!("; {count} {what}: {}", listed(paths)),
        };
        let (fresh, left) = (list("new", fresh), list("left", left));
        format!("begins with {taken} parameters of {path}, step {step}{fresh}{left}")
    }
}

impl Checkpoint {
    /// `module` with those of the weights that are evaluated which it has too, by their paths. The head of a classifier is taken where
    /// its classes are those that the model is to `expect`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a parameter of another shape; [`Error::Damaged`] where nothing fits, or for weights that cannot be read.
    pub fn begin<M: Module>(&self, mut module: M, expect: &Expectation) -> Result<(M, Origin)> {
        let own_head = self.state.expects.classes() == expect.classes();
        let filter = (!own_head).then(|| PathFilter::new().with_predicate(|path, _| !is_head(path)));
        let (file, found) = self.apply(&mut module, self.weights(), filter)?;
        if let Some(error) = found.errors.into_iter().next() {
            return Err(misfit(&file, &self.state.expects, error));
        }
        if found.applied.is_empty() {
            let problem = "has no parameter of this model; begin with a model of the same kind".to_owned();
            return Err(Error::damaged(&file, problem));
        }
        let mut fresh: Vec<String> = found.missing.into_iter().map(|(path, _)| path).chain(found.skipped).collect();
        fresh.sort();
        let mut left = found.unused;
        left.retain(|path| !fresh.contains(path));
        let (path, step) = (self.path.display().to_string(), self.state.step);
        Ok((module, Origin { path, step, taken: found.applied.len(), fresh, left }))
    }

    /// The part with the weights that are evaluated: the average where there is one.
    pub(super) fn weights(&self) -> &'static str {
        if self.file(parts::AVERAGE).is_ok() { parts::AVERAGE } else { parts::MODEL }
    }
}

fn is_head(path: &str) -> bool {
    path.split('.').any(|name| name == "head")
}

fn misfit(file: &Path, trained: &Expectation, error: ApplyError) -> Error {
    match error {
        ApplyError::ShapeMismatch { path, expected, found } => {
            let more = match trained {
                Expectation::Pictures(_) => ", and give pictures of its size",
                _ => "",
            };
            let (found, expected) = (found.to_vec(), expected.to_vec());
            Error::Shape { path: file.into(), parameter: path, found, expected, more }
        }
        other => Error::damaged(file, format!("cannot be taken over ({other})")),
    }
}
