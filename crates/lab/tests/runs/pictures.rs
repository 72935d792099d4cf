//! Training end to end on a few generated pictures.

use std::{fs, path::Path, sync::Arc};

use crate::support::{Notes, finished, newest, reported, stopping, weights};
use burn::tensor::Device;
use resolvent::{
    Mechanism, Precision,
    attention::CodebookConfig,
    mechanism::{Landmarks, Soft},
};
use resolvent_lab::{
    Error, Recipe,
    checkpoint::{Checkpoint, parts},
    data::{PictureDataset, PictureSpec},
    eval,
    metrics::{self, Record},
    recipe::{ModelRecipe, PyramidRecipe},
    train::{self, Ended, Outcome, Resume, Samples, Seen, TrainOptions},
};

pub(crate) fn pictures() -> PictureDataset {
    PictureSpec::parse("shapes:seed=3,size=16,train=72,test=24,difficulty=0").unwrap().load().unwrap()
}

/// Two blocks, four epochs of six steps, with everything switched on that has a state.
pub(crate) fn recipe(mechanism: &str) -> Recipe {
    let text = format!(
        "mechanism = '{mechanism}'\nseed = 5\n\
         [model]\ndim = 16\ndepth = 2\nheads = 2\nmlp_dim = 32\n\
         [schedule]\nepochs = 4\nbatch_size = 12\n\
         [regularisation]\nema_decay = 0.9\nhold_out = 0.1\n\
         [log]\nevery = 4\ncheckpoint_every = 5"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

/// The same with a pyramid: batch norms remember, stochastic depth and landmarks are drawn.
fn pyramid() -> Recipe {
    let mut recipe = recipe("softmax");
    let landmarks = Landmarks::Random { count: 3, seed: 1 };
    recipe.mechanism = Mechanism::from(Soft::plus().robust().with_landmarks(landmarks));
    let mut model = PyramidRecipe::default();
    model.config.drop_path = 0.1;
    recipe.model = ModelRecipe::Pyramid(model);
    recipe
}

/// The same with clusters whose centroids remember, one plan for both blocks, and ternary weights.
fn clustered() -> Recipe {
    let mut recipe = recipe("softmax");
    recipe.mechanism = Mechanism::from_json(r#"{"mechanism": "ssa", "clusters": 3, "estimator": "centroid"}"#).unwrap();
    let ModelRecipe::Vit(model) = &mut recipe.model else { unreachable!() };
    model.codebook = Some(CodebookConfig { every: 3, decay: 0.5 });
    (model.plan_layers, model.ternary) = (2, true);
    recipe
}

/// The same with products of bf16.
fn rounded(mechanism: &str) -> Recipe {
    Recipe { precision: Precision::Bf16, ..recipe(mechanism) }
}

/// The metrics without what a clock says.
pub(crate) fn timeless(run: &Path) -> Vec<Record> {
    let mut records = metrics::read(run).unwrap();
    for record in &mut records {
        match record {
            Record::Step(step) => step.examples_per_second = 0.0,
            Record::Epoch(epoch) => epoch.seconds = 0.0,
        }
    }
    records
}

#[test]
fn an_interrupted_and_resumed_run_ends_with_the_same_bits() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    for (name, recipe) in [
        ("softmax", recipe("softmax")),
        ("linear-infsa", recipe("linear-infsa")),
        ("pyramid", pyramid()),
        ("clustered", clustered()),
        ("bf16", rounded("infsa")),
    ] {
        let whole = folder.path().join(format!("{name}-whole"));
        let cut = folder.path().join(format!("{name}-cut"));
        let expected = finished(train::run(&recipe, &data, &TrainOptions::new(&whole)).unwrap());
        assert_eq!((expected.steps, expected.ended), (20, Ended::Complete), "64 pictures, 5 batches an epoch");

        // In the middle of an epoch and of a line of metrics, then at the end of an epoch.
        for (steps, resume) in [(7, Resume::Never), (15, Resume::Always)] {
            let outcome = train::run(&recipe, &data, &stopping(&cut, steps, resume)).unwrap();
            assert!(matches!(outcome, Outcome::Interrupted { step, steps: 20, .. } if step == steps), "{outcome:?}");
        }
        let options = TrainOptions { resume: Resume::IfPresent, ..TrainOptions::new(&cut) };
        let resumed = finished(train::run(&recipe, &data, &options).unwrap());

        assert_eq!(weights(&cut, &recipe, &data), weights(&whole, &recipe, &data), "{name}: every weight, bit for bit");
        for part in [parts::MODEL, parts::AVERAGE, parts::OPTIMISER] {
            let bytes = |run: &Path| fs::read(newest(run).join(part)).unwrap();
            assert!(bytes(&cut) == bytes(&whole), "{name}: {part}, byte for byte");
        }
        assert_eq!(timeless(&cut), timeless(&whole), "{name}: every line of metrics");
        assert_eq!((resumed.test.confusion, resumed.learned), (expected.test.confusion, expected.learned));
    }
}

/// Ternary weights learn too, and the summary says what they take: 2 blocks of 16 x 16 projections and 16 x 32 layers.
#[test]
fn ternary_weights_learn_and_are_reported() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mut recipe = clustered();
    recipe.schedule.epochs = 12;
    recipe.optimiser.lr = 3e-3;
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap());
    let packed = summary.ternary.unwrap();
    assert_eq!(packed.weights, 2 * (4 * 16 * 16 + 2 * 16 * 32));
    // Rows of 16 take 4 bytes, of 32 take 8, and each of 6 matrices a block has a scale.
    assert_eq!(packed.bytes, 2 * (4 * 16 * 4 + 32 * 4 + 16 * 8 + 6 * 4));
    assert!(summary.line().contains("4096 ternary weights: 1.1 kB if packed, 16.4 kB as f32"), "{}", summary.line());
    let losses: Vec<f64> = metrics::read(folder.path())
        .unwrap()
        .into_iter()
        .filter_map(|record| if let Record::Epoch(epoch) = record { Some(epoch.train_loss) } else { None })
        .collect();
    assert!(losses[11] < losses[0] - 0.1, "{losses:?}");
}

