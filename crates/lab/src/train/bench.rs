//! Single steps with a stopwatch: for planning a run, and for comparing mechanisms.

use std::time::Instant;

use burn::tensor::Device;

use super::{Task, TaskData, session::Session};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity},
    clock::Clock,
    schedule::Plan,
    stats::median,
};

/// Steps that warm caches and memory up before any is timed.
const WARM_UP: usize = 2;
/// Steps timed for a plan; their median counts.
const TIMED: usize = 5;

/// A model that can take steps on one batch, over and over.
pub(crate) struct Bench<'a, T: Task> {
    session: Session<'a, T>,
    recipe: &'a Recipe,
    task: &'a T,
    trained: Option<Checkpoint>,
    device: Device,
    batch: T::Batch,
}

impl<'a, T: Task> Bench<'a, T> {
    /// The recipe's model, with the weights of `trained` if given, and the first batch of its first epoch.
    pub fn new(recipe: &'a Recipe, task: &'a T, trained: Option<Checkpoint>, device: &Device) -> Result<Self> {
        let session = begin(recipe, task, trained.as_ref(), device)?;
        let empty = || Error::Unfit { name: recipe.name.clone(), problem: "it has no whole batch".into() };
        let batch = task.epoch(recipe, 0, 0)?.next().ok_or_else(empty)??;
        Ok(Self { session, recipe, task, trained, device: device.clone(), batch })
    }

    /// Examples in the batch.
    pub fn examples(&self) -> usize {
        T::len_of(&self.batch)
    }

    /// Batches of a training step.
    pub fn batches(&self) -> usize {
        self.recipe.schedule.accumulate
    }

    /// Seconds of one training step. A model that diverges here, on one batch over and over, says nothing of a run: it begins anew.
    pub fn step(&mut self) -> Result<f64> {
        self.again(Self::timed_step)
    }

    /// Seconds of the forward pass of the batch.
    pub fn infer(&mut self) -> Result<f64> {
        self.again(|own| own.timed_inference())
    }

    /// What `work` finds; where the weights have left what the model can compute, with those of the beginning.
    fn again(&mut self, work: fn(&mut Self) -> Result<f64>) -> Result<f64> {
        match work(self) {
            Err(error) if error.is_divergence() => {
                self.session = begin(self.recipe, self.task, self.trained.as_ref(), &self.device)?;
                work(self)
            }
            done => done,
        }
    }

    fn timed_step(&mut self) -> Result<f64> {
        let batches = vec![self.batch.clone(); self.batches()];
        let began = Instant::now();
        self.session.step_unread(batches, &mut Clock::start())?;
        match self.session.read() {
            // Numbers that are none take as long.
            Ok(()) | Err(Error::Diverged { .. }) => {}
            Err(e) => return Err(e),
        }
        Ok(began.elapsed().as_secs_f64())
    }

    fn timed_inference(&self) -> Result<f64> {
        let (model, batch) = (self.session.evaluated(), self.batch.clone());
        let began = Instant::now();
        let inputs = self.task.inputs(self.recipe, batch, &self.device);
        self.task.predict(&model, inputs)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

/// A run that has done nothing yet, with the weights of `trained` if given.
fn begin<'a, T: Task>(
    recipe: &'a Recipe,
    task: &'a T,
    trained: Option<&Checkpoint>,
    device: &Device,
) -> Result<Session<'a, T>> {
    let plan = Plan::full(&recipe.schedule, task.train_len());
    let data = DataIdentity { name: String::new(), fingerprint: String::new() };
    let mut session = Session::new(recipe, task, data, plan, device)?;
    if let Some(trained) = trained {
        session.load_weights(trained)?;
    }
    Ok(session)
}

/// Median seconds of a training step of `recipe`, from a few of them; the steps are thrown away.
///
/// # Errors
/// As [`super::run`].
pub fn seconds_per_step<D: TaskData>(recipe: &Recipe, data: &D, device: &Device) -> Result<f64> {
    time_steps(recipe, &data.task(recipe)?, device)
}

/// As [`seconds_per_step`], of a task.
pub(crate) fn time_steps<T: Task>(recipe: &Recipe, task: &T, device: &Device) -> Result<f64> {
    let mut bench = Bench::new(recipe, task, None, device)?;
    for _ in 0..WARM_UP {
        bench.step()?;
    }
    let mut times = (0..TIMED).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
    Ok(median(&mut times))
}
