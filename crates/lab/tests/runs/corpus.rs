//! Plain text from files, and language models trained on a little of it.

use std::{fs, ops::ControlFlow, path::Path};

use crate::support::{finished, reported, stopping};
use resolvent::models::Sampling;
use resolvent_lab::{
    Error, Recipe,
    checkpoint::Checkpoint,
    data::{CorpusDataset, Data, DataSpec, TextRecipe, Tokens, Vocabulary},
    device::Device,
    eval,
    evaluation::Metric,
    generate::Generator,
    metrics::{self, Record},
    train::{self, Outcome, Resume, Samples, Task, TaskData, TrainOptions},
};

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn load(spec: &str) -> resolvent_lab::data::Result<CorpusDataset> {
    match spec.parse::<DataSpec>()?.load()? {
        Data::Corpus(corpus) => Ok(corpus),
        other => panic!("{other:?}"),
    }
}

#[test]
fn parts_are_files_or_pieces_of_one() {
    let lines: String = (0..200).map(|i| format!("line {i}\n")).collect();
    let files = folder(&[("train.txt", &lines), ("test.txt", "tested"), ("val.txt", "watched\n\nblank lines stay\n")]);
    let at = |name: &str| files.path().join(name).display().to_string();
    let whole = load(&format!("corpus:{}", files.path().display())).unwrap();
    assert_eq!((&whole.train, &whole.test[..]), (&lines, "tested"));
    assert!(whole.validation.ends_with("stay\n"));
    let named = format!("corpus:{},{},{}", at("train.txt"), at("val.txt"), at("test.txt"));
    assert_eq!(load(&named).unwrap().fingerprint(), whole.fingerprint());
    let two = load(&format!("corpus:{},{}", at("train.txt"), at("test.txt"))).unwrap();
    assert_eq!(format!("{}{}", two.train, two.validation), lines);
    assert!(two.train.len() > 15 * two.validation.len() && two.test == "tested");
    let one = load(&format!("corpus:{}", at("train.txt"))).unwrap();
    assert_eq!([&one.train[..], &one.validation, &one.test].concat(), lines);
    for spec in ["corpus:a", "corpus:a,b", "corpus:a,b,c"] {
        assert_eq!(spec.parse::<DataSpec>().unwrap().to_string(), spec);
    }

    let books = folder(&[("a.txt", &lines), ("b.txt", &lines), ("notes.md", "no text")]);
    let shelf = load(&format!("corpus:{}", books.path().display())).unwrap();
    assert_eq!([&shelf.train[..], &shelf.validation, &shelf.test].concat(), format!("{lines}\n{lines}"));
}

#[test]
fn what_is_no_text_is_named() {
    let files = folder(&[("empty.txt", ""), ("t.txt", "some text\nand more\n")]);
    fs::write(files.path().join("bad.txt"), b"fine\n\xff\n").unwrap();
    let at = |name: &str| files.path().join(name).display().to_string();
    let error = |spec: String| load(&spec).unwrap_err().to_string();
    assert!(error(format!("corpus:{}", at("bad.txt"))).contains("not UTF-8"));
    assert!(error(format!("corpus:{}", at("empty.txt"))).contains("empty.txt: holds no text"));
    assert!(error(format!("corpus:{},{}", at("t.txt"), at("empty.txt"))).contains("empty.txt"));
    assert!(error(format!("corpus:{}", at("gone.txt"))).contains("gone.txt"));
    let none = tempfile::tempdir().unwrap();
    assert!(error(format!("corpus:{}", none.path().display())).contains("train.txt"));
    for spec in ["corpus:", "corpus:a,", "corpus:a,b,c,d"] {
        assert!(spec.parse::<DataSpec>().is_err(), "{spec}");
    }
}

const TEXT: &str = "Ein Café — naïve?\r\n\n\ttabs  and spaces \n日本語 🙂 [PAD] it's, don't! 12345\nlast line";

