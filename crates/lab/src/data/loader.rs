//! Batches of pictures, decoded, changed and normalised in parallel.

use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};

use super::{
    BatchPlan, Batches, Error, PictureSplit, Result,
    rng::{Purpose, stream},
};
use crate::augment::Transform;

/// Pictures as a model takes them.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureBatch {
    /// Position of the batch in its epoch.
    pub position: usize,
    /// Normalised values `[batch, channels, height, width]`.
    pub pixels: Vec<f32>,
    /// Soft targets `[batch, classes]`, each row summing to 1; one-hot where nothing is mixed.
    pub targets: Vec<f32>,
    /// The class of each picture, before mixing.
    pub labels: Vec<u32>,
    /// Each picture's index in the split.
    pub indices: Vec<usize>,
}

impl PictureBatch {
    /// Number of pictures.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no picture.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }
}

/// Makes the batches of a split.
#[derive(Debug, Clone)]
pub struct PictureLoader {
    split: Arc<PictureSplit>,
    transform: Arc<Transform>,
    plan: BatchPlan,
    classes: usize,
}

impl PictureLoader {
    /// Batches of `split`, whose labels are below `classes`.
    ///
    /// # Panics
    /// If the batch size is 0 or a label is no class.
    pub fn new(split: Arc<PictureSplit>, transform: Transform, plan: BatchPlan, classes: usize) -> Self {
        assert!(plan.batch_size > 0, "a batch holds at least one picture");
        assert!(split.labels().iter().all(|&label| (label as usize) < classes), "labels must be below {classes}");
        PictureLoader { split, transform: Arc::new(transform), plan, classes }
    }

    /// Batches in an epoch.
    pub fn batches(&self) -> usize {
        self.plan.batches(self.split.len())
    }

    /// The pictures that batches are made of.
    pub fn split(&self) -> &PictureSplit {
        &self.split
    }

    /// Batch `position` of `epoch` whose pictures stand at `indices`; pictures are prepared in parallel.
    fn batch(&self, epoch: u64, position: usize, indices: &[usize]) -> Result<PictureBatch> {
        let volume = self.transform.output_shape().volume();
        let mut pixels = vec![0.0; indices.len() * volume];
        pixels.par_chunks_mut(volume).zip(indices).try_for_each(|(out, &index)| {
            let mut rng = stream(Purpose::Augment, self.plan.seed, epoch, index as u64);
            self.split.prepare(index, &self.transform, &mut rng, out)
        })?;
        let labels: Vec<u32> = indices.iter().map(|&index| self.split.labels()[index]).collect();
        let mut targets = vec![0.0; indices.len() * self.classes];
        for (row, &label) in targets.chunks_exact_mut(self.classes).zip(&labels) {
            row[label as usize] = 1.0;
        }
        if let Some(mix) = &self.transform.augment().mix {
            let mut rng = stream(Purpose::Mix, self.plan.seed, epoch, position as u64);
            mix.apply(self.transform.output_shape(), &mut pixels, &mut targets, &mut rng);
        }
        Ok(PictureBatch { position, pixels, targets, labels, indices: indices.to_vec() })
    }

    /// The batches of `epoch` from `first` on, prepared by a thread of their own. The content depends on plan, epoch and
    /// position alone, so that a resumed epoch continues as if it had never stopped. Where pictures are decoded when they are needed,
    /// as many threads as the program has for computing decode beside them.
    ///
    /// # Errors
    /// [`Error::Io`] where the threads cannot be started.
    pub fn epoch(&self, epoch: u64, first: usize) -> Result<Batches<PictureBatch>> {
        let loader = self.clone();
        let workers = if self.split.decodes() { Some(workers()?) } else { None };
        Ok(self.plan.epoch(self.split.len(), epoch, first, move |position, indices| {
            let make = || loader.batch(epoch, position, indices);
            workers.as_ref().map_or_else(make, |workers| workers.install(make))
        }))
    }
}

/// Threads that wait for disks and decode while others compute.
fn workers() -> Result<ThreadPool> {
    let count = rayon::current_num_threads();
    let pool = ThreadPoolBuilder::new().num_threads(count).thread_name(|index| format!("decode-{index}")).build();
    pool.map_err(|e| Error::Io { path: "threads that decode pictures".into(), source: std::io::Error::other(e) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{augment::Augment, data::Shapes};

    fn loader(plan: BatchPlan, augment: Augment) -> PictureLoader {
        let data = Shapes { train: 50, test: 1, size: 16, ..Default::default() }.generate().unwrap();
        let stats = data.train.channel_stats().unwrap();
        let transform = Transform::new(data.shape, stats, augment).unwrap();
        PictureLoader::new(Arc::new(data.train), transform, plan, data.classes.len())
    }

    #[test]
    fn the_last_batch_is_dropped_or_small() {
        let sizes = |drop_last| -> Vec<usize> {
            let plan = BatchPlan { drop_last, ..BatchPlan::training(16, 0) };
            loader(plan, Augment::default()).epoch(0, 0).unwrap().map(|batch| batch.unwrap().len()).collect()
        };
        assert_eq!(sizes(true), [16, 16, 16]);
        assert_eq!(sizes(false), [16, 16, 16, 2]);
    }

    #[test]
    fn a_resumed_epoch_and_any_thread_count_give_the_same_batches() {
        let loader = loader(BatchPlan::training(8, 1), Augment::deit());
        let epoch =
            |epoch, first| loader.epoch(epoch, first).unwrap().map(Result::unwrap).collect::<Vec<PictureBatch>>();
        let whole = epoch(2, 0);
        assert_eq!(whole.len(), loader.batches());
        assert_eq!(epoch(2, 4), whole[4..]);
        let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(single.install(|| loader.batch(2, 5, &whole[5].indices)).unwrap(), whole[5]);
        assert_ne!(epoch(3, 0)[0].pixels, whole[0].pixels);
        for batch in &whole {
            assert_eq!(batch.pixels.len(), 8 * 3 * 16 * 16);
            assert!(batch.targets.chunks(8).all(|target| (target.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        }
    }

    #[test]
    fn stopping_early_ends_the_work() {
        let loader = loader(BatchPlan::training(1, 0), Augment::default());
        let mut batches = loader.epoch(0, 0).unwrap();
        assert_eq!(batches.next().unwrap().unwrap().position, 0);
        drop(batches);
        assert_eq!(Arc::strong_count(&loader.split), 1, "the worker has gone");
    }
}
