//! Checkpoints: folders that are either whole or not there.
//!
//! A checkpoint is written into a temporary folder beside the others, synchronised to the disk and then renamed; older
//! ones are removed last. A full disk, an interruption or a crash at any moment leaves every earlier checkpoint intact.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::{
    module::Module,
    store::{ApplyError, ApplyResult, ModuleSnapshot, PathFilter},
    tensor::Bytes,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Recipe, Result, budget::Held, clock::Breakdown, data::Vocabulary, evaluation::Metric, schedule::Plan,
    source::Document,
};

mod expectation;
mod moments;
mod origin;
mod part;
mod store;

pub(crate) use moments::moments;
use part::{Fingerprint, Saved, again, listed};

pub use expectation::{
    CorpusExpectation, Expectation, PairExpectation, PictureExpectation, RecallExpectation, TextExpectation,
};
pub use origin::Origin;
pub use part::{Part, Weights};
pub use store::Store;

/// Version of the format; a change that older programs cannot read raises it.
const FORMAT: u32 = 3;
/// The format before, whose weights are in Burn's own format.
const PACKED: u32 = 2;
const STATE: &str = "state.json";

/// Names of the files that hold tensors.
pub mod parts {
    /// The weights.
    pub const MODEL: &str = "model.safetensors";
    /// The average of the weights, where the recipe asks for one.
    pub const AVERAGE: &str = "average.safetensors";
    /// The optimiser's moments.
    pub const OPTIMISER: &str = "optimiser.bpk";
    /// The vocabulary of a model of text, as Hugging Face's tokenizers write it.
    pub const VOCABULARY: &str = "tokenizer.json";
    /// How the names of files in Burn's own format end.
    pub(super) const PACK: &str = "bpk";
}

/// Which pictures a run learns from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataIdentity {
    /// The data set's kind.
    pub name: String,
    /// Hash of everything that training and testing see, in hexadecimal.
    pub fingerprint: String,
}

impl DataIdentity {
    /// That of the data set `name` with the hash `fingerprint`.
    pub fn new(name: &str, fingerprint: u64) -> Self {
        Self { name: name.into(), fingerprint: format!("{fingerprint:016x}") }
    }

    /// Checks that `now` is the same data; `file` is what was made with `self`.
    ///
    /// # Errors
    /// [`Error::Mismatch`].
    pub fn check(&self, now: &Self, file: &Path) -> Result<()> {
        let (field, saved, now) = if self.name != now.name {
            ("data", &self.name, &now.name)
        } else if self.fingerprint != now.fingerprint {
            ("data fingerprint", &self.fingerprint, &now.fingerprint)
        } else {
            return Ok(());
        };
        let (field, saved, now) = (field.to_string(), saved.clone(), now.clone());
        Err(Error::Mismatch { path: file.to_path_buf(), field, saved, now })
    }
}

/// The best epoch so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Epoch, counted from 1.
    pub epoch: usize,
    /// Steps done then.
    pub step: usize,
    /// What it is the best by.
    #[serde(default)]
    pub metric: Metric,
    /// Its value on the held-out examples.
    #[serde(alias = "accuracy")]
    pub value: f64,
}

/// What a schedule that falls on plateaus remembers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// The best score so far.
    pub best: f64,
    /// Epochs in turn since then, or since the rate last fell.
    pub since: usize,
    /// Times that the rate fell.
    pub falls: i32,
}

/// Everything about a run that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps done. With the recipe's seed this is the state of every random stream.
    pub step: usize,
    /// The steps planned.
    pub plan: Plan,
    /// The recipe, seed included.
    pub recipe: Recipe,
    /// The data.
    pub data: DataIdentity,
    /// What the model expects of the data it is shown.
    pub expects: Expectation,
    /// Seconds spent so far.
    pub seconds: f64,
    /// Where that time went.
    #[serde(default)]
    pub time: Breakdown,
    /// The steps that were done when the model was last evaluated.
    #[serde(default)]
    pub evaluated: usize,
    /// Sum and number of the losses of the epoch under way.
    pub epoch_loss: (f64, usize),
    /// Sum and number of the losses since the last line of metrics.
    pub window_loss: (f64, usize),
    /// The best epoch on the held-out pictures.
    pub best: Option<Best>,
    /// How far the learning rate has fallen, where it falls on plateaus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plateau: Option<Plateau>,
    /// The weights that it began with, where they were learned by another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// Length of the metrics file when the checkpoint was made.
    pub metrics_bytes: u64,
}

