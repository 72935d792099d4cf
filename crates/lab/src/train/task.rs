//! What is learnt: the seam between the training loop, which is one, and pictures, texts and pairs of texts.

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Bytes, Device, Tensor},
};
use resolvent::attention::MultiHeadAttention;
use resolvent_kernels::mechanism::KappaRule;
use resolvent_layers::TernaryMatrix;
use serde::{Deserialize, Serialize};

use super::Samples;
use crate::{
    Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation},
    data::Batches,
    eval::Evaluation,
};

/// A data set that models are trained on.
pub trait TaskData {
    /// What is learnt from it.
    type Task: Task;
    /// The rule by which a new run takes the length scale of `fna` where its recipe names none.
    const LENGTH_SCALE: KappaRule;

    /// What the data set is.
    fn identity(&self) -> DataIdentity;

    /// The task of a new run: the data divided, and whatever has to be learnt from the training part beforehand (statistics,
    /// a vocabulary), as the recipe says.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] when the data does not suit the recipe.
    fn task(&self, recipe: &Recipe) -> Result<Self::Task>;

    /// The task of a new run that begins with the weights of `checkpoint`: as [`TaskData::task`], with the vocabulary that they know.
    ///
    /// # Errors
    /// As [`TaskData::restored`]; that the classes are others is none.
    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Self::Task>;

    /// The task that `checkpoint` was trained on, on this data.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] when the trained model cannot be shown this data, [`crate::Error::Damaged`].
    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Self::Task>;
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

/// How many landmarks the attention of a model, or of a stage, has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LandmarkCount {
    /// Tokens that meet through them.
    pub tokens: usize,
    /// Their number.
    pub landmarks: usize,
}

/// Batches, a model, a loss, and how the model is judged. All that the training loop knows of what it trains.
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

    /// Whether the data set has a part of its own for watching.
    fn brings_validation(&self) -> bool {
        false
    }

    /// Whether the examples that are watched are others than those of the test part, so that they may pick the best epoch.
    fn holds_out(&self, recipe: &Recipe) -> bool {
        self.brings_validation() || recipe.regularisation.hold_out > 0.0
    }

    /// What a trained model will expect of the data it is shown.
    fn expects(&self) -> Expectation;

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

    /// The attention of every layer of `model` over its own tokens, by the names that analyses call them. Default: none is named.
    fn attentions(model: &mut Self::Model) -> Vec<(String, &mut MultiHeadAttention)> {
        let _ = model;
        Vec::new()
    }

    /// How many landmarks the recipe's model has, stage by stage where it has stages; of texts, whose lengths differ, and of stages
    /// without landmarks nothing is said.
    ///
    /// # Errors
    /// As [`Task::model`].
    fn landmarks(&self, _recipe: &Recipe) -> Result<Vec<LandmarkCount>> {
        Ok(Vec::new())
    }

    /// The training batches of `epoch` from `first` on. Their content depends on the recipe's seed, epoch and position alone.
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

    /// The forward pass alone, as for a prediction; for measuring its speed.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn predict(&self, model: &Self::Model, inputs: Self::Inputs) -> Result<()>;

    /// The judgement of `model` on a part of the data.
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

    /// The learned decay of each block, as the mean over its heads; empty where none is learned.
    fn gammas(model: &Self::Model) -> Vec<f64>;

    /// The ternary matrices of the model; none where its weights are real.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for weights that are not finite.
    fn ternary_matrices(model: &Self::Model) -> Result<Vec<TernaryMatrix>>;
}
