//! Built-in recipes, fields that are set, and runs that begin with or go on from others.

mod support;

use std::fs;

use support::tiny::{self, DATA, train};

#[test]
fn recipes_are_listed_printed_and_used_by_name() {
    let sandbox = tiny::sandbox();
    let list = sandbox.run(&["recipes"]).success().stdout;
    for name in ["shapes", "fashion-mnist", "language-alternating", "soft-tiny"] {
        assert!(list.lines().any(|line| line.starts_with(&format!("{name} "))), "{list}");
    }
    let all = sandbox.run(&["recipes", "--json"]).success().json();
    assert_eq!(all.as_array().unwrap().len(), list.lines().count());
    assert!(all.as_array().unwrap().iter().all(|recipe| !recipe["about"].as_str().unwrap().is_empty()));
    let printed = sandbox.run(&["recipes", "shapes"]).success().stdout;
    sandbox.write("mine.toml", printed);
    let steps = ["--data", DATA, "--max-steps", "2", "--json", "--quiet", "--max-minutes", "none"];
    let recipe = |config: &str, out: &str| {
        let args = [&["train", "--config", config, "--out", out], &steps[..]].concat();
        sandbox.run(&args).success().json()["recipe"].clone()
    };
    assert_eq!(recipe("mine.toml", "a"), recipe("shapes", "b"));
    sandbox.write("small.toml", "extends = 'mine.toml'\nname = 'small'\n[model]\ndim = 8");
    let small = recipe("./small.toml", "c");
    assert_eq!(
        (&small["name"], &small["model"]["dim"], &small["model"]["depth"]),
        (&"small".into(), &8.into(), &3.into())
    );
    let line = sandbox.run(&["train", "--config", "shaeps"]);
    assert!(line.failure(1).contains("did you mean `shapes`?"), "{}", line.stderr);
    assert!(sandbox.run(&["recipes", "shaeps"]).stderr.contains("shapes"));
}

#[test]
fn fields_are_set_kept_and_refused_by_name() {
    let sandbox = tiny::sandbox();
    let set = [
        "--set",
        "optimiser.kind=sgd",
        "--set",
        "optimiser.lr=0.05",
        "--set",
        "mechanism.gamma=0.5",
        "--set",
        "name=7",
    ];
    let args = [&train("run", &["--attention", "infsa", "--epochs", "1", "--json"])[..], &set].concat();
    let recipe = sandbox.run(&args).success().json()["recipe"].clone();
    assert_eq!((&recipe["optimiser"]["kind"], &recipe["optimiser"]["lr"]), (&"sgd".into(), &0.05.into()));
    assert_eq!((&recipe["mechanism"]["gamma"], &recipe["name"]), (&0.5.into(), &"7".into()));
    assert!(fs::read_to_string(sandbox.path("run/recipe.toml")).unwrap().contains("lr = 0.05"));
    let refused = |setting: &str, parts: &[&str]| {
        for command in ["train", "compare"] {
            let outcome =
                sandbox.run(&[command, "--config", "tiny.toml", "--data", DATA, "--out", "no", "--set", setting]);
            let line = outcome.failure(1);
            parts.iter().for_each(|part| assert!(line.contains(part), "{line} lacks {part}"));
            assert!(!sandbox.path("no").exists());
        }
    };
    refused("optimiser.lrr=1", &["--set", "`optimiser.lrr`", "did you mean `lr`?"]);
    refused("schedule.epochs=0.5", &["`schedule.epochs`", "expected usize"]);
    refused("schedule.epochs=0", &["`schedule.epochs`", "1 to 1000000"]);
    let unlimited = ["--epochs", "1", "--json", "--set", "schedule.max_steps=1", "--max-steps", "none"];
    let json = sandbox.run(&train("unlimited", &unlimited)).success().json();
    assert!(json["recipe"]["schedule"]["max_steps"].is_null() && json["steps"] != 1, "{json}");
    // What is set is meant for the epochs that are asked for.
    let stepped = ["--epochs", "20", "--max-steps", "1", "--json", "--set", "schedule.kind=step", "--set"];
    let more = ["schedule.milestones=[10, 15]", "--set", "schedule.warmup_epochs=8"];
    let schedule =
        sandbox.run(&train("stepped", &[&stepped[..], &more].concat())).success().json()["recipe"]["schedule"].clone();
    assert_eq!((&schedule["milestones"], &schedule["warmup_epochs"]), (&serde_json::json!([10.0, 15.0]), &8.0.into()));
    let none = sandbox.run(&train("no", &["--max-steps", "0"]));
    none.failure(2);
    assert!(none.stderr.contains("--max-steps"), "{}", none.stderr);
    let below = sandbox.run(&train("no", &["--max-minutes", "-1"]));
    assert!(below.failure(1).contains("`schedule.max_minutes` is -1"), "{}", below.stderr);
    let wrong = sandbox.run(&["train", "--set", "optimiser.lr"]);
    wrong.failure(2);
    assert!(wrong.stderr.contains("optimiser.lr=3e-4"), "{}", wrong.stderr);
}

#[test]
fn runs_are_extended_begun_with_others_and_reported() {
    let sandbox = tiny::sandbox();
    sandbox.run(&train("run", &[])).success();
    let longer = ["train", "--out", "run", "--resume", "--epochs", "3", "--json"];
    let json = sandbox.run(&longer).success().json();
    assert_eq!((&json["steps"], &json["recipe"]["schedule"]["epochs"]), (&12.into(), &3.into()));
    let other = [
        "train",
        "--from",
        "run",
        "--data",
        "shapes:seed=9,size=16,train=32,test=16",
        "--out",
        "tuned",
        "--epochs",
        "1",
    ];
    let outcome = sandbox.run(&[&other[..], &["--set", "optimiser.layer_decay=0.5", "--json"]].concat()).success();
    let json = outcome.json();
    assert_eq!(
        (&json["origin"]["step"], &json["origin"]["fresh"], &json["steps"]),
        (&12.into(), &serde_json::json!([]), &2.into())
    );
    assert!(outcome.stderr.contains("begins with"), "{}", outcome.stderr);
    sandbox.run(&["train", "--from", "run", "--resume"]).failure(2);

    fs::remove_file(sandbox.path("run/report.html")).unwrap();
    let said = sandbox.run(&["report", "run"]).success().stdout;
    assert!(said.contains("run/report.html") && sandbox.path("run/report.html").is_file(), "{said}");
    let compare =
        ["compare", "--config", "tiny.toml", "--data", DATA, "--out", "all", "--mechanisms", "uniform", "--seeds", "1"];
    sandbox.run(&compare).success();
    let page = fs::read_to_string(sandbox.path("all/report.html")).unwrap();
    fs::remove_file(sandbox.path("all/report.html")).unwrap();
    sandbox.run(&["report", "all"]).success();
    assert_eq!(fs::read_to_string(sandbox.path("all/report.html")).unwrap(), page);
    assert!(sandbox.run(&["report", "nothing"]).failure(1).contains("nothing: is no folder"));
}
