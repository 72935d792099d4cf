//! A comparison end to end on a few generated pictures.

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Error, Recipe,
    candidate::Candidate,
    compare::{self, CompareOptions, CompareOutcome, Comparison, RunResult},
    data::{PictureDataset, PictureSpec},
    memory::MemoryProbe,
    progress::{Event, Observer},
    recipe::ModelRecipe,
    report::write_comparison,
    train::{self, Outcome, Resume, TrainOptions},
};

fn pictures() -> PictureDataset {
    PictureSpec::parse("shapes:seed=3,size=16,train=48,test=16,difficulty=0").unwrap().load().unwrap()
}

fn recipe() -> Recipe {
    let text = "name = 'tiny'\n[model]\ndim = 16\ndepth = 1\nheads = 2\nmlp_dim = 16\n\
                [schedule]\nepochs = 2\nbatch_size = 16\nmax_minutes = 5.0\n[log]\nevery = 2";
    Recipe::from_toml(text, "test").unwrap()
}

/// All mechanisms into `out`, with one timed step each.
fn quick(out: &Path) -> CompareOptions {
    CompareOptions { report: Some(Arc::new(write_comparison)), slot_seconds: 0.0, ..CompareOptions::new(out) }
}

fn finished(outcome: CompareOutcome) -> Comparison {
    match outcome {
        CompareOutcome::Finished(comparison) => *comparison,
        CompareOutcome::Interrupted { runs, of } => panic!("{runs} of {of} runs"),
    }
}

/// Raises the flag at the n-th step of the whole comparison, and keeps the runs it was told of.
struct Watch {
    left: AtomicU64,
    flag: Arc<AtomicBool>,
    runs: Mutex<Vec<String>>,
}

impl Watch {
    fn new(steps: u64) -> Arc<Self> {
        Arc::new(Self { left: AtomicU64::new(steps), flag: Arc::default(), runs: Mutex::default() })
    }
}

impl Observer for Watch {
    fn on(&self, event: Event<'_>) {
        match event {
            Event::Begin { run, done, .. } => self.runs.lock().unwrap().push(format!("{run} from {done}")),
            Event::Step { .. } if self.left.fetch_sub(1, Ordering::SeqCst) == 1 => {
                self.flag.store(true, Ordering::SeqCst)
            }
            _ => {}
        }
    }
}

/// Says that every mechanism peaks at 5 MB above what was held.
struct FixedProbe;

impl MemoryProbe for FixedProbe {
    fn held(&self) -> u64 {
        1_000_000
    }
    fn reset_peak(&self) {}
    fn peak(&self) -> u64 {
        6_000_000
    }
}

#[test]
fn an_interrupted_comparison_goes_on_where_it_stopped_and_ends_the_same() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let expected = finished(compare::run(&recipe(), &data, &quick(&whole)).unwrap());
    assert_eq!(expected.plan.steps, 6, "five minutes are enough for all of them");
    assert_eq!(expected.entries.len(), 5);

    let mut cut_short = expected.clone();
    cut_short.plan.full_steps = 9;
    assert!(cut_short.caveats()[0].starts_with("Every run took 6 steps"));
    cut_short.entries[1].runs[0].steps = 4;
    assert!(cut_short.caveats()[0].starts_with("Every run was planned for 6 steps"));

    // Six steps a run: the ninth is in the middle of the second.
    let watch = Watch::new(9);
    let options = CompareOptions { stop: watch.flag.clone(), observer: watch.clone(), ..quick(&cut) };
    let outcome = compare::run(&recipe(), &data, &options).unwrap();
    assert_eq!(outcome, CompareOutcome::Interrupted { runs: 1, of: 5 });

    let watch = Watch::new(u64::MAX);
    let options = CompareOptions { observer: watch.clone(), ..quick(&cut) };
    let resumed = finished(compare::run(&recipe(), &data, &options).unwrap());
    let told = watch.runs.lock().unwrap().clone();
    assert_eq!(told.len(), 4, "the finished run is read back: {told:?}");
    assert_eq!(told[0], "infsa, seed 0 (2 of 5) from 3");
    a_difference_is_told_with_what_tells_it(&expected);
    for (resumed, expected) in resumed.entries.iter().zip(&expected.entries) {
        assert_eq!((&resumed.mechanism, &resumed.accuracy), (&expected.mechanism, &expected.accuracy));
        assert_eq!(resumed.runs[0].loss, expected.runs[0].loss);
    }
}

