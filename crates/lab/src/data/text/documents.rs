//! Labelled texts in CSV, TSV and JSON lines, or in one folder per class.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::prelude::*;
use serde_json::Value;

use super::{TextDataset, TextSplit, folders};
use crate::{
    budget::{Held, Passing, TREE, text_bytes},
    data::{Error, Result, lines},
};

const FORMATS: [&str; 4] = ["csv", "tsv", "jsonl", "ndjson"];

/// The columns of a table, or the fields of a JSON object, that hold text and label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Of the text. Default `text`.
    pub text: String,
    /// Of the label. Default `label`.
    pub label: String,
}

impl Default for Columns {
    fn default() -> Self {
        Columns { text: "text".into(), label: "label".into() }
    }
}

/// One text with its label, and where it stands.
pub(super) struct Document {
    pub path: Arc<Path>,
    pub line: usize,
    pub text: String,
    pub label: String,
}

impl Document {
    /// What it takes in a list, with room to spare.
    pub fn bytes(&self) -> u64 {
        text_bytes(&self.text) + text_bytes(&self.label) + 2 * size_of::<Arc<Path>>() as u64 + 16
    }

    /// Refuses what must be a mistake: no text, no label, or a label that looks like another.
    fn check(&self) -> Result<()> {
        let problem = match self.label.trim() {
            _ if self.text.trim().is_empty() => "has an empty text; remove it".into(),
            "" => "has no label; give it one, or remove it".into(),
            label if label != self.label => format!("has the label `{}`; remove the spaces around it", self.label),
            _ => return Ok(()),
        };
        Err(Error::Line { path: self.path.to_path_buf(), line: self.line, problem })
    }
}

/// The texts of `path`: a folder with `train.*`, perhaps `val.*`, and `test.*`, each a file, or a folder with one folder per
/// class (where `test.*` is missing, or `path` is a file, the share `holdout` of every class is held out for testing).
/// Classes are the labels of the training part, sorted.
///
/// # Errors
/// Any [`Error`]: files are read strictly, and the message names the line.
pub(super) fn load(name: &str, path: &Path, columns: &Columns, holdout: f64, held: &Held) -> Result<TextDataset> {
    let [train, validation, test] = if path.is_dir() { parts(path)? } else { [Some(path.to_path_buf()), None, None] };
    let train = train.ok_or_else(|| no_training_part(path))?;
    let documents = read(&train, columns, held)?;
    let classes = sorted_classes(documents.iter().map(|document| document.label.as_str()));
    if classes.len() < 2 {
        let problem = format!("has {} class, at least two are needed", classes.len());
        return Err(Error::Empty { path: train, problem });
    }
    let learnt = split(documents, &classes)?;
    let other = |part: Option<PathBuf>| part.map(|part| split(read(&part, columns, held)?, &classes)).transpose();
    let validation = other(validation)?;
    let (train, test) = match other(test)? {
        Some(test) => (learnt, test),
        None => {
            // Both parts are copies.
            held.add(path, learnt.texts[0].iter().map(|text| text_bytes(text)).sum())?;
            learnt.hold_out(holdout, 0)
        }
    };
    Ok(TextDataset { name: name.into(), classes, train, validation, test, words: None })
}

/// The `labels`, each once: in the order of their values if all are integers, else as texts.
pub(in crate::data) fn sorted_classes<'a>(labels: impl Iterator<Item = &'a str>) -> Vec<String> {
    let labels: BTreeSet<&str> = labels.collect();
    let mut classes: Vec<String> = labels.into_iter().map(str::to_owned).collect();
    if classes.iter().all(|class| class.parse::<i64>().is_ok()) {
        classes.sort_by_key(|class| class.parse::<i64>().ok());
    }
    classes
}

/// Where the parts for training, validation and testing are in a folder.
fn parts(folder: &Path) -> Result<[Option<PathBuf>; 3]> {
    let part = |names: &[&str]| {
        let file = lines::find(folder, names, &FORMATS)?;
        let classes = names.iter().map(|name| folder.join(name)).filter(|path| path.is_dir());
        lines::the_only(folder, file.into_iter().chain(classes))
    };
    Ok([part(&["train"])?, part(&lines::VALIDATION)?, part(&["test"])?])
}

fn no_training_part(folder: &Path) -> Error {
    Error::Missing {
        path: folder.join("train.jsonl"),
        remedy: "the folder must hold train.csv, .tsv or .jsonl (also .gz, .zst, .xz), or a folder `train` with one \
                 folder of .txt files per class; and it may hold the same for `val` and `test`"
            .into(),
    }
}

