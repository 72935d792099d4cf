//! `resolvent bench --model`: whole models of pictures.

use std::{sync::Arc, time::Duration};

use resolvent_lab::{
    Recipe,
    bench::{self, ModelBenchOptions},
    candidate::Candidate,
    energy::EnergyMeter,
    environment::Load,
    progress::tell,
    recipe::ModelRecipe,
    report::write_model_bench,
};

use super::{
    bench::{Bench, claimed},
    compare::command_line,
    recipe::candidates,
};
use crate::{Error, args::Global, calibrate, error::Result, interrupt::Deferred, memory, output};

/// What a pass may take where nothing is said, in seconds.
const MAX_SECONDS: f64 = 60.0;
/// Sides of pictures where nothing is said.
const PIXELS: [usize; 3] = [224, 512, 1024];

/// Runs the command.
pub fn run(args: &Bench, model: &str, global: &Global) -> Result<()> {
    let load = Load::current();
    calibrate()?;
    let (_claim, [file, page]) = claimed(&args.out, bench::MODEL_RESULTS)?;
    let deferred = Deferred::begin();
    let options = ModelBenchOptions { load, ..options(args, model, global, &deferred)? };
    let report = bench::run_models(&options)?;
    if report.interrupted && report.points.is_empty() {
        return Err(Error::Interrupted("nothing was measured; run the command again".into()));
    }
    if report.has_measured() {
        (options.keep)(&report)?;
    } else if let Some(why) = report.points.iter().find_map(|point| point.skipped.as_ref()) {
        return Err(Error::file(&file, format!("nothing was measured: {why}")));
    }
    let json = serde_json::to_value(&report).map_err(|e| Error::file(&file, e.to_string()))?;
    output::result(global, &json, &format!("{}\n{}\nreport: {}", report.table(), report.headline(), page.display()))?;
    if report.interrupted {
        return Err(Error::Interrupted(format!("{} has the sizes that were measured before", file.display())));
    }
    Ok(())
}

/// Fields of a recipe that the benchmark chooses itself, and the option that says them where there is one.
const CHOSEN: [(&str, &str); 6] = [
    ("schedule.batch_size", "; give --batch"),
    ("schedule.accumulate", ""),
    ("augment", ""),
    ("regularisation.hold_out", ""),
    ("data", "; pictures are generated"),
    ("mechanism", "; give --mechanisms"),
];

/// The recipe of the model, with the fields that are set.
fn recipe(args: &Bench, model: &str) -> Result<Recipe> {
    for setting in &args.set {
        let within = |field: &str| setting.key() == field || setting.key().starts_with(&format!("{field}."));
        if let Some((field, instead)) = CHOSEN.iter().find(|(field, _)| within(field)) {
            let problem = format!("is not read by a benchmark{instead}");
            return Err(resolvent_lab::Error::Recipe { file: "--set".into(), field: (*field).into(), problem }.into());
        }
    }
    Ok(Recipe::named(model)?.with(&args.set)?)
}

fn options(args: &Bench, model: &str, global: &Global, deferred: &Deferred) -> Result<ModelBenchOptions> {
    let recipe = recipe(args, model)?;
    let pixels = if args.pixels.is_empty() { PIXELS.to_vec() } else { args.pixels.clone() };
    // Landmarks are windows of the grid; that of the smallest pictures decides how many.
    let grid = match (&recipe.model, pixels.iter().min()) {
        (ModelRecipe::Vit(vit), Some(&side)) => Some([side / vit.patch.max(1); 2]),
        _ => None,
    };
    let mut mechanisms = match args.mechanisms.is_empty() {
        true => vec![Candidate::from(recipe.mechanism.clone())],
        false => candidates(&args.mechanisms, Some(&recipe.mechanism), grid)?,
    };
    if let Some(seed) = global.seed {
        mechanisms.iter_mut().for_each(|candidate| candidate.mechanism = candidate.mechanism.clone().with_seed(seed));
    }
    let folder = args.out.clone();
    let quiet = global.quiet;
    Ok(ModelBenchOptions {
        recipe: Recipe { seed: global.seed.unwrap_or(recipe.seed), ..recipe },
        mechanisms,
        pixels,
        batch: args.batch,
        rounds: args.rounds,
        turn: Duration::from_millis(args.turn.into()),
        max_seconds: args.max_seconds.unwrap_or(MAX_SECONDS),
        meter: args.joules.then(EnergyMeter::find).transpose()?,
        load: None,
        stop: deferred.stop(),
        progress: Arc::new(move |line| {
            if !quiet {
                tell(line);
            }
        }),
        keep: Arc::new(move |report| {
            report.save(&folder)?;
            write_model_bench(&folder, report)
        }),
        memory: Some(Arc::new(memory::Probe)),
        commands: vec![command_line()],
    })
}
