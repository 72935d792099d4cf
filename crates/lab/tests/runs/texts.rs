//! Training on texts end to end: a few generated expressions.

use std::{fs, path::Path};

use crate::support::{finished, stopping};
use resolvent_lab::{
    Error, Recipe,
    checkpoint::{Checkpoint, parts},
    data::{Listops, TextDataset, TextSplit, cut_note},
    device::Device,
    eval, metrics,
    predict::Classifier,
    train::{self, Ended, Outcome, Resume, Task, TaskData, TrainOptions},
};

/// Which of two words stands in the text, among others: something that a mean of embeddings learns at once.
fn animals() -> TextDataset {
    let split = |count: usize, from: usize| {
        let text = |i: usize| format!("The {} number {i} sleeps{}", ["cat", "dog"][i % 2], " again".repeat(i % 7));
        let texts = (from..from + count).map(text).collect();
        TextSplit { texts: [texts], labels: (from..from + count).map(|i| i as u32 % 2).collect() }
    };
    let classes = vec!["cat".into(), "dog".into()];
    TextDataset {
        name: "animals".into(),
        classes,
        train: split(96, 0),
        validation: None,
        test: split(32, 200),
        words: None,
    }
}

fn recipe(more: &str) -> Recipe {
    let text = format!(
        "mechanism = 'fna'\nseed = 5\n[model]\nkind = 'text'\nheads = 2\nmlp_dim = 16\n\
         [optimiser]\nlr = 0.02\n[schedule]\nepochs = 6\nbatch_size = 16\nwarmup_epochs = 0.5\n\
         [regularisation]\nlabel_smoothing = 0.0\n{more}"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

fn weights(run: &Path, data: &TextDataset) -> Vec<f32> {
    let checkpoint = Checkpoint::find(run).unwrap();
    let model = train::build(&checkpoint.state.recipe, data, &burn::tensor::Device::flex()).unwrap();
    let model = checkpoint.load_weights(model).unwrap();
    let block = &model.encoder.blocks[0];
    let tensors =
        [block.attention.projection.weight.val(), model.head.weight.val(), model.encoder.embedding.weight.val()];
    tensors.into_iter().flat_map(|tensor| tensor.into_data().iter::<f32>().collect::<Vec<_>>()).collect()
}

#[test]
fn a_classifier_learns_resumes_to_the_same_bits_and_answers() {
    let (folder, data) = (tempfile::tempdir().unwrap(), animals());
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let recipe = recipe("[log]\ncheckpoint_every = 5");
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(&whole)).unwrap());
    assert!(summary.test.accuracy.unwrap() > 0.95, "{}", summary.line());

    let options = stopping(&cut, 8, Resume::Never);
    assert!(matches!(train::run(&recipe, &data, &options).unwrap(), Outcome::Interrupted { step: 8, .. }));
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&cut) };
    let resumed = finished(train::run(&recipe, &data, &options).unwrap());
    assert!(weights(&cut, &data) == weights(&whole, &data), "the weights differ");
    assert_eq!(resumed.test.confusion, summary.test.confusion);
    assert_eq!(eval::run(&whole, &data, &Device::flex()).unwrap().1.confusion, summary.test.confusion);

    let classifier = Classifier::load(&whole, &Device::flex()).unwrap();
    let texts = ["The dog number 7 sleeps", "the CAT", "zebra"].map(String::from);
    let answers = classifier.classify(&texts).unwrap();
    assert_eq!((&answers[0].label[..], &answers[1].label[..]), ("dog", "cat"));
    assert_eq!((answers[2].tokens, answers[2].unknown), (1, 1));
    for answer in &answers {
        assert!((answer.probabilities.values().sum::<f64>() - 1.0).abs() < 1e-5);
        assert_eq!(answer.probabilities[&answer.label], answer.probabilities.values().copied().fold(0.0, f64::max));
    }
    let alone = classifier.classify(&texts[..1]).unwrap();
    assert!((alone[0].probabilities["dog"] - answers[0].probabilities["dog"]).abs() < 1e-6, "padding changes nothing");
}

#[test]
fn long_texts_are_cut_and_counted() {
    let data = animals();
    let task = data.task(&recipe("[text]\nmax_tokens = 6")).unwrap();
    // `The cat number 1 sleeps` has five tokens, and so many more as `again` is repeated.
    let cut = data.train.texts[0].iter().filter(|text| text.split(' ').count() > 6).count();
    assert_eq!(task.notes()[0], format!("{cut} of 96 training texts were cut to their first 6 tokens"));
    assert!(data.task(&recipe("")).unwrap().notes().is_empty());
    let word = cut_note(1, 2, "texts", 1);
    assert_eq!(word.as_deref(), Some("1 of 2 texts were cut to their first token"));
    let (folder, short) = (tempfile::tempdir().unwrap(), recipe("[text]\nmax_tokens = 6"));
    let summary = finished(train::run(&short, &data, &TrainOptions::new(folder.path())).unwrap());
    let cut = data.test.texts[0].iter().filter(|text| text.split(' ').count() > 6).count();
    assert!(
        cut > 0 && summary.test.cut == cut && eval::run(folder.path(), &data, &Device::flex()).unwrap().1.cut == cut
    );
}

