//! Trained models with another attention in place of their own.

use std::path::Path;

use burn::tensor::Device;
use resolvent::attention::MultiHeadAttention;
use resolvent_kernels::Mechanism;
use serde::Serialize;

use crate::{
    Error, Recipe, Result,
    analyze::FitFile,
    checkpoint::Checkpoint,
    data::{CorpusDataset, Data, PairDataset},
    eval::{Evaluation, Tally, answer},
    recipe::with_length_scale,
    train::{self, Part, Task, TaskData},
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
}

/// What a classifier answers with its own attention, and with another on the same weights.
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
    /// The largest difference between two logits of one example and class.
    pub largest_difference: f64,
    /// The largest logit of the trained model, by its size.
    pub largest_logit: f64,
    /// Examples that are answered differently.
    pub answers_changed: usize,
}

/// Evaluates the classifier in `path` on the test examples of `data` as it was trained, and with `other` in place of the
/// recipe's attention on the same weights. A pyramid's stages with a mechanism of their own keep it.
///
/// # Errors
/// As [`crate::eval::run`]; [`Error::Unfit`] for translators and language models; [`Error::Exchange`] where the weights are not those of a model with
/// `other`, or the layers and heads of a fit not those of the model.
pub fn run(path: &Path, data: &Data, other: &Replacement) -> Result<(Checkpoint, Exchange)> {
    match data {
        Data::Pictures(pictures) => exchange(path, pictures, other, |task, model| task.judge(model, Part::Test)),
        Data::Texts(texts) => exchange(path, texts, other, |task, model| task.judge(model, Part::Test, None)),
        Data::Pairs(PairDataset { name, .. }) | Data::Corpus(CorpusDataset { name, .. }) => {
            let problem = "holds no labelled examples; attention is exchanged in classifiers".into();
            Err(Error::Unfit { name: name.clone(), problem })
        }
    }
}

fn exchange<D: TaskData>(
    path: &Path,
    data: &D,
    replacement: &Replacement,
    judge: impl for<'a> Fn(&'a D::Task, &<D::Task as Task>::Model) -> Result<Tally<'a>>,
) -> Result<(Checkpoint, Exchange)> {
    let (mut checkpoint, device) = (Checkpoint::find(path)?, Device::flex());
    let task = data.restored(&mut checkpoint)?;
    let recipe = checkpoint.state.recipe.clone();
    let own = checkpoint.load_weights(train::build_for(&task, &recipe, &device)?)?;
    let mechanism = &match replacement {
        // The run's own mechanism is as it was trained, also where the run began without a length scale.
        Replacement::Mechanism(other) if *other != recipe.mechanism => {
            with_length_scale(other.clone(), D::LENGTH_SCALE)
        }
        _ => recipe.mechanism.clone(),
    };
    let refuse = |problem: String| Error::Exchange {
        path: checkpoint.path.clone(),
        trained: recipe.mechanism.id(),
        exchanged: replacement.name(),
        problem,
    };
    let other = train::build_for(&task, &Recipe { mechanism: mechanism.clone(), ..recipe.clone() }, &device)?;
    // Weights are taken out of a checkpoint: the other model has them from its own reading.
    let mut other = Checkpoint::find(path)?.load_weights(other).map_err(|error| refuse(error.to_string()))?;
    let exchanged = match replacement {
        Replacement::Mechanism(_) => Replacement::Mechanism(mechanism.clone()),
        Replacement::Fit(fit) => {
            apply(fit, &recipe, D::Task::attentions(&mut other)).map_err(refuse)?;
            replacement.clone()
        }
    };
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
        exchanged,
        largest_difference: largest(&mut before.iter().zip(&after).map(|(x, y)| x - y)),
        largest_logit: largest(&mut before.iter().copied()),
        answers_changed,
        own,
        other,
    };
    Ok((checkpoint, exchange))
}

/// Gives the heads of `layers` the mechanisms of `fit`.
fn apply(
    fit: &FitFile,
    recipe: &Recipe,
    mut layers: Vec<(String, &mut MultiHeadAttention)>,
) -> std::result::Result<(), String> {
    if recipe.mechanism.id() != "softmax" {
        return Err("a fit stands for softmax, which the model was not trained with".into());
    }
    if fit.causal {
        return Err("the fit is of tokens that see earlier ones only, those of a classifier see all".into());
    }
    for fitted in &fit.layers {
        let there = layers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let Some((_, layer)) = layers.iter_mut().find(|(name, _)| *name == fitted.name) else {
            return Err(format!("the fit has a layer `{}`, the model has {there}", fitted.name));
        };
        if layer.n_heads != fitted.heads {
            return Err(format!(
                "layer `{}` has {} heads in the fit, {} in the model",
                fitted.name, fitted.heads, layer.n_heads
            ));
        }
        **layer = layer.clone().with_head_groups(fitted.groups.clone()).map_err(|error| error.to_string())?;
    }
    Ok(())
}
