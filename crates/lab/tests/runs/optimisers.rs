//! Optimisers, schedules, accumulation, and runs that begin with or go on from other runs.

use std::{collections::BTreeMap, fs, path::Path};

use crate::support::{finished, reported, stopping};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Tensor},
};
use resolvent::Mechanism;
use resolvent_lab::{
    Error, Recipe,
    checkpoint::{Checkpoint, parts},
    data::{PictureDataset, PictureSpec},
    folder::Contents,
    metrics::{self, Record},
    progress::{Event, Observer},
    recipe::Setting,
    report,
    train::{self, Outcome, Resume, TrainOptions},
};

fn pictures(settings: &str) -> PictureDataset {
    PictureSpec::parse(&format!("shapes:seed=3,size=16,train=64,test=16,difficulty=0{settings}"))
        .unwrap()
        .load()
        .unwrap()
}

/// One block of width 16, two epochs of four steps of 16 pictures.
fn recipe(settings: &[&str]) -> Recipe {
    let text = "seed = 5\n[model]\npatch = 8\ndim = 16\ndepth = 1\nheads = 2\nmlp_dim = 16\n\
                [schedule]\nepochs = 2\nbatch_size = 16\nwarmup_epochs = 0.5\n[log]\nevery = 2";
    let settings: Vec<Setting> = settings.iter().map(|setting| setting.parse().unwrap()).collect();
    Recipe::from_toml(text, "test").unwrap().with(&settings).unwrap()
}

fn trained(recipe: &Recipe, data: &PictureDataset, out: &Path) -> train::TrainSummary {
    finished(train::run(recipe, data, &TrainOptions::new(out)).unwrap())
}

/// Every weight of the newest checkpoint, by its path.
fn weights(run: &Path, data: &PictureDataset) -> BTreeMap<String, Vec<f32>> {
    #[derive(Default)]
    struct Values {
        path: Vec<String>,
        found: BTreeMap<String, Vec<f32>>,
    }
    impl ModuleVisitor for Values {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.insert(self.path.join("."), param.val().into_data().iter::<f32>().collect());
        }
    }
    let checkpoint = Checkpoint::newest(run).unwrap();
    let model = train::build(&checkpoint.state.recipe, data, &Device::flex()).unwrap();
    let mut values = Values::default();
    checkpoint.load_module(model, parts::MODEL).unwrap().visit(&mut values);
    values.found
}

fn rates(run: &Path) -> Vec<f64> {
    let rate = |record: &Record| if let Record::Step(step) = record { Some(step.lr) } else { None };
    metrics::read(run).unwrap().iter().filter_map(rate).collect()
}

/// Every rule learns something else, and is continued to the bits of a run that was not interrupted: with each kind of schedule,
/// batches that are accumulated, rates by layer, dropout.
#[test]
fn every_optimiser_and_schedule_resumes_to_the_same_bits() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let shared = ["schedule.batch_size=8", "schedule.accumulate=2", "optimiser.layer_decay=0.8", "model.dropout=0.1"];
    let cases: [(&str, &[&str]); 6] = [
        ("adamw", &["schedule.kind=linear"]),
        ("adam", &["optimiser.kind=adam", "optimiser.weight_decay=0.01"]),
        ("sgd", &["optimiser.kind=sgd", "optimiser.nesterov=true", "schedule.kind=step", "schedule.milestones=[1]"]),
        ("plain", &["optimiser.kind=sgd", "optimiser.momentum=0", "regularisation.ema_decay=0.9"]),
        ("lion", &["optimiser.kind=lion", "schedule.kind=constant"]),
        ("muon", &["optimiser.kind=muon"]),
    ];
    let mut learned: Vec<BTreeMap<String, Vec<f32>>> = Vec::new();
    for (name, settings) in cases {
        let recipe = recipe(&[&shared[..], settings].concat());
        let (whole, cut) = (folder.path().join(name), folder.path().join(format!("{name}-cut")));
        let summary = trained(&recipe, &data, &whole);
        assert_eq!((summary.steps, &summary.recipe), (8, &recipe), "{name}: 64 pictures, 16 a step");
        let outcome = train::run(&recipe, &data, &stopping(&cut, 3, Resume::Never)).unwrap();
        assert!(matches!(outcome, Outcome::Interrupted { step: 3, .. }), "{name}: {outcome:?}");
        let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&cut) };
        let resumed = finished(train::run(&recipe, &data, &options).unwrap());
        assert_eq!(weights(&cut, &data), weights(&whole, &data), "{name}");
        assert_eq!((resumed.test.loss, rates(&cut)), (summary.test.loss, rates(&whole)), "{name}");
        let first: f64 = summary.test.loss;
        assert!(first.is_finite(), "{name}");
        let weights = weights(&whole, &data);
        assert!(!learned.contains(&weights), "{name} learned what another did");
        learned.push(weights);
    }
}

