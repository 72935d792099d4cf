//! What a run learns from and what it watches, as batches and tensors.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};

use crate::{
    Error, Recipe, Result,
    augment::Transform,
    data::{Batch, BatchPlan, ChannelStats, Dataset, Loader, PictureShape, Split},
};

/// The pictures of a run.
pub(crate) struct Pictures {
    /// What is learnt from.
    pub train: Arc<Split>,
    /// What is evaluated after each epoch.
    pub watched: Arc<Split>,
    /// Its name: `test`, or `held-out`.
    pub watched_name: &'static str,
    /// What pictures are normalised by: the statistics of those learnt from.
    pub stats: ChannelStats,
    classes: usize,
}

impl Pictures {
    /// Divides `dataset` as the recipe says.
    pub fn new(recipe: &Recipe, dataset: &Dataset) -> Result<Self> {
        let share = recipe.regularisation.hold_out;
        let (train, watched, watched_name) = if share > 0.0 {
            let (train, watched) = dataset.train.hold_out(share, recipe.seed);
            (train, watched, "held-out")
        } else {
            (dataset.train.clone(), dataset.test.clone(), "test")
        };
        let batch = recipe.schedule.batch_size;
        if train.len() < batch {
            let problem = format!(
                "{} pictures to learn from do not fill a batch of {batch}; lower `schedule.batch_size`",
                train.len()
            );
            return Err(Error::Unfit { name: dataset.name.clone(), problem });
        }
        let (stats, classes) = (train.channel_stats(), dataset.classes.len());
        Ok(Self { train: Arc::new(train), watched: Arc::new(watched), watched_name, stats, classes })
    }

    /// The training batches.
    pub fn loader(&self, recipe: &Recipe) -> Result<Loader> {
        let transform = Transform::new(self.train.shape(), self.stats.clone(), recipe.augment.clone())?;
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        Ok(Loader::new(self.train.clone(), transform, plan, self.classes))
    }
}

/// The values of `batch` as `[batch, channels, height, width]`.
pub(crate) fn images(batch: &mut Batch, shape: PictureShape, device: &Device) -> Tensor<4> {
    let dims = [batch.len(), shape.channels, shape.height, shape.width];
    Tensor::from_data(TensorData::new(std::mem::take(&mut batch.pixels), dims), device)
}

/// The targets of `batch` as `[batch, classes]`, with the share `smoothing` spread over all classes.
pub(crate) fn targets(batch: &mut Batch, smoothing: f64, device: &Device) -> Tensor<2> {
    let classes = batch.targets.len() / batch.labels.len();
    let mut targets = std::mem::take(&mut batch.targets);
    let (kept, floor) = (1.0 - smoothing as f32, smoothing as f32 / classes as f32);
    targets.iter_mut().for_each(|target| *target = kept * *target + floor);
    Tensor::from_data(TensorData::new(targets, [batch.labels.len(), classes]), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_spreads_a_share_over_all_classes() {
        let mut batch = Batch {
            position: 0,
            pixels: vec![],
            targets: vec![1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0],
            labels: vec![0, 1],
            indices: vec![0, 1],
        };
        let smoothed = targets(&mut batch, 0.2, &Device::flex()).into_data();
        let expected = [[0.85, 0.05, 0.05, 0.05], [0.45, 0.45, 0.05, 0.05]];
        smoothed.assert_approx_eq::<f32>(&TensorData::from(expected), burn::tensor::Tolerance::absolute(1e-6));
    }
}
