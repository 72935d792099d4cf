//! What a trained model expects of the data it is shown.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    Error, Recipe, Result,
    data::{ChannelStats, PictureDataset, Vocabulary},
};

/// What a trained model expects of the data it is shown, by the kind of data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "examples", rename_all = "kebab-case")]
pub enum Expectation {
    /// Of pictures.
    Pictures(PictureExpectation),
    /// Of texts.
    Texts(TextExpectation),
    /// Of pairs of documents.
    Matches(TextExpectation),
    /// Of texts to be translated.
    Pairs(PairExpectation),
    /// Of plain text.
    Corpus(CorpusExpectation),
    /// Of keys and values that are asked for.
    Recall(RecallExpectation),
    /// Of the data of a program of its own: what it says of them.
    Own(Map<String, Value>),
}

impl Default for Expectation {
    /// That of a program of its own which says nothing.
    fn default() -> Self {
        Self::Own(Map::new())
    }
}

impl Expectation {
    /// What a model of pairs of documents is shown.
    pub const MATCHES: &str = "pairs of documents";
    /// What a model of associative recall is shown.
    pub const RECALL: &str = "sequences of keys and values";

    /// The error of a model that is shown `found` of the data set `name` and expects something else.
    pub(crate) fn refuses(&self, name: &str, found: &str) -> Error {
        let expected = self.examples();
        let problem =
            format!("it holds {found}, the model was trained on {expected}; evaluate it on the data it was trained on");
        Error::Unfit { name: name.into(), problem }
    }

    /// The error of a run on `wanted` of the data set `name` that is to begin with such a model.
    pub(crate) fn cannot_begin(&self, name: &str, wanted: &str) -> Error {
        let trained = self.examples();
        let problem =
            format!("it holds {wanted}, the model to begin with was trained on {trained}; begin with one of {wanted}");
        Error::Unfit { name: name.into(), problem }
    }

    /// The error of a command for models of `wanted` that is given the run in `path`.
    pub fn unasked(&self, path: &Path, wanted: &'static str) -> Error {
        Error::OtherModel { path: path.into(), trained: self.examples(), wanted }
    }

    /// The classes that the model tells apart; of other models than classifiers none.
    pub(super) fn classes(&self) -> &[String] {
        match self {
            Expectation::Pictures(expects) => &expects.classes,
            Expectation::Texts(expects) | Expectation::Matches(expects) => &expects.classes,
            Expectation::Pairs(_) | Expectation::Corpus(_) | Expectation::Recall(_) | Expectation::Own(_) => &[],
        }
    }

    /// What is expected of texts, or of pairs of them, where such `examples` are what the model is shown.
    pub(crate) fn of_texts(&self, examples: &str) -> Option<TextExpectation> {
        match self {
            Expectation::Texts(expects) | Expectation::Matches(expects) if self.examples() == examples => {
                Some(expects.clone())
            }
            _ => None,
        }
    }

    /// How many tokens are read of a text, or of plain text at once; `None` where the data are not texts.
    pub(crate) fn tokens_mut(&mut self) -> Option<&mut usize> {
        match self {
            Expectation::Texts(expects) | Expectation::Matches(expects) => Some(&mut expects.max_tokens),
            Expectation::Pairs(expects) => Some(&mut expects.max_tokens),
            Expectation::Corpus(expects) => Some(&mut expects.context),
            Expectation::Pictures(_) | Expectation::Recall(_) | Expectation::Own(_) => None,
        }
    }

    /// What such a model is shown.
    pub(crate) fn examples(&self) -> &'static str {
        match self {
            Expectation::Pictures(_) => "pictures",
            Expectation::Texts(_) => "texts",
            Expectation::Matches(_) => Self::MATCHES,
            Expectation::Pairs(_) => "translations",
            Expectation::Corpus(_) => "plain text",
            Expectation::Recall(_) => Self::RECALL,
            Expectation::Own(_) => "the data of a program of its own",
        }
    }
}

/// What a trained model expects of texts, or of pairs of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextExpectation {
    /// Names of the classes, in the order of the logits.
    pub classes: Vec<String>,
    /// Tokens kept of a text.
    pub max_tokens: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Hash of the vocabulary, in hexadecimal.
    pub fingerprint: String,
}

impl TextExpectation {
    /// Of a model for `classes` that a run by `recipe` trains on tokens of `vocabulary`.
    pub(crate) fn new(classes: &[String], recipe: &Recipe, vocabulary: &Vocabulary) -> Self {
        let fingerprint = format!("{:016x}", vocabulary.fingerprint());
        let (classes, max_tokens) = (classes.to_vec(), recipe.text.max_tokens);
        Self { classes, max_tokens, vocabulary: vocabulary.len(), fingerprint }
    }

