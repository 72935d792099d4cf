//! Labelled texts as a task: tokens, the classifier, its loss and judgement.

use std::sync::Arc;

use burn::tensor::{Bool, Bytes, Device, Int, Tensor, TensorData};
use rand::RngExt;
use resolvent::{
    Dropout,
    attention::MultiHeadAttention,
    models::{TextClassifier, TextConfig, Visible},
};
use resolvent_kernels::mechanism::KappaRule;

use super::{
    Errors, PackedWeights, Part, Samples, Seen, Task, TaskData, device_of, packed_weights,
    picture_model::block_attentions,
    pictures::{smoothed, wrong_kind},
    samples::beginning,
    soft_cross_entropy,
    task::divided,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, TextExpectation, parts},
    data::{
        BatchPlan, Batches, Encoded, Padded, TextDataset, TextSplit, Vocabulary, by_budget, by_length,
        rng::{Purpose, stream},
    },
    evaluation::{Evaluation, Tally, check_labels},
    named,
    recipe::{ModelRecipe, TextModelRecipe},
};

/// Tokens per batch of an evaluation, padding included. Accuracy does not depend on it.
pub(crate) const BATCH_TOKENS: usize = 16_384;

/// Share of unknown tokens above which a data set is not one that the vocabulary was made for.
const MOST_UNKNOWN: f64 = 0.5;

/// The texts of a run, as tokens.
#[derive(Debug, Clone)]
pub struct Texts {
    name: String,
    vocabulary: Arc<Vocabulary>,
    train: Arc<Labelled>,
    watched: Arc<Labelled>,
    test: Arc<Labelled>,
    brings_validation: bool,
    expects: TextExpectation,
}

/// Texts as tokens, with their labels.
#[derive(Debug)]
struct Labelled {
    texts: Encoded,
    lengths: Vec<usize>,
    labels: Vec<u32>,
}

/// Texts of nearly the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct TextBatch {
    /// The tokens.
    pub tokens: Padded,
    /// The class of each text.
    pub labels: Vec<u32>,
}

/// Token ids `[batch, seq]`, and where there is padding, if anywhere.
pub type TokenInputs = (Tensor<2, Int>, Option<Tensor<2, Bool>>);

impl Labelled {
    fn new(split: &TextSplit, vocabulary: &Vocabulary, max_tokens: usize) -> Result<Arc<Self>> {
        let texts = vocabulary.encode(&split.texts, max_tokens)?;
        let lengths = (0..texts.len()).map(|index| texts.tokens(index)).collect();
        Ok(Arc::new(Self { texts, lengths, labels: split.labels.clone() }))
    }

    fn batch(&self, indices: &[usize]) -> TextBatch {
        let texts: Vec<_> = indices.iter().map(|&index| self.texts.ids(index)).collect();
        TextBatch { tokens: Padded::new(&texts), labels: indices.iter().map(|&index| self.labels[index]).collect() }
    }
}

impl TaskData for TextDataset {
    type Task = Texts;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Text)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Texts> {
        let vocabulary = match &self.words {
            Some(words) if recipe.text.tokenizer.is_none() => Vocabulary::of_words(words)?,
            _ => Vocabulary::learn(self.divided(recipe).0.texts.iter().map(String::as_str), &recipe.text)?,
        };
        let expects = TextExpectation::new(&self.classes, recipe, &vocabulary);
        Texts::new(self, recipe, vocabulary, expects)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Texts> {
        let Expectation::Texts(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.cannot_begin(&self.name, "texts"));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let (classes, max_tokens) = (self.classes.clone(), recipe.text.max_tokens);
        let task = Texts::new(self, recipe, vocabulary, TextExpectation { classes, max_tokens, ..expects })?;
        check_known(checkpoint, &self.identity(), [&task.train.texts])?;
        Ok(task)
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Texts> {
        let Expectation::Texts(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.refuses(&self.name, "texts"));
        };
        expects.check(&self.name, &self.classes)?;
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let task = Texts::new(self, &checkpoint.state.recipe, vocabulary, expects)?;
        check_known(checkpoint, &self.identity(), [&task.test.texts])?;
        Ok(task)
    }
}

impl TextDataset {
    fn divided(&self, recipe: &Recipe) -> (TextSplit, TextSplit) {
        divided([&self.train, &self.test], self.validation.as_ref(), recipe, TextSplit::hold_out)
    }
}

