//! `resolvent analyze --fit`: which mechanism every head gets, and `attend` with what it wrote. No time is asserted.

mod support;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{Outcome, Sandbox, Tensors, resolvent, tiny};

const SEQUENCES: usize = 3;
const TOKENS: usize = 256;
const DIM: usize = 8;

/// Queries and keys of a head whose tokens attend to their neighbours: turned by their place at four speeds.
fn turned(scale: f32) -> Vec<f32> {
    let speeds = [1.0, 0.31, 0.1, 0.03];
    let token = |i: usize| {
        speeds.map(|speed| speed * i as f32).map(|angle: f32| [scale * angle.cos(), scale * angle.sin()]).concat()
    };
    (0..TOKENS).flat_map(token).collect()
}

/// One layer of three heads: one that attends to all alike, one to neighbours, one to what only dense softmax finds.
fn dump(sandbox: &Sandbox, name: &str) -> PathBuf {
    let shape = [SEQUENCES, 3, TOKENS, DIM];
    let mut tensors = Tensors::default();
    for (seed, name) in ["layers.0.q", "layers.0.k", "layers.0.v", "layers.0.dout"].into_iter().enumerate() {
        tensors.noise(name, &shape, seed as u32);
    }
    for name in ["layers.0.q", "layers.0.k"] {
        let mut values: Vec<f32> = tensors.values(name).iter().map(|&x| 3.0 * x as f32).collect();
        for sequence in values.chunks_mut(3 * TOKENS * DIM) {
            sequence[..TOKENS * DIM].fill(0.0);
            sequence[TOKENS * DIM..2 * TOKENS * DIM].copy_from_slice(&turned(8.0));
        }
        tensors.f32(name, &shape, &values);
    }
    sandbox.write(name, tensors.file())
}

fn fit(sandbox: &Sandbox, input: &Path, args: &[&str]) -> Outcome {
    let mut command = resolvent();
    command.args(["analyze", "--input"]).arg(input).arg("--out").arg(sandbox.path("out")).args(args);
    Outcome::of(&mut command)
}

fn read(path: PathBuf) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The ids of the heads' mechanisms, by head.
fn ids(fit: &Value) -> Vec<String> {
    let layer = &fit["layers"][0];
    let of = |head: usize| {
        let groups = layer["groups"].as_array().unwrap();
        let own = groups.iter().find(|group| group["heads"].as_array().unwrap().contains(&head.into())).unwrap();
        own["mechanism"]["mechanism"].as_str().unwrap().to_owned()
    };
    (0..layer["heads"].as_u64().unwrap() as usize).map(of).collect()
}

#[test]
fn every_head_gets_the_cheapest_that_is_near_enough() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox, "dump.safetensors");
    let outcome = fit(&sandbox, &input, &["--fit", "0.9999", "--cost", "operations"]).success();
    let found = read(sandbox.path("out").join("fit.json"));
    let found_ids = ids(&found);
    assert!(["local", "ssa"].contains(&found_ids[1].as_str()), "{found}");
    assert_eq!((found_ids[0].as_str(), found_ids[2].as_str()), ("uniform", "softmax"), "{found}");
    assert_eq!((&found["fit"], &found["measure"], &found["cost"]), (&json!(1), &json!("cosine"), &json!("operations")));
    assert!(
        outcome.stdout.contains("2 of 3 heads can do with less than dense softmax, 1 keeps it"),
        "{}",
        outcome.stdout
    );
    assert!(
        outcome.stdout.contains("sequences that took no part in the choice 3 of 3 heads reach the target"),
        "{}",
        outcome.stdout
    );

    let results = read(sandbox.path("out").join("results.json"));
    let layer = &results["found"][0];
    assert_eq!((&layer["sequences"], &layer["held_out"]), (&json!(3), &json!(1)));
    let heads = layer["heads"].as_array().unwrap();
    for (head, id) in heads.iter().zip(ids(&found)) {
        let cost = head["cost"].as_f64().unwrap();
        assert!(cost <= 1.0 && (cost < 0.5) == (id != "softmax"), "{head}");
        assert!(head["fitted"].as_f64().unwrap() >= 0.9999 && head["checked"].as_f64().unwrap() >= 0.999, "{head}");
    }
    let costs: f64 = heads.iter().map(|head| head["cost"].as_f64().unwrap()).sum();
    assert!((results["share"].as_f64().unwrap() - costs / 3.0).abs() < 1e-12);
    let curve = results["curve"].as_array().unwrap();
    let costs: Vec<f64> = curve.iter().map(|point| point["cost"].as_f64().unwrap()).collect();
    assert!(costs.len() > 2 && costs.is_sorted_by(|a, b| a > b), "{costs:?}");
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    assert!(page.contains("fitted head by head") && page.contains("local-8") && !page.contains("NaN"));
    // What is analysed later without a fit does not leave that of before beside it.
    fit(&sandbox, &input, &["--mechanisms", "uniform"]).success();
    assert!(!sandbox.path("out").join("fit.json").exists());
}