/// Weights and moments stay f32 and learn as those of f32 do; run and checkpoint tell the precision, and what it does not reach.
#[test]
fn bf16_learns_beside_f32_and_is_told() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let longer = |mut recipe: Recipe| {
        (recipe.schedule.epochs, recipe.optimiser.lr) = (12, 3e-3);
        recipe
    };
    let run = |name: &str, recipe: &Recipe| {
        let notes = Arc::new(Notes::default());
        let options = TrainOptions { observer: notes.clone(), ..TrainOptions::new(folder.path().join(name)) };
        let summary = finished(train::run(recipe, &data, &options).unwrap());
        (summary, notes.0.lock().unwrap().join("\n"))
    };
    let (f32s, bf16) = (longer(recipe("softmax")), longer(rounded("softmax")));
    let ((exact, silent), (got, told)) = (run("f32", &f32s), run("bf16", &bf16));
    assert!(exact.test.loss != got.test.loss && (exact.test.loss / got.test.loss - 1.0).abs() < 0.05, "{got:?}");
    assert!(got.line().ends_with("products of bf16") && !exact.line().contains("bf16"), "{}", got.line());
    assert!(told.contains("products of bf16 by") && !told.contains("stays in f32"), "{told}");
    assert!(!silent.contains("bf16"), "{silent}");
    let written = fs::read_to_string(folder.path().join("bf16/recipe.toml")).unwrap();
    assert!(written.contains("precision = \"bf16\""), "{written}");
    let (found, test) = eval::run(&folder.path().join("bf16"), &data, &Device::flex()).unwrap();
    assert_eq!((found.state.recipe.precision, test.loss), (Precision::Bf16, got.test.loss));
    let (_, told) = run("linear", &rounded("linear"));
    assert!(told.contains("the attention of linear stays in f32"), "{told}");
}

