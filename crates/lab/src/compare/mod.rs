//! Comparison: the same model, data, recipe and seeds for every mechanism.
//!
//! Each run has its folder and is resumed or read back like any other. All runs take the same number of steps: where
//! the recipe has a time budget, a few steps of every mechanism are timed first, and what the slowest can afford is what
//! all get. Speed and memory are measured at the end, in turns, on the trained models.

mod ranking;
mod results;
mod speed;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use burn::tensor::Device;
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Recipe, Result,
    candidate::Candidate,
    checkpoint::{Checkpoint, DataIdentity, to_json},
    data,
    device::is_cpu,
    disk::write_atomically,
    environment::Environment,
    folder::{COMPARISON, Claim, Contents, REPORT},
    memory::MemoryProbe,
    progress::{Event, Observer, Silent},
    recipe::fit::FIT,
    schedule::Plan,
    source::Document,
    train::{self, Outcome, Reporter, Resume, Task, TaskData, TrainOptions, TrainSummary, landmark_counts},
};

pub use ranking::Difference;
pub use results::{Comparison, Diverged, Entry, RunResult, Spread};
pub use speed::{Speed, measure};

/// The file in a comparison's folder that holds its [`Comparison`].
pub const RESULTS: &str = "results.json";

/// What is compared where nothing else is asked for: the baseline, the control, and InfSA.
pub const DEFAULT: [&str; 5] = ["softmax", "infsa", "infsa-resolvent", "linear-infsa", "uniform"];

/// The same of tokens on a grid, where every paper's has a setting that means something.
pub const ON_GRIDS: [&str; 9] =
    ["softmax", "infsa", "infsa-resolvent", "linear-infsa", "soft-pp", "fna", "ssa", "laplacian", "uniform"];

/// Writes the report of a comparison into its folder.
pub type ComparisonReporter = Arc<dyn Fn(&Path, &Comparison) -> Result<()> + Send + Sync>;

/// What to compare, and how to run it.
#[derive(Clone)]
pub struct CompareOptions {
    /// The comparison's folder. A comparison that is there is continued: finished runs are read back, an interrupted one
    /// is resumed.
    pub out_dir: PathBuf,
    /// What is compared, each name once.
    pub mechanisms: Vec<Candidate>,
    /// The seeds, each once.
    pub seeds: Vec<u64>,
    /// Where the models are trained, judged and timed. Default: the CPU.
    pub device: Device,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub observer: Arc<dyn Observer>,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the comparison, for the report.
    pub commands: Vec<String>,
    /// Who writes the reports of the runs. Default: nobody.
    pub run_report: Option<Reporter>,
    /// Who writes the report of the comparison into its folder, such as [`crate::report::write_comparison`]. Default: nobody.
    pub report: Option<ComparisonReporter>,
    /// Seconds of each slot of the speed measurement. Default 0.25.
    pub slot_seconds: f64,
}

impl CompareOptions {
    /// The mechanisms of [`DEFAULT`] with their defaults, seed 0, into `out_dir`, telling nobody.
    pub fn new(out_dir: impl Into<PathBuf>) -> Self {
        Self {
            out_dir: out_dir.into(),
            mechanisms: DEFAULT.iter().filter_map(|id| Mechanism::preset(id).ok()).map(Candidate::from).collect(),
            seeds: vec![0],
            device: Device::flex(),
            stop: Arc::default(),
            observer: Arc::new(Silent),
            memory: None,
            commands: Vec::new(),
            run_report: None,
            report: None,
            slot_seconds: 0.25,
        }
    }
}

/// What became of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub enum CompareOutcome {
    /// All runs are done; some may have diverged.
    Finished(Box<Comparison>),
    /// It was asked to stop, and can be continued.
    Interrupted {
        /// Runs done.
        runs: usize,
        /// Runs in all.
        of: usize,
    },
}

