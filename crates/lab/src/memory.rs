//! Peak memory of a piece of work.

/// Counts the bytes that the program holds on the heap.
///
/// The resident set of a process tells little about one model among several: an allocator keeps the pages that an earlier
/// model freed. A program that wants the comparison to show memory counts in its global allocator and passes the counter
/// in; without one the column is left out.
pub trait MemoryProbe: Send + Sync {
    /// Bytes held now.
    fn held(&self) -> u64;
    /// Forgets the peak: it begins anew at what is held now.
    fn reset_peak(&self);
    /// Most bytes held since the last reset.
    fn peak(&self) -> u64;
    /// Gives memory that was freed back to the system, whose count of free memory has it then. Default: nothing is kept.
    fn give_back(&self) {}
}

/// Peak bytes of `work` above what was held when `before` was read.
///
/// # Errors
/// Those of `work`.
pub fn peak_above<T, E>(probe: &dyn MemoryProbe, before: u64, work: impl FnOnce() -> Result<T, E>) -> Result<u64, E> {
    probe.reset_peak();
    work()?;
    Ok(probe.peak().saturating_sub(before))
}
