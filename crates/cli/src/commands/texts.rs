//! Texts that a command takes: one a line, or one by one.

use std::path::{Path, PathBuf};

use clap::Args;
use resolvent_lab::{
    budget::{Held, text_bytes},
    source,
};

use crate::{Error, error::Result};

/// Where the texts come from.
#[derive(Debug, Args)]
pub struct Texts {
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "input")]
    text: Vec<String>,
    /// File of texts, one a line [default: standard input]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

const STANDARD_INPUT: &str = "standard input";

impl Texts {
    /// Whether any were named; else they come from standard input.
    pub fn is_given(&self) -> bool {
        !self.text.is_empty() || self.input.is_some()
    }

    /// The texts of the command line, of the file, or of standard input.
    pub fn read(&self) -> Result<Vec<String>> {
        match &self.input {
            _ if !self.text.is_empty() => filled(self.text.clone(), Path::new("--text"), "text"),
            Some(file) => read_lines(file),
            None => {
                let (name, held) = (Path::new(STANDARD_INPUT), Held::new());
                let bytes = source::read_all(name, std::io::stdin(), 0, &held)?;
                filled(lines(&bytes, name, &held)?, name, "line")
            }
        }
    }
}

/// `2 of 7 texts are mostly of tokens that the model's vocabulary does not have`; `None` for none of them.
pub fn unknown_note(unknown: usize, of: usize, what: &str) -> Option<String> {
    let why = "consist mostly of tokens that the model's vocabulary does not have: what it says of them means little";
    (unknown > 0).then(|| format!("{what} that {why}: {unknown} of {of}"))
}

/// The texts of a file, one a line.
pub fn read_lines(file: &Path) -> Result<Vec<String>> {
    let held = Held::new();
    let bytes = source::read(file, &held)?;
    filled(lines(&bytes, file, &held)?, file, "line")
}

/// `texts`, of which there must be some, and none empty; each is a `what`.
pub fn filled(texts: Vec<String>, name: &Path, what: &str) -> Result<Vec<String>> {
    if texts.is_empty() {
        return Err(Error::file(name, "holds no text; give one text a line"));
    }
    match texts.iter().position(|text| text.trim().is_empty()) {
        Some(empty) => Err(Error::file(name, format!("{what} {} is empty; leave it out", empty + 1))),
        None => Ok(texts),
    }
}

fn lines(bytes: &[u8], name: &Path, held: &Held) -> Result<Vec<String>> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count() + 1;
        Error::file(name, format!("line {line} is not UTF-8; convert the text"))
    })?;
    // As where training data are read.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let text = text.strip_suffix('\n').unwrap_or(text);
    let lines = (!text.is_empty()).then(|| text.split('\n')).into_iter().flatten();
    let line = |line: &str| {
        held.add(name, text_bytes(line))?;
        Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
    };
    lines.map(line).collect()
}
