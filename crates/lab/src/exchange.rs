//! Trained models with another attention in place of their own.

use std::{collections::BTreeSet, path::Path};

use burn::{
    module::{Module, ModuleDisplay},
    tensor::Device,
};
use resolvent_kernels::Mechanism;
use serde::Serialize;

use crate::{
    Error, Recipe, Result,
    checkpoint::Checkpoint,
    data::{Data, PairDataset},
    evaluation::{Evaluation, Tally, answer},
    fit::FitFile,
    recipe::fit::FIT,
    train::{self, Part, Task, TaskData, device_of},
};

/// What a model attends with.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelAttention {
    /// One mechanism in every layer.
    Mechanism(Mechanism),
    /// Mechanisms of layers and heads, in a model that is trained with softmax.
    Fit(FitFile),
}

impl ModelAttention {
    /// That of the models of `recipe`.
    pub fn of(recipe: &Recipe) -> Self {
        recipe.fit.clone().map_or_else(|| Self::Mechanism(recipe.mechanism.clone()), Self::Fit)
    }

    /// The mechanism's id, or `fit`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mechanism(mechanism) => mechanism.id(),
            Self::Fit(_) => FIT,
        }
    }

    /// `recipe` with it in place of its own.
    pub fn in_recipe(&self, recipe: Recipe) -> Recipe {
        match self {
            Self::Mechanism(mechanism) => Recipe { mechanism: mechanism.clone(), fit: None, ..recipe },
            Self::Fit(fit) => Recipe { fit: Some(fit.clone()), ..recipe },
        }
    }

    /// The recipe of a model that was trained by `recipe`, with it; `settled` says what is left open for the data. A run's own mechanism is as
    /// it was trained, also where the run began without a length scale.
    pub(crate) fn exchanged(&self, recipe: &Recipe, settled: impl Fn(&Recipe) -> Recipe) -> Recipe {
        let other = self.in_recipe(recipe.clone());
        if other.mechanism == recipe.mechanism {
            return other;
        }
        Recipe { mechanism: settled(&other).mechanism, ..other }
    }

    /// The weights of `checkpoint` in `model`, which was built by [`ModelAttention::exchanged`].
    pub(crate) fn onto<M: Module + ModuleDisplay>(&self, checkpoint: &Checkpoint, model: Result<M>) -> Result<M> {
        let refused = |problem| {
            let (path, trained) = (checkpoint.path.clone(), checkpoint.state.recipe.attention_name());
            Error::Exchange { path, trained, exchanged: self.name(), problem }
        };
        let model = model.map_err(|error| match error {
            Error::Recipe { field, problem, .. } if field == FIT => refused(problem),
            other => other,
        })?;
        checkpoint.load_weights(model).map_err(|error| refused(format!("their weights differ: {error}")))
    }
}

/// What a model does with its own attention, and with another on the same weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// What it was trained with.
    pub trained: ModelAttention,
    /// What was put in its place.
    pub exchanged: ModelAttention,
    /// Its parameters that are the trained weights', whatever its fields say they begin with.
    pub learned: Vec<&'static str>,
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
pub fn run(path: &Path, data: &Data, other: &ModelAttention, device: &Device) -> Result<(Checkpoint, Exchange)> {
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
    trained: ModelAttention,
    exchanged: ModelAttention,
    learned: Vec<&'static str>,
    own: M,
    other: M,
}

impl<M: Module + ModuleDisplay + Send + Sync> Pair<M> {
    /// The task that the models in `path` are judged by, and both.
    fn load<D: TaskData>(
        path: &Path,
        data: &D,
        replacement: &ModelAttention,
        device: &Device,
    ) -> Result<(D::Task, Self)>
    where
        D::Task: Task<Model = M>,
    {
        let mut checkpoint = Checkpoint::find(path)?;
        let task = data.restored(&mut checkpoint)?;
        let recipe = checkpoint.state.recipe.clone();
        let own = checkpoint.load_weights(train::build_for(&task, &recipe, device)?)?;
        let exchanged = replacement.exchanged(&recipe, |recipe| data.settled(recipe));
        let other = replacement.onto(&checkpoint, train::build_for(&task, &exchanged, device))?;
        let [trained, exchanged] = [&recipe, &exchanged].map(ModelAttention::of);
        let learned = learned::<D::Task>(&mut other.clone());
        Ok((task, Self { checkpoint, trained, exchanged, learned, own, other }))
    }

    /// What they do, and how far their answers are apart.
    fn exchange(self, own: Evaluation, other: Evaluation, answers: Option<Answers>) -> (Checkpoint, Exchange) {
        let Self { checkpoint, trained, exchanged, learned, .. } = self;
        (checkpoint, Exchange { trained, exchanged, learned, own, other, answers })
    }
}

/// The parameters that the attention of `model` has learned, each once.
fn learned<T: Task>(model: &mut T::Model) -> Vec<&'static str> {
    let attentions = T::attentions(model);
    let names = attentions.iter().flat_map(|(_, attention)| attention.learned.values());
    let names: BTreeSet<_> = names.map(|(parameter, _)| parameter.name()).collect();
    names.into_iter().collect()
}

fn classifiers<D: TaskData>(
    path: &Path,
    data: &D,
    replacement: &ModelAttention,
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
