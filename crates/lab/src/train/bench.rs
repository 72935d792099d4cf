//! Single steps with a stopwatch: for planning a run, and for comparing mechanisms.

use std::time::Instant;

use super::{
    Plan,
    clock::Clock,
    pictures::Pictures,
    session::{Identity, Session},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation},
    data::{Batch, Dataset, PictureShape},
    eval,
};

/// Steps that warm caches and memory up before any is timed.
const WARM_UP: usize = 2;
/// Steps timed for a plan; their median counts.
const TIMED: usize = 5;

/// A model that can take steps on one batch, over and over.
pub(crate) struct Bench<'a> {
    session: Session<'a>,
    shape: PictureShape,
    batch: Batch,
}

impl<'a> Bench<'a> {
    /// The recipe's model, with the weights of `trained` if given, and the first batch of its first epoch.
    pub fn new(recipe: &'a Recipe, dataset: &Dataset, trained: Option<Checkpoint>) -> Result<Self> {
        let pictures = Pictures::new(recipe, dataset)?;
        let plan = Plan::full(&recipe.schedule, pictures.train.len());
        let data = DataIdentity { name: dataset.name.clone(), fingerprint: String::new() };
        let expects = Expectation::new(dataset, &pictures.stats);
        let mut session = Session::new(recipe, dataset, Identity { data, expects }, plan)?;
        if let Some(mut trained) = trained {
            session.load_weights(&mut trained)?;
        }
        let batch = pictures.loader(recipe)?.epoch(0, 0).next();
        let empty = || Error::Unfit { name: dataset.name.clone(), problem: "it has no whole batch".into() };
        let batch = batch.ok_or_else(empty)?;
        Ok(Self { session, shape: dataset.shape, batch })
    }

    /// Pictures in the batch.
    pub fn images(&self) -> usize {
        self.batch.len()
    }

    /// Seconds of one training step.
    pub fn step(&mut self) -> Result<f64> {
        let batch = self.batch.clone();
        let began = Instant::now();
        self.session.step(batch, &mut Clock::start())?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Seconds of the logits of the batch.
    pub fn infer(&self) -> Result<f64> {
        let (model, mut batch) = (self.session.evaluated(), self.batch.clone());
        let began = Instant::now();
        eval::logits(&model, &mut batch, self.shape)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

/// Median seconds of a training step of `recipe`, from a few of them; the steps are thrown away.
///
/// # Errors
/// As [`super::run`].
pub fn seconds_per_step(recipe: &Recipe, dataset: &Dataset) -> Result<f64> {
    let mut bench = Bench::new(recipe, dataset, None)?;
    for _ in 0..WARM_UP {
        bench.step()?;
    }
    let mut times = (0..TIMED).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
    Ok(median(&mut times))
}

/// Pictures that `recipe` learns from.
///
/// # Errors
/// [`Error::Unfit`] when they do not fill a batch.
pub(crate) fn training_pictures(recipe: &Recipe, dataset: &Dataset) -> Result<usize> {
    Ok(Pictures::new(recipe, dataset)?.train.len())
}

/// The middle of `values`, which must not be empty; they are sorted.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { 0.5 * (values[middle - 1] + values[middle]) }
}
