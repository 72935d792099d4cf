//! Text files as lines.

use std::path::{Path, PathBuf};

use super::{Error, Result};
use crate::{budget::Held, source};

/// What a name may end in beside its format: compression, which is told by content.
const COMPRESSED: [&str; 3] = ["gz", "zst", "xz"];

/// Names of what holds a validation part, without endings.
pub(crate) const VALIDATION: [&str; 4] = ["val", "valid", "validation", "dev"];

/// The content of `path`, decompressed, which must be UTF-8; a byte order mark is left out.
pub(crate) fn read(path: &Path, held: &Held) -> Result<String> {
    let bytes = source::unpack(path, held)?;
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = valid.iter().filter(|&&byte| byte == b'\n').count() + 1;
        let problem = "is not UTF-8; convert the file, or remove the line".to_string();
        Error::Line { path: path.into(), line, problem }
    })?;
    if text.starts_with('\u{feff}') {
        text.remove(0);
    }
    Ok(text)
}

/// The lines of `text` with their numbers, counted from 1. Only a line feed ends a line (other separators occur in texts),
/// and a carriage return before it is left out.
///
/// # Errors
/// Of each item: [`Error::Line`] for a line without text. A last line that is only ended is none.
pub(crate) fn numbered<'a>(path: &'a Path, text: &'a str) -> impl Iterator<Item = Result<(usize, &'a str)>> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let lines = (!text.is_empty()).then(|| text.split('\n')).into_iter().flatten();
    lines.enumerate().map(move |(index, line)| {
        let (number, line) = (index + 1, line.strip_suffix('\r').unwrap_or(line));
        if line.trim().is_empty() { Err(empty(path, number)) } else { Ok((number, line)) }
    })
}

/// The error of a line without text.
pub(crate) fn empty(path: &Path, line: usize) -> Error {
    Error::Line {
        path: path.into(),
        line,
        problem: "is empty; remove it (from both files, where two are parallel)".into(),
    }
}

/// The part of a file's name that says its format: `csv` of `train.csv.gz`.
pub(crate) fn format_of(path: &Path) -> String {
    let name = name_of(path).to_lowercase();
    uncompressed(&name).rsplit('.').next().unwrap_or_default().into()
}

/// A file's name without the ending of a compression: `train.csv` of `train.csv.gz`.
pub(crate) fn uncompressed(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((rest, ending)) if COMPRESSED.contains(&ending) => rest,
        _ => name,
    }
}

/// The one file in `folder` whose name without compression is `stem.FORMAT`, for one of `stems` and `formats`.
///
/// # Errors
/// [`Error::Entry`] when there are several.
pub(crate) fn find(folder: &Path, stems: &[&str], formats: &[&str]) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for path in source::entries(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let stem = name.split('.').next().unwrap_or_default();
        if stems.contains(&stem) && formats.contains(&format_of(&path).as_str()) {
            found.push(path);
        }
    }
    the_only(folder, found)
}

/// The one of the files that were `found` in `folder`, if there is any.
///
/// # Errors
/// [`Error::Entry`] when there are several.
pub(crate) fn the_only(folder: &Path, found: impl IntoIterator<Item = PathBuf>) -> Result<Option<PathBuf>> {
    let mut found = found.into_iter();
    let first = found.next();
    if let (Some(first), Some(second)) = (&first, found.next()) {
        let problem = format!("and `{}` are both there; keep one of them", name_of(&second));
        return Err(Error::Entry { path: folder.into(), entry: name_of(first), problem });
    }
    Ok(first)
}

/// A file's or folder's own name.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Result<Vec<&str>> {
        numbered(Path::new("f"), text).map(|line| Ok(line?.1)).collect()
    }

    #[test]
    fn only_line_feeds_end_lines() {
        assert_eq!(lines("a\u{2028}b\r\nc\u{85}\n").unwrap(), ["a\u{2028}b", "c\u{85}"]);
        assert_eq!(lines("").unwrap(), [""; 0]);
        assert!(lines("a\n \nb").unwrap_err().to_string().contains("line 2 is empty"));
        assert!(lines("a\n\n").is_err(), "a blank last line");
    }

    #[test]
    fn formats_are_told_behind_compression() {
        assert_eq!(
            ["a.csv", "b.x.JSONL.gz", "c.zst", "plain"].map(|name| format_of(Path::new(name))),
            ["csv", "jsonl", "c", "plain"]
        );
    }
}