/// What is asked for alone is tried; an error in place of a cosine; a budget takes the target from who loses least.
#[test]
fn candidates_measure_and_budget() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox, "dump.safetensors");
    let (file, out) = (sandbox.write("near.json", r#"{"mechanism": "local", "window": 12}"#), sandbox.path("out"));
    let asked = format!("uniform,{}", file.display());
    let ask = |more: &[&str]| {
        let args = [&["--mechanisms", &asked, "--cost", "operations", "--measure", "error"], more].concat();
        let told = fit(&sandbox, &input, &args).success().stdout;
        (ids(&read(out.join("fit.json"))), told)
    };
    assert_eq!(ask(&["--fit", "0.01"]).0, ["uniform", "local", "softmax"]);
    assert_eq!(ask(&["--fit", "0"]).0[2], "softmax");
    assert_eq!(ask(&["--fit", "10"]).0, ["uniform"; 3]);
    let (kept, told) = ask(&["--fit", "0.01", "--budget", "0.2"]);
    assert!(kept[0] == "uniform" && kept[1] == "local" && kept[2] != "softmax", "{kept:?}");
    assert!(told.contains("The budget of 0.2 holds; 1 of 3 heads leave the target for it."), "{told}");
    assert!(told.contains("2 of 3 heads can do with less than dense softmax, 1 misses the target"), "{told}");
    // A measure that nothing but softmax itself has, on no budget for it.
    let (_, told) = ask(&["--fit", "0", "--budget", "1e-6"]);
    assert!(told.contains("None of the 3 heads reaches"), "{told}");
    let (_, told) = ask(&["--fit", "0.01", "--budget", "1e-6"]);
    assert!(told.contains("The budget of 0.000001 cannot be kept"), "{told}");
    assert!(ask(&["--fit", "0.01", "--sequences", "1"]).1.contains("none was held out"));
}

/// A layer as it was fitted is each of its heads alone, with gradients, masks, shared keys, and by the reference.
#[test]
fn attend_gives_every_head_its_own() {
    let sandbox = Sandbox::new();
    let groups = json!([
        {"heads": [0, 3], "mechanism": {"mechanism": "linear-infsa"}},
        {"heads": [1], "mechanism": {"mechanism": "local", "window": 3}},
        {"heads": [2], "mechanism": {"mechanism": "routed", "clusters": 2, "routes": 1}},
    ]);
    let layers = json!([{"name": "a", "heads": 4, "groups": groups}, {"name": "b", "heads": 0, "groups": []}]);
    let fit = json!({"fit": 1, "measure": "cosine", "target": 0.9, "cost": "time", "budget": null, "causal": false, "layers": layers});
    let config = sandbox.write("fit.json", fit.to_string());
    let mut tensors = Tensors::default();
    tensors.noise("a.q", &[2, 4, 6, 5], 1).noise("a.k", &[2, 2, 6, 5], 2).noise("a.v", &[2, 2, 6, 3], 3);
    tensors.noise("a.dout", &[2, 4, 6, 3], 4).u8("a.query_mask", &[2, 6], &[1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]);
    tensors.u8("a.key_mask", &[2, 6], &[1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]);
    let input = sandbox.write("in.safetensors", tensors.file());
    let run = |config: &Path, input: &Path, more: &[&str]| {
        let output = sandbox.path("out.safetensors");
        let mut command = resolvent();
        command
            .arg("attend")
            .arg("--config")
            .arg(config)
            .arg("--input")
            .arg(input)
            .arg("--output")
            .arg(&output)
            .args(more);
        Outcome::of(&mut command).success();
        Tensors::read(&output)
    };
    for more in [&[][..], &["--reference", "--weights"]] {
        let got = run(&config, &input, &[&["--layer", "a", "--grad"], more].concat());
        let names =
            if more.is_empty() { vec!["dk", "dq", "dv", "out"] } else { vec!["dk", "dq", "dv", "out", "weights"] };
        assert_eq!(got.names(), names);
        assert_eq!((got.shape("dk"), got.shape("out")), (&[2, 2, 6, 5][..], &[2, 4, 6, 3][..]));
        let mut keys = vec![0.0; 2 * 2 * 6 * 5];
        for head in 0..4 {
            let own = sandbox.write("own.json", mechanism_of(&groups, head).to_string());
            let alone = sandbox.write("alone.safetensors", one_head(&tensors, head).file());
            let expected = run(&own, &alone, &[&["--grad"], more].concat());
            for batch in 0..2 {
                let near = |name: &str, one: usize| {
                    let got = &got.values(name)[(batch * 4 + head) * one..][..one];
                    let expected = &expected.values(name)[batch * one..][..one];
                    got.iter()
                        .zip(expected)
                        .for_each(|(x, y)| assert!((x - y).abs() < 1e-6, "{name} of head {head}: {x} {y}"));
                };
                near("dq", 30);
                near("out", 18);
                let sums = &mut keys[(batch * 2 + head / 2) * 30..][..30];
                sums.iter_mut().zip(&expected.values("dk")[batch * 30..][..30]).for_each(|(sum, x)| *sum += x);
            }
        }
        got.values("dk").iter().zip(&keys).for_each(|(x, y)| assert!((x - y).abs() < 2e-6, "dk: {x} {y}"));
    }
}

/// A layer is named where the file has several, and none that it has not.
#[test]
fn attend_asks_for_a_layer_that_is_there() {
    let sandbox = Sandbox::new();
    sandbox.write("m.json", r#"{"mechanism": "softmax"}"#);
    let mut tensors = Tensors::default();
    tensors.noise("a.q", &[2, 4, 6, 5], 1).noise("a.k", &[2, 4, 6, 5], 2).noise("a.v", &[2, 4, 6, 3], 3);
    sandbox.write("in.safetensors", tensors.file());
    let attend = ["attend", "--config", "m.json", "--input", "in.safetensors", "--output", "out.safetensors"];
    assert!(sandbox.run(&attend).failure(1).contains("--layer a"));
    assert!(sandbox.run(&[&attend[..], &["--layer", "b"]].concat()).failure(1).contains("no tensor `b.q`"));
    sandbox.run(&[&attend[..], &["--layer", "a"]].concat()).success();
}

fn mechanism_of(groups: &Value, head: usize) -> Value {
    let own = groups.as_array().unwrap().iter().find(|group| group["heads"].as_array().unwrap().contains(&head.into()));
    own.unwrap()["mechanism"].clone()
}

/// One head of the layer `a`, with its keys.
fn one_head(tensors: &Tensors, head: usize) -> Tensors {
    let mut alone = Tensors::default();
    for (name, heads, channels) in [("q", 4, 5), ("k", 2, 5), ("v", 2, 3), ("dout", 4, 3)] {
        let values = tensors.values(&format!("a.{name}"));
        let own = if heads == 4 { head } else { head / 2 };
        let one = 6 * channels;
        let of =
            |batch: usize| values[(batch * heads + own) * one..][..one].iter().map(|&x| x as f32).collect::<Vec<_>>();
        let [first, second] = [of(0), of(1)];
        alone.f32(name, &[2, 1, 6, channels], &[first, second].concat());
    }
    let masks = [("query_mask", "a.query_mask"), ("key_mask", "a.key_mask")];
    for (name, stored) in masks {
        alone.u8(name, &[2, 6], tensors.bytes(stored));
    }
    alone
}

#[test]
fn what_does_not_fit_is_refused() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox, "dump.safetensors");
    for (args, told) in [
        (&["--fit", "1.5"][..], "`fit` is 1.5, must be 0 to 1, a cosine"),
        (&["--fit=-1", "--measure", "error"], "must be 0 and more, an error"),
        (&["--fit", "0.9", "--budget", "0"], "`budget` is 0, must be above 0"),
        (&["--fit", "0.9", "--layers", "x"], "names `x`"),
    ] {
        let outcome = fit(&sandbox, &input, args);
        assert!(outcome.failure(1).contains(told), "{args:?}: {}", outcome.stderr);
        assert!(!sandbox.path("out").join("fit.json").exists());
    }
    let without = fit(&sandbox, &input, &["--budget", "0.5"]);
    without.failure(2);
    assert!(without.stderr.contains("--fit <TARGET>"), "{}", without.stderr);
    assert!(
        fit(&sandbox, &input, &["--fit", "0.9", "--measure", "angle"])
            .failure(2)
            .contains("expected one of `cosine` `error`")
    );

    fit(&sandbox, &input, &["--fit", "0.9", "--mechanisms", "uniform", "--sequences", "1"]).success();
    let config = sandbox.path("out").join("fit.json");
    let attend = |input: &Path, more: &[&str]| {
        let mut command = resolvent();
        command
            .arg("attend")
            .arg("--config")
            .arg(&config)
            .arg("--input")
            .arg(input)
            .arg("--output")
            .arg(sandbox.path("o"))
            .args(more);
        Outcome::of(&mut command)
    };
    attend(&input, &["--layer", "layers.0"]).success();
    std::fs::remove_file(sandbox.path("o")).unwrap();
    let mut other = Tensors::default();
    other.noise("q", &[2, 8, 4], 1).noise("k", &[2, 8, 4], 2).noise("v", &[2, 8, 4], 3);
    let other = sandbox.write("other.safetensors", other.file());
    for (input, more, told) in [
        (&input, &["--layer", "layers.7"][..], "no layer `layers.7`; it has layers.0"),
        (&input, &["--layer", "layers.0", "--certificate"], "of one mechanism"),
        (&input, &[], "tensor `q` is missing"),
        (&other, &[], "layer `layers.0` has 3 heads"),
    ] {
        let outcome = attend(input, more);
        assert!(outcome.failure(1).contains(told), "{more:?}: {}", outcome.stderr);
        assert!(!sandbox.path("o").exists());
    }
}