/// 80.76 against 80.80 % of ten thousand test examples is no difference; the same half per cent in two seeds is one.
fn a_difference_is_told_with_what_tells_it(found: &Comparison) {
    let mut one = found.clone();
    for (entry, accuracy) in one.entries.iter_mut().zip([0.8076, 0.808, 0.7, 0.7, 0.5]) {
        (entry.runs[0].accuracy, entry.runs[0].examples) = (Some(accuracy), 10_000);
    }
    let names: Vec<_> = one.ranked().iter().map(|entry| entry.name.clone()).collect();
    assert_eq!((&names[0], &names[4]), (&"infsa".to_owned(), &"uniform".to_owned()));
    let beside = one.beside_best(&one.entries[0]);
    assert!(!beside.is_told() && !beside.of_seeds && (beside.points - 0.04).abs() < 1e-9, "{beside:?}");
    assert!(one.beside_best(&one.entries[4]).is_told());
    let headline = one.headline();
    assert!(
        headline.contains("these test examples do not tell softmax from it") && headline.contains("50.00"),
        "{headline}"
    );
    let mut untold = one.clone();
    untold.entries.iter_mut().for_each(|entry| entry.runs[0].examples = 0);
    assert_eq!(untold.beside_best(&untold.entries[4]).interval, None, "results of older programs");
    assert!(untold.headline().contains("one seed tells none of the others from it"), "{}", untold.headline());
    // Of different seeds, only the one that both have makes a pair.
    let mut apart = one.clone();
    let best = apart.entries.iter().position(|entry| entry.name == "infsa").unwrap();
    let lucky = RunResult { seed: 1, accuracy: Some(0.9), ..apart.entries[best].runs[0].clone() };
    apart.entries[best].runs.insert(0, lucky);
    let beside = apart.beside_best(&apart.entries[0]);
    assert!(!beside.is_told() && !beside.of_seeds, "the test examples of seed 0: {beside:?}");
    assert!((beside.points - 0.04).abs() < 1e-9, "of the seed that both have: {beside:?}");
    apart.entries[best].runs.remove(1);
    let beside = apart.beside_best(&apart.entries[0]);
    assert!(beside.interval.is_none() && (beside.points - 9.24).abs() < 1e-9, "of all runs: {beside:?}");
    for entry in &mut one.entries {
        let first = entry.runs[0].clone();
        entry.runs.push(RunResult { seed: 1, accuracy: first.accuracy.map(|accuracy| accuracy - 0.05), ..first });
    }
    // By the same in both seeds: that is no spread, and the test examples are what tells.
    let beside = one.beside_best(&one.entries[0]);
    assert!(!beside.is_told() && !beside.of_seeds && beside.interval.is_some(), "{beside:?}");
    let softmax = &mut one.entries[0].runs[1];
    softmax.accuracy = softmax.accuracy.map(|accuracy| accuracy - 1e-5);
    let beside = one.beside_best(&one.entries[0]);
    assert!(beside.is_told() && beside.of_seeds, "{beside:?}");
    assert!(one.headline().contains("before softmax"), "{}", one.headline());
    let mut accumulated = one.clone();
    accumulated.recipe.schedule.accumulate = 4;
    let page = resolvent_lab::report::comparison_page(&accumulated, &vec![vec![Vec::new(); 2]; 5]).unwrap();
    assert!(page.contains("differ by the same in all of them") && page.contains("6 steps of 64 examples"), "{page}");
    // Nobody leads of those that are exactly alike; who has the same mean of other values is not alike.
    one.entries[0].runs = one.entries[1].runs.clone();
    let headline = one.headline();
    assert!(headline.starts_with("softmax, infsa lead alike with 78.30"), "{headline}");
    let [first, second] = &mut one.entries[0].runs[..] else { panic!() };
    std::mem::swap(&mut first.accuracy, &mut second.accuracy);
    let headline = one.headline();
    assert!(headline.starts_with("softmax leads with 78.30"), "{headline}");
}

