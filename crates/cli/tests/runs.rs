//! Training, evaluation and comparison from end to end on a tiny model, and what Ctrl-C does to them.

mod support;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
};

use support::{
    Outcome, Sandbox, resolvent,
    tiny::{self, DATA, train},
};

#[test]
fn a_run_is_trained_evaluated_and_reported() {
    let sandbox = tiny::sandbox();
    let trained = sandbox.run(&train("run", &["--attention", "infsa", "--seed", "5", "--json"])).success().json();
    assert_eq!(
        (&trained["recipe"]["seed"], &trained["recipe"]["mechanism"]["mechanism"]),
        (&5.into(), &"infsa".into())
    );
    for file in ["recipe.toml", "metrics.jsonl", "summary.json", "report.html"] {
        assert!(sandbox.path("run").join(file).is_file(), "{file}");
    }
    let evaluated = sandbox.run(&["eval", "--checkpoint", "run", "--json"]).success().json();
    assert_eq!(evaluated["evaluation"]["accuracy"], trained["test"]["accuracy"]);
    assert_eq!(evaluated["evaluation"]["examples"], 32);
    let text = sandbox.run(&["eval", "--checkpoint", "run"]).success().stdout;
    assert!(text.contains("infsa") && text.contains("accuracy"), "{text}");
    let again = sandbox.run(&["train", "--out", "run", "--resume", "--json"]).success().json();
    assert_eq!(again["test"]["accuracy"], trained["test"]["accuracy"], "a finished run is read back");
}

/// The epochs that are asked for are run, whatever minutes the recipe allows its own; and no other command writes over the run.
#[test]
fn epochs_are_not_cut_by_a_limit_of_the_recipe() {
    let sandbox = tiny::sandbox();
    let limited = tiny::RECIPE.replace("epochs = 2", "epochs = 2\nmax_minutes = 1e-6");
    sandbox.write("tiny.toml", limited);
    let steps = |out: &str, more: &[&str]| {
        let json = sandbox.run(&[&train(out, more)[..], &["--json", "--quiet"]].concat()).success().json();
        json["steps"].as_u64().unwrap()
    };
    assert!(steps("limited", &[]) < 8);
    assert_eq!(steps("asked", &["--epochs", "2"]), 8);
    assert!(steps("both", &["--epochs", "2", "--max-minutes", "1e-6"]) < 8);
    let report = fs::read(sandbox.path("asked/report.html")).unwrap();
    for command in ["analyze", "explain"] {
        let outcome = sandbox.run(&[command, "--checkpoint", "asked", "--out", "asked"]);
        assert!(outcome.failure(1).contains("holds a training run"), "{command}");
    }
    assert_eq!(fs::read(sandbox.path("asked/report.html")).unwrap(), report);
}

/// A run that began with a limit of minutes is continued by a command that names its epochs, with and without the recipe.
#[test]
fn a_run_with_a_limit_goes_on_with_its_epochs() {
    let sandbox = tiny::sandbox();
    sandbox.write("tiny.toml", tiny::RECIPE.replace("epochs = 2", "epochs = 2\nmax_minutes = 5.0"));
    // What a program that kept the limit beside --epochs has stored.
    sandbox.run(&train("run", &["--epochs", "2", "--max-minutes", "5"])).success();
    for args in
        [train("run", &["--epochs", "2", "--resume"]), vec!["train", "--out", "run", "--epochs", "2", "--resume"]]
    {
        fs::remove_file(sandbox.path("run/summary.json")).unwrap();
        let json = sandbox.run(&[&args[..], &["--json"]].concat()).success().json();
        assert_eq!((&json["steps"], &json["recipe"]["schedule"]["max_minutes"]), (&8.into(), &5.0.into()), "{args:?}");
    }
}

