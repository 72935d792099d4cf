//! A model that was trained by the lab, under observation: what is seen of it agrees with what it does.

use std::{fs, path::Path};

use image::{DynamicImage, RgbImage};
use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Error, Recipe,
    data::{Data, DataSpec, Pathfinder, PictureDataset, PictureSpec},
    device::Device,
    exchange::{self, ModelAttention},
    fit::{Cost, FIT, FitFile},
    predict::PictureClassifier,
    train::{self, TrainOptions},
};
use resolvent_probe::{
    analyze::{self, AnalyzeOptions, FitOptions},
    explain::{self, ExplainOptions},
    report,
    subject::{Example, Material, Subject},
};

fn pictures() -> PictureDataset {
    PictureSpec::parse("shapes:seed=3,size=16,train=32,test=12,difficulty=0").unwrap().load().unwrap()
}

/// A vision transformer of two blocks and two heads on sixteen patches, after two steps, in `folder`.
fn trained(folder: &Path, mechanism: &str) -> PictureDataset {
    let text = format!(
        "mechanism = '{mechanism}'\nseed = 5\n[model]\npatch = 4\ndim = 16\ndepth = 2\nheads = 2\nmlp_dim = 16\n\
         [schedule]\nepochs = 1\nbatch_size = 16\nwarmup_epochs = 0.5\n"
    );
    let data = pictures();
    train::run(&Recipe::from_toml(&text, "test").unwrap(), &data, &TrainOptions::new(folder)).unwrap();
    data
}

fn test_part(data: &PictureDataset) -> Material {
    Material::Data(Data::Pictures(Box::new(data.clone())))
}

/// The program classifies files and explains answers on two ways through a model; both are shown the same picture.
#[test]
fn a_subject_answers_as_the_classifier_of_files() {
    let folder = tempfile::tempdir().unwrap();
    trained(folder.path(), "infsa");
    let file = folder.path().join("picture.png");
    let colours = RgbImage::from_fn(40, 28, |x, y| image::Rgb([6 * x as u8, 9 * y as u8, (x * y) as u8]));
    DynamicImage::from(colours).save(&file).unwrap();

    let device = Device::flex();
    let mut told = None;
    let classifier = PictureClassifier::load(folder.path(), &device).unwrap();
    classifier
        .classify(std::slice::from_ref(&file), usize::MAX, |answer| {
            told = Some(answer);
            Ok::<(), Error>(())
        })
        .unwrap();
    let told = told.unwrap();

    let subject = Subject::load(folder.path(), &device).unwrap();
    let material = Material::Pictures { input: file, boxes: None };
    let examples = subject.examples(&material, 5).unwrap();
    assert_eq!(examples.len(), 1);
    let answers = subject.answers(&examples[0], None, &[vec![false], vec![true]]).unwrap();
    for (class, probability) in &told.top {
        let at = subject.classes().iter().position(|known| known == class).unwrap();
        assert!((answers[0][at] - probability).abs() < 1e-6, "{class}: {} {probability}", answers[0][at]);
    }
    assert_eq!(told.top.len(), subject.classes().len());
    assert!(answers[0] != answers[1], "a picture of one colour is another picture");
}

/// Queries, keys and values of a model are those of its layers; a fit that must reach softmax itself changes no answer, and one that may
/// be anything changes some logit.
#[test]
fn a_fit_of_what_is_captured_is_applied_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let (run, dump) = (folder.path().join("run"), folder.path().join("dump.safetensors"));
    let data = trained(&run, "softmax");
    let subject = Subject::load(&run, &Device::flex()).unwrap();
    let examples = subject.examples(&test_part(&data), 4).unwrap();
    let calls = subject.trace(&examples[0]).unwrap();
    let names: Vec<_> = calls.iter().map(|call| call.place.name.as_str()).collect();
    assert_eq!(names, ["blocks.0", "blocks.1"]);
    assert!(calls.iter().all(|call| call.q.len() == call.shape.q_len() && call.place.grid == Some([4, 4])));
    let (own, _) = analyze::capture(&subject, &examples, &dump).unwrap();
    assert_eq!(own.id(), "softmax");

    let uniform = || vec![Mechanism::preset("uniform").unwrap().into()];
    let options = AnalyzeOptions { mechanisms: uniform(), rounds: 1, ..AnalyzeOptions::new(&dump) };
    let analysis = analyze::run(&options, folder.path()).unwrap().unwrap();
    let errors: Vec<_> = analysis.verdicts.iter().map(|verdict| verdict.numbers.error_median.unwrap()).collect();
    assert!(errors[0] < 1e-6 && errors[1] > 1e-3, "softmax, then uniform: {errors:?}");
    let page = fs::read_to_string(report::write_analysis(folder.path(), &analysis).unwrap()).unwrap();
    assert!(page.contains(&analysis.headline().replace('"', "&quot;")) && page.contains("blocks.1"), "{page}");

    let other = |target: f64| {
        // Counted, not timed: on so few tokens either may be quicker.
        let cost = Cost::Operations;
        let options = FitOptions { candidates: uniform(), cost, ..FitOptions::new(options.clone(), target) };
        analyze::fit(&options, folder.path()).unwrap().unwrap();
        let fit = FitFile::read(&folder.path().join(FIT)).unwrap();
        let ids: Vec<_> =
            fit.layers.iter().flat_map(|layer| &layer.groups).map(|group| group.mechanism.id().to_owned()).collect();
        let data = Data::Pictures(Box::new(data.clone()));
        let (_, exchanged) = exchange::run(&run, &data, &ModelAttention::Fit(fit), &Device::flex()).unwrap();
        (ids, exchanged.answers.unwrap().largest_difference)
    };
    let (ids, difference) = other(1.0);
    assert!(ids.iter().all(|id| id == "softmax") && difference < 1e-5, "{ids:?}: {difference}");
    let (ids, difference) = other(0.0);
    assert!(ids.iter().any(|id| id == "uniform") && difference > 1e-6, "{ids:?}: {difference}");
}

