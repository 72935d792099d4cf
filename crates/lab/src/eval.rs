//! Trained models on test examples: as they are, at another size or length, and with an attention that loses tokens.

use std::path::Path;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    checkpoint::Checkpoint,
    data::{PictureDataset, TextDataset},
    evaluation::Evaluation,
    train::{self, Ablation, Lost, Part, Pictures, Task, TaskData},
};

/// What a classifier of texts does when its attention loses tokens, or pairs of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ablated {
    /// The probability with which each token or pair is lost.
    pub share: f64,
    /// What is left: the tokens themselves still reach the head.
    pub evaluation: Evaluation,
}

/// Evaluates the classifier in `path` on the test texts of `data` with its attention losing each of `shares`. Which tokens are
/// lost depends on `seed` and the text alone, which pairs on the other texts of the test part too; what one share loses a
/// larger one loses too.
///
/// # Errors
/// As [`run`]; [`crate::Error::Recipe`] for a share outside [0, 1]; [`crate::Error::Model`] for a mechanism whose queries and keys cannot be
/// masked apart, or that does not weigh pairs.
pub fn ablation(
    path: &Path,
    data: &TextDataset,
    lost: Lost,
    shares: &[f64],
    seed: u64,
    device: &Device,
) -> Result<Vec<Ablated>> {
    if let Some(share) = shares.iter().find(|share| !(0.0..=1.0).contains(*share)) {
        let problem = format!("is {share}, must be in [0, 1]");
        return Err(Error::Recipe { file: "ablation".into(), field: "share".into(), problem });
    }
    let mut checkpoint = Checkpoint::find(path)?;
    let task = data.restored(&mut checkpoint)?;
    let model = train::build_for(&task, &checkpoint.state.recipe, device)?;
    let model = checkpoint.load_weights(model)?;
    let ablated = |&share: &f64| {
        let evaluation = task.ablated(&model, Ablation { lost, share, seed })?;
        Ok(Ablated { share, evaluation })
    };
    shares.iter().map(ablated).collect()
}

/// Evaluates the run or the checkpoint in `path` on the test examples of `data`, on `device`, whichever it was trained on.
///
/// Of a run, the weights that its summary was made with: the best epoch's where the recipe stops early, else the newest
/// checkpoint's. Examples are prepared as in training: pictures by the same statistics, texts with the same vocabulary.
///
/// # Errors
/// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::Unfit`] when the model cannot be shown
/// the data: other classes, another shape than it was trained on.
pub fn run<D: TaskData>(path: &Path, data: &D, device: &Device) -> Result<(Checkpoint, Evaluation)> {
    let mut checkpoint = Checkpoint::find(path)?;
    let task = data.restored(&mut checkpoint)?;
    let evaluation = evaluate(&mut checkpoint, &task, device)?;
    Ok((checkpoint, evaluation))
}

/// As [`run`], with every picture resized to `side x side`, whatever size the model was trained on.
///
/// # Errors
/// As [`run`]; [`crate::Error::Model`] for a size that the model cannot be shown.
pub fn run_at(path: &Path, dataset: &PictureDataset, side: usize, device: &Device) -> Result<(Checkpoint, Evaluation)> {
    let mut checkpoint = Checkpoint::find(path)?;
    let task = Pictures::restored_at_any_size(&dataset.resized(side), &checkpoint)?;
    let evaluation = evaluate(&mut checkpoint, &task, device)?;
    Ok((checkpoint, evaluation))
}

/// As [`run`], with up to `tokens` tokens of each text, or windows of as many in plain text, however many the model was trained on.
///
/// # Errors
/// As [`run`]; [`crate::Error::OtherModel`] for a model that was not trained on texts; [`crate::Error::Recipe`] for more tokens
/// than there are learned positions, [`crate::Error::Model`] for more than its attention takes.
pub fn run_of_tokens<D: TaskData>(
    path: &Path,
    data: &D,
    tokens: usize,
    device: &Device,
) -> Result<(Checkpoint, Evaluation)> {
    let mut checkpoint = Checkpoint::find(path)?;
    let unasked = checkpoint.state.expects.unasked(path, "texts");
    *checkpoint.state.expects.tokens_mut().ok_or(unasked)? = tokens;
    let task = data.restored(&mut checkpoint)?;
    let evaluation = evaluate(&mut checkpoint, &task, device)?;
    Ok((checkpoint, evaluation))
}

fn evaluate<T: Task>(checkpoint: &mut Checkpoint, task: &T, device: &Device) -> Result<Evaluation> {
    let model = train::build_for(task, &checkpoint.state.recipe, device)?;
    task.evaluate(&checkpoint.load_weights(model)?, Part::Test)
}
