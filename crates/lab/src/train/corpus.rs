//! Plain text as a task: windows of tokens, the language model, its loss and judgement.

use std::{ops::ControlFlow, path::Path, sync::Arc, time::Instant};

use burn::tensor::{Bytes, Device, Int, Tensor, TensorData};
use rand::RngExt;
use resolvent::{
    attention::MultiHeadAttention,
    models::{LanguageConfig, LanguageModel, Positions, Sampling, TextConfig},
};
use resolvent_kernels::mechanism::KappaRule;

use super::{
    Continuation, PackedWeights, Part, Samples, Task, TaskData, device_of,
    judged::Judged,
    packed_weights,
    picture_model::block_attentions,
    pictures::wrong_kind,
    samples::SHOWN,
    tokens::{BATCH_TOKENS, vocabulary_part},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, CorpusExpectation, DataIdentity, Expectation},
    data::{
        BatchPlan, Batches, CorpusDataset, Vocabulary,
        rng::{Purpose, stream},
    },
    evaluation::{Evaluation, Prediction},
    generate::Generator,
    recipe::{LanguageRecipe, ModelRecipe},
    stats::spread,
};

/// Tokens of the test text that a sample goes on from, at most.
const PROMPT: usize = 32;
/// Tokens of a sample.
const WRITTEN: usize = 64;

/// The text of a run, as tokens.
#[derive(Debug, Clone)]
pub struct Corpus {
    name: String,
    vocabulary: Arc<Vocabulary>,
    /// Bytes of each token of the vocabulary.
    bytes: Arc<Vec<usize>>,
    train: Arc<Vec<u32>>,
    validation: Arc<Vec<u32>>,
    test: Arc<Vec<u32>>,
    expects: CorpusExpectation,
}

/// Neighbouring tokens of a text, from several places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowBatch {
    /// `[windows, width + 1]`: what is read, and one token more.
    ids: Vec<i32>,
    windows: usize,
}

/// A batch as tensors.
#[derive(Debug, Clone)]
pub struct WindowInputs {
    /// `[windows, width]`.
    read: Tensor<2, Int>,
    /// `[windows, width]`: what follows each.
    answers: Tensor<2, Int>,
    smoothing: f64,
}

impl WindowBatch {
    /// The windows of `width` tokens that begin at `starts` of `text`.
    fn new(text: &[u32], starts: &[usize], width: usize) -> Self {
        let ids = starts.iter().flat_map(|&start| &text[start..=start + width]).map(|&id| id as i32).collect();
        Self { ids, windows: starts.len() }
    }

    fn inputs(self, smoothing: f64, device: &Device) -> WindowInputs {
        let width = self.ids.len() / self.windows - 1;
        let ids = Tensor::<2, Int>::from_data(TensorData::new(self.ids, [self.windows, width + 1]), device);
        WindowInputs { read: ids.clone().narrow(1, 0, width), answers: ids.narrow(1, 1, width), smoothing }
    }
}

/// Windows of `width` tokens, and what follows each, in a text of `tokens` tokens, wherever below `width` the first begins.
fn windows(tokens: usize, width: usize) -> usize {
    (tokens / width).saturating_sub(1)
}

