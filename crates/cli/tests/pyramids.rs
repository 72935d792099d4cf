//! Pyramids from end to end: trained, resumed, compared, and shown pictures of other sizes.

mod support;

use support::{Sandbox, tiny::DATA};

/// A narrow pyramid on pictures of 16 x 16.
const RECIPE: &str = "
name = 'pyramid'
[mechanism]
mechanism = 'soft-pp'
landmarks = { kind = 'conv', ratio = 2 }
inverse = 'cholesky'
[model]
kind = 'pyramid'
preset = 'PRESET'
scale_trainable = true
drop_path = 0.1
[[model.stages]]
dim = 8
heads = 2
depth = 1
ratio = 2
value_conv = { kind = 'per-head', side = 3 }
[[model.stages]]
dim = 8
heads = 2
depth = 1
ratio = 2
[[model.stages]]
dim = 16
heads = 2
depth = 1
norm = 'post'
[[model.stages]]
dim = 16
heads = 2
depth = 1
mlp_ratio = 2
mechanism = { mechanism = 'softmax' }
[schedule]
epochs = 2
batch_size = 16
warmup_epochs = 0.5
[regularisation]
ema_decay = 0.5
[log]
every = 2
";

fn sandbox(preset: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("pyramid.toml", RECIPE.replace("PRESET", preset));
    sandbox
}

fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--config", "pyramid.toml", "--data", DATA, "--out", out], more].concat()
}

#[test]
fn pyramids_are_trained_and_shown_larger_pictures() {
    for preset in ["soft-mini", "laplacian-mini"] {
        let sandbox = sandbox(preset);
        let trained = sandbox.run(&train("run", &["--json"])).success().json();
        assert_eq!(trained["recipe"]["model"]["preset"], preset);
        let eval = |more: &[&str]| {
            sandbox.run(&[&["eval", "--checkpoint", "run", "--json"], more].concat()).success().json()["evaluation"]
                .take()
        };
        assert_eq!(eval(&[])["accuracy"], trained["test"]["accuracy"], "running statistics are in the checkpoint");
        assert_eq!(eval(&["--image-size", "16"])["loss"], trained["test"]["loss"]);
        let larger = eval(&["--image-size", "27"]);
        assert!(larger["examples"] == 32 && larger["loss"] != trained["test"]["loss"], "{larger}");
        let again = sandbox.run(&train("again", &["--json"])).success().json();
        assert_eq!(again["test"]["loss"], trained["test"]["loss"], "the same seed, the same bits");
    }
}

#[test]
fn a_pyramid_takes_every_mechanism() {
    let sandbox = sandbox("laplacian-mini");
    let args = ["compare", "--config", "pyramid.toml", "--data", DATA, "--out", "all", "--seeds", "1", "--json"];
    let mechanisms = ["--mechanisms", "soft-pp,laplacian,uniform,linear-infsa"];
    let json = sandbox.run(&[&args[..], &mechanisms].concat()).success().json();
    let of = |i: usize| &json["entries"][i]["mechanism"];
    assert_eq!(of(0)["inverse"], "cholesky", "the recipe's settings for the recipe's mechanism");
    assert_eq!((&of(1)["mechanism"], &of(1)["inverse"]), (&"laplacian".into(), &"newton-schulz".into()));
}

