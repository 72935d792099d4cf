//! Tasks of long sequences and of recall: what tells mechanisms apart is learnt, and runs resume.

use std::path::Path;

use crate::support::{finished, stopping, weights};
use burn::tensor::{Device, Int, Tensor};
use resolvent_lab::{
    Recipe, compare,
    data::{Data, DataSpec, Documents, MatchDataset, Mqar, Pathfinder, RecallDataset},
    eval, report,
    train::{self, Outcome, Resume, TaskData, TrainOptions, TrainSummary},
};

fn sequences(settings: &str) -> RecallDataset {
    Mqar::parse(settings).unwrap().generate().unwrap()
}

/// The built-in recipe `mqar`, shorter, for 16 tokens.
fn recall(mechanism: &str, epochs: usize) -> Recipe {
    let set = |setting: String| setting.parse().unwrap();
    Recipe::built_in("mqar")
        .unwrap()
        .with(&[
            set(format!("mechanism={mechanism}")),
            set(format!("schedule.epochs={epochs}")),
            set("model.context=16".into()),
        ])
        .unwrap()
}

fn train_recall(mechanism: &str, data: &RecallDataset, out: &Path) -> TrainSummary {
    finished(train::run(&recall(mechanism, 2), data, &TrainOptions::new(out)).unwrap())
}

#[test]
fn infsa_recalls_what_a_mean_of_the_past_cannot() {
    let data = sequences("train=20000,val=0,test=300,tokens=16,pairs=2,vocabulary=40");
    let folder = tempfile::tempdir().unwrap();
    let accuracy =
        |mechanism: &str| train_recall(mechanism, &data, &folder.path().join(mechanism)).test.accuracy.unwrap();
    // Whoever knows which two values there were, but not whose, is right in half of the cases.
    let (infsa, uniform) = (accuracy("infsa"), accuracy("uniform"));
    assert!(infsa > 0.9, "infsa {infsa}");
    assert!(uniform < 0.6, "uniform {uniform}");
    let (_, again) = eval::run(&folder.path().join("infsa"), &data, &Device::flex()).unwrap();
    assert_eq!(again.accuracy, Some(infsa));
    let other = sequences("train=2,val=0,test=2,tokens=16,pairs=3,vocabulary=50");
    let refused = eval::run(&folder.path().join("infsa"), &other, &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("vocabulary=40"), "{refused}");
    let longer = sequences("train=2,val=0,test=2,tokens=20,pairs=3,vocabulary=40");
    let refused = eval::run(&folder.path().join("infsa"), &longer, &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("model.context"), "{refused}");
}

#[test]
fn a_run_of_recall_resumes_to_the_same_bits_and_is_compared() {
    let data = sequences("train=192,val=8,test=8,tokens=16,pairs=3,vocabulary=40");
    let averaged = ["regularisation.ema_decay=0.9".parse().unwrap()];
    let (folder, recipe) = (tempfile::tempdir().unwrap(), recall("infsa", 2).with(&averaged).unwrap());
    resumes_to_the_same_bits(folder.path(), &recipe, &data);
    is_compared(folder.path(), &recall("softmax", 1), &data);
}

/// Trains in `folder`, once in `whole` and once with a stop after two steps; what the whole run came to.
fn resumes_to_the_same_bits<T: TaskData>(folder: &Path, recipe: &Recipe, data: &T) -> TrainSummary {
    let [whole, part] = ["whole", "part"].map(|name| folder.join(name));
    let full = finished(train::run(recipe, data, &TrainOptions::new(&whole)).unwrap());
    let stopped = train::run(recipe, data, &stopping(&part, 2, Resume::Never)).unwrap();
    assert!(matches!(stopped, Outcome::Interrupted { step: 2, .. }));
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&part) };
    let resumed = finished(train::run(recipe, data, &options).unwrap());
    assert_eq!(resumed.test.loss, full.test.loss);
    assert_eq!(weights(&part, recipe, data), weights(&whole, recipe, data));
    full
}

fn is_compared<T: TaskData>(folder: &Path, recipe: &Recipe, data: &T) {
    let candidates = ["softmax", "uniform"].map(|id| resolvent_kernels::Mechanism::preset(id).unwrap().into());
    let mut options = compare::CompareOptions::new(folder.join("compare"));
    (options.mechanisms, options.seeds) = (candidates.to_vec(), vec![0]);
    let outcome = compare::run(recipe, data, &options).unwrap();
    assert!(matches!(outcome, compare::CompareOutcome::Finished(comparison) if comparison.entries.len() == 2));
}

fn pairs(settings: &str) -> MatchDataset {
    Documents::parse(settings).unwrap().generate().unwrap()
}

/// The built-in recipe `lra-retrieval-small` with changes.
fn retrieval(changes: &[&str]) -> Recipe {
    let changes: Vec<_> = changes.iter().map(|change| change.parse().unwrap()).collect();
    Recipe::built_in("lra-retrieval-small").unwrap().with(&changes).unwrap()
}

