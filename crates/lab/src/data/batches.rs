//! Batches of any kind in a reproducible order, prepared ahead of time.

use std::{
    ops::Range,
    panic::resume_unwind,
    sync::mpsc::{Receiver, sync_channel},
    thread::JoinHandle,
};

use rand::seq::SliceRandom;

use super::{
    Result,
    rng::{Purpose, stream},
};

/// Batches that wait while the model is busy: enough to level out one slow batch, little memory.
const AHEAD: usize = 2;

/// Which examples make which batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    /// Examples per batch, at least 1.
    pub batch_size: usize,
    /// Whether every epoch has an order of its own; otherwise examples come as they are stored.
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

    /// For evaluation: every example once, as stored.
    pub fn evaluation(batch_size: usize) -> Self {
        BatchPlan { batch_size, shuffle: false, drop_last: false, seed: 0 }
    }

    /// The order of `len` examples in `epoch`: a permutation that depends on seed and epoch alone.
    pub fn order(&self, len: usize, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        if self.shuffle {
            order.shuffle(&mut stream(Purpose::Order, self.seed, epoch, 0));
        }
        order
    }

    /// Batches in an epoch of `len` examples.
    pub fn batches(&self, len: usize) -> usize {
        if self.drop_last { len / self.batch_size } else { len.div_ceil(self.batch_size) }
    }

    /// The batches of `epoch` over `len` examples, from the one at `first` on. `make` gets the position of a batch in its epoch and the
    /// numbers of its examples; where its answer depends on them alone, an epoch that is resumed goes on as if it had never stopped.
    ///
    /// ```
    /// use resolvent_lab::data::BatchPlan;
    /// let squares = |first| BatchPlan::training(2, 7).epoch(6, 0, first, |_, numbers| {
    ///     Ok(numbers.iter().map(|number| number * number).collect::<Vec<_>>())
    /// });
    /// let whole = squares(0).collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(whole.len(), 3);
    /// assert_eq!(squares(1).collect::<Result<Vec<_>, _>>()?, whole[1..]);
    /// # Ok::<(), resolvent_lab::data::Error>(())
    /// ```
    pub fn epoch<B: Send + 'static>(
        &self,
        len: usize,
        epoch: u64,
        first: usize,
        make: impl Fn(usize, &[usize]) -> Result<B> + Send + 'static,
    ) -> Batches<B> {
        let (order, size) = (self.order(len, epoch), self.batch_size);
        Batches::new(first..self.batches(len), move |position| {
            let end = order.len().min((position + 1) * size);
            make(position, &order[position * size..end])
        })
    }
}

/// The batches of an epoch, in order, up to the first that cannot be made; dropping it ends the work.
#[derive(Debug)]
pub struct Batches<B> {
    receiver: Option<Receiver<Result<B>>>,
    worker: Option<JoinHandle<()>>,
}

impl<B: Send + 'static> Batches<B> {
    /// The batches at `positions`, made by a thread of their own a little ahead of their use.
    pub fn new(positions: Range<usize>, make: impl Fn(usize) -> Result<B> + Send + 'static) -> Self {
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
    /// A batch, or what is wrong with an example of it.
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
}
