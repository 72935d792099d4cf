//! Pictures as a task: batches and tensors, the vision transformer, its loss and judgement.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use resolvent::{
    attention::MultiHeadAttention,
    models::{PyramidConfig, VitConfig},
};
use resolvent_kernels::mechanism::KappaRule;
use serde::{Deserialize, Serialize};

use super::{
    Errors, PackedWeights, Part, PictureModel, Samples, Task, TaskData, device_of, packed_weights,
    picture_model::LEVELS,
    samples::{LOOKED_AT, thumbnail},
    soft_cross_entropy,
    text_model::{check_classifies, text_config},
};
use crate::{
    Error, Recipe, Result,
    augment::{Augment, Transform},
    checkpoint::{Checkpoint, DataIdentity, Expectation, PictureExpectation},
    data::{BatchPlan, Batches, ChannelStats, PictureBatch, PictureDataset, PictureLoader, PictureShape, PictureSplit},
    evaluation::{BATCH, Evaluation, Tally, check_labels},
    recipe::ModelRecipe,
    stats::spread,
};

/// The pictures of a run.
#[derive(Debug, Clone)]
pub struct Pictures {
    name: String,
    train: Arc<PictureSplit>,
    watched: Arc<PictureSplit>,
    test: Arc<PictureSplit>,
    brings_validation: bool,
    expects: PictureExpectation,
}

impl TaskData for PictureDataset {
    type Task = Pictures;

    fn settled(&self, recipe: &Recipe) -> Recipe {
        // A model of texts reads pixels as it reads words.
        let reads_pixels = matches!(recipe.model, ModelRecipe::Text(_));
        recipe.with_length_scale(if reads_pixels { KappaRule::Text } else { KappaRule::Vision })
    }

    fn identity(&self) -> DataIdentity {
        DataIdentity::new(&self.name, self.fingerprint())
    }

    fn task(&self, recipe: &Recipe) -> Result<Pictures> {
        Pictures::new(self, recipe, None)
    }

    fn fine_tuned(&self, recipe: &Recipe, checkpoint: &mut Checkpoint) -> Result<Pictures> {
        match &checkpoint.state.expects {
            Expectation::Pictures(_) => self.task(recipe),
            other => Err(other.cannot_begin(&self.name, "pictures")),
        }
    }

    fn restored(&self, checkpoint: &mut Checkpoint) -> Result<Pictures> {
        let Expectation::Pictures(expects) = &checkpoint.state.expects else {
            return Err(checkpoint.state.expects.refuses(&self.name, "pictures"));
        };
        expects.check(self)?;
        Pictures::new(self, &checkpoint.state.recipe, Some(expects))
    }
}

impl Pictures {
    /// The pictures of `dataset` as the recipe divides them, for a model that expects `trained` or will expect what is learnt from.
    fn new(dataset: &PictureDataset, recipe: &Recipe, trained: Option<&PictureExpectation>) -> Result<Self> {
        for split in [Some(&dataset.train), dataset.validation.as_ref(), Some(&dataset.test)].into_iter().flatten() {
            check_split(dataset, split)?;
        }
        let test = Arc::new(dataset.test.clone());
        let (train, watched) = match (&dataset.validation, recipe.regularisation.hold_out) {
            (Some(validation), _) => (dataset.train.clone(), Arc::new(validation.clone())),
            (None, share) if share > 0.0 => {
                let (train, watched) = dataset.train.hold_out(share, recipe.seed);
                (train, Arc::new(watched))
            }
            _ => (dataset.train.clone(), test.clone()),
        };
        let expects = match trained {
            Some(expects) => expects.clone(),
            // Pixels that are tokens keep their levels, 0 to 255.
            None if matches!(recipe.model, ModelRecipe::Text(_)) => {
                let channels = dataset.shape.channels;
                let stats = ChannelStats { mean: vec![0.0; channels], std: vec![1.0 / 255.0; channels] };
                PictureExpectation::new(dataset, &stats)
            }
            None => PictureExpectation::new(dataset, &train.channel_stats()?),
        };
        let brings_validation = dataset.validation.is_some();
        Ok(Self { name: dataset.name.clone(), train: Arc::new(train), watched, test, brings_validation, expects })
    }

