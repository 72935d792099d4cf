//! Translation as a task: pairs of token sequences, the encoder-decoder, its loss and judgement.

use std::{sync::Arc, time::Instant};

use burn::tensor::{Bytes, Device, Int, Tensor};
use resolvent::{
    attention::MultiHeadAttention,
    models::{Search, Translator},
};
use resolvent_kernels::mechanism::KappaRule;

use super::{
    PackedWeights, Part, Samples, Task, TaskData, TokenInputs, Translation, block_name, device_of,
    judged::Judged,
    packed::of_blocks,
    picture_model::block_attentions,
    samples::SHOWN,
    task::divided,
    text_model::text_config,
    tokens::{BATCH_TOKENS, Sides, check_known, token_inputs, vocabulary_part},
};
use crate::{
    Error, Recipe, Result,
    bleu::bleu,
    checkpoint::{Checkpoint, DataIdentity, Expectation, PairExpectation},
    data::{Batches, Padded, PairDataset, PairSplit, Vocabulary, by_budget},
    evaluation::Evaluation,
    recipe::ModelRecipe,
    stats::spread,
};

/// The pairs of a run, as tokens of one vocabulary.
#[derive(Debug, Clone)]
pub struct Pairs {
    name: String,
    vocabulary: Arc<Vocabulary>,
    train: Arc<Translated>,
    watched: Arc<Translated>,
    test: Arc<Translated>,
    brings_validation: bool,
    lowercase: bool,
    expects: PairExpectation,
}

/// Sentences and their translations as tokens.
#[derive(Debug)]
struct Translated {
    sides: Sides<2>,
    references: Vec<String>,
    /// The ids of a beginning and an end.
    begin: u32,
    end: u32,
}

/// Pairs of nearly the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct PairBatch {
    /// The sentences.
    pub source: Padded,
    /// Their translations behind a beginning: what the decoder reads.
    pub target: Padded,
    /// Their translations before an end, which those that were cut lack: what it should write.
    pub answers: Padded,
}

/// A batch as tensors.
#[derive(Debug, Clone)]
pub struct PairInputs {
    source: TokenInputs,
    target: TokenInputs,
    answers: Tensor<2, Int>,
    smoothing: f64,
}

impl Translated {
    fn new(split: &PairSplit, vocabulary: &Vocabulary, max_tokens: usize) -> Result<Arc<Self>> {
        let sides = Sides::new([&split.source, &split.target], vocabulary, max_tokens)?;
        let (begin, end) = (vocabulary.begin(), vocabulary.end());
        Ok(Arc::new(Self { sides, references: split.target.clone(), begin, end }))
    }

    /// What should be written for pair `index`. A translation that was cut goes on: where it was cut is no end to learn.
    fn answer(&self, index: usize) -> Vec<u32> {
        let [_, target] = &self.sides.texts;
        let end = if target.is_cut(index) { &[][..] } else { &[self.end] };
        [target.ids(index), end].concat()
    }

    fn batch(&self, indices: &[usize]) -> PairBatch {
        let [source, _] = self.sides.padded(indices);
        let ended: Vec<_> = indices.iter().map(|&index| self.answer(index)).collect();
        let begun: Vec<_> = ended.iter().map(|ids| [&[self.begin], &ids[..ids.len() - 1]].concat()).collect();
        PairBatch { source, target: Padded::new(&begun), answers: Padded::new(&ended) }
    }
}