impl Texts {
    fn new(data: &TextDataset, recipe: &Recipe, vocabulary: Vocabulary, expects: TextExpectation) -> Result<Self> {
        let encode = |split: &TextSplit| {
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

    /// The judgement of `model` on the test part, with tokens left out of its attention.
    pub(crate) fn ablated(&self, model: &TextClassifier, ablation: Ablation) -> Result<Evaluation> {
        Ok(self.judge(model, Part::Test, Some(ablation))?.finish())
    }

    /// The answers of `model` on a part of the data, perhaps with its attention losing tokens.
    pub(crate) fn judge(&self, model: &TextClassifier, part: Part, ablation: Option<Ablation>) -> Result<Tally<'_>> {
        let split = if part == Part::Test { &self.test } else { &self.watched };
        let (mut tally, device) = (Tally::new(&self.expects.classes), device_of(model));
        tally.cut = split.texts.cut();
        for indices in by_budget(&split.lengths, BATCH_TOKENS) {
            crate::stop::check()?;
            let TextBatch { tokens, labels } = split.batch(&indices);
            let mut visible = Visible::default();
            if let Some(ablation) = ablation {
                ablation.hide(&indices, &tokens, &mut visible, &device)?;
            }
            let (tokens, padding) = token_inputs(tokens, &device);
            let logits = model.forward_visible(tokens, &Visible { padding, ..visible })?;
            tally.add_batch(logits, &labels)?;
        }
        Ok(tally)
    }
}

named! {
    /// What an attention loses at random. "Fractional neural attention for efficient multiscale sequence processing", figure 4,
    /// whose caption says tokens where its text says pairs.
    pub enum Lost {
        /// Keys, each once per text and for all of its queries.
        Tokens = "tokens",
        /// Pairs of a query and a key, each by itself in every head.
        Pairs = "pairs",
    }
}

/// An attention that loses each token or pair with the probability `share`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ablation {
    pub lost: Lost,
    pub share: f64,
    pub seed: u64,
}

impl Ablation {
    /// Hides what the `texts` with these numbers lose.
    fn hide(self, texts: &[usize], tokens: &Padded, visible: &mut Visible, device: &Device) -> Result<()> {
        match self.lost {
            Lost::Tokens => visible.hidden = Some(self.hidden(texts, tokens, device)),
            // A batch draws by the places of its texts: the first of them makes it another draw than the next batch's.
            Lost::Pairs => {
                let seed = stream(Purpose::Ablation, self.seed, texts[0] as u64, 1).random();
                visible.dropout = Some(Dropout::pairs(self.share, seed)?);
            }
        }
        Ok(())
    }

    /// `[batch, seq]`, true = lost.
    fn hidden(self, texts: &[usize], tokens: &Padded, device: &Device) -> Tensor<2, Bool> {
        let mut hidden = Vec::with_capacity(tokens.ids.len());
        for &text in texts {
            let mut rng = stream(Purpose::Ablation, self.seed, text as u64, 0);
            hidden.extend((0..tokens.width).map(|_| rng.random_bool(self.share)));
        }
        Tensor::from_data(TensorData::new(hidden, [texts.len(), tokens.width]), device)
    }
}

impl Task for Texts {
    type Model = TextClassifier;
    type Batch = TextBatch;
    type Inputs = (TokenInputs, Tensor<2>);

    fn train_len(&self) -> usize {
        self.train.texts.len()
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn notes(&self) -> Vec<String> {
        let splits = [(&self.train, "training texts"), (&self.test, "test texts")];
        splits.iter().filter_map(|(split, what)| split.texts.note(what, self.expects.max_tokens)).collect()
    }

    fn expects(&self) -> Expectation {
        Expectation::Texts(self.expects.clone())
    }

    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        vocabulary_part(&self.vocabulary)
    }

