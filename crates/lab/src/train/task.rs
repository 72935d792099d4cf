//! What is learnt: the seam between the training loop, which is one, and what there is to learn: pictures, texts, pairs of texts, plain
//! text, or what a program has of its own.

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Bytes, Device, Tensor},
};
use resolvent::attention::MultiHeadAttention;

use super::{PackedWeights, Samples};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation},
    data::Batches,
    evaluation::Evaluation,
    metrics::Scalars,
    recipe::first_difference,
};

/// A data set that models are trained on: this library's, or a program's own. What has to be learnt of it beforehand, and what all else
/// follows from, is its [`Task`].
///
/// The examples `own_model` and `own_data` are whole programs.
pub trait TaskData {
    /// What is learnt from it.
    type Task: Task;
    /// What the data set is: a run goes on with the same alone.
    fn identity(&self) -> DataIdentity;

    /// The task of a new run: the data divided, and whatever has to be learnt from the training part beforehand (statistics,
    /// a vocabulary), as the recipe says.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] when the data does not suit the recipe.
    fn task(&self, recipe: &Recipe) -> Result<Self::Task>;

    /// The recipe of a new run, with what the data set decides where `recipe` says nothing. Default: as it is.
    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.clone()
    }

    /// The task of a new run that begins with the weights of `checkpoint`: as [`TaskData::task`], with the vocabulary that they know.
    /// Default: [`TaskData::task`].
    ///
    /// # Errors
    /// As [`TaskData::restored`]; that the classes are others is none.
    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Self::Task> {
        let _ = checkpoint;
        self.task(recipe)
    }

    /// The task that `checkpoint` was trained on, on this data. Default: [`TaskData::task`] of its recipe, where it [expects](Task::expects)
    /// what the trained model expects.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] when the trained model cannot be shown this data, [`crate::Error::Damaged`].
    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Self::Task> {
        let task = self.task(&checkpoint.state.recipe)?;
        let (name, trained, found) = (self.identity().name, &checkpoint.state.expects, task.expects());
        match (trained, &found) {
            _ if *trained == found => Ok(task),
            (Expectation::Own(trained), Expectation::Own(found)) => {
                let [trained, found] = [trained, found].map(|fields| serde_json::Value::Object(fields.clone()));
                let (field, trained, found) = first_difference("", &trained, &found).unwrap_or_default();
                let problem = format!(
                    "its `{field}` is {found}, the model was trained with {trained}; evaluate it on the data it was trained on"
                );
                Err(Error::Unfit { name, problem })
            }
            _ => Err(trained.refuses(&name, found.examples())),
        }
    }
}

/// Which examples a model is judged on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Those looked at after each epoch: the data set's own for it, or held out of the training part where the recipe says so,
    /// else the test part.
    Watched,
    /// The test part.
    Test,
}

/// Batches, a model, a loss, and how the model is judged. All that the training loop knows of what it trains.
///
/// A run resumes to the same bits where [`Task::epoch`] depends on its arguments alone and a model draws its random numbers from Burn's
/// generator, which the loop seeds before every batch. Nothing is asked of the model but that it is a Burn module; the recipe's
/// `mechanism` is for [`Task::model`] to use, its own fields stand in `[model]` with `kind = "own"` ([`crate::recipe::ModelRecipe::own`]).
pub trait Task: Send + Sync {
    /// The model.
    type Model: Module + ModuleDisplay + Send + Sync;
    /// Examples as they are prepared ahead of time.
    type Batch: Clone + Send + 'static;
    /// A batch as tensors.
    type Inputs;

    /// Examples learnt from.
    fn train_len(&self) -> usize;

    /// What the user should know of how the data was read, a line each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the data set has a part of its own for watching. Default: no, and the recipe's `hold_out` is to be followed.
    fn brings_validation(&self) -> bool {
        false
    }

    /// Whether the examples that are watched are others than those of the test part, so that they may pick the best epoch.
    fn holds_out(&self, recipe: &Recipe) -> bool {
        self.brings_validation() || recipe.regularisation.hold_out > 0.0
    }

    /// What a trained model will expect of the data it is shown; of a program's own data [`Expectation::Own`]. Default: that with nothing
    /// in it.
    fn expects(&self) -> Expectation {
        Expectation::default()
    }

