//! `resolvent translate`: a trained translator on texts of one's own.

use std::path::PathBuf;

use clap::Args;
use resolvent_lab::{
    bleu::bleu,
    data::cut_note,
    predict::{TextTranslator, Translated},
    progress::tell,
};
use serde_json::json;

use super::{
    devices::DeviceArg,
    material::Trained,
    texts::{Texts, read_lines, unknown_note},
};
use crate::{Error, args::Global, error::Result, output};

/// Translate texts with a trained translator
///
/// One sentence a line, from --input or standard input, or given as --text; the translations come one a line, in their
/// order. With --reference they are also scored by BLEU (tokenisation 13a, exponential smoothing, as sacreBLEU's).
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Translate {
    #[command(flatten)]
    model: Trained,
    #[command(flatten)]
    texts: Texts,
    /// File of reference translations, one a line: adds the BLEU score
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Hypotheses that are followed at once; 1 takes the most probable token each time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    beams: u16,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent translate runs/multi30k --text 'Two dogs run across the grass.'
  resolvent translate runs/multi30k --input test.en --reference test.de --beams 4 > test.out";

/// Runs the command.
pub fn run(args: &Translate, global: &Global) -> Result<()> {
    let sentences = args.texts.read()?;
    let references = args.reference.as_deref().map(read_lines).transpose()?;
    if let (Some(references), Some(file)) = (&references, &args.reference)
        && references.len() != sentences.len()
    {
        let problem = format!(
            "has {} lines, but there are {} sentences; each needs its reference on the same line",
            references.len(),
            sentences.len()
        );
        return Err(Error::file(file, problem));
    }
    let translator = TextTranslator::load(args.model.path(), &args.device.choose(global)?)?;
    let found = translator.translate(&sentences, args.beams.into())?;
    let lines: Vec<String> = found.iter().map(|translated| translated.text.clone()).collect();
    let score = references.map(|references| bleu(&lines, &references, translator.lowercase()));
    let pairs = sentences.iter().zip(&found).map(|(source, translated)| {
        let Translated { text, unknown, mostly_unknown, cut, ended } = translated;
        json!({"source": source, "translation": text, "unknown": unknown, "mostly_unknown": mostly_unknown,
            "cut": cut, "ended": ended})
    });
    let json = json!({"translations": pairs.collect::<Vec<_>>(), "bleu": score});
    if !global.json && !global.quiet {
        notes(&found, translator.max_tokens()).iter().for_each(tell);
    }
    // What was asked for is told to those who want no notes, too.
    if let Some(score) = score.as_ref().filter(|_| !global.json) {
        tell(format_args!("BLEU {:.2} on {} sentences", score.score, lines.len()));
    }
    output::result(global, &json, &lines.join("\n"))
}

/// What of the sentences was not read, and what of the translations not written.
fn notes(found: &[Translated], most: usize) -> Vec<String> {
    let of = found.len();
    let cut = found.iter().filter(|translated| translated.cut).count();
    let endless = found.iter().filter(|translated| !translated.ended).count();
    let stopped = (endless > 0).then(|| format!("{endless} of {of} translations were stopped at {most} tokens"));
    let unknown = found.iter().filter(|translated| translated.mostly_unknown).count();
    let unknown = unknown_note(unknown, of, "sentences");
    cut_note(cut, of, "sentences", most).into_iter().chain(unknown).chain(stopped).collect()
}
