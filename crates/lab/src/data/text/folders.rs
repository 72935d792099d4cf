//! Labelled texts as files: one folder per class.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::documents::Document;
use crate::{
    budget::Held,
    data::{Error, Result, lines},
    source,
};

/// The reviews without a label that lie beside the labelled ones of the Large Movie Review Dataset.
const UNLABELLED: &str = "unsup";

/// Every text of `path/CLASS/*.txt`, in the order of the names; what is hidden, lies beside the classes, or has no label
/// is left out.
pub(super) fn read(path: &Path, held: &Held) -> Result<Vec<Document>> {
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
        let text = lines::read(&path, held)?;
        let document = Document { path: path.into(), line: 1, text, label };
        held.add(&document.path, document.bytes() - document.text.len() as u64)?;
        Ok(document)
    };
    files.into_par_iter().map(document).collect()
}

/// What lies in a folder and is not hidden, by name.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut entries = source::entries(folder)?;
    entries.retain(|entry| !lines::name_of(entry).starts_with('.'));
    Ok(entries)
}
