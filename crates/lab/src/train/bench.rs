//! Single steps with a stopwatch: for planning a run, and for comparing mechanisms.

use std::time::Instant;

use burn::tensor::Device;

use super::{Plan, Task, TaskData, clock::Clock, session::Session};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity},
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
    batch: T::Batch,
}

impl<'a, T: Task> Bench<'a, T> {
    /// The recipe's model, with the weights of `trained` if given, and the first batch of its first epoch.
    pub fn new(recipe: &'a Recipe, task: &'a T, trained: Option<Checkpoint>) -> Result<Self> {
        let plan = Plan::full(&recipe.schedule, task.train_len());
        let data = DataIdentity { name: String::new(), fingerprint: String::new() };
        let mut session = Session::new(recipe, task, data, plan)?;
        if let Some(mut trained) = trained {
            session.load_weights(&mut trained)?;
        }
        let empty = || Error::Unfit { name: recipe.name.clone(), problem: "it has no whole batch".into() };
        let batch = task.epoch(recipe, 0, 0)?.next().ok_or_else(empty)??;
        Ok(Self { session, recipe, task, batch })
    }

    /// Examples in the batch.
    pub fn examples(&self) -> usize {
        T::len_of(&self.batch)
    }

    /// Seconds of one training step. A model that diverges here, on one batch over and over, says nothing of a run.
    pub fn step(&mut self) -> Result<f64> {
        let batch = self.batch.clone();
        let began = Instant::now();
        self.session.step_whatever(batch, &mut Clock::start())?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Seconds of the forward pass of the batch.
    pub fn infer(&self) -> Result<f64> {
        let (model, batch) = (self.session.evaluated(), self.batch.clone());
        let began = Instant::now();
        let inputs = self.task.inputs(self.recipe, batch, &Device::flex());
        self.task.predict(&model, inputs)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

/// Median seconds of a training step of `recipe`, from a few of them; the steps are thrown away.
///
/// # Errors
/// As [`super::run`].
pub fn seconds_per_step<D: TaskData>(recipe: &Recipe, data: &D) -> Result<f64> {
    time_steps(recipe, &data.task(recipe)?)
}

/// As [`seconds_per_step`], of a task.
pub(crate) fn time_steps<T: Task>(recipe: &Recipe, task: &T) -> Result<f64> {
    let mut bench = Bench::new(recipe, task, None)?;
    for _ in 0..WARM_UP {
        bench.step()?;
    }
    let mut times = (0..TIMED).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
    Ok(median(&mut times))
}

/// The middle of `values`, which must not be empty; they are sorted.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { 0.5 * (values[middle - 1] + values[middle]) }
}
