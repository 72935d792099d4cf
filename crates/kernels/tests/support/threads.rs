//! Work in a pool of its own. Apart from the rest of the support, which other crates' tests use without rayon.

/// What `work` gives in a pool of so many threads.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}
