//! Reading that takes a while says so.

use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use resolvent_lab::{
    data::{Data, Source},
    progress,
};

use crate::{args::Global, commands::train::observer, error::Result};

/// How long nothing is said, and how long between two lines.
const PAUSES: [Duration; 2] = [Duration::from_millis(1500), Duration::from_secs(10)];

/// Tells on standard error that something is still going on, until it is dropped.
#[derive(Debug)]
pub struct Waiting(#[expect(dead_code, reason = "its end is what is waited for")] Option<Sender<()>>);

impl Waiting {
    /// From now on, for `what` is done, as in `reading cifar10:DIR`.
    pub fn begin(what: String, global: &Global) -> Self {
        if global.quiet {
            return Self(None);
        }
        let (sender, ended) = mpsc::channel();
        let began = Instant::now();
        let tell = move || {
            let mut pause = PAUSES[0];
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{what}: {:.0} s", began.elapsed().as_secs_f64());
                pause = PAUSES[1];
            }
        };
        // Where no thread can be had, nothing is told.
        let _ = thread::Builder::new().name("waiting".into()).spawn(tell);
        Self(Some(sender))
    }
}

/// The data set that `source` names; how far its reading has come is told.
pub fn load(source: &Source, global: &Global) -> Result<Data> {
    Ok(progress::load(source, &*observer(global)).map_err(resolvent_lab::Error::from)?)
}
