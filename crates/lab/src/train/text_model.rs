//! Models that classify texts, or pairs of them: what tells one from the other.

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Device, Tensor},
};
use resolvent::models::{TextClassifier, TextConfig, TextEncoder, TextMatcher};

use super::{
    TokenInputs,
    pictures::{smoothed, wrong_kind},
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Expectation, TextExpectation},
    data::{MatchDataset, TextDataset},
    recipe::{ModelRecipe, TextModelRecipe},
};

/// Labelled examples of `N` texts each: the model that reads them, and what they are called.
pub trait ExampleTexts<const N: usize> {
    /// The classifier.
    type Model: Module + ModuleDisplay + Send + Sync;

    /// What the examples are, as [`Expectation`] says it.
    const EXAMPLES: &'static str;
    /// What their texts are.
    const TEXTS: &'static str;
    /// Which of them is which.
    const WHICH: [&'static str; N];
    /// What a model of such examples expects.
    const EXPECTS: fn(TextExpectation) -> Expectation;

    /// A model of so many classes, its weights not yet drawn.
    ///
    /// # Errors
    /// [`Error::Model`].
    fn model(config: &TextConfig, classes: usize, device: &Device) -> Result<Self::Model>;

    /// The logits `[examples, classes]`.
    ///
    /// # Errors
    /// [`Error::Model`].
    fn answer(model: &Self::Model, texts: [TokenInputs; N]) -> Result<Tensor<2>>;

    /// What reads the texts.
    fn encoder(model: &mut Self::Model) -> &mut TextEncoder;
}

impl ExampleTexts<1> for TextDataset {
    type Model = TextClassifier;
    const EXAMPLES: &'static str = "texts";
    const TEXTS: &'static str = "texts";
    const WHICH: [&'static str; 1] = [""];
    const EXPECTS: fn(TextExpectation) -> Expectation = Expectation::Texts;

    fn model(config: &TextConfig, classes: usize, device: &Device) -> Result<TextClassifier> {
        Ok(config.try_init_classifier(classes, device)?)
    }

    fn answer(model: &TextClassifier, [(tokens, padding)]: [TokenInputs; 1]) -> Result<Tensor<2>> {
        Ok(model.try_forward(tokens, padding)?)
    }

    fn encoder(model: &mut TextClassifier) -> &mut TextEncoder {
        &mut model.encoder
    }
}

impl ExampleTexts<2> for MatchDataset {
    type Model = TextMatcher;
    const EXAMPLES: &'static str = Expectation::MATCHES;
    const TEXTS: &'static str = "documents";
    const WHICH: [&'static str; 2] = ["first ", "second "];
    const EXPECTS: fn(TextExpectation) -> Expectation = Expectation::Matches;

    fn model(config: &TextConfig, classes: usize, device: &Device) -> Result<TextMatcher> {
        Ok(config.try_init_matcher(classes, device)?)
    }

    fn answer(model: &TextMatcher, [first, second]: [TokenInputs; 2]) -> Result<Tensor<2>> {
        Ok(model.try_forward(first, second)?)
    }

    fn encoder(model: &mut TextMatcher) -> &mut TextEncoder {
        &mut model.encoder
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

/// The recipe's model of text for a vocabulary of so many tokens and sequences of up to `longest`; `name` is the data set.
pub(crate) fn text_config(recipe: &Recipe, name: &str, vocabulary: usize, longest: usize) -> Result<TextConfig> {
    let ModelRecipe::Text(m) = &recipe.model else {
        return Err(wrong_kind(name, "texts", "text"));
    };
    let mechanism = recipe.mechanism.clone().with_max_tokens(longest);
    Ok(TextConfig { vocabulary, mechanism, precision: recipe.precision, ..m.config.clone() })
}