/// The map of a layer is a distribution over the places of its grid, that of a head a share of its weights; what is drawn lies beside the
/// report.
#[test]
fn maps_weigh_the_places_of_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let (run, out) = (folder.path().join("run"), folder.path().join("out"));
    let data = trained(&run, "linear-infsa");
    fs::create_dir(&out).unwrap();
    let options =
        ExplainOptions { examples: Some(3), shown: 2, ..ExplainOptions::new(&run, test_part(&data), "shapes") };
    let (subject, examples) = explain::load(&options).unwrap();
    assert!(examples.iter().all(|example| matches!(example, Example::Picture(picture) if picture.boxes.is_some())));
    let explanation = explain::run(&options, &subject, &examples).unwrap().unwrap();
    assert_eq!((explanation.shown.len(), explanation.answers.len()), (2, 3));
    for layer in explanation.shown.iter().flat_map(|shown| &shown.layers) {
        let sum = |map: &[f32]| map.iter().sum::<f32>();
        assert!((sum(&layer.mean) - 1.0).abs() < 1e-4, "{}: {:?}", layer.layer, layer.mean);
        assert_eq!(layer.heads.len(), 2);
        for map in layer.heads.iter().chain([&layer.mean]) {
            assert_eq!(map.len(), 16);
            assert!(map.iter().all(|&weight| weight >= 0.0), "{}: {map:?}", layer.layer);
            assert!((1e-3..1.0 + 1e-4).contains(&sum(map)), "{}: {map:?}", layer.layer);
        }
    }
    let page = report::write_explanation(&out, &explanation).unwrap();
    assert!(fs::read_to_string(page).unwrap().contains("What this model looks at"));
    let drawn = |number: usize| out.join(report::OVERLAYS).join(format!("{number}.png"));
    assert!(image::open(drawn(1)).is_ok() && image::open(drawn(2)).is_ok() && !drawn(3).exists());
}

/// Attention of a model that reads pixels one by one lies on their grid.
#[test]
fn maps_of_pixels_lie_on_the_picture() {
    let data = Pathfinder::parse("train=32,val=4,test=4,length=6,distractors=0").unwrap().generate().unwrap();
    let set = |setting: &str| setting.parse().unwrap();
    let small = ["model.dim=8", "model.depth=1", "mechanism=linear", "schedule.max_steps=2", "schedule.accumulate=1"];
    let recipe = Recipe::built_in("lra-pathfinder").unwrap().with(&small.map(set)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap();
    let subject = Subject::load(folder.path(), &Device::flex()).unwrap();
    let examples = subject.examples(&test_part(&data), 1).unwrap();
    let calls = subject.trace(&examples[0]).unwrap();
    assert_eq!(calls.len(), 1);
    let [height, width] = calls[0].place.grid.unwrap();
    assert_eq!((height * width, calls[0].place.class_token), (calls[0].shape.seq_q, false));
}

#[test]
fn models_of_pairs_of_documents_have_no_single_example() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let settings = ["model.dim=8", "model.depth=1", "schedule.max_steps=1", "schedule.batch_size=4"];
    let settings: Vec<_> = settings.into_iter().map(|setting| setting.parse().unwrap()).collect();
    let recipe = Recipe::built_in("lra-retrieval-small").unwrap().with(&settings).unwrap();
    let data: DataSpec = "documents:train=8,val=0,test=4,topics=2,bytes=40".parse().unwrap();
    let Data::Matches(data) = data.load().unwrap() else { panic!("pairs of documents") };
    train::run(&recipe, &*data, &TrainOptions::new(&out)).unwrap();
    let refused = Subject::load(&out, &Device::flex()).unwrap_err().to_string();
    assert!(refused.contains("pairs of documents"), "{refused}");
}