/// Where nothing is learnt, the rate falls after every epoch but the first; how far is in the checkpoints.
#[test]
fn the_rate_falls_on_plateaus_and_resumes_there() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let still = ["optimiser.kind=sgd", "optimiser.lr=1e-30", "optimiser.weight_decay=0", "schedule.epochs=5"];
    let plateau = ["schedule.kind=plateau", "schedule.patience=1", "schedule.factor=0.5", "log.every=1"];
    let held_out = ["regularisation.hold_out=0.25", "schedule.warmup_epochs=0"];
    let recipe = |more: &[&str]| recipe(&[&still[..], &plateau, more].concat());
    trained(&recipe(&held_out), &data, folder.path().join("whole").as_path());
    let shares: Vec<f64> = rates(&folder.path().join("whole")).iter().map(|rate| rate / 1e-30).collect();
    let expected = [1.0, 1.0, 0.5, 0.25, 0.125].map(|share| [share; 3]).concat();
    assert!(shares.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-9) && shares.len() == 15, "{shares:?}");
    let cut = folder.path().join("cut");
    train::run(&recipe(&held_out), &data, &stopping(&cut, 8, Resume::Never)).unwrap();
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&cut) };
    finished(train::run(&recipe(&held_out), &data, &options).unwrap());
    assert_eq!(rates(&cut), rates(&folder.path().join("whole")));
    let refused = train::run(&recipe(&[]), &data, &TrainOptions::new(folder.path().join("no"))).unwrap_err();
    assert!(refused.to_string().contains("hold_out"), "{refused}");
}

/// Four batches of 4 are one of 16, up to rounding.
#[test]
fn accumulated_batches_are_one_large_batch() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    // Gradient descent: the update is as close as the gradient is.
    let sgd = ["optimiser.kind=sgd", "optimiser.lr=0.05"];
    let run = |name: &str, settings: &[&str]| {
        let out = folder.path().join(name);
        let summary = trained(&recipe(&[&sgd[..], settings].concat()), &data, &out);
        (summary.steps, weights(&out, &data))
    };
    let (whole, parts) = (run("whole", &[]), run("parts", &["schedule.batch_size=4", "schedule.accumulate=4"]));
    let (large, small) = (&whole.1, &parts.1);
    assert_eq!((whole.0, large.len()), (parts.0, small.len()));
    for (path, values) in large {
        let distance = values.iter().zip(&small[path]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance < 1e-5, "{path}: {distance}");
    }
    let other = run("other", &["schedule.batch_size=4"]);
    assert!(other.0 == 32 && other.1 != *large, "without accumulation a step is of 4");
    let message = train::run(&recipe(&["schedule.accumulate=5"]), &data, &TrainOptions::new(folder.path().join("no")));
    assert!(message.unwrap_err().to_string().contains("batch of 80"));
}

