//! Folders of runs: whose they are, who writes to them, and what an earlier run leaves behind.

mod support;

use std::fs;

use support::{Sandbox, tiny};

#[test]
fn files_of_others_are_not_overwritten() {
    let sandbox = Sandbox::new();
    for (name, args) in [("train", &["train"][..]), ("compare", &["compare", "--mechanisms", "softmax"])] {
        let folder = sandbox.path(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("report.html"), "mine").unwrap();
        let before = sandbox.snapshot();
        let mut all = args.to_vec();
        all.extend(["--data", tiny::DATA, "--epochs", "1", "--out", name]);
        assert!(sandbox.run(&all).failure(1).contains("report.html that is not of a run"), "{name}");
        assert_eq!(sandbox.snapshot(), before, "{name}");
    }
}

#[test]
fn a_file_is_no_folder_of_results() {
    let sandbox = Sandbox::new();
    sandbox.write("file", "mine");
    for command in ["train", "compare", "bench"] {
        for out in ["file", "file/run"] {
            let done = sandbox.run(&[command, "--out", out]);
            assert!(done.failure(1).contains("file: is a file; name a folder"), "{command}: {}", done.stderr);
        }
    }
}

#[test]
fn the_best_of_a_deleted_run_is_not_the_new_ones() {
    let sandbox = Sandbox::new();
    let recipe = format!("{}\n[regularisation]\nhold_out = 0.25\npatience = 3\n", tiny::RECIPE);
    sandbox.write("recipe.toml", recipe);
    let train = |seed: &str, out: &str| {
        let args = ["train", "--config", "recipe.toml", "--data", tiny::DATA, "--seed", seed, "--out", out, "--json"];
        sandbox.run(&args).success().json()["test"].clone()
    };
    train("0", "used");
    for entry in fs::read_dir(sandbox.path("used/checkpoints")).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("step-") {
            fs::remove_dir_all(path).unwrap();
        }
    }
    let (again, fresh) = (train("7", "used"), train("7", "fresh"));
    assert_eq!((&again["accuracy"], &again["loss"]), (&fresh["accuracy"], &fresh["loss"]));
}

/// What a run goes on with is its newest recipe, not that of its best epoch, which may be from before it was extended.
#[test]
fn an_extended_run_goes_on_as_it_was_extended() {
    let sandbox = Sandbox::new();
    let recipe = format!("mechanism = 'uniform'\n{}\n[regularisation]\nhold_out = 0.25\npatience = 1\n", tiny::RECIPE);
    sandbox.write("recipe.toml", recipe);
    let train = |more: &[&str]| sandbox.run(&[&["train", "--out", "run", "--json"], more].concat());
    let first = train(&["--config", "recipe.toml", "--data", tiny::DATA, "--epochs", "40"]).success().json();
    assert_eq!(first["ended"], "patience");
    let ended = train(&["--resume", "--epochs", "50"]);
    assert!(ended.failure(1).contains("`regularisation.patience` ends the run"), "{}", ended.stderr);
    let more = train(&["--resume", "--set", "regularisation.patience=2"]).success().json();
    assert_eq!(more["recipe"]["regularisation"]["patience"], 2);
    assert_eq!(train(&["--resume"]).success().json(), more, "it is read back");
}

#[test]
fn a_last_step_that_diverges_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write("recipe.toml", format!("{}\n[optimiser]\nlr = 1e30\nclip_norm = 0.0\n", tiny::RECIPE));
    let args = ["train", "--config", "recipe.toml", "--data", tiny::DATA, "--epochs", "1", "--out", "run"];
    assert!(sandbox.run(&args).failure(1).contains("the loss is"));
}