#[test]
fn a_run_on_pairs_of_documents_resumes_to_the_same_bits_and_is_compared() {
    let data = pairs("train=96,val=8,test=12,topics=3,bytes=48");
    let mut small = vec!["model.dim=16", "model.mlp_dim=16", "mechanism=infsa", "schedule.epochs=2"];
    small.extend(["model.dropout=0.1", "regularisation.ema_decay=0.9"]);
    let (folder, recipe) = (tempfile::tempdir().unwrap(), retrieval(&small));
    let full = resumes_to_the_same_bits(folder.path(), &recipe, &data);
    let whole = folder.path().join("whole");
    let (_, again) = eval::run(&whole, &data, &Device::flex()).unwrap();
    assert_eq!((again.loss, &again.confusion), (full.test.loss, &full.test.confusion));
    assert_eq!(again.classes, ["unrelated", "related"]);
    report::write_anew(&whole).unwrap();
    assert!(whole.join("report.html").is_file());
    // The words of another seed are other words, of the same bytes.
    let fresh = TrainOptions { from: Some(whole.clone()), ..TrainOptions::new(folder.path().join("tuned")) };
    train::run(&recipe, &pairs("seed=1,train=32,val=8,test=8,topics=3,bytes=48"), &fresh).unwrap();
    is_compared(folder.path(), &recipe, &data);
}

#[test]
fn pairs_of_documents_and_other_data_are_told_apart() {
    let data = pairs("train=8,val=0,test=4,topics=2,bytes=40");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let recipe = retrieval(&["model.dim=8", "model.depth=1", "schedule.max_steps=1", "schedule.batch_size=4"]);
    train::run(&recipe, &data, &TrainOptions::new(&out)).unwrap();
    let refused = eval::run(&out, &sequences("train=2,val=0,test=2"), &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("trained on pairs of documents"), "{refused}");
    let other = MatchDataset { classes: vec!["no".into(), "yes".into()], ..data.clone() };
    let refused = eval::run(&out, &other, &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("unrelated, related"), "{refused}");
    let error = |recipe: &Recipe, data: &MatchDataset| {
        let options = TrainOptions::new(folder.path().join("refused"));
        train::run(recipe, data, &options).unwrap_err().to_string()
    };
    let pictures = Recipe::built_in("shapes").unwrap().with(&["schedule.batch_size=4".parse().unwrap()]).unwrap();
    let refused = error(&pictures, &data);
    assert!(refused.contains("`model.kind`"), "{refused}");
    let refused = error(&retrieval(&["model.decoder.mechanism=softmax", "schedule.batch_size=4"]), &data);
    assert!(refused.contains("`model.decoder`"), "{refused}");
    let mut uneven = data.clone();
    uneven.train.texts[1].pop();
    assert!(error(&recipe, &uneven).contains("8 first documents, 7 second ones and 8 labels"));
    let mut unknown = data.clone();
    unknown.test.labels[1] = 2;
    assert!(error(&recipe, &unknown).contains("example 1 is 2"));
}

#[test]
fn documents_may_be_answered_one_by_one_or_together() {
    let data = pairs("train=8,val=0,test=40,topics=2,bytes=60");
    let folder = tempfile::tempdir().unwrap();
    let recipe = retrieval(&["model.dim=8", "model.depth=1", "schedule.max_steps=2", "schedule.batch_size=4"]);
    let out = folder.path().join("run");
    let whole = finished(train::run(&recipe, &data, &TrainOptions::new(&out)).unwrap()).test;
    let mut alone = 0.0;
    for index in 0..data.test.len() {
        let one = |texts: &[String]| vec![texts[index].clone()];
        let texts = data.test.texts.each_ref().map(|texts| one(texts));
        let test = resolvent_lab::data::MatchSplit { texts, labels: vec![data.test.labels[index]] };
        alone += eval::run(&out, &MatchDataset { test, ..data.clone() }, &Device::flex()).unwrap().1.loss;
    }
    assert!((alone / 40.0 - whole.loss).abs() < 1e-6, "{} and {}", alone / 40.0, whole.loss);
}

#[test]
fn logits_at_places_are_those_of_the_whole() {
    let data = sequences("train=64,val=0,test=4,tokens=16,pairs=3,vocabulary=40");
    let device = Device::flex();
    let model = train::build(&recall("softmax", 1), &data, &device).unwrap();
    let ids = || {
        let ids: Vec<i32> = data.test.ids[..32].iter().map(|&id| id as i32).collect();
        Tensor::<1, Int>::from_ints(ids.as_slice(), &device).reshape([2, 16])
    };
    let places = Tensor::<1, Int>::from_ints([3, 16, 31], &device);
    let some = model.forward_at(ids(), places.clone()).unwrap();
    let all = model.try_forward(ids()).unwrap().reshape([32, 40]).select(0, places);
    some.into_data().assert_approx_eq::<f32>(&all.into_data(), burn::tensor::Tolerance::absolute(1e-6));
}