/// What all runs of a folder share.
#[derive(Debug, Serialize, Deserialize)]
struct Shared {
    recipe: Recipe,
    data: DataIdentity,
    plan: Plan,
}

/// Trains `recipe` on `data` with every mechanism and seed of `options`, and measures speed and memory. Mechanism and
/// seed of the recipe do not count.
///
/// The folder gets one folder per run under `runs/`, `results.json` and, with [`CompareOptions::report`], `report.html`.
///
/// # Errors
/// [`Error::Recipe`] for a repeated name or seed, none at all, or a name that no folder can have, [`Error::Mismatch`] when the folder holds another
/// comparison, and those of [`train::run`]; a model that is impossible with one of the mechanisms before any is trained.
pub fn run<D: TaskData>(recipe: &Recipe, data: &D, options: &CompareOptions) -> Result<CompareOutcome> {
    check(recipe, options)?;
    let (_claim, shared) = shared(recipe, data, options)?;
    let of = options.mechanisms.len() * options.seeds.len();
    let (mut number, mut trained) = (0, Vec::new());
    let mut done: Vec<Vec<(String, TrainSummary)>> = vec![Vec::new(); options.mechanisms.len()];
    let mut diverged = Vec::new();
    // Seed by seed, so that a first answer for all mechanisms comes early.
    for &seed in &options.seeds {
        for (Candidate { name, mechanism }, runs) in options.mechanisms.iter().zip(&mut done) {
            let folder = format!("runs/{name}-seed{seed}");
            number += 1;
            options.observer.on(Event::Note(&place(number, of, &trained)));
            let settings = TrainOptions {
                out_dir: options.out_dir.join(&folder),
                resume: Resume::IfPresent,
                from: None,
                plan: Some(shared.plan.clone()),
                device: options.device.clone(),
                name: Some(format!("{name}, seed {seed} ({number} of {of})")),
                stop: options.stop.clone(),
                observer: options.observer.clone(),
                report: options.run_report.clone(),
            };
            let recipe = Recipe { mechanism: mechanism.clone(), seed, ..recipe.clone() };
            let began = Instant::now();
            match train::run(&recipe, data, &settings) {
                Ok(Outcome::Finished(summary)) => runs.push((folder, *summary)),
                Ok(Outcome::Interrupted { .. }) => {
                    let runs = done.iter().map(Vec::len).sum::<usize>() + diverged.len();
                    return Ok(CompareOutcome::Interrupted { runs, of });
                }
                // That is a result too, and none of the other runs'.
                Err(error) if error.is_divergence() => {
                    let step = if let Error::Diverged { step, .. } = error { step } else { 1 };
                    options.observer.on(Event::End(&format!("diverged: {error}; the other runs go on")));
                    diverged.push(Diverged { name: name.clone(), mechanism: recipe.mechanism, seed, folder, step });
                }
                Err(e) => return Err(e),
            }
            // Less is a run that was there already and is read back: it says nothing of the others' time.
            trained.extend(Some(began.elapsed().as_secs_f64()).filter(|&seconds| seconds > 1.0));
        }
    }
    match diverged.first() {
        Some(first) if diverged.len() == of => {
            Err(Error::AllDiverged { path: options.out_dir.clone(), runs: of, first: first.to_string() })
        }
        _ => finish(shared, data, options, done, diverged),
    }
}

/// `run 3 of 15, about 12 min left`: with this run as many as are to come, at the mean of the seconds that runs have taken; none told
/// before one has been trained.
fn place(number: usize, of: usize, seconds: &[f64]) -> String {
    let left = seconds.iter().sum::<f64>() / seconds.len() as f64 * (of + 1 - number) as f64;
    let left = match left {
        _ if seconds.is_empty() => String::new(),
        left if left < 100.0 => format!(", about {left:.0} s left"),
        left => format!(", about {:.0} min left", left / 60.0),
    };
    format!("run {number} of {of}{left}")
}

