//! Models and data of one's own: the examples, interrupted and resumed, and what the trait promises beside them.

#[allow(dead_code)] // its `main`
#[path = "../../examples/own_data.rs"]
mod own_data;
#[allow(dead_code)] // its `main`
#[path = "../../examples/own_model.rs"]
mod own_model;

use std::{fs, path::Path, sync::Arc, time::Instant};

use crate::support::{finished, reported, stopping, weights};
use burn::tensor::{Device, Tensor};
use own_model::{Lookup, Question, Questions};
use resolvent::{Mechanism, attention::MultiHeadAttention};
use resolvent_lab::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation},
    compare::{self, CompareOptions, CompareOutcome},
    data::{self, Batches, PictureShape, PictureSplit},
    eval,
    evaluation::{Evaluation, Metric},
    report::write_comparison,
    train::{self, Outcome, Part, Resume, Task, TaskData, TrainOptions, TrainSummary},
};

/// The recipe of an example, for two epochs.
fn short(recipe: &str) -> Recipe {
    let settings =
        ["schedule.epochs=2", "schedule.batch_size=16", "log.checkpoint_every=3", "regularisation.ema_decay=0.5"];
    let settings = settings.map(|setting| setting.parse().unwrap());
    Recipe::from_toml(recipe, "example").unwrap().with(&settings).unwrap()
}

/// Trains in one go and in three pieces, checks that the weights are the same bits, and returns the summary of the run in `folder/cut`.
fn resumed<D: TaskData>(folder: &Path, recipe: &Recipe, data: &D) -> TrainSummary {
    let (whole, cut) = (folder.join("whole"), folder.join("cut"));
    let expected = finished(train::run(recipe, data, &TrainOptions::new(&whole)).unwrap());
    for (steps, resume) in [(2, Resume::Never), (7, Resume::Always)] {
        let outcome = train::run(recipe, data, &stopping(&cut, steps, resume)).unwrap();
        assert!(matches!(outcome, Outcome::Interrupted { step, .. } if step == steps), "{outcome:?}");
    }
    let options = TrainOptions { resume: Resume::Always, ..reported(&cut) };
    let summary = finished(train::run(recipe, data, &options).unwrap());
    let bits = |run: &Path| -> Vec<Vec<u8>> {
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect();
        weights(run, recipe, data).into_iter().map(bytes).collect()
    };
    assert_eq!(bits(&cut), bits(&whole), "every weight, byte for byte");
    assert_eq!((&summary.learned, &summary.best), (&expected.learned, &expected.best));
    assert!(summary.best.is_some() && expected.steps == summary.steps);
    summary
}

#[test]
fn a_model_of_ones_own_resumes_to_the_same_bits_and_reports_its_scalars() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, data) = (short(own_model::RECIPE), Questions([80, 32, 32]));
    let summary = resumed(folder.path(), &recipe, &data);
    for (name, start) in [("sharpness", 1.0), ("attention.gamma", 0.7)] {
        let value = summary.learned.get(name).unwrap();
        assert!((value - start).abs() > 1e-6, "`{name}` moves: {value}");
    }
    let report = fs::read_to_string(folder.path().join("cut/report.html")).unwrap();
    assert!(report.contains("Learned sharpness") && report.contains("Learned gamma"), "{report}");
    let (checkpoint, evaluation) = eval::run(&folder.path().join("cut"), &data, &Device::flex()).unwrap();
    assert_eq!((evaluation.confusion, checkpoint.state.step), (summary.test.confusion, 10));
}

#[test]
fn mechanisms_are_compared_in_a_model_of_ones_own() {
    let folder = tempfile::tempdir().unwrap();
    let mechanisms = ["softmax", "infsa"].map(|id| Mechanism::preset(id).unwrap().into()).to_vec();
    let options = CompareOptions {
        mechanisms,
        report: Some(Arc::new(write_comparison)),
        slot_seconds: 0.0,
        ..CompareOptions::new(folder.path())
    };
    let outcome = compare::run(&short(own_model::RECIPE), &Questions([80, 32, 32]), &options).unwrap();
    let CompareOutcome::Finished(comparison) = outcome else { panic!("{outcome:?}") };
    let learned: Vec<_> = comparison.entries.iter().map(|entry| entry.runs[0].learned.0.len()).collect();
    assert_eq!(learned, [1, 2], "softmax learns the model's own scalar alone");
    let report = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(report.contains("Learned sharpness: ") && report.contains("Learned gamma (from 0.7): "), "{report}");
}

#[test]
fn data_of_ones_own_train_a_model_of_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let summary = resumed(folder.path(), &short(own_data::RECIPE), &own_data::stripes(90, 20).unwrap());
    assert_eq!((summary.data.name.as_str(), summary.test.examples), ("stripes", 20));
    assert_eq!(summary.test.classes, ["across", "rising", "down", "falling"]);
}

