//! Batches in a reproducible order, prepared ahead of time.

use std::{
    ops::Range,
    panic::resume_unwind,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    thread::JoinHandle,
};

use rand::seq::SliceRandom;
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};

use super::{
    Error, PictureSplit, Result,
    rng::{Purpose, stream},
};
use crate::augment::Transform;

/// Batches that wait while the model is busy: enough to level out one slow batch, little memory.
const AHEAD: usize = 2;

/// Which pictures make which batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    /// Pictures per batch, at least 1.
    pub batch_size: usize,
    /// Whether every epoch has an order of its own; otherwise pictures come as they are stored.
    pub shuffle: bool,
    /// Whether a last, smaller batch is left out.
    pub drop_last: bool,
    /// Seed of order and augmentation.
    pub seed: u64,
}

impl BatchPlan {
    /// For training: shuffled, whole batches only.
    pub fn training(batch_size: usize, seed: u64) -> Self {
        BatchPlan { batch_size, shuffle: true, drop_last: true, seed }
    }

    /// For evaluation: every picture once, as stored.
    pub fn evaluation(batch_size: usize) -> Self {
        BatchPlan { batch_size, shuffle: false, drop_last: false, seed: 0 }
    }

    /// The order of `len` pictures in `epoch`: a permutation that depends on seed and epoch alone.
    pub fn order(&self, len: usize, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        if self.shuffle {
            order.shuffle(&mut stream(Purpose::Order, self.seed, epoch, 0));
        }
        order
    }

    /// Batches in an epoch of `len` pictures.
    pub fn batches(&self, len: usize) -> usize {
        if self.drop_last { len / self.batch_size } else { len.div_ceil(self.batch_size) }
    }
}

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
        let order = self.plan.order(self.split.len(), epoch);
        let workers = if self.split.decodes() { Some(workers()?) } else { None };
        Ok(Batches::trying(first..self.batches(), move |position| {
            let batch = loader.plan.batch_size;
            let end = order.len().min((position + 1) * batch);
            let make = || loader.batch(epoch, position, &order[position * batch..end]);
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

/// The batches of an epoch, in order, up to the first that cannot be made; dropping it ends the work.
#[derive(Debug)]
pub struct Batches<B> {
    receiver: Option<Receiver<Result<B>>>,
    worker: Option<JoinHandle<()>>,
}

impl<B: Send + 'static> Batches<B> {
    /// The batches at `positions`, made by a thread of their own a little ahead of their use.
    pub(crate) fn ahead(positions: Range<usize>, make: impl Fn(usize) -> B + Send + 'static) -> Self {
        Self::trying(positions, move |position| Ok(make(position)))
    }

    /// As [`Batches::ahead`], of batches that may not be made.
    pub(crate) fn trying(positions: Range<usize>, make: impl Fn(usize) -> Result<B> + Send + 'static) -> Self {
        let (sender, receiver) = sync_channel(AHEAD);
        let worker = std::thread::spawn(move || {
            for position in positions {
                let batch = make(position);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        });
        Batches { receiver: Some(receiver), worker: Some(worker) }
    }
}

impl<B> Iterator for Batches<B> {
    /// A batch, or what is wrong with a picture of it.
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        let batch = self.receiver.as_ref()?.recv().ok();
        if batch.is_none()
            && let Some(Err(panic)) = self.worker.take().map(JoinHandle::join)
        {
            resume_unwind(panic);
        }
        batch
    }
}

impl<B> Drop for Batches<B> {
    fn drop(&mut self) {
        self.receiver = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been, or no longer needs to be, reported: nobody waits for its batches.
            let _ = worker.join();
        }
    }
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
    fn an_order_is_a_permutation_of_its_own_per_epoch_and_seed() {
        let plan = BatchPlan::training(8, 5);
        let order = plan.order(1000, 3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        assert_eq!(order, plan.order(1000, 3));
        assert_ne!(order, plan.order(1000, 4));
        assert_ne!(order, BatchPlan { seed: 6, ..plan }.order(1000, 3));
        assert!(BatchPlan::evaluation(8).order(5, 1).into_iter().eq(0..5));
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