/// With a constant rate, a run that is extended has the bits of one that was as long from the beginning.
#[test]
fn a_finished_run_is_extended() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let of = |epochs: &str| recipe(&["schedule.kind=constant", epochs]);
    let (short, long) = (of("schedule.epochs=2"), of("schedule.epochs=4"));
    let (whole, run) = (folder.path().join("whole"), folder.path().join("run"));
    let expected = trained(&long, &data, &whole);
    trained(&short, &data, &run);
    let resume = || TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
    let extended = finished(train::run(&long, &data, &resume()).unwrap());
    assert_eq!((extended.steps, &extended.recipe, extended.test.loss), (16, &long, expected.test.loss));
    assert_eq!(weights(&run, &data), weights(&whole, &data));
    assert_eq!(Recipe::load(&run.join("recipe.toml")).unwrap(), long);
    assert_eq!(finished(train::run(&long, &data, &resume()).unwrap()), extended, "it is read back again");

    for other in [short, of("optimiser.lr=0.5")] {
        assert!(matches!(train::run(&other, &data, &resume()), Err(Error::Mismatch { .. })));
    }
    // A limit that has passed leaves nothing to do.
    let limited = long.with(&["schedule.epochs=8".parse().unwrap(), "schedule.max_minutes=1e-9".parse().unwrap()]);
    let less = train::run(&limited.unwrap(), &data, &resume());
    assert!(matches!(less, Err(Error::Mismatch { ref field, .. }) if field == "schedule.max_minutes"), "{less:?}");
    assert!(run.join("summary.json").is_file());

    // What ends the run where it is, is named, whatever else allows more.
    for (name, first, more, field) in [
        ("steps", "schedule.max_steps=3", "schedule.epochs=8", "`schedule.max_steps` ends the run after 3 steps"),
        (
            "epochs",
            "schedule.max_minutes=9",
            "schedule.max_minutes=90",
            "`schedule.epochs` ends the run after 2 epochs",
        ),
    ] {
        let (run, begun) = (folder.path().join(name), recipe(&[first]));
        trained(&begun, &data, &run);
        let more = begun.with(&[more.parse().unwrap()]).unwrap();
        let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
        let message = train::run(&more, &data, &options).unwrap_err().to_string();
        assert!(message.contains(field) && message.contains("give more with --"), "{message}");
    }
}

/// Tells how long the run in the folder is by its newest checkpoint, before the first step.
struct Begun(std::path::PathBuf, std::sync::Mutex<usize>);

impl Observer for Begun {
    fn on(&self, event: Event<'_>) {
        if matches!(event, Event::Begin { .. }) {
            *self.1.lock().unwrap() = Checkpoint::newest(&self.0).unwrap().state.plan.steps;
        }
    }
}

/// A run that is extended is so from its beginning on, and what a crash left is no part of it.
#[test]
fn an_extension_is_saved_before_its_first_step() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let run = folder.path();
    trained(&recipe(&[]), &data, run);
    let (checkpoints, newest) = (run.join("checkpoints"), Checkpoint::newest(run).unwrap().path);
    // Best weights that were saved before a checkpoint could name them, and a checkpoint that was being removed.
    let (orphan, cut) = (checkpoints.join("best-000000012"), checkpoints.join("step-000000002"));
    fs::create_dir(&orphan).unwrap();
    fs::create_dir(&cut).unwrap();
    for entry in fs::read_dir(&newest).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, orphan.join(path.file_name().unwrap())).unwrap();
    }
    let begun = std::sync::Arc::new(Begun(run.to_path_buf(), std::sync::Mutex::default()));
    let options = TrainOptions { resume: Resume::Always, observer: begun.clone(), ..TrainOptions::new(run) };
    finished(train::run(&recipe(&["schedule.epochs=4"]), &data, &options).unwrap());
    assert_eq!(*begun.1.lock().unwrap(), 16);
    assert!(!orphan.exists() && !cut.exists());
}

/// A run that ended within an epoch and is extended: the loss of that epoch is the mean of all its steps.
#[test]
fn an_epoch_that_is_gone_on_with_has_the_loss_of_all_its_steps() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let (whole, run) = (folder.path().join("whole"), folder.path().join("run"));
    let long = recipe(&["schedule.kind=constant", "schedule.warmup_epochs=0"]);
    let short = long.with(&["schedule.max_steps=3".parse().unwrap()]).unwrap();
    trained(&long, &data, &whole);
    trained(&short, &data, &run);
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
    finished(train::run(&long, &data, &options).unwrap());
    let losses = |run: &Path| -> Vec<(usize, f64)> {
        let epochs = metrics::read(run).unwrap().into_iter().filter_map(|record| match record {
            Record::Epoch(epoch) => Some((epoch.step, epoch.train_loss)),
            Record::Step(_) => None,
        });
        epochs.filter(|&(step, _)| step != 3).collect()
    };
    assert_eq!(losses(&run), losses(&whole));
    assert_eq!(weights(&run, &data), weights(&whole, &data));
}

