//! A run from its folder to its summary.

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use burn::module::Module;
use resolvent::models::Vit;

use super::{
    Ended, Outcome, Plan, Resume, TrainOptions, TrainSummary,
    clock::Clock,
    gammas,
    pictures::Pictures,
    seconds_per_step,
    session::{Identity, Session},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{
        Best, CHECKPOINTS, Checkpoint, DataIdentity, Expectation, Store, module_bytes, parts, to_json, write_atomically,
    },
    data::{Batch, Dataset, Split},
    eval::{self, Evaluation},
    folder::Claim,
    metrics::{self, EpochRecord, MetricsFile, Record},
    progress::Event,
    report,
};

/// The file in a run's folder that holds its [`TrainSummary`].
pub const SUMMARY: &str = "summary.json";
const RECIPE: &str = "recipe.toml";
/// What a run writes beside its checkpoints.
const FILES: [&str; 4] = [RECIPE, SUMMARY, MetricsFile::NAME, report::REPORT];

/// Trains the model of `recipe` on `dataset`, or continues the run that `options.out_dir` holds, and tests it.
///
/// The folder gets `recipe.toml`, `metrics.jsonl`, `checkpoints/`, and at the end `summary.json` and `report.html`. A
/// finished run is read back, not repeated.
///
/// # Errors
/// [`Error::Recipe`], [`Error::Unfit`] and [`Error::Model`] before anything is written; [`Error::Occupied`],
/// [`Error::NoCheckpoint`], [`Error::Mismatch`], [`Error::Damaged`] for a folder that cannot be used;
/// [`Error::Diverged`]; [`Error::Io`], which leaves every checkpoint as it was.
pub fn run(recipe: &Recipe, dataset: &Dataset, options: &TrainOptions) -> Result<Outcome> {
    recipe.validate()?;
    let data = DataIdentity::of(dataset);
    let store = Store::new(&options.out_dir, recipe.log.keep);
    let checkpoint = match store.newest()? {
        Some(newest) if options.resume != Resume::Never => Some(Checkpoint::load(&newest)?),
        None if options.resume == Resume::Always => {
            return Err(Error::NoCheckpoint { path: options.out_dir.clone() });
        }
        Some(newest) => {
            let state = Checkpoint::load(&newest)?.state;
            let state = format!("{} of {} steps", state.step, state.plan.steps);
            return Err(Error::Occupied { path: options.out_dir.clone(), state });
        }
        None => None,
    };
    if let Some(checkpoint) = &checkpoint {
        checkpoint.check(recipe, &data)?;
        if let Some(summary) = read_summary(&options.out_dir)? {
            options.observer.on(Event::Note("the run is finished: its results are read back"));
            return Ok(Outcome::Finished(Box::new(summary)));
        }
    }
    let pictures = Pictures::new(recipe, dataset)?;
    let claim = || Claim::take(&options.out_dir, &FILES, CHECKPOINTS);
    let (_claim, session) = match checkpoint {
        Some(checkpoint) => (claim()?, Session::resumed(recipe, dataset, checkpoint)?),
        None => {
            let plan = plan(recipe, dataset, &pictures, options)?;
            let expects = Expectation::new(dataset, &pictures.stats);
            let session = Session::new(recipe, dataset, Identity { data, expects }, plan)?;
            let claim = claim()?;
            remove_summary(&options.out_dir)?;
            store.forget_best()?;
            write_atomically(&options.out_dir.join(RECIPE), recipe.to_toml()?.as_bytes())?;
            (claim, session)
        }
    };
    store.clean()?;
    let metrics = MetricsFile::open(&options.out_dir, session.state.metrics_bytes)?;
    let before = session.state.seconds;
    let (began, pictures) = (Instant::now(), &pictures);
    Run { recipe, dataset, pictures, options, store, session, metrics, began, before, latest: None }.run()
}

/// The summary of the run in `folder`, if it is finished.
pub(crate) fn read_summary(folder: &Path) -> Result<Option<TrainSummary>> {
    let file = folder.join(SUMMARY);
    match fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|e| Error::damaged(&file, format!("is no summary of this program ({e}); delete it and resume"))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(&file, "cannot read the summary")(e)),
    }
}