impl TaskData for PairDataset {
    type Task = Pairs;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        recipe.with_length_scale(KappaRule::Vision)
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Pairs> {
        let (train, _) = self.divided(recipe);
        let texts = train.source.iter().chain(&train.target).map(String::as_str);
        let vocabulary = Vocabulary::learn(texts, &recipe.text)?;
        let expects = PairExpectation {
            languages: self.languages.clone(),
            max_tokens: recipe.text.max_tokens,
            vocabulary: vocabulary.len(),
            fingerprint: format!("{:016x}", vocabulary.fingerprint()),
        };
        Pairs::new(self, recipe, vocabulary, expects)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Pairs> {
        let Expectation::Pairs(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.cannot_begin(&self.name, "translations"));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let (languages, max_tokens) = (self.languages.clone(), recipe.text.max_tokens);
        let pairs = Pairs::new(self, recipe, vocabulary, PairExpectation { languages, max_tokens, ..expects })?;
        check_known(checkpoint, &self.identity(), &pairs.train.sides)?;
        Ok(pairs)
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Pairs> {
        let Expectation::Pairs(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.refuses(&self.name, "translations"));
        };
        expects.check(&self.name, &self.languages)?;
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let pairs = Pairs::new(self, &checkpoint.state.recipe, vocabulary, expects)?;
        check_known(checkpoint, &self.identity(), &pairs.test.sides)?;
        Ok(pairs)
    }
}

impl PairDataset {
    fn divided(&self, recipe: &Recipe) -> (PairSplit, PairSplit) {
        divided([&self.train, &self.test], self.validation.as_ref(), recipe, PairSplit::hold_out)
    }
}

impl Pairs {
    fn new(data: &PairDataset, recipe: &Recipe, vocabulary: Vocabulary, expects: PairExpectation) -> Result<Self> {
        let encode = |split| Translated::new(split, &vocabulary, expects.max_tokens);
        let (train, watched) = data.divided(recipe);
        Ok(Self {
            name: data.name.clone(),
            train: encode(&train)?,
            watched: encode(&watched)?,
            test: encode(&data.test)?,
            brings_validation: data.validation.is_some(),
            lowercase: recipe.text.lowers(),
            vocabulary: Arc::new(vocabulary),
            expects,
        })
    }

    /// Greedy translations of `chosen` pairs of `split`, in their order.
    fn translations(&self, model: &Translator, split: &Translated, chosen: &[usize]) -> Result<Vec<String>> {
        let (search, device) = (search(&self.vocabulary, self.expects.max_tokens, 1), device_of(model));
        let mut texts = vec![String::new(); chosen.len()];
        let lengths: Vec<usize> = chosen.iter().map(|&pair| split.sides.lengths[pair]).collect();
        for places in by_budget(&lengths, BATCH_TOKENS / 4) {
            crate::stop::check()?;
            let pairs: Vec<usize> = places.iter().map(|&place| chosen[place]).collect();
            let (source, padding) = token_inputs(split.batch(&pairs).source, &device);
            let found = model.search(source, padding, &search)?;
            for (place, ids) in places.into_iter().zip(found) {
                texts[place] = self.vocabulary.decode(&ids)?;
            }
        }
        Ok(texts)
    }
}

/// The search with the vocabulary's beginning and end.
pub(crate) fn search(vocabulary: &Vocabulary, max_tokens: usize, beams: usize) -> Search {
    let (begin, end) = (vocabulary.begin(), vocabulary.end());
    Search { begin, end, max_tokens, beams, length_penalty: 1.0 }
}

/// The recipe's translator.
pub(crate) fn translator(recipe: &Recipe, name: &str, vocabulary: usize, device: &Device) -> Result<Translator> {
    let longest = recipe.text.max_tokens;
    let config = text_config(recipe, name, vocabulary, longest)?;
    let ModelRecipe::Text(m) = &recipe.model else {
        return Err(Error::Unfit { name: name.into(), problem: "the recipe has no model of text".into() });
    };
    let of = |own: &Option<Box<_>>| own.as_deref().unwrap_or(&recipe.mechanism).clone().with_max_tokens(longest);
    Ok(config.try_init_translator(&of(&m.decoder), &of(&m.cross), device)?)
}

impl Task for Pairs {
    type Model = Translator;
    type Batch = PairBatch;
    type Inputs = PairInputs;