fn finish<D: TaskData>(
    shared: Shared,
    data: &D,
    options: &CompareOptions,
    done: Vec<Vec<(String, TrainSummary)>>,
    diverged: Vec<Diverged>,
) -> Result<CompareOutcome> {
    let ended = options.mechanisms.iter().zip(done).filter(|(_, runs)| !runs.is_empty());
    let (candidates, done): (Vec<&Candidate>, Vec<_>) = ended.unzip();
    options.observer.on(Event::Note("measuring speed, all mechanisms in turn"));
    let first = |runs: &Vec<(String, TrainSummary)>| (options.out_dir.join(&runs[0].0), runs[0].1.recipe.clone());
    let (folders, recipes): (Vec<_>, Vec<_>) = done.iter().map(first).unzip();
    let trained = folders.iter().map(|folder| Checkpoint::find(folder)).collect::<Result<Vec<_>>>()?;
    let stop = || options.stop.load(Ordering::Relaxed);
    // The probe counts the program's own memory, in which a GPU's is not.
    let probe = options.memory.as_deref().filter(|_| is_cpu(&options.device));
    let speeds = measure(&recipes, trained, data, &options.device, probe, options.slot_seconds, &stop)?;
    let Some(speeds) = speeds else {
        let of = done.iter().map(Vec::len).sum::<usize>() + diverged.len();
        return Ok(CompareOutcome::Interrupted { runs: of, of });
    };
    let task = data.task(&shared.recipe)?;
    let (expects, name) = (task.expects(), &shared.data.name);
    let landmarks = recipes.iter().map(|recipe| landmark_counts(&expects, recipe, name)).collect::<Result<Vec<_>>>()?;
    let named = candidates.iter().zip(&done).zip(landmarks.into_iter().zip(speeds));
    let comparison = Comparison {
        recipe: shared.recipe,
        data: shared.data,
        plan: shared.plan,
        seeds: options.seeds.clone(),
        entries: named
            .map(|((candidate, runs), (landmarks, speed))| Entry::new(&candidate.name, runs, landmarks, speed))
            .collect(),
        diverged,
        environment: Environment::on(&options.device),
        commands: options.commands.clone(),
    };
    let folder = &options.out_dir;
    write_atomically(&folder.join(RESULTS), &to_json(&comparison)?)?;
    if let Some(report) = &options.report {
        report(folder, &comparison)?;
    }
    Ok(CompareOutcome::Finished(Box::new(comparison)))
}

/// The results of the comparison in `folder`.
///
/// # Errors
/// [`Error::Damaged`] where there are none yet, or none that can be read.
pub(crate) fn read_results(folder: &Path) -> Result<Comparison> {
    let file = folder.join(RESULTS);
    let text = match Document::read(&file) {
        Err(data::Error::Missing { .. }) => {
            let problem = "is not there: the comparison is not done; the command that began it continues it";
            return Err(Error::damaged(&file, problem));
        }
        text => text?,
    };
    serde_json::from_str(&text)
        .map_err(|e| Error::damaged(&file, format!("holds no results of this program ({e}); compare anew")))
}

fn check(recipe: &Recipe, options: &CompareOptions) -> Result<()> {
    recipe.validate()?;
    if recipe.fit.is_some() {
        let problem = "stands for the mechanism, which is what a comparison exchanges; leave it out".into();
        return Err(Error::Recipe { file: recipe.name.clone(), field: FIT.into(), problem });
    }
    let repeated =
        |names: Vec<String>| (1..names.len()).find(|&i| names[..i].contains(&names[i])).map(|i| names[i].clone());
    let mechanisms = options.mechanisms.iter().map(|candidate| candidate.name.clone()).collect::<Vec<_>>();
    let nameless = mechanisms.iter().find(|name| name.is_empty() || name.contains(['/', '\\', '\0'])).cloned();
    let seeds = options.seeds.iter().map(u64::to_string).collect::<Vec<_>>();
    for (field, names) in [("mechanisms", mechanisms), ("seeds", seeds)] {
        let problem = match (names.is_empty(), repeated(names)) {
            (true, _) => "is empty; name at least one".to_string(),
            (_, Some(twice)) => format!("names `{twice}` twice; name each once"),
            _ => match &nameless {
                Some(name) => format!("names `{name}`, which cannot be part of a folder's name"),
                None => continue,
            },
        };
        return Err(Error::Recipe { file: "comparison".into(), field: field.into(), problem });
    }
    options.seeds.iter().try_for_each(|&seed| Recipe { seed, ..recipe.clone() }.validate())
}

