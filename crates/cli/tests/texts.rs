//! Texts from end to end: training on a small table, evaluation, comparison and answers.

mod support;

use support::{Outcome, Sandbox};

const RECIPE: &str = "
name = 'tiny-text'
mechanism = 'fna'
[model]
kind = 'text'
mlp_dim = 16
[text]
max_tokens = 12
[optimiser]
lr = 0.03
[schedule]
epochs = 8
batch_size = 8
[regularisation]
label_smoothing = 0.0
";

/// A folder with a recipe and reviews that a mean of words tells apart, some of them too long to be read whole.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", RECIPE);
    for (part, count) in [("train", 64), ("test", 24)] {
        let row = |i: usize| {
            let word = ["awful", "lovely"][i % 2];
            format!("\"A {word} film, number {i}{}\",{}\n", " on and on".repeat(i % 4), ["bad", "good"][i % 2])
        };
        let rows: String = (0..count).map(row).collect();
        sandbox.write(&format!("{part}.csv"), format!("review,mood\n{rows}"));
    }
    sandbox
}

const DATA: &str = "text:.?text=review&label=mood";

fn train(sandbox: &Sandbox, out: &str) -> Outcome {
    sandbox.run(&["train", "--config", "tiny.toml", "--data", DATA, "--out", out, "--json"]).success()
}

#[test]
fn a_classifier_is_trained_evaluated_and_asked() {
    let sandbox = sandbox();
    let trained = train(&sandbox, "run");
    assert!(trained.stderr.contains("cut to their first 12 tokens"), "{}", trained.stderr);
    let trained = trained.json();
    assert_eq!(trained["test"]["accuracy"], 1.0, "{trained}");
    let evaluated = sandbox.run(&["eval", "--checkpoint", "run", "--json"]).success().json();
    assert_eq!(evaluated["evaluation"]["confusion"], trained["test"]["confusion"]);
    assert!(std::fs::read_to_string(sandbox.path("run/report.html")).unwrap().contains("good"));
    let cut = "6 of 24 test texts were cut to their first 12 tokens";
    assert_eq!(evaluated["evaluation"]["cut"], 6);
    let asked: [&[&str]; 3] = [&[], &["--ablate", "0"], &["--attention", "softmax"]];
    for more in asked {
        let plain = sandbox.run(&[&["eval", "--checkpoint", "run"], more].concat()).success().stdout;
        assert!(plain.contains(cut), "{plain}");
    }
    let curve = sandbox.run(&["eval", "--checkpoint", "run", "--ablate", "0,0.5,1", "--json"]).success().json();
    assert_eq!(curve["ablation"][0]["evaluation"]["loss"], evaluated["evaluation"]["loss"], "nothing lost");
    assert_ne!(curve["ablation"][1]["evaluation"]["loss"], curve["ablation"][2]["evaluation"]["loss"]);
    let pairs = ["eval", "--checkpoint", "run", "--ablate", "0,0.5,1", "--ablate-pairs", "--json"];
    let pairs = sandbox.run(&pairs).success().json();
    let loss = |curve: &serde_json::Value, n: usize| curve["ablation"][n]["evaluation"]["loss"].clone();
    assert_eq!([loss(&pairs, 0), loss(&pairs, 2)], [loss(&curve, 0), loss(&curve, 2)], "nothing, or everything");
    assert_ne!(loss(&pairs, 1), loss(&curve, 1));
    let line = sandbox.run(&["eval", "--checkpoint", "run", "--ablate", "1.5"]).failure(1).to_owned();
    assert!(line.contains("1.5") && line.contains("[0, 1]"), "{line}");

    let texts = ["--text", "a lovely day", "--text", "an awful, awful day"];
    let asked = [&["classify", "run"], &texts[..]].concat();
    let lines = sandbox.run(&asked).success().stdout;
    let labels: Vec<_> = lines.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(labels, ["good", "bad"], "{lines}");
    let json = sandbox.pipe(&["classify", "run", "--json"], "lovely\r\nAwful\n".as_bytes()).success().json();
    assert_eq!((&json[0]["label"], &json[1]["label"]), (&"good".into(), &"bad".into()));
    let marked = sandbox.pipe(&["classify", "run", "--json"], "\u{feff}lovely\r\nAwful\n".as_bytes()).success().json();
    assert_eq!(marked, json, "a byte order mark is no letter");
    let sum: f64 = ["good", "bad"].iter().map(|class| json[0]["probabilities"][class].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-5);
    let long = sandbox.run(&["classify", "run", "--text", &"lovely ".repeat(99), "--text", "awful"]).success();
    assert!(long.stderr.contains("1 of 2 texts were cut to their first 12 tokens"), "{}", long.stderr);
    sandbox.write("in.txt", "lovely\n");
    let from_file = sandbox.run(&["classify", "run", "--input", "in.txt", "--json"]).success().json();
    let named = sandbox.run(&["classify", "--checkpoint", "run", "--input", "in.txt", "--json"]).success().json();
    assert_eq!(named, from_file, "the run has its name in every command");
    let twice = sandbox.run(&["classify", "run", "--checkpoint", "run", "--text", "x"]);
    assert!(twice.failure(1).contains("run: is no place for texts"));
    sandbox.run(&["classify", "--text", "x"]).failure(2);
    assert!(sandbox.run(&["classify", "run", "--text", "x", "--top", "1"]).failure(1).contains("--top"), "of pictures");
    assert_eq!(from_file[0]["probabilities"], json[0]["probabilities"], "padding changes nothing");
}

