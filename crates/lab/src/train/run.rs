//! A run from its folder to its summary.

use std::{
    path::Path,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use burn::module::Module;

use super::{
    Ended, Outcome, Part, Resume, Standing, Task, TaskData, TrainOptions, TrainSummary,
    begin::{check_fit, check_precision, check_vocabulary, extension, open, settled},
    model::learned_parameters,
    session::{Session, Step, diverged},
    task::learned_scalars,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Best, Checkpoint, Store, to_json},
    clock::Clock,
    data, device,
    disk::write_atomically,
    evaluation::{Evaluation, Metric},
    folder::REPORT,
    metrics::{self, EpochRecord, MetricsFile, Record, Watched},
    progress::Event,
    source::Document,
    stop,
};

/// The file in a run's folder that holds its [`TrainSummary`].
pub const SUMMARY: &str = "summary.json";
pub(super) const RECIPE: &str = "recipe.toml";
/// What a run writes beside its checkpoints.
pub(super) const FILES: [&str; 4] = [RECIPE, SUMMARY, MetricsFile::NAME, REPORT];

/// Least time between two reports of a run under way.
const REPORT_PAUSE: Duration = Duration::from_secs(1);

/// Trains the model of `recipe` on `data`, or continues the run that `options.out_dir` holds, and tests it.
///
/// The folder gets `recipe.toml`, `metrics.jsonl`, `checkpoints/`, and at the end `summary.json`; with [`TrainOptions::report`], from the
/// first epoch on, `report.html`. A finished run is read back, not repeated; where the recipe has more epochs, steps, minutes or patience than a
/// run that is continued, the run is extended to them, with the learning rates of the longer schedule from there on.
///
/// # Errors
/// [`Error::Recipe`], [`Error::Unfit`] and [`Error::Model`] before anything is written; [`Error::Occupied`],
/// [`Error::NoCheckpoint`], [`Error::Mismatch`], [`Error::Damaged`] for a folder that cannot be used, [`Error::Shape`] for weights that a
/// model cannot begin with;
/// [`Error::Diverged`]; [`Error::Io`], which leaves every checkpoint as it was.
pub fn run<D: TaskData>(recipe: &Recipe, data: &D, options: &TrainOptions) -> Result<Outcome> {
    recipe.validate()?;
    let identity = data.identity();
    let store = Store::new(&options.out_dir, recipe.log.keep);
    let mut checkpoint = match store.newest()? {
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
    let recipe = &settled(recipe, data, checkpoint.as_ref(), options);
    let extended = checkpoint.as_ref().is_some_and(|begun| recipe.is_longer(&begun.state.recipe));
    match &checkpoint {
        Some(checkpoint) if extended => checkpoint.state.data.check(&identity, &checkpoint.path)?,
        Some(checkpoint) => {
            checkpoint.check(recipe, &identity)?;
            if let Some(summary) = read_summary(&options.out_dir)? {
                options.observer.on(Event::Note("the run is finished: its results are read back"));
                return Ok(Outcome::Finished(Box::new(summary)));
            }
        }
        None => {}
    }
    let mut trained = match (&checkpoint, &options.from) {
        (None, Some(from)) => Some(Checkpoint::find(from)?),
        _ => None,
    };
    trained.iter().try_for_each(|trained| check_vocabulary(recipe, trained))?;
    let task = &match (&mut checkpoint, &mut trained) {
        (Some(checkpoint), _) => data.restored(checkpoint)?,
        (None, Some(trained)) => data.fine_tuned(recipe, trained)?,
        (None, None) => data.task(recipe)?,
    };
    check_precision(recipe, &options.device)?;
    check_fit(recipe, task, &identity.name)?;
    task.notes().iter().for_each(|note| options.observer.on(Event::Note(note)));
    if let Some(begun) = checkpoint.as_mut().filter(|_| extended) {
        let shorter = std::mem::replace(&mut begun.state.recipe, recipe.clone());
        begun.state.plan = extension(&shorter, task, &begun.state, options)?;
    }
    let (_claim, session) = open(recipe, task, identity, checkpoint, trained, options)?;
    store.clean()?;
    let metrics = MetricsFile::open(&options.out_dir, session.state.metrics_bytes)?;
    let before = session.state.seconds;
    let began = Instant::now();
    let (latest, reported, last) = (None, None, String::new());
    Run { recipe, task, options, store, session, metrics, began, before, latest, reported, last }.run()
}

/// The summary of the run in `folder`, if it is finished.
pub(crate) fn read_summary(folder: &Path) -> Result<Option<TrainSummary>> {
    let file = folder.join(SUMMARY);
    match Document::read(&file) {
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|e| Error::damaged(&file, format!("is no summary of this program ({e}); delete it and resume"))),
        Err(data::Error::Missing { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Has the report written, if anybody does.
fn show(options: &TrainOptions, standing: Standing<'_>) -> Result<()> {
    let folder = &options.out_dir;
    options.report.as_ref().map_or(Ok(()), |report| report(folder, standing, &metrics::read(folder)?))
}

/// The batches of one step; none at the end of the epoch, where fewer are left over.
fn next_step<B>(
    batches: &mut impl Iterator<Item = data::Result<B>>,
    accumulate: usize,
) -> Option<data::Result<Vec<B>>> {
    let step: data::Result<Vec<B>> = batches.take(accumulate).collect();
    step.map(|step| (step.len() == accumulate).then_some(step)).transpose()
}

/// A run under way.
struct Run<'a, T: Task> {
    recipe: &'a Recipe,
    task: &'a T,
    options: &'a TrainOptions,
    store: Store,
    session: Session<'a, T>,
    metrics: MetricsFile,
    began: Instant,
    /// Seconds of earlier sessions.
    before: f64,
    /// The evaluation of the weights as they are.
    latest: Option<Evaluation>,
    /// When the report was last written.
    reported: Option<Instant>,
    /// The last step of this session in words.
    last: String,
}

impl<T: Task> Run<'_, T> {
    fn run(mut self) -> Result<Outcome> {
        let own = || format!("{}, seed {}", self.recipe.attention_name(), self.recipe.seed);
        let name = self.options.name.clone().unwrap_or_else(own);
        let (done, plan) = (self.session.state.step, self.session.state.plan.clone());
        self.options.observer.on(Event::Begin { run: &name, done, plan: &plan });
        self.detail(&self.outline());
        let ended = match self.train() {
            Err(Error::Stopped) => None,
            ended => ended?,
        };
        match ended {
            Some(ended) => self.finish(ended),
            None => {
                self.save()?;
                self.report()?;
                Ok(self.interrupted())
            }
        }
    }

    /// Where a run stands that is saved and ends before its end.
    fn interrupted(&self) -> Outcome {
        let (step, steps) = (self.session.state.step, self.session.state.plan.steps);
        let folder = self.options.out_dir.display();
        let text = format!("stopped after step {step} of {steps}; the checkpoint is in {folder}, resume to go on");
        self.options.observer.on(Event::End(&text));
        Outcome::Interrupted { step, steps, out_dir: self.options.out_dir.clone() }
    }

    /// Steps until the run ends, or (`None`) is asked to stop.
    fn train(&mut self) -> Result<Option<Ended>> {
        let plan = self.session.state.plan.clone();
        // A run that was cut off between its last checkpoint and its summary has nothing left to do.
        let done = self.session.state.step;
        let exhausted = match self.session.state.is_unjudged() {
            true => self.end_epoch(&mut Clock::start())?,
            false => plan.ends_epoch(done) && self.session.state.is_exhausted(),
        };
        if exhausted {
            return Ok(Some(Ended::Patience));
        }
        while self.session.state.step < plan.steps {
            let (epoch, first) =
                (self.session.state.step / plan.steps_per_epoch, self.session.state.step % plan.steps_per_epoch);
            let mut clock = Clock::start();
            let accumulate = self.recipe.schedule.accumulate;
            let mut batches = self.task.epoch(self.recipe, epoch as u64, first * accumulate)?;
            while let Some(step) = next_step(&mut batches, accumulate) {
                self.step(step?, &mut clock)?;
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

    fn step(&mut self, batches: Vec<T::Batch>, clock: &mut Clock) -> Result<()> {
        let step = self.session.step(batches, clock)?;
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
        self.options.observer.on(Event::Step { done, loss: step.loss, examples_per_second: step.examples_per_second });
        let Step { lr, grad_norm, examples_per_second, .. } = step;
        self.last =
            format!("learning rate {lr:.3e}, gradient norm {grad_norm:.3}, {examples_per_second:.0} examples/s");
        clock.lap(&mut self.session.state.time.writing);
        Ok(())
    }

    fn detail(&self, text: &str) {
        self.options.observer.on(Event::Detail(text));
    }

    /// The run in a line, for those who want to know more.
    fn outline(&self) -> String {
        let (plan, model) = (&self.session.state.plan, &self.session.model);
        let (examples, batch) = (self.task.train_len(), self.recipe.schedule.step_examples());
        let (parameters, folder) = (learned_parameters(model), self.options.out_dir.display());
        let epoch = plan.steps_per_epoch;
        format!(
            "{parameters} parameters, {examples} examples to learn from, {batch} a step, {epoch} steps an epoch, into {folder}"
        )
    }

    /// Evaluates, logs and saves. Whether the run should stop for want of progress.
    fn end_epoch(&mut self, clock: &mut Clock) -> Result<bool> {
        self.session.read()?;
        let evaluated = self.session.evaluated();
        let evaluation = stop::until(&self.options.stop, || self.task.evaluate(&evaluated, Part::Watched))
            .map_err(|e| diverged(e, self.session.state.step))?;
        let train_loss = self.session.end_epoch();
        clock.lap(&mut self.session.state.time.evaluation);
        if evaluation.examples == 0 {
            let problem = "nothing is left to watch after an epoch; raise `regularisation.hold_out`, or leave it out";
            return Err(Error::Unfit { name: self.session.state.data.name.clone(), problem: problem.into() });
        }
        // The last step of an epoch is judged by what it leads to.
        if !evaluation.loss.is_finite() {
            return Err(Error::Diverged { step: self.session.state.step, loss: evaluation.loss as f32 });
        }
        let record = EpochRecord {
            epoch: self.session.state.epoch(),
            step: self.session.state.step,
            train_loss,
            split: if self.holds_out() { Watched::HeldOut } else { Watched::Test },
            loss: evaluation.loss,
            accuracy: evaluation.accuracy,
            bleu: Metric::Bleu.of(&evaluation),
            bits_per_byte: Metric::BitsPerByte.of(&evaluation),
            learned: learned_scalars::<T>(&self.session.model),
            seconds: self.seconds(),
        };
        self.metrics.append(&Record::Epoch(record.clone()))?;
        let stop = self.compare_with_best(&record, &evaluation)?;
        self.session.watch(&evaluation);
        self.latest = Some(evaluation);
        self.save()?;
        // A report costs a few milliseconds: nobody reads one of every epoch where an epoch takes as long.
        if self.reported.is_none_or(|last| last.elapsed() >= REPORT_PAUSE) {
            self.report()?;
        }
        self.options.observer.on(Event::Epoch(&record));
        let path = self.store.newest()?.unwrap_or_default();
        self.detail(&format!("{}; {:.0} s so far; checkpoint {}", self.last, record.seconds, path.display()));
        clock.lap(&mut self.session.state.time.writing);
        Ok(stop)
    }

    /// Keeps the best weights on the held-out pictures; true when there were none for too long.
    fn compare_with_best(&mut self, record: &EpochRecord, evaluation: &Evaluation) -> Result<bool> {
        if !self.holds_out() {
            return Ok(false);
        }
        let EpochRecord { epoch, step, .. } = *record;
        let best = self.session.state.best.as_ref();
        // A run goes on with what it began to judge by.
        let metric = best.map_or(evaluation.metric(), |best| best.metric);
        let Some(value) = metric.of(evaluation) else { return Ok(false) };
        if best.is_none_or(|best| metric.is_better(value, best.value)) {
            self.session.state.best = Some(Best { epoch, step, metric, value });
            let saved = self.session.best_parts()?;
            self.store.save_best(&self.session.state, saved)?;
        }
        Ok(self.session.state.is_exhausted())
    }

    fn save(&mut self) -> Result<()> {
        self.session.read()?;
        self.session.state.metrics_bytes = self.metrics.sync()?;
        self.session.state.seconds = self.seconds();
        self.store.save(&self.session.state, self.session.parts()?)
    }

    /// Writes the report of the run as far as it is.
    fn report(&mut self) -> Result<()> {
        show(self.options, Standing::UnderWay(&self.session.state))?;
        self.reported = Some(Instant::now());
        Ok(())
    }

    fn finish(self, ended: Ended) -> Result<Outcome> {
        let chosen = self.chosen()?;
        let judged = || {
            let test = match &self.latest {
                Some(latest) if !self.holds_out() => latest.clone(),
                _ => self.task.evaluate(&chosen, Part::Test)?,
            };
            Ok((test, self.task.samples(self.recipe, &chosen)?))
        };
        let (test, samples) = match stop::until(&self.options.stop, judged) {
            Err(Error::Stopped) => return Ok(self.interrupted()),
            judged => judged?,
        };
        if !test.loss.is_finite() {
            return Err(Error::Diverged { step: self.session.state.step, loss: test.loss as f32 });
        }
        let (seconds, session) = (self.seconds(), self.session);
        let rate = self.recipe.schedule.step_examples() as f64 / session.state.time.seconds_per_step();
        let summary = TrainSummary {
            parameters: learned_parameters(&session.model),
            steps: session.state.step,
            ended,
            device: device::title(&self.options.device),
            seconds,
            examples_per_second: if rate.is_finite() { rate } else { 0.0 },
            learned: learned_scalars::<T>(&session.model),
            ternary: T::packed(&session.model)?,
            recipe: session.state.recipe,
            data: session.state.data,
            plan: session.state.plan,
            best: session.state.best,
            origin: session.state.origin,
            time: session.state.time,
            samples,
            test,
        };
        show(self.options, Standing::Finished(&summary))?;
        // Last: the summary is what says that the run is finished.
        write_atomically(&self.options.out_dir.join(SUMMARY), &to_json(&summary)?)?;
        self.options.observer.on(Event::Note(&summary.time.line()));
        self.options.observer.on(Event::End(&summary.line()));
        Ok(Outcome::Finished(Box::new(summary)))
    }

    /// The weights that are tested.
    fn chosen(&self) -> Result<T::Model> {
        match &self.session.state.best {
            Some(best) if self.recipe.regularisation.patience.is_some() => {
                Checkpoint::load(&self.store.best_path(best.step))?.load_weights(self.session.model.valid())
            }
            _ => Ok(self.session.evaluated()),
        }
    }

    fn holds_out(&self) -> bool {
        self.task.holds_out(self.recipe)
    }

    fn seconds(&self) -> f64 {
        self.before + self.began.elapsed().as_secs_f64()
    }

    fn is_late(&self) -> bool {
        self.recipe.schedule.max_minutes.is_some_and(|minutes| self.seconds() > minutes * 60.0)
    }
}
