//! Trained models, and what they answer to texts and pictures of one's own.

mod language;
mod pictures;

use std::{collections::BTreeMap, path::Path};

use burn::tensor::{Device, activation::softmax};
use resolvent::models::{TextClassifier, Translator};
use serde::Serialize;

use crate::{
    Result,
    checkpoint::{Checkpoint, Expectation, PairExpectation, TextExpectation},
    data::{Encoded, Padded, Vocabulary, by_budget},
    evaluation::answer,
    train::{self, BATCH_TOKENS, Pairs, Texts},
};

pub use language::{Weights, language_model};
pub use pictures::{
    ClassifiedPicture, PictureClassifier, Seen, images, picture_classifier, picture_files, read_picture,
};

/// A trained classifier of texts.
#[derive(Debug)]
pub struct Classifier {
    model: TextClassifier,
    vocabulary: Vocabulary,
    expects: TextExpectation,
    device: Device,
}

/// The answer of a [`Classifier`] to one text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Classified {
    /// The class with the highest probability.
    pub label: String,
    /// The probability of each class.
    pub probabilities: BTreeMap<String, f64>,
    /// Tokens that were read.
    pub tokens: usize,
    /// Tokens among them that the vocabulary does not have.
    pub unknown: usize,
    /// Whether these are most of them, so that the answer says little of the text.
    pub mostly_unknown: bool,
    /// Whether the text was longer than what is read of it.
    pub cut: bool,
}