#[test]
fn gamma_and_weights_move_and_the_loss_falls() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mut recipe = recipe("infsa");
    recipe.schedule.epochs = 12;
    recipe.optimiser.lr = 3e-3;
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap());
    for name in ["blocks.0.gamma", "blocks.1.gamma"] {
        assert!(summary.learned.get(name).is_some_and(|gamma| (gamma - 0.7).abs() > 1e-4), "{:?}", summary.learned);
    }
    let losses: Vec<f64> = metrics::read(folder.path())
        .unwrap()
        .iter()
        .filter_map(|record| if let Record::Epoch(epoch) = record { Some(epoch.train_loss) } else { None })
        .collect();
    assert!(losses[11] < losses[0] - 0.1, "{losses:?}");
    assert_eq!(summary.time.steps, summary.steps);
}

#[test]
fn a_finished_run_is_read_back_and_evaluates_to_its_summary() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let recipe = recipe("softmax");
    let summary = finished(train::run(&recipe, &data, &reported(folder.path())).unwrap());
    let again = TrainOptions { resume: Resume::Always, ..TrainOptions::new(folder.path()) };
    assert_eq!(finished(train::run(&recipe, &data, &again).unwrap()), summary);

    let (_, test) = eval::run(folder.path(), &data, &Device::flex()).unwrap();
    assert_eq!((test.confusion, test.loss), (summary.test.confusion.clone(), summary.test.loss));

    let report = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(report.contains(&format!("{:.2} %", summary.test.accuracy.unwrap() * 100.0)));
    assert!(report.contains("<svg") && report.contains("viewport"));
    let alone = report.replace("src=\"data:image/png;base64,", "");
    for remote in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!alone.contains(remote), "the report must stand alone: {remote}");
    }

    // The worst errors are those of the test, with what the model was shown.
    let Some(Samples::Errors(errors)) = &summary.samples else { panic!("{:?}", summary.samples) };
    let right: u64 = (0..summary.test.classes.len()).map(|class| summary.test.confusion[class][class]).sum();
    assert_eq!((errors.examples, errors.wrong as u64), (24, 24 - right));
    assert_eq!(errors.worst.len(), errors.wrong.min(12));
    assert!(errors.worst.is_sorted_by(|a, b| a.label_probability <= b.label_probability), "{errors:?}");
    for error in &errors.worst {
        assert!(error.label != error.answer && error.answer_probability >= error.label_probability);
        let label = data.test.labels()[error.example] as usize;
        assert_eq!(error.label, data.classes[label]);
        let Seen::Picture(address) = &error.shown else { panic!("{error:?}") };
        assert!(report.contains(address.as_str()));
    }
    assert!(report.contains("Worst errors"));
}

#[test]
fn a_summary_without_checkpoints_does_not_finish_the_run_that_follows() {
    let (run, data) = (tempfile::tempdir().unwrap(), pictures());
    let out = run.path();
    finished(train::run(&recipe("uniform"), &data, &TrainOptions::new(out)).unwrap());
    fs::remove_dir_all(out.join("checkpoints")).unwrap();
    let other = recipe("softmax");
    let stopped = train::run(&other, &data, &stopping(out, 2, Resume::Never)).unwrap();
    assert!(matches!(stopped, Outcome::Interrupted { step: 2, .. }), "{stopped:?}");
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(out) };
    assert_eq!(finished(train::run(&other, &data, &options).unwrap()).recipe, other);
}