impl State {
    /// The epoch, counted from 1, that the steps done are in or end.
    pub(crate) fn epoch(&self) -> usize {
        self.step.div_ceil(self.plan.steps_per_epoch)
    }

    /// Whether an epoch, or the run, ends here and the model was not evaluated yet: the session before was stopped while it was.
    pub(crate) fn is_unjudged(&self) -> bool {
        self.plan.ends_epoch(self.step) && self.epoch_loss.1 > 0 && self.evaluated < self.step
    }

    /// Whether there was no better epoch for as long as the recipe waits.
    pub(crate) fn is_exhausted(&self) -> bool {
        let best = self.best.as_ref().map_or(self.epoch(), |best| best.epoch);
        self.recipe.regularisation.patience.is_some_and(|patience| self.epoch() - best >= patience)
    }
}

/// What is on the disk: the state, and what every other file must be.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    files: BTreeMap<String, Fingerprint>,
    state: State,
}

impl Manifest {
    /// That of the checkpoint in `path`.
    fn read(path: &Path) -> Result<Self> {
        let file = path.join(STATE);
        let again = again(&file);
        let text = Document::read(&file)?;
        let manifest: Self = serde_json::from_str(&text)
            .map_err(|e| Error::damaged(&file, format!("is no checkpoint of this program ({e}); {again}")))?;
        if ![PACKED, FORMAT].contains(&manifest.format) {
            let problem = format!(
                "has format {}, this program reads {PACKED} and {FORMAT}; use the program that wrote it",
                manifest.format
            );
            return Err(Error::damaged(&file, problem));
        }
        Ok(manifest)
    }
}

/// A checkpoint: its state, and files that are read when they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What is not a tensor.
    pub state: State,
    files: BTreeMap<String, Saved>,
    held: Held,
}

impl Checkpoint {
    /// Reads the state of the checkpoint in `path`; the other files are read and verified when they are asked for.
    ///
    /// # Errors
    /// [`Error::Damaged`] naming the file, [`Error::Io`].
    pub fn load(path: &Path) -> Result<Self> {
        let (manifest, file) = (Manifest::read(path)?, path.join(STATE));
        let mut files = BTreeMap::new();
        for (name, fingerprint) in manifest.files {
            if Path::new(&name).file_name() != Some(name.as_ref()) {
                let problem = format!("names the part `{name}`, which is no file of its folder; {}", again(&file));
                return Err(Error::damaged(&file, problem));
            }
            files.insert(name.clone(), Saved::new(path.join(name), fingerprint));
        }
        Ok(Self { path: path.to_path_buf(), state: manifest.state, files, held: Held::new() })
    }

    /// The checkpoint `path` itself, or the one of the run in `path` that counts: the best where the recipe asks for
    /// early stopping, else the newest.
    ///
    /// # Errors
    /// As [`Checkpoint::load`], and [`Error::NoCheckpoint`].
    pub fn find(path: &Path) -> Result<Self> {
        if path.join(STATE).exists() {
            return Self::load(path);
        }
        let newest = Self::newest(path)?;
        match &newest.state.best {
            Some(best) if newest.state.recipe.regularisation.patience.is_some() => {
                Self::load(&Store::new(path, 1).best_path(best.step))
            }
            _ => Ok(newest),
        }
    }

    /// The newest checkpoint of the run in `path`, from which it goes on.
    ///
    /// # Errors
    /// As [`Checkpoint::find`].
    pub fn newest(path: &Path) -> Result<Self> {
        let newest = Store::new(path, 1).newest()?;
        Self::load(&newest.ok_or_else(|| Error::NoCheckpoint { path: path.to_path_buf() })?)
    }

    /// The bytes of the part `name`, verified.
    ///
    /// # Errors
    /// [`Error::Damaged`] when the checkpoint does not have it, or where it is not as it was written; [`Error::Io`].
    pub fn read(&self, name: &str) -> Result<Bytes> {
        Ok(Bytes::from_bytes_vec(self.file(name)?.bytes(&self.held)?))
    }