impl TaskData for CorpusDataset {
    type Task = Corpus;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Text)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Corpus> {
        let ModelRecipe::Language(model) = &recipe.model else {
            return Err(wrong_kind(&self.name, "plain text", "language"));
        };
        let vocabulary = Vocabulary::learn(self.train.split_inclusive('\n'), &recipe.text)?;
        let fingerprint = format!("{:016x}", vocabulary.fingerprint());
        let expects = CorpusExpectation { context: model.context, vocabulary: vocabulary.len(), fingerprint };
        Corpus::new(self, vocabulary, recipe.text.tokenizer.as_deref(), expects)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Corpus> {
        let ModelRecipe::Language(model) = &recipe.model else {
            return Err(wrong_kind(&self.name, "plain text", "language"));
        };
        let Expectation::Corpus(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.cannot_begin(&self.name, "plain text"));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let tokenizer = checkpoint.state.recipe.text.tokenizer.as_deref();
        Corpus::new(self, vocabulary, tokenizer, CorpusExpectation { context: model.context, ..expects })
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Corpus> {
        let Expectation::Corpus(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.refuses(&self.name, "plain text"));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let corpus = Corpus::new(self, vocabulary, checkpoint.state.recipe.text.tokenizer.as_deref(), expects)?;
        if let ModelRecipe::Language(model) = &mut checkpoint.state.recipe.model {
            corpus.set_context(model)?;
        }
        Ok(corpus)
    }
}

impl Corpus {
    /// `tokenizer` is the file of the recipe's own, where the vocabulary is that.
    fn new(
        data: &CorpusDataset,
        vocabulary: Vocabulary,
        tokenizer: Option<&Path>,
        expects: CorpusExpectation,
    ) -> Result<Self> {
        let unfit = |problem: String| Error::Unfit { name: data.name.clone(), problem };
        // In small letters where the recipe says so; a tokenizer that changes texts would say nothing.
        let kept = tokenizer.is_none() || vocabulary.keeps_text();
        let bytes = vocabulary.bytes_of_tokens().filter(|_| kept).ok_or_else(|| {
            unfit(match tokenizer {
                Some(file) => format!(
                    "its text could not be given back from the tokens of `text.tokenizer` ({}), which are not made of bytes, or of a \
                     text with letters or spaces changed; name a byte-level one, such as GPT-2's, or leave it out and set `text.tokens` to \
                     bytes or byte-bpe",
                    file.display()
                ),
                None => "its text could not be given back from words and pieces that leave some out; set `text.tokens` to bytes or \
                         byte-bpe"
                    .into(),
            })
        })?;
        let encode = |text: &str, part: &str| {
            let ids = vocabulary.encode_whole(text)?;
            match ids.len() {
                0 | 1 => Err(unfit(format!("its {part} part has fewer than two tokens; give more text"))),
                _ => Ok(Arc::new(ids)),
            }
        };
        Ok(Self {
            name: data.name.clone(),
            train: encode(&data.train, "training")?,
            validation: encode(&data.validation, "validation")?,
            test: encode(&data.test, "test")?,
            vocabulary: Arc::new(vocabulary),
            bytes: Arc::new(bytes),
            expects,
        })
    }

    /// Gives a model the context of the windows that it is to be shown, where it was trained on others; of the test text's length
    /// at most, since clusters are laid out for the context.
    ///
    /// # Errors
    /// [`Error::Recipe`] for longer windows than it has learned positions for.
    fn set_context(&self, model: &mut LanguageRecipe) -> Result<()> {
        let (asked, trained) = (self.expects.context, model.context);
        if asked > trained && model.positions == Positions::Learned {
            let problem =
                format!("is {trained}, and its positions are learned: none is there for windows of {asked} tokens");
            return Err(Error::Recipe { file: "recipe".into(), field: "model.context".into(), problem });
        }
        if asked != trained && model.positions == Positions::Rotary {
            model.context = asked.min(self.test.len() - 1);
        }
        Ok(())
    }

    /// Windows side by side that together predict every token of `text` but the first, with the number of tokens of each batch.
    fn whole<'a>(&'a self, text: &'a [u32]) -> impl Iterator<Item = WindowBatch> + 'a {
        let (width, predicted) = (self.expects.context, text.len() - 1);
        let starts: Vec<usize> = (0..predicted / width).map(|window| window * width).collect();
        let rest = predicted % width;
        let last = (rest > 0).then(|| WindowBatch::new(text, &[predicted - rest], rest));
        let side_by_side = (BATCH_TOKENS / 4 / width).max(1);
        let batches: Vec<Vec<usize>> = starts.chunks(side_by_side).map(<[usize]>::to_vec).collect();
        batches.into_iter().map(move |starts| WindowBatch::new(text, &starts, width)).chain(last)
    }
}

impl Task for Corpus {
    type Model = LanguageModel;
    type Batch = WindowBatch;
    type Inputs = WindowInputs;

    fn train_len(&self) -> usize {
        windows(self.train.len(), self.expects.context)
    }

    fn brings_validation(&self) -> bool {
        true
    }

    fn notes(&self) -> Vec<String> {
        let [train, validation, test] = [&self.train, &self.validation, &self.test].map(|ids| ids.len());
        let bytes = self.train.iter().map(|&id| self.bytes[id as usize]).sum::<usize>() as f64;
        vec![format!(
            "{train} tokens to learn from ({:.2} bytes each, a vocabulary of {}), {validation} to validate on, {test} to test on; \
             an epoch has {} windows of {}",
            bytes / train as f64,
            self.vocabulary.len(),
            self.train_len(),
            self.expects.context
        )]
    }

    fn expects(&self) -> Expectation {
        Expectation::Corpus(self.expects.clone())
    }

    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        vocabulary_part(&self.vocabulary)
    }

    fn attentions(model: &mut LanguageModel) -> Vec<(String, &mut MultiHeadAttention)> {
        block_attentions(&mut model.blocks)
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<LanguageModel> {
        Ok(language_config(recipe, &self.name, self.vocabulary.len())?.try_init(device)?)
    }

    /// Windows without overlap, in random order; where the first begins is another place in every epoch.
    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<WindowBatch>> {
        let (plan, width) = (BatchPlan::training(recipe.schedule.batch_size, recipe.seed), self.expects.context);
        let shift = stream(Purpose::Windows, recipe.seed, epoch, 0).random_range(0..width);
        let text = self.train.clone();
        Ok(plan.epoch(self.train_len(), epoch, first, move |_, windows| {
            let starts: Vec<usize> = windows.iter().map(|window| shift + window * width).collect();
            Ok(WindowBatch::new(&text, &starts, width))
        }))
    }

    fn len_of(batch: &WindowBatch) -> usize {
        batch.windows
    }

    fn inputs(&self, recipe: &Recipe, batch: WindowBatch, device: &Device) -> WindowInputs {
        batch.inputs(recipe.regularisation.label_smoothing, device)
    }

    fn loss(&self, model: &LanguageModel, inputs: WindowInputs) -> Result<Tensor<1>> {
        Ok(judged(model, inputs)?.loss())
    }

    fn predict(&self, model: &LanguageModel, inputs: WindowInputs) -> Result<()> {
        model.try_forward(inputs.read)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &LanguageModel, part: Part) -> Result<Evaluation> {
        let text = if part == Part::Test { &self.test } else { &self.validation };
        let (began, device) = (Instant::now(), device_of(model));
        let (mut loss, mut right, mut windows) = (0.0, 0.0, 0);
        for batch in self.whole(text) {
            crate::stop::check()?;
            windows += batch.windows;
            let count = (batch.ids.len() - batch.windows) as f64;
            let judged = judged(model, batch.inputs(0.0, &device))?;
            right += judged.right();
            loss += f64::from(judged.loss().into_scalar::<f32>()) * count;
        }
        let tokens = text.len() - 1;
        let bytes = text[1..].iter().map(|&id| self.bytes[id as usize]).sum();
        Ok(Evaluation {
            accuracy: Some(right / tokens as f64),
            prediction: Some(Prediction::new(loss, tokens, bytes)),
            ..Evaluation::new(windows, loss / tokens as f64, began)
        })
    }

    fn samples(&self, recipe: &Recipe, model: &LanguageModel) -> Result<Option<Samples>> {
        let prompt = (self.expects.context / 2).clamp(1, PROMPT).min(self.test.len() - 1);
        let places = self.test.len() - prompt;
        let writer = Generator::new(model.clone(), (*self.vocabulary).clone(), device_of(model));
        let told = |(seed, from): (usize, usize)| {
            let ids = &self.test[from..from + prompt];
            let follows = &self.test[from + prompt..(from + prompt + WRITTEN).min(self.test.len())];
            let mut said = |_: &str| match crate::stop::check() {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            let seed = recipe.seed.wrapping_add(seed as u64);
            let written = writer.go_on(ids.to_vec(), WRITTEN, &Sampling::default(), seed, &mut said)?;
            crate::stop::check()?;
            Ok(Continuation {
                prompt: self.vocabulary.decode(ids)?,
                continuation: written.text,
                original: self.vocabulary.decode(follows)?,
            })
        };
        let samples = spread(places, SHOWN).enumerate().map(told).collect::<Result<_>>()?;
        Ok(Some(Samples::Continuations(samples)))
    }

    fn packed(model: &LanguageModel) -> Result<Option<PackedWeights>> {
        packed_weights(&model.blocks)
    }
}

fn judged(model: &LanguageModel, inputs: WindowInputs) -> Result<Judged> {
    Ok(Judged::new(model.try_forward(inputs.read)?, inputs.answers, None, inputs.smoothing))
}

/// The recipe's language model for so many tokens; `name` is the data set.
pub(crate) fn language_config(recipe: &Recipe, name: &str, vocabulary: usize) -> Result<LanguageConfig> {
    let ModelRecipe::Language(m) = &recipe.model else {
        return Err(wrong_kind(name, "plain text", "language"));
    };
    let (mechanism, precision) = (recipe.mechanism.clone(), recipe.precision);
    let text = TextConfig { vocabulary, mechanism, precision, ..m.config.clone() };
    let layers = m.mechanisms(&recipe.mechanism);
    Ok(LanguageConfig { text, context: m.context, kv_heads: m.kv_heads, positions: m.positions, layers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_fit_wherever_the_first_begins() {
        for (tokens, width) in [(8, 4), (9, 4), (11, 4), (12, 4), (100, 7), (5, 1), (3, 8)] {
            let count = windows(tokens, width);
            let text: Vec<u32> = (0..tokens as u32).collect();
            for shift in 0..width {
                let starts: Vec<usize> = (0..count).map(|window| shift + window * width).collect();
                let batch = WindowBatch::new(&text, &starts, width);
                assert_eq!(batch.ids.len(), count * (width + 1));
            }
            assert!(tokens < (count + 2) * width, "as many as fit");
        }
    }
}
