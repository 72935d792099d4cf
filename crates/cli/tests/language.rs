//! Language models from end to end: training on plain text, evaluation, comparison, and text that goes on.

mod support;

use support::{LETTERS, Outcome, Sandbox};

const RECIPE: &str = "
name = 'tiny-language'
mechanism = {mechanism = 'ssa', estimator = 'centroid'}
[model]
kind = 'language'
context = 12
dim = 16
depth = 2
heads = 2
kv_heads = 1
mlp_dim = 32
layers = ['own', 'softmax']
[regularisation]
label_smoothing = 0.0
";

fn train(sandbox: &Sandbox) -> Outcome {
    sandbox.run(&["train", "--config", "tiny.toml", "--data", "corpus:text.txt", "--out", "run", "--json"]).success()
}

#[test]
fn a_language_model_is_trained_evaluated_and_goes_on() {
    let sandbox = Sandbox::of_letters(RECIPE);
    let trained = train(&sandbox);
    assert!(trained.stderr.contains("tokens to learn from"), "{}", trained.stderr);
    let trained = trained.json();
    assert!(trained["test"]["prediction"]["perplexity"].as_f64().unwrap() < 1.5, "{trained}");
    let evaluated = sandbox.run(&["eval", "--checkpoint", "run", "--json"]).success().json();
    assert_eq!(evaluated["evaluation"]["prediction"], trained["test"]["prediction"]);
    let table = sandbox.run(&["eval", "--checkpoint", "run"]).success().stdout;
    assert!(table.contains("perplexity") && table.contains("bits per byte"), "{table}");

    let ask = ["generate", "--checkpoint", "run", "--greedy", "--tokens", "18"];
    let said = sandbox.run(&[&ask[..], &["--prompt", "abcdefg"]].concat()).success();
    assert_eq!(said.stdout, "hijklmnop\nabcdefgh\n");
    let placed = ["generate", "run", "--greedy", "--tokens", "18", "--prompt", "abcdefg"];
    assert_eq!(sandbox.run(&placed).success().stdout, said.stdout);
    assert!(said.stderr.contains("18 tokens") && said.stderr.contains("context"), "{}", said.stderr);
    let args = [&ask[..], &["--json"]].concat();
    let json = sandbox.pipe(&args, "abcdefghijklmnop\nabcdefg".as_bytes()).success().json();
    assert_eq!(json["generated"]["text"], "hijklmnop\nabcdefgh");
    assert!(json["weights"]["real_bytes"].as_u64().unwrap() > 0 && json["weights"]["packed"].is_null(), "{json}");
    assert_eq!((&json["generated"]["prompt_tokens"], &json["generated"]["dropped"]), (&24.into(), &12.into()));
    let sampled = |seed: &str| {
        let args = ["generate", "--checkpoint", "run", "--prompt", "a", "--temperature", "4", "--top-k", "9"];
        sandbox.run(&[&args[..], &["--top-p", "0.9", "--seed", seed]].concat()).success().stdout
    };
    assert!(sampled("1") == sampled("1") && sampled("1") != sampled("2"));
}

#[test]
fn windows_may_be_longer_where_positions_are_not_learned() {
    let loss = |sandbox: &Sandbox, tokens: &str| {
        let args = ["eval", "--checkpoint", "run", "--json", "--max-tokens", tokens];
        sandbox.run(&args).success().json()["evaluation"]["loss"].clone()
    };
    let learned = Sandbox::of_letters(RECIPE);
    let trained = train(&learned).json()["test"]["loss"].clone();
    assert_eq!(loss(&learned, "12"), trained);
    assert_ne!(loss(&learned, "6"), trained);
    let refused = learned.run(&["eval", "--checkpoint", "run", "--max-tokens", "24"]).failure(1).to_owned();
    assert!(refused.contains("context") && refused.contains("24"), "{refused}");
    let rotary = Sandbox::of_letters(&RECIPE.replace("context = 12", "context = 12\npositions = 'rotary'"));
    let trained = train(&rotary).json()["test"]["loss"].clone();
    assert_eq!(loss(&rotary, "12"), trained);
    assert!(loss(&rotary, "24").as_f64().unwrap() > 0.0 && loss(&rotary, "24") != trained);
    assert_eq!(loss(&rotary, "100000"), loss(&rotary, "1000000"), "no longer than the text");
}