impl Classifier {
    /// The classifier of the run or the checkpoint in `path`, on `device`.
    ///
    /// # Errors
    /// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::OtherModel`] when it was not trained on texts.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let (model, vocabulary, expects) = text_classifier(&Checkpoint::find(path)?, path, device)?;
        Ok(Self { model, vocabulary, expects, device: device.clone() })
    }

    /// Most tokens that are read of a text.
    pub fn max_tokens(&self) -> usize {
        self.expects.max_tokens
    }

    /// The answer to each of `texts`, in their order.
    ///
    /// # Errors
    /// [`crate::Error::Data`] when a text cannot be read, [`crate::Error::Model`].
    pub fn classify(&self, texts: &[String]) -> Result<Vec<Classified>> {
        let encoded = self.vocabulary.encode(texts, self.expects.max_tokens)?;
        let lengths: Vec<usize> = (0..texts.len()).map(|index| encoded.tokens(index)).collect();
        let mut answers = vec![None; texts.len()];
        for indices in by_budget(&lengths, BATCH_TOKENS) {
            let rows: Vec<_> = indices.iter().map(|&index| encoded.ids(index)).collect();
            let (tokens, padding) = train::token_inputs(Padded::new(&rows), &self.device);
            let probabilities = softmax(self.model.try_forward(tokens, padding)?, 1).into_data();
            let probabilities: Vec<f32> = probabilities.iter().collect();
            for (&index, row) in indices.iter().zip(probabilities.chunks_exact(self.expects.classes.len())) {
                answers[index] = Some(self.answer(&encoded, index, row));
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    fn answer(&self, texts: &Encoded, index: usize, probabilities: &[f32]) -> Classified {
        let ids = texts.ids(index);
        let named = || self.expects.classes.iter().zip(probabilities);
        let label = self.expects.classes.get(answer(probabilities).0).cloned().unwrap_or_default();
        Classified {
            label,
            probabilities: named().map(|(class, &p)| (class.clone(), f64::from(p))).collect(),
            tokens: ids.len(),
            unknown: ids.iter().filter(|&&id| id == self.vocabulary.unknown()).count(),
            mostly_unknown: texts.is_mostly_unknown(index),
            cut: texts.is_cut(index),
        }
    }
}

/// The trained classifier of texts in the checkpoint that was found in `path`, on `device`, its vocabulary, and what it expects.
///
/// # Errors
/// [`crate::Error::OtherModel`] when it was not trained on texts; [`crate::Error::Damaged`], [`crate::Error::Io`].
pub fn text_classifier(
    checkpoint: &Checkpoint,
    path: &Path,
    device: &Device,
) -> Result<(TextClassifier, Vocabulary, TextExpectation)> {
    let Expectation::Texts(expects) = checkpoint.state.expects.clone() else {
        return Err(checkpoint.state.expects.unasked(path, "texts"));
    };
    let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
    let recipe = &checkpoint.state.recipe;
    let config = train::text_config(recipe, &checkpoint.state.data.name, vocabulary.len(), expects.max_tokens)?;
    let classes = expects.classes.len();
    let model = train::drawn::<Texts>(recipe, device, |device| Ok(config.try_init_classifier(classes, device)?))?;
    Ok((checkpoint.load_weights(model)?.into_packed()?, vocabulary, expects))
}

/// A trained translator.
#[derive(Debug)]
pub struct TextTranslator {
    model: Translator,
    vocabulary: Vocabulary,
    expects: PairExpectation,
    lowercase: bool,
    device: Device,
}

/// A translation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Translated {
    /// The translation.
    pub text: String,
    /// Tokens of the source that the vocabulary does not have.
    pub unknown: usize,
    /// Whether these are most of its tokens, so that the translation says little of it.
    pub mostly_unknown: bool,
    /// Whether the source was longer than what is read of it.
    pub cut: bool,
    /// Whether the translation came to its end, rather than to the most tokens that are written.
    pub ended: bool,
}

impl TextTranslator {
    /// The translator of the run or the checkpoint in `path`, on `device`.
    ///
    /// # Errors
    /// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::OtherModel`] when it was not trained on
    /// parallel texts.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let checkpoint = Checkpoint::find(path)?;
        let Expectation::Pairs(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.unasked(path, "translations"));
        };
        let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
        let state = &checkpoint.state;
        let (recipe, lowercase) = (&state.recipe, state.recipe.text.lowers());
        let init = |device: &Device| train::translator(recipe, &state.data.name, vocabulary.len(), device);
        let model = train::drawn::<Pairs>(recipe, device, init)?;
        let model = checkpoint.load_weights(model)?.into_packed()?;
        Ok(Self { model, vocabulary, expects, lowercase, device: device.clone() })
    }

    /// Most tokens that are read of a sentence, and written.
    pub fn max_tokens(&self) -> usize {
        self.expects.max_tokens
    }

    /// Whether it writes in lower case, so that case does not count against it.
    pub fn lowercase(&self) -> bool {
        self.lowercase
    }

    /// The translation of each of `sentences`, in their order, following `beams` hypotheses.
    ///
    /// # Errors
    /// [`crate::Error::Data`] when a sentence cannot be read, [`crate::Error::Model`].
    pub fn translate(&self, sentences: &[String], beams: usize) -> Result<Vec<Translated>> {
        let encoded = self.vocabulary.encode(sentences, self.expects.max_tokens)?;
        let lengths: Vec<usize> = (0..sentences.len()).map(|index| encoded.tokens(index)).collect();
        let search = train::search(&self.vocabulary, self.expects.max_tokens, beams);
        let mut answers = vec![None; sentences.len()];
        for indices in by_budget(&lengths, BATCH_TOKENS / (4 * beams)) {
            let rows: Vec<_> = indices.iter().map(|&index| encoded.ids(index)).collect();
            let (tokens, padding) = train::token_inputs(Padded::new(&rows), &self.device);
            let found = self.model.search(tokens, padding, &search)?;
            for (&index, ids) in indices.iter().zip(found) {
                let unknown = encoded.ids(index).iter().filter(|&&id| id == self.vocabulary.unknown()).count();
                let text = self.vocabulary.decode(&ids)?;
                let (cut, ended) = (encoded.is_cut(index), ids.len() < self.expects.max_tokens);
                let mostly_unknown = encoded.is_mostly_unknown(index);
                answers[index] = Some(Translated { text, unknown, mostly_unknown, cut, ended });
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }
}
