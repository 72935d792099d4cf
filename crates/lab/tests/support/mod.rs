//! What the tests of runs share.
#![allow(dead_code)] // each test binary uses its part

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use resolvent_lab::{
    progress::{Event, Observer},
    train::{Outcome, Resume, TrainOptions, TrainSummary},
};

/// Raises the flag after a given number of steps.
struct StopAfter {
    steps: usize,
    flag: Arc<AtomicBool>,
}

impl Observer for StopAfter {
    fn on(&self, event: Event<'_>) {
        if matches!(event, Event::Step { done, .. } if done == self.steps) {
            self.flag.store(true, Ordering::SeqCst);
        }
    }
}

/// Options of a run into `out` that is interrupted after `steps` steps.
pub fn stopping(out: &Path, steps: usize, resume: Resume) -> TrainOptions {
    let flag = Arc::new(AtomicBool::new(false));
    let observer = Arc::new(StopAfter { steps, flag: flag.clone() });
    TrainOptions { resume, stop: flag, observer, ..TrainOptions::new(out) }
}

/// The summary of a run that must have ended.
pub fn finished(outcome: Outcome) -> TrainSummary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Interrupted { step, .. } => panic!("interrupted at {step}"),
    }
}
