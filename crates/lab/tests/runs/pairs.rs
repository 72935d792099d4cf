//! Parallel text from files, and a translator trained on a little of it.

use std::{fs, path::Path};

use crate::support::finished;
use resolvent_lab::{
    Error, Recipe,
    bleu::bleu,
    data::{self, Data, DataSpec, PairDataset, PairSplit},
    device::Device,
    eval,
    evaluation::Metric,
    predict::TextTranslator,
    recipe::ScheduleRecipe,
    train::{self, Task, TaskData, TrainOptions},
};

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn load(kind: &str, path: &Path, settings: &str) -> data::Result<PairDataset> {
    match format!("{kind}:{}{settings}", path.display()).parse::<DataSpec>()?.load()? {
        Data::Pairs(pairs) => Ok(pairs),
        other => panic!("{other:?}"),
    }
}

const FILES: [(&str, &str); 4] = [
    ("train.en", "a dog\na cat\n"),
    ("train.de", "ein Hund\neine Katze\n"),
    ("test_2016.en", "dogs\n"),
    ("test_2016.de", "Hunde"),
];

#[test]
fn sides_are_found_by_their_names() {
    let files = folder(&FILES);
    let data = load("multi30k", files.path(), "").unwrap();
    assert_eq!(
        (&data.train.source[1][..], &data.train.target[1][..], &data.test.target[0][..]),
        ("a cat", "eine Katze", "Hunde")
    );
    assert_eq!((data.validation.is_none(), data.languages.join("-")), (true, "en-de".into()));
    let back = load("pairs", files.path(), "?from=de&to=en").unwrap();
    assert_eq!(back.train.source, data.train.target);
    assert_ne!(back.fingerprint(), data.fingerprint());
    let two = format!("pairs:{0}/train.en,{0}/train.de", files.path().display());
    let Data::Pairs(two) = two.parse::<DataSpec>().unwrap().load().unwrap() else { panic!() };
    assert_eq!((two.train.len(), two.test.len()), (1, 1), "a part is held out");
    for spec in ["multi30k:x?from=en&to=de", "pairs:a,b"] {
        assert_eq!(spec.parse::<DataSpec>().unwrap().to_string(), spec);
    }
    for spec in ["pairs:x", "pairs:x?to=de", "pairs:x?from=en&to=de&to=fr"] {
        assert!(spec.parse::<DataSpec>().is_err(), "{spec}");
    }
}

#[test]
fn one_sided_files_are_named() {
    let error = |change: &[(&str, &str)], gone: &str| {
        let files = folder(&FILES);
        change.iter().for_each(|(name, text)| fs::write(files.path().join(name), text).unwrap());
        if !gone.is_empty() {
            fs::remove_file(files.path().join(gone)).unwrap();
        }
        load("multi30k", files.path(), "").unwrap_err()
    };
    let longer = error(&[("train.de", "ein Hund\neine Katze\nein Pferd\n")], "");
    assert!(matches!(longer, data::Error::OneSided { lines: 2, others: 3, .. }), "{longer}");
    let gap = error(&[("train.de", "ein Hund\n\n")], "").to_string();
    assert!(gap.contains("train.de") && gap.contains("line 2 is empty"), "{gap}");
    let missing = error(&[], "train.de").to_string();
    assert!(missing.contains("train.de") && missing.contains("train.en"), "{missing}");
    assert!(error(&[("train.en", ""), ("train.de", "")], "").to_string().contains("no text"));
    let half = error(&[], "test_2016.de").to_string();
    assert!(half.contains("test_2016"), "{half}");
}

/// Every word has one translation, but the last two words of a sentence change places.
fn swaps() -> PairDataset {
    let words = [("red", "rot"), ("big", "gross"), ("old", "alt"), ("dog", "Hund"), ("cat", "Katze"), ("tree", "Baum")];
    let sentence = |i: usize| {
        let [a, b, c] = [i % 3, 3 + i / 3 % 3, i / 9 % 3].map(|word| words[word]);
        (format!("{} {} {}", c.0, a.0, b.0), format!("{} {} {}", c.1, b.1, a.1))
    };
    let split = |range: std::ops::Range<usize>| {
        let (source, target) = range.map(sentence).unzip();
        PairSplit { source, target }
    };
    PairDataset {
        name: "swaps".into(),
        languages: ["en".into(), "de".into()],
        train: split(0..216),
        validation: None,
        test: split(0..27),
    }
}

