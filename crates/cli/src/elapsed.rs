//! Seconds told of work that takes long and cannot say how far it has come; reading data sets counts ([`crate::commands::recipe::load`]).

use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use resolvent_lab::progress;

use crate::args::Global;

/// How long nothing is said.
const FIRST: Duration = Duration::from_millis(1500);
/// How long between two lines.
const NEXT: Duration = Duration::from_secs(10);

/// While it lives, a thread writes lines such as `evaluating: 12 s` to standard error.
#[derive(Debug)]
pub struct Elapsed(#[expect(dead_code, reason = "the thread ends when it is dropped")] Option<Sender<()>>);

impl Elapsed {
    /// Begins to count the seconds of `work`, as in `reading runs/flowers`; with --quiet nothing is said.
    pub fn tell(work: String, global: &Global) -> Self {
        if global.quiet {
            return Self(None);
        }
        let (sender, ended) = mpsc::channel();
        let began = Instant::now();
        let tell = move || {
            let mut pause = FIRST;
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                progress::tell(format_args!("{work}: {:.0} s", began.elapsed().as_secs_f64()));
                pause = NEXT;
            }
        };
        // Where no thread can be had, nothing is told.
        let _ = thread::Builder::new().name("elapsed".into()).spawn(tell);
        Self(Some(sender))
    }
}
