//! A trained classifier or language model under observation: its answers, also to inputs that lack a part, and what its attention is made of, one
//! example at a time.
//!
//! Examples are shown alone, so that no text is padded.

mod examples;
mod trace;
mod voc;

use std::path::Path;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use resolvent::models::{LanguageModel, TextClassifier};
use resolvent_kernels::mechanism::{Landmarks, Structure};
use resolvent_lab::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, Expectation, PictureExpectation, TextExpectation},
    data::Vocabulary,
    evaluation::answer,
    predict::{images, language_model, picture_classifier, text_classifier},
    stats::probabilities,
    train::{PictureModel, block_name},
};

pub use examples::{Example, Material, PictureExample, TextExample};
pub use trace::{LayerCall, Place};
pub use voc::{Region, read as read_boxes};

use trace::Watched;

/// A trained classifier of pictures or texts, or a language model, which has no classes.
#[derive(Debug)]
pub struct Subject {
    /// The checkpoint's folder.
    pub path: String,
    /// Steps that it was trained for.
    pub step: usize,
    /// What it was trained with.
    pub recipe: Recipe,
    kind: Kind,
    device: Device,
}

#[derive(Debug)]
enum Kind {
    Pictures(Box<Watched<PictureModel>>, PictureExpectation),
    Texts(Box<Watched<TextClassifier>>, Box<Vocabulary>, TextExpectation),
    Language(Box<Watched<LanguageModel>>, Box<Vocabulary>),
}

