//! Evaluation: accuracy, loss, confusion and speed.

use std::{path::Path, sync::Arc, time::Instant};

use burn::tensor::Device;
use resolvent::models::Vit;
use serde::{Deserialize, Serialize};

use crate::{
    Result,
    augment::{Augment, Transform},
    checkpoint::Checkpoint,
    data::{Batch, BatchPlan, ChannelStats, Dataset, Loader, PictureShape, Split},
    train::{self, images},
};

/// Pictures per batch. Accuracy does not depend on it.
const BATCH: usize = 250;

/// What a model does on labelled pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of pictures.
    pub images: usize,
    /// Share of pictures whose highest logit is the label's.
    pub accuracy: f64,
    /// Share of pictures whose label is among the five highest logits; absent for five classes or fewer.
    pub top5: Option<f64>,
    /// Mean cross-entropy.
    pub loss: f64,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Accuracy on the pictures of each class; absent for a class without pictures.
    pub per_class: Vec<Option<f64>>,
    /// `confusion[label][answer]`, in pictures.
    pub confusion: Vec<Vec<u64>>,
    /// Pictures per second, reading of the batch included.
    pub images_per_second: f64,
}

/// Counts while the pictures go by.
#[derive(Debug)]
struct Tally {
    confusion: Vec<Vec<u64>>,
    in_top5: u64,
    loss: f64,
}

impl Tally {
    fn new(classes: usize) -> Self {
        Self { confusion: vec![vec![0; classes]; classes], in_top5: 0, loss: 0.0 }
    }

    /// One picture: its logits and its label. Ties go to the lower class; NaN is never the answer.
    fn add(&mut self, logits: &[f32], label: usize) {
        let above = |x: f32| logits.iter().filter(|&&other| other > x).count();
        let (answer, highest) = logits
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), |best, (class, &logit)| if logit > best.1 { (class, logit) } else { best });
        self.confusion[label][answer] += 1;
        self.in_top5 += u64::from(above(logits[label]) < 5);
        let highest = f64::from(highest);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - highest).exp()).sum();
        self.loss += highest + sum.ln() - f64::from(logits[label]);
    }

    fn finish(self, classes: &[String], seconds: f64) -> Evaluation {
        let of_class: Vec<u64> = self.confusion.iter().map(|row| row.iter().sum()).collect();
        let right: Vec<u64> = self.confusion.iter().enumerate().map(|(class, row)| row[class]).collect();
        let images: u64 = of_class.iter().sum();
        let share = |part: u64, whole: u64| part as f64 / whole as f64;
        Evaluation {
            images: images as usize,
            accuracy: share(right.iter().sum(), images),
            top5: (classes.len() > 5).then(|| share(self.in_top5, images)),
            loss: self.loss / images as f64,
            classes: classes.to_vec(),
            per_class: right.iter().zip(&of_class).map(|(&r, &n)| (n > 0).then(|| share(r, n))).collect(),
            confusion: self.confusion,
            images_per_second: images as f64 / seconds.max(f64::MIN_POSITIVE),
        }
    }
}

/// Evaluates `model` on all pictures of `split`, which are normalised by `stats`.
///
/// # Errors
/// [`crate::Error::Model`] when the pictures do not fit the model.
pub fn evaluate(model: &Vit, split: &Arc<Split>, stats: &ChannelStats, classes: &[String]) -> Result<Evaluation> {
    let transform = Transform::new(split.shape(), stats.clone(), Augment::default())?;
    let loader = Loader::new(split.clone(), transform, BatchPlan::evaluation(BATCH), classes.len());
    let began = Instant::now();
    let mut tally = Tally::new(classes.len());
    for mut batch in loader.epoch(0, 0) {
        let logits = logits(model, &mut batch, split.shape())?;
        for (row, &label) in logits.chunks_exact(classes.len()).zip(&batch.labels) {
            tally.add(row, label as usize);
        }
    }
    Ok(tally.finish(classes, began.elapsed().as_secs_f64()))
}

/// The logits of a batch, row by row.
pub(crate) fn logits(model: &Vit, batch: &mut Batch, shape: PictureShape) -> Result<Vec<f32>> {
    let logits = model.try_forward(images(batch, shape, &Device::flex()))?;
    Ok(logits.into_data().iter::<f32>().collect())
}

/// Evaluates the run or the checkpoint in `path` on the test pictures of `dataset`.
///
/// Of a run, the weights that its summary was made with: the best epoch's where the recipe stops early, else the newest
/// checkpoint's. Pictures are normalised as in training.
///
/// # Errors
/// [`crate::Error::NoCheckpoint`], [`crate::Error::Damaged`], [`crate::Error::Io`]; [`crate::Error::Unfit`] when the data set has other classes or
/// another shape than the model was trained on.
pub fn run(path: &Path, dataset: &Dataset) -> Result<(Checkpoint, Evaluation)> {
    let mut checkpoint = Checkpoint::find(path)?;
    checkpoint.state.expects.check(dataset)?;
    let model = train::build(&checkpoint.state.recipe, dataset, &Device::flex())?;
    let model = checkpoint.load_weights(model)?;
    let stats = checkpoint.state.expects.stats();
    let evaluation = evaluate(&model, &Arc::new(dataset.test.clone()), &stats, &dataset.classes)?;
    Ok((checkpoint, evaluation))
}