/// A run begins with what another learned: other classes have a new head, another mechanism its own parameters.
#[test]
fn a_run_begins_with_the_weights_of_another() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let source = folder.path().join("source");
    trained(&recipe(&["mechanism=infsa"]), &data, &source);
    let begin = |name: &str, recipe: &Recipe, data: &PictureDataset| {
        let options = TrainOptions { from: Some(source.clone()), ..reported(&folder.path().join(name)) };
        train::run(recipe, data, &options)
    };

    // Steps that change nothing show what was taken.
    let still = ["optimiser.kind=sgd", "optimiser.lr=1e-30", "optimiser.weight_decay=0"];
    let same = recipe(&[&still[..], &["mechanism=infsa"]].concat());
    let origin = finished(begin("same", &same, &data).unwrap()).origin.unwrap();
    assert_eq!(weights(&folder.path().join("same"), &data), weights(&source, &data));
    assert_eq!((origin.step, origin.fresh.len(), origin.left.len()), (8, 0, 0));

    finished(begin("learns", &recipe(&["mechanism=infsa"]), &data).unwrap());
    let learned = weights(&folder.path().join("learns"), &data);
    let then = weights(&source, &data);
    assert!(learned.iter().all(|(path, values)| values != &then[path]), "every parameter goes on learning");

    let softmax = finished(begin("softmax", &recipe(&still), &data).unwrap()).origin.unwrap();
    assert!(softmax.fresh.is_empty() && softmax.left.len() == 1 && softmax.left[0].contains("gamma"), "{softmax:?}");
    assert!(softmax.line().contains("1 left: Vit.blocks.0"), "{}", softmax.line());
    let report = fs::read_to_string(folder.path().join("softmax/report.html")).unwrap();
    assert!(report.contains("begins with"), "the report says so");

    let mut others = data.clone();
    others.classes.iter_mut().for_each(|class| class.push_str(" again"));
    let origin = finished(begin("classes", &same, &others).unwrap()).origin.unwrap();
    assert_eq!(origin.fresh, ["Vit.head.bias", "Vit.head.weight"]);
    let (now, then) = (weights(&folder.path().join("classes"), &others), weights(&source, &data));
    assert!(now["Vit.head.weight"] != then["Vit.head.weight"] && now["Vit.patch.weight"] == then["Vit.patch.weight"]);

    match begin("wide", &recipe(&["model.mlp_dim=32"]), &data) {
        Err(error @ Error::Shape { .. }) => {
            let message = error.to_string();
            assert!(message.contains("mlp_in") && message.contains("pictures of its size"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let untied = Recipe { mechanism: Mechanism::preset("linear-infsa").unwrap(), ..same };
    let message = begin("tied", &untied, &data).unwrap_err().to_string();
    assert!(message.contains("attention.projection") && message.contains("model.tied"), "{message}");
    let pyramid = begin("pyramid", &recipe(&["model.kind=pyramid"]), &data).unwrap_err().to_string();
    assert!(pyramid.contains("no parameter of this model"), "{pyramid}");
    assert!(!folder.path().join("wide").exists(), "nothing is written before");
}

/// A report is there after the first epoch, and anew on demand.
#[test]
fn reports_are_written_while_a_run_trains_and_anew() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures(""));
    let page = folder.path().join("report.html");
    train::run(&recipe(&[]), &data, &stopping(folder.path(), 5, Resume::Never)).unwrap();
    let under_way = fs::read_to_string(&page).unwrap();
    assert!(under_way.contains("step 5 of 8") && under_way.contains("epoch 1 ended"), "{under_way}");
    fs::remove_file(&page).unwrap();
    assert_eq!(report::write_anew(folder.path()).unwrap(), Contents::Run);
    assert!(fs::read_to_string(&page).unwrap().contains("step 5 of 8"));
    let options = TrainOptions { resume: Resume::Always, ..reported(folder.path()) };
    let summary = finished(train::run(&recipe(&[]), &data, &options).unwrap());
    fs::remove_file(&page).unwrap();
    report::write_anew(folder.path()).unwrap();
    assert!(fs::read_to_string(&page).unwrap().contains(&summary.line()));
    let message = report::write_anew(&folder.path().join("none")).unwrap_err().to_string();
    assert!(message.contains("holds no checkpoint"), "{message}");
}
