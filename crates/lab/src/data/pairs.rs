//! Parallel text: sentences with their translations, one a line, in two files.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use super::{Error, Result, lines, settings::settings, spec::HOLDOUT, split::hold_out, text::hash_texts};
use crate::{
    budget::{Held, text_bytes},
    source::entries,
};

/// Sentences to learn from and sentences to be tested on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairDataset {
    /// The data set's kind, e.g. `multi30k`.
    pub name: String,
    /// What is translated, and into what: the endings of the files' names.
    pub languages: [String; 2],
    /// What is learnt from.
    pub train: PairSplit,
    /// What is looked at after each epoch, where the data set brings it.
    pub validation: Option<PairSplit>,
    /// What BLEU is reported on.
    pub test: PairSplit,
}

/// Sentences and their translations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairSplit {
    /// The sentences.
    pub source: Vec<String>,
    /// One translation per sentence.
    pub target: Vec<String>,
}

impl PairSplit {
    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.source.len()
    }

    /// Whether there is no pair.
    pub fn is_empty(&self) -> bool {
        self.source.is_empty()
    }

    /// Holds `fraction` of the pairs out: (kept, held out), both in the original order, decided by `seed` alone.
    pub fn hold_out(&self, fraction: f64, seed: u64) -> (Self, Self) {
        let (kept, held) = hold_out(&vec![0; self.len()], fraction, seed);
        let pick = |from: &[String], indices: &[usize]| indices.iter().map(|&index| from[index].clone()).collect();
        let select =
            |indices: &[usize]| PairSplit { source: pick(&self.source, indices), target: pick(&self.target, indices) };
        (select(&kept), select(&held))
    }

    fn read(source: &Path, target: &Path, held: &Held) -> Result<Self> {
        let read = |path: &Path| -> Result<Vec<String>> {
            let content = Held::new();
            let text = lines::read(path, &content)?;
            let line = |line: Result<(usize, &str)>| {
                let (_, line) = line?;
                held.add(path, text_bytes(line))?;
                Ok(line.to_owned())
            };
            lines::numbered(path, &text).map(line).collect()
        };
        let split = PairSplit { source: read(source)?, target: read(target)? };
        let (lines, others) = (split.source.len(), split.target.len());
        if lines != others {
            return Err(Error::OneSided { path: source.into(), lines, other: target.into(), others });
        }
        if split.is_empty() {
            return Err(Error::Empty { path: source.into(), problem: "holds no text".into() });
        }
        Ok(split)
    }
}

impl PairDataset {
    /// Hash of everything that training and testing see.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash_texts(&mut hash, &self.languages);
        for split in [Some(&self.train), self.validation.as_ref(), Some(&self.test)].into_iter().flatten() {
            hash_texts(&mut hash, &split.source);
            hash_texts(&mut hash, &split.target);
        }
        hash.digest()
    }
}

/// Which parallel texts to use.
#[derive(Debug, Clone, PartialEq)]
pub enum PairSpec {
    /// `pairs:DIR?from=en&to=de`, or `multi30k:DIR` (from `en` to `de` unless said otherwise): `train.en` and `train.de`, `test.en` and
    /// `test.de` or another name that begins with `test`, perhaps `val.en` and `val.de`; also .gz, .zst, .xz.
    Folder {
        /// `pairs` or `multi30k`.
        name: &'static str,
        /// The folder.
        path: PathBuf,
        /// Endings of the files to translate from and to.
        languages: [String; 2],
    },
    /// `pairs:SOURCE,TARGET`: two files, of which a fifth is held out for testing.
    Files {
        /// What is translated.
        source: PathBuf,
        /// The translations.
        target: PathBuf,
    },
}

impl PairSpec {
    /// The kinds, for messages.
    pub(super) const KINDS: &str = "multi30k:DIR, pairs:DIR?from=LANGUAGE&to=LANGUAGE, pairs:SOURCE,TARGET";

    /// Reads what follows the kind; `None` where `kind` is none of parallel texts.
    pub(super) fn parse(kind: &str, rest: &str) -> Option<Result<Self>> {
        match kind {
            "multi30k" => Some(folder("multi30k", rest, Some(["en".into(), "de".into()]))),
            "pairs" => Some(match rest.split_once(',') {
                Some((source, target)) if !source.is_empty() && !target.is_empty() => {
                    Ok(PairSpec::Files { source: source.into(), target: target.into() })
                }
                _ => folder("pairs", rest, None),
            }),
            _ => None,
        }
    }

