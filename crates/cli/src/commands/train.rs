//! `resolvent train`: one model.

use std::{path::PathBuf, sync::Arc};

use clap::Args;
use resolvent_lab::{
    Recipe,
    checkpoint::Checkpoint,
    data::Data,
    progress,
    report::write_run,
    train::{self, Outcome, Resume, TrainOptions},
};

use super::{
    devices::DeviceArg,
    recipe::{Attention, RecipeArgs, data, grid, load},
};
use crate::{Error, args::Global, destination::folder, error::Result, interrupt::Deferred, output};

/// Train one model, resumably
///
/// The folder --out gets recipe.toml, metrics.jsonl, checkpoints, and at the end summary.json and report.html.
/// Ctrl-C (or a request to terminate) ends the run at the next step with a checkpoint and exit code 130; --resume
/// continues it to the same bits as if nothing had happened. A second Ctrl-C ends the program at once.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Train {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Mechanism: an id such as infsa, with landmarks as many as suit the patches of a picture, or a file M.json [default: the
    /// recipe's]; or a fit.json of `analyze --fit`, which gives the heads of a model with softmax mechanisms of their own
    #[arg(long, value_name = "ID", help_heading = "Recipe", hide_possible_values = true)]
    attention: Option<Attention>,
    /// Folder of the run
    #[arg(long, value_name = "DIR", default_value = "runs/train")]
    out: PathBuf,
    /// Begin with the weights of another run or checkpoint, where the model has the same parameters; its recipe is used unless --config
    /// names one, with a new optimiser and schedule, other --data and another --attention as asked
    #[arg(long, value_name = "RUN", conflicts_with = "resume")]
    from: Option<PathBuf>,
    /// Continue the run in --out; its own recipe is used unless --config names one. More --epochs, --max-steps, --max-minutes or patience extend it
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent train                                  generated pictures, runs/train
  resolvent train --attention infsa --epochs 3 --out runs/infsa
  resolvent train --data imdb:DIR --out runs/imdb
  resolvent train --data corpus:books.txt --out runs/books      a language model
  resolvent train --data fashion-mnist:DIR --max-minutes 15 --out runs/fashion
  resolvent train --out runs/fashion --resume      after an interruption
  resolvent train --out runs/fashion --resume --epochs 40       longer
  resolvent train --config vit.toml --set optimiser.kind=lion --set optimiser.lr=1e-4
  resolvent train --from runs/fashion --data mnist:DIR --out runs/digits
  resolvent train --from runs/books-softmax --attention runs/fit/fit.json --out runs/fitted      goes on with what analyze --fit chose";

/// Runs the command.
pub fn run(args: &Train, global: &Global) -> Result<()> {
    let mut recipe = recipe(args, global)?;
    let device = args.device.choose(global)?;
    let data = load(&data(&recipe)?, global)?;
    if let Some(attention) = &args.attention {
        recipe.mechanism = attention.suited(recipe.mechanism, grid(&recipe.model, &data));
    }
    folder(&args.out)?;
    let deferred = Deferred::begin();
    let options = TrainOptions {
        resume: if args.resume { Resume::Always } else { Resume::Never },
        from: args.from.clone(),
        device,
        stop: deferred.stop(),
        observer: observer(global),
        report: Some(Arc::new(write_run)),
        ..TrainOptions::new(&args.out)
    };
    let outcome = match &data {
        Data::Pictures(pictures) => train::run(&recipe, &**pictures, &options),
        Data::Texts(texts) => train::run(&recipe, texts, &options),
        Data::Matches(matches) => train::run(&recipe, &**matches, &options),
        Data::Pairs(pairs) => train::run(&recipe, pairs, &options),
        Data::Corpus(corpus) => train::run(&recipe, corpus, &options),
        Data::Recall(recall) => train::run(&recipe, recall, &options),
    };
    match outcome.map_err(|e| unfinished(e, args))? {
        Outcome::Finished(summary) => {
            let json = serde_json::to_value(&summary).map_err(|e| Error::file(&args.out, e.to_string()))?;
            output::result(global, &json, &format!("{}: {}", args.out.display(), summary.line()))
        }
        Outcome::Interrupted { step, steps, out_dir } => {
            let folder = out_dir.display();
            let how = format!("{step} of {steps} steps are saved: resolvent train --out {folder} --resume");
            Err(Error::Interrupted(how))
        }
    }
}

/// A failure to write, with how to go on where there is a checkpoint: a run that begins anew needs no other command.
fn unfinished(error: resolvent_lab::Error, args: &Train) -> Error {
    match (&error, Checkpoint::newest(&args.out)) {
        (resolvent_lab::Error::Io { .. }, Ok(found)) => {
            Error::Unfinished { source: Box::new(error), step: found.state.step, folder: args.out.clone() }
        }
        _ => error.into(),
    }
}

fn recipe(args: &Train, global: &Global) -> Result<Recipe> {
    // The best may have been saved before the run was extended.
    let begun = if args.resume { Some(Checkpoint::newest(&args.out)?.state.recipe) } else { None };
    let trained = args.from.as_deref().map(Checkpoint::find).transpose()?.map(|trained| trained.state.recipe);
    let mut recipe = match (&args.recipe.config, begun.as_ref().or(trained.as_ref())) {
        (None, Some(own)) => own.clone(),
        _ => args.recipe.base()?,
    };
    if let Some(attention) = &args.attention {
        recipe = attention.replacement(&recipe, None)?.in_recipe(recipe);
    }
    let recipe = args.recipe.change(recipe, begun.as_ref(), global)?;
    recipe.without_effect().iter().for_each(|(field, why)| tracing::warn!("`{field}` {why}"));
    Ok(recipe)
}

/// Who is told of the progress of a run.
pub fn observer(global: &Global) -> Arc<dyn progress::Observer> {
    if global.quiet { Arc::new(progress::Silent) } else { progress::for_stderr(global.verbose > 0) }
}