#[test]
fn pictures_that_do_not_fit_are_refused() {
    let shape = PictureShape { channels: 1, height: 2, width: 3 };
    let error = PictureSplit::new(shape, vec![0; 17], vec![0; 3]).unwrap_err();
    assert!(matches!(error, data::Error::Pixels { found: 17, pictures: 3, .. }), "{error}");
    let (recipe, mut data) = (short(own_data::RECIPE), own_data::stripes(90, 20).unwrap());
    data.classes.pop();
    let error = train::build(&recipe, &data, &Device::flex()).unwrap_err().to_string();
    assert!(
        error.contains("`stripes`") && error.contains("label of its example 3 is 3") && error.contains("3 classes"),
        "{error}"
    );
    data.classes.push("falling".into());
    data.shape.width = 15;
    let error = train::build(&recipe, &data, &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("`stripes`") && error.contains("one shape"), "{error}");
}

/// The same questions, judged by the loss alone; the model is told how many there are to expect.
#[derive(Debug, Clone)]
struct WithoutAnswers(Questions, usize);

impl TaskData for WithoutAnswers {
    type Task = Self;

    fn identity(&self) -> DataIdentity {
        self.0.identity()
    }

    fn task(&self, _recipe: &Recipe) -> Result<Self> {
        Ok(self.clone())
    }
}

impl Task for WithoutAnswers {
    type Model = Lookup;
    type Batch = Vec<Question>;
    type Inputs = <Questions as Task>::Inputs;

    fn train_len(&self) -> usize {
        self.0.train_len()
    }

    fn brings_validation(&self) -> bool {
        true
    }

    fn expects(&self) -> Expectation {
        Expectation::Own([("symbols".into(), self.1.into())].into_iter().collect())
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<Lookup> {
        self.0.model(recipe, device)
    }

    fn attentions(model: &mut Lookup) -> Vec<(String, &mut MultiHeadAttention)> {
        Questions::attentions(model)
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<Vec<Question>>> {
        self.0.epoch(recipe, epoch, first)
    }

    fn len_of(batch: &Vec<Question>) -> usize {
        batch.len()
    }

    fn inputs(&self, recipe: &Recipe, batch: Vec<Question>, device: &Device) -> Self::Inputs {
        self.0.inputs(recipe, batch, device)
    }

    fn loss(&self, model: &Lookup, inputs: Self::Inputs) -> Result<Tensor<1>> {
        self.0.loss(model, inputs)
    }

    fn evaluate(&self, model: &Lookup, part: Part) -> Result<Evaluation> {
        let began = Instant::now();
        let Evaluation { examples, loss, .. } = self.0.evaluate(model, part)?;
        Ok(Evaluation::new(examples, loss, began))
    }
}

#[test]
fn a_model_without_an_accuracy_is_judged_by_its_loss() {
    let folder = tempfile::tempdir().unwrap();
    let data = WithoutAnswers(Questions([80, 32, 32]), 8);
    let mut recipe = short(own_model::RECIPE);
    recipe.regularisation.patience = Some(2);
    let run = folder.path().join("run");
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(&run)).unwrap());
    let best = summary.best.clone().unwrap();
    assert_eq!(best.metric, Metric::Loss);
    assert!(summary.line().starts_with("test loss "), "{}", summary.line());
    assert_eq!(Checkpoint::find(&run).unwrap().state.step, best.step, "the best epoch's weights are kept");

    let other = WithoutAnswers(data.0.clone(), 9);
    let error = eval::run(&run, &other, &Device::flex()).unwrap_err();
    assert!(
        matches!(&error, Error::Unfit { problem, .. } if problem.contains("`symbols` is 9") && problem.contains("with 8")),
        "{error}"
    );

    let mechanisms = ["uniform", "softmax"].map(|id| Mechanism::preset(id).unwrap().into()).to_vec();
    let compared = folder.path().join("compared");
    let options = CompareOptions {
        mechanisms,
        report: Some(Arc::new(write_comparison)),
        slot_seconds: 0.0,
        ..CompareOptions::new(compared)
    };
    let CompareOutcome::Finished(comparison) = compare::run(&recipe, &data, &options).unwrap() else { panic!() };
    let losses: Vec<f64> = comparison.ranked().iter().map(|entry| entry.runs[0].loss).collect();
    assert!(losses.is_sorted() && comparison.table().contains("test loss"), "{}", comparison.table());
    assert!(fs::read_to_string(folder.path().join("compared/report.html")).unwrap().contains("Test loss"));
}

#[test]
fn fields_of_a_model_of_ones_own_are_named_where_they_do_not_fit() {
    let mut recipe = short(own_model::RECIPE);
    assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
    recipe = recipe.with(&["model.width=wide".parse().unwrap()]).unwrap();
    let error = train::build(&recipe, &Questions([16, 8, 8]), &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("model.width") && error.contains("usize"), "{error}");
    // The library's data ask for the library's models.
    let error = train::build(&recipe, &own_data::stripes(40, 8).unwrap(), &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("`vit`, `pyramid` or `text`"), "{error}");
}