    /// As [`TaskData::restored`], for pictures of another size than the model was trained on.
    pub(crate) fn restored_at_any_size(dataset: &PictureDataset, checkpoint: &Checkpoint) -> Result<Self> {
        let Expectation::Pictures(expects) = &checkpoint.state.expects else {
            return Err(checkpoint.state.expects.refuses(&dataset.name, "pictures"));
        };
        expects.check_kind(dataset)?;
        Self::new(dataset, &checkpoint.state.recipe, Some(expects))
    }

    fn stats(&self) -> ChannelStats {
        self.expects.stats()
    }

    fn loader(&self, split: &Arc<PictureSplit>, augment: Augment, plan: BatchPlan) -> Result<PictureLoader> {
        let transform = Transform::new(split.shape(), self.stats(), augment)?;
        Ok(PictureLoader::new(split.clone(), transform, plan, self.expects.classes.len()))
    }

    /// The answers on a part of the data of a model on `device` whose logits `[batch, classes]` of pictures `[batch, channels, height,
    /// width]` are those of `forward`: for a model of one's own.
    ///
    /// # Errors
    /// [`Error::Data`] for pictures that cannot be read, [`Error::Unfit`] for logits of other classes, those of `forward`.
    pub fn judge(
        &self,
        part: Part,
        device: &Device,
        forward: impl Fn(Tensor<4>) -> Result<Tensor<2>>,
    ) -> Result<Tally<'_>> {
        self.judge_split(if part == Part::Test { &self.test } else { &self.watched }, device, forward)
    }

    fn judge_split(
        &self,
        split: &Arc<PictureSplit>,
        device: &Device,
        forward: impl Fn(Tensor<4>) -> Result<Tensor<2>>,
    ) -> Result<Tally<'_>> {
        let loader = self.loader(split, Augment::default(), BatchPlan::evaluation(BATCH))?;
        let mut tally = Tally::new(&self.expects.classes);
        for batch in loader.epoch(0, 0)? {
            crate::stop::check()?;
            let mut batch = batch?;
            let logits = forward(images(&mut batch, split.shape(), device))?;
            tally.add_batch(logits, &batch.labels)?;
        }
        Ok(tally)
    }
}

/// The recipe's model, its weights not yet drawn, for pictures as it is to `expect` them; `name` is the data set.
pub(crate) fn picture_model(
    expects: &PictureExpectation,
    recipe: &Recipe,
    name: &str,
    device: &Device,
) -> Result<PictureModel> {
    let (mechanism, [channels, height, width]) = (&recipe.mechanism, expects.shape);
    match &recipe.model {
        ModelRecipe::Vit(m) => Ok(PictureModel::Vit(vit(expects, m, recipe, name)?.try_init(device)?)),
        ModelRecipe::Pyramid(m) => {
            let config = m.config(mechanism, [height, width], channels, expects.classes.len())?;
            let config = PyramidConfig { precision: recipe.precision, ..config };
            Ok(PictureModel::Pyramid(config.try_init(device)?))
        }
        ModelRecipe::Text(_) => {
            let config = text_config(recipe, name, LEVELS, height * width)?;
            check_classifies(recipe, name, "pictures")?;
            Ok(PictureModel::Pixels(config.try_init_classifier(expects.classes.len(), device)?))
        }
        _ => Err(wrong_kind(name, "pictures", "vit`, `pyramid` or `text")),
    }
}

fn vit(expects: &PictureExpectation, m: &VitConfig, recipe: &Recipe, name: &str) -> Result<VitConfig> {
    let [channels, height, width] = expects.shape;
    if !height.is_multiple_of(m.patch) || !width.is_multiple_of(m.patch) {
        let patch = m.patch;
        let problem = format!(
            "its pictures are {height} x {width}, which patches of {patch} do not divide; change `model.patch`"
        );
        return Err(Error::Unfit { name: name.into(), problem });
    }
    let (image, classes, mechanism) = ([height, width], expects.classes.len(), recipe.mechanism.clone());
    Ok(VitConfig { image, channels, classes, mechanism, precision: recipe.precision, ..m.clone() })
}

