//! A tokenizer of the user's: texts, pairs and plain text are cut by it, and runs keep it.

use std::{fs, ops::ControlFlow, path::Path};

use crate::support::{finished, reported, stopping};
use resolvent::models::Sampling;
use resolvent_lab::{
    Recipe,
    data::{CorpusDataset, PairDataset, PairSplit, TextDataset, TextRecipe, TextSplit, Vocabulary},
    device::Device,
    eval,
    generate::Generator,
    predict::TextTranslator,
    train::{self, Resume, Samples, Seen, TrainOptions},
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// As those of GPT-2: bytes, split by a regular expression, one special token, here with ids beyond 16 bits, and what this program
/// makes no use of.
fn of_bytes(ids: usize) -> Value {
    let recipe = TextRecipe { tokens: resolvent_lab::data::Tokens::Bytes, lowercase: false, ..Default::default() };
    let bytes = Vocabulary::learn(std::iter::empty(), &recipe).unwrap().to_bytes().unwrap();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap();
    let vocabulary = json["model"]["vocab"].as_object().unwrap().clone();
    let mut letters: Vec<String> = vocabulary.keys().filter(|token| token.chars().count() == 1).cloned().collect();
    letters.sort();
    assert_eq!(letters.len(), 256);
    let unused = (256..ids).map(|id| format!("unused{id}"));
    // The letters have the highest ids.
    let tokens: Vec<String> = unused.chain(letters).chain(["<|endoftext|>".to_owned()]).collect();
    json["added_tokens"] = json!([{"id": ids, "content": "<|endoftext|>", "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false}]);
    json["model"]["vocab"] = tokens
        .into_iter()
        .zip(0..)
        .map(|(token, id)| (token, Value::from(id)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\s+|\\S+"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]});
    json["post_processor"] =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    json
}

/// As those of BERT: its special tokens have other ids than those that are learnt here.
fn of_words(words: &[&str]) -> Value {
    let tokens = ["[PAD]", "unused", "[UNK]", "[CLS]", "[SEP]"].iter().chain(words);
    let vocabulary: serde_json::Map<String, Value> =
        tokens.zip(0..).map(|(word, id)| (word.to_string(), id.into())).collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": vocabulary}})
}

fn write(folder: &Path, json: &Value) -> TextRecipe {
    let file = folder.join("tokenizer.json");
    fs::write(&file, json.to_string()).unwrap();
    TextRecipe { tokenizer: Some(file), max_tokens: 16, ..Default::default() }
}

#[test]
fn ids_beyond_16_bits_come_back() {
    let folder = TempDir::new().unwrap();
    let recipe = write(folder.path(), &of_bytes(70_000));
    let vocabulary = Vocabulary::learn(std::iter::empty(), &recipe).unwrap();
    let text = "Zwei  Hunde\n<|endoftext|> ✓";
    let ids = vocabulary.encode_whole(text).unwrap();
    assert!(ids.iter().all(|&id| id > 65_535) && ids.len() == text.len(), "{ids:?}");
    assert_eq!(vocabulary.decode(&ids).unwrap(), text);
    let bytes = vocabulary.bytes_of_tokens().unwrap();
    assert_eq!(ids.iter().map(|&id| bytes[id as usize]).sum::<usize>(), text.len());
    // `<|endoftext|>` is its end; padding, the unknown and a beginning were added.
    assert_eq!((vocabulary.end(), vocabulary.len()), (70_000, 70_004));
    assert!(!vocabulary.written().contains(&70_000));
    let again = Vocabulary::of_user(&vocabulary.to_bytes().unwrap(), Path::new("f")).unwrap();
    assert_eq!((again.fingerprint(), again.encode_whole(text).unwrap()), (vocabulary.fingerprint(), ids));
}

/// Its bits per byte would be those of another text.
#[test]
fn a_language_model_takes_no_tokenizer_that_changes_texts() {
    let text = |count: usize| "A dog runs. ".repeat(count);
    let data = CorpusDataset { name: "corpus".into(), train: text(60), validation: text(4), test: text(4) };
    for (normalizer, keeps) in [("Lowercase", false), ("StripAccents", false), ("NFC", true)] {
        let folder = TempDir::new().unwrap();
        let mut json = of_bytes(300);
        json["normalizer"] = json!({"type": normalizer});
        let recipe = recipe("language", write(folder.path(), &json));
        let trained = train::run(&recipe, &data, &stopping(&folder.path().join("run"), 1, Resume::Never));
        let problem = trained.err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(problem.contains("letters or spaces changed"), !keeps, "{normalizer}: {problem}");
    }
}

#[test]
fn what_is_no_tokenizer_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let recipe = write(folder.path(), &json!({"model": 1}));
    let message = Vocabulary::learn(std::iter::empty(), &recipe).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json: is no tokenizer.json") && !message.contains('\n'), "{message}");
    let missing = TextRecipe { tokenizer: Some(folder.path().join("none.json")), ..Default::default() };
    assert!(Vocabulary::learn(std::iter::empty(), &missing).unwrap_err().to_string().contains("none.json: not found"));
    let mut large = of_bytes(300);
    large["model"]["vocab"]["beyond"] = (1 << 20).into();
    let recipe = write(folder.path(), &large);
    assert!(Vocabulary::learn(std::iter::empty(), &recipe).unwrap_err().to_string().contains("at most 1048575"));
}

fn recipe(kind: &str, text: TextRecipe) -> Recipe {
    let model = if kind == "language" { "context = 8\n" } else { "" };
    let toml = format!(
        "seed = 2\n[model]\nkind = '{kind}'\ndim = 16\ndepth = 1\nheads = 2\nmlp_dim = 16\n{model}\
         [schedule]\nepochs = 2\nbatch_size = 8\nwarmup_epochs = 0"
    );
    Recipe { text, ..Recipe::from_toml(&toml, "test").unwrap() }
}

#[test]
fn a_language_model_keeps_its_tokenizer() {
    let folder = TempDir::new().unwrap();
    let recipe = recipe("language", write(folder.path(), &of_bytes(300)));
    let text = |count: usize| "A dog runs. ".repeat(count);
    let data = CorpusDataset { name: "corpus".into(), train: text(60), validation: text(4), test: text(4) };
    let run = folder.path().join("run");
    train::run(&recipe, &data, &stopping(&run, 3, Resume::Never)).unwrap();
    // From here on the run has its own.
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
    let summary = finished(train::run(&recipe, &data, &options).unwrap());
    assert_eq!(eval::run(&run, &data, &Device::flex()).unwrap().1.prediction, summary.test.prediction);
    assert_eq!(summary.test.prediction.unwrap().bytes, text(4).len() - 1);
    let generator = Generator::load(&run, &Device::flex()).unwrap();
    let said = &mut |_: &str| ControlFlow::Continue(());
    let generated = generator.generate("A dog", 20, &Sampling::default(), 1, said).unwrap();
    assert_eq!((generated.prompt_tokens, generated.tokens), (5, 20));
}

/// A tokenizer that does not give a text back is blamed itself, not the kind of tokens that it stands for.
#[test]
fn a_language_model_needs_a_tokenizer_of_bytes() {
    let folder = TempDir::new().unwrap();
    let recipe = recipe("language", write(folder.path(), &of_words(&["dog", "cat", "run", "##s", "."])));
    let text = |count: usize| "a dog runs. ".repeat(count);
    let data = CorpusDataset { name: "corpus".into(), train: text(60), validation: text(4), test: text(4) };
    let message = train::run(&recipe, &data, &TrainOptions::new(folder.path().join("run"))).unwrap_err().to_string();
    assert!(message.contains("`text.tokenizer`") && message.contains("tokenizer.json"), "{message}");
    let learnt = Recipe { text: TextRecipe::default(), ..recipe };
    let message = train::run(&learnt, &data, &TrainOptions::new(folder.path().join("run"))).unwrap_err().to_string();
    assert!(message.contains("`text.tokens`") && !message.contains("tokenizer"), "{message}");
}

#[test]
fn texts_and_pairs_are_cut_by_it() {
    let folder = TempDir::new().unwrap();
    let words = ["dog", "cat", "run", "##s", "hund", "katze", "rennt", "."];
    let tokenizer = write(folder.path(), &of_words(&words));
    let texts: Vec<String> = (0..32).map(|i| format!("{} runs.", ["DOG", "cat"][i % 2])).collect();
    let split = TextSplit { texts: [texts.clone()], labels: (0..32).map(|i| i % 2).collect() };
    let classes = vec!["dog".into(), "cat".into()];
    let data =
        TextDataset { name: "text".into(), classes, train: split.clone(), validation: None, test: split, words: None };
    let run = folder.path().join("texts");
    let summary = finished(train::run(&recipe("text", tokenizer.clone()), &data, &TrainOptions::new(&run)).unwrap());
    assert_eq!(eval::run(&run, &data, &Device::flex()).unwrap().1.loss, summary.test.loss);
    let Some(Samples::Errors(errors)) = &summary.samples else { panic!("{:?}", summary.samples) };
    assert_eq!(errors.wrong as f64, ((1.0 - summary.test.accuracy.unwrap()) * 32.0).round());
    for error in &errors.worst {
        assert_eq!(error.label, data.classes[error.example % 2]);
        assert_eq!(error.shown, Seen::Text(format!("{} runs.", error.label)), "in the tokenizer's small letters");
    }

    let target = (0..32).map(|i| format!("{} rennt.", ["Hund", "Katze"][i % 2])).collect();
    let split = PairSplit { source: texts, target };
    let languages = ["en".into(), "de".into()];
    let data = PairDataset { name: "pairs".into(), languages, train: split.clone(), validation: None, test: split };
    let run = folder.path().join("pairs");
    let recipe = Recipe { schedule: train_long(), ..recipe("text", tokenizer) };
    let summary = finished(train::run(&recipe, &data, &reported(&run)).unwrap());
    let Some(Samples::Translations(samples)) = &summary.samples else { panic!("{:?}", summary.samples) };
    assert_eq!(samples.len(), 6);
    for sample in samples {
        assert_eq!(sample.translation, sample.reference.to_lowercase(), "it has learnt them");
        assert!(["dog runs.", "cat runs."].contains(&&*sample.source), "{sample:?}");
    }
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("katze rennt."));
    let translated = TextTranslator::load(&run, &Device::flex())
        .unwrap()
        .translate(&["cat runs.".into(), "bird".into()], 1)
        .unwrap();
    assert_eq!((translated[0].text.as_str(), translated[0].ended), ("katze rennt.", true));
    assert_eq!(translated[1].unknown, 1);
}

/// Enough for a handful of sentences.
fn train_long() -> resolvent_lab::recipe::ScheduleRecipe {
    resolvent_lab::recipe::ScheduleRecipe { epochs: 60, batch_size: 8, warmup_epochs: 1.0, ..Default::default() }
}