impl Subject {
    /// The model of the run or the checkpoint in `path`, on `device`.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`], [`Error::Damaged`], [`Error::Io`]; [`Error::OtherModel`] for a translator; [`Error::Recipe`]
    /// where heads have mechanisms of their own.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let checkpoint = Checkpoint::find(path)?;
        if checkpoint.state.recipe.fit.is_some() {
            let problem =
                "gives heads mechanisms of their own, which are not looked into; name the run that it began with";
            let file = checkpoint.path.display().to_string();
            return Err(Error::Recipe { file, field: "fit".into(), problem: problem.into() });
        }
        let kind = match &checkpoint.state.expects {
            Expectation::Pictures(_) => {
                let (model, expects) = picture_classifier(&checkpoint, path, device)?;
                let places = places(&model, expects.shape);
                Kind::Pictures(Box::new(Watched::new(model, places, PictureModel::attentions_mut)), expects)
            }
            Expectation::Texts(_) => {
                let (model, vocabulary, expects) = text_classifier(&checkpoint, path, device)?;
                let places = blocks(model.encoder.blocks.len());
                let watched = Watched::new(model, places, |model| {
                    model.encoder.blocks.iter_mut().map(|block| &mut block.attention).collect()
                });
                Kind::Texts(Box::new(watched), Box::new(vocabulary), expects)
            }
            Expectation::Corpus(_) => {
                let (model, vocabulary) = language_model(&checkpoint, path, device)?;
                let places = blocks(model.blocks.len());
                let watched = Watched::new(model, places, |model| {
                    model.blocks.iter_mut().map(|block| &mut block.attention).collect()
                });
                Kind::Language(Box::new(watched), Box::new(vocabulary))
            }
            other
            @ (Expectation::Matches(_) | Expectation::Pairs(_) | Expectation::Recall(_) | Expectation::Own(_)) => {
                return Err(other.unasked(path, "pictures, texts or plain text"));
            }
        };
        let (path, step) = (checkpoint.path.display().to_string(), checkpoint.state.step);
        Ok(Self { path, step, recipe: checkpoint.state.recipe.clone(), kind, device: device.clone() })
    }

    /// Whether its tokens see themselves and earlier ones only.
    pub const fn is_causal(&self) -> bool {
        matches!(self.kind, Kind::Language(..))
    }

    /// Names of the classes; none of a language model's.
    pub fn classes(&self) -> &[String] {
        match &self.kind {
            Kind::Pictures(_, expects) => &expects.classes,
            Kind::Texts(_, _, expects) => &expects.classes,
            Kind::Language(..) => &[],
        }
    }

    /// Whether it was trained on pictures.
    pub fn sees_pictures(&self) -> bool {
        matches!(self.kind, Kind::Pictures(..))
    }

    /// At most `count` examples of `material`, evenly spread over it.
    ///
    /// # Errors
    /// [`Error::Unfit`] for what the model was not trained on, [`Error::Data`] for what cannot be read.
    pub fn examples(&self, material: &Material, count: usize) -> Result<Vec<Example>> {
        match &self.kind {
            Kind::Pictures(_, expects) => examples::pictures(expects, material, count),
            Kind::Texts(_, vocabulary, expects) => examples::texts(expects, vocabulary, material, count),
            Kind::Language(model, vocabulary) => examples::windows(model.plain.context, vocabulary, material, count),
        }
    }

    /// What every layer's attention is given for `example`, first layer first.
    ///
    /// # Errors
    /// [`Error::Model`], [`Error::Unfit`] for an example of another kind or a model that has diverged.
    pub fn trace(&self, example: &Example) -> Result<Vec<LayerCall>> {
        match (&self.kind, example) {
            (Kind::Pictures(model, expects), Example::Picture(picture)) => {
                let images = images(expects, picture.shape, &[&picture.bytes], &self.device);
                model.trace(|model| model.try_forward(images))
            }
            (Kind::Texts(model, ..), Example::Text(text)) => {
                let (tokens, _) = tokens(text, &[vec![false; text.ids.len()]], &self.device);
                model.trace(|model| Ok(model.try_forward(tokens, None)?))
            }
            (Kind::Language(model, _), Example::Text(text)) => {
                let (tokens, _) = tokens(text, &[vec![false; text.ids.len()]], &self.device);
                model.trace(|model| Ok(model.try_forward(tokens)?))
            }
            _ => Err(self.wrong(example)),
        }
    }

    /// The probability of each class, once for each of `removed`: which places of `grid` (row by row; for a text, which tokens)
    /// the example lacks. A picture's places are filled with its mean colour; a text's tokens are absent, and the others keep
    /// their positions.
    ///
    /// # Errors
    /// As [`Subject::trace`].
    pub fn answers(&self, example: &Example, grid: Option<[usize; 2]>, removed: &[Vec<bool>]) -> Result<Vec<Vec<f64>>> {
        // What is drawn by the place in a batch would differ from variant to variant.
        let together = if self.is_drawn_by_place() { 1 } else { removed.len().max(1) };
        let parts = removed.chunks(together).map(|removed| self.answers_together(example, grid, removed));
        Ok(parts.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Whether what the model's attention draws depends on the place of an example in its batch: starts of clusters, random landmarks.
    fn is_drawn_by_place(&self) -> bool {
        let m = &self.recipe.mechanism;
        let drawn = matches!(&m.structure, Structure::Nystrom(m) if matches!(m.landmarks, Landmarks::Random { .. }));
        drawn || m.clustering().is_some()
    }

    /// [`Subject::answers`] in one batch.
    fn answers_together(
        &self,
        example: &Example,
        grid: Option<[usize; 2]>,
        removed: &[Vec<bool>],
    ) -> Result<Vec<Vec<f64>>> {
        let logits = match (&self.kind, example) {
            (Kind::Pictures(model, expects), Example::Picture(picture)) => {
                let pictures: Vec<_> = removed.iter().map(|removed| without(picture, grid, removed)).collect();
                model.plain.try_forward(images(expects, picture.shape, &pictures, &self.device))?
            }
            (Kind::Texts(model, ..), Example::Text(text)) => {
                let (tokens, padding) = tokens(text, removed, &self.device);
                model.plain.try_forward(tokens, Some(padding))?
            }
            _ => return Err(self.wrong(example)),
        };
        let logits: Vec<f32> = logits.into_data().iter().collect();
        Ok(logits.chunks_exact(self.classes().len()).map(probabilities).collect())
    }

    /// What a language model takes for the likeliest token after a text, and its probability among those that stand for text.
    ///
    /// # Errors
    /// As [`Subject::trace`].
    pub fn next(&self, example: &Example) -> Result<(String, f64)> {
        let (Kind::Language(model, vocabulary), Example::Text(text)) = (&self.kind, example) else {
            return Err(self.wrong(example));
        };
        let (tokens, _) = tokens(text, &[vec![false; text.ids.len()]], &self.device);
        let logits = model.plain.try_forward(tokens)?;
        let logits: Vec<f32> = logits.narrow(1, text.ids.len() - 1, 1).into_data().iter().collect();
        let written = vocabulary.written();
        let choices: Vec<f32> = written.iter().map(|&id| logits[id as usize]).collect();
        let (most, _) = answer(&choices);
        Ok((vocabulary.decode(&[written[most]])?, probabilities(&choices)[most]))
    }

    fn wrong(&self, example: &Example) -> Error {
        let problem = "is not of the kind that the model was trained on".into();
        Error::Unfit { name: example.name().into(), problem }
    }
}

/// Where the attention of a model of texts is.
fn blocks(count: usize) -> Vec<Place> {
    let place = |index| Place { name: block_name(index), class_token: false, grid: None };
    (0..count).map(place).collect()
}

/// Where the attention of a model of pictures is.
fn places(model: &PictureModel, [_, height, width]: [usize; 3]) -> Vec<Place> {
    let seen: Vec<(bool, Option<[usize; 2]>)> = match model {
        PictureModel::Vit(model) => {
            let grid = model.image.map(|side| side / model.patch_side);
            vec![(model.cls.is_some(), Some(grid)); model.blocks.len()]
        }
        PictureModel::Pixels(model) => vec![(false, Some([height, width])); model.encoder.blocks.len()],
        PictureModel::Pyramid(model) => {
            let of = |stage: &resolvent::models::pyramid::Stage| {
                vec![(stage.cls.is_some(), Some(stage.grid)); stage.blocks.len()]
            };
            model.stages.iter().flat_map(of).collect()
        }
    };
    let names = model.attention_names().into_iter();
    names.zip(seen).map(|(name, (class_token, grid))| Place { name, class_token, grid }).collect()
}

/// The picture with the places of `grid` that are `removed` filled with the mean of its channels.
fn without(picture: &PictureExample, grid: Option<[usize; 2]>, removed: &[bool]) -> Vec<u8> {
    let (shape, [rows, columns]) = (picture.shape, grid.unwrap_or([1, removed.len()]));
    let mut bytes = picture.bytes.clone();
    for plane in bytes.chunks_exact_mut(shape.plane()) {
        let mean = plane.iter().map(|&byte| f64::from(byte)).sum::<f64>() / plane.len() as f64;
        for (at, byte) in plane.iter_mut().enumerate() {
            let (row, column) = (at / shape.width * rows / shape.height, at % shape.width * columns / shape.width);
            if removed[row * columns + column] {
                *byte = mean.round() as u8;
            }
        }
    }
    bytes
}

/// A text once for each of `removed`, which are no tokens.
fn tokens(text: &TextExample, removed: &[Vec<bool>], device: &Device) -> (Tensor<2, Int>, Tensor<2, Bool>) {
    let dims = [removed.len(), text.ids.len()];
    let ids: Vec<i32> = text.ids.iter().map(|&id| id as i32).collect();
    let ids = Tensor::from_data(TensorData::new(ids.repeat(removed.len()), dims), device);
    (ids, Tensor::from_data(TensorData::new(removed.concat(), dims), device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use resolvent_lab::data::PictureShape;

    #[test]
    fn removed_places_are_the_mean_colour() {
        let shape = PictureShape { channels: 1, height: 2, width: 4 };
        let bytes = vec![0, 0, 8, 8, 0, 0, 8, 16];
        let picture = PictureExample { name: String::new(), shape, bytes, label: None, boxes: None };
        assert_eq!(without(&picture, Some([1, 2]), &[false, true]), [0, 0, 5, 5, 0, 0, 5, 5]);
        assert_eq!(without(&picture, Some([1, 2]), &[false, false]), picture.bytes);
    }
}