#[test]
fn a_classifier_is_shown_texts_of_another_length() {
    let sandbox = sandbox();
    let trained = train(&sandbox, "run").json();
    let of = |tokens: &str| {
        let args = ["eval", "--checkpoint", "run", "--max-tokens", tokens];
        let json = sandbox.run(&[&args[..], &["--json"]].concat()).success().json();
        (json["evaluation"].clone(), sandbox.run(&args).success().stdout)
    };
    assert_eq!(of("12").0["loss"], trained["test"]["loss"], "the length of training");
    let (longer, table) = of("40");
    assert!(longer["loss"] != trained["test"]["loss"] && longer["cut"].is_null() && !table.contains("cut"), "{table}");
    let (shorter, table) = of("5");
    assert!(shorter["cut"] == 24 && table.contains("24 of 24 test texts were cut to their first 5 tokens"), "{table}");
}

#[test]
fn dropped_weights_are_drawn_by_the_seed() {
    let sandbox = sandbox();
    let loss = |share: f64, out: &str| {
        sandbox.write("tiny.toml", RECIPE.replace("mlp_dim", &format!("weight_dropout = {share:?}\nmlp_dim")));
        train(&sandbox, out).json()["test"]["loss"].clone()
    };
    let dropped = loss(0.3, "a");
    assert_eq!(loss(0.3, "b"), dropped);
    assert_ne!(loss(0.0, "c"), dropped);
    sandbox.write("tiny.toml", RECIPE.replace("mlp_dim", "weight_dropout = 0.3\nmlp_dim"));
    let train = ["train", "--config", "tiny.toml", "--data", DATA, "--attention", "uniform", "--out", "d"];
    let line = sandbox.run(&train).failure(1).to_owned();
    assert!(line.contains("dropout") && line.contains("softmax and fna"), "{line}");
}

#[test]
fn mechanisms_are_compared_on_generated_expressions() {
    let sandbox = sandbox();
    let data = "listops:train=32,test=16,min=3,max=30";
    let args = ["compare", "--config", "tiny.toml", "--data", data, "--epochs", "1", "--seeds", "1", "--out", "all"];
    let json = sandbox.run(&[&args[..], &["--mechanisms", "fna,softmax,uniform", "--json"]].concat()).success().json();
    assert_eq!(json["entries"].as_array().unwrap().len(), 3);
    assert_eq!(json["data"]["name"], "listops");
    assert!(std::fs::read_to_string(sandbox.path("all/report.html")).unwrap().contains("fna"));
}

#[test]
fn fields_that_only_ssa_reads_are_told() {
    let sandbox = sandbox();
    let told = |model: &str, attention: &str, out: &str| {
        sandbox.write("tiny.toml", RECIPE.replace("mlp_dim", &format!("{model}\nmlp_dim")));
        let args = ["train", "--config", "tiny.toml", "--data", DATA, "--max-steps", "1", "--attention", attention];
        sandbox.run(&[&args[..], &["--out", out]].concat()).success().stderr.contains("is for mechanisms with clusters")
    };
    assert!(told("codebook = { every = 1, decay = 0.9 }", "softmax", "a"));
    assert!(told("plan_layers = 2\ndepth = 2", "softmax", "b"));
    assert!(!told("plan_layers = 2\ndepth = 2", "ssa", "c"));
    assert!(!told("", "softmax", "d"));
    let args = ["train", "--data", "shapes:size=16,train=64,test=16", "--max-steps", "1", "--out", "e"];
    let args = [&args[..], &["--set", "schedule.batch_size=8", "--set", "text.max_tokens=5"]].concat();
    assert!(sandbox.run(&args).success().stderr.contains("`text` is for models of text"));
}

#[test]
fn bad_texts_end_in_one_line() {
    let sandbox = sandbox();
    train(&sandbox, "run");
    let fails = |args: &[&str], parts: &[&str]| {
        let outcome = sandbox.run(args);
        let line = outcome.failure(1);
        parts.iter().for_each(|part| assert!(line.contains(part), "`{line}` lacks `{part}`"));
    };
    sandbox.write("bad.txt", b"fine\n\xff\xfe\n");
    sandbox.write("gap.txt", "fine\n\nfine\n");
    sandbox.write("none.txt", "");
    fails(&["classify", "run", "--input", "bad.txt"], &["bad.txt", "line 2", "UTF-8"]);
    fails(&["classify", "run", "--input", "gap.txt"], &["gap.txt", "line 2", "empty"]);
    fails(&["classify", "run", "--input", "none.txt"], &["none.txt", "no text"]);
    fails(&["classify", "run", "--input", "no.txt"], &["no.txt"]);
    fails(&["classify", "nowhere", "--text", "x"], &["nowhere", "no checkpoint"]);
    fails(&["classify", "run", "--text", "fine", "--text", " "], &["--text: text 2 is empty"]);
    let others: [&[&str]; 2] =
        [&["translate", "run", "--text", "x"], &["generate", "--checkpoint", "run", "--prompt", "x"]];
    for command in others {
        fails(command, &["run: the model was trained on texts, not on"]);
    }
    fails(
        &["train", "--config", "tiny.toml", "--data", "text:.", "--out", "other"],
        &["train.csv", "`text`", "`review`"],
    );
    fails(&["train", "--config", "tiny.toml", "--data", "mqar:train=8,test=4", "--out", "other"], &["model.kind"]);
    fails(&["eval", "--checkpoint", "run", "--data", "listops:train=8,test=4,min=3,max=30"], &["classes"]);
    fails(&["train", "--data", "imdb:nowhere", "--out", "other"], &["nowhere"]);
}