#[test]
fn a_validation_part_is_watched_and_picks_the_best_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let data = animals();
    let odd = TextSplit { texts: [data.test.texts[0][..7].to_vec()], labels: data.test.labels[..7].to_vec() };
    let data = TextDataset { validation: Some(odd), ..data };
    let mut recipe = recipe("patience = 2");
    recipe.schedule.epochs = 30;
    let summary = finished(train::run(&recipe, &data, &TrainOptions::new(folder.path())).unwrap());
    assert_eq!((summary.ended, summary.test.examples), (Ended::Patience, 32));
    let epochs: Vec<_> = metrics::read(folder.path())
        .unwrap()
        .into_iter()
        .filter_map(|record| match record {
            metrics::Record::Epoch(epoch) => Some(epoch),
            _ => None,
        })
        .collect();
    assert!(
        epochs
            .iter()
            .all(|epoch| epoch.split == metrics::Watched::HeldOut && (epoch.accuracy.unwrap() * 7.0).fract() < 1e-9),
        "{epochs:?}"
    );
    assert_eq!(eval::run(folder.path(), &data, &Device::flex()).unwrap().0.state.step, summary.best.unwrap().step);

    let out = folder.path().join("other");
    let error = |recipe: &Recipe, data: &TextDataset| {
        train::run(recipe, data, &TrainOptions::new(&out)).unwrap_err().to_string()
    };
    assert!(error(&recipe, &animals()).contains("`regularisation.hold_out` above 0"));
    recipe.regularisation.hold_out = 0.2;
    assert!(error(&recipe, &data).contains("leave out `regularisation.hold_out`"));
    assert!(!out.exists());
}

#[test]
fn generated_expressions_have_their_own_vocabulary() {
    let data = Listops::parse("train=8,test=4,min=3,max=30").unwrap().generate().unwrap();
    let model = train::build(&recipe(""), &data, &burn::tensor::Device::flex()).unwrap();
    assert_eq!((model.encoder.embedding.weight.dims(), model.head.weight.dims()), ([19, 8], [8, 10]));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let (folder, data) = (tempfile::tempdir().unwrap(), animals());
    let out = folder.path().join("run");
    let pictures = Recipe::from_toml("[schedule]\nbatch_size = 16", "test").unwrap();
    let message = train::run(&pictures, &data, &TrainOptions::new(&out)).unwrap_err().to_string();
    assert!(message.contains("`model.kind`") && message.contains("`text`") && !out.exists(), "{message}");
    let mut uneven = animals();
    uneven.train.texts[0].pop();
    let held_out = recipe("hold_out = 0.2");
    let message = train::run(&held_out, &uneven, &TrainOptions::new(&out)).unwrap_err().to_string();
    assert!(message.contains("95 texts and 96 labels") && !out.exists(), "{message}");

    let short = Recipe {
        schedule: resolvent_lab::recipe::ScheduleRecipe { epochs: 2, batch_size: 16, ..Default::default() },
        ..recipe("")
    };
    finished(train::run(&short, &data, &TrainOptions::new(&out)).unwrap());
    let mut foreign = animals();
    foreign.test.texts[0] = foreign.test.texts[0].iter().map(|_| "völlig andere Wörter hier".into()).collect();
    let message = eval::run(&out, &foreign, &Device::flex()).unwrap_err().to_string();
    assert!(message.contains("100 %") && message.contains("vocabulary"), "{message}");
    let classes = TextDataset { classes: vec!["cat".into(), "bird".into()], ..animals() };
    assert!(matches!(eval::run(&out, &classes, &Device::flex()), Err(Error::Unfit { .. })));
    let pictures =
        resolvent_lab::data::Shapes { train: 20, test: 4, size: 16, ..Default::default() }.generate().unwrap();
    assert!(eval::run(&out, &pictures, &Device::flex()).unwrap_err().to_string().contains("trained on texts"));

    // Another vocabulary in the checkpoint's place: the file is whole, but not the model's.
    let checkpoint = Checkpoint::find(&out).unwrap().path;
    let other = animals().task(&recipe("[text]\nvocabulary = 3")).unwrap().extras().unwrap().remove(0).1;
    replace(&checkpoint, parts::VOCABULARY, &other);
    let message = eval::run(&out, &data, &Device::flex()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json") && message.contains("not the vocabulary"), "{message}");
}

/// Puts `bytes` in the place of a checkpoint's file and mends the checksum.
fn replace(checkpoint: &Path, file: &str, bytes: &[u8]) {
    fs::write(checkpoint.join(file), bytes).unwrap();
    let state = checkpoint.join("state.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    manifest["files"][file] = serde_json::json!({"bytes": bytes.len(), "crc32": crc32fast::hash(bytes)});
    fs::write(&state, serde_json::to_vec(&manifest).unwrap()).unwrap();
}