    /// Checks that the model can be shown a data set of `classes`.
    ///
    /// # Errors
    /// [`Error::Unfit`] naming the difference.
    pub fn check(&self, name: &str, classes: &[String]) -> Result<()> {
        check_classes(name, classes, &self.classes)
    }
}

/// What a trained model expects of pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PictureExpectation {
    /// Names of the classes, in the order of the logits.
    pub classes: Vec<String>,
    /// Channels, height and width.
    pub shape: [usize; 3],
    /// Mean per channel of the pictures that it learned from.
    pub mean: Vec<f32>,
    /// Standard deviation per channel of the pictures that it learned from.
    pub std: Vec<f32>,
}

impl PictureExpectation {
    /// That of a model that learns from `dataset`, normalised by `stats`.
    pub fn new(dataset: &PictureDataset, stats: &ChannelStats) -> Self {
        let shape = [dataset.shape.channels, dataset.shape.height, dataset.shape.width];
        Self { classes: dataset.classes.clone(), shape, mean: stats.mean.clone(), std: stats.std.clone() }
    }

    /// The statistics that pictures are normalised by.
    pub fn stats(&self) -> ChannelStats {
        ChannelStats { mean: self.mean.clone(), std: self.std.clone() }
    }

    /// Checks that the model can be shown `dataset`.
    ///
    /// # Errors
    /// [`Error::Unfit`] naming the difference.
    pub fn check(&self, dataset: &PictureDataset) -> Result<()> {
        let found = Self::new(dataset, &self.stats()).shape;
        if found != self.shape && found[0] == self.shape[0] {
            let expected = self.shape;
            let problem = format!(
                "its pictures are {found:?} (channels, height, width), the model was trained on {expected:?}; evaluate it on the data it was trained on, or name a size for all pictures"
            );
            return Err(Error::Unfit { name: dataset.name.clone(), problem });
        }
        self.check_kind(dataset)
    }

    /// Checks that the model can be shown `dataset`, whatever the size of its pictures.
    ///
    /// # Errors
    /// [`Error::Unfit`] naming the difference.
    pub fn check_kind(&self, dataset: &PictureDataset) -> Result<()> {
        let (found, expected) = (dataset.shape.channels, self.shape[0]);
        if found != expected {
            let problem = format!(
                "its pictures have {found} channels, the model was trained on {expected}; evaluate it on the data it was trained on"
            );
            return Err(Error::Unfit { name: dataset.name.clone(), problem });
        }
        check_classes(&dataset.name, &dataset.classes, &self.classes)
    }
}

/// What a trained translator expects of texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairExpectation {
    /// What it translates, and into what.
    pub languages: [String; 2],
    /// Tokens kept of a text.
    pub max_tokens: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Hash of the vocabulary, in hexadecimal.
    pub fingerprint: String,
}

impl PairExpectation {
    /// Checks that the model can be shown texts of `languages`.
    ///
    /// # Errors
    /// [`Error::Unfit`] naming the difference.
    pub fn check(&self, name: &str, languages: &[String; 2]) -> Result<()> {
        if *languages == self.languages {
            return Ok(());
        }
        let (found, expected) = (languages.join(" to "), self.languages.join(" to "));
        let problem = format!(
            "it goes from {found}, the model was trained from {expected}; evaluate it on the data it was trained on"
        );
        Err(Error::Unfit { name: name.into(), problem })
    }
}

/// What a trained language model expects of text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CorpusExpectation {
    /// Tokens that are read at once.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Hash of the vocabulary, in hexadecimal.
    pub fingerprint: String,
}

/// What a trained model of associative recall expects of sequences.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecallExpectation {
    /// Tokens are below it.
    pub vocabulary: usize,
}

impl RecallExpectation {
    /// Checks that the model can be shown sequences of so many different tokens.
    ///
    /// # Errors
    /// [`Error::Unfit`] naming the difference.
    pub fn check(&self, name: &str, vocabulary: usize) -> Result<()> {
        if vocabulary == self.vocabulary {
            return Ok(());
        }
        let expected = self.vocabulary;
        let problem = format!(
            "its vocabulary has {vocabulary} tokens, the model was trained with {expected}; give it `vocabulary={expected}`"
        );
        Err(Error::Unfit { name: name.into(), problem })
    }
}

/// Checks that the classes of the data set `name` are those that the model knows.
pub(crate) fn check_classes(name: &str, found: &[String], expected: &[String]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.join(", "), expected.join(", "));
    let problem =
        format!("its classes are {found}, the model knows {expected}; evaluate it on the data it was trained on");
    Err(Error::Unfit { name: name.into(), problem })
}
