//! `resolvent generate`: text continued by a trained language model.

use std::{
    io::{self, ErrorKind, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use clap::Args;
use resolvent::models::Sampling;
use resolvent_lab::{
    budget::Held,
    checkpoint::Checkpoint,
    columns::counted,
    generate::{Generated, Generator},
    predict::Weights,
    progress::tell,
    source,
};
use serde_json::json;

use super::{devices::DeviceArg, recipe::Attention};
use crate::{Error, args::Global, error::Result, output};

/// Continue text with a trained language model
///
/// The prompt is given as --prompt, or read from standard input to its end. What follows it goes to standard output as
/// it is written. The same --seed gives the same text.
///
/// A model reads no more tokens than its context: of a longer prompt the last are read, and how many were not is said.
/// When the context is full, its second half is read anew and the text goes on.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Generate {
    /// Folder of the run, as --checkpoint
    #[arg(value_name = "RUN", conflicts_with = "checkpoint")]
    run: Option<PathBuf>,
    /// Folder of a run on plain text (its best checkpoint where it stopped early, else its newest) or of one checkpoint
    #[arg(long, value_name = "DIR", default_value = "runs/train")]
    checkpoint: PathBuf,
    /// Put another attention onto the trained weights: an id, a file M.json, or a fit.json of `resolvent analyze --fit`. An id that the
    /// checkpoint's recipe uses, or a relative of it, has the recipe's settings
    #[arg(long, value_name = "ID", hide_possible_values = true)]
    attention: Option<Attention>,
    /// Text to continue [default: standard input]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to write
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    tokens: u32,
    /// Logits are divided by it: below 1 likelier tokens, above 1 less likely ones; 0 as --greedy
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Choose among the K likeliest tokens only
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that together first reach this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Take the likeliest token each time
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    greedy: bool,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent generate --checkpoint runs/reviews --prompt 'This film' --tokens 100
  resolvent generate --checkpoint runs/reviews --prompt 'I' --temperature 0.8 --top-k 50 --seed 3
  resolvent generate --checkpoint runs/reviews --prompt 'I' --attention routed
  resolvent generate --checkpoint runs/softmax --prompt 'I' --attention runs/fit/fit.json
  cat beginning.txt | resolvent generate --checkpoint runs/reviews --greedy --json";

/// Runs the command.
pub fn run(args: &Generate, global: &Global) -> Result<()> {
    let sampling = match args.greedy {
        true => Sampling::greedy(),
        false => Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p },
    };
    sampling.validate().map_err(resolvent_lab::Error::from)?;
    if sampling.temperature == 0.0 {
        let problem = "says nothing at a temperature of 0, which takes the likeliest token; leave it out";
        let option = if args.top_k.is_some() { Some("--top-k") } else { (args.top_p < 1.0).then_some("--top-p") };
        option.map_or(Ok(()), |option| Err(Error::Option { option, problem }))?;
    }
    let folder = args.run.as_ref().unwrap_or(&args.checkpoint);
    let replacement = |attention: &Attention| attention.replacement(&Checkpoint::find(folder)?.state.recipe, None);
    let other = args.attention.as_ref().map(replacement).transpose()?;
    let generator = Generator::load_with(folder, other.as_ref(), &args.device.choose(global)?)?;
    let prompt = prompt(args)?;
    let (seed, mut failed) = (global.seed.unwrap_or(0), None);
    let mut said = |text: &str| match show(text, global) {
        Ok(()) => ControlFlow::Continue(()),
        Err(e) => {
            failed = Some(e);
            ControlFlow::Break(())
        }
    };
    let generated = generator.generate(&prompt, args.tokens as usize, &sampling, seed, &mut said)?;
    match failed {
        // The reader has gone away, as `head` does.
        Some(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(()),
        Some(e) => return Err(Error::Stdout(e)),
        None => {}
    }
    let weights = generator.weights()?;
    let note = note(&generated, &weights, generator.context());
    let json = json!({
        "checkpoint": folder.display().to_string(),
        "seed": seed,
        "prompt": prompt,
        "attention": other,
        "generated": generated,
        "weights": weights,
    });
    // The text's line ends before the note begins.
    output::result(global, &json, "")?;
    if !global.quiet {
        tell(note);
    }
    Ok(())
}

/// Writes a piece of the text, unless a document is asked for.
fn show(text: &str, global: &Global) -> io::Result<()> {
    if global.json {
        return Ok(());
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn prompt(args: &Generate) -> Result<String> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    let name = Path::new("standard input");
    let bytes = source::read_all(name, io::stdin(), 0, &Held::new())?;
    String::from_utf8(bytes).map_err(|_| Error::file(name, "is not UTF-8; convert the text"))
}

fn note(generated: &Generated, weights: &Weights, context: usize) -> String {
    let Generated { tokens, prompt_tokens, dropped, slides, tokens_per_second, .. } = generated;
    let mut note = format!("{} after {prompt_tokens} of the prompt", counted(*tokens, "token"));
    if let Some(rate) = tokens_per_second {
        note += &format!(", {rate:.0} a second");
    }
    if *dropped > 0 {
        note += &format!("; the first {dropped} tokens of the prompt were not read, since the context is {context}");
    }
    if *slides > 0 {
        let times = if *slides == 1 { "once".to_owned() } else { format!("{slides} times") };
        note += &format!("; the context of {context} was full {times}, and its second half read anew");
    }
    let megabytes = |bytes: usize| bytes as f64 / 1e6;
    note += &format!("; weights: {:.2} MB as f32", megabytes(weights.real_bytes));
    if let Some(packed) = weights.packed {
        note += &format!(", {:.2} MB packed for {} ternary ones", megabytes(packed.bytes), packed.weights);
    }
    note
}