    fn attentions(model: &mut TextClassifier) -> Vec<(String, &mut MultiHeadAttention)> {
        block_attentions(&mut model.encoder.blocks)
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<TextClassifier> {
        check_classifies(recipe, &self.name, "texts")?;
        let classes = self.expects.classes.len();
        let config = text_config(recipe, &self.name, self.vocabulary.len(), recipe.text.max_tokens)?;
        Ok(config.try_init_classifier(classes, device)?)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<TextBatch>> {
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        let (texts, batches) = (self.train.clone(), by_length(&self.train.lengths, &plan, epoch));
        Ok(Batches::new(first..batches.len(), move |position| Ok(texts.batch(&batches[position]))))
    }

    fn len_of(batch: &TextBatch) -> usize {
        batch.labels.len()
    }

    fn inputs(&self, recipe: &Recipe, batch: TextBatch, device: &Device) -> Self::Inputs {
        let (classes, smoothing) = (self.expects.classes.len(), recipe.regularisation.label_smoothing);
        (token_inputs(batch.tokens, device), label_targets(&batch.labels, classes, smoothing, device))
    }

    fn loss(&self, model: &TextClassifier, ((tokens, padding), targets): Self::Inputs) -> Result<Tensor<1>> {
        Ok(soft_cross_entropy(model.try_forward(tokens, padding)?, targets))
    }

    fn predict(&self, model: &TextClassifier, ((tokens, padding), _): Self::Inputs) -> Result<()> {
        model.try_forward(tokens, padding)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &TextClassifier, part: Part) -> Result<Evaluation> {
        Ok(self.judge(model, part, None)?.finish())
    }

    fn samples(&self, _recipe: &Recipe, model: &TextClassifier) -> Result<Option<Samples>> {
        let (test, device) = (&self.test, device_of(model));
        let answer = |texts: &[usize]| {
            let (tokens, padding) = token_inputs(test.batch(texts).tokens, &device);
            Ok(model.try_forward(tokens, padding)?)
        };
        let show = |text| Ok(Seen::Text(beginning(&self.vocabulary.decode(test.texts.ids(text))?)));
        let classes = &self.expects.classes;
        let errors = Errors::of_test(classes, &test.lengths, &test.labels, BATCH_TOKENS, answer, show)?;
        Ok(Some(Samples::Errors(errors)))
    }

    fn packed(model: &TextClassifier) -> Result<Option<PackedWeights>> {
        packed_weights(&model.encoder.blocks)
    }
}

/// `[examples, classes]`: 1 for the label and 0 elsewhere, with the share `smoothing` spread over all classes.
pub(super) fn label_targets(labels: &[u32], classes: usize, smoothing: f64, device: &Device) -> Tensor<2> {
    let mut targets = vec![0.0; labels.len() * classes];
    for (row, &label) in targets.chunks_exact_mut(classes).zip(labels) {
        row[label as usize] = 1.0;
    }
    smoothed(targets, classes, smoothing, device)
}

/// Checks that a model of texts which is to classify what the data set `name` holds has no part for translating.
pub(super) fn check_classifies(recipe: &Recipe, name: &str, holds: &str) -> Result<()> {
    if let ModelRecipe::Text(TextModelRecipe { decoder: Some(_), .. } | TextModelRecipe { cross: Some(_), .. }) =
        recipe.model
    {
        let problem =
            format!("its {holds} have labels, not translations: `model.decoder` and `model.cross` are for translators");
        return Err(Error::Unfit { name: name.into(), problem });
    }
    Ok(())
}

/// Checks that the vocabulary of `checkpoint` knows most of the `texts` of `data`, unless it was learnt from that very data.
///
/// # Errors
/// [`Error::Unfit`].
pub(super) fn check_known<'a>(
    checkpoint: &Checkpoint,
    data: &DataIdentity,
    texts: impl IntoIterator<Item = &'a Encoded>,
) -> Result<()> {
    let unknown = texts.into_iter().map(Encoded::unknown).fold(0.0, f64::max);
    if unknown <= MOST_UNKNOWN || checkpoint.state.data == *data {
        return Ok(());
    }
    let problem = format!(
        "{:.0} % of its tokens are not in the model's vocabulary; evaluate it on texts like those it was trained on",
        unknown * 100.0
    );
    Err(Error::Unfit { name: data.name.clone(), problem })
}

/// The part of a checkpoint that is the vocabulary.
pub(super) fn vocabulary_part(vocabulary: &Vocabulary) -> Result<Vec<(&'static str, Bytes)>> {
    Ok(vec![(parts::VOCABULARY, Bytes::from_bytes_vec(vocabulary.to_bytes()?))])
}

/// A batch of texts as tensors.
pub(crate) fn token_inputs(tokens: Padded, device: &Device) -> TokenInputs {
    let shape = [tokens.lengths.len(), tokens.width];
    let padding = tokens.padding().map(|padding| Tensor::from_data(TensorData::new(padding, shape), device));
    (Tensor::from_data(TensorData::new(tokens.ids, shape), device), padding)
}

/// The recipe's model of text for a vocabulary of so many tokens and sequences of up to `longest`; `name` is the data set.
pub(crate) fn text_config(recipe: &Recipe, name: &str, vocabulary: usize, longest: usize) -> Result<TextConfig> {
    let ModelRecipe::Text(m) = &recipe.model else {
        return Err(wrong_kind(name, "texts", "text"));
    };
    let mechanism = recipe.mechanism.clone().with_max_tokens(longest);
    Ok(TextConfig { vocabulary, mechanism, precision: recipe.precision, ..m.config.clone() })
}