/// A run that begins anew is not finished, whatever one whose checkpoints were deleted left in its folder.
fn remove_summary(folder: &Path) -> Result<()> {
    let file = folder.join(SUMMARY);
    match fs::remove_file(&file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&file, "cannot remove the summary")(e)),
        _ => Ok(()),
    }
}

/// The steps of a new run.
fn plan(recipe: &Recipe, dataset: &Dataset, pictures: &Pictures, options: &TrainOptions) -> Result<Plan> {
    if let Some(plan) = &options.plan {
        return Ok(plan.clone());
    }
    let full = Plan::full(&recipe.schedule, pictures.train.len());
    let Some(max_minutes) = recipe.schedule.max_minutes else { return Ok(full) };
    let affordable = Plan::affordable(max_minutes, seconds_per_step(recipe, dataset)?);
    let plan = full.shortened(affordable);
    if plan.steps < plan.full_steps {
        let note = format!(
            "{} of {} steps fit in {max_minutes} minutes: the schedule is shortened to them",
            plan.steps, plan.full_steps
        );
        options.observer.on(Event::Note(&note));
    }
    Ok(plan)
}

/// A run under way.
struct Run<'a> {
    recipe: &'a Recipe,
    dataset: &'a Dataset,
    pictures: &'a Pictures,
    options: &'a TrainOptions,
    store: Store,
    session: Session<'a>,
    metrics: MetricsFile,
    began: Instant,
    /// Seconds of earlier sessions.
    before: f64,
    /// The evaluation of the weights as they are.
    latest: Option<Evaluation>,
}

