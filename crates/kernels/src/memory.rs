//! Memory that a call needs is asked for before it is taken: an allocation that fails ends the process.

use std::hint::black_box;

use crate::{Error, Result};

/// Bytes from which on it is asked for.
const LEAST: u64 = 1 << 28;

/// Whether the system gives `bytes`: whether it has them, where it tells, and reserves them in one piece. `op` names what needs them. Whoever
/// allocates what a call needs beside its tensors (`stats`, gradients of parameters) may ask here first.
///
/// # Errors
/// [`Error::Memory`].
pub fn check_memory(op: &'static str, bytes: u64) -> Result<()> {
    let reserves = |bytes| black_box(&mut Vec::<u8>::new()).try_reserve_exact(bytes).is_ok();
    if bytes < LEAST || free().is_none_or(|free| bytes <= free) && usize::try_from(bytes).is_ok_and(reserves) {
        return Ok(());
    }
    Err(Error::Memory { op, bytes })
}

/// Bytes that the system could still give, its swap among them. Linux tells; it reserves more than that if asked.
fn free() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let swap = kilobytes("SwapFree").unwrap_or(0);
    kilobytes("MemAvailable").map(|available| available.saturating_add(swap).saturating_mul(1024))
}

/// Bytes of `len` numbers of `size` bytes.
pub(crate) const fn bytes(len: usize, size: usize) -> u64 {
    (len as u64).saturating_mul(size as u64)
}
