//! Trained models with another attention in place of their own.

use std::path::Path;

use burn::tensor::Device;
use resolvent_kernels::Mechanism;
use serde::Serialize;

use crate::{
    Error, Recipe, Result,
    checkpoint::Checkpoint,
    data::{CorpusDataset, Data, PairDataset},
    eval::{Evaluation, Tally, answer},
    recipe::with_length_scale,
    train::{self, Part, Task, TaskData},
};

/// What a classifier answers with its own attention, and with another on the same weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// The mechanism that it was trained with.
    pub trained: Mechanism,
    /// The mechanism put in its place.
    pub exchanged: Mechanism,
    /// On the test examples, with its own.
    pub own: Evaluation,
    /// On the same, with the other.
    pub other: Evaluation,
    /// The largest difference between two logits of one example and class.
    pub largest_difference: f64,
    /// The largest logit of the trained model, by its size.
    pub largest_logit: f64,
    /// Examples that are answered differently.
    pub answers_changed: usize,
}

/// Evaluates the classifier in `path` on the test examples of `data` as it was trained, and with `mechanism` in place of the
/// recipe's on the same weights. A pyramid's stages with a mechanism of their own keep it.
///
/// # Errors
/// As [`crate::eval::run`]; [`Error::Unfit`] for translators and language models; [`Error::Exchange`] where the weights are not those of a model with
/// `mechanism`.
pub fn run(path: &Path, data: &Data, mechanism: &Mechanism) -> Result<(Checkpoint, Exchange)> {
    match data {
        Data::Pictures(pictures) => exchange(path, pictures, mechanism, |task, model| task.judge(model, Part::Test)),
        Data::Texts(texts) => exchange(path, texts, mechanism, |task, model| task.judge(model, Part::Test, None)),
        Data::Pairs(PairDataset { name, .. }) | Data::Corpus(CorpusDataset { name, .. }) => {
            let problem = "holds no labelled examples; attention is exchanged in classifiers".into();
            Err(Error::Unfit { name: name.clone(), problem })
        }
    }
}

fn exchange<D: TaskData>(
    path: &Path,
    data: &D,
    mechanism: &Mechanism,
    judge: impl for<'a> Fn(&'a D::Task, &<D::Task as Task>::Model) -> Result<Tally<'a>>,
) -> Result<(Checkpoint, Exchange)> {
    let (mut checkpoint, device) = (Checkpoint::find(path)?, Device::flex());
    let task = data.restored(&mut checkpoint)?;
    let recipe = checkpoint.state.recipe.clone();
    let own = checkpoint.load_weights(train::build_for(&task, &recipe, &device)?)?;
    // The run's own mechanism is as it was trained, also where the run began without a length scale.
    let mechanism = &match *mechanism == recipe.mechanism {
        true => mechanism.clone(),
        false => with_length_scale(mechanism.clone(), D::LENGTH_SCALE),
    };
    let other = train::build_for(&task, &Recipe { mechanism: mechanism.clone(), ..recipe.clone() }, &device)?;
    // Weights are taken out of a checkpoint: the other model has them from its own reading.
    let other = Checkpoint::find(path)?.load_weights(other).map_err(|error| Error::Exchange {
        path: checkpoint.path.clone(),
        trained: recipe.mechanism.id(),
        exchanged: mechanism.id(),
        problem: error.to_string(),
    })?;
    let (mut own, mut other) = (judge(&task, &own)?, judge(&task, &other)?);
    let (before, after) = (std::mem::take(&mut own.logits), std::mem::take(&mut other.logits));
    let size = |x: f32| if x.is_nan() { f64::INFINITY } else { f64::from(x.abs()) };
    let largest = |values: &mut dyn Iterator<Item = f32>| values.map(size).fold(0.0, f64::max);
    let (own, other) = (own.finish(), other.finish());
    let rows =
        |logits: &[f32]| -> Vec<usize> { logits.chunks_exact(own.classes.len()).map(|row| answer(row).0).collect() };
    let answers_changed = rows(&before).iter().zip(rows(&after)).filter(|(before, after)| **before != *after).count();
    let exchange = Exchange {
        trained: recipe.mechanism,
        exchanged: mechanism.clone(),
        largest_difference: largest(&mut before.iter().zip(&after).map(|(x, y)| x - y)),
        largest_logit: largest(&mut before.iter().copied()),
        answers_changed,
        own,
        other,
    };
    Ok((checkpoint, exchange))
}
