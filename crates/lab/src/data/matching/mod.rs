//! Pairs of documents with a label, whether they belong together: generated, or those of "Long Range Arena".

mod documents;
mod files;

use std::{fmt, path::PathBuf};

pub use documents::Documents;

use super::{
    Error, Result, TextDataset, TextSplit,
    settings::{check, number, settings},
};
use crate::budget::Held;

/// Pairs of documents to learn from and to be tested on.
pub type MatchDataset = TextDataset<2>;

/// Labelled pairs of documents.
pub type MatchSplit = TextSplit<2>;

/// The data set of these parts.
fn dataset(name: &str, train: MatchSplit, validation: Option<MatchSplit>, test: MatchSplit) -> MatchDataset {
    let classes = ["unrelated", "related"].map(String::from).to_vec();
    MatchDataset { name: name.into(), classes, train, validation, test, words: None }
}

/// Bytes kept of a document of "Long Range Arena", as published.
const BYTES: usize = 4000;

/// Most bytes that may be kept of a document.
const MOST_BYTES: usize = 1 << 20;

/// Which pairs of documents to use.
#[derive(Debug, Clone, PartialEq)]
pub enum MatchSpec {
    /// `documents` or `documents:seed=0,train=8000,val=500,test=500,topics=8,bytes=128,share=0.5`: generated pairs.
    Documents(Documents),
    /// `retrieval:DIR` or `retrieval:DIR?bytes=4000`: the files `new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv` of "Long Range Arena", also
    /// .gz, .zst, .xz. A line is a label, 0 or 1, two names that are not used, and two documents, separated by tabs.
    Retrieval {
        /// The folder.
        path: PathBuf,
        /// Bytes kept of a document.
        bytes: usize,
    },
}

impl MatchSpec {
    /// The kinds, for messages.
    pub(super) const KINDS: &str = "documents[:SETTINGS], retrieval:DIR[?bytes=BYTES]";

    /// Reads what follows the kind; `None` where `kind` is none of pairs of documents.
    pub(super) fn parse(kind: &str, rest: &str) -> Option<Result<Self>> {
        Some(match kind {
            "documents" => Documents::parse(rest).map(MatchSpec::Documents),
            "retrieval" => retrieval(rest),
            _ => return None,
        })
    }

    /// Generates or reads the documents.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file and the line.
    pub fn load(&self) -> Result<MatchDataset> {
        match self {
            MatchSpec::Documents(documents) => documents.generate(),
            MatchSpec::Retrieval { path, bytes } => files::load(path, *bytes, &Held::new()),
        }
    }
}

/// Reads `DIR` or `DIR?bytes=4000`.
fn retrieval(rest: &str) -> Result<MatchSpec> {
    let (path, named) = rest.rsplit_once('?').unwrap_or((rest, ""));
    let mut bytes = BYTES;
    for setting in settings("retrieval", named, '&')? {
        let ("bytes", value) = setting else {
            let expected = "`bytes=BYTES` alone, as in `retrieval:DIR?bytes=4000`";
            return Err(Error::Setting { field: "retrieval", got: format!("`{named}`"), expected });
        };
        bytes = number("bytes", value)?;
    }
    check("bytes", bytes, (1..=MOST_BYTES).contains(&bytes), "1 to 1048576")?;
    Ok(MatchSpec::Retrieval { path: path.into(), bytes })
}

impl fmt::Display for MatchSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatchSpec::Documents(documents) => write!(f, "documents:{documents}"),
            MatchSpec::Retrieval { path, bytes } => write!(f, "retrieval:{}?bytes={bytes}", path.display()),
        }
    }
}
