//! Thread pools by size, and working memory that calls share. Both are only touched with the interpreter lock held, so
//! that no other thread is at them while the process forks.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use resolvent_kernels::Scratch;

use crate::error::Failure;

static POOLS: LazyLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);

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

/// Gives back the working memory that is kept between calls.
#[pyfunction]
pub fn release() {
    SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// A forked process has none of its parent's threads: its pools are made anew. Those of the parent must not be dropped, as
/// that would wait for threads that are not there.
#[pyfunction]
pub fn after_fork() {
    for (_, pool) in POOLS.lock().unwrap_or_else(PoisonError::into_inner).drain() {
        std::mem::forget(pool);
    }
}

fn pool(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    if !(1..=MOST).contains(&threads) {
        return Err(Failure::argument("threads", &format!("is {threads}"), &format!("expected 1 to {MOST}")).into());
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|n| format!("resolvent-{n}")).build();
    let pool = pool.map_err(|error| Failure::argument("threads", &format!("{threads}: {error}"), "ask for fewer"))?;
    Ok(pools.entry(threads).or_insert(Arc::new(pool)).clone())
}

/// Runs `work` on `threads` threads with working memory, without the interpreter lock.
pub fn run<R: Send>(py: Python<'_>, threads: usize, work: impl FnOnce(&mut Scratch) -> R + Send) -> PyResult<R> {
    let pool = pool(threads)?;
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