#[test]
fn bytes_and_pieces_of_them_give_every_text_back() {
    for tokens in [Tokens::Bytes, Tokens::ByteBpe] {
        let recipe = TextRecipe { tokens, vocabulary: 400, lowercase: false, ..TextRecipe::default() };
        let learn = || Vocabulary::learn("the cat sat on the mat\n".repeat(9).split_inclusive('\n'), &recipe).unwrap();
        let vocabulary = learn();
        let again = Vocabulary::from_bytes(&vocabulary.to_bytes().unwrap(), Path::new("f")).unwrap();
        assert_eq!([again.fingerprint(), learn().fingerprint()], [vocabulary.fingerprint(); 2]);
        assert!(vocabulary.len() >= 260 && (tokens == Tokens::ByteBpe) == (vocabulary.len() > 260));
        for text in [TEXT, "the cat sat", "\n", &"long ".repeat(40_000)] {
            let ids = vocabulary.encode_whole(text).unwrap();
            assert_eq!(ids, again.encode_whole(text).unwrap());
            assert!(ids.iter().all(|&id| id as usize >= Vocabulary::special()), "nothing is unknown");
            assert_eq!(vocabulary.decode(&ids).unwrap(), text);
            let bytes = vocabulary.bytes_of_tokens().unwrap();
            assert_eq!(ids.iter().map(|&id| bytes[id as usize]).sum::<usize>(), text.len());
        }
        let ids = vocabulary.encode_whole("the cat sat").unwrap().len();
        assert_eq!(ids, if tokens == Tokens::Bytes { 11 } else { 3 });
    }
    for tokens in [Tokens::Words, Tokens::Bpe] {
        let vocabulary = Vocabulary::learn(["a text"].into_iter(), &TextRecipe { tokens, ..TextRecipe::default() });
        assert_eq!(vocabulary.unwrap().bytes_of_tokens(), None);
    }
}

/// The same eleven letters, over and over.
fn cycle() -> CorpusDataset {
    let [train, validation, test] = [1500, 300, 300].map(|len| "abcdefghijk".chars().cycle().take(len).collect());
    CorpusDataset { name: "cycle".into(), train, validation, test }
}

fn recipe(mechanism: &str, more: &str) -> Recipe {
    let text = format!(
        "mechanism = {mechanism}\nseed = 3\n\
         [model]\nkind = 'language'\ncontext = 16\ndim = 16\ndepth = 2\nheads = 2\nmlp_dim = 32\ndropout = 0.05\n{more}\n\
         [text]\ntokens = 'bytes'\n[optimiser]\nlr = 0.02\n[schedule]\nepochs = 8\nbatch_size = 8\n\
         [regularisation]\nlabel_smoothing = 0.0\n[log]\ncheckpoint_every = 5"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

const SSA: &str = "{mechanism = 'ssa', estimator = 'centroid'}";

fn weights(run: &Path, data: &CorpusDataset) -> Vec<f32> {
    let checkpoint = Checkpoint::find(run).unwrap();
    let model = train::build(&checkpoint.state.recipe, data, &burn::tensor::Device::flex()).unwrap();
    let model = checkpoint.load_weights(model).unwrap();
    let blocks = model.blocks.iter().flat_map(|block| [&block.attention.projection, &block.mlp_out]);
    let tensors = blocks.map(|linear| linear.weight.val()).chain([model.embedding.weight.val()]);
    tensors.flat_map(|tensor| tensor.into_data().iter::<f32>().collect::<Vec<_>>()).collect()
}

#[test]
fn a_language_model_learns_and_resumes_to_the_same_bits() {
    let (folder, data) = (tempfile::tempdir().unwrap(), cycle());
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let recipe = recipe(SSA, "layers = ['own', 'softmax']\nkv_heads = 1\npositions = 'rotary'");
    let summary = finished(train::run(&recipe, &data, &reported(&whole)).unwrap());
    let prediction = summary.test.prediction.clone().unwrap();
    assert_eq!((prediction.tokens, prediction.bytes), (299, 299));
    assert!(prediction.perplexity < 1.6, "{}", summary.line());
    assert!((prediction.bits_per_byte - prediction.perplexity.log2()).abs() < 1e-9, "a token is a byte");
    assert!((summary.test.loss.exp() - prediction.perplexity).abs() < 1e-9);
    assert!(summary.line().contains("bits per byte"));
    let bits = |record: Record| if let Record::Epoch(epoch) = record { epoch.bits_per_byte } else { None };
    let bits: Vec<f64> = metrics::read(&whole).unwrap().into_iter().filter_map(bits).collect();
    let fewest = bits.iter().copied().fold(f64::INFINITY, f64::min);
    let best = summary.best.unwrap();
    assert_eq!((best.metric, best.value, bits.len()), (Metric::BitsPerByte, fewest, 8));
    assert_eq!(bits[best.epoch - 1], fewest, "the best epoch has the fewest bits");
    let report = fs::read_to_string(whole.join("report.html")).unwrap();
    assert!(report.contains("perplexity") && report.contains("Continuations"));
    let Some(Samples::Continuations(samples)) = &summary.samples else { panic!("{:?}", summary.samples) };
    assert_eq!(samples.len(), 6);
    for sample in samples {
        let whole = format!("{}{}", sample.prompt, sample.original);
        assert!(data.test.contains(&whole) && !sample.prompt.is_empty(), "{sample:?}");
        let pairs: Vec<&str> = (1..sample.continuation.len()).map(|at| &sample.continuation[at - 1..=at]).collect();
        let known = pairs.iter().filter(|pair| data.test.contains(**pair)).count();
        assert!(pairs.len() == 63 && 4 * known > 3 * pairs.len(), "it has learnt the cycle: {sample:?}");
    }

    let options = stopping(&cut, 17, Resume::Never);
    assert!(matches!(train::run(&recipe, &data, &options).unwrap(), Outcome::Interrupted { step: 17, .. }));
    let wide = recipe.with(&["model.mlp_dim=24".parse().unwrap()]).unwrap();
    let from = TrainOptions { from: Some(cut.clone()), ..TrainOptions::new(folder.path().join("wide")) };
    let message = train::run(&wide, &data, &from).unwrap_err().to_string();
    assert!(message.contains("mlp_in") && message.contains("set `model`") && !message.contains("picture"), "{message}");
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&cut) };
    let resumed = finished(train::run(&recipe, &data, &options).unwrap());
    assert!(weights(&cut, &data) == weights(&whole, &data), "the weights differ");
    assert_eq!(resumed.test.prediction, summary.test.prediction);
    assert_eq!(eval::run(&whole, &data, &Device::flex()).unwrap().1.prediction, summary.test.prediction);
}

