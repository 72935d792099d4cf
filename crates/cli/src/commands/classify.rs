//! `resolvent classify`: a trained model on texts or pictures of one's own.

use std::path::{Path, PathBuf};

use clap::Args;
use resolvent_lab::{
    checkpoint::{Checkpoint, Expectation},
    data::cut_note,
    predict::{Classified, ClassifiedPicture, Classifier, PictureClassifier},
    progress::tell,
};
use serde_json::json;

use super::{
    devices::DeviceArg,
    texts::{Texts, unknown_note},
};
use crate::{Error, args::Global, elapsed::Elapsed, error::Result, output};

/// Classify texts or pictures with a trained model
///
/// Of a model of texts: one text a line, from --input or standard input, or given as --text. Of a model of pictures: PNG, JPEG and WebP files, or
/// folders of them, each resized (shorter side) and cut (centre) to what the model sees. The answer is one line per text or picture:
/// the label, its probability, and what else is likely. With --json texts are one document, pictures an object a line, as they come.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Classify {
    /// Folder of a run (its best checkpoint where it stopped early, else its newest) or of one checkpoint; then, of a model of pictures,
    /// files and folders
    #[arg(value_name = "RUN [PICTURE|FOLDER]", required_unless_present = "checkpoint")]
    places: Vec<PathBuf>,
    /// The run by name, as other commands have it
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Of a picture, how many classes are told, the likeliest first [default: 5]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..))]
    top: Option<u16>,
    #[command(flatten)]
    texts: Texts,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent classify runs/imdb --text 'A film that I would see again.'
  resolvent classify runs/imdb --input reviews.txt --json
  echo 'Two hours of my life.' | resolvent classify runs/imdb
  resolvent classify runs/flowers photographs --top 3
  resolvent classify runs/flowers a.jpg b.png --json";

/// Runs the command.
pub fn run(args: &Classify, global: &Global) -> Result<()> {
    let (run, pictures) = match &args.checkpoint {
        Some(run) => (run, &args.places[..]),
        // One of the two is required.
        None => (&args.places[0], &args.places[1..]),
    };
    if run.is_file() {
        return Err(Error::file(
            run,
            "is a file, not the folder of a run; name the run first, then files and folders of pictures",
        ));
    }
    match (Checkpoint::find(run)?.state.expects, pictures) {
        (Expectation::Pictures(_), pictures) if pictures.is_empty() || args.texts.is_given() => Err(Error::file(
            run,
            "the model was trained on pictures, not on texts; name files or folders of them after it",
        )),
        (Expectation::Pictures(_), pictures) => classify_pictures(run, pictures, args, global),
        (Expectation::Texts(_), [picture, ..]) => Err(Error::file(
            picture,
            "is no place for texts: the model was trained on them; give --input FILE or --text",
        )),
        _ => classify_texts(run, args, global),
    }
}

fn classify_pictures(run: &Path, paths: &[PathBuf], args: &Classify, global: &Global) -> Result<()> {
    let files = PictureClassifier::files(paths)?;
    let elapsed = Elapsed::tell(format!("reading {}", run.display()), global);
    let classifier = PictureClassifier::load(run, &args.device.choose(global)?)?;
    drop(elapsed);
    classifier.classify(&files, args.top.unwrap_or(5).into(), |answer| {
        let json = serde_json::to_string(&answer).map_err(|e| Error::file(&answer.picture, e.to_string()))?;
        output::print(&if global.json { json } else { picture_line(&answer) })
    })
}

/// `rose  97.3 %   a.jpg   (tulip 2.1 %, lily 0.4 %)`.
fn picture_line(answer: &ClassifiedPicture) -> String {
    let told = |(class, p): &(String, f64)| format!("{class} {:.1} %", 100.0 * p);
    let others = answer.top.iter().skip(1).map(told).collect::<Vec<_>>().join(", ");
    let others = if others.is_empty() { others } else { format!("   ({others})") };
    let share = answer.top.first().map_or(0.0, |first| 100.0 * first.1);
    format!("{}  {share:.1} %   {}{others}", answer.label, answer.picture.display())
}

fn classify_texts(run: &Path, args: &Classify, global: &Global) -> Result<()> {
    if args.top.is_some() {
        let problem = "is of pictures; of a text the probabilities of all classes are in what --json prints";
        return Err(Error::Option { option: "--top", problem });
    }
    let texts = args.texts.read()?;
    let classifier = Classifier::load(run, &args.device.choose(global)?)?;
    let answers = classifier.classify(&texts)?;
    let cut = answers.iter().filter(|answer| answer.cut).count();
    let unknown = answers.iter().filter(|answer| answer.mostly_unknown).count();
    if !global.json && !global.quiet {
        let cut = cut_note(cut, texts.len(), "texts", classifier.max_tokens());
        let unknown = unknown_note(unknown, texts.len(), "texts");
        cut.into_iter().chain(unknown).for_each(tell);
    }
    let both = || texts.iter().zip(&answers);
    let json = both().map(|(text, answer)| {
        let Classified { label, probabilities, tokens, unknown, mostly_unknown, cut } = answer;
        json!({"text": text, "label": label, "probabilities": probabilities, "tokens": tokens, "unknown": unknown,
            "mostly_unknown": mostly_unknown, "cut": cut})
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
