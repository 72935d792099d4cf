//! Labelled texts as files: one folder per class.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::documents::Document;
use crate::data::{Error, Result, lines};

/// The reviews without a label that lie beside the labelled ones of the Large Movie Review Dataset.
const UNLABELLED: &str = "unsup";

/// Every text of `path/CLASS/*.txt`, in the order of the names; what is hidden, lies beside the classes, or has no label
/// is left out.
pub(super) fn read(path: &Path) -> Result<Vec<Document>> {
    let mut files = Vec::new();
    for class in entries(path)?.into_iter().filter(|entry| entry.is_dir()) {
        let label = lines::name_of(&class);
        if label == UNLABELLED {
            continue;
        }
        for file in entries(&class)? {
            if lines::format_of(&file) != "txt" {
                let problem = "is no text (.txt, also .gz, .zst, .xz); take it out of the folder of a class".into();
                return Err(Error::Entry { path: class, entry: lines::name_of(&file), problem });
            }
            files.push((file, label.clone()));
        }
    }
    let document = |(path, label): (PathBuf, String)| {
        let text = lines::read(&path)?;
        Ok(Document { path: path.into(), line: 1, text, label })
    };
    files.into_par_iter().map(document).collect()
}

/// What lies in a folder and is not hidden, by name.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io(folder, e);
    let entries = fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path()));
    let mut entries = entries.collect::<Result<Vec<_>>>()?;
    entries.retain(|entry| !lines::name_of(entry).starts_with('.'));
    entries.sort();
    Ok(entries)
}
