//! What is told while a large data set is read.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How far reading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// What is counted, e.g. `pictures looked at`.
    pub what: &'static str,
    /// How many so far.
    pub done: usize,
    /// How many there will be, where that is known.
    pub of: Option<usize>,
}

/// Whoever is told; called from any thread, it should return soon.
pub type Tell<'a> = &'a (dyn Fn(Reading) + Sync);

/// Tells nobody.
pub fn nobody(_: Reading) {}

/// Things between two calls of [`Tell`]: some tenths of a second of work.
const EVERY: usize = 500;

/// Counts, and tells now and then.
pub(super) struct Counter<'a> {
    tell: Tell<'a>,
    what: &'static str,
    of: Option<usize>,
    done: AtomicUsize,
}

impl<'a> Counter<'a> {
    pub(super) fn new(tell: Tell<'a>, what: &'static str, of: Option<usize>) -> Self {
        Self { tell, what, of, done: AtomicUsize::new(0) }
    }

    /// One more is done.
    pub(super) fn one(&self) {
        let done = 1 + self.done.fetch_add(1, Relaxed);
        if done.is_multiple_of(EVERY) {
            (self.tell)(Reading { what: self.what, done, of: self.of });
        }
    }
}
