//! The files of the retrieval task of "Long Range Arena".

use std::{
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::{MatchDataset, MatchSplit, dataset};
use crate::{
    budget::{Held, text_bytes},
    data::{Error, Result, lines},
    source,
};

/// Fields of a line: the label, the names of both documents, and these.
const FIELDS: usize = 5;

/// Bytes that are looked at of a label or a name.
const SHORT: usize = 64;

/// Reads the three parts in `folder`, of which that for watching may be missing, and keeps the first `bytes` bytes of every document, or less
/// where a character would be cut.
pub(super) fn load(folder: &Path, bytes: usize, held: &Held) -> Result<MatchDataset> {
    source::check_folder(folder)?;
    let part = |name: &str| find(folder, name)?.map(|path| read(&path, bytes, held)).transpose();
    let needed = |name: &str| part(name)?.ok_or_else(|| missing(folder, name));
    Ok(dataset("retrieval", needed("train")?, part("eval")?, needed("test")?))
}

fn missing(folder: &Path, part: &str) -> Error {
    Error::Missing {
        path: folder.join(file_name(part)),
        remedy: "the folder must hold new_aan_pairs.train.tsv and .test.tsv of Long Range Arena, and may hold .eval.tsv (also .gz, .zst, .xz)"
            .into(),
    }
}

fn file_name(part: &str) -> String {
    format!("new_aan_pairs.{part}.tsv")
}

/// The file of `part`, compressed or not.
fn find(folder: &Path, part: &str) -> Result<Option<PathBuf>> {
    let name = file_name(part);
    let mut found = source::entries(folder)?;
    found.retain(|path| lines::uncompressed(&lines::name_of(path)) == name);
    lines::the_only(folder, found)
}

/// The pairs of one file.
fn read(path: &Path, bytes: usize, held: &Held) -> Result<MatchSplit> {
    let failed = |source| Error::io(path, source);
    let mut reader = BufReader::new(source::open(path)?);
    let (mut split, mut fields) = (MatchSplit { texts: Default::default(), labels: Vec::new() }, Fields::new(bytes));
    for line in 1.. {
        if !fields.read_line(&mut reader).map_err(failed)? {
            break;
        }
        let fail = |problem: String| Error::Line { path: path.into(), line, problem };
        let (label, first, second) = fields.pair().map_err(fail)?;
        held.add(path, text_bytes(&first) + text_bytes(&second) + 2 * size_of::<u32>() as u64)?;
        split.texts[0].push(first);
        split.texts[1].push(second);
        split.labels.push(label);
    }
    if split.is_empty() {
        return Err(Error::Empty { path: path.into(), problem: "holds no pairs of documents; fetch it again".into() });
    }
    Ok(split)
}

/// The beginnings of the fields of one line, whatever its length.
struct Fields {
    kept: [Vec<u8>; FIELDS],
    /// Bytes that each had.
    lengths: [usize; FIELDS],
    /// Fields that there were.
    count: usize,
    bytes: usize,
}

impl Fields {
    fn new(bytes: usize) -> Self {
        Self { kept: Default::default(), lengths: [0; FIELDS], count: 0, bytes }
    }

    /// Reads a line; whether there was one.
    fn read_line(&mut self, reader: &mut impl BufRead) -> io::Result<bool> {
        self.kept.iter_mut().for_each(Vec::clear);
        (self.lengths, self.count) = ([0; FIELDS], 0);
        loop {
            let buffer = reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(self.count > 0);
            }
            let end = buffer.iter().position(|&byte| byte == b'\n');
            self.count = self.count.max(1);
            for (index, part) in buffer[..end.unwrap_or(buffer.len())].split(|&byte| byte == b'\t').enumerate() {
                self.count += usize::from(index > 0);
                self.extend(part);
            }
            let taken = end.map_or(buffer.len(), |end| end + 1);
            reader.consume(taken);
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    /// Appends to the latest field.
    fn extend(&mut self, part: &[u8]) {
        let field = self.count - 1;
        let Some(kept) = self.kept.get_mut(field) else { return };
        let most = if field < FIELDS - 2 { SHORT } else { self.bytes };
        kept.extend(&part[..part.len().min(most - kept.len())]);
        self.lengths[field] += part.len();
    }

    /// The label and both documents, or what is wrong with the line.
    fn pair(&mut self) -> std::result::Result<(u32, String, String), String> {
        let last = self.count.min(FIELDS) - 1;
        // The carriage return of a line that ends in two bytes.
        if self.kept[last].len() == self.lengths[last] && self.kept[last].last() == Some(&b'\r') {
            self.kept[last].pop();
        }
        match self.count {
            FIELDS => {}
            1 if self.kept[0].is_empty() => return Err("is empty; remove it".into()),
            count => {
                return Err(format!(
                    "has {count} columns, expected {FIELDS}, separated by tabs: a label, two names, two documents; mend or remove it"
                ));
            }
        }
        let label = match String::from_utf8_lossy(&self.kept[0]).trim() {
            "0" | "0.0" => 0,
            "1" | "1.0" => 1,
            other => return Err(format!("has the label `{other}`, expected 0 or 1; mend it, and give no header")),
        };
        Ok((label, self.document(3)?, self.document(4)?))
    }

    /// The document in a field.
    fn document(&self, field: usize) -> std::result::Result<String, String> {
        let kept = &self.kept[field];
        let text = match std::str::from_utf8(kept) {
            Ok(text) => text,
            // The cut may lie inside of a character.
            Err(e) if e.error_len().is_none() && self.lengths[field] > kept.len() => {
                std::str::from_utf8(&kept[..e.valid_up_to()]).unwrap_or_default()
            }
            Err(_) => return Err("is not UTF-8; convert the file, or remove the line".into()),
        };
        if text.trim().is_empty() {
            let number = if field == 3 { "first" } else { "second" };
            return Err(format!("has an empty {number} document; remove it"));
        }
        Ok(text.to_owned())
    }
}