/// The recipe's number of landmarks holds in every stage, also on pictures of another size.
#[test]
fn a_number_of_landmarks_is_that_of_all_stages() {
    let sandbox = Sandbox::new();
    let counted = RECIPE.replace("preset = 'PRESET'", "preset = 'laplacian-mini'\nlandmark_count = 4");
    sandbox.write("pyramid.toml", counted.replace("mechanism = { mechanism = 'softmax' }", ""));
    let args = ["compare", "--config", "pyramid.toml", "--data", DATA, "--out", "all", "--seeds", "1", "--json"];
    let json = sandbox.run(&[&args[..], &["--mechanisms", "soft-pp,laplacian,uniform"]].concat()).success().json();
    let landmarks = |i: usize| {
        let stages = json["entries"][i]["landmarks"].as_array();
        stages.map(|stages| Vec::from_iter(stages.iter().map(|stage| stage["landmarks"].as_u64().unwrap())))
    };
    // Grids of 8, 4, 2 and 1 tokens a side.
    assert_eq!([0, 1, 2].map(landmarks), [Some(vec![4, 4, 4, 1]), Some(vec![4, 4, 4, 1]), None]);
    let of_run = |name: &str| format!("all/runs/{name}-seed0");
    for name in ["soft-pp", "laplacian"] {
        sandbox.run(&["eval", "--checkpoint", &of_run(name), "--image-size", "27"]).success();
    }
    sandbox.write("pyramid.toml", RECIPE.replace("preset = 'PRESET'", "preset = 'soft-mini'\nlandmark_count = 0"));
    let outcome = sandbox.run(&train("none", &[]));
    let told = outcome.failure(1);
    assert!(told.contains("model.landmark_count"), "{told}");
}

#[test]
fn another_attention_can_stand_in_on_the_trained_weights() {
    let sandbox = sandbox("soft-mini");
    sandbox.run(&train("run", &["--epochs", "1"])).success();
    let mechanism = r#"{"mechanism": "soft-pp", "landmarks": {"kind": "conv", "ratio": 2}, "ridge": RIDGE,
        "inverse": "newton-schulz", "newton_iterations": 30}"#;
    sandbox.write("newton.json", mechanism.replace("RIDGE", "0.0"));
    sandbox.write("ridge.json", mechanism.replace("RIDGE", "3.0"));
    let exchange = |attention: &str| {
        let args = ["eval", "--checkpoint", "run", "--attention", attention, "--json"];
        sandbox.run(&args).success().json()["exchange"].take()
    };
    let same = exchange("soft-pp");
    assert_eq!((&same["largest_difference"], &same["answers_changed"]), (&0.0.into(), &0.into()), "{same}");
    let change = |attention: &str| {
        let e = exchange(attention);
        e["largest_difference"].as_f64().unwrap() / e["largest_logit"].as_f64().unwrap()
    };
    let (newton, ridge) = (change("newton.json"), change("ridge.json"));
    assert!(newton > 0.0 && newton < 0.01 && ridge > 2.0 * newton, "{newton} {ridge}");
    let refused = sandbox.run(&["eval", "--checkpoint", "run", "--attention", "uniform"]).failure(1).to_owned();
    assert!(refused.contains("`uniform` cannot stand in for `soft-pp`"), "{refused}");
}

#[test]
fn mistakes_end_in_one_line() {
    let sandbox = sandbox("soft-mini");
    let fails = |args: &[&str], parts: &[&str]| {
        let line = sandbox.run(args).failure(1).to_owned();
        assert!(parts.iter().all(|part| line.contains(part)), "{args:?}: {line}");
    };
    sandbox.write("unknown.toml", "[model]\nkind = 'pyramid'\npreset = 'soft-big'");
    fails(&["train", "--config", "unknown.toml"], &["model.preset", "soft-big", "mini"]);
    sandbox.write("patch.toml", "[model]\nkind = 'pyramid'\npatch = 4");
    fails(&["train", "--config", "patch.toml"], &["model", "patch"]);
    // A class token has no place on a grid.
    sandbox.write("cls.toml", RECIPE.replace("PRESET", "soft-mini").replace("mlp_ratio = 2\n", "ratio = 2\n"));
    fails(&["train", "--config", "cls.toml", "--data", DATA], &["stages.4", "class token"]);
    sandbox.run(&train("run", &["--epochs", "1"])).success();
    let colour = "shapes:seed=1,size=24,train=8,test=8";
    fails(&["eval", "--checkpoint", "run", "--data", colour], &["24", "16"]);
    sandbox.run(&["eval", "--checkpoint", "run", "--data", colour, "--image-size", "16"]).success();
    // Landmarks of 2 x 2 windows need as many tokens.
    fails(&["eval", "--checkpoint", "run", "--image-size", "2"], &["landmarks.ratio"]);
}
