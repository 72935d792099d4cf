//! The result, on standard output.

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
    path::Path,
};

use crate::{Error, args::Global, error::Result};

/// Prints a result: the JSON document with `--json`, else the text.
///
/// # Errors
/// When standard output cannot be written to; a reader that has gone away (`| head`) is not an error.
pub fn result(global: &Global, json: &serde_json::Value, text: &str) -> Result<()> {
    if global.json { print(&format!("{json:#}")) } else { print(text) }
}

/// Prints a file as it is, whatever its size.
///
/// # Errors
/// Where it cannot be read; else as [`result`].
pub fn file(path: &Path) -> Result<()> {
    let mut file = File::open(path).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    let mut stdout = io::stdout().lock();
    match io::copy(&mut file, &mut stdout).and_then(|_| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::Stdout),
    }
}

/// A word as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./:,=".contains(c));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// Prints `text` and a line break.
///
/// # Errors
/// As [`result`].
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::Stdout),
    }
}
