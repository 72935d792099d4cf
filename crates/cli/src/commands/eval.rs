//! `resolvent eval`: a trained model on test examples.

use std::{fmt::Write, path::PathBuf};

use clap::Args;
use resolvent_lab::{
    checkpoint::{Checkpoint, Expectation},
    columns::counted,
    data::{Data, DataSpec, cut_note},
    device::Device,
    eval,
    evaluation::Evaluation,
    exchange::{self, Answers, ModelAttention},
    train::{Lost, TaskData},
};
use serde_json::json;

use super::{
    devices::DeviceArg,
    recipe::{Attention, data, grid, load},
};
use crate::{Error, args::Global, elapsed::Elapsed, error::Result, output};

/// Evaluate a trained model on test examples
///
/// Model, mechanism, normalisation and vocabulary are those of the checkpoint; the data set must have the classes, and the
/// picture shape or kind of texts, that the model was trained on.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Eval {
    /// Folder of a run (its best checkpoint where it stopped early, else its newest) or of one checkpoint
    #[arg(long, value_name = "DIR", default_value = "runs/train")]
    checkpoint: PathBuf,
    /// Data set whose test part is used [default: the one trained on]
    #[arg(long, value_name = "KIND:PATH")]
    data: Option<DataSpec>,
    /// Show the model pictures of N x N pixels, whatever size it was trained on: the shorter side is resized, the centre cut
    /// out [default: the size it was trained on]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    image_size: Option<u16>,
    /// Show the model up to N tokens of each text (a language model N at once), however many it was trained on [default: as many
    /// as it was trained on]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), conflicts_with = "image_size")]
    max_tokens: Option<u32>,
    /// Evaluate a classifier of texts with its attention losing each token with these probabilities (the same tokens for all
    /// queries of a text)
    #[arg(long, value_name = "SHARE,SHARE", value_delimiter = ',', conflicts_with_all = ["image_size", "max_tokens"])]
    ablate: Vec<f64>,
    /// With --ablate: lose pairs of a query and a key, each by itself, in place of tokens. For softmax and fna
    #[arg(long, requires = "ablate", conflicts_with = "attention")]
    ablate_pairs: bool,
    /// Put another attention onto the trained weights, an id, a file M.json, or a fit.json of `resolvent analyze --fit`, and tell what it
    /// changes. An id that the checkpoint's recipe uses, or a relative of it, has the recipe's settings
    #[arg(long, value_name = "ID", conflicts_with_all = ["image_size", "max_tokens", "ablate"])]
    attention: Option<Attention>,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent eval                                   the run in runs/train
  resolvent eval --checkpoint runs/fashion --json
  resolvent eval --checkpoint runs/fashion/checkpoints/step-000000936
  resolvent eval --checkpoint runs/cifar --image-size 48    at another size than trained on
  resolvent eval --checkpoint runs/imdb --max-tokens 2048   at another length than trained on
  resolvent eval --checkpoint runs/imdb --ablate 0,0.25,0.5,0.75,1
  resolvent eval --checkpoint runs/soft --attention M.json  the same weights with another inverse, say
  resolvent eval --checkpoint runs/imdb-softmax --attention runs/fit/fit.json    heads with what was fitted to them
  resolvent eval --checkpoint runs/mnist --data idx:IMAGES,LABELS";

/// Runs the command.
pub fn run(args: &Eval, global: &Global) -> Result<()> {
    let spec = match &args.data {
        Some(spec) => spec.clone(),
        None => data(&Checkpoint::find(&args.checkpoint)?.state.recipe)?,
    };
    let device = &args.device.choose(global)?;
    let data = load(&spec, global)?;
    let _elapsed = Elapsed::tell("evaluating".into(), global);
    if !args.ablate.is_empty() {
        return ablate(args, &data, device, global);
    }
    if let Some(attention) = &args.attention {
        return exchange(args, attention, &data, device, global);
    }
    let (checkpoint, evaluation) = match data {
        Data::Pictures(pictures) => match args.image_size {
            Some(side) => eval::run_at(&args.checkpoint, &pictures, side.into(), device)?,
            None => evaluated(args, &*pictures, device)?,
        },
        _ if args.image_size.is_some() => {
            let problem = "holds texts, which have no --image-size; leave it out".into();
            return Err(resolvent_lab::Error::Unfit { name: spec.to_string(), problem }.into());
        }
        Data::Texts(texts) => evaluated(args, &texts, device)?,
        Data::Matches(matches) => evaluated(args, &*matches, device)?,
        Data::Pairs(pairs) => evaluated(args, &pairs, device)?,
        Data::Corpus(corpus) => evaluated(args, &corpus, device)?,
        Data::Recall(recall) => evaluated(args, &recall, device)?,
    };
    let attention = ModelAttention::of(&checkpoint.state.recipe);
    let json = json!({
        "checkpoint": checkpoint.path.display().to_string(),
        "step": checkpoint.state.step,
        "mechanism": attention,
        "data": spec.to_string(),
        "image_size": args.image_size,
        "max_tokens": args.max_tokens,
        "evaluation": evaluation,
    });
    let heading = format!("{}, {}, step {}", checkpoint.path.display(), attention.name(), checkpoint.state.step);
    output::result(global, &json, &format!("{heading}\n{}{}", table(&evaluation), cut(args, &checkpoint, &evaluation)))
}