fn split(documents: Vec<Document>, classes: &[String]) -> Result<TextSplit> {
    let labelled = documents.into_iter().map(|Document { path, line, text, label }| {
        match classes.iter().position(|class| *class == label) {
            Some(class) => Ok((text, class as u32)),
            None => Err(Error::UnknownLabel { path: path.to_path_buf(), line, label, classes: classes.join(", ") }),
        }
    });
    let (texts, labels) = labelled.collect::<Result<(Vec<_>, Vec<_>)>>()?;
    Ok(TextSplit { texts: [texts], labels })
}

/// Every document of a file, or of a folder with one folder per class.
fn read(path: &Path, columns: &Columns, held: &Held) -> Result<Vec<Document>> {
    let (format, content) = (lines::format_of(path), Held::new());
    let documents = match format.as_str() {
        _ if path.is_dir() && *columns != Columns::default() => {
            let problem = "is a folder with one folder per class, which has no columns; name none".into();
            return Err(Error::Format { path: path.into(), problem });
        }
        _ if path.is_dir() => folders::read(path, held)?,
        "csv" => table(path, &lines::read(path, &content)?, b',', columns, held)?,
        "tsv" => table(path, &lines::read(path, &content)?, b'\t', columns, held)?,
        "jsonl" | "ndjson" => objects(path, &lines::read(path, &content)?, columns, held)?,
        _ => {
            let problem = "is not named .csv, .tsv or .jsonl (also .gz, .zst, .xz); rename it by its format".into();
            return Err(Error::Format { path: path.into(), problem });
        }
    };
    if documents.is_empty() {
        return Err(Error::Empty { path: path.into(), problem: "holds no text".into() });
    }
    documents.iter().try_for_each(Document::check)?;
    Ok(documents)
}

fn table(path: &Path, content: &str, delimiter: u8, columns: &Columns, held: &Held) -> Result<Vec<Document>> {
    let failed = |e: csv::Error| {
        let line = e.position().map_or(1, |at| line_start(content, at).1);
        let problem = match e.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("has {len} columns, the first line has {expected_len}")
            }
            _ => format!("cannot be read: {e}"),
        };
        Error::Line { path: path.into(), line, problem }
    };
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(content.as_bytes());
    if content.starts_with(['\n', '\r']) {
        return Err(lines::empty(path, 1));
    }
    let header = reader.headers().map_err(failed)?.clone();
    let column = |name: &str| {
        header.iter().position(|found| found == name).ok_or_else(|| Error::Line {
            path: path.into(),
            line: 1,
            problem: format!(
                "names no column `{name}` but {}; name the columns as in `text:PATH?text=COLUMN&label=COLUMN`",
                header.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
            ),
        })
    };
    let (text, label) = (column(&columns.text)?, column(&columns.label)?);
    let file: Arc<Path> = path.into();
    let (mut documents, mut record) = (Vec::new(), csv::StringRecord::new());
    loop {
        let another = reader.read_record(&mut record).map_err(failed)?;
        let (at, line) = record.position().map_or((0, 0), |at| line_start(content, at));
        if content[at..].starts_with(['\n', '\r']) {
            return Err(lines::empty(path, line));
        }
        if !another {
            return Ok(documents);
        }
        let document = Document { path: file.clone(), line, text: record[text].into(), label: record[label].into() };
        held.add(path, document.bytes())?;
        documents.push(document);
    }
}

/// The first byte, and the number, of the line that a record begins with, blank lines before it included: the reader stops
/// between a carriage return and its line feed.
fn line_start(content: &str, at: &csv::Position) -> (usize, usize) {
    let (byte, line) = (at.byte() as usize, at.line() as usize);
    let between = content[..byte].ends_with('\r') && content[byte..].starts_with('\n');
    if between { (byte + 1, line + 1) } else { (byte, line) }
}

fn objects(path: &Path, text: &str, columns: &Columns, held: &Held) -> Result<Vec<Document>> {
    let content = Held::new();
    let lines = lines::numbered(path, text).map(|line| {
        content.add(path, 2 * size_of::<(usize, &str)>() as u64)?;
        line
    });
    let lines = lines.collect::<Result<Vec<_>>>()?;
    let file: Arc<Path> = path.into();
    let document = |&(line, json): &(usize, &str)| {
        let failed = |problem: String| Error::Line { path: path.into(), line, problem };
        let tree = Passing::take(path, TREE * json.len() as u64)?;
        let object: Value = serde_json::from_str(json).map_err(|e| failed(format!("is not JSON: {e}")))?;
        let field = |name: &str| match object.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
            _ => Err(failed(format!(
                "has no text or number `{name}`; name the fields as in `text:PATH?text=FIELD&label=FIELD`"
            ))),
        };
        let document =
            Document { path: file.clone(), line, text: field(&columns.text)?, label: field(&columns.label)? };
        tree.keep(document.bytes(), held);
        Ok(document)
    };
    lines.par_iter().map(document).collect()
}
