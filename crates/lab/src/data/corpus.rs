//! Plain text to be continued: one long text per part.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use super::{Error, Result, lines, text::hash_texts};
use crate::{budget::Held, source};

/// Shares of a single text that are validated and tested on, from its end.
const VALIDATION: f64 = 0.05;
const TEST: f64 = 0.05;

/// A text to learn from, one that is watched, and one that is tested on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusDataset {
    /// The data set's kind, `corpus`.
    pub name: String,
    /// What is learnt from.
    pub train: String,
    /// What is looked at after each epoch.
    pub validation: String,
    /// What perplexity is reported on.
    pub test: String,
}

impl CorpusDataset {
    /// Hash of everything that training and testing see.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash_texts(&mut hash, [&self.train, &self.validation, &self.test]);
        hash.digest()
    }

    fn new(train: String, validation: String, test: String) -> Self {
        Self { name: "corpus".into(), train, validation, test }
    }
}

/// Which plain text to use.
#[derive(Debug, Clone, PartialEq)]
pub enum CorpusSpec {
    /// `corpus:PATH`: a file, of which the last tenth is for validation and testing; or a folder with `train.txt`, `test.txt`
    /// and perhaps `val.txt`, or with any .txt files, which are read one after the other as one; also .gz, .zst, .xz.
    Path(PathBuf),
    /// `corpus:TRAIN,TEST` or `corpus:TRAIN,VALIDATION,TEST`: a file for each part. Without a file for validation it is the
    /// last twentieth of the first.
    Files {
        /// What is learnt from.
        train: PathBuf,
        /// What is watched.
        validation: Option<PathBuf>,
        /// What is tested on.
        test: PathBuf,
    },
}

impl CorpusSpec {
    /// The kinds, for messages.
    pub(super) const KINDS: &str = "corpus:PATH, corpus:TRAIN[,VALIDATION],TEST";

    /// Reads what follows the kind; `None` where `kind` is no plain text.
    pub(super) fn parse(kind: &str, rest: &str) -> Option<Result<Self>> {
        (kind == "corpus").then(|| match rest.split(',').collect::<Vec<_>>()[..] {
            [path] => Ok(Self::Path(path.into())),
            [train, test] if !train.is_empty() && !test.is_empty() => {
                Ok(Self::Files { train: train.into(), validation: None, test: test.into() })
            }
            [train, validation, test] if ![train, validation, test].contains(&"") => {
                Ok(Self::Files { train: train.into(), validation: Some(validation.into()), test: test.into() })
            }
            _ => {
                let expected = "`corpus:PATH`, `corpus:TRAIN,TEST` or `corpus:TRAIN,VALIDATION,TEST`";
                Err(Error::Setting { field: "corpus", got: format!("`{rest}`"), expected })
            }
        })
    }

    /// Reads the texts.
    ///
    /// # Errors
    /// Any [`Error`]: bytes that are not UTF-8, a part without text; the message names the file.
    pub fn load(&self) -> Result<CorpusDataset> {
        let held = &Held::new();
        match self {
            Self::Path(folder) if folder.is_dir() => load_folder(folder, held),
            Self::Path(file) => in_three(file, &lines::read(file, held)?, held),
            Self::Files { train, validation, test } => of_files(train, validation.as_deref(), test, held),
        }
    }
}

fn of_files(train: &Path, validation: Option<&Path>, test: &Path, held: &Held) -> Result<CorpusDataset> {
    let test_text = filled(test, lines::read(test, held)?)?;
    let text = lines::read(train, held)?;
    Ok(match validation {
        Some(path) => CorpusDataset::new(filled(train, text)?, filled(path, lines::read(path, held)?)?, test_text),
        None => {
            held.add(train, text.len() as u64)?;
            let (kept, watched) = cut(&text, 1.0 - VALIDATION);
            CorpusDataset::new(filled(train, kept.into())?, filled(train, watched.into())?, test_text)
        }
    })
}

fn load_folder(folder: &Path, held: &Held) -> Result<CorpusDataset> {
    let find = |stems: &[&str]| lines::find(folder, stems, &["txt"]);
    if let (Some(train), Some(test)) = (find(&["train"])?, find(&["test"])?) {
        return of_files(&train, find(&lines::VALIDATION)?.as_deref(), &test, held);
    }
    let mut files = source::entries(folder)?;
    files.retain(|path| !path.is_dir() && lines::format_of(path) == "txt");
    if files.is_empty() {
        let remedy = "the folder must hold train.txt and test.txt, or any .txt files (also .gz, .zst, .xz)".into();
        return Err(Error::Missing { path: folder.join("train.txt"), remedy });
    }
    let texts = files.iter().map(|path| lines::read(path, held)).collect::<Result<Vec<_>>>()?;
    held.add(folder, texts.iter().map(|text| text.len() as u64 + 1).sum())?;
    in_three(folder, &texts.join("\n"), held)
}

/// Contiguous parts of one text.
fn in_three(path: &Path, text: &str, held: &Held) -> Result<CorpusDataset> {
    held.add(path, text.len() as u64)?;
    let (train, rest) = cut(text, 1.0 - VALIDATION - TEST);
    let (validation, test) = cut(rest, VALIDATION / (VALIDATION + TEST));
    let [train, validation, test] = [train, validation, test].map(|part| filled(path, part.to_owned()));
    Ok(CorpusDataset::new(train?, validation?, test?))
}

/// The text before and after `share` of it: cut behind the next line feed, or, in the last line, where a character ends.
fn cut(text: &str, share: f64) -> (&str, &str) {
    let mut at = (text.len() as f64 * share) as usize;
    while !text.is_char_boundary(at) {
        at += 1;
    }
    let line = text[at..].find('\n').map_or(text.len(), |end| at + end + 1);
    text.split_at(if line < text.len() { line } else { at })
}

fn filled(path: &Path, text: String) -> Result<String> {
    if text.is_empty() {
        let problem = "holds no text for one of the parts for training, validation and testing".into();
        return Err(Error::Empty { path: path.into(), problem });
    }
    Ok(text)
}

impl fmt::Display for CorpusSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "corpus:{}", path.display()),
            Self::Files { train, validation: None, test } => write!(f, "corpus:{},{}", train.display(), test.display()),
            Self::Files { train, validation: Some(validation), test } => {
                write!(f, "corpus:{},{},{}", train.display(), validation.display(), test.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_contiguous_and_end_with_their_lines() {
        let text: String = (0..1000).map(|i| format!("line {i}\n")).collect();
        let data = in_three(Path::new("f"), &text, &Held::new()).unwrap();
        assert_eq!([&data.train[..], &data.validation, &data.test].concat(), text);
        assert!(data.train.ends_with('\n') && data.validation.ends_with('\n'));
        assert!((0.89..0.91).contains(&(data.train.len() as f64 / text.len() as f64)));
        assert!((0.8..1.25).contains(&(data.validation.len() as f64 / data.test.len() as f64)));
    }

    #[test]
    fn one_long_line_is_cut_between_characters() {
        let text = "é".repeat(333);
        let data = in_three(Path::new("f"), &text, &Held::new()).unwrap();
        assert_eq!([&data.train[..], &data.validation, &data.test].concat(), text);
        assert!(in_three(Path::new("f"), "ab", &Held::new()).unwrap_err().to_string().contains("f: holds no text"));
    }
}