#[test]
fn folders_that_do_not_fit_are_refused_by_name() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let recipe = recipe("softmax");
    let nothing = TrainOptions { resume: Resume::Always, ..TrainOptions::new(folder.path().join("none")) };
    assert!(matches!(train::run(&recipe, &data, &nothing), Err(Error::NoCheckpoint { .. })));
    assert!(matches!(eval::run(folder.path(), &data, &Device::flex()), Err(Error::NoCheckpoint { .. })));

    let run = folder.path().join("run");
    train::run(&recipe, &data, &stopping(&run, 3, Resume::Never)).unwrap();
    let message = train::run(&recipe, &data, &TrainOptions::new(&run)).unwrap_err().to_string();
    assert!(message.contains("3 of 20 steps"), "{message}");

    let resume = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
    let mut other = recipe.clone();
    other.optimiser.lr = 0.5;
    let message = train::run(&other, &data, &resume).unwrap_err().to_string();
    assert!(message.contains("optimiser.lr = 0.001") && message.contains("0.5"), "{message}");
    let others = PictureSpec::parse("shapes:seed=4,size=16,train=72,test=24").unwrap().load().unwrap();
    let message = train::run(&recipe, &others, &resume).unwrap_err().to_string();
    assert!(message.contains("data fingerprint"), "{message}");
    let larger = PictureSpec::parse("shapes:size=32,train=72,test=24").unwrap().load().unwrap();
    let message = eval::run(&run, &larger, &Device::flex()).unwrap_err().to_string();
    assert!(message.contains("[3, 32, 32]") && message.contains("[3, 16, 16]"), "{message}");
}

#[test]
fn damaged_checkpoints_are_named_and_earlier_ones_still_serve() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let (run, recipe) = (folder.path(), recipe("softmax"));
    train::run(&recipe, &data, &stopping(run, 7, Resume::Never)).unwrap();
    let resume = TrainOptions { resume: Resume::Always, ..TrainOptions::new(run) };
    let last = newest(run);
    assert!(last.ends_with("step-000000007"));

    let damage = |file: &str, change: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let path = last.join(file);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let message = train::run(&recipe, &data, &resume).unwrap_err().to_string();
        assert!(message.contains(file) && message.contains(expected), "{message}");
        fs::write(&path, whole).unwrap();
    };
    damage(parts::MODEL, &|bytes| bytes.truncate(100), "cut off");
    damage("optimiser.bpk", &|bytes| bytes[200] ^= 1, "checksum");
    damage("state.json", &|bytes| bytes.truncate(40), "no checkpoint");
    damage("state.json", &|bytes| *bytes = b"{\"format\":99}".to_vec(), "no checkpoint");
    let outside = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8_lossy(bytes).replace("\"model.s", "\"../model.s").into_bytes();
    };
    damage("state.json", &outside, "no file of its folder");

    // What a crash may leave: a checkpoint half-written, a line of metrics half-written.
    fs::create_dir(run.join("checkpoints/.saving-x")).unwrap();
    let metrics = run.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, text + "{\"kind\":\"st").unwrap();
    fs::remove_dir_all(&last).unwrap();
    let summary = finished(train::run(&recipe, &data, &resume).unwrap());
    assert_eq!(summary.steps, 20, "resumed from step 5");
    assert!(!run.join("checkpoints/.saving-x").exists());
    metrics::read(run).unwrap();
}

#[test]
fn weights_decay_and_everything_else_does_not() {
    let model = train::build(&recipe("infsa"), &pictures(), &Device::flex()).unwrap();
    let mut decayed = train::decayed_parameters(&model);
    decayed.sort();
    let of_block = ["attention.output", "attention.projection", "mlp_in", "mlp_out"];
    let blocks = (0..2).flat_map(|block| of_block.map(|layer| format!("Vit.blocks.{block}.{layer}.weight")));
    let expected: Vec<_> = blocks.chain(["Vit.head.weight".into(), "Vit.patch.weight".into()]).collect();
    assert_eq!(decayed, expected);
    let model = train::build(&pyramid(), &pictures(), &Device::flex()).unwrap();
    let decayed = train::decayed_parameters(&model);
    for part in ["convs.0.weight", "value_filter.weight", "head.weight", "mlp_in.weight"] {
        assert!(decayed.iter().any(|path| path.ends_with(part)), "{part}");
    }
    assert!(!decayed.iter().any(|path| path.contains("norm") || path.contains("positions") || path.contains("cls")));
}

