//! Labelled texts, or pairs of them, as a task: tokens, the classifier, its loss and judgement.

use std::sync::Arc;

use burn::tensor::{Bytes, Device, Tensor};
use resolvent::attention::MultiHeadAttention;
use resolvent_kernels::mechanism::KappaRule;

use super::{
    Errors, PackedWeights, Part, Samples, Seen, Task, TaskData, TokenInputs, device_of, packed_weights,
    picture_model::block_attentions,
    samples::beginning,
    soft_cross_entropy,
    task::divided,
    text_model::{ExampleTexts, check_classifies, label_targets, text_config},
    tokens::{BATCH_TOKENS, Sides, check_known, token_inputs, vocabulary_part},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, TextExpectation},
    data::{Batches, Padded, TextDataset, TextSplit, Vocabulary, by_budget},
    evaluation::{Evaluation, Tally, check_labels},
};

/// The examples of a run, each of `N` texts, as tokens.
#[derive(Debug, Clone)]
pub struct Texts<const N: usize = 1> {
    name: String,
    vocabulary: Arc<Vocabulary>,
    train: Arc<Labelled<N>>,
    watched: Arc<Labelled<N>>,
    test: Arc<Labelled<N>>,
    brings_validation: bool,
    expects: TextExpectation,
}

/// The pairs of documents of a run, as tokens.
pub type Matches = Texts<2>;

/// Examples as tokens, with their labels.
#[derive(Debug)]
struct Labelled<const N: usize> {
    texts: Sides<N>,
    labels: Vec<u32>,
}

/// Examples of nearly the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct TextBatch<const N: usize = 1> {
    /// The tokens of the first texts, of the second ones, and so on.
    pub tokens: [Padded; N],
    /// The class of each example.
    pub labels: Vec<u32>,
}

impl<const N: usize> Labelled<N> {
    fn batch(&self, indices: &[usize]) -> TextBatch<N> {
        let labels = indices.iter().map(|&index| self.labels[index]).collect();
        TextBatch { tokens: self.texts.padded(indices), labels }
    }
}

impl<const N: usize> TaskData for TextDataset<N>
where
    Self: ExampleTexts<N>,
{
    type Task = Texts<N>;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Text)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Texts<N>> {
        let vocabulary = match &self.words {
            Some(words) if recipe.text.tokenizer.is_none() => Vocabulary::of_words(words)?,
            _ => {
                let (train, _) = self.divided(recipe)?;
                Vocabulary::learn(train.texts.iter().flatten().map(String::as_str), &recipe.text)?
            }
        };
        let expects = TextExpectation::new(&self.classes, recipe, &vocabulary);
        Texts::new(self, recipe, vocabulary, expects)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Texts<N>> {
        let Some(expects) = checkpoint.state.expects.of_texts(Self::EXAMPLES) else {
            return Err(checkpoint.state.expects.cannot_begin(&self.name, Self::EXAMPLES));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let (classes, max_tokens) = (self.classes.clone(), recipe.text.max_tokens);
        let task = Texts::new(self, recipe, vocabulary, TextExpectation { classes, max_tokens, ..expects })?;
        check_known(checkpoint, &self.identity(), &task.train.texts)?;
        Ok(task)
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Texts<N>> {
        let Some(expects) = checkpoint.state.expects.of_texts(Self::EXAMPLES) else {
            return Err(checkpoint.state.expects.refuses(&self.name, Self::EXAMPLES));
        };
        expects.check(&self.name, &self.classes)?;
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let task = Texts::new(self, &checkpoint.state.recipe, vocabulary, expects)?;
        check_known(checkpoint, &self.identity(), &task.test.texts)?;
        Ok(task)
    }
}

impl<const N: usize> TextDataset<N>
where
    Self: ExampleTexts<N>,
{
    fn divided(&self, recipe: &Recipe) -> Result<(TextSplit<N>, TextSplit<N>)> {
        for split in [Some(&self.train), self.validation.as_ref(), Some(&self.test)].into_iter().flatten() {
            self.check_counts(split)?;
        }
        Ok(divided([&self.train, &self.test], self.validation.as_ref(), recipe, TextSplit::hold_out))
    }

    /// Checks that every example of `split` has all of its texts and a label.
    fn check_counts(&self, split: &TextSplit<N>) -> Result<()> {
        if split.texts.iter().all(|texts| texts.len() == split.len()) {
            return Ok(());
        }
        let called = |index| if index == 0 { Self::TEXTS } else { "ones" };
        let counts = split.texts.iter().zip(Self::WHICH).enumerate();
        let counts: Vec<_> =
            counts.map(|(index, (texts, which))| format!("{} {which}{}", texts.len(), called(index))).collect();
        let problem =
            format!("a part of it has {} and {} labels; give as many of each", counts.join(", "), split.labels.len());
        Err(Error::Unfit { name: self.name.clone(), problem })
    }
}

impl<const N: usize> Texts<N>
where
    TextDataset<N>: ExampleTexts<N>,
{
    fn new(data: &TextDataset<N>, recipe: &Recipe, vocabulary: Vocabulary, expects: TextExpectation) -> Result<Self> {
        let encode = |split: &TextSplit<N>| {
            check_labels(&data.name, data.classes.len(), &split.labels)?;
            let texts = Sides::new(split.texts.each_ref(), &vocabulary, expects.max_tokens)?;
            Ok::<_, Error>(Arc::new(Labelled { texts, labels: split.labels.clone() }))
        };
        let (train, watched) = data.divided(recipe)?;
        let test = encode(&data.test)?;
        Ok(Self {
            name: data.name.clone(),
            train: encode(&train)?,
            watched: if watched == data.test { test.clone() } else { encode(&watched)? },
            test,
            brings_validation: data.validation.is_some(),
            vocabulary: Arc::new(vocabulary),
            expects,
        })
    }

    /// The answers of `model` on a part of the data.
    pub(crate) fn judge(&self, model: &<Self as Task>::Model, part: Part) -> Result<Tally<'_>> {
        let device = device_of(model);
        self.judge_by(part, |_, tokens| TextDataset::<N>::answer(model, inputs(tokens, &device)))
    }

    /// The answers `[examples, classes]` that `answer` gives to the examples of a part with these numbers and tokens.
    pub(super) fn judge_by(
        &self,
        part: Part,
        answer: impl Fn(&[usize], [Padded; N]) -> Result<Tensor<2>>,
    ) -> Result<Tally<'_>> {
        let split = if part == Part::Test { &self.test } else { &self.watched };
        let mut tally = Tally::new(&self.expects.classes);
        tally.cut = split.texts.cut();
        for indices in by_budget(&split.texts.lengths, Self::BATCH_TOKENS) {
            crate::stop::check()?;
            let TextBatch { tokens, labels } = split.batch(&indices);
            tally.add_batch(answer(&indices, tokens)?, &labels)?;
        }
        Ok(tally)
    }

    /// Tokens of the longest texts of the examples of a batch of an evaluation, padding included.
    const BATCH_TOKENS: usize = BATCH_TOKENS / N;
}

