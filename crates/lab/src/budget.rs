//! One budget of memory for everything that is read and decoded, shared by all readers and threads.
//!
//! A reader takes bytes before it allocates them. What stays until a file or a data set is read whole is [`Held`]; what is
//! needed for one step, such as the pixels of a picture that is then resized, is `Passing`. Where bytes are short, a thread
//! waits for the passing ones of others, and fails once only held ones are in the way.

use std::{
    cell::Cell,
    marker::PhantomData,
    path::Path,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::{
    environment::total_memory,
    error::data::{Error, Result},
};

/// The limit where neither a setting nor the system tells one.
const UNKNOWN: u64 = 4 << 30;

/// The share of the limit that encoded files may fill while they wait to be decoded: 1 / 8.
const WAITING: u64 = 8;

/// Bytes that a tree of values takes at most for each byte of the document that it is parsed from: a value and its comma
/// are two bytes of JSON, and at most 128 with the vectors' spare room.
pub const TREE: u64 = 64;

#[derive(Debug)]
struct State {
    /// 0 until it is known.
    limit: u64,
    used: u64,
    /// Of these, those of encoded files that wait to be decoded.
    waiting: u64,
    /// Passing pieces.
    passing: usize,
    /// Passing pieces of threads that wait for bytes themselves.
    stalled: usize,
}

static STATE: Mutex<State> = Mutex::new(State { limit: 0, used: 0, waiting: 0, passing: 0, stalled: 0 });
static FREED: Condvar = Condvar::new();

thread_local! {
    /// Passing pieces of this thread.
    static OWN: Cell<usize> = const { Cell::new(0) };
}

/// Sets the most bytes that decoded data may take at a time.
///
/// # Panics
/// If it is 0.
pub fn set_limit(bytes: u64) {
    assert!(bytes > 0, "a budget of 0 bytes");
    state().limit = bytes;
}

/// The most bytes that decoded data may take at a time: as set, else half of the machine's memory.
pub fn limit() -> u64 {
    state().known_limit()
}

/// Bytes that are taken.
pub fn used() -> u64 {
    state().used
}

fn state() -> MutexGuard<'static, State> {
    // Numbers are whole between any two statements, so that a panic elsewhere spoils nothing.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn known_limit(&mut self) -> u64 {
        if self.limit == 0 {
            self.limit = total_memory().map_or(UNKNOWN, |bytes| (bytes / 2).max(1));
        }
        self.limit
    }

    fn fits(&mut self, bytes: u64) -> bool {
        self.used.checked_add(bytes).is_some_and(|used| used <= self.known_limit())
    }
}

/// Takes `bytes` for `path`.
fn take(path: &Path, bytes: u64) -> Result<MutexGuard<'static, State>> {
    let mut state = state();
    let own = OWN.get();
    // What cannot fit even alone need not wait.
    while !state.fits(bytes) {
        state.stalled += own;
        if bytes > state.known_limit() || state.passing <= state.stalled {
            state.stalled -= own;
            return Err(Error::Budget {
                path: path.into(),
                needed: bytes,
                used: state.used,
                limit: state.known_limit(),
            });
        }
        if own > 0 {
            FREED.notify_all();
        }
        state = FREED.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.stalled -= own;
    }
    state.used += bytes;
    Ok(state)
}

/// Bytes of the budget that are taken until this is dropped.
#[derive(Debug, Default)]
pub struct Held {
    bytes: AtomicU64,
    waiting: u64,
}

impl Held {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `bytes` more for what is read from `path`.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub fn add(&self, path: &Path, bytes: u64) -> Result<()> {
        let _state = take(path, bytes)?;
        self.bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Gives `bytes` of them back.
    pub fn give_back(&self, bytes: u64) {
        let mut state = state();
        let bytes = bytes.min(self.bytes.load(Relaxed));
        self.bytes.fetch_sub(bytes, Relaxed);
        state.used -= bytes;
        FREED.notify_all();
    }

    /// Takes `bytes` for an encoded file that waits to be decoded; of these there may be few, so that there is room for what
    /// is decoded.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub(crate) fn waiting(path: &Path, bytes: u64) -> Result<Self> {
        let mut state = state();
        while state.waiting > 0 && state.waiting.saturating_add(bytes) > state.known_limit() / WAITING {
            state = FREED.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        take(path, bytes)?.waiting += bytes;
        Ok(Self { bytes: bytes.into(), waiting: bytes })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        if bytes > 0 {
            let mut state = state();
            state.used -= bytes;
            state.waiting -= self.waiting;
            FREED.notify_all();
        }
    }
}

/// Bytes for one step of this thread, for which other threads may wait.
#[derive(Debug)]
pub(crate) struct Passing {
    bytes: u64,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Passing {
    /// Takes `bytes` for what is read from `path`: everything that the step needs, at once.
    ///
    /// # Errors
    /// [`Error::Budget`].
    pub(crate) fn take(path: &Path, bytes: u64) -> Result<Self> {
        take(path, bytes)?.passing += 1;
        OWN.set(OWN.get() + 1);
        Ok(Self { bytes, thread: PhantomData })
    }

    /// Leaves `bytes` of these with `held` and gives the others back.
    pub(crate) fn keep(mut self, bytes: u64, held: &Held) {
        let bytes = bytes.min(self.bytes);
        held.bytes.fetch_add(bytes, Relaxed);
        self.bytes -= bytes;
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        OWN.set(OWN.get() - 1);
        let mut state = state();
        state.used -= self.bytes;
        state.passing -= 1;
        FREED.notify_all();
    }
}

/// What a text takes in a list of texts: its bytes, at least the smallest piece that is allocated, and its place in the list,
/// which may have as much room to spare.
pub fn text_bytes(text: &str) -> u64 {
    (text.len().max(16) + 2 * size_of::<String>()) as u64
}
