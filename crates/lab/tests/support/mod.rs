//! What the tests of runs share.
#![allow(dead_code)] // each test binary uses its part

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Tensor},
};
use resolvent_lab::{
    Recipe,
    checkpoint::{Checkpoint, Part, State, Store, parts},
    progress::{Event, Observer},
    report::write_run,
    train::{self, Outcome, Resume, TaskData, TrainOptions, TrainSummary},
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

/// What the user is told.
#[derive(Default)]
pub struct Notes(pub Mutex<Vec<String>>);

impl Observer for Notes {
    fn on(&self, event: Event<'_>) {
        if let Event::Note(text) = event {
            self.0.lock().unwrap().push(text.into());
        }
    }
}

/// Options of a run into `out` that writes its report.
pub fn reported(out: &Path) -> TrainOptions {
    TrainOptions { report: Some(Arc::new(write_run)), ..TrainOptions::new(out) }
}

/// Options of a run into `out` that is interrupted after `steps` steps.
pub fn stopping(out: &Path, steps: usize, resume: Resume) -> TrainOptions {
    let flag = Arc::new(AtomicBool::new(false));
    let observer = Arc::new(StopAfter { steps, flag: flag.clone() });
    TrainOptions { resume, stop: flag, observer, ..reported(out) }
}

/// The summary of a run that must have ended.
pub fn finished(outcome: Outcome) -> TrainSummary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Interrupted { step, .. } => panic!("interrupted at {step}"),
    }
}

/// Every weight, and its average, in the newest checkpoint.
pub fn weights<T: TaskData>(run: &Path, recipe: &Recipe, data: &T) -> Vec<Vec<f32>> {
    #[derive(Default)]
    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().into_data().iter::<f32>().collect());
        }
    }
    let checkpoint = Checkpoint::load(&newest(run)).unwrap();
    let mut values = Values::default();
    for part in [parts::MODEL, parts::AVERAGE] {
        let model = train::build(recipe, data, &Device::flex()).unwrap();
        checkpoint.load_module(model, part).unwrap().visit(&mut values);
    }
    values.0
}

/// The newest checkpoint of a run.
pub fn newest(run: &Path) -> PathBuf {
    let names = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.to_string_lossy().contains("step-")).max().unwrap()
}

/// The weights of `module` in a checkpoint of a run that did nothing else.
pub fn saved<M: Module>(run: &Path, module: &M) -> Checkpoint {
    let manifest: serde_json::Value = serde_json::from_str(include_str!("../../../../fuzz/seeds/state.json")).unwrap();
    let state: State = serde_json::from_value(manifest["state"].clone()).unwrap();
    Store::new(run, 1).save(&state, vec![(parts::MODEL, Part::weights(module))]).unwrap();
    Checkpoint::newest(run).unwrap()
}
