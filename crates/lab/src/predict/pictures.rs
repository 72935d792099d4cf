//! A trained classifier on picture files.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use rayon::prelude::*;
use serde::Serialize;

use crate::{
    Result,
    checkpoint::{Checkpoint, Expectation, PictureExpectation},
    stats::probabilities,
    stop,
    subject::{PictureExample, images, picture_file, picture_files},
    train::{self, PictureModel},
};

/// Pictures that are read and shown to the model at once.
const BATCH: usize = 64;

/// A trained classifier of pictures.
#[derive(Debug)]
pub struct PictureClassifier {
    model: PictureModel,
    expects: PictureExpectation,
    device: Device,
}

/// The answer of a [`PictureClassifier`] to one picture.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassifiedPicture {
    /// The picture's file.
    pub picture: PathBuf,
    /// The class with the highest probability.
    pub label: String,
    /// The most likely classes with their probabilities, the likeliest first.
    pub top: Vec<(String, f64)>,
}

impl PictureClassifier {
    /// The classifier of the run or the checkpoint in `path`, on `device`.
    ///
    /// # Errors
    /// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::OtherModel`] when it was not trained
    /// on pictures.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let checkpoint = Checkpoint::find(path)?;
        let Expectation::Pictures(expects) = checkpoint.state.expects.clone() else {
            return Err(checkpoint.state.expects.unasked(path, "pictures"));
        };
        let recipe = &checkpoint.state.recipe;
        let init = |device: &Device| train::picture_model(&expects, recipe, &checkpoint.state.data.name, device);
        let model = train::drawn(recipe.seed, device, init)?;
        Ok(Self { model: checkpoint.load_weights(model)?, expects, device: device.clone() })
    }

    /// The files of `paths`: of a folder its PNG, JPEG and WebP pictures, by name.
    ///
    /// # Errors
    /// [`crate::Error::Data`] for a folder that cannot be read, or has none.
    pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let of = |path: &PathBuf| if path.is_dir() { picture_files(path) } else { Ok(vec![path.clone()]) };
        Ok(paths.iter().map(of).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Tells `answered` of each of `files`, in their order and batch by batch, its `top` most likely classes. Pictures are resized (shorter
    /// side) and cut (centre) to what the model sees.
    ///
    /// # Errors
    /// [`crate::Error::Data`] for a picture that cannot be read, [`crate::Error::Model`], [`crate::Error::Stopped`]; those of `answered`.
    pub fn classify<E: From<crate::Error>>(
        &self,
        files: &[PathBuf],
        top: usize,
        mut answered: impl FnMut(ClassifiedPicture) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        for files in files.chunks(BATCH) {
            stop::check()?;
            let read = files.par_iter().map(|file| picture_file(&self.expects, file)).collect::<Result<Vec<_>>>()?;
            for (file, all) in files.iter().zip(self.probabilities(&read)?) {
                answered(self.answer(file, &all, top))?;
            }
        }
        Ok(())
    }

    fn probabilities(&self, pictures: &[PictureExample]) -> Result<Vec<Vec<f64>>> {
        let bytes: Vec<Vec<u8>> = pictures.iter().map(|picture| picture.bytes.clone()).collect();
        let logits = self.model.try_forward(images(&self.expects, &pictures[0], &bytes, &self.device))?.into_data();
        let logits: Vec<f32> = logits.iter().collect();
        Ok(logits.chunks_exact(self.expects.classes.len()).map(probabilities).collect())
    }

    fn answer(&self, file: &Path, all: &[f64], top: usize) -> ClassifiedPicture {
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|&a, &b| all[b].total_cmp(&all[a]));
        let named = |&class: &usize| (self.expects.classes[class].clone(), all[class]);
        let label = order.first().map(|first| self.expects.classes[*first].clone()).unwrap_or_default();
        ClassifiedPicture { picture: file.into(), label, top: order.iter().take(top).map(named).collect() }
    }
}