#[test]
fn a_pyramid_is_shown_pictures_of_other_sizes() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let summary = finished(train::run(&pyramid(), &data, &TrainOptions::new(folder.path())).unwrap());
    let at = |side: usize| eval::run_at(folder.path(), &data, side, &Device::flex()).unwrap().1;
    assert_eq!(at(16).loss, summary.test.loss);
    assert!(at(24).loss.is_finite() && at(24).loss != summary.test.loss);
    let larger = data.resized(24);
    assert_eq!((larger.shape.height, larger.test.len(), larger.test.labels()), (24, 24, data.test.labels()));
    let refused = eval::run(folder.path(), &larger, &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("24") && refused.contains("16"), "{refused}");
}

/// The authors' SOFT has softmax in its last stage; a control in its place has it nowhere.
#[test]
fn another_mechanism_goes_into_every_stage_of_a_pyramid() {
    let recipe = PyramidRecipe { preset: "soft-tiny".into(), ..Default::default() };
    let last = |id: &str| {
        let config = recipe.config(&Mechanism::preset(id).unwrap(), [224, 224], 3, 1000).unwrap();
        config.stages[3].mechanism.as_ref().map(Mechanism::id)
    };
    assert_eq!(["soft", "soft-pp", "uniform", "laplacian"].map(last), [Some("softmax"), Some("softmax"), None, None]);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_with_a_remedy() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mut recipe = recipe("softmax");
    (recipe.optimiser.lr, recipe.optimiser.clip_norm) = (1e30, 0.0);
    let message = train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap_err().to_string();
    assert!(message.contains("optimiser.lr") && message.contains("step"), "{message}");
}

#[test]
fn data_that_does_not_fit_the_recipe_is_refused_before_anything_is_written() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let out = folder.path().join("run");
    let refused = |change: fn(&mut Recipe)| {
        let mut recipe = recipe("softmax");
        change(&mut recipe);
        let message = train::run(&recipe, &data, &TrainOptions::new(&out)).unwrap_err().to_string();
        assert!(!out.exists(), "{message}");
        message
    };
    let patches_of_five = |recipe: &mut Recipe| *recipe = recipe.with(&["model.patch=5".parse().unwrap()]).unwrap();
    assert!(refused(patches_of_five).contains("model.patch"));
    assert!(refused(|recipe| recipe.schedule.batch_size = 100).contains("schedule.batch_size"));
    assert!(refused(|recipe| recipe.optimiser.lr = -1.0).contains("optimiser.lr"));
}

#[test]
fn a_target_that_cannot_be_written_is_named() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let occupied = folder.path().join("file");
    fs::write(&occupied, "mine").unwrap();
    let message = train::run(&recipe("softmax"), &data, &TrainOptions::new(&occupied)).unwrap_err().to_string();
    assert!(message.contains(&occupied.display().to_string()), "{message}");
    assert_eq!(fs::read_to_string(&occupied).unwrap(), "mine");
}

/// A file system of a few hundred kilobytes, gone when dropped.
#[cfg(target_os = "linux")]
struct Tiny(std::path::PathBuf);

#[cfg(target_os = "linux")]
impl Tiny {
    fn mount(at: &Path, size: &str) -> Self {
        fs::create_dir(at).unwrap();
        let options = format!("size={size}");
        let mount = std::process::Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).output();
        assert!(
            mount.is_ok_and(|output| output.status.success()),
            "the tiny file system is not mounted: only root can"
        );
        Self(at.into())
    }
}

#[cfg(target_os = "linux")]
impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).output();
    }
}

#[test]
#[ignore = "needs root, to mount a small file system"]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoints_whole() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let run = folder.path().join("run");
    let _tiny = Tiny::mount(&run, "400k");
    let mut recipe = recipe("softmax");
    recipe.log.keep = 9;
    let message = train::run(&recipe, &data, &TrainOptions::new(&run)).unwrap_err().to_string();
    assert!(message.contains("free some space") && message.contains("checkpoints"), "{message}");

    let checkpoint = Checkpoint::load(&newest(&run)).unwrap();
    assert!(checkpoint.state.step >= 5, "at least one checkpoint fitted");
    let names = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with('.')), "nothing half-written is left");
}
