//! A trained classifier on picture files.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;
use serde::Serialize;

use crate::{
    Result,
    checkpoint::{Checkpoint, Expectation, PictureExpectation},
    data::{
        self, PictureShape,
        images::{decode_file, is_picture},
    },
    source::entries,
    stats::probabilities,
    stop,
    train::{self, PictureModel, Pictures},
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
        let (model, expects) = picture_classifier(&Checkpoint::find(path)?, path, device)?;
        Ok(Self { model, expects, device: device.clone() })
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
            let read = files.par_iter().map(|file| read_picture(&self.expects, file)).collect::<Result<Vec<_>>>()?;
            for (file, all) in files.iter().zip(self.probabilities(&read)?) {
                answered(self.answer(file, &all, top))?;
            }
        }
        Ok(())
    }

    fn probabilities(&self, pictures: &[Seen]) -> Result<Vec<Vec<f64>>> {
        let bytes: Vec<&[u8]> = pictures.iter().map(|picture| &*picture.bytes).collect();
        let logits = self.model.try_forward(images(&self.expects, pictures[0].shape, &bytes, &self.device))?;
        let logits = logits.into_data();
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

/// The trained classifier of pictures in the checkpoint that was found in `path`, on `device`, and what it expects.
///
/// # Errors
/// [`crate::Error::OtherModel`] when it was not trained on pictures; [`crate::Error::Damaged`], [`crate::Error::Io`].
pub fn picture_classifier(
    checkpoint: &Checkpoint,
    path: &Path,
    device: &Device,
) -> Result<(PictureModel, PictureExpectation)> {
    let Expectation::Pictures(expects) = &checkpoint.state.expects else {
        return Err(checkpoint.state.expects.unasked(path, "pictures"));
    };
    let recipe = &checkpoint.state.recipe;
    let init = |device: &Device| train::picture_model(expects, recipe, &checkpoint.state.data.name, device);
    let model = train::drawn::<Pictures>(recipe, device, init)?;
    Ok((checkpoint.load_weights(model)?, expects.clone()))
}

/// Pictures that cannot be read, by their endings: among others nobody would miss them.
const UNREAD: [&str; 8] = ["gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "jxl"];

/// The pictures of a folder, by name.
///
/// # Errors
/// [`crate::Error::Data`] for a folder that cannot be read, has none, or has pictures of other kinds too.
pub fn picture_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = entries(folder)?;
    let ending = |file: &Path| file.extension().map(|e| e.to_string_lossy().to_lowercase());
    if let Some(file) = files.iter().find(|file| ending(file).is_some_and(|ending| UNREAD.contains(&&*ending))) {
        let problem = "is neither PNG, JPEG nor WebP; convert it, or take it out of the folder".into();
        return Err(data::Error::Format { path: file.clone(), problem }.into());
    }
    files.retain(|file| !file.is_dir() && is_picture(&file.to_string_lossy()));
    if files.is_empty() {
        let problem =
            "holds no picture that ends in .png, .jpg, .jpeg or .webp; name a file, or a folder of them".into();
        return Err(data::Error::Empty { path: folder.into(), problem }.into());
    }
    Ok(files)
}

/// A picture file as a model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The shape that the model expects.
    pub shape: PictureShape,
    /// `[channels, height, width]`.
    pub bytes: Vec<u8>,
    /// The shape of the whole picture, of one channel where the file is grey.
    pub whole: PictureShape,
}

/// Reads a picture file, resized (shorter side) and cut (centre) to what the model sees.
///
/// # Errors
/// [`crate::Error::Data`] for a file that cannot be read, or is in colour where the model expects grey pictures.
pub fn read_picture(expects: &PictureExpectation, path: &Path) -> Result<Seen> {
    let [channels, height, width] = expects.shape;
    let decoded = decode_file(path, [height, width])?;
    let whole = decoded.whole;
    if whole.channels > channels {
        let problem = "is in colour, the model was trained on grey pictures; convert it".into();
        return Err(data::Error::Format { path: path.into(), problem }.into());
    }
    let shape = PictureShape { channels, height, width };
    Ok(Seen { shape, bytes: decoded.bytes.repeat(channels / whole.channels), whole })
}

/// Pictures of `shape`, `[channels, height, width]` each, as the model is shown them: `[pictures, channels, height, width]`.
pub fn images<B: AsRef<[u8]>>(
    expects: &PictureExpectation,
    shape: PictureShape,
    pictures: &[B],
    device: &Device,
) -> Tensor<4> {
    let plane = shape.plane();
    let normalised = |(at, byte): (usize, &u8)| {
        let channel = at / plane % shape.channels;
        (f32::from(*byte) / 255.0 - expects.mean[channel]) / expects.std[channel]
    };
    let values: Vec<f32> =
        pictures.iter().flat_map(|picture| picture.as_ref().iter().enumerate().map(normalised)).collect();
    let dims = [pictures.len(), shape.channels, shape.height, shape.width];
    Tensor::from_data(TensorData::new(values, dims), device)
}
