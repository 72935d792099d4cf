//! What a trained model is shown by the commands that watch it.

use std::path::{Path, PathBuf};

use clap::Args;
use resolvent_lab::{
    checkpoint::{Checkpoint, Expectation},
    data::DataSpec,
};
use resolvent_probe::subject::Material;

use super::{
    recipe,
    texts::{filled, read_lines},
};
use crate::{Error, args::Global, error::Result};

/// Where examples may come from; of data, input and texts at most one is given.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// A data set.
    pub data: Option<&'a DataSpec>,
    /// Pictures, or a file of texts: the model decides.
    pub input: Option<&'a Path>,
    /// Texts.
    pub texts: &'a [String],
    /// Annotations of the pictures.
    pub boxes: Option<&'a Path>,
}

impl Given<'_> {
    /// What is shown to the model in `checkpoint`, and the same in words. Without anything given, the data that it was trained on.
    pub fn material(&self, checkpoint: &Path, global: &Global) -> Result<(Material, String)> {
        if !self.texts.is_empty() {
            let texts = filled(self.texts.to_vec(), Path::new("--text"), "text")?;
            return Ok((Material::Texts(texts), "the texts given".into()));
        }
        let state = Checkpoint::find(checkpoint)?.state;
        if let Some(input) = self.input {
            let material = match (&state.expects, self.boxes) {
                (Expectation::Texts(_) | Expectation::Corpus(_), Some(boxes)) => {
                    let problem = "boxes are of pictures, and the model was trained on texts; leave --boxes out";
                    return Err(Error::file(boxes, problem));
                }
                (Expectation::Texts(_) | Expectation::Corpus(_), None) => Material::Texts(read_lines(input)?),
                _ => Material::Pictures { input: input.into(), boxes: self.boxes.map(Into::into) },
            };
            return Ok((material, input.display().to_string()));
        }
        let source = self.data.map_or_else(|| recipe::data(&state.recipe), |source| Ok(source.clone()))?;
        Ok((Material::Data(recipe::load(&source, global)?), source.to_string()))
    }
}

/// The model of a command that takes nothing else by its place.
#[derive(Debug, Args)]
pub struct Trained {
    /// Folder of a run (its best checkpoint where it stopped early, else its newest) or of one checkpoint
    #[arg(value_name = "RUN", required_unless_present = "checkpoint")]
    run: Option<PathBuf>,
    /// The same by name, as other commands have it
    #[arg(long, value_name = "DIR", conflicts_with = "run")]
    checkpoint: Option<PathBuf>,
}

impl Trained {
    /// The folder.
    pub fn path(&self) -> &Path {
        // One of the two is required.
        self.run.as_deref().or(self.checkpoint.as_deref()).unwrap_or(Path::new(""))
    }
}