    /// Files that a checkpoint needs beside weights and state.
    ///
    /// # Errors
    /// [`crate::Error::Data`] when they cannot be made.
    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        Ok(Vec::new())
    }

    /// The recipe's model, its weights not yet drawn.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] where the model does not fit the data, [`crate::Error::Model`] where it is impossible.
    fn model(&self, recipe: &Recipe, device: &Device) -> Result<Self::Model>;

    /// The attention of every layer of `model`, by the names that reports and analyses call them; what they learn in scalars is reported.
    /// Default: none is named.
    fn attentions(model: &mut Self::Model) -> Vec<(String, &mut MultiHeadAttention)> {
        let _ = model;
        Vec::new()
    }

    /// The training batches of `epoch` from `first` on. Their content depends on the recipe's seed, epoch and position alone:
    /// [`crate::data::BatchPlan::epoch`] gives an order that does, and prepares batches ahead.
    ///
    /// # Errors
    /// [`crate::Error::Data`] for an impossible augmentation.
    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<Self::Batch>>;

    /// Examples in a batch.
    fn len_of(batch: &Self::Batch) -> usize;

    /// Terms that the loss of a batch is the mean of: examples, or tokens where their number differs. Default: the examples.
    fn terms_of(batch: &Self::Batch) -> usize {
        Self::len_of(batch)
    }

    /// The tensors of a batch.
    fn inputs(&self, recipe: &Recipe, batch: Self::Batch, device: &Device) -> Self::Inputs;

    /// What training makes small, `[1]`.
    ///
    /// # Errors
    /// [`crate::Error::Model`] where the model refuses the batch.
    fn loss(&self, model: &Self::Model, inputs: Self::Inputs) -> Result<Tensor<1>>;

    /// The forward pass alone, as for a prediction; for measuring its speed. Default: the loss.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn predict(&self, model: &Self::Model, inputs: Self::Inputs) -> Result<()> {
        self.loss(model, inputs)?.into_data();
        Ok(())
    }

    /// The judgement of `model` on a part of the data: of classifiers by a [`Tally`](crate::evaluation::Tally), of others [`Evaluation::new`] with
    /// what else there is. The best epoch is the one of the best accuracy where there is one, else of the least loss.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn evaluate(&self, model: &Self::Model, part: Part) -> Result<Evaluation>;

    /// What `model` says of some test examples, for the report. It costs little beside [`Task::evaluate`] on a large test part. Default:
    /// nothing.
    ///
    /// # Errors
    /// As [`Task::loss`]; [`crate::Error::Stopped`].
    fn samples(&self, recipe: &Recipe, model: &Self::Model) -> Result<Option<Samples>> {
        let _ = (recipe, model);
        Ok(None)
    }

    /// Further scalars that `model` learns, by name, for reports: those of [`Task::attentions`] are there anyway. Default: none.
    fn scalars(model: &Self::Model) -> Vec<(String, f64)> {
        let _ = model;
        Vec::new()
    }

    /// What the ternary weights of the model take. Default: none are.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for weights that are not finite.
    fn packed(model: &Self::Model) -> Result<Option<PackedWeights>> {
        let _ = model;
        Ok(None)
    }
}

/// What is learnt from, and what is watched: the part that the data set brings for it, else what the recipe holds out, else the test part.
pub(super) fn divided<S: Clone>(
    [train, test]: [&S; 2],
    validation: Option<&S>,
    recipe: &Recipe,
    hold_out: fn(&S, f64, u64) -> (S, S),
) -> (S, S) {
    match (validation, recipe.regularisation.hold_out) {
        (Some(validation), _) => (train.clone(), validation.clone()),
        (None, share) if share > 0.0 => hold_out(train, share, recipe.seed),
        _ => (train.clone(), test.clone()),
    }
}

/// What `model` has learned in scalars: the parameters of its attention, each the mean over the heads, and [`Task::scalars`].
pub(super) fn learned_scalars<T: Task>(model: &T::Model) -> Scalars {
    let mut own = model.clone();
    let mut scalars = Vec::new();
    for (name, attention) in T::attentions(&mut own) {
        let of_heads = attention.learned.values();
        scalars.extend(of_heads.map(|(parameter, values)| {
            (format!("{name}.{}", parameter.name()), f64::from(values.mean().into_scalar::<f32>()))
        }));
    }
    scalars.extend(T::scalars(model));
    Scalars(scalars)
}