#[test]
fn perplexity_does_not_depend_on_how_windows_are_batched() {
    // 40 predicted tokens in windows of 16: two whole ones and a rest, against each window by itself.
    let data = CorpusDataset { test: cycle().test[..41].into(), ..cycle() };
    let recipe = recipe("'softmax'", "");
    let task = data.task(&recipe).unwrap();
    let model = train::build(&recipe, &data, &burn::tensor::Device::flex()).unwrap();
    let together = task.evaluate(&model, train::Part::Test).unwrap();
    let mut nats = 0.0;
    for (first, last) in [(0, 16), (16, 32), (32, 40)] {
        let test = data.test[first..=last].into();
        let alone = CorpusDataset { test, ..data.clone() }.task(&recipe).unwrap();
        nats += alone.evaluate(&model, train::Part::Test).unwrap().loss * (last - first) as f64;
    }
    assert_eq!((together.examples, together.prediction.unwrap().tokens), (3, 40));
    assert!((together.loss - nats / 40.0).abs() < 1e-6);
    assert!(task.notes()[0].contains("1500 tokens") && task.notes()[0].contains("92 windows of 16"));
}

#[test]
fn epochs_begin_at_other_places_and_repeat_exactly() {
    let (recipe, data) = (recipe("'softmax'", ""), cycle());
    let task = data.task(&recipe).unwrap();
    let batches = |epoch, first| task.epoch(&recipe, epoch, first).unwrap().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(batches(0, 0).len(), 92 / 8);
    assert_eq!(batches(0, 0)[4..], batches(0, 4));
    assert_ne!(batches(0, 0), batches(1, 0));
}