/// Every word has one translation.
fn parallel(sandbox: &Sandbox) {
    let words = [("red", "rot"), ("old", "alt"), ("dog", "Hund"), ("cat", "Katze")];
    for (part, count) in [("train", 96), ("test", 8)] {
        let lines = |pick: fn(&(&str, &str)) -> String| -> String {
            (0..count).map(|i| format!("{} {}\n", pick(&words[i % 2]), pick(&words[2 + i / 2 % 2]))).collect()
        };
        sandbox.write(&format!("{part}.en"), lines(|word| word.0.into()));
        sandbox.write(&format!("{part}.de"), lines(|word| word.1.into()));
    }
    let recipe = RECIPE.replace("mlp_dim = 16", "dim = 16\nheads = 2\nmlp_dim = 32\nnorm = 'pre'\ncross = 'softmax'");
    sandbox
        .write("pairs.toml", recipe.replace("lr = 0.03", "lr = 0.02").replace("[text]", "[text]\nlowercase = false"));
}

#[test]
fn a_translator_is_trained_and_translates() {
    let sandbox = Sandbox::new();
    parallel(&sandbox);
    let args = ["train", "--config", "pairs.toml", "--data", "pairs:.?from=en&to=de", "--out", "run", "--json"];
    let trained = sandbox.run(&args).success().json();
    assert!(trained["test"]["accuracy"].as_f64().unwrap() > 0.9, "{trained}");
    let evaluated = sandbox.run(&["eval", "--checkpoint", "run"]).success().stdout;
    assert!(evaluated.contains("BLEU"), "{evaluated}");

    let ask = ["translate", "run", "--input", "test.en", "--reference", "test.de"];
    let outcome = sandbox.run(&ask).success();
    assert_eq!(outcome.stdout, std::fs::read_to_string(sandbox.path("test.de")).unwrap());
    assert!(outcome.stderr.contains("BLEU"), "{}", outcome.stderr);
    let json = sandbox.run(&["translate", "run", "--text", "old dog", "--beams", "3", "--json"]).success().json();
    assert_eq!(json["translations"][0]["translation"], "alt Hund");
    assert_eq!((&json["translations"][0]["cut"], &json["translations"][0]["ended"]), (&false.into(), &true.into()));
    let long = sandbox.run(&["translate", "run", "--text", &"old dog ".repeat(9), "--text", "old dog"]).success();
    assert!(long.stderr.contains("1 of 2 sentences were cut to their first 12 tokens"), "{}", long.stderr);

    let line = sandbox.run(&["translate", "run", "--text", "old dog", "--reference", "test.de"]).failure(1).to_owned();
    assert!(line.contains("test.de") && line.contains("8 lines") && line.contains("1 sentence"), "{line}");
    let line = sandbox.run(&["classify", "run", "--text", "old dog"]).failure(1).to_owned();
    assert!(line.contains("translations"), "{line}");
    sandbox.write(
        "free.toml",
        std::fs::read_to_string(sandbox.path("pairs.toml")).unwrap().replace("cross = 'softmax'", ""),
    );
    let compare =
        ["compare", "--config", "free.toml", "--data", "pairs:.?from=en&to=de", "--seeds", "1", "--max-steps"];
    let usual = sandbox.run(&[&compare[..], &["1", "--out", "usual", "--json"]].concat()).success().json();
    let ids: Vec<_> =
        usual["entries"].as_array().unwrap().iter().map(|entry| entry["mechanism"]["mechanism"].clone()).collect();
    assert_eq!(ids, ["fna", "softmax", "uniform"]);
    let named = [&compare[..], &["1", "--out", "named", "--mechanisms", "fna,infsa"]].concat();
    assert!(sandbox.run(&named).failure(1).contains("`infsa`"));
    assert!(!sandbox.path("named").exists(), "nothing is trained first");
    sandbox.write("train.de", "nur eine\n");
    let line = sandbox
        .run(&["train", "--config", "pairs.toml", "--data", "pairs:.?from=en&to=de", "--out", "x"])
        .failure(1)
        .to_owned();
    assert!(line.contains("train.de has 1 lines") || line.contains("train.en has 96 lines"), "{line}");
}