/// At the length that the arguments name, else at that of training.
fn evaluated<D: TaskData>(args: &Eval, data: &D, device: &Device) -> Result<(Checkpoint, Evaluation)> {
    let evaluated = match args.max_tokens {
        Some(tokens) => eval::run_of_tokens(&args.checkpoint, data, tokens as usize, device),
        None => eval::run(&args.checkpoint, data, device),
    };
    Ok(evaluated?)
}

/// What the model did not read, as a line.
fn cut(args: &Eval, checkpoint: &Checkpoint, evaluation: &Evaluation) -> String {
    // A translator, and a model of pairs of documents, reads two texts of each example.
    let pairs = evaluation.bleu.is_some() || matches!(checkpoint.state.expects, Expectation::Matches(_));
    let texts = evaluation.examples * if pairs { 2 } else { 1 };
    let longest = args.max_tokens.map_or(checkpoint.state.recipe.text.max_tokens, |tokens| tokens as usize);
    let note = cut_note(evaluation.cut, texts, "test texts", longest);
    note.map_or_else(String::new, |note| note + "\n")
}

/// Accuracy against the share of tokens that the attention loses.
fn ablate(args: &Eval, data: &Data, device: &Device, global: &Global) -> Result<()> {
    let Data::Texts(texts) = data else {
        return Err(Error::file(&args.checkpoint, "--ablate is for classifiers of texts; leave it out"));
    };
    let seed = global.seed.unwrap_or(0);
    let lost = if args.ablate_pairs { Lost::Pairs } else { Lost::Tokens };
    let curve = eval::ablation(&args.checkpoint, texts, lost, &args.ablate, seed, device)?;
    let note = cut(args, &Checkpoint::find(&args.checkpoint)?, &curve[0].evaluation);
    let checkpoint = args.checkpoint.display().to_string();
    let json = json!({"checkpoint": checkpoint, "seed": seed, "lost": lost, "ablation": curve});
    let lines = curve
        .iter()
        .map(|ablated| format!("{:>5.1} % lost   {}\n", ablated.share * 100.0, scores(&ablated.evaluation)));
    output::result(global, &json, &(lines.collect::<String>() + &note))
}

/// The same weights with another attention.
fn exchange(args: &Eval, attention: &Attention, data: &Data, device: &Device, global: &Global) -> Result<()> {
    let recipe = Checkpoint::find(&args.checkpoint)?.state.recipe;
    let other = attention.replacement(&recipe, grid(&recipe.model, data))?;
    let (checkpoint, e) = exchange::run(&args.checkpoint, data, &other, device)?;
    let line = |name: &str, e: &Evaluation| {
        let predicted = e.prediction.as_ref().map_or(String::new(), |prediction| format!(", {}", prediction.line()));
        format!("{name:<16} {}{predicted}\n", scores(e))
    };
    let answers = e.answers.as_ref().map_or(String::new(), |answers| {
        let Answers { answers_changed, largest_logit, largest_difference } = answers;
        let of = e.own.examples;
        format!(
            "{answers_changed} of {of} answers differ; logits differ by at most {largest_difference:.1e} (largest {largest_logit:.1e})\n"
        )
    });
    let learned = match &e.learned[..] {
        [] => String::new(),
        names => format!("{}: as learned, whatever {} says\n", names.join(", "), e.exchanged.name()),
    };
    let text = format!(
        "{}, step {}\n{}{}{learned}{answers}{}",
        checkpoint.path.display(),
        checkpoint.state.step,
        line(e.trained.name(), &e.own),
        line(e.exchanged.name(), &e.other),
        cut(args, &checkpoint, &e.own),
    );
    let json =
        json!({"checkpoint": checkpoint.path.display().to_string(), "step": checkpoint.state.step, "exchange": e});
    output::result(global, &json, &text)
}

/// `accuracy 87.25 %, loss 0.4321`.
fn scores(e: &Evaluation) -> String {
    let accuracy = e.accuracy.map_or(String::new(), |share| format!("accuracy {:.2} %, ", share * 100.0));
    format!("{accuracy}loss {:.4}", e.loss)
}

/// Accuracy, loss and speed, then each class with the class it is most often taken for.
fn table(e: &Evaluation) -> String {
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    let mut text =
        format!("{}, {}, {:.0} examples/s\n", scores(e), counted(e.examples, "example"), e.examples_per_second);
    if let Some(prediction) = &e.prediction {
        let _ = writeln!(text, "{}, {} tokens, {} bytes", prediction.line(), prediction.tokens, prediction.bytes);
    }
    if let Some(bleu) = &e.bleu {
        let [one, two, three, four] = bleu.precisions;
        let _ = writeln!(
            text,
            "BLEU {:.2} ({one:.1}/{two:.1}/{three:.1}/{four:.1}, brevity penalty {:.3})",
            bleu.score, bleu.brevity_penalty
        );
    }
    if let Some(top5) = e.top5 {
        let _ = writeln!(text, "among the first five: {}", percent(top5));
    }
    let width = e.classes.iter().map(|class| class.chars().count()).max().unwrap_or(0);
    for (label, class) in e.classes.iter().enumerate() {
        let accuracy = e.per_class[label].map_or_else(|| "no examples".into(), percent);
        let _ = write!(text, "{class:width$}  {accuracy:>11}");
        let wrong = e.confusion[label].iter().enumerate().filter(|&(answer, &n)| answer != label && n > 0);
        if let Some((answer, n)) = wrong.max_by_key(|&(_, &n)| n) {
            let _ = write!(text, "   {n} taken for {}", e.classes[answer]);
        }
        text.push('\n');
    }
    text
}
