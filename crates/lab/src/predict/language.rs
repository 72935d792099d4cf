//! A trained language model.

use std::path::Path;

use burn::{module::Module, tensor::Device};
use resolvent::models::LanguageModel;
use resolvent_kernels::mechanism::KappaRule;
use serde::Serialize;

use crate::{
    Recipe, Result,
    checkpoint::{Checkpoint, Expectation},
    data::Vocabulary,
    exchange::ModelAttention,
    generate::Generator,
    train::{self, Corpus, PackedWeights},
};

/// Memory of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Of those in f32.
    pub real_bytes: usize,
    /// The ternary ones, if there are any.
    pub packed: Option<PackedWeights>,
}

impl Generator {
    /// The language model of the run or the checkpoint in `path`, on `device`.
    ///
    /// # Errors
    /// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::OtherModel`] when it was not trained on plain text.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        Self::load_with(path, None, device)
    }

    /// The same with another attention on the trained weights.
    ///
    /// # Errors
    /// As [`Generator::load`]; [`crate::Error::Exchange`] where the weights are not those of a model with `other`, or the layers and heads of a fit not
    /// those of the model.
    pub fn load_with(path: &Path, other: Option<&ModelAttention>, device: &Device) -> Result<Self> {
        let checkpoint = Checkpoint::find(path)?;
        let (model, vocabulary) = match other {
            None => language_model(&checkpoint, path, device)?,
            Some(other) => {
                let (own, rule) = (&checkpoint.state.recipe, KappaRule::Text);
                let recipe = other.exchanged(own, |recipe| recipe.with_length_scale(rule));
                let (vocabulary, model) = untrained(&checkpoint, path, &recipe, device)?;
                (other.onto(&checkpoint, model)?, vocabulary)
            }
        };
        Ok(Self::new(model.into_packed()?, vocabulary, device.clone()))
    }

    /// What the weights take while the model writes: ternary ones are packed, and their real values, which a checkpoint holds, are
    /// not kept.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for weights that are not finite.
    pub fn weights(&self) -> Result<Weights> {
        let packed = train::packed_weights(&self.model().blocks)?;
        let real = self.model().num_params() - packed.map_or(0, |packed| packed.weights);
        Ok(Weights { real_bytes: size_of::<f32>() * real, packed })
    }
}

/// The language model of `checkpoint`, which was found in `path`, on `device`, and its vocabulary.
///
/// # Errors
/// [`crate::Error::OtherModel`] when it was not trained on plain text; [`crate::Error::Damaged`], [`crate::Error::Io`].
pub fn language_model(checkpoint: &Checkpoint, path: &Path, device: &Device) -> Result<(LanguageModel, Vocabulary)> {
    let (vocabulary, model) = untrained(checkpoint, path, &checkpoint.state.recipe, device)?;
    Ok((checkpoint.load_weights(model?)?, vocabulary))
}

/// The vocabulary, and the model of `recipe`, which is that of the checkpoint but for its attention, without the weights.
fn untrained(
    checkpoint: &Checkpoint,
    path: &Path,
    recipe: &Recipe,
    device: &Device,
) -> Result<(Vocabulary, Result<LanguageModel>)> {
    let Expectation::Corpus(expects) = checkpoint.state.expects.clone() else {
        return Err(checkpoint.state.expects.unasked(path, "plain text"));
    };
    let vocabulary = checkpoint.vocabulary(&expects.fingerprint)?;
    let config = train::language_config(recipe, &checkpoint.state.data.name, vocabulary.len())?;
    Ok((vocabulary, train::drawn::<Corpus>(recipe, device, |device| Ok(config.try_init(device)?))))
}
