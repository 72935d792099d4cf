//! Associative recall as a task: sequences, the language model, a loss on the answers alone, accuracy per query.

use std::{sync::Arc, time::Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use resolvent::{attention::MultiHeadAttention, models::LanguageModel};
use resolvent_kernels::mechanism::KappaRule;

use super::{
    Corpus, PackedWeights, Part, Task, TaskData, device_of, judged::Judged, language_config, packed_weights,
    pictures::wrong_kind, tokens::BATCH_TOKENS,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, RecallExpectation},
    data::{BatchPlan, Batches, RecallDataset, RecallSplit},
    evaluation::Evaluation,
    recipe::ModelRecipe,
};

/// The sequences of a run.
#[derive(Debug, Clone)]
pub struct Recall {
    name: String,
    tokens: usize,
    train: Arc<RecallSplit>,
    watched: Arc<RecallSplit>,
    test: Arc<RecallSplit>,
    brings_validation: bool,
    expects: RecallExpectation,
}

/// Sequences of one length, and what is asked in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecallBatch {
    /// `[sequences, tokens]`.
    ids: Vec<i32>,
    sequences: usize,
    /// Where the queries are, counted through all sequences.
    places: Vec<i32>,
    /// The answer to each.
    answers: Vec<i32>,
}

/// A batch as tensors.
#[derive(Debug, Clone)]
pub struct RecallInputs {
    /// `[sequences, tokens]`.
    ids: Tensor<2, Int>,
    /// `[queries]`.
    places: Tensor<1, Int>,
    /// `[1, queries]`.
    answers: Tensor<2, Int>,
    smoothing: f64,
}

impl RecallBatch {
    fn new(split: &RecallSplit, sequences: &[usize], tokens: usize) -> Self {
        let (mut ids, mut places, mut answers) = (Vec::with_capacity(sequences.len() * tokens), Vec::new(), Vec::new());
        for &sequence in sequences {
            let all = sequence * tokens..(sequence + 1) * tokens;
            for (&id, &answer) in split.ids[all.clone()].iter().zip(&split.answers[all]) {
                if answer > 0 {
                    places.push(ids.len() as i32);
                    answers.push(answer as i32);
                }
                ids.push(id as i32);
            }
        }
        Self { ids, sequences: sequences.len(), places, answers }
    }

    fn inputs(self, smoothing: f64, device: &Device) -> RecallInputs {
        let (shape, queries) = ([self.sequences, self.ids.len() / self.sequences], self.answers.len());
        RecallInputs {
            ids: Tensor::from_data(TensorData::new(self.ids, shape), device),
            places: Tensor::from_data(TensorData::new(self.places, [queries]), device),
            answers: Tensor::from_data(TensorData::new(self.answers, [1, queries]), device),
            smoothing,
        }
    }
}

impl TaskData for RecallDataset {
    type Task = Recall;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Text)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Recall> {
        Recall::new(self, recipe)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Recall> {
        match &checkpoint.state.expects {
            Expectation::Recall(expects) => expects.check(&self.name, self.vocabulary)?,
            other => return Err(other.cannot_begin(&self.name, Expectation::RECALL)),
        }
        self.task(recipe)
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Recall> {
        match &checkpoint.state.expects {
            Expectation::Recall(expects) => expects.check(&self.name, self.vocabulary)?,
            other => return Err(other.refuses(&self.name, Expectation::RECALL)),
        }
        self.task(&checkpoint.state.recipe)
    }
}

impl Recall {
    fn new(data: &RecallDataset, recipe: &Recipe) -> Result<Self> {
        let ModelRecipe::Language(model) = &recipe.model else {
            return Err(wrong_kind(&data.name, Expectation::RECALL, "language"));
        };
        let unfit = |problem: String| Err(Error::Unfit { name: data.name.clone(), problem });
        if data.tokens > model.context {
            let (tokens, context) = (data.tokens, model.context);
            return unfit(format!(
                "its sequences have {tokens} tokens, the model reads {context}; set `model.context` to {tokens}"
            ));
        }
        if recipe.regularisation.hold_out > 0.0 && data.validation.is_none() {
            return unfit("nothing is held out of generated sequences; give it a validation part with `val=`".into());
        }
        let test = Arc::new(data.test.clone());
        Ok(Self {
            name: data.name.clone(),
            tokens: data.tokens,
            train: Arc::new(data.train.clone()),
            watched: data.validation.as_ref().map_or_else(|| test.clone(), |validation| Arc::new(validation.clone())),
            test,
            brings_validation: data.validation.is_some(),
            expects: RecallExpectation { vocabulary: data.vocabulary },
        })
    }
}

impl Task for Recall {
    type Model = LanguageModel;
    type Batch = RecallBatch;
    type Inputs = RecallInputs;

    fn train_len(&self) -> usize {
        self.train.ids.len() / self.tokens
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn expects(&self) -> Expectation {
        Expectation::Recall(self.expects.clone())
    }

    fn attentions(model: &mut LanguageModel) -> Vec<(String, &mut MultiHeadAttention)> {
        Corpus::attentions(model)
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<LanguageModel> {
        Ok(language_config(recipe, &self.name, self.expects.vocabulary)?.try_init(device)?)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<RecallBatch>> {
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        let (split, tokens) = (self.train.clone(), self.tokens);
        Ok(plan
            .epoch(self.train_len(), epoch, first, move |_, sequences| Ok(RecallBatch::new(&split, sequences, tokens))))
    }

    fn len_of(batch: &RecallBatch) -> usize {
        batch.sequences
    }

    fn terms_of(batch: &RecallBatch) -> usize {
        batch.answers.len()
    }

    fn inputs(&self, recipe: &Recipe, batch: RecallBatch, device: &Device) -> RecallInputs {
        batch.inputs(recipe.regularisation.label_smoothing, device)
    }

    fn loss(&self, model: &LanguageModel, inputs: RecallInputs) -> Result<Tensor<1>> {
        Ok(judged(model, inputs)?.loss())
    }

    fn predict(&self, model: &LanguageModel, inputs: RecallInputs) -> Result<()> {
        model.forward_at(inputs.ids, inputs.places)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &LanguageModel, part: Part) -> Result<Evaluation> {
        let split = if part == Part::Test { &self.test } else { &self.watched };
        let (began, device, sequences) = (Instant::now(), device_of(model), split.ids.len() / self.tokens);
        let (mut loss, mut right, mut queries) = (0.0, 0.0, 0.0);
        let all: Vec<usize> = (0..sequences).collect();
        for chosen in all.chunks((BATCH_TOKENS / self.tokens).max(1)) {
            crate::stop::check()?;
            let batch = RecallBatch::new(split, chosen, self.tokens);
            let count = batch.answers.len() as f64;
            let judged = judged(model, batch.inputs(0.0, &device))?;
            right += judged.right();
            loss += f64::from(judged.loss().into_scalar::<f32>()) * count;
            queries += count;
        }
        Ok(Evaluation { accuracy: Some(right / queries), ..Evaluation::new(sequences, loss / queries, began) })
    }

    fn packed(model: &LanguageModel) -> Result<Option<PackedWeights>> {
        packed_weights(&model.blocks)
    }
}

fn judged(model: &LanguageModel, inputs: RecallInputs) -> Result<Judged> {
    let logits = model.forward_at(inputs.ids, inputs.places)?;
    Ok(Judged::new(logits.unsqueeze_dim(0), inputs.answers, None, inputs.smoothing))
}