/// A model trained with softmax, fitted on its own queries and keys, and evaluated with what was found.
#[test]
fn a_trained_model_takes_its_fit() {
    let sandbox = tiny::sandbox();
    sandbox.run(&tiny::train("run", &["--attention", "softmax", "--epochs", "1", "--quiet"])).success();
    let fit = |out: &str, target: &str, mechanisms: &str| {
        let data = ["analyze", "--checkpoint", "run", "--data", tiny::DATA, "--sequences", "2", "--cost", "operations"];
        let args = [&data[..], &["--mechanisms", mechanisms, "--fit", target, "--out", out, "--quiet"]].concat();
        sandbox.run(&args).success();
        read(sandbox.path(out).join("fit.json"))
    };
    let exchange = |fit: &str| {
        let args = ["eval", "--checkpoint", "run", "--data", tiny::DATA, "--attention", fit, "--json"];
        sandbox.run(&args).success().json()["exchange"].take()
    };
    let dense = fit("dense", "1", "softmax");
    assert_eq!(ids(&dense), ["softmax"; 2]);
    let same = exchange("dense/fit.json");
    assert!(same["largest_difference"].as_f64().unwrap() < 1e-5, "{same}");
    assert_eq!(same["exchanged"]["fit"], 1, "{same}");

    let causal = dense.to_string().replace("\"causal\":false,\"cost\"", "\"causal\":true,\"cost\"");
    assert_ne!(causal, dense.to_string());
    sandbox.write("causal.json", causal);
    let args = ["eval", "--checkpoint", "run", "--data", tiny::DATA, "--attention", "causal.json"];
    assert!(sandbox.run(&args).failure(1).contains("see earlier ones only"));

    sandbox.write("near.json", r#"{"mechanism": "local", "window": 2}"#);
    assert_eq!(ids(&fit("mild", "0", "near.json")), ["local"; 2]);
    let (found, near) = (exchange("mild/fit.json"), exchange("near.json"));
    for field in ["largest_difference", "largest_logit", "answers_changed"] {
        let [found, near] = [&found[field], &near[field]].map(|x| x.as_f64().unwrap());
        assert!((found - near).abs() <= 1e-4 * near.abs(), "{field}: {found} {near}");
    }

    let other = dense.to_string().replace("\"heads\":2", "\"heads\":3").replace("[0,1]", "[0,1,2]");
    sandbox.write("other.json", &other);
    let refused = sandbox
        .run(&["eval", "--checkpoint", "run", "--data", tiny::DATA, "--attention", "other.json"])
        .failure(1)
        .to_owned();
    assert!(refused.contains("has a layer `blocks.0` of 3 heads, the model one of 2"), "{refused}");
}

/// A group of heads is a call of its own, which would have other slopes or maps: what has such is no candidate.
#[test]
fn numbers_of_single_heads_are_refused() {
    let sandbox = Sandbox::new();
    let input = sandbox.write("dump.safetensors", Tensors::call(&[1, 3, 16, DIM]).file());
    for config in [
        json!({"mechanism": "local", "window": 4, "bias": "alibi"}),
        json!({"mechanism": "linformer", "count": 8, "per_head": true}),
    ] {
        let config = sandbox.write("own.json", config.to_string()).display().to_string();
        let outcome = fit(&sandbox, &input, &["--fit", "0.5", "--mechanisms", &config]);
        assert!(outcome.failure(1).contains("single heads"), "{}", outcome.failure(1));
    }
}
