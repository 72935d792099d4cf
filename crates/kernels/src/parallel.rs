//! Tasks over threads. What a task computes depends on its index alone, so that results do not depend on the threads.

use std::{
    any::TypeId,
    marker::PhantomData,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
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
    each_grained(1, items, task);
}

/// What `make` makes of every item, in the order of the items; otherwise as [`each`].
pub(crate) fn map<T: Send, R: Send>(items: impl Iterator<Item = T> + Send, make: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_grained(1, items, make)
}

/// [`each`] on no more threads than have `least` items each.
pub(crate) fn each_grained<T: Send>(least: usize, items: impl Iterator<Item = T> + Send, task: impl Fn(T) + Sync) {
    each_on(workers(most(&items) / least), items, || (), |(), item| task(item));
}

/// [`map`] likewise.
pub(crate) fn map_grained<T: Send, R: Send>(
    least: usize,
    items: impl Iterator<Item = T> + Send,
    make: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    map_on(workers(most(&items) / least), items, || (), |(), item| make(item))
}

/// [`each`] with what `init` makes once for every thread.
pub(crate) fn each_with<T: Send, S>(
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, T) + Sync,
) {
    each_on(workers(most(&items)), items, init, task);
}

/// [`map`] likewise.
pub(crate) fn map_with<T: Send, S, R: Send>(
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    make: impl Fn(&mut S, T) -> R + Sync,
) -> Vec<R> {
    map_on(workers(most(&items)), items, init, make)
}

/// Whether something `holds` of all items.
pub(crate) fn all<T: Send>(items: impl Iterator<Item = T> + Send, holds: impl Fn(T) -> bool + Sync) -> bool {
    let all = AtomicBool::new(true);
    each(items, |item| {
        if all.load(Ordering::Relaxed) && !holds(item) {
            all.store(false, Ordering::Relaxed);
        }
    });
    all.into_inner()
}

/// [`each`] of tasks that may fail: the error of the first item that has one, whatever the threads.
pub(crate) fn try_each<T: Send, E: Send>(
    items: impl Iterator<Item = T> + Send,
    task: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let first = FirstError::default();
    each(items.enumerate(), |(n, item)| first.take(n, task(item)));
    first.into_inner().map_or(Ok(()), |(_, error)| Err(error))
}

/// Of the errors of numbered tasks that of the lowest number, in whatever order they come.
pub(crate) struct FirstError<E>(Mutex<Option<(usize, E)>>);

impl<E> Default for FirstError<E> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E> FirstError<E> {
    /// Takes the result of task `n` in.
    pub fn take(&self, n: usize, result: Result<(), E>) {
        let Err(error) = result else { return };
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|(lowest, _)| n < *lowest) {
            *first = Some((n, error));
        }
    }

    /// The number and the error, if there is one.
    pub fn into_inner(self) -> Option<(usize, E)> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
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

fn map_on<T: Send, S, R: Send>(
    workers: usize,
    items: impl Iterator<Item = T> + Send,
    init: impl Fn() -> S + Sync,
    make: impl Fn(&mut S, T) -> R + Sync,
) -> Vec<R> {
    let made = Mutex::new(Vec::new());
    each_on(workers, items.enumerate(), init, |state, (n, item)| {
        let result = make(state, item);
        made.lock().unwrap_or_else(PoisonError::into_inner).push((n, result));
    });
    let mut made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    made.sort_unstable_by_key(|(n, _)| *n);
    made.into_iter().map(|(_, result)| result).collect()
}

fn next_of<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    // Only a thread that panicked loses a lock, which ends all of them.
    items.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// Calls `run` once for each of so many workers; compiled once for all tasks. Every call is a job of its own (`with_max_len`): a thread
/// that waits within its call, for parts of its task, begins another worker's only where no other thread has begun it.
fn on_workers(workers: usize, run: &(dyn Fn() + Sync)) {
    if workers == 1 {
        return run();
    }
    (0..workers).into_par_iter().with_max_len(1).for_each(|_| run());
}

/// Parts of `x` of so many elements, one behind the other.
pub(crate) fn split<T>(mut x: &mut [T], sizes: impl Iterator<Item = usize>) -> impl Iterator<Item = &mut [T]> {
    sizes.map(move |size| {
        let (part, rest) = std::mem::take(&mut x).split_at_mut(size);
        x = rest;
        part
    })
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// `run` on pools of one and more threads, as from outside.
    fn on_pools(run: impl Fn() + Send + Sync) {
        for threads in [1, 2, 5] {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&run);
        }
        run();
    }

    #[test]
    fn results_are_in_the_order_of_the_items_and_each_is_taken_once() {
        on_pools(|| {
            for count in [0, 1, 2, 3, 100] {
                let taken: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let square = |n: usize| {
                    taken[n].fetch_add(1, Ordering::Relaxed);
                    // Tasks that have tasks of their own.
                    map(0..n % 7, |m| m).len() + n * n
                };
                let expected: Vec<_> = (0..count).map(|n| n % 7 + n * n).collect();
                assert_eq!(map(0..count, square), expected);
                assert_eq!(map_grained(3, (0..count).filter(|_| true), |n| n), (0..count).collect::<Vec<_>>());
                assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 1));
            }
        });
    }

    #[test]
    fn the_first_error_is_told_and_one_exception_is_enough() {
        on_pools(|| {
            let odd = |n: usize| if n % 2 == 1 { Err(n) } else { Ok(()) };
            for (range, expected) in [(0..50, Err(1)), (8..50, Err(9)), (2..3, Ok(())), (0..0, Ok(()))] {
                assert_eq!(try_each(range, odd), expected);
            }
            assert!(all(0..50, |n| n < 50) && all(0..0, |_: usize| false) && !all(0..50, |n| n != 31));
        });
    }

    #[test]
    fn what_is_made_for_a_thread_is_made_once_for_it() {
        on_pools(|| {
            let made = AtomicUsize::new(0);
            each_with(0..20, || made.fetch_add(1, Ordering::Relaxed), |_, _| ());
            let made = made.load(Ordering::Relaxed);
            assert!((1..=rayon::current_num_threads()).contains(&made), "made {made} times");
        });
    }

    #[test]
    fn memory_bounds_the_workers_and_none_is_shared() {
        on_pools(|| {
            for (tasks, held) in [(0, 8), (1, 8), (9, 8), (9, 27), (50, 31)] {
                let (mut work, per_worker, done) = (vec![0.0; held], 8, AtomicUsize::new(0));
                for_each(tasks, &mut work, per_worker, |n, memory| {
                    memory.fill(n as f32);
                    std::thread::yield_now();
                    assert!(memory.len() == per_worker && memory.iter().all(|&x| x == n as f32));
                    done.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(done.load(Ordering::Relaxed), tasks);
            }
            let sum = AtomicUsize::new(0);
            for_each(10, &mut [], 0, |n, memory| _ = sum.fetch_add(n + memory.len(), Ordering::Relaxed));
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        });
    }

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut x: Vec<usize> = (0..9).collect();
        let parts: Vec<_> = split(&mut x, [2, 0, 4].into_iter()).map(|part| part.to_vec()).collect();
        assert_eq!(parts, [vec![0, 1], vec![], vec![2, 3, 4, 5]]);
    }
}
