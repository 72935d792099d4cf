//! Pairs of documents as a task: both as tokens, the two towers of one encoder, their loss and judgement.

use std::sync::Arc;

use burn::tensor::{Bytes, Device, Tensor};
use resolvent::{attention::MultiHeadAttention, models::TextMatcher};
use resolvent_kernels::mechanism::KappaRule;

use super::{
    Errors, PackedWeights, Part, Samples, Seen, Task, TaskData, TokenInputs, device_of, packed_weights,
    picture_model::block_attentions,
    samples::beginning,
    soft_cross_entropy,
    task::divided,
    texts::{BATCH_TOKENS, check_classifies, check_known, label_targets, text_config, token_inputs, vocabulary_part},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, TextExpectation},
    data::{BatchPlan, Batches, Encoded, MatchDataset, MatchSplit, Padded, Vocabulary, by_budget, by_length},
    evaluation::{Evaluation, Tally, check_labels},
};

/// Tokens of the longer documents per batch of an evaluation, padding included: there are two in every pair.
const LONGER_TOKENS: usize = BATCH_TOKENS / 2;

/// The pairs of a run, as tokens.
#[derive(Debug, Clone)]
pub struct Matches {
    name: String,
    vocabulary: Arc<Vocabulary>,
    train: Arc<Labelled>,
    watched: Arc<Labelled>,
    test: Arc<Labelled>,
    brings_validation: bool,
    expects: TextExpectation,
}

/// Pairs of documents as tokens, with their labels.
#[derive(Debug)]
struct Labelled {
    first: Encoded,
    second: Encoded,
    /// Of the longer document of each pair.
    lengths: Vec<usize>,
    labels: Vec<u32>,
}

/// Pairs of nearly the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct MatchBatch {
    /// The first document of each pair.
    pub first: Padded,
    /// The second one.
    pub second: Padded,
    /// The class of each pair.
    pub labels: Vec<u32>,
}

/// A batch as tensors.
#[derive(Debug, Clone)]
pub struct MatchInputs {
    first: TokenInputs,
    second: TokenInputs,
    /// `[pairs, classes]`.
    targets: Tensor<2>,
}

impl Labelled {
    fn new(split: &MatchSplit, vocabulary: &Vocabulary, max_tokens: usize) -> Result<Arc<Self>> {
        let [first, second] = [&split.first, &split.second].map(|texts| vocabulary.encode(texts, max_tokens));
        let (first, second) = (first?, second?);
        let lengths = (0..first.len()).map(|index| first.tokens(index).max(second.tokens(index))).collect();
        Ok(Arc::new(Self { first, second, lengths, labels: split.labels.clone() }))
    }

    fn batch(&self, indices: &[usize]) -> MatchBatch {
        let padded = |texts: &Encoded| Padded::new(&indices.iter().map(|&index| texts.ids(index)).collect::<Vec<_>>());
        MatchBatch {
            first: padded(&self.first),
            second: padded(&self.second),
            labels: indices.iter().map(|&index| self.labels[index]).collect(),
        }
    }

    /// What `model` says of the pairs with these numbers, `[pairs, classes]`.
    fn logits(&self, model: &TextMatcher, indices: &[usize], device: &Device) -> Result<Tensor<2>> {
        let MatchBatch { first, second, .. } = self.batch(indices);
        Ok(model.try_forward(token_inputs(first, device), token_inputs(second, device))?)
    }
}

impl TaskData for MatchDataset {
    type Task = Matches;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Text)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Matches> {
        let (train, _) = self.divided(recipe);
        let texts = train.first.iter().chain(&train.second).map(String::as_str);
        let vocabulary = Vocabulary::learn(texts, &recipe.text)?;
        let expects = TextExpectation::new(&self.classes, recipe, &vocabulary);
        Matches::new(self, recipe, vocabulary, expects)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Matches> {
        let Expectation::Matches(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.cannot_begin(&self.name, Expectation::MATCHES));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let (classes, max_tokens) = (self.classes.clone(), recipe.text.max_tokens);
        let task = Matches::new(self, recipe, vocabulary, TextExpectation { classes, max_tokens, ..expects })?;
        check_known(checkpoint, &self.identity(), [&task.train.first, &task.train.second])?;
        Ok(task)
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Matches> {
        let Expectation::Matches(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.refuses(&self.name, Expectation::MATCHES));
        };
        expects.check(&self.name, &self.classes)?;
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let task = Matches::new(self, &checkpoint.state.recipe, vocabulary, expects)?;
        check_known(checkpoint, &self.identity(), [&task.test.first, &task.test.second])?;
        Ok(task)
    }
}

impl MatchDataset {
    fn divided(&self, recipe: &Recipe) -> (MatchSplit, MatchSplit) {
        divided([&self.train, &self.test], self.validation.as_ref(), recipe, MatchSplit::hold_out)
    }
}