fn inputs<const N: usize>(tokens: [Padded; N], device: &Device) -> [TokenInputs; N] {
    tokens.map(|tokens| token_inputs(tokens, device))
}

impl<const N: usize> Task for Texts<N>
where
    TextDataset<N>: ExampleTexts<N>,
{
    type Model = <TextDataset<N> as ExampleTexts<N>>::Model;
    type Batch = TextBatch<N>;
    type Inputs = ([TokenInputs; N], Tensor<2>);

    fn train_len(&self) -> usize {
        self.train.labels.len()
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn notes(&self) -> Vec<String> {
        let parts = [(&self.train, "training"), (&self.test, "test")];
        let of = |(split, part): (&Arc<Labelled<N>>, _)| {
            let called = TextDataset::<N>::WHICH.map(|which| format!("{which}{part} {}", TextDataset::<N>::TEXTS));
            split.texts.notes(called, self.expects.max_tokens)
        };
        parts.into_iter().flat_map(of).collect()
    }

    fn expects(&self) -> Expectation {
        TextDataset::<N>::EXPECTS(self.expects.clone())
    }

    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        vocabulary_part(&self.vocabulary)
    }

    fn attentions(model: &mut Self::Model) -> Vec<(String, &mut MultiHeadAttention)> {
        block_attentions(&mut TextDataset::<N>::encoder(model).blocks)
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<Self::Model> {
        check_classifies(recipe, &self.name, TextDataset::<N>::EXAMPLES)?;
        let config = text_config(recipe, &self.name, self.vocabulary.len(), recipe.text.max_tokens)?;
        TextDataset::<N>::model(&config, self.expects.classes.len(), device)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<TextBatch<N>>> {
        let examples = self.train.clone();
        Ok(self.train.texts.epoch(recipe, epoch, first, move |indices| examples.batch(indices)))
    }

    fn len_of(batch: &TextBatch<N>) -> usize {
        batch.labels.len()
    }

    fn inputs(&self, recipe: &Recipe, batch: TextBatch<N>, device: &Device) -> Self::Inputs {
        let (classes, smoothing) = (self.expects.classes.len(), recipe.regularisation.label_smoothing);
        (inputs(batch.tokens, device), label_targets(&batch.labels, classes, smoothing, device))
    }

    fn loss(&self, model: &Self::Model, (texts, targets): Self::Inputs) -> Result<Tensor<1>> {
        Ok(soft_cross_entropy(TextDataset::<N>::answer(model, texts)?, targets))
    }

    fn predict(&self, model: &Self::Model, (texts, _): Self::Inputs) -> Result<()> {
        TextDataset::<N>::answer(model, texts)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &Self::Model, part: Part) -> Result<Evaluation> {
        Ok(self.judge(model, part)?.finish())
    }

    fn samples(&self, _recipe: &Recipe, model: &Self::Model) -> Result<Option<Samples>> {
        let (test, device) = (&self.test, device_of(model));
        let answer = |examples: &[usize]| TextDataset::<N>::answer(model, inputs(test.texts.padded(examples), &device));
        let show = |example| {
            let texts = test.texts.texts.iter().zip(TextDataset::<N>::WHICH).map(|(texts, which)| {
                let text = beginning(&self.vocabulary.decode(texts.ids(example))?);
                Ok(if which.is_empty() { text } else { format!("{}: {text}", which.trim_end()) })
            });
            Ok(Seen::Text(texts.collect::<Result<Vec<_>>>()?.join(" ")))
        };
        let classes = &self.expects.classes;
        let errors = Errors::of_test(classes, &test.texts.lengths, &test.labels, Self::BATCH_TOKENS, answer, show)?;
        Ok(Some(Samples::Errors(errors)))
    }

    fn packed(model: &Self::Model) -> Result<Option<PackedWeights>> {
        packed_weights(&TextDataset::<N>::encoder(&mut model.clone()).blocks)
    }
}
