//! Work that is asked to stop between two batches.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{Error, Result};

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Does `work`, whose loops on this thread end with [`Error::Stopped`] once `flag` is raised.
pub fn until<T>(flag: &Arc<AtomicBool>, work: impl FnOnce() -> T) -> T {
    /// Puts back what was watched before, also where the work panics.
    struct Watched(Option<Arc<AtomicBool>>);
    impl Drop for Watched {
        fn drop(&mut self) {
            FLAG.set(self.0.take());
        }
    }
    let _before = Watched(FLAG.replace(Some(flag.clone())));
    work()
}

/// For loops that may take long, once in every turn.
///
/// # Errors
/// [`Error::Stopped`] where the flag of [`until`] is raised.
pub fn check() -> Result<()> {
    let raised = FLAG.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)));
    if raised { Err(Error::Stopped) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_watched_within_its_work_alone() {
        let raised = Arc::new(AtomicBool::new(true));
        assert!(check().is_ok());
        assert!(matches!(until(&raised, check), Err(Error::Stopped)));
        let inner = || until(&Arc::default(), check).and_then(|()| check());
        assert!(matches!(until(&raised, inner), Err(Error::Stopped)));
        assert!(check().is_ok());
    }
}