#[test]
fn a_trained_model_goes_on_with_a_text() {
    let (folder, data) = (tempfile::tempdir().unwrap(), cycle());
    let layers = "layers = ['own', 'softmax']";
    finished(train::run(&recipe(SSA, layers), &data, &TrainOptions::new(folder.path())).unwrap());
    let generator = Generator::load(folder.path(), &Device::flex()).unwrap();
    let generate = |prompt: &str, tokens, sampling: &Sampling, seed| {
        let mut said = String::new();
        let generated = generator.generate(prompt, tokens, sampling, seed, &mut |text| {
            said.push_str(text);
            ControlFlow::Continue(())
        });
        let generated = generated.unwrap();
        assert_eq!(said, generated.text, "what is streamed is what is returned");
        generated
    };
    let greedy = generate("abcdefghi", 60, &Sampling::greedy(), 0);
    let expected: String = "jkabcdefghi".chars().cycle().take(60).collect();
    assert_eq!((greedy.text, greedy.tokens, greedy.prompt_tokens, greedy.dropped), (expected, 60, 9, 0));
    // Sixteen tokens fit; of those the last eight are read anew each time.
    assert_eq!(greedy.slides, (9 + 59 - 16_usize).div_ceil(9));
    let long = generate(&"abcdefghijk".repeat(3), 3, &Sampling::greedy(), 0);
    assert_eq!((long.text.as_str(), long.prompt_tokens, long.dropped), ("abc", 33, 17));

    let hot = Sampling { temperature: 3.0, ..Sampling::default() };
    let [one, again, other] = [1, 1, 2].map(|seed| generate("ab", 40, &hot, seed).text);
    assert!(one == again && one != other);
    let few = Sampling { top_k: Some(1), ..hot };
    assert_eq!(generate("ab", 5, &few, 7).text, "cdefg");

    let mut pieces = 0;
    let stopped = generator.generate("ab", 40, &few, 0, &mut |_| {
        pieces += 1;
        if pieces == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(stopped.unwrap().text, "cde");
    let error = |prompt, sampling: &Sampling| {
        generator.generate(prompt, 1, sampling, 0, &mut |_| ControlFlow::Continue(())).unwrap_err().to_string()
    };
    assert!(error("", &few).contains("prompt"));
    assert!(error("a", &Sampling { top_p: 2.0, ..few }).contains("top_p"));
}

/// A model that writes has its ternary weights packed and no others of them; what it takes is said.
#[test]
fn ternary_weights_are_packed_to_write() {
    let (folder, data) = (tempfile::tempdir().unwrap(), cycle());
    finished(train::run(&recipe(SSA, "ternary = true"), &data, &TrainOptions::new(folder.path())).unwrap());
    let generator = Generator::load(folder.path(), &Device::flex()).unwrap();
    let weights = generator.weights().unwrap();
    let packed = weights.packed.unwrap();
    assert!(packed.bytes * 8 < 3 * packed.weights && weights.real_bytes > 0, "{weights:?}");
    let written = |prompt: &str| {
        let said = &mut |_: &str| ControlFlow::Continue(());
        generator.generate(prompt, 30, &Sampling::greedy(), 0, said).unwrap().text
    };
    assert_eq!(written("abcd").len(), 30);
    assert_eq!(written("abcd"), written("abcd"));
    let real = tempfile::tempdir().unwrap();
    finished(train::run(&recipe(SSA, ""), &data, &TrainOptions::new(real.path())).unwrap());
    let whole = Generator::load(real.path(), &Device::flex()).unwrap().weights().unwrap();
    assert_eq!((whole.real_bytes, whole.packed), (weights.real_bytes + 4 * packed.weights, None));
}

#[test]
fn what_does_not_fit_is_refused() {
    let (folder, data) = (tempfile::tempdir().unwrap(), cycle());
    let out = folder.path().join("run");
    let error = |recipe: &Recipe, data: &CorpusDataset| {
        train::run(recipe, data, &TrainOptions::new(&out)).unwrap_err().to_string()
    };
    let words = Recipe { text: TextRecipe::default(), ..recipe("'softmax'", "") };
    assert!(error(&words, &data).contains("byte-bpe"));
    let block = recipe("{mechanism = 'ssa', causal_clusters = {kind = 'block', size = 4}}", "");
    assert!(error(&block, &data).contains("block"));
    assert!(error(&recipe("'linear-infsa'", ""), &data).contains("causal"));
    assert!(error(&recipe("'softmax'", "layers = ['own', 'soft']"), &data).contains("soft"));
    let text = Recipe::from_toml("[model]\nkind = 'text'\n[text]\ntokens = 'bytes'", "r").unwrap();
    let message = error(&text, &data);
    assert!(message.contains("model.kind") && message.contains("language"), "{message}");
    let short = CorpusDataset { train: "abc".into(), ..cycle() };
    assert!(error(&recipe("'softmax'", ""), &short).contains("nothing to learn from"));
    let short = CorpusDataset { test: "a".into(), ..cycle() };
    assert!(error(&recipe("'softmax'", ""), &short).contains("test part"));
    assert!(!out.exists(), "nothing was written");

    let texts = "listops:train=8,test=4,min=3,max=30".parse::<DataSpec>().unwrap().load().unwrap();
    let Data::Texts(texts) = texts else { panic!() };
    let options = TrainOptions::new(&out);
    let language = recipe("'softmax'", "");
    assert!(train::run(&language, &texts, &options).unwrap_err().to_string().contains("model.kind"));
    let mut recipe = Recipe::from_toml("[model]\nkind = 'text'\n[schedule]\nbatch_size = 8", "r").unwrap();
    recipe.schedule = resolvent_lab::recipe::ScheduleRecipe { epochs: 2, batch_size: 8, ..Default::default() };
    finished(train::run(&recipe, &texts, &options).unwrap());
    assert!(matches!(Generator::load(&out, &Device::flex()), Err(Error::OtherModel { trained: "texts", .. })));
    assert!(eval::run(&out, &data, &Device::flex()).unwrap_err().to_string().contains("plain text"));
}