#[test]
fn pictures_are_read_pixel_by_pixel() {
    let data = Pathfinder::parse("train=32,val=4,test=4,length=6,distractors=0").unwrap().generate().unwrap();
    let set = |setting: &str| setting.parse().unwrap();
    let small = ["model.dim=8", "model.depth=1", "mechanism=linear", "schedule.max_steps=2", "schedule.accumulate=1"];
    let recipe = Recipe::built_in("lra-pathfinder").unwrap().with(&small.map(set)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(&out)).unwrap());
    let embedded = 256 * 8;
    assert!(summary.parameters > embedded, "an embedding of 256 levels");
    let (_, again) = eval::run(&out, &data, &Device::flex()).unwrap();
    assert_eq!(again.accuracy, summary.test.accuracy);
    let colour: DataSpec = "shapes:train=20,test=4,size=16".parse().unwrap();
    let Data::Pictures(colour) = colour.load().unwrap() else { panic!("pictures") };
    let recipe = recipe.with(&[set("data=none"), set("schedule.batch_size=4")]).unwrap();
    train::run(&recipe, &*colour, &TrainOptions::new(folder.path().join("colour"))).unwrap();
}

#[test]
fn the_built_in_recipes_take_a_step_on_their_data() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let reviews = file("reviews.csv", &format!("text,label\n{}", "Good film.,1\nBad film.,0\n".repeat(6)));
    let play = file("play.txt", &"To be, or not to be, that is the question.\n".repeat(200));
    let lists = "listops:train=4,test=2,min=3,max=30";
    for (name, data) in [
        ("lra-listops", lists),
        ("lra-listops-small", lists),
        ("lra-text", &format!("text:{reviews}")),
        ("lra-text-small", &format!("text:{reviews}")),
        ("lra-image", "shapes:train=20,test=2"),
        ("lra-image-small", "shapes:train=20,test=2"),
        ("lra-pathfinder", "pathfinder:train=2,test=2"),
        ("lra-pathfinder-x", "pathfinder:size=128,train=1,val=0,test=1"),
        ("lra-retrieval", "documents:train=4,test=2,bytes=64"),
        ("lra-retrieval-small", "documents:train=4,test=2,bytes=64"),
        ("mqar-paper", "mqar:train=4,test=2"),
        ("shakespeare-char", &format!("corpus:{play}")),
    ] {
        let mut settings = vec!["schedule.max_steps=1", "schedule.batch_size=1", "schedule.accumulate=1"];
        settings.extend((name == "lra-pathfinder-x").then_some("mechanism=uniform"));
        let settings: Vec<_> = settings.into_iter().map(|setting| setting.parse().unwrap()).collect();
        let recipe = Recipe::built_in(name).unwrap().with(&settings).unwrap();
        let options = TrainOptions::new(folder.path().join(name));
        let summary = finished(match data.parse::<DataSpec>().unwrap().load().unwrap() {
            Data::Pictures(data) => train::run(&recipe, &*data, &options).unwrap(),
            Data::Texts(data) => train::run(&recipe, &data, &options).unwrap(),
            Data::Corpus(data) => train::run(&recipe, &data, &options).unwrap(),
            Data::Recall(data) => train::run(&recipe, &data, &options).unwrap(),
            Data::Matches(data) => train::run(&recipe, &*data, &options).unwrap(),
            Data::Pairs(_) => panic!("{name} translates nothing"),
        });
        assert!(summary.test.loss.is_finite(), "{name}");
    }
}

/// Learned projections of keys are as wide as the longest text or picture, which the recipe and the data say.
#[test]
fn learned_projections_are_as_wide_as_the_data() {
    let folder = tempfile::tempdir().unwrap();
    for (name, data, tokens) in [
        ("lra-listops-small", "listops:train=4,test=2,min=3,max=30", 2000),
        ("lra-pathfinder", "pathfinder:train=2,test=2", 32 * 32),
    ] {
        let parameters = ["softmax", "linformer"].map(|mechanism| {
            let steps = ["schedule.max_steps=1", "schedule.batch_size=1", "schedule.accumulate=1"];
            let settings = steps.map(str::to_string).into_iter().chain([format!("mechanism={mechanism}")]);
            let settings: Vec<_> = settings.map(|setting| setting.parse().unwrap()).collect();
            let recipe = Recipe::built_in(name).unwrap().with(&settings).unwrap();
            let options = TrainOptions::new(folder.path().join(name).join(mechanism));
            let summary = finished(match data.parse::<DataSpec>().unwrap().load().unwrap() {
                Data::Pictures(data) => train::run(&recipe, &*data, &options).unwrap(),
                Data::Texts(data) => train::run(&recipe, &data, &options).unwrap(),
                _ => panic!("{name}"),
            });
            summary.parameters
        });
        // Maps of keys and of values in every block.
        let maps = parameters[1] - parameters[0];
        assert!(maps > 0 && maps % (2 * tokens) == 0, "{name}: {maps} more parameters");
    }
}
