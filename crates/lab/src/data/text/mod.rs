//! Labelled texts: generated, or read strictly from files.

mod documents;
mod folders;
mod listops;

use std::{fmt, path::PathBuf};

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::{Error, Result, settings::settings, spec::HOLDOUT, split::hold_out};
use crate::budget::Held;

pub use documents::Columns;
pub(super) use documents::sorted_classes;
pub use listops::Listops;

/// Examples to learn from and examples to be tested on, with the names of their classes. An example is `N` texts: one, or the two of a
/// pair ([`MatchDataset`](super::MatchDataset)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextDataset<const N: usize = 1> {
    /// The data set's kind, e.g. `imdb`.
    pub name: String,
    /// Names of the classes; a label is an index into them.
    pub classes: Vec<String>,
    /// What is learnt from.
    pub train: TextSplit<N>,
    /// What is looked at after each epoch, where the data set brings it.
    pub validation: Option<TextSplit<N>>,
    /// What accuracy is reported on.
    pub test: TextSplit<N>,
    /// Every word there is, where the data set is generated and has few; otherwise the vocabulary is learnt from the training texts.
    pub words: Option<Vec<String>>,
}

/// Labelled examples of `N` texts each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextSplit<const N: usize = 1> {
    /// The first text of every example, then the second of every example, and so on.
    pub texts: [Vec<String>; N],
    /// One label per example.
    pub labels: Vec<u32>,
}

impl<const N: usize> TextSplit<N> {
    /// Number of examples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no example.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Holds `fraction` of every class out: (kept, held out), both in the original order, decided by `seed` alone.
    pub fn hold_out(&self, fraction: f64, seed: u64) -> (Self, Self) {
        let (kept, held) = hold_out(&self.labels, fraction, seed);
        let select = |indices: &[usize]| Self {
            texts: self.texts.each_ref().map(|texts| indices.iter().map(|&index| texts[index].clone()).collect()),
            labels: indices.iter().map(|&index| self.labels[index]).collect(),
        };
        (select(&kept), select(&held))
    }
}

impl<const N: usize> TextDataset<N> {
    /// Hash of everything that training and testing see: names, texts and labels.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash_texts(&mut hash, &self.classes);
        for split in [Some(&self.train), self.validation.as_ref(), Some(&self.test)].into_iter().flatten() {
            split.texts.iter().for_each(|texts| hash_texts(&mut hash, texts));
            split.labels.iter().for_each(|label| hash.update(&label.to_le_bytes()));
        }
        hash.digest()
    }
}

/// Adds `texts` with their ends.
pub(super) fn hash_texts<'a>(
    hash: &mut Xxh3,
    texts: impl IntoIterator<Item = &'a String, IntoIter: ExactSizeIterator>,
) {
    let texts = texts.into_iter();
    hash.update(&(texts.len() as u64).to_le_bytes());
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
}

/// Which texts to use.
#[derive(Debug, Clone, PartialEq)]
pub enum TextSpec {
    /// `listops` or `listops:seed=0,train=96000,val=2000,test=2000,min=500,max=2000`: generated expressions.
    Listops(Listops),
    /// `imdb:PATH`: reviews, as the folder `aclImdb` or in CSV or JSON lines with the labels 0 (negative) and 1
    /// (positive). Their line breaks, `<br />`, become spaces.
    Imdb(PathBuf),
    /// `text:PATH` or `text:PATH?text=COLUMN&label=COLUMN`: CSV, TSV or JSON lines in `train.*`, perhaps `val.*`, and
    /// `test.*` of a folder; there also `train/CLASS/*.txt` and so on; or one file, of which a fifth of every class is held
    /// out for testing.
    Files {
        /// The folder or file.
        path: PathBuf,
        /// Which columns to read.
        columns: Columns,
    },
}

impl TextSpec {
    /// The kinds, for messages.
    pub(super) const KINDS: &str = "listops[:SETTINGS], imdb:PATH, text:PATH[?text=COLUMN&label=COLUMN]";

    /// Reads what follows the kind; `None` where `kind` is none of texts.
    pub(super) fn parse(kind: &str, rest: &str) -> Option<Result<Self>> {
        Some(match kind {
            "listops" => Listops::parse(rest).map(TextSpec::Listops),
            "imdb" => Ok(TextSpec::Imdb(rest.into())),
            "text" => files(rest),
            _ => return None,
        })
    }

    /// Generates or reads the texts.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file and the line.
    pub fn load(&self) -> Result<TextDataset> {
        let held = &Held::new();
        match self {
            TextSpec::Listops(listops) => listops.generate(),
            TextSpec::Imdb(path) => imdb(path, held),
            TextSpec::Files { path, columns } => documents::load("text", path, columns, HOLDOUT, held),
        }
    }
}

fn imdb(path: &std::path::Path, held: &Held) -> Result<TextDataset> {
    let mut data = documents::load("imdb", path, &Columns::default(), HOLDOUT, held)?;
    if data.classes != ["0", "1"] && data.classes != ["neg", "pos"] {
        let labels = data.classes.join(", ");
        let problem = format!("has the labels {labels}, expected 0 and 1, or neg and pos; read it as `text:PATH`");
        return Err(Error::Format { path: path.into(), problem });
    }
    data.classes = vec!["negative".into(), "positive".into()];
    for split in [Some(&mut data.train), data.validation.as_mut(), Some(&mut data.test)].into_iter().flatten() {
        split.texts[0].par_iter_mut().for_each(|text| *text = without_breaks(text));
    }
    Ok(data)
}

/// Line breaks of the reviews' mark-up are spaces between words.
fn without_breaks(text: &str) -> String {
    text.replace("<br />", " ")
}

/// Reads `PATH` or `PATH?text=COLUMN&label=COLUMN`.
fn files(rest: &str) -> Result<TextSpec> {
    let mut columns = Columns::default();
    let Some((path, named)) = rest.rsplit_once('?') else {
        return Ok(TextSpec::Files { path: rest.into(), columns });
    };
    for setting in settings("text", named, '&')? {
        match setting {
            ("text", name) if !name.is_empty() => columns.text = name.into(),
            ("label", name) if !name.is_empty() => columns.label = name.into(),
            _ => {
                let expected = "`text=COLUMN` and `label=COLUMN`, joined by `&`";
                return Err(Error::Setting { field: "text", got: format!("`{named}`"), expected });
            }
        }
    }
    Ok(TextSpec::Files { path: path.into(), columns })
}

impl fmt::Display for TextSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextSpec::Listops(listops) => write!(f, "listops:{listops}"),
            TextSpec::Imdb(path) => write!(f, "imdb:{}", path.display()),
            TextSpec::Files { path, columns: Columns { text, label } } => {
                write!(f, "text:{}?text={text}&label={label}", path.display())
            }
        }
    }
}
