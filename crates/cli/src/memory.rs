//! The program's memory: an allocator that keeps what was freed, and counts what is held.
#![allow(unsafe_code)] // an allocator cannot be written without

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::Cell,
    sync::atomic::{AtomicIsize, Ordering::Relaxed},
};

use resolvent_lab::memory::MemoryProbe;

#[cfg(feature = "mimalloc")]
use mimalloc::MiMalloc as Inner;
#[cfg(not(feature = "mimalloc"))]
use std::alloc::System as Inner;

/// Signed: a thread may give back what another one has not yet counted.
static HELD: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// A thread's bytes that the common count does not know yet stay below this: threads that ask for many small pieces, as
/// those do that split texts into words, would otherwise spend their time waiting for the count.
const GRAIN: usize = 4096;

thread_local! {
    static PENDING: Cell<isize> = const { Cell::new(0) };
}

/// mimalloc (without the feature of that name: the system's allocator), with the bytes counted that the program asked
/// for and has not given back.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(by: isize) {
    let due = PENDING.try_with(|pending| {
        let sum = pending.get() + by;
        let due = if sum.unsigned_abs() < GRAIN { 0 } else { sum };
        pending.set(sum - due);
        due
    });
    let due = due.unwrap_or(by);
    if due != 0 {
        PEAK.fetch_max(HELD.fetch_add(due, Relaxed) + due, Relaxed);
    }
}

fn grown(by: usize) {
    count(by.cast_signed());
}

fn shrunk(by: usize) {
    count(-by.cast_signed());
}

// SAFETY: every call is handed on unchanged to an allocator that keeps the contract; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the callee's.
        let memory = unsafe { Inner.alloc(layout) };
        if !memory.is_null() {
            grown(layout.size());
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let memory = unsafe { Inner.alloc_zeroed(layout) };
        if !memory.is_null() {
            grown(layout.size());
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; the memory came from the same allocator.
        unsafe { Inner.dealloc(memory, layout) };
        shrunk(layout.size());
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { Inner.realloc(memory, layout, size) };
        if !moved.is_null() {
            grown(size);
            shrunk(layout.size());
        }
        moved
    }
}

/// Makes the allocator keep freed pages instead of returning them to the system: a training step frees and asks again
/// for the same buffers, and the first touch of a fresh page costs more than the arithmetic done on it. The environment
/// variable `MIMALLOC_PURGE_DELAY` still wins. Without mimalloc the system's allocator does as it is set.
pub fn keep_freed() {
    #[cfg(feature = "mimalloc")]
    never_purge();
}

#[cfg(feature = "mimalloc")]
fn never_purge() {
    /// `mi_option_purge_delay` of mimalloc 2 and 3, which the binding does not name.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    const NEVER: std::ffi::c_long = -1;
    // SAFETY: the option is an integer that the callee checks against its range and reads when it frees; `run` calls
    // this before it starts a thread.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, NEVER) };
}

/// The count, for those who measure; off by at most [`GRAIN`] for every thread.
#[derive(Debug)]
pub struct Probe;

impl MemoryProbe for Probe {
    fn held(&self) -> u64 {
        HELD.load(Relaxed).max(0).cast_unsigned() as u64
    }

    fn reset_peak(&self) {
        PEAK.store(HELD.load(Relaxed), Relaxed);
    }

    fn peak(&self) -> u64 {
        PEAK.load(Relaxed).max(0).cast_unsigned() as u64
    }

    fn give_back(&self) {
        #[cfg(feature = "mimalloc")]
        // SAFETY: the callee may be called at any time; it frees what no one holds.
        unsafe {
            libmimalloc_sys::mi_collect(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_outlives_what_caused_it_until_it_is_reset() {
        const BYTES: usize = 64 << 20; // far more than the test harness allocates beside it
        let before = Probe.held();
        let mut block = vec![1_u8; BYTES];
        assert!(Probe.held() >= before + BYTES as u64);
        block.reserve_exact(2 * BYTES);
        drop(std::hint::black_box(block));
        assert!(Probe.held() < before + BYTES as u64);
        assert!(Probe.peak() >= before + 3 * BYTES as u64);
        Probe.reset_peak();
        assert!(Probe.peak() < before + BYTES as u64);
    }
}
