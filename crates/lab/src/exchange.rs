//! Trained models with another attention in place of their own.

use std::path::Path;

use burn::{
    module::{Module, ModuleDisplay},
    tensor::Device,
};
use resolvent::attention::MultiHeadAttention;
use resolvent_kernels::Mechanism;
use serde::Serialize;

use crate::{
    Error, Recipe, Result,
    checkpoint::Checkpoint,
    data::{Data, PairDataset},
    evaluation::{Evaluation, Tally, answer},
    fit::FitFile,
    train::{self, Part, Task, TaskData, device_of},
};

/// What is put in the place of a model's attention.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Replacement {
    /// One mechanism in every layer.
    Mechanism(Mechanism),
    /// Mechanisms of layers and heads, in a model that was trained with softmax.
    Fit(FitFile),
}

impl Replacement {
    /// The mechanism's id, or `fit`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Mechanism(mechanism) => mechanism.id(),
            Self::Fit(_) => "fit",
        }
    }

    /// `recipe` with it, where it is a mechanism; `settled` says what is left open for the data. A run's own mechanism is as it was trained,
    /// also where the run began without a length scale.
    pub(crate) fn recipe(&self, recipe: &Recipe, settled: impl Fn(&Recipe) -> Recipe) -> Recipe {
        match self {
            Self::Mechanism(other) if *other != recipe.mechanism => {
                let mechanism = settled(&Recipe { mechanism: other.clone(), ..recipe.clone() }).mechanism;
                Recipe { mechanism, ..recipe.clone() }
            }
            _ => recipe.clone(),
        }
    }

    /// Why a model with the weights of `checkpoint` takes it not.
    pub(crate) fn refused(&self, checkpoint: &Checkpoint, problem: String) -> Error {
        let (path, trained) = (checkpoint.path.clone(), checkpoint.state.recipe.mechanism.id());
        Error::Exchange { path, trained, exchanged: self.name(), problem }
    }

    /// The weights of `checkpoint` in `model`, of [`Replacement::recipe`], whose layers are its `attentions`.
    pub(crate) fn onto<M: Module + ModuleDisplay>(
        &self,
        checkpoint: &Checkpoint,
        model: M,
        attentions: impl FnOnce(&mut M) -> Vec<(String, &mut MultiHeadAttention)>,
    ) -> Result<M> {
        let refuse = |problem| self.refused(checkpoint, problem);
        let mut model =
            checkpoint.load_weights(model).map_err(|error| refuse(format!("their weights differ: {error}")))?;
        if let Self::Fit(fit) = self {
            fit.apply(&checkpoint.state.recipe, attentions(&mut model)).map_err(refuse)?;
        }
        Ok(model)
    }
}

/// What a model does with its own attention, and with another on the same weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// The mechanism that it was trained with.
    pub trained: Mechanism,
    /// What was put in its place.
    pub exchanged: Replacement,
    /// On the test examples, with its own.
    pub own: Evaluation,
    /// On the same, with the other.
    pub other: Evaluation,
    /// How far the answers are apart; of classifiers.
    #[serde(flatten)]
    pub answers: Option<Answers>,
}

/// How far a classifier's answers are apart.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answers {
    /// The largest difference between two logits of one example; infinite where one is NaN.
    pub largest_difference: f64,
    /// The largest logit of the model as it was trained, in magnitude: what the difference is to be compared with.
    pub largest_logit: f64,
    /// Examples for which the model answers another class.
    pub answers_changed: usize,
}

