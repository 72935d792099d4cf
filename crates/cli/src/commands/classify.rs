//! `resolvent classify`: a trained model on texts of one's own.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use clap::Args;
use resolvent_lab::predict::{Classified, Classifier};
use serde_json::json;

use crate::{Error, args::Global, error::Result, output};

/// Classify texts with a trained model
///
/// One text a line, from --input or standard input, or given as --text. The answer is one line per text: the label, its
/// probability, and what else is likely.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Classify {
    /// Folder of a run on texts (its best checkpoint where it stopped early, else its newest) or of one checkpoint
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "input")]
    text: Vec<String>,
    /// File of texts, one a line [default: standard input]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  resolvent classify runs/imdb --text 'A film that I would see again.'
  resolvent classify runs/imdb --input reviews.txt --json
  echo 'Two hours of my life.' | resolvent classify runs/imdb";

/// Runs the command.
pub fn run(args: &Classify, global: &Global) -> Result<()> {
    let texts = texts(&args.text, args.input.as_deref())?;
    let answers = Classifier::load(&args.run)?.classify(&texts)?;
    let both = || texts.iter().zip(&answers);
    let json = both().map(|(text, answer)| {
        let Classified { label, probabilities, tokens, unknown, cut } = answer;
        json!({"text": text, "label": label, "probabilities": probabilities, "tokens": tokens, "unknown": unknown, "cut": cut})
    });
    let lines: Vec<String> = both().map(|(text, answer)| line(text, answer)).collect();
    output::result(global, &json.collect(), &lines.join("\n"))
}

/// The texts of the command line, of the file, or of standard input.
pub fn texts(given: &[String], input: Option<&Path>) -> Result<Vec<String>> {
    let name = input.unwrap_or(Path::new("standard input"));
    let texts = match input {
        _ if !given.is_empty() => given.to_vec(),
        Some(file) => {
            lines(&std::fs::read(file).map_err(|e| Error::file(file, format!("cannot be read: {e}")))?, name)?
        }
        None => {
            let mut bytes = Vec::new();
            std::io::stdin().read_to_end(&mut bytes).map_err(|e| Error::file(name, format!("cannot be read: {e}")))?;
            lines(&bytes, name)?
        }
    };
    if texts.is_empty() {
        return Err(Error::file(name, "holds no text; give one text a line"));
    }
    match texts.iter().position(|text| text.trim().is_empty()) {
        Some(empty) => Err(Error::file(name, format!("line {} is empty; give one text a line", empty + 1))),
        None => Ok(texts),
    }
}

fn lines(bytes: &[u8], name: &Path) -> Result<Vec<String>> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count() + 1;
        Error::file(name, format!("line {line} is not UTF-8; convert the text"))
    })?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    let lines = (!text.is_empty()).then(|| text.split('\n')).into_iter().flatten();
    Ok(lines.map(|line| line.strip_suffix('\r').unwrap_or(line).to_owned()).collect())
}

/// `positive  97.3 %   A film that I would …`, and what had to be left out.
fn line(text: &str, answer: &Classified) -> String {
    let percent = |class: &String| answer.probabilities.get(class).map_or(0.0, |p| p * 100.0);
    let mut beginning: String = text.chars().take(60).collect();
    if beginning.len() < text.len() {
        beginning.push('…');
    }
    let cut = if answer.cut { format!("   (the first {} tokens)", answer.tokens) } else { String::new() };
    format!("{}  {:.1} %   {beginning}{cut}", answer.label, percent(&answer.label))
}
