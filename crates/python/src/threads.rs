//! Thread pools by size, and working memory that calls share. Both are only touched with the interpreter lock held, so
//! that no other thread is at them while the process forks.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError},
    thread::{self, ThreadId},
};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use resolvent_kernels::Scratch;

use crate::error::Failure;

static POOLS: LazyLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);

/// The thread that has imported the package, in most programs the only one that calls.
static IMPORTER: OnceLock<ThreadId> = OnceLock::new();

thread_local! {
    /// A pool with the thread itself as a member, and its size: a call then wakes no other thread in order to begin. A thread can
    /// be a member of one pool, and leaves threads behind where it ends, so that [`IMPORTER`] alone has one.
    static OWN: Cell<Option<(usize, &'static ThreadPool)>> = const { Cell::new(None) };
}

static SCRATCH: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());

/// Working memories that are kept for later calls: more than are used at once by few Python threads would only hold memory.
const KEPT: usize = 4;

/// Threads beyond this are a mistake, and more than a machine may give.
const MOST: usize = 1024;

/// Threads that this process may use.
#[pyfunction]
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Remembers the current thread as [`IMPORTER`].
pub fn remember_importer() {
    IMPORTER.get_or_init(|| thread::current().id());
}

/// Gives back the working memory that is kept between calls.
#[pyfunction]
pub fn release() {
    SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// A forked process has none of its parent's threads: its pools are made anew. Those of the parent must not be dropped, as
/// that would wait for threads that are not there.
#[pyfunction]
pub fn after_fork() {
    OWN.set(None);
    for (_, pool) in POOLS.lock().unwrap_or_else(PoisonError::into_inner).drain() {
        std::mem::forget(pool);
    }
}

/// A pool for calls from the current thread.
enum Pool {
    Own(&'static ThreadPool),
    Shared(Arc<ThreadPool>),
}

impl Pool {
    fn get(threads: usize) -> PyResult<Self> {
        if let Some((size, pool)) = OWN.get()
            && size == threads
        {
            return Ok(Self::Own(pool));
        }
        if !(1..=MOST).contains(&threads) {
            let problem = format!("is {threads}");
            return Err(Failure::argument("threads", &problem, &format!("expected 1 to {MOST}")).into());
        }
        let importer = OWN.get().is_none() && IMPORTER.get() == Some(&thread::current().id());
        // After a fork the thread still counts as a member of its parent's pool, and none can be built around it.
        if importer && let Ok(pool) = builder(threads).use_current_thread().build() {
            let pool = &*Box::leak(Box::new(pool));
            OWN.set(Some((threads, pool)));
            return Ok(Self::Own(pool));
        }
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(&threads) {
            return Ok(Self::Shared(pool.clone()));
        }
        let refuse = |error| Failure::argument("threads", &format!("is {threads}: {error}"), "ask for fewer");
        let pool = Arc::new(builder(threads).build().map_err(refuse)?);
        pools.insert(threads, pool.clone());
        Ok(Self::Shared(pool))
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Own(pool) => pool.install(work),
            Self::Shared(pool) => pool.install(work),
        }
    }
}

fn builder(threads: usize) -> ThreadPoolBuilder {
    ThreadPoolBuilder::new().num_threads(threads).thread_name(|n| format!("resolvent-{n}"))
}

/// Runs `work` on `threads` threads with working memory, without the interpreter lock.
pub fn run<R: Send>(py: Python<'_>, threads: usize, work: impl FnOnce(&mut Scratch) -> R + Send) -> PyResult<R> {
    let pool = Pool::get(threads)?;
    let mut scratch = SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let (result, scratch) = py.detach(move || {
        let result = pool.install(|| work(&mut scratch));
        (result, scratch)
    });
    let mut kept = SCRATCH.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.len() < KEPT {
        kept.push(scratch);
    }
    Ok(result)
}
