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
    store::{ModuleRecord, RecordError},
    tensor::Bytes,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Recipe, Result,
    budget::Held,
    data::Vocabulary,
    eval::Metric,
    source::{self, Document},
    train::Plan,
};

mod expectation;
mod origin;
mod store;

pub use expectation::{
    CorpusExpectation, Expectation, PairExpectation, PictureExpectation, RecallExpectation, TextExpectation,
};
pub use origin::Origin;
pub use store::Store;

/// Version of the format; a change that older programs cannot read raises it.
const FORMAT: u32 = 2;
/// The folder in a run's folder that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
const STATE: &str = "state.json";

/// Names of the files that hold tensors.
pub mod parts {
    /// The weights.
    pub const MODEL: &str = "model.bpk";
    /// The average of the weights, where the recipe asks for one.
    pub const AVERAGE: &str = "average.bpk";
    /// The optimiser's moments.
    pub const OPTIMISER: &str = "optimiser.bpk";
    /// The vocabulary of a model of text, as Hugging Face's tokenizers write it.
    pub const VOCABULARY: &str = "tokenizer.json";
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

/// What is on the disk: the state, and what every other file must be.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    files: BTreeMap<String, Fingerprint>,
    state: State,
}

#[derive(Serialize, Deserialize)]
struct Fingerprint {
    bytes: u64,
    crc32: u32,
}

/// A checkpoint read back.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What is not a tensor.
    pub state: State,
    parts: BTreeMap<String, Vec<u8>>,
    _held: Held,
}

impl Checkpoint {
    /// Reads and verifies the checkpoint in `path`.
    ///
    /// # Errors
    /// [`Error::Damaged`] naming the file, [`Error::Io`].
    pub fn load(path: &Path) -> Result<Self> {
        let again = format!("delete the folder {} to fall back on an earlier checkpoint", path.display());
        let file = path.join(STATE);
        let text = Document::read(&file)?;
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|e| Error::damaged(&file, format!("is no checkpoint of this program ({e}); {again}")))?;
        if manifest.format != FORMAT {
            let problem =
                format!("has format {}, this program reads {FORMAT}; use the program that wrote it", manifest.format);
            return Err(Error::damaged(&file, problem));
        }
        let (mut parts, held) = (BTreeMap::new(), Held::new());
        for (name, expected) in manifest.files {
            let file = path.join(&name);
            if Path::new(&name).file_name() != Some(name.as_ref()) {
                let problem = format!("names the part `{name}`, which is no file of its folder; {again}");
                return Err(Error::damaged(&path.join(STATE), problem));
            }
            let bytes = source::read(&file, &held)?;
            if bytes.len() as u64 != expected.bytes {
                let problem = format!(
                    "has {} bytes, {} were written: it is cut off or another; {again}",
                    bytes.len(),
                    expected.bytes
                );
                return Err(Error::damaged(&file, problem));
            }
            if crc32fast::hash(&bytes) != expected.crc32 {
                return Err(Error::damaged(&file, format!("has a wrong checksum; {again}")));
            }
            parts.insert(name, bytes);
        }
        Ok(Self { path: path.to_path_buf(), state: manifest.state, parts, _held: held })
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

    /// Takes the part `name`.
    ///
    /// # Errors
    /// [`Error::Damaged`] when the checkpoint does not have it.
    pub fn take(&mut self, name: &str) -> Result<Bytes> {
        let part = self.parts.remove(name).map(Bytes::from_bytes_vec);
        part.ok_or_else(|| Error::damaged(&self.path, format!("the checkpoint has no `{name}`; use another")))
    }

    /// `module` with the weights and parameter ids of the part `name`.
    ///
    /// # Errors
    /// [`Error::Damaged`] when the part is missing or does not fit the module.
    pub fn load_module<M: Module>(&mut self, module: M, name: &str) -> Result<M> {
        let file = self.path.join(name);
        let damaged = |e: RecordError| {
            Error::damaged(&file, format!("does not hold this model ({e}); use the recipe it was made with"))
        };
        let record = ModuleRecord::from_bytes(self.take(name)?).map_err(&damaged)?;
        module.try_load_record(record).map_err(damaged)
    }

    /// The vocabulary that the model was trained with, whose hash is `fingerprint`.
    ///
    /// # Errors
    /// [`Error::Damaged`] when it is missing or another, [`Error::Data`] when it is none.
    pub fn vocabulary(&mut self, fingerprint: &str) -> Result<Vocabulary> {
        let file = self.path.join(parts::VOCABULARY);
        let bytes = self.take(parts::VOCABULARY)?;
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
    pub fn load_weights<M: Module>(&mut self, module: M) -> Result<M> {
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

/// The weights of `module` as a part of a checkpoint.
///
/// # Errors
/// [`Error::Io`] when they cannot be serialised.
pub fn module_bytes<M: Module>(module: M) -> Result<Bytes> {
    module.into_record().into_bytes().map_err(|e| cannot_serialise(e.into()))
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