fn recipe(more: &str) -> Recipe {
    let text = format!(
        "mechanism = 'fna'\nseed = 3\n[model]\nkind = 'text'\ndim = 32\nheads = 2\nmlp_dim = 32\nnorm = 'pre'\n{more}\n\
         [text]\nlowercase = false\n[optimiser]\nlr = 0.01\n[schedule]\nepochs = 12\nbatch_size = 24\n\
         [regularisation]\nlabel_smoothing = 0.05"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

#[test]
fn a_translator_learns_words_and_their_order() {
    let (folder, data) = (tempfile::tempdir().unwrap(), swaps());
    let summary = finished(train::run(&recipe(""), &data, &TrainOptions::new(folder.path())).unwrap());
    let score = summary.test.bleu.as_ref().unwrap();
    assert!(summary.test.accuracy.unwrap() > 0.95 && score.precisions[2] > 90.0, "{}", summary.line());
    assert!(summary.line().contains("BLEU"));
    assert_eq!(eval::run(folder.path(), &data, &Device::flex()).unwrap().1.bleu.as_ref(), Some(score));

    let translator = TextTranslator::load(folder.path(), &Device::flex()).unwrap();
    let found = translator.translate(&data.test.source, 1).unwrap();
    let texts: Vec<String> = found.iter().map(|translated| translated.text.clone()).collect();
    assert_eq!(&bleu(&texts, &data.test.target, false), score, "as the evaluation says");
    let beams = translator.translate(&["red old tree".to_owned()], 4).unwrap();
    assert_eq!((&beams[0].text[..], beams[0].unknown), ("rot Baum alt", 0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let (folder, data) = (tempfile::tempdir().unwrap(), swaps());
    let options = TrainOptions::new(folder.path().join("run"));
    let message = train::run(&recipe("decoder = 'infsa'"), &data, &options).unwrap_err().to_string();
    assert!(message.contains("infsa") && message.contains("decoder"), "{message}");
    let short = Recipe { schedule: ScheduleRecipe { epochs: 2, batch_size: 24, ..Default::default() }, ..recipe("") };
    finished(train::run(&short, &data, &options).unwrap());

    // Of fewer pairs another vocabulary would be learnt: the weights keep theirs. The best epoch is that of the best BLEU.
    let (mut fewer, mut held) = (swaps(), short.clone());
    for texts in [&mut fewer.train.source, &mut fewer.train.target] {
        texts.truncate(60);
    }
    held.regularisation.hold_out = 0.2;
    let from = Some(folder.path().join("run"));
    let tuning = TrainOptions { from, ..TrainOptions::new(folder.path().join("tuned")) };
    let tuned = finished(train::run(&held, &fewer, &tuning).unwrap());
    let (origin, best) = (tuned.origin.unwrap(), tuned.best.unwrap());
    assert!(origin.fresh.is_empty() && origin.left.is_empty() && best.metric == Metric::Bleu, "{origin:?}");

    let other = PairDataset { languages: ["en".into(), "fr".into()], ..swaps() };
    assert!(matches!(eval::run(&folder.path().join("run"), &other, &Device::flex()), Err(Error::Unfit { .. })));
    let strange = |texts: &[String]| texts.iter().map(|_| "nichts davon".to_owned()).collect();
    for test in [
        PairSplit { source: strange(&data.test.source), ..data.test.clone() },
        PairSplit { target: strange(&data.test.target), ..data.test.clone() },
    ] {
        let foreign = PairDataset { test, ..swaps() };
        let message = eval::run(&folder.path().join("run"), &foreign, &Device::flex()).unwrap_err().to_string();
        assert!(message.contains("100 %") && message.contains("vocabulary"), "{message}");
    }
}

#[test]
fn what_is_cut_is_counted_and_is_no_end() {
    let mut data = swaps();
    data.train.target.iter_mut().take(200).for_each(|text| *text = "rot Hund".into());
    let short = Recipe { text: data::TextRecipe { max_tokens: 2, ..recipe("").text }, ..recipe("") };
    let task = data.task(&short).unwrap();
    let count = |n: usize, of: usize, what: &str| format!("{n} of {of} {what} were cut to their first 2 tokens");
    assert_eq!(
        task.notes(),
        [
            count(216, 216, "training sentences"),
            count(16, 216, "training translations"),
            count(27, 27, "test sentences"),
            count(27, 27, "test translations")
        ]
    );
    let mut endless = 0;
    for batch in task.epoch(&short, 0, 0).unwrap().map(Result::unwrap) {
        let rows = |padded: &data::Padded| -> Vec<Vec<i32>> {
            let rows = padded.ids.chunks_exact(padded.width).zip(&padded.lengths);
            rows.map(|(row, &length)| row[..length].to_vec()).collect()
        };
        for (read, written) in rows(&batch.target).into_iter().zip(rows(&batch.answers)) {
            assert_eq!((read[0], &read[1..]), (2, &written[..written.len() - 1]));
            let ends = written.last() == Some(&3);
            assert_eq!(written.len(), if ends { 3 } else { 2 });
            endless += usize::from(!ends);
        }
    }
    assert_eq!(endless, 16, "those that were cut");
    let folder = tempfile::tempdir().unwrap();
    let brief = Recipe { schedule: ScheduleRecipe { epochs: 2, batch_size: 24, ..Default::default() }, ..short };
    finished(train::run(&brief, &data, &TrainOptions::new(folder.path())).unwrap());
    assert_eq!(eval::run(folder.path(), &data, &Device::flex()).unwrap().1.cut, 54);
}

#[test]
fn a_validation_part_leaves_nothing_to_hold_out() {
    let (folder, data) = (tempfile::tempdir().unwrap(), PairDataset { validation: Some(swaps().test), ..swaps() });
    let mut held = recipe("");
    held.regularisation.hold_out = 0.1;
    let message = train::run(&held, &data, &TrainOptions::new(folder.path())).unwrap_err().to_string();
    assert!(message.contains("validation part") && message.contains("`regularisation.hold_out`"), "{message}");
}