/// Evaluates the classifier or language model in `path` on the test examples of `data` as it was trained, and with `other` in place of the
/// recipe's attention on the same weights. A pyramid's stages with a mechanism of their own keep it.
///
/// # Errors
/// As [`crate::eval::run`]; [`Error::Unfit`] for translators; [`Error::Exchange`] where the weights are not those of a model with `other`, or the
/// layers and heads of a fit not those of the model.
pub fn run(path: &Path, data: &Data, other: &Replacement, device: &Device) -> Result<(Checkpoint, Exchange)> {
    match data {
        Data::Pictures(pictures) => classifiers(path, &**pictures, other, device, |task, model| {
            task.judge(Part::Test, &device_of(model), |pictures| model.try_forward(pictures))
        }),
        Data::Texts(texts) => classifiers(path, texts, other, device, |task, model| task.judge(model, Part::Test)),
        Data::Matches(pairs) => classifiers(path, &**pairs, other, device, |task, model| task.judge(model, Part::Test)),
        Data::Corpus(corpus) => {
            let (task, pair) = Pair::load(path, corpus, other, device)?;
            let [own, other] = [&pair.own, &pair.other].map(|model| task.evaluate(model, Part::Test));
            Ok(pair.exchange(own?, other?, None))
        }
        Data::Recall(recall) => {
            let (task, pair) = Pair::load(path, recall, other, device)?;
            let [own, other] = [&pair.own, &pair.other].map(|model| task.evaluate(model, Part::Test));
            Ok(pair.exchange(own?, other?, None))
        }
        Data::Pairs(PairDataset { name, .. }) => {
            let problem = "is for translators; attention is exchanged in classifiers and language models".into();
            Err(Error::Unfit { name: name.clone(), problem })
        }
    }
}

/// A model as it was trained, and the same weights with another attention.
struct Pair<M> {
    checkpoint: Checkpoint,
    trained: Mechanism,
    exchanged: Replacement,
    own: M,
    other: M,
}

impl<M: Module + ModuleDisplay + Send + Sync> Pair<M> {
    /// The task that the models in `path` are judged by, and both.
    fn load<D: TaskData>(path: &Path, data: &D, replacement: &Replacement, device: &Device) -> Result<(D::Task, Self)>
    where
        D::Task: Task<Model = M>,
    {
        let mut checkpoint = Checkpoint::find(path)?;
        let task = data.restored(&mut checkpoint)?;
        let recipe = checkpoint.state.recipe.clone();
        let own = checkpoint.load_weights(train::build_for(&task, &recipe, device)?)?;
        let replaced = replacement.recipe(&recipe, |recipe| data.settled(recipe));
        let other = train::build_for(&task, &replaced, device)?;
        let other = replacement.onto(&checkpoint, other, D::Task::attentions)?;
        let exchanged = match replacement {
            Replacement::Mechanism(_) => Replacement::Mechanism(replaced.mechanism),
            Replacement::Fit(_) => replacement.clone(),
        };
        Ok((task, Self { checkpoint, trained: recipe.mechanism, exchanged, own, other }))
    }

    /// What they do, and how far their answers are apart.
    fn exchange(self, own: Evaluation, other: Evaluation, answers: Option<Answers>) -> (Checkpoint, Exchange) {
        (self.checkpoint, Exchange { trained: self.trained, exchanged: self.exchanged, own, other, answers })
    }
}

fn classifiers<D: TaskData>(
    path: &Path,
    data: &D,
    replacement: &Replacement,
    device: &Device,
    judge: impl for<'a> Fn(&'a D::Task, &<D::Task as Task>::Model) -> Result<Tally<'a>>,
) -> Result<(Checkpoint, Exchange)> {
    let (task, pair) = Pair::load(path, data, replacement, device)?;
    let (mut own, mut other) = (judge(&task, &pair.own)?, judge(&task, &pair.other)?);
    let (before, after) = (std::mem::take(&mut own.logits), std::mem::take(&mut other.logits));
    let size = |x: f32| if x.is_nan() { f64::INFINITY } else { f64::from(x.abs()) };
    let largest = |values: &mut dyn Iterator<Item = f32>| values.map(size).fold(0.0, f64::max);
    let (own, other) = (own.finish(), other.finish());
    let rows =
        |logits: &[f32]| -> Vec<usize> { logits.chunks_exact(own.classes.len()).map(|row| answer(row).0).collect() };
    let answers = Answers {
        largest_difference: largest(&mut before.iter().zip(&after).map(|(x, y)| x - y)),
        largest_logit: largest(&mut before.iter().copied()),
        answers_changed: rows(&before).iter().zip(rows(&after)).filter(|(before, after)| **before != *after).count(),
    };
    Ok(pair.exchange(own, other, Some(answers)))
}
