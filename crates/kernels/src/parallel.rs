//! Tasks over threads. What a task computes depends on its index alone, so that results do not depend on the threads.

use std::{
    any::TypeId,
    marker::PhantomData,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use rayon::prelude::*;

/// Workers that [`for_each`] can use in the current thread pool for `tasks` tasks.
pub(crate) fn workers(tasks: usize) -> usize {
    rayon::current_num_threads().min(tasks).max(1)
}

/// The least number of items that a task of short ones is worth a thread for: `least`, or all of them where there is but one
/// thread, which a caller outside the pool would have to wake and wait for.
pub fn grain(least: usize) -> usize {
    if rayon::current_num_threads() == 1 { usize::MAX } else { least }
}

/// Runs `task(index, memory)` for every index below `tasks`. Each worker has its own `per_worker` f32 of `work` and takes
/// the next index when it is free; `work` bounds the number of workers and must serve at least one.
pub(crate) fn for_each(tasks: usize, work: &mut [f32], per_worker: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
    share(tasks, work, per_worker, &task);
}

/// Runs `task(index)` for every index below `tasks`, no more of them at once than there are threads: a thread that waits for
/// parts of its own task takes on parts of others, and goes on with theirs only where no other thread has begun.
pub(crate) fn one_per_thread(tasks: usize, task: impl Fn(usize) + Sync) {
    share(tasks, &mut vec![0.0; workers(tasks)], 1, &|index, _| task(index));
}

/// [`for_each`], compiled once for all tasks.
fn share(tasks: usize, work: &mut [f32], per_worker: usize, task: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    if per_worker == 0 {
        // Nothing bounds the number of workers.
        return one_per_thread(tasks, |index| task(index, &mut []));
    }
    let workers = workers(tasks).min(work.len() / per_worker).max(1);
    let next = AtomicUsize::new(0);
    work[..workers * per_worker].par_chunks_mut(per_worker).with_max_len(1).for_each(|memory| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                break;
            }
            task(index, memory);
        }
    });
}

/// Runs `task(item, memory)` for every item, such as parts of buffers that are split as they are handed out. Otherwise as [`for_each`].
pub(crate) fn for_each_item<T: Send>(
    items: impl Iterator<Item = T> + Send,
    work: &mut [f32],
    per_worker: usize,
    task: impl Fn(T, &mut [f32]) + Sync,
) {
    let (per_worker, items) = (per_worker.max(1), Mutex::new(items));
    let workers = workers(work.len() / per_worker);
    let next = || items.lock().ok().and_then(|mut items| items.next());
    work[..workers * per_worker].par_chunks_mut(per_worker).with_max_len(1).for_each(|memory| {
        while let Some(item) = next() {
            task(item, memory);
        }
    });
}

/// A buffer whose disjoint parts are written by different tasks.
pub struct Parts<'a, T> {
    data: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `Parts::part`, whose contract forbids overlap.
unsafe impl<T: Send> Sync for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// The parts of `buffer`, which nobody else reads or writes meanwhile.
    pub fn new(buffer: &'a mut [T]) -> Self {
        Self { data: buffer.as_mut_ptr(), len: buffer.len(), owner: PhantomData }
    }

    /// The same buffer: what is said of parts holds for those of both.
    pub(crate) fn share(&self) -> Parts<'_, T> {
        Parts { data: self.data, len: self.len, owner: PhantomData }
    }

    /// The same buffer of elements of the same type, under another name for it.
    pub(crate) fn cast<U: 'static>(self) -> Parts<'a, U>
    where
        T: 'static,
    {
        assert_eq!(TypeId::of::<T>(), TypeId::of::<U>());
        Parts { data: self.data.cast(), len: self.len, owner: PhantomData }
    }

    /// The elements in `range`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)] // the point of the type; see the contract
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds of a buffer borrowed for 'a; not aliased by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }
}