impl Matches {
    fn new(data: &MatchDataset, recipe: &Recipe, vocabulary: Vocabulary, expects: TextExpectation) -> Result<Self> {
        let encode = |split: &MatchSplit| {
            let sides = [split.first.len(), split.second.len()];
            if sides != [split.len(); 2] {
                let ([first, second], labels) = (sides, split.len());
                let problem = format!(
                    "a part of it has {first} first documents, {second} second ones and {labels} labels; give as many of each"
                );
                return Err(Error::Unfit { name: data.name.clone(), problem });
            }
            check_labels(&data.name, data.classes.len(), &split.labels)?;
            Labelled::new(split, &vocabulary, expects.max_tokens)
        };
        let (train, watched) = data.divided(recipe);
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
    pub(crate) fn judge(&self, model: &TextMatcher, part: Part) -> Result<Tally<'_>> {
        let split = if part == Part::Test { &self.test } else { &self.watched };
        let (mut tally, device) = (Tally::new(&self.expects.classes), device_of(model));
        tally.cut = split.first.cut() + split.second.cut();
        for indices in by_budget(&split.lengths, LONGER_TOKENS) {
            crate::stop::check()?;
            let labels: Vec<u32> = indices.iter().map(|&index| split.labels[index]).collect();
            tally.add_batch(split.logits(model, &indices, &device)?, &labels)?;
        }
        Ok(tally)
    }

    /// The beginnings of both documents of the test pair `index`.
    fn shown(&self, index: usize) -> Result<Seen> {
        let start = |texts: &Encoded| Ok::<_, Error>(beginning(&self.vocabulary.decode(texts.ids(index))?));
        Ok(Seen::Text(format!("first: {} second: {}", start(&self.test.first)?, start(&self.test.second)?)))
    }
}

impl Task for Matches {
    type Model = TextMatcher;
    type Batch = MatchBatch;
    type Inputs = MatchInputs;

    fn train_len(&self) -> usize {
        self.train.labels.len()
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn notes(&self) -> Vec<String> {
        let sides = [
            (&self.train.first, "first training documents"),
            (&self.train.second, "second training documents"),
            (&self.test.first, "first test documents"),
            (&self.test.second, "second test documents"),
        ];
        sides.iter().filter_map(|(texts, what)| texts.note(what, self.expects.max_tokens)).collect()
    }

    fn expects(&self) -> Expectation {
        Expectation::Matches(self.expects.clone())
    }

    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        vocabulary_part(&self.vocabulary)
    }

    fn attentions(model: &mut TextMatcher) -> Vec<(String, &mut MultiHeadAttention)> {
        block_attentions(&mut model.encoder.blocks)
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<TextMatcher> {
        check_classifies(recipe, &self.name, Expectation::MATCHES)?;
        let classes = self.expects.classes.len();
        let config = text_config(recipe, &self.name, self.vocabulary.len(), recipe.text.max_tokens)?;
        Ok(config.try_init_matcher(classes, device)?)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<MatchBatch>> {
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        let (pairs, batches) = (self.train.clone(), by_length(&self.train.lengths, &plan, epoch));
        Ok(Batches::new(first..batches.len(), move |position| Ok(pairs.batch(&batches[position]))))
    }

    fn len_of(batch: &MatchBatch) -> usize {
        batch.labels.len()
    }

    fn inputs(&self, recipe: &Recipe, batch: MatchBatch, device: &Device) -> MatchInputs {
        let classes = self.expects.classes.len();
        MatchInputs {
            first: token_inputs(batch.first, device),
            second: token_inputs(batch.second, device),
            targets: label_targets(&batch.labels, classes, recipe.regularisation.label_smoothing, device),
        }
    }

    fn loss(&self, model: &TextMatcher, inputs: MatchInputs) -> Result<Tensor<1>> {
        Ok(soft_cross_entropy(model.try_forward(inputs.first, inputs.second)?, inputs.targets))
    }

    fn predict(&self, model: &TextMatcher, inputs: MatchInputs) -> Result<()> {
        model.try_forward(inputs.first, inputs.second)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &TextMatcher, part: Part) -> Result<Evaluation> {
        Ok(self.judge(model, part)?.finish())
    }

    fn samples(&self, _recipe: &Recipe, model: &TextMatcher) -> Result<Option<Samples>> {
        let (test, device) = (&self.test, device_of(model));
        let answer = |pairs: &[usize]| test.logits(model, pairs, &device);
        let show = |pair| self.shown(pair);
        let classes = &self.expects.classes;
        let errors = Errors::of_test(classes, &test.lengths, &test.labels, LONGER_TOKENS, answer, show)?;
        Ok(Some(Samples::Errors(errors)))
    }

    fn packed(model: &TextMatcher) -> Result<Option<PackedWeights>> {
        packed_weights(&model.encoder.blocks)
    }
}
