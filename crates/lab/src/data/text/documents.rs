//! Labelled texts in CSV, TSV and JSON lines, or in one folder per class.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::prelude::*;
use serde_json::Value;

use super::{TextDataset, TextSplit, folders};
use crate::data::{Error, Result, lines};

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

/// The texts of `path`: a folder with `train.*` and `test.*`, each a file, or a folder with one folder per class (where
/// `test.*` is missing, or `path` is a file, the share `holdout` of every class is held out for testing). Classes are the labels of the training part, sorted.
///
/// # Errors
/// Any [`Error`]: files are read strictly, and the message names the line.
pub(super) fn load(name: &str, path: &Path, columns: &Columns, holdout: f64) -> Result<TextDataset> {
    let (train, test) = if path.is_dir() { parts(path)? } else { (path.to_path_buf(), None) };
    let documents = read(&train, columns)?;
    let mut classes: Vec<String> = documents.iter().map(|document| document.label.clone()).collect();
    classes.sort_by(|a, b| match (a.parse::<i64>(), b.parse::<i64>()) {
        (Ok(a), Ok(b)) => a.cmp(&b),
        _ => a.cmp(b),
    });
    classes.dedup();
    if classes.len() < 2 {
        let problem = format!("has {} class, at least two are needed", classes.len());
        return Err(Error::Empty { path: train, problem });
    }
    let learnt = split(documents, &classes)?;
    let (train, test) = match test {
        Some(test) => (learnt, split(read(&test, columns)?, &classes)?),
        None => learnt.hold_out(holdout, 0),
    };
    Ok(TextDataset { name: name.into(), classes, train, test, words: None })
}

/// The training and the test part in a folder.
fn parts(folder: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    let part = |name: &str| {
        let (file, classes) = (lines::find(folder, &[name], &FORMATS)?, folder.join(name));
        match file {
            Some(file) if classes.is_dir() => {
                let entry = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let problem = format!("and the folder `{name}` are both there; keep one of them");
                Err(Error::Entry { path: folder.into(), entry, problem })
            }
            file => Ok(file.or_else(|| classes.is_dir().then_some(classes))),
        }
    };
    let train = part("train")?.ok_or_else(|| Error::Missing {
        path: folder.join("train.jsonl"),
        remedy: "the folder must hold train.csv, .tsv or .jsonl (also .gz, .zst, .xz), or a folder `train` with one \
                 folder of .txt files per class; and it may hold the same for `test`"
            .into(),
    })?;
    Ok((train, part("test")?))
}

fn split(documents: Vec<Document>, classes: &[String]) -> Result<TextSplit> {
    let labelled = documents.into_iter().map(|Document { path, line, text, label }| {
        match classes.iter().position(|class| *class == label) {
            Some(class) => Ok((text, class as u32)),
            None => Err(Error::UnknownLabel { path: path.to_path_buf(), line, label, classes: classes.join(", ") }),
        }
    });
    let (texts, labels) = labelled.collect::<Result<(Vec<_>, Vec<_>)>>()?;
    Ok(TextSplit { texts, labels })
}

/// Every document of a file, or of a folder with one folder per class.
fn read(path: &Path, columns: &Columns) -> Result<Vec<Document>> {
    let format = lines::format_of(path);
    let documents = match format.as_str() {
        _ if path.is_dir() && *columns != Columns::default() => {
            let problem = "is a folder with one folder per class, which has no columns; name none".into();
            return Err(Error::Format { path: path.into(), problem });
        }
        _ if path.is_dir() => folders::read(path)?,
        "csv" => table(path, &lines::read(path)?, b',', columns)?,
        "tsv" => table(path, &lines::read(path)?, b'\t', columns)?,
        "jsonl" | "ndjson" => objects(path, &lines::read(path)?, columns)?,
        _ => {
            let problem = "is not named .csv, .tsv or .jsonl (also .gz, .zst, .xz); rename it by its format".into();
            return Err(Error::Format { path: path.into(), problem });
        }
    };
    match documents.iter().find(|document| document.text.trim().is_empty()) {
        _ if documents.is_empty() => Err(Error::Empty { path: path.into(), problem: "holds no text".into() }),
        Some(document) => Err(lines::empty(&document.path, document.line)),
        None => Ok(documents),
    }
}

fn table(path: &Path, text: &str, delimiter: u8, columns: &Columns) -> Result<Vec<Document>> {
    let failed = |e: csv::Error| {
        let line = e.position().map_or(1, |position| position.line() as usize);
        Error::Line { path: path.into(), line, problem: format!("cannot be read: {e}") }
    };
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(text.as_bytes());
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
    let documents = reader.records().map(|record| {
        let record = record.map_err(failed)?;
        let line = record.position().map_or(0, |position| position.line() as usize);
        Ok(Document { path: file.clone(), line, text: record[text].into(), label: record[label].into() })
    });
    documents.collect()
}

fn objects(path: &Path, text: &str, columns: &Columns) -> Result<Vec<Document>> {
    let lines = lines::numbered(path, text).collect::<Result<Vec<_>>>()?;
    let file: Arc<Path> = path.into();
    let document = |&(line, json): &(usize, &str)| {
        let failed = |problem: String| Error::Line { path: path.into(), line, problem };
        let object: Value = serde_json::from_str(json).map_err(|e| failed(format!("is not JSON: {e}")))?;
        let field = |name: &str| match object.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
            _ => Err(failed(format!(
                "has no text or number `{name}`; name the fields as in `text:PATH?text=FIELD&label=FIELD`"
            ))),
        };
        Ok(Document { path: file.clone(), line, text: field(&columns.text)?, label: field(&columns.label)? })
    };
    lines.par_iter().map(document).collect()
}
