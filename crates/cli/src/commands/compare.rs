//! `resolvent compare`: the same model, data, recipe and seeds for every mechanism.

use std::{path::PathBuf, sync::Arc};

use clap::Args;
use resolvent::attention::check_row_local;
use resolvent_kernels::{Mechanism, Shape};
use resolvent_lab::{
    candidate::Candidate,
    compare::{self, CompareOptions, CompareOutcome, Comparison, ON_GRIDS},
    data::Data,
    recipe::{ModelRecipe, with_landmarks_for, with_settings_of},
    report::{write_comparison, write_run},
};

use super::{
    devices::DeviceArg,
    recipe::{Attention, RecipeArgs, candidates, data, grid, load},
    train::observer,
};
use crate::{Error, args::Global, destination::folder, error::Result, interrupt::Deferred, memory, output};

/// Compare mechanisms: the same model, data, recipe and seeds for each
///
/// Every run takes the same number of steps: where the recipe has a time budget, what the slowest mechanism can afford.
/// Finished runs in --out are kept and an interrupted one is resumed, so that the same command continues a comparison.
/// Ends in a table, results.json and report.html; runs that diverge are told there, and the exit code is then 3. Without arguments: generated pictures, one seed, a few minutes.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Compare {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Mechanisms: ids, files M.json (called M), or `all`; an id that the recipe uses has the recipe's settings, and another with
    /// landmarks as many as suit the patches of a picture [default: the recipe's,
    /// softmax, infsa, infsa-resolvent, linear-infsa, uniform, and for pictures soft-pp, fna, ssa, laplacian; for language models
    /// the causal ones, and for translators those that can write token by token]
    #[arg(long, value_name = "ID,ID", value_delimiter = ',', help_heading = "Recipe", hide_possible_values = true)]
    mechanisms: Vec<Attention>,
    /// How many seeds, counted up from --seed, or a list such as 1,5,9 [default: 3; 1 without --data and --config]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Recipe")]
    seeds: Vec<u64>,
    /// Folder of the comparison
    #[arg(long, value_name = "DIR", default_value = "runs/compare")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArg,
}

const EXAMPLES: &str = "\
Examples:
  resolvent compare                                generated pictures
  resolvent compare --data fashion-mnist:DIR --out runs/fashion
  resolvent compare --data cifar10:DIR --mechanisms softmax,infsa --max-minutes 10
  resolvent compare --mechanisms uniform,M.json --seeds 1,5,9 --out runs/mine";

/// Runs the command.
pub fn run(args: &Compare, global: &Global) -> Result<()> {
    let recipe = args.recipe.change(args.recipe.base()?, None, global)?;
    let device = args.device.choose(global)?;
    let data = load(&data(&recipe)?, global)?;
    let deferred = Deferred::begin();
    let mut options = CompareOptions::new(&args.out);
    let grid = grid(&recipe.model, &data);
    let usual = usual(options.mechanisms, &recipe.model, &data, grid)?;
    options.mechanisms = chosen(args, usual, &recipe.mechanism, grid)?;
    options.seeds = seeds(args, recipe.seed, global)?;
    folder(&args.out)?;
    options.device = device;
    options.stop = deferred.stop();
    options.observer = observer(global);
    options.memory = Some(Arc::new(memory::Probe));
    options.commands = vec![command_line()];
    options.run_report = Some(Arc::new(write_run));
    options.report = Some(Arc::new(write_comparison));
    let outcome = match &data {
        Data::Pictures(pictures) => compare::run(&recipe, &**pictures, &options),
        Data::Texts(texts) => compare::run(&recipe, texts, &options),
        Data::Matches(matches) => compare::run(&recipe, &**matches, &options),
        Data::Pairs(pairs) => compare::run(&recipe, pairs, &options),
        Data::Corpus(corpus) => compare::run(&recipe, corpus, &options),
        Data::Recall(recall) => compare::run(&recipe, recall, &options),
    };
    match outcome? {
        CompareOutcome::Finished(comparison) => report(args, &comparison, global),
        CompareOutcome::Interrupted { runs, of } => {
            let how = format!("{runs} of {of} runs are done and the rest is saved; the same command continues");
            Err(Error::Interrupted(how))
        }
    }
}