impl Task for Pictures {
    type Model = PictureModel;
    type Batch = PictureBatch;
    type Inputs = (Tensor<4>, Tensor<2>);

    fn train_len(&self) -> usize {
        self.train.len()
    }

    fn brings_validation(&self) -> bool {
        self.brings_validation
    }

    fn expects(&self) -> Expectation {
        Expectation::Pictures(self.expects.clone())
    }

    fn attentions(model: &mut PictureModel) -> Vec<(String, &mut MultiHeadAttention)> {
        let names = model.attention_names();
        names.into_iter().zip(model.attentions_mut()).collect()
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<PictureModel> {
        picture_model(&self.expects, recipe, &self.name, device)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<PictureBatch>> {
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        Ok(self.loader(&self.train, recipe.augment.clone(), plan)?.epoch(epoch, first)?)
    }

    fn len_of(batch: &PictureBatch) -> usize {
        batch.len()
    }

    fn inputs(&self, recipe: &Recipe, mut batch: PictureBatch, device: &Device) -> Self::Inputs {
        let pictures = images(&mut batch, self.train.shape(), device);
        let (classes, smoothing) = (self.expects.classes.len(), recipe.regularisation.label_smoothing);
        (pictures, smoothed(batch.targets, classes, smoothing, device))
    }

    fn loss(&self, model: &PictureModel, (pictures, targets): Self::Inputs) -> Result<Tensor<1>> {
        Ok(soft_cross_entropy(model.try_forward(pictures)?, targets))
    }

    fn predict(&self, model: &PictureModel, (pictures, _): Self::Inputs) -> Result<()> {
        model.try_forward(pictures)?.into_data();
        Ok(())
    }

    fn evaluate(&self, model: &PictureModel, part: Part) -> Result<Evaluation> {
        Ok(self.judge(part, &device_of(model), |pictures| model.try_forward(pictures))?.finish())
    }

    fn samples(&self, _recipe: &Recipe, model: &PictureModel) -> Result<Option<Samples>> {
        let examples: Vec<usize> = spread(self.test.len(), LOOKED_AT).collect();
        let split = Arc::new(self.test.select(&examples));
        let logits = self.judge_split(&split, &device_of(model), |pictures| model.try_forward(pictures))?.logits;
        let show = |example| Ok::<_, Error>(thumbnail(self.test.shape(), &self.test.picture(example)?));
        let errors = Errors::new(&self.expects.classes, &logits, &examples, split.labels(), show)?;
        Ok(Some(Samples::Errors(errors)))
    }

    fn packed(model: &PictureModel) -> Result<Option<PackedWeights>> {
        match model {
            PictureModel::Vit(model) => packed_weights(&model.blocks),
            PictureModel::Pixels(model) => packed_weights(&model.encoder.blocks),
            PictureModel::Pyramid(model) => packed_weights(model.stages.iter().flat_map(|stage| &stage.blocks)),
        }
    }
}

/// How many landmarks the attention of a model, or of a stage, has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LandmarkCount {
    /// Tokens that meet through them.
    pub tokens: usize,
    /// Their number.
    pub landmarks: usize,
}

/// How many landmarks the recipe's model has for the data that it is to `expect`, stage by stage where it has stages; of texts, whose
/// lengths differ, of stages without landmarks and of models of one's own nothing is said. `name` is the data set.
///
/// # Errors
/// As [`Task::model`].
pub(crate) fn landmark_counts(expects: &Expectation, recipe: &Recipe, name: &str) -> Result<Vec<LandmarkCount>> {
    let Expectation::Pictures(expects) = expects else { return Ok(Vec::new()) };
    let [channels, height, width] = expects.shape;
    let (tokens, landmarks) = match &recipe.model {
        ModelRecipe::Vit(m) => {
            let config = vit(expects, m, recipe, name)?;
            (vec![config.tokens()], vec![config.landmarks()])
        }
        ModelRecipe::Pyramid(m) => {
            let image = [height, width];
            let config = m.config(&recipe.mechanism, image, channels, expects.classes.len())?;
            (config.grids(image).map(|[rows, columns]| rows * columns).to_vec(), config.landmarks(image).to_vec())
        }
        _ => return Ok(Vec::new()),
    };
    let counts = tokens.into_iter().zip(landmarks);
    Ok(counts.filter_map(|(tokens, landmarks)| Some(LandmarkCount { tokens, landmarks: landmarks? })).collect())
}

/// What a model of pictures is made of.
pub(crate) struct ModelSize {
    /// Without those of decays and kernels' widths.
    pub parameters: u64,
    /// Of the logits of a picture.
    pub multiply_adds: u64,
    /// Numbers in the outputs of all blocks, of a picture.
    pub block_outputs: u64,
}

/// The size of the recipe's model for these pictures, a vision transformer or a pyramid.
///
/// # Errors
/// As [`Task::model`].
pub(crate) fn model_size(task: &Pictures, recipe: &Recipe) -> Result<ModelSize> {
    let [channels, height, width] = task.expects.shape;
    let image = [height, width];
    Ok(match &recipe.model {
        ModelRecipe::Vit(m) => {
            let config = vit(&task.expects, m, recipe, &task.name)?;
            let (parameters, multiply_adds) = (config.parameter_count() as u64, config.multiply_adds(image)?);
            ModelSize { parameters, multiply_adds, block_outputs: (config.tokens() * config.dim * config.depth) as u64 }
        }
        ModelRecipe::Pyramid(m) => {
            let config = m.config(&recipe.mechanism, image, channels, task.expects.classes.len())?;
            let (parameters, multiply_adds) = (config.parameter_count() as u64, config.multiply_adds(image)?);
            let stages = config.grids(image).into_iter().zip(&config.stages);
            let outputs = stages.map(|([rows, columns], stage)| (rows * columns * stage.dim * stage.depth) as u64);
            ModelSize { parameters, multiply_adds, block_outputs: outputs.sum() }
        }
        _ => return Err(wrong_kind(&task.name, "pictures", "vit` or `pyramid")),
    })
}

/// Checks that the pictures of `split` are of the shape and the classes of `dataset`.
fn check_split(dataset: &PictureDataset, split: &PictureSplit) -> Result<()> {
    if split.shape() != dataset.shape {
        let (found, expected) = (split.shape(), dataset.shape);
        let problem = format!("it has pictures of {found:?} beside those of {expected:?}; give all one shape");
        return Err(Error::Unfit { name: dataset.name.clone(), problem });
    }
    check_labels(&dataset.name, dataset.classes.len(), split.labels())
}

/// The error of a recipe whose model is not for what the data set `name` holds.
pub(super) fn wrong_kind(name: &str, holds: &str, kind: &str) -> Error {
    let problem = format!("it holds {holds}, for which the recipe's model is not made; set `model.kind` to `{kind}`");
    Error::Unfit { name: name.into(), problem }
}

/// The values of `batch` as `[batch, channels, height, width]`.
fn images(batch: &mut PictureBatch, shape: PictureShape, device: &Device) -> Tensor<4> {
    let dims = [batch.len(), shape.channels, shape.height, shape.width];
    Tensor::from_data(TensorData::new(std::mem::take(&mut batch.pixels), dims), device)
}

/// `targets [batch, classes]`, with the share `smoothing` spread over all classes.
pub(super) fn smoothed(mut targets: Vec<f32>, classes: usize, smoothing: f64, device: &Device) -> Tensor<2> {
    let (kept, floor) = (1.0 - smoothing as f32, smoothing as f32 / classes as f32);
    targets.iter_mut().for_each(|target| *target = kept * *target + floor);
    let batch = targets.len() / classes;
    Tensor::from_data(TensorData::new(targets, [batch, classes]), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_spreads_a_share_over_all_classes() {
        let targets = vec![1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0];
        let smoothed = smoothed(targets, 4, 0.2, &Device::flex()).into_data();
        let expected = [[0.85, 0.05, 0.05, 0.05], [0.45, 0.45, 0.05, 0.05]];
        smoothed.assert_approx_eq::<f32>(&TensorData::from(expected), burn::tensor::Tolerance::absolute(1e-6));
    }
}