/// The folder of a run is refused before the steps of a plan are timed.
#[test]
fn the_folder_of_a_run_is_refused_first() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let options =
        TrainOptions { report: Some(Arc::new(resolvent_lab::report::write_run)), ..TrainOptions::new(folder.path()) };
    train::run(&recipe(), &data, &options).unwrap();
    let notes = Arc::new(crate::support::Notes::default());
    let options = CompareOptions { observer: notes.clone(), ..quick(folder.path()) };
    let error = compare::run(&recipe(), &data, &options).unwrap_err().to_string();
    assert!(error.contains("holds a training run"), "{error}");
    assert_eq!(*notes.0.lock().unwrap(), Vec::<String>::new());

    let options = CompareOptions { seeds: vec![1, u64::MAX], ..quick(&folder.path().join("seeds")) };
    let error = compare::run(&recipe(), &data, &options).unwrap_err().to_string();
    assert!(error.contains("`seed`") && !folder.path().join("seeds").exists(), "before any is trained: {error}");
}

/// On a grid of 4 x 4 patches the default windows make a single landmark: that is told, and how many others have.
#[test]
fn single_landmarks_are_told() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let named =
        |name: &str, json: &str| Candidate { name: name.into(), mechanism: Mechanism::from_json(json).unwrap() };
    let mechanisms = vec![
        named("wide", r#"{"mechanism": "soft"}"#),
        named("counted", r#"{"mechanism": "soft", "landmarks": {"kind": "pool", "count": 4}}"#),
        named("none", r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#),
    ];
    let options = CompareOptions { mechanisms, ..quick(folder.path()) };
    let comparison = finished(compare::run(&recipe(), &data, &options).unwrap());
    let shown = comparison.entries.iter().map(|entry| entry.landmarks_text()).collect::<Vec<_>>();
    assert_eq!(shown, ["1 of 16", "4 of 16", ""]);
    let caveats = comparison.caveats();
    let told = caveats.iter().filter(|caveat| caveat.contains("single landmark")).collect::<Vec<_>>();
    assert!(told.len() == 1 && told[0].starts_with("wide ") && told[0].contains("16 tokens"), "{caveats:?}");
    let table = comparison.table();
    assert!(table.lines().next().unwrap().ends_with("  landmarks") && table.contains("  4 of 16\n"), "{table}");
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("wide has a single landmark for 16 tokens") && page.contains("Landmarks: 4 of 16 tokens."));
}

#[test]
fn results_and_report_hold_the_numbers() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let options = CompareOptions {
        seeds: vec![1, 2],
        memory: Some(Arc::new(FixedProbe)),
        commands: vec!["resolvent compare --seeds 1,2".into()],
        ..quick(folder.path())
    };
    let comparison = finished(compare::run(&recipe(), &data, &options).unwrap());
    let text = fs::read_to_string(folder.path().join(compare::RESULTS)).unwrap();
    assert_eq!(text, serde_json::to_string_pretty(&comparison).unwrap());
    assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap().table(), comparison.table());

    let (table, report) = (comparison.table(), fs::read_to_string(folder.path().join("report.html")).unwrap());
    for entry in &comparison.entries {
        assert_eq!(entry.runs.len(), 2);
        assert_eq!(entry.speed.peak_bytes, Some(5_000_000));
        let (accuracies, accuracy) =
            ([0, 1].map(|run| entry.runs[run].accuracy.unwrap()), entry.accuracy.as_ref().unwrap());
        assert!((accuracy.mean - (accuracies[0] + accuracies[1]) / 2.0).abs() < 1e-12);
        assert!((accuracy.std.unwrap() - (accuracies[0] - accuracies[1]).abs() / 2f64.sqrt()).abs() < 1e-12);
        for page in [&table, &report] {
            assert!(page.contains(entry.mechanism.id()) && page.contains(&accuracy.percent()), "{page}");
        }
    }
    assert!(report.contains("5.0 MB") && report.contains("resolvent compare --seeds 1,2"));
    for remote in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!report.contains(remote), "the report must stand alone: {remote}");
    }
}

#[test]
fn another_comparison_in_the_same_folder_is_refused() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let watch = Watch::new(1);
    let options = CompareOptions { stop: watch.flag.clone(), observer: watch.clone(), ..quick(folder.path()) };
    compare::run(&recipe(), &data, &options).unwrap();
    let mut other = recipe();
    let ModelRecipe::Vit(model) = &mut other.model else { panic!("a vision transformer") };
    model.dim = 32;
    let message = compare::run(&other, &data, &options).unwrap_err().to_string();
    assert!(message.contains("model.dim = 16") && message.contains("comparison.json"), "{message}");

    let twice = CompareOptions { seeds: vec![1, 1], ..quick(&folder.path().join("new")) };
    let error = compare::run(&recipe(), &data, &twice).unwrap_err();
    assert!(matches!(&error, Error::Recipe { field, .. } if field == "seeds"), "{error}");
    let none = CompareOptions { mechanisms: vec![], ..quick(&folder.path().join("new")) };
    assert!(compare::run(&recipe(), &data, &none).is_err());
    for name in ["", "../softmax"] {
        let mechanism = Mechanism::preset("softmax").unwrap();
        let mechanisms = vec![Candidate { name: name.into(), mechanism }];
        let error = compare::run(&recipe(), &data, &CompareOptions { mechanisms, ..quick(&folder.path().join("new")) });
        assert!(error.unwrap_err().to_string().contains("part of a folder's name"), "{name}");
    }
}

