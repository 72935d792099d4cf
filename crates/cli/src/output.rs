//! The result, on standard output.

use std::io::{self, ErrorKind, Write};

use crate::{Error, args::Global, error::Result};

/// Prints a result: the JSON document with `--json`, else the text.
///
/// # Errors
/// When standard output cannot be written to; a reader that has gone away (`| head`) is not an error.
pub fn result(global: &Global, json: &serde_json::Value, text: &str) -> Result<()> {
    if global.json { print(&format!("{json:#}")) } else { print(text) }
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
