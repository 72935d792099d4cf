//! When a run ends: by want of patience, out of time, and what is refused where nothing is left to do.

use std::{fs, path::Path};

use crate::{
    pictures::{pictures, recipe, timeless},
    support::{finished, stopping},
};
use burn::tensor::Device;
use resolvent_lab::{
    checkpoint::Checkpoint,
    eval,
    metrics::Record,
    recipe::{Decay, ScheduleRecipe},
    schedule::Plan,
    train::{self, Ended, Outcome, Resume, TrainOptions},
};

#[test]
fn a_run_stops_early_and_tests_its_best_epoch() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mut recipe = recipe("uniform");
    recipe.schedule.epochs = 60;
    recipe.regularisation.patience = Some(1);
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap());
    assert_eq!(summary.ended, Ended::Patience);
    let best = summary.best.unwrap();
    assert_eq!(summary.steps, (best.epoch + 1) * 5, "one epoch of patience");
    let (checkpoint, test) = eval::run(folder.path(), &data, &Device::flex()).unwrap();
    assert_eq!((checkpoint.state.step, &test.confusion), (best.step, &summary.test.confusion));

    // More epochs do not help a run that waits no longer: the error names what ended it, and nothing is touched.
    let file = folder.path().join(train::SUMMARY);
    let before = fs::read(&file).unwrap();
    let resume = || TrainOptions { resume: Resume::Always, ..TrainOptions::new(folder.path()) };
    recipe.schedule.epochs = 100;
    let error = train::run(&recipe, &data, &resume()).unwrap_err().to_string();
    assert!(error.contains("`regularisation.patience` ends the run 1 epoch after the best"), "{error}");
    assert_eq!(fs::read(&file).unwrap(), before);
    // More patience does, to the bits of a run that had it from the beginning.
    recipe.schedule.epochs = 60;
    recipe.regularisation.patience = Some(3);
    let (extended, whole) = (finished(train::run(&recipe, &data, &resume()).unwrap()), folder.path().join("whole"));
    let expected = finished(train::run(&recipe, &data, &TrainOptions::new(&whole)).unwrap());
    assert!(extended.steps > summary.steps && extended.time.steps == extended.steps);
    assert_eq!((extended.steps, &extended.best, extended.ended), (expected.steps, &expected.best, expected.ended));
    assert_eq!(timeless(folder.path()), timeless(&whole));
}

/// A run that is stopped while it is evaluated judges the epoch before it decides whether it waited for long enough, and what it finds is
/// saved, though the checkpoint of that step is there.
#[test]
fn an_epoch_is_judged_before_it_ends_a_run() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let mut recipe = recipe("softmax");
    recipe.schedule = ScheduleRecipe { decay: Decay::Constant, warmup_epochs: 0.0, epochs: 12, ..recipe.schedule };
    recipe.regularisation.patience = Some(12);
    let best = finished(train::run(&recipe, &data, &TrainOptions::new(&whole)).unwrap()).best.unwrap();
    assert!(best.epoch > 1, "{best:?}");

    // The same run up to its best epoch, which is better than those before: they are past their patience.
    recipe.regularisation.patience = Some(best.epoch - 1);
    recipe.schedule.epochs = best.epoch;
    for (steps, resume) in [(5, Resume::Never), (5 * best.epoch, Resume::Always)] {
        let outcome = train::run(&recipe, &data, &stopping(&cut, steps, resume)).unwrap();
        assert!(matches!(outcome, Outcome::Interrupted { step, .. } if step == steps), "{outcome:?}");
    }
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&cut) };
    let resumed = finished(train::run(&recipe, &data, &options).unwrap());
    assert_eq!((resumed.ended, resumed.best.as_ref()), (Ended::Complete, Some(&best)));
    assert_eq!(resumed.time.steps, resumed.steps, "over all sessions");
    let epochs = |run: &Path| {
        let mut records = timeless(run);
        records.retain(|record| matches!(record, Record::Epoch(epoch) if epoch.epoch <= best.epoch));
        records
    };
    assert_eq!(epochs(&cut), epochs(&whole));
    assert_eq!(Checkpoint::find(&cut).unwrap().path, cut.join(format!("checkpoints/best-{:09}", best.step)));
    assert_eq!(eval::run(&cut, &data, &Device::flex()).unwrap().1.confusion, resumed.test.confusion);
}

#[test]
fn a_time_budget_shortens_the_plan_or_ends_the_run_and_says_so() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mut recipe = recipe("uniform");
    recipe.schedule.epochs = 1_000_000;
    recipe.schedule.max_minutes = Some(0.005);
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(folder.path().join("a"))).unwrap());
    assert!(summary.plan.steps < summary.plan.full_steps && summary.plan.warmup <= summary.plan.steps);
    assert!(summary.steps <= summary.plan.steps);

    // The same time for a plan made elsewhere, which does not fit.
    let plan = Plan::full(&recipe.schedule, 64);
    recipe.regularisation.patience = Some(1_000_000);
    let options = TrainOptions { plan: Some(plan), ..TrainOptions::new(folder.path().join("b")) };
    let summary = finished(train::run(&recipe, &data, &options).unwrap());
    assert_eq!(summary.ended, Ended::OutOfTime);
    assert!(summary.line().contains("out of time"), "{}", summary.line());
    // More patience is no more time.
    recipe.regularisation.patience = None;
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(folder.path().join("b")) };
    let error = train::run(&recipe, &data, &options).unwrap_err().to_string();
    assert!(error.contains("`schedule.max_minutes` ends the run"), "{error}");
}

/// Of each class one picture: a share of them holds none out.
#[test]
fn nothing_held_out_is_told() {
    let (folder, mut data) = (tempfile::tempdir().unwrap(), pictures());
    let singles: Vec<usize> = (0..data.classes.len()).collect();
    data.train = data.train.select(&singles);
    let mut recipe = recipe("softmax");
    (recipe.schedule.batch_size, recipe.schedule.epochs) = (2, 2);
    let error = train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap_err().to_string();
    assert!(error.contains("`regularisation.hold_out`"), "{error}");
}