impl Run<'_> {
    fn run(mut self) -> Result<Outcome> {
        let name = format!("{}, seed {}", self.recipe.mechanism.id(), self.recipe.seed);
        let (done, plan) = (self.session.state.step, self.session.state.plan.clone());
        self.options.observer.on(Event::Begin { run: &name, done, plan: &plan });
        match self.train()? {
            Some(ended) => self.finish(ended),
            None => {
                self.save()?;
                let (step, steps) = (self.session.state.step, plan.steps);
                let folder = self.options.out_dir.display();
                let text =
                    format!("stopped after step {step} of {steps}; the checkpoint is in {folder}, resume to go on");
                self.options.observer.on(Event::End(&text));
                Ok(Outcome::Interrupted { step, steps, out_dir: self.options.out_dir.clone() })
            }
        }
    }

    /// Steps until the run ends, or (`None`) is asked to stop.
    fn train(&mut self) -> Result<Option<Ended>> {
        let plan = self.session.state.plan.clone();
        // A run that was cut off between its last checkpoint and its summary has nothing left to do.
        let done = self.session.state.step;
        if plan.ends_epoch(done) && self.is_exhausted(done / plan.steps_per_epoch) {
            return Ok(Some(Ended::Patience));
        }
        let loader = self.pictures.loader(self.recipe)?;
        while self.session.state.step < plan.steps {
            let (epoch, first) =
                (self.session.state.step / plan.steps_per_epoch, self.session.state.step % plan.steps_per_epoch);
            let mut clock = Clock::start();
            for batch in loader.epoch(epoch as u64, first) {
                self.step(batch, &mut clock)?;
                let done = self.session.state.step;
                let late = self.is_late();
                if (plan.ends_epoch(done) || late) && self.end_epoch(&mut clock)? {
                    return Ok(Some(Ended::Patience));
                }
                if done == plan.steps {
                    break;
                }
                if late {
                    return Ok(Some(Ended::OutOfTime));
                }
                if self.options.stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(Ended::Complete))
    }

    fn step(&mut self, batch: Batch, clock: &mut Clock) -> Result<()> {
        let step = self.session.step(batch, clock)?;
        let done = self.session.state.step;
        let log = &self.recipe.log;
        if done.is_multiple_of(log.every) {
            self.metrics.append(&Record::Step(self.session.metrics(&step)))?;
        }
        if log.checkpoint_every > 0
            && done.is_multiple_of(log.checkpoint_every)
            && !self.session.state.plan.ends_epoch(done)
        {
            self.save()?;
        }
        self.options.observer.on(Event::Step { done, loss: step.loss, images_per_second: step.images_per_second });
        clock.lap(&mut self.session.time.writing);
        Ok(())
    }

    /// Evaluates, logs and saves. Whether the run should stop for want of progress.
    fn end_epoch(&mut self, clock: &mut Clock) -> Result<bool> {
        let train_loss = self.session.end_epoch();
        let evaluation = self.evaluate(&self.session.evaluated(), &self.pictures.watched)?;
        clock.lap(&mut self.session.time.evaluation);
        // The last step of an epoch is judged by what it leads to.
        if !evaluation.loss.is_finite() {
            return Err(Error::Diverged { step: self.session.state.step, loss: evaluation.loss as f32 });
        }
        let record = EpochRecord {
            epoch: self.session.state.step.div_ceil(self.session.state.plan.steps_per_epoch),
            step: self.session.state.step,
            train_loss,
            split: self.pictures.watched_name.into(),
            loss: evaluation.loss,
            accuracy: evaluation.accuracy,
            gamma: gammas(&self.session.model),
            seconds: self.seconds(),
        };
        self.metrics.append(&Record::Epoch(record.clone()))?;
        let stop = self.compare_with_best(&record)?;
        self.latest = Some(evaluation);
        self.save()?;
        self.options.observer.on(Event::Epoch(&record));
        clock.lap(&mut self.session.time.writing);
        Ok(stop)
    }

    /// Keeps the best weights on the held-out pictures; true when there were none for too long.
    fn compare_with_best(&mut self, record: &EpochRecord) -> Result<bool> {
        if self.recipe.regularisation.hold_out == 0.0 {
            return Ok(false);
        }
        let EpochRecord { epoch, step, accuracy, .. } = *record;
        if self.session.state.best.as_ref().is_none_or(|best| accuracy > best.accuracy) {
            self.session.state.best = Some(Best { epoch, step, accuracy });
            let weights = [(parts::MODEL, module_bytes(self.session.evaluated())?)];
            self.store.save_best(&self.session.state, &weights)?;
        }
        Ok(self.is_exhausted(epoch))
    }

    /// Whether there was no better epoch for as long as the recipe waits.
    fn is_exhausted(&self, epoch: usize) -> bool {
        let best = self.session.state.best.as_ref().map_or(epoch, |best| best.epoch);
        self.recipe.regularisation.patience.is_some_and(|patience| epoch - best >= patience)
    }

    fn save(&mut self) -> Result<()> {
        self.session.state.metrics_bytes = self.metrics.sync()?;
        self.session.state.seconds = self.seconds();
        self.store.save(&self.session.state, &self.session.parts()?)
    }

    fn finish(self, ended: Ended) -> Result<Outcome> {
        let test = match &self.latest {
            Some(latest) if self.recipe.regularisation.hold_out == 0.0 => latest.clone(),
            _ => self.evaluate(&self.chosen()?, &Arc::new(self.dataset.test.clone()))?,
        };
        let (seconds, session) = (self.seconds(), self.session);
        let summary = TrainSummary {
            parameters: session.model.num_params(),
            steps: session.state.step,
            ended,
            seconds,
            images_per_second: self.recipe.schedule.batch_size as f64 / session.time.seconds_per_step(),
            gamma: gammas(&session.model),
            recipe: session.state.recipe,
            data: session.state.data,
            plan: session.state.plan,
            best: session.state.best,
            time: session.time,
            test,
        };
        let folder = &self.options.out_dir;
        report::write_run(folder, &summary, &metrics::read(folder)?)?;
        // Last: the summary is what says that the run is finished.
        write_atomically(&folder.join(SUMMARY), &to_json(&summary)?)?;
        self.options.observer.on(Event::Note(&summary.time.line()));
        self.options.observer.on(Event::End(&summary.line()));
        Ok(Outcome::Finished(Box::new(summary)))
    }

    /// The weights that are tested.
    fn chosen(&self) -> Result<Vit> {
        match &self.session.state.best {
            Some(best) if self.recipe.regularisation.patience.is_some() => {
                Checkpoint::load(&self.store.best_path(best.step))?.load_weights(self.session.model.valid())
            }
            _ => Ok(self.session.evaluated()),
        }
    }

    fn evaluate(&self, model: &Vit, split: &Arc<Split>) -> Result<Evaluation> {
        eval::evaluate(model, split, &self.pictures.stats, &self.dataset.classes)
    }

    fn seconds(&self) -> f64 {
        self.before + self.began.elapsed().as_secs_f64()
    }

    fn is_late(&self) -> bool {
        self.recipe.schedule.max_minutes.is_some_and(|minutes| self.seconds() > minutes * 60.0)
    }
}