/// Hops over rows that sum to about 17: the first step leaves f32.
fn unsteady() -> Candidate {
    let json = r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid", "offset": 10.0}, "normalisation": "none",
                   "series": {"kind": "hops", "count": 40, "gamma": 0.999}}"#;
    Candidate { name: "unsteady".into(), mechanism: Mechanism::from_json(json).unwrap() }
}

/// A run that diverges is told with its step, in the table and in the report, and the others go on.
#[test]
fn a_run_that_diverges_does_not_end_the_others() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mechanisms = vec![unsteady(), Mechanism::preset("softmax").unwrap().into()];
    let options = CompareOptions { mechanisms, seeds: vec![1, 2], ..quick(folder.path()) };
    let mut comparison = finished(compare::run(&recipe(), &data, &options).unwrap());
    assert_eq!(comparison.entries.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["softmax"]);
    assert_eq!(comparison.entries[0].runs.len(), 2);
    let told: Vec<_> = comparison.diverged.iter().map(|run| (&*run.name, run.seed)).collect();
    assert_eq!(told, [("unsteady", 1), ("unsteady", 2)]);
    let steps = comparison.diverged.iter().map(|run| run.step.to_string()).collect::<Vec<_>>().join(", ");
    let (table, page) = (comparison.table(), fs::read_to_string(folder.path().join("report.html")).unwrap());
    for text in [&table, &page] {
        assert!(
            text.contains("unsteady") && text.contains(&format!("2 of 2 runs diverged at steps {steps}")),
            "{text}"
        );
    }
    let text = fs::read_to_string(folder.path().join(compare::RESULTS)).unwrap();
    assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap(), comparison);
    assert!(comparison.caveats()[0].starts_with("Diverged: unsteady, seed 1, at step "), "{:?}", comparison.caveats());

    // One of the runs of a mechanism that has others.
    comparison.diverged.truncate(1);
    comparison.diverged[0].name = "softmax".into();
    assert!(comparison.lost().is_empty() && comparison.table().contains("1 of 2 runs diverged at step"));
    assert!(comparison.caveats()[0].contains("the other seeds alone"), "{:?}", comparison.caveats());
}

/// So does one whose first step already leaves f32, in the timing before the runs too.
#[test]
fn a_run_that_cannot_begin_does_not_end_the_others() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let mechanism = Mechanism::from_json(r#"{"mechanism": "relu", "scale": 1e18}"#).unwrap();
    let beyond = Candidate { name: "beyond".into(), mechanism };
    let mechanisms = vec![beyond, Mechanism::preset("uniform").unwrap().into()];
    let mut recipe = recipe();
    recipe.schedule.max_minutes = Some(5.0);
    let comparison =
        finished(compare::run(&recipe, &data, &CompareOptions { mechanisms, ..quick(folder.path()) }).unwrap());
    assert_eq!(comparison.entries.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["uniform"]);
    assert_eq!(comparison.diverged.iter().map(|run| (&*run.name, run.step)).collect::<Vec<_>>(), [("beyond", 1)]);
}

