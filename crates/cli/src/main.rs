//! The program `resolvent`; everything is in the library beside it.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    keep_freed_memory();
    resolvent_cli::run(std::env::args_os())
}

/// Makes the allocator keep freed pages instead of returning them to the system: a training step frees and asks again
/// for the same buffers, and the first touch of a fresh page costs more than the arithmetic done on it. The environment
/// variable `MIMALLOC_PURGE_DELAY` still wins.
#[allow(unsafe_code)] // the allocator's options have no safe setter
fn keep_freed_memory() {
    /// `mi_option_purge_delay` of mimalloc 2 and 3, which the binding does not name.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    const NEVER: std::ffi::c_long = -1;
    // SAFETY: called once, before any other thread exists; an unknown option number is ignored by the callee.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, NEVER) };
}
