//! Memory that a call needs is asked for before it is taken: an allocation that fails ends the process.

use std::hint::black_box;

use crate::{Error, Result};

/// Bytes from which on it is asked for.
const LEAST: u64 = 1 << 28;

/// Whether the system gives `bytes` in one piece. `op` names what needs them. Whoever allocates what a call needs beside its tensors
/// (`stats`, gradients of parameters) may ask here first.
///
/// # Errors
/// [`Error::Memory`].
pub fn check_memory(op: &'static str, bytes: u64) -> Result<()> {
    let gives = |bytes| black_box(&mut Vec::<u8>::new()).try_reserve_exact(bytes).is_ok();
    if bytes < LEAST || usize::try_from(bytes).is_ok_and(gives) {
        return Ok(());
    }
    Err(Error::Memory { op, bytes })
}

/// Bytes of `len` numbers of `size` bytes.
pub(crate) const fn bytes(len: usize, size: usize) -> u64 {
    (len as u64).saturating_mul(size as u64)
}