/// What the folder's runs share: read back, or decided now.
fn shared<D: TaskData>(recipe: &Recipe, data: &D, options: &CompareOptions) -> Result<(Claim, Shared)> {
    let common = |recipe: &Recipe| Recipe { mechanism: Mechanism::default(), seed: 0, ..recipe.clone() };
    // A folder of something else is refused before anything is timed.
    let claim = Claim::take(&options.out_dir, &[RESULTS, REPORT], Contents::Comparison)?;
    let file = options.out_dir.join(COMPARISON);
    let (identity, task) = (data.identity(), data.task(recipe)?);
    // An impossible model at the end of the list is told before the first is trained.
    for Candidate { mechanism, .. } in &options.mechanisms {
        train::check_model(&task, &Recipe { mechanism: mechanism.clone(), ..recipe.clone() })?;
    }
    if let Some(saved) = read_shared(&file)? {
        saved.data.check(&identity, &file)?;
        return match common(&saved.recipe).difference(&common(recipe)) {
            None => Ok((claim, saved)),
            Some((field, saved, now)) => Err(Error::Mismatch { path: file, field, saved, now }),
        };
    }
    let plan = plan(recipe, &task, &identity.name, options)?;
    let shared = Shared { recipe: recipe.clone(), data: identity, plan };
    write_atomically(&file, &to_json(&shared)?)?;
    Ok((claim, shared))
}

fn read_shared(file: &Path) -> Result<Option<Shared>> {
    match Document::read(file) {
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|e| Error::damaged(file, format!("is no comparison of this program ({e}); name another folder"))),
        Err(data::Error::Missing { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The steps of every run: what the slowest mechanism can afford.
fn plan<T: Task>(recipe: &Recipe, task: &T, name: &str, options: &CompareOptions) -> Result<Plan> {
    train::check_fit(recipe, task, name)?;
    let full = Plan::full(&recipe.schedule, task.train_len());
    let Some(max_minutes) = recipe.schedule.max_minutes else { return Ok(full) };
    options.observer.on(Event::Note("timing a few steps of every mechanism"));
    let mut slowest = 0.0_f64;
    for Candidate { mechanism, .. } in &options.mechanisms {
        let recipe = Recipe { mechanism: mechanism.clone(), ..recipe.clone() };
        match train::time_steps(&recipe, task, &options.device) {
            Ok(seconds) => slowest = slowest.max(seconds),
            // Its run will say so, and needs no time of the others.
            Err(error) if error.is_divergence() => {}
            Err(e) => return Err(e),
        }
    }
    let plan = full.shortened(Plan::affordable(max_minutes, slowest));
    if plan.steps < plan.full_steps {
        let note = format!(
            "{} of {} steps fit in {max_minutes} minutes of the slowest: all runs take as many",
            plan.steps, plan.full_steps
        );
        options.observer.on(Event::Note(&note));
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs that were read back are not among the seconds: the second run that is trained is told the time of the first.
    #[test]
    fn a_run_is_told_its_place_and_the_time_left() {
        assert_eq!(place(11, 15, &[]), "run 11 of 15");
        assert_eq!(place(12, 15, &[600.0]), "run 12 of 15, about 40 min left");
        assert_eq!(place(15, 15, &[10.0, 30.0]), "run 15 of 15, about 20 s left");
    }
}