/// Those of `mechanisms` that the model takes; on a `grid`, those of [`ON_GRIDS`].
fn usual(
    mut mechanisms: Vec<Candidate>,
    model: &ModelRecipe,
    data: &Data,
    grid: Option<[usize; 2]>,
) -> Result<Vec<Candidate>> {
    if let Some(grid) = grid {
        let preset =
            |id| Ok(with_landmarks_for(Mechanism::preset(id).map_err(resolvent_lab::Error::from)?, grid).into());
        return ON_GRIDS.into_iter().map(preset).collect();
    }
    match (model, data) {
        (ModelRecipe::Language(_), _) => {
            mechanisms.retain(|Candidate { mechanism, .. }| mechanism.check(&Shape::square(1, 1, 1, 1), true).is_ok());
        }
        // What the recipe does not name for a translator's decoder is the compared mechanism there too.
        (ModelRecipe::Text(m), Data::Pairs(_)) if m.decoder.is_none() || m.cross.is_none() => {
            mechanisms.retain(|Candidate { mechanism, .. }| check_row_local(mechanism).is_ok());
        }
        _ => {}
    }
    Ok(mechanisms)
}

/// The mechanisms that are asked for, else those of `usual` and, if it is none of them, first the recipe's own.
fn chosen(args: &Compare, usual: Vec<Candidate>, own: &Mechanism, grid: Option<[usize; 2]>) -> Result<Vec<Candidate>> {
    if !args.mechanisms.is_empty() {
        return candidates(&args.mechanisms, Some(own), grid);
    }
    let new = usual.iter().all(|candidate| candidate.mechanism.id() != own.id()).then(|| own.clone());
    let usual = usual.into_iter().map(|candidate| with_settings_of(Some(own), candidate.mechanism));
    Ok(new.into_iter().chain(usual).map(Candidate::from).collect())
}

/// Most seeds that a count may ask for: more is a seed that was meant, not a number of them.
const MOST_SEEDS: u64 = 1000;

fn seeds(args: &Compare, first: u64, global: &Global) -> Result<Vec<u64>> {
    let demonstration = args.recipe.data.is_none() && args.recipe.config.is_none();
    let count = match args.seeds[..] {
        [] if demonstration => 1,
        [] => 3,
        [count] => count,
        _ if global.seed.is_some() => {
            let problem = "says where seeds are counted from, and --seeds lists them; give one of the two";
            return Err(Error::Option { option: "--seed", problem });
        }
        _ => return Ok(args.seeds.clone()),
    };
    match first.checked_add(count) {
        Some(end) if count <= MOST_SEEDS => Ok((first..end).collect()),
        _ => {
            let problem = format!(
                "asks for {count} seeds from {first} on, which are too many; give at most {MOST_SEEDS}, or one seed as \
                 `--seed {count} --seeds 1`"
            );
            Err(resolvent_lab::Error::Recipe { file: "comparison".into(), field: "seeds".into(), problem }.into())
        }
    }
}

/// How the program was called, for the report.
pub fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|word| output::quoted(&word.to_string_lossy()));
    std::iter::once("resolvent".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn report(args: &Compare, comparison: &Comparison, global: &Global) -> Result<()> {
    let page = args.out.join("report.html");
    let json = serde_json::to_value(comparison).map_err(|e| Error::file(&page, e.to_string()))?;
    let caveats: String = comparison.caveats().iter().map(|caveat| format!("{caveat}\n")).collect();
    output::result(
        global,
        &json,
        &format!("{}\n{caveats}{}\nreport: {}", comparison.table(), comparison.headline(), page.display()),
    )?;
    let Some(first) = comparison.diverged.first() else { return Ok(()) };
    let runs = comparison.diverged.len();
    let of = runs + comparison.entries.iter().map(|entry| entry.runs.len()).sum::<usize>();
    Err(Error::Diverged { runs, of, first: first.to_string() })
}