/// Named by their ids, mechanisms with landmarks get as many as suit 4 x 4 patches; a file is taken at its word, and told.
#[test]
fn landmarks_suit_the_patches() {
    let sandbox = tiny::sandbox();
    sandbox.write("wide.json", r#"{"mechanism": "soft"}"#);
    let args = ["compare", "--config", "tiny.toml", "--data", DATA, "--out", "all", "--seeds", "1"];
    let args = [&args[..], &["--mechanisms", "soft,soft-pp,laplacian,wide.json"]].concat();
    let json = sandbox.run(&[&args[..], &["--json"]].concat()).success().json();
    let suited = serde_json::json!({"kind": "pool", "count": 4});
    for (i, landmarks) in [4, 4, 4, 1].into_iter().enumerate() {
        let entry = &json["entries"][i];
        assert_eq!(entry["landmarks"], serde_json::json!([{"tokens": 16, "landmarks": landmarks}]), "{entry}");
        assert_eq!(entry["mechanism"]["landmarks"] == suited, landmarks == 4, "{entry}");
    }
    let accuracy = |i: usize| &json["entries"][i]["runs"][0]["loss"];
    assert_ne!(accuracy(0), accuracy(1), "soft and soft-pp are two operators");
    let told = sandbox.run(&args).success().stdout;
    assert_eq!(told.matches("has a single landmark for 16 tokens").count(), 1, "{told}");
    let trained = sandbox.run(&train("run", &["--attention", "soft", "--json"])).success().json();
    assert_eq!(trained["recipe"]["mechanism"]["landmarks"], suited);
}

#[test]
fn a_comparison_ends_in_a_table_and_continues_where_it_was() {
    let sandbox = tiny::sandbox();
    let compare = |more: &[&str]| {
        let args = ["compare", "--config", "tiny.toml", "--data", DATA, "--out", "all", "--mechanisms"];
        sandbox.run(&[&args, more].concat()).success()
    };
    let json = compare(&["uniform,infsa", "--seeds", "3,8", "--json"]).json();
    let entries = json["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 2);
    assert!(entries.iter().all(|entry| entry["runs"].as_array().unwrap().len() == 2));
    assert!(entries.iter().all(|entry| entry["speed"]["peak_bytes"].as_u64().unwrap() > 0));
    assert_eq!(json["seeds"], serde_json::json!([3, 8]));
    let finished = fs::read(sandbox.path("all/runs/infsa-seed8/summary.json")).unwrap();
    let table = compare(&["uniform,infsa,softmax", "--seeds", "3,8"]).stdout;
    for part in ["uniform", "infsa", "softmax", "report.html"] {
        assert!(table.contains(part), "{table}");
    }
    assert_eq!(fs::read(sandbox.path("all/runs/infsa-seed8/summary.json")).unwrap(), finished, "not trained again");
    assert!(fs::read_to_string(sandbox.path("all/report.html")).unwrap().contains("softmax"));
}

/// Runs that diverge are left out of the result, which is printed, and the exit code and the last line say so.
#[test]
fn a_comparison_says_that_runs_diverged() {
    let sandbox = tiny::sandbox();
    // Hops over rows that sum to about 17: the first step leaves f32.
    let json = r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid", "offset": 10.0}, "normalisation": "none",
                   "series": {"kind": "hops", "count": 40, "gamma": 0.999}}"#;
    sandbox.write("unsteady.json", json);
    let compare = |out: &str, mechanisms: &str| {
        let args = ["compare", "--config", "tiny.toml", "--data", DATA, "--seeds", "1", "--quiet"];
        sandbox.run(&[&args[..], &["--out", out, "--mechanisms", mechanisms]].concat())
    };
    let outcome = compare("some", "unsteady.json,uniform");
    let line = outcome.failure(3);
    assert!(line.contains("1 of 2 runs diverged (unsteady, seed 0, at step 1 the first)"), "{line}");
    assert!(outcome.stdout.contains("unsteady         diverged at step 1\n"), "{}", outcome.stdout);
    let outcome = compare("none", "unsteady.json");
    let line = outcome.failure(1);
    assert!(line.contains("all 1 runs diverged"), "{line}");
}

/// The weights and the moments in the newest checkpoint of a run, as they are written: the same run writes the same bytes.
fn weights(sandbox: &Sandbox, run: &str) -> [Vec<u8>; 2] {
    let checkpoints = fs::read_dir(sandbox.path(run).join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let newest = checkpoints.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("step-")).max();
    ["model.safetensors", "optimiser.bpk"].map(|file| fs::read(newest.as_ref().unwrap().join(file)).unwrap())
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_resuming_ends_with_the_same_bits() {
    let sandbox = tiny::sandbox();
    let epochs = ["--epochs", "60"];
    sandbox.run(&train("whole", &epochs)).success();
    let weights = |run| weights(&sandbox, run);

    let mut command = resolvent();
    command.current_dir(sandbox.path(".")).args(train("parts", &epochs)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut stderr = String::new();
    while !stderr.contains("epoch 2") {
        assert_ne!(lines.read_line(&mut stderr).unwrap(), 0, "ended before it was interrupted: {stderr}");
    }
    let signal = Command::new("kill").arg("-INT").arg(child.id().to_string()).status().unwrap();
    assert!(signal.success());
    lines.read_to_string(&mut stderr).unwrap();
    let outcome = Outcome { code: child.wait().unwrap().code(), stdout: String::new(), stderr };
    let line = outcome.failure(130);
    assert!(line.contains("interrupted") && line.contains("--out parts --resume"), "{line}");
    assert!(!sandbox.path("parts/summary.json").exists());

    sandbox.run(&["eval", "--checkpoint", "parts"]).success();
    assert_ne!(weights("parts"), weights("whole"));
    sandbox.run(&["train", "--out", "parts", "--resume"]).success();
    assert!(weights("parts") == weights("whole"), "the weights differ");
}
