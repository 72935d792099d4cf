//! Training end to end on a few generated pictures.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use resolvent_lab::{
    Error, Recipe,
    checkpoint::Checkpoint,
    data::{DataSpec, Dataset},
    eval,
    metrics::{self, Record},
    progress::{Event, Observer},
    train::{self, Ended, Outcome, Resume, TrainOptions, TrainSummary},
};

fn pictures() -> Dataset {
    DataSpec::parse("shapes:seed=3,size=16,train=72,test=24,difficulty=0").unwrap().load().unwrap()
}

/// Two blocks, four epochs of six steps, with everything switched on that has a state.
fn recipe(mechanism: &str) -> Recipe {
    let text = format!(
        "mechanism = '{mechanism}'\nseed = 5\n\
         [model]\ndim = 16\ndepth = 2\nheads = 2\nmlp_dim = 32\n\
         [schedule]\nepochs = 4\nbatch_size = 12\n\
         [regularisation]\nema_decay = 0.9\nhold_out = 0.1\n\
         [log]\nevery = 4\ncheckpoint_every = 5"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

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

fn stopping(out: &Path, steps: usize, resume: Resume) -> TrainOptions {
    let flag = Arc::new(AtomicBool::new(false));
    let observer = Arc::new(StopAfter { steps, flag: flag.clone() });
    TrainOptions { resume, stop: flag, observer, ..TrainOptions::new(out) }
}

fn finished(outcome: Outcome) -> TrainSummary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Interrupted { step, .. } => panic!("interrupted at {step}"),
    }
}

/// The bytes of every tensor in the newest checkpoint, except for the optimiser's container, whose order is free.
fn weights(run: &Path) -> Vec<Vec<u8>> {
    let mut checkpoint = Checkpoint::load(&newest(run)).unwrap();
    ["model.bpk", "average.bpk"].map(|part| checkpoint.take(part).unwrap().to_vec()).into()
}

fn newest(run: &Path) -> std::path::PathBuf {
    let names = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.to_string_lossy().contains("step-")).max().unwrap()
}

/// The metrics without what a clock says.
fn timeless(run: &Path) -> Vec<Record> {
    let mut records = metrics::read(run).unwrap();
    for record in &mut records {
        match record {
            Record::Step(step) => step.images_per_second = 0.0,
            Record::Epoch(epoch) => epoch.seconds = 0.0,
        }
    }
    records
}
