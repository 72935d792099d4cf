//! `resolvent classify`: a trained model on texts of one's own.

use clap::Args;
use resolvent_lab::predict::{Classified, Classifier};
use serde_json::json;

use super::{
    devices::DeviceArg,
    material::Trained,
    texts::{Texts, cut_note},
};
use crate::{args::Global, error::Result, output};

/// Classify texts with a trained model
///
/// One text a line, from --input or standard input, or given as --text. The answer is one line per text: the label, its
/// probability, and what else is likely.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Classify {
    #[command(flatten)]
    model: Trained,
    #[command(flatten)]
    texts: Texts,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent classify runs/imdb --text 'A film that I would see again.'
  resolvent classify runs/imdb --input reviews.txt --json
  echo 'Two hours of my life.' | resolvent classify runs/imdb";

/// Runs the command.
pub fn run(args: &Classify, global: &Global) -> Result<()> {
    let texts = args.texts.read()?;
    let classifier = Classifier::load(args.model.path(), &args.device.choose(global)?)?;
    let answers = classifier.classify(&texts)?;
    let cut = answers.iter().filter(|answer| answer.cut).count();
    if let Some(note) = cut_note(cut, texts.len(), "texts", classifier.max_tokens())
        && !global.json
        && !global.quiet
    {
        eprintln!("{note}");
    }
    let both = || texts.iter().zip(&answers);
    let json = both().map(|(text, answer)| {
        let Classified { label, probabilities, tokens, unknown, cut } = answer;
        json!({"text": text, "label": label, "probabilities": probabilities, "tokens": tokens, "unknown": unknown, "cut": cut})
    });
    let lines: Vec<String> = both().map(|(text, answer)| line(text, answer)).collect();
    output::result(global, &json.collect(), &lines.join("\n"))
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