#[test]
fn causal_mechanisms_are_compared() {
    let sandbox = Sandbox::of_letters(RECIPE);
    let args = ["compare", "--config", "tiny.toml", "--data", "corpus:text.txt", "--epochs", "1", "--seeds", "1"];
    let json = sandbox.run(&[&args[..], &["--out", "all", "--json"]].concat()).success().json();
    let ids: Vec<_> =
        json["entries"].as_array().unwrap().iter().map(|entry| &entry["mechanism"]["mechanism"]).collect();
    assert_eq!(ids, ["ssa", "softmax", "infsa", "uniform"], "those with a causal form");
    assert!(json["entries"][0]["runs"][0]["prediction"]["bits_per_byte"].as_f64().unwrap() > 0.0);
    let table = sandbox.run(&[&args[..], &["--out", "all"]].concat()).success().stdout;
    assert!(table.contains("bits/byte"), "{table}");
    assert!(std::fs::read_to_string(sandbox.path("all/report.html")).unwrap().contains("Bits per byte"));
}

#[test]
fn bad_requests_end_in_one_line() {
    let sandbox = Sandbox::of_letters(RECIPE);
    train(&sandbox);
    let fails = |args: &[&str], parts: &[&str]| {
        let outcome = sandbox.run(args);
        let line = outcome.failure(1);
        parts.iter().for_each(|part| assert!(line.contains(part), "`{line}` lacks `{part}`"));
    };
    let generate = |more: &[&'static str]| [&["generate", "--checkpoint", "run"], more].concat();
    fails(&generate(&["--prompt", ""]), &["prompt", "empty"]);
    fails(&generate(&["--prompt", "a", "--temperature=-1"]), &["temperature", "-1"]);
    fails(&generate(&["--prompt", "a", "--top-p", "0"]), &["top_p"]);
    fails(&generate(&["--prompt", "a", "--top-k", "0"]), &["top_k"]);
    sandbox.run(&generate(&["--prompt", "a", "--greedy", "--top-k", "3"])).failure(2);
    sandbox.run(&generate(&["--prompt", "a", "--tokens", "0"])).failure(2);
    fails(&["generate", "--checkpoint", "nowhere", "--prompt", "a"], &["nowhere", "no checkpoint"]);
    let block = RECIPE.replace("estimator = 'centroid'", "causal_clusters = {kind = 'block', size = 4}");
    sandbox.write("block.toml", block + LETTERS);
    fails(&["train", "--config", "block.toml", "--data", "corpus:text.txt", "--out", "x"], &["ssa", "block"]);
    fails(&["train", "--config", "tiny.toml", "--data", "corpus:no.txt", "--out", "x"], &["no.txt"]);
    fails(&["classify", "run", "--text", "a"], &["plain text"]);
}

/// Sequences to recall from choose their recipe; settings are part of what a run remembers, and what cannot be is refused by name.
#[test]
fn a_language_model_recalls() {
    let sandbox = Sandbox::new();
    let data = "mqar:train=64,val=8,test=8,tokens=16,pairs=2,vocabulary=40";
    let args = ["train", "--data", data, "--max-steps", "2", "--out", "run", "--json", "--quiet"];
    let trained = sandbox.run(&args).success().json();
    assert_eq!((&trained["recipe"]["name"], &trained["data"]["name"]), (&"mqar".into(), &"mqar".into()));
    let evaluated = sandbox.run(&["eval", "--checkpoint", "run", "--json"]).success().json();
    assert_eq!(evaluated["evaluation"]["accuracy"], trained["test"]["accuracy"]);
    let refused = |code: i32, args: &[&str], parts: &[&str]| {
        let outcome = sandbox.run(args);
        outcome.failure(code);
        parts.iter().for_each(|part| assert!(outcome.stderr.contains(part), "{} lacks `{part}`", outcome.stderr));
    };
    let train = |more: &[&'static str]| [&["train", "--out", "x"], more].concat();
    refused(2, &train(&["--data", "mqar:pairs=99"]), &["`pairs`", "a quarter of `tokens`"]);
    refused(2, &train(&["--data", "pathfinder:size=48"]), &["`size`", "32, 64 or 128"]);
    refused(1, &train(&["--data", data, "--attention", "soft"]), &["soft"]);
    refused(1, &train(&["--data", data, "--config", "shapes"]), &["`language`"]);
    refused(1, &["analyze", "--checkpoint", "run", "--out", "x"], &["sequences of keys and values"]);
    assert!(!sandbox.path("x").exists());
}

/// A language model's layers are analysed as it uses them: each token sees those before it.
#[test]
fn a_language_model_is_analysed() {
    let sandbox = Sandbox::of_letters(RECIPE);
    train(&sandbox);
    let command = ["analyze", "--checkpoint", "run", "--mechanisms", "fna,ssa", "--full", "--json", "--quiet", "--out"];
    let of_data = sandbox.run(&[&command[..], &["data", "--sequences", "2"]].concat()).success().json();
    assert_eq!((&of_data["causal"], of_data["layers"].as_array().unwrap().len()), (&true.into(), 2));
    assert_eq!((&of_data["layers"][0]["tokens"], &of_data["layers"][0]["sequences"]), (&12.into(), &2.into()));
    let softmax = of_data["heads"].as_array().unwrap().iter().find(|head| head["mechanism"] == "softmax").unwrap();
    // No row reaches further than its own token: the weights are triangular, and no path leads forward.
    assert_eq!(softmax["graph"]["hops"]["unreachable"], 12 * 11 / 2);
    let page = std::fs::read_to_string(sandbox.path("data/report.html")).unwrap();
    assert!(page.contains("token 3 (") && page.contains("class=\"word\""), "points of the diffusion map have words");
    let of_text = sandbox.run(&[&command[..], &["text", "--text", "abcdefgh"]].concat()).success().json();
    assert_eq!(of_text["layers"][0]["tokens"], 8);
    let explained = sandbox.run(&["explain", "--checkpoint", "run", "--out", "maps"]).success().stdout;
    assert!(explained.contains("blocks.1") && explained.contains("the last token looks at"), "{explained}");
    assert!(sandbox.path("maps/report.html").exists());
}

/// Heads of a language model are fitted on its own windows; it is judged, and goes on, with what was found.
#[test]
fn heads_of_a_language_model_are_fitted() {
    let dense = "mechanism = {mechanism = 'ssa', estimator = 'centroid'}";
    assert!(RECIPE.contains(dense));
    let recipe = RECIPE.replace(dense, "mechanism = 'softmax'").replace("layers = ['own', 'softmax']", "");
    let sandbox = Sandbox::of_letters(&recipe);
    sandbox.write("near.json", r#"{"mechanism": "local", "window": 2}"#);
    train(&sandbox);
    let fit = |mechanism: &str, out: &str| {
        let command = ["analyze", "--checkpoint", "run", "--sequences", "2", "--cost", "operations", "--quiet"];
        sandbox.run(&[&command[..], &["--fit", "0", "--mechanisms", mechanism, "--out", out]].concat()).success();
        format!("{out}/fit.json")
    };
    let (same, near) = (fit("softmax", "same"), fit("near.json", "near"));
    let perplexities = |attention: &str| {
        let args = ["eval", "--checkpoint", "run", "--attention", attention, "--json"];
        let exchange = sandbox.run(&args).success().json()["exchange"].take();
        assert!(exchange["answers_changed"].is_null(), "{exchange}");
        ["own", "other"].map(|of| exchange[of]["prediction"]["perplexity"].as_f64().unwrap())
    };
    let [own, other] = perplexities(&same);
    assert!((own - other).abs() < 1e-4 * own, "{own} {other}");
    let ([_, fitted], [_, everywhere]) = (perplexities(&near), perplexities("near.json"));
    assert!((fitted - everywhere).abs() < 1e-4 * everywhere && (fitted - own).abs() > 1e-6, "{fitted} {everywhere}");
    let table = sandbox.run(&["eval", "--checkpoint", "run", "--attention", &near]).success().stdout;
    assert!(table.matches("bits per byte").count() == 2 && table.contains("fit "), "{table}");

    let ask = ["generate", "--checkpoint", "run", "--greedy", "--tokens", "18", "--prompt", "abcdefg"];
    let said = sandbox.run(&[&ask[..], &["--attention", &same]].concat()).success().stdout;
    assert_eq!(said, sandbox.run(&ask).success().stdout);
    let with = |attention: &str| sandbox.run(&[&ask[..], &["--attention", attention]].concat());
    assert_eq!(with(&near).success().stdout, with("near.json").success().stdout);
    assert_eq!(with("softmax").success().stdout, said);
    with("fna").success();
    assert!(with("soft").failure(1).contains("soft"));
}

/// A model goes on with what was found for its heads, in a recipe of its own: resumed, judged and asked as any other.
#[test]
fn a_fit_is_trained_with() {
    let dense = "mechanism = {mechanism = 'ssa', estimator = 'centroid'}";
    let recipe = RECIPE.replace(dense, "mechanism = 'softmax'").replace("layers = ['own', 'softmax']", "");
    let sandbox = Sandbox::of_letters(&recipe);
    sandbox.write("near.json", r#"{"mechanism": "local", "window": 2}"#);
    train(&sandbox);
    let command = ["analyze", "--checkpoint", "run", "--sequences", "2", "--cost", "operations", "--quiet"];
    sandbox.run(&[&command[..], &["--fit", "0", "--mechanisms", "near.json", "--out", "near"]].concat()).success();

    let on = |attention: &str, out: &str| {
        let from = ["train", "--from", "run", "--attention", attention, "--out", out, "--json", "--seed", "3"];
        sandbox.run(&[&from[..], &["--max-steps", "4"]].concat()).success()
    };
    let loss = |outcome: &Outcome| outcome.json()["test"]["prediction"]["perplexity"].as_f64().unwrap();
    let fitted = on("near/fit.json", "fitted");
    // Every head has the mechanism of the file, so that it is the run in which all layers have it.
    let everywhere = loss(&on("near.json", "everywhere"));
    assert!((loss(&fitted) - everywhere).abs() < 1e-3 * everywhere, "{} {everywhere}", loss(&fitted));
    assert!((loss(&on("softmax", "softmax")) - everywhere).abs() > 1e-3 * everywhere);

    // The run holds the fit: the file may go.
    std::fs::remove_dir_all(sandbox.path("near")).unwrap();
    let written = std::fs::read_to_string(sandbox.path("fitted/recipe.toml")).unwrap();
    assert!(written.contains("[fit]") && written.contains("[[fit.layers"), "{written}");
    let judged = |args: &[&str]| sandbox.run(&[&["eval", "--checkpoint", "fitted"], args].concat()).success();
    assert_eq!(judged(&["--json"]).json()["evaluation"]["prediction"], fitted.json()["test"]["prediction"]);
    assert!(judged(&[]).stdout.contains("fit, step"));
    let exchange = judged(&["--attention", "near.json", "--json"]).json()["exchange"].take();
    let of = |which: &str| exchange[which]["prediction"]["perplexity"].as_f64().unwrap();
    assert!((of("own") - of("other")).abs() < 1e-4 * of("own") && exchange["trained"]["fit"] == 1, "{exchange}");
    let page = std::fs::read_to_string(sandbox.path("fitted/report.html")).unwrap();
    assert!(page.contains("as they were fitted: local "));
    let said = |attention: &[&str]| {
        let ask = ["generate", "--checkpoint", "fitted", "--greedy", "--tokens", "9", "--prompt", "abcdefg"];
        sandbox.run(&[&ask[..], attention].concat()).success().stdout
    };
    assert_eq!(said(&[]), said(&["--attention", "near.json"]));

    // The recipe that holds the tables is that of the same run, which goes on.
    sandbox.write("again.toml", &written);
    let again = ["train", "--config", "again.toml", "--from", "run", "--out", "again", "--json", "--seed", "3"];
    assert_eq!(loss(&sandbox.run(&again).success()), loss(&fitted));
    sandbox.run(&["train", "--out", "fitted", "--resume", "--max-steps", "6"]).success();
    assert!(judged(&[]).stdout.contains("fit, step 6"));

    for (args, expected) in [
        (&["explain", "--checkpoint", "fitted", "--out", "x"][..], "not looked into"),
        (&["compare", "--config", "again.toml", "--out", "y"], "what a comparison exchanges"),
        (&["train", "--config", "again.toml", "--set", "mechanism=infsa", "--out", "z"], "stands for softmax"),
        (&["train", "--set", "fit=none.json", "--out", "z"], "none.json"),
        (&["train", "--from", "run", "--set", "text.min_count=2", "--out", "z"], "keeps the vocabulary"),
        (&["train", "--config", "again.toml", "--set", "data=nope:x", "--out", "z"], "`data` is not valid"),
        (&["train", "--config", "again.toml", "--set", "model.heads=1", "--out", "z"], "`fit` has a layer `blocks.0`"),
    ] {
        let outcome = sandbox.run(args);
        assert!(outcome.failure(1).contains(expected), "{args:?}: {}", outcome.stderr);
    }
    assert!(!sandbox.path("z").exists());
}