    /// Reads the texts.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file and the line.
    pub fn load(&self) -> Result<PairDataset> {
        let held = &Held::new();
        match self {
            PairSpec::Folder { name, path, languages } => load_folder(name, path, languages, held),
            PairSpec::Files { source, target } => {
                let all = PairSplit::read(source, target, held)?;
                // Both parts are copies.
                held.add(source, all.source.iter().chain(&all.target).map(|text| text_bytes(text)).sum())?;
                let (train, test) = all.hold_out(HOLDOUT, 0);
                let languages = [source, target].map(|path| lines::format_of(path));
                Ok(PairDataset { name: "pairs".into(), languages, train, validation: None, test })
            }
        }
    }
}

fn load_folder(name: &str, folder: &Path, languages: &[String; 2], held: &Held) -> Result<PairDataset> {
    let part = |stems: &[&str]| -> Result<Option<PairSplit>> {
        let [from, to] = languages.each_ref().map(|language| lines::find(folder, stems, &[language]));
        match (from?, to?) {
            (Some(source), Some(target)) => Ok(Some(PairSplit::read(&source, &target, held)?)),
            (None, None) => Ok(None),
            (one, other) => {
                let missing = if one.is_none() { &languages[0] } else { &languages[1] };
                let there = one.or(other).unwrap_or_default();
                let remedy = format!("{} is there without its other side", there.display());
                Err(Error::Missing { path: folder.join(format!("{}.{missing}", stems[0])), remedy })
            }
        }
    };
    let tests = test_stems(folder)?;
    let tests: Vec<&str> = tests.iter().map(String::as_str).collect();
    let missing = |stem: &str| Error::Missing {
        path: folder.join(format!("{stem}.{}", languages[0])),
        remedy: format!(
            "the folder must hold {stem}.{} and {stem}.{} (also .gz, .zst, .xz)",
            languages[0], languages[1]
        ),
    };
    let train = part(&["train"])?.ok_or_else(|| missing("train"))?;
    let validation = part(&lines::VALIDATION)?;
    let test = part(&tests)?.ok_or_else(|| missing("test"))?;
    Ok(PairDataset { name: name.into(), languages: languages.clone(), train, validation, test })
}

/// Names, without endings, of the files for testing: those that begin with `test`.
fn test_stems(folder: &Path) -> Result<Vec<String>> {
    let mut stems = Vec::new();
    for path in entries(folder)? {
        let name = lines::name_of(&path).to_lowercase();
        let stem = name.split('.').next().unwrap_or_default();
        if stem.starts_with("test") && !stems.iter().any(|found| found == stem) {
            stems.push(stem.to_owned());
        }
    }
    Ok(stems)
}

/// Reads `DIR` or `DIR?from=en&to=de`.
fn folder(name: &'static str, rest: &str, default: Option<[String; 2]>) -> Result<PairSpec> {
    let (path, named) = rest.rsplit_once('?').unwrap_or((rest, ""));
    let [mut from, mut to] = default.map_or([None, None], |languages| languages.map(Some));
    let fail = || {
        let expected = "`pairs:DIR?from=LANGUAGE&to=LANGUAGE`, or two files `pairs:SOURCE,TARGET`";
        Error::Setting { field: "pairs", got: format!("`{rest}`"), expected }
    };
    for setting in settings("pairs", named, '&')? {
        match setting {
            ("from", language) if !language.is_empty() => from = Some(language.into()),
            ("to", language) if !language.is_empty() => to = Some(language.into()),
            _ => return Err(fail()),
        }
    }
    let languages = [from.ok_or_else(fail)?, to.ok_or_else(fail)?];
    Ok(PairSpec::Folder { name, path: path.into(), languages })
}

impl fmt::Display for PairSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PairSpec::Folder { name, path, languages: [from, to] } => {
                write!(f, "{name}:{}?from={from}&to={to}", path.display())
            }
            PairSpec::Files { source, target } => write!(f, "pairs:{},{}", source.display(), target.display()),
        }
    }
}