    /// The file of the part `name`; that of weights may be in Burn's own format.
    fn file(&self, name: &str) -> Result<&Saved> {
        let packed = Path::new(name).with_extension(parts::PACK);
        let file = self.files.get(name).or_else(|| self.files.get(packed.to_str()?));
        file.ok_or_else(|| Error::damaged(&self.path, format!("the checkpoint has no `{name}`; use another")))
    }

    /// `module` with the weights of the part `name`: one tensor is read at a time, and takes the place of the module's.
    ///
    /// # Errors
    /// [`Error::Damaged`] when the part is missing, damaged or does not fit the module, naming the tensor.
    pub fn load_module<M: Module>(&self, mut module: M, name: &str) -> Result<M> {
        let (file, found) = self.apply(&mut module, name, None)?;
        let missing: Vec<_> = found.missing.into_iter().map(|(path, _)| path).collect();
        let problem = match found.errors.first() {
            Some(ApplyError::ShapeMismatch { path, expected, found }) => {
                format!("has `{path}` of shape {:?}, the model's is {:?}", found.to_vec(), expected.to_vec())
            }
            Some(other) => format!("cannot be used ({other})"),
            None if !missing.is_empty() => format!("lacks {} of the model", listed(&missing)),
            None if !found.unused.is_empty() => format!("has {}, which the model does not have", listed(&found.unused)),
            None => return Ok(module),
        };
        Err(Error::damaged(&file, format!("does not hold this model: it {problem}; use the recipe it was made with")))
    }

    /// Puts the tensors of the part `name` that pass `filter` into `module`, by their names. The file, and what found its place.
    fn apply<M: Module>(
        &self,
        module: &mut M,
        name: &str,
        filter: Option<PathFilter>,
    ) -> Result<(PathBuf, ApplyResult)> {
        let saved = self.file(name)?;
        let (tensors, failure) = saved.tensors(&self.held)?;
        let found = module.apply(tensors, filter, None, false);
        failure.take().map_or_else(|| Ok((saved.path.clone(), found)), Err)
    }

    /// The vocabulary that the model was trained with, whose hash is `fingerprint`.
    ///
    /// # Errors
    /// [`Error::Damaged`] when it is missing or another, [`Error::Data`] when it is none.
    pub fn vocabulary(&self, fingerprint: &str) -> Result<Vocabulary> {
        let file = self.path.join(parts::VOCABULARY);
        let bytes = self.read(parts::VOCABULARY)?;
        let vocabulary = match self.state.recipe.text.tokenizer {
            Some(_) => Vocabulary::of_user(&bytes, &file)?,
            None => Vocabulary::from_bytes(&bytes, &file)?,
        };
        let found = format!("{:016x}", vocabulary.fingerprint());
        if found != fingerprint {
            let problem = format!(
                "is not the vocabulary that the model was trained with ({found}, not {fingerprint}); restore it"
            );
            return Err(Error::damaged(&file, problem));
        }
        Ok(vocabulary)
    }

    /// `module` with the weights that are evaluated: the average where there is one.
    ///
    /// # Errors
    /// As [`Checkpoint::load_module`].
    pub fn load_weights<M: Module>(&self, module: M) -> Result<M> {
        self.load_module(module, self.weights())
    }

    /// Checks that the checkpoint belongs to `recipe` and `data`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first difference.
    pub fn check(&self, recipe: &Recipe, data: &DataIdentity) -> Result<()> {
        match self.state.recipe.difference(recipe) {
            Some((field, saved, now)) => Err(Error::Mismatch { path: self.path.clone(), field, saved, now }),
            None => self.state.data.check(data, &self.path),
        }
    }
}

/// Something that cannot be made into bytes.
pub(crate) fn cannot_serialise(e: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::Io { path: PathBuf::from("memory"), action: "cannot serialise", source: std::io::Error::other(e) }
}

/// `value` as JSON for people.
///
/// # Errors
/// [`Error::Io`] when it cannot be serialised.
pub(crate) fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| cannot_serialise(e.into()))
}
