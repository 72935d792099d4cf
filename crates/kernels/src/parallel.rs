//! Tasks over threads. What a task computes depends on its index alone, so that results do not depend on the threads.

use std::{
    any::TypeId,
    marker::PhantomData,
    ops::Range,
    sync::{Mutex, PoisonError},
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
    for_each_item(0..tasks, work, per_worker, task);
}

/// Runs `task(item, memory)` for every item, such as parts of buffers that are split as they are handed out. Otherwise as [`for_each`].
pub(crate) fn for_each_item<T: Send>(
    items: impl Iterator<Item = T> + Send,
    work: &mut [f32],
    per_worker: usize,
    task: impl Fn(T, &mut [f32]) + Sync,
) {
    if per_worker == 0 {
        // Nothing bounds the number of workers.
        return each(items, |item| task(item, &mut []));
    }
    let count = (work.len() / per_worker).min(most(&items)).max(1);
    let memory = Mutex::new(work.chunks_exact_mut(per_worker));
    let memory = || next_of(&memory).expect("memory for every worker");
    each_on(workers(count), items, memory, |memory, item| task(item, memory));
}

/// Runs `task` for every item, as many at once as there are threads. Items are taken in their order, one when a thread is free.
pub(crate) fn each<T: Send>(items: impl Iterator<Item = T> + Send, task: impl Fn(T) + Sync) {
    each_with(1, items, || (), |(), item| task(item));
}

/// What `make` makes of every item, in the order of the items; otherwise as [`each`].
pub(crate) fn map<T: Send, R: Send>(items: impl Iterator<Item = T> + Send, make: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_with(1, items, || (), |(), item| make(item))
}

/// [`each`] with what `init` makes once for every thread, of which each has at `least` so many items.
pub(crate) fn each_with<T: Send, S>(
    least: usize,
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, T) + Sync,
) {
    each_on(workers(most(&items) / least.max(1)), items, init, task);
}

/// [`map`] likewise.
pub(crate) fn map_with<T: Send, S, R: Send>(
    least: usize,
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    make: impl Fn(&mut S, T) -> R + Sync,
) -> Vec<R> {
    let made = Mutex::new(Vec::new());
    each_with(least, items.enumerate(), init, |state, (n, item)| {
        let result = make(state, item);
        made.lock().unwrap_or_else(PoisonError::into_inner).push((n, result));
    });
    let mut made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    made.sort_unstable_by_key(|(n, _)| *n);
    made.into_iter().map(|(_, result)| result).collect()
}

/// How many items there are at most.
fn most(items: &impl Iterator) -> usize {
    items.size_hint().1.unwrap_or(usize::MAX)
}

fn each_on<T: Send, S>(
    workers: usize,
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, T) + Sync,
) {
    let items = Mutex::new(items);
    on_workers(workers, &|| {
        let mut state = init();
        while let Some(item) = next_of(&items) {
            task(&mut state, item);
        }
    });
}

fn next_of<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    // Only a thread that panicked loses a lock, which ends all of them.
    items.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// Calls `run` on so many threads; compiled once for all tasks. No more of them at once: a thread that waits for parts of its own task
/// takes on parts of others only where no other thread has begun.
fn on_workers(workers: usize, run: &(dyn Fn() + Sync)) {
    if workers == 1 {
        return run();
    }
    (0..workers).into_par_iter().with_max_len(1).for_each(|_| run());
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