    fn train_len(&self) -> usize {
        self.train.references.len()
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn notes(&self) -> Vec<String> {
        let train = self.train.sides.notes(["training sentences", "training translations"], self.expects.max_tokens);
        let test = self.test.sides.notes(["test sentences", "test translations"], self.expects.max_tokens);
        [train, test].concat()
    }

    fn expects(&self) -> Expectation {
        Expectation::Pairs(self.expects.clone())
    }

    fn extras(&self) -> Result<Vec<(&'static str, Bytes)>> {
        vocabulary_part(&self.vocabulary)
    }

    fn attentions(model: &mut Translator) -> Vec<(String, &mut MultiHeadAttention)> {
        let encoder = block_attentions(&mut model.encoder.blocks);
        let encoder = encoder.into_iter().map(|(name, attention)| (format!("encoder.{name}"), attention));
        let decoder = model.blocks.iter_mut().enumerate().flat_map(|(index, block)| {
            let name = block_name(index);
            [(format!("{name}.cross"), &mut block.cross), (name, &mut block.block.attention)]
        });
        encoder.chain(decoder).collect()
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<Translator> {
        translator(recipe, &self.name, self.vocabulary.len(), device)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<PairBatch>> {
        let pairs = self.train.clone();
        Ok(self.train.sides.epoch(recipe, epoch, first, move |indices| pairs.batch(indices)))
    }

    fn len_of(batch: &PairBatch) -> usize {
        batch.source.lengths.len()
    }

    fn terms_of(batch: &PairBatch) -> usize {
        batch.answers.lengths.iter().sum()
    }

    fn inputs(&self, recipe: &Recipe, batch: PairBatch, device: &Device) -> PairInputs {
        PairInputs {
            source: token_inputs(batch.source, device),
            target: token_inputs(batch.target, device),
            answers: token_inputs(batch.answers, device).0,
            smoothing: recipe.regularisation.label_smoothing,
        }
    }

    fn loss(&self, model: &Translator, inputs: PairInputs) -> Result<Tensor<1>> {
        Ok(judged(model, inputs)?.loss())
    }

    fn predict(&self, model: &Translator, inputs: PairInputs) -> Result<()> {
        let ((source, padding), (target, target_padding)) = (inputs.source, inputs.target);
        model.try_forward(source, padding, target, target_padding)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &Translator, part: Part) -> Result<Evaluation> {
        let split = if part == Part::Test { &self.test } else { &self.watched };
        let (began, device) = (Instant::now(), device_of(model));
        let (mut loss, mut right, mut tokens) = (0.0, 0.0, 0.0);
        for indices in by_budget(&split.sides.lengths, BATCH_TOKENS / 8) {
            crate::stop::check()?;
            let batch = split.batch(&indices);
            let count = batch.answers.lengths.iter().sum::<usize>() as f64;
            let answers = token_inputs(batch.answers, &device).0;
            let (source, target) = (token_inputs(batch.source, &device), token_inputs(batch.target, &device));
            let judged = judged(model, PairInputs { source, target, answers, smoothing: 0.0 })?;
            right += judged.right();
            loss += f64::from(judged.loss().into_scalar::<f32>()) * count;
            tokens += count;
        }
        let translations = self.translations(model, split, &(0..split.references.len()).collect::<Vec<_>>())?;
        let bleu = bleu(&translations, &split.references, self.lowercase);
        Ok(Evaluation {
            accuracy: Some(right / tokens),
            bleu: Some(bleu),
            cut: split.sides.cut(),
            ..Evaluation::new(split.references.len(), loss / tokens, began)
        })
    }

    fn samples(&self, _recipe: &Recipe, model: &Translator) -> Result<Option<Samples>> {
        let pairs: Vec<usize> = spread(self.test.references.len(), SHOWN).collect();
        let told = |(&pair, translation): (&usize, String)| {
            let source = self.vocabulary.decode(self.test.sides.texts[0].ids(pair))?;
            Ok(Translation { source, reference: self.test.references[pair].clone(), translation })
        };
        let translations = self.translations(model, &self.test, &pairs)?;
        let samples = pairs.iter().zip(translations).map(told).collect::<Result<_>>()?;
        Ok(Some(Samples::Translations(samples)))
    }

    fn packed(model: &Translator) -> Result<Option<PackedWeights>> {
        let own = model.encoder.blocks.iter().chain(model.blocks.iter().map(|block| &block.block));
        let mut all = of_blocks(own)?;
        for block in &model.blocks {
            all.extend(block.cross.ternary_matrices()?);
        }
        Ok(PackedWeights::of(&all))
    }
}

/// What `model` says of a batch under teacher forcing.
fn judged(model: &Translator, inputs: PairInputs) -> Result<Judged> {
    let PairInputs { source: (source, source_padding), target: (target, padding), answers, smoothing } = inputs;
    let logits = model.try_forward(source, source_padding, target, padding.clone())?;
    Ok(Judged::new(logits, answers, padding, smoothing))
}
