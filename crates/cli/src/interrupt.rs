//! Ctrl-C and requests to terminate.
//!
//! At first a signal ends the process at once. While [`Deferred`] is held (a file is being written, a model is being
//! trained) the first signal only raises a flag, and the second ends the process. On Windows, which knows no request to
//! terminate, this is about Ctrl-C alone.

use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicBool, Ordering},
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

/// Exit code of an interrupted process, as shells report it.
const INTERRUPTED: i32 = 130;

struct Flags {
    /// A signal ends the process here and now.
    at_once: Arc<AtomicBool>,
    /// A signal has come.
    stop: Arc<AtomicBool>,
}

static FLAGS: LazyLock<Flags> = LazyLock::new(|| {
    let flags = Flags { at_once: Arc::new(AtomicBool::new(true)), stop: Arc::default() };
    for signal in [SIGINT, SIGTERM] {
        // In this order: the flag that the first signal raises is what ends the process on the second.
        let registered = flag::register_conditional_shutdown(signal, INTERRUPTED, flags.at_once.clone())
            .and_then(|_| flag::register(signal, flags.stop.clone()))
            .and_then(|_| flag::register(signal, flags.at_once.clone()));
        if let Err(e) = registered {
            tracing::warn!("cannot handle signal {signal}: {e}; an interruption may leave a temporary file");
        }
    }
    flags
});

/// From here on signals end the process, whatever they did before: the first process of a container has no default for them.
pub fn listen() {
    LazyLock::force(&FLAGS);
}

/// While this lives, the first signal does not end the process.
#[derive(Debug)]
pub struct Deferred(());

impl Deferred {
    /// From here on, the first signal only raises [`Deferred::stop`].
    pub fn begin() -> Self {
        FLAGS.at_once.store(false, Ordering::SeqCst);
        Self(())
    }

    /// Raised by the first signal.
    pub fn stop(&self) -> Arc<AtomicBool> {
        FLAGS.stop.clone()
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        FLAGS.at_once.store(true, Ordering::SeqCst);
    }
}