#[test]
fn a_comparison_in_which_all_diverge_has_no_result() {
    let folder = tempfile::tempdir().unwrap();
    let options = CompareOptions { mechanisms: vec![unsteady()], ..quick(folder.path()) };
    let error = compare::run(&recipe(), &pictures(), &options).unwrap_err();
    assert!(matches!(error, Error::AllDiverged { runs: 1, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("unsteady, seed 0, at step") && message.contains("`optimiser.lr`"), "{message}");
    assert!(!folder.path().join(compare::RESULTS).exists());
}

#[test]
fn settings_of_one_mechanism_are_told_apart_by_name() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let fna = |fields: &str| Mechanism::from_json(&format!(r#"{{"mechanism": "fna"{fields}}}"#)).unwrap();
    let local = Candidate { name: "local".into(), mechanism: fna(r#", "alpha": 2"#) };
    let mechanisms = vec![fna("").into(), local, Mechanism::preset("uniform").unwrap().into()];
    let comparison =
        finished(compare::run(&recipe(), &data, &CompareOptions { mechanisms, ..quick(folder.path()) }).unwrap());
    let runs: Vec<_> = comparison.entries.iter().map(|entry| entry.runs[0].folder.as_str()).collect();
    assert_eq!(runs, ["runs/fna-seed0", "runs/local-seed0", "runs/uniform-seed0"]);
    assert_ne!(comparison.entries[0].runs[0].loss, comparison.entries[1].runs[0].loss);
    let report = fs::read_to_string(folder.path().join("report.html")).unwrap();
    let chips: Vec<_> = report.match_indices("class=\"chip ").map(|(at, _)| &report[at + 12..at + 16]).collect();
    assert!(chips[0] != chips[1] && chips[0] != chips[2] && chips[1] != chips[2], "{chips:?}");
    assert!(comparison.table().contains("local ") && report.contains("&quot;alpha&quot;:2.0"), "{report}");
}

#[test]
fn an_impossible_model_is_told_before_the_first_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let watch = Watch::new(1);
    let mechanisms = ["softmax", "infsa"].map(|id| Mechanism::preset(id).unwrap().into()).to_vec();
    let mut recipe = recipe();
    let ModelRecipe::Vit(model) = &mut recipe.model else { panic!() };
    model.weight_dropout = 0.1;
    let options = CompareOptions { mechanisms, observer: watch.clone(), ..quick(folder.path()) };
    let message = compare::run(&recipe, &pictures(), &options).unwrap_err().to_string();
    assert!(message.contains("infsa") && message.contains("dropout"), "{message}");
    assert!(watch.runs.lock().unwrap().is_empty());
}

/// Pictures have a rule of their own for the length scale of `fna`; a rule that is named is kept, and so is that of a run that
/// began without one.
#[test]
fn fna_takes_its_length_scale_by_the_kind_of_data() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let fna = |json: &str| Mechanism::from_json(json).unwrap();
    let mechanisms = vec![
        Candidate::from(fna(r#"{"mechanism": "fna"}"#)),
        Candidate { name: "named".into(), mechanism: fna(r#"{"mechanism": "fna", "kappa": "text"}"#) },
    ];
    let options = CompareOptions { mechanisms, ..quick(folder.path()) };
    let comparison = finished(compare::run(&recipe(), &data, &options).unwrap());
    let trained = |n: usize| comparison.entries[n].mechanism.clone();
    assert_eq!(trained(0), fna(r#"{"mechanism": "fna", "kappa": "vision"}"#));
    assert_eq!(trained(1), options.mechanisms[1].mechanism);
    assert_ne!(comparison.entries[0].runs[0].loss, comparison.entries[1].runs[0].loss);
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    for rule in ["vision", "text"] {
        assert!(page.contains(&format!("by the rule <code>{rule}</code>")), "{rule}");
    }

    // The same comparison again is read back.
    assert_eq!(finished(compare::run(&recipe(), &data, &options).unwrap()).entries[0].runs, comparison.entries[0].runs);

    // A run of a program that knew one rule alone: nothing is named in its checkpoint.
    let (old, plain) =
        (folder.path().join("runs/fna-seed0"), Recipe { mechanism: Mechanism::preset("fna").unwrap(), ..recipe() });
    for entry in fs::read_dir(old.join("checkpoints")).unwrap() {
        let file = entry.unwrap().path().join("state.json");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(r#""kappa": "vision""#), "{text}");
        fs::write(&file, text.replace(r#""kappa": "vision""#, r#""kappa": null"#)).unwrap();
    }
    fs::remove_file(old.join("summary.json")).unwrap();
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&old) };
    let again = match train::run(&plain, &data, &options).unwrap() {
        Outcome::Finished(summary) => *summary,
        Outcome::Interrupted { .. } => panic!("interrupted"),
    };
    assert_eq!(again.recipe.mechanism, plain.mechanism, "it goes on as it began");
    // No step was left: the time is that of the steps before.
    assert!(again.examples_per_second > 0.0 && again.time.steps == again.steps, "{:?}", again.time);
    assert!(matches!(train::run(&plain, &data, &options), Ok(Outcome::Finished(_))));
}
