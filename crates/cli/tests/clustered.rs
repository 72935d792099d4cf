//! Clustered attention through `resolvent attend`: every stored case along its stored plan, and plans that are written,
//! read and refused.

mod support;

use std::{fs, path::PathBuf};

use resolvent_kernels::{Mechanism, relative_distance, simd::Level};
use safetensors::SafeTensors;
use serde_json::Value;
use support::{Outcome, Sandbox, Tensors, resolvent};

/// Paths and configurations of the stored cases of `ssa`.
fn cases() -> Vec<(PathBuf, Value)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data/ssa");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().filter_map(|path| Some((path.clone(), config(&path)?))).collect()
}

fn config(path: &PathBuf) -> Option<Value> {
    let bytes = fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut case: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["case"]).unwrap();
    let mut config = case["args"].take();
    config["mechanism"] = case["mechanism"].take();
    (config["mechanism"] == "ssa").then_some(config)
}

/// The result of a case, run with `args`.
fn attend(sandbox: &Sandbox, input: &PathBuf, config: &Value, args: &[&str], level: Option<Level>) -> Tensors {
    let output = sandbox.path("out.safetensors");
    let config = sandbox.write("mechanism.json", config.to_string());
    let mut command = resolvent();
    command.arg("attend").arg("--config").arg(config).arg("--input").arg(input).arg("--output").arg(&output);
    Outcome::of(command.args(args).envs(level.map(|level| ("RESOLVENT_SIMD", level.name())))).success();
    Tensors::read(&output)
}

#[test]
fn stored_plans_are_attended_along() {
    let sandbox = Sandbox::new();
    assert_eq!(cases().len(), 17);
    for (path, config) in cases() {
        assert!(Mechanism::from_value(config.clone()).is_ok());
        let expected = Tensors::read(&path);
        let large = path.ends_with("large_norms.safetensors");
        let check = |what: &str, got: &Tensors, forward: f64, backward: f64| {
            for (name, tolerance) in
                [("out", forward), ("lse", forward), ("dq", backward), ("dk", backward), ("dv", backward)]
            {
                let distance = relative_distance(&got.values(name), &expected.values(name));
                assert!(distance <= tolerance, "{path:?} {what}, {name}: {distance:.2e} > {tolerance:.0e}");
            }
        };
        for level in Level::available() {
            let got = attend(&sandbox, &path, &config, &["--grad"], Some(level));
            check(level.name(), &got, if large { 5e-5 } else { 5e-6 }, if large { 3e-4 } else { 2e-5 });
        }
        check("reference", &attend(&sandbox, &path, &config, &["--grad", "--reference"], None), 1e-10, 1e-10);
    }
}

/// The four values that a configuration of `ssa` stands for.
fn composed(ssa: &Value) -> Value {
    let mut structure = ssa.clone();
    let fields = structure.as_object_mut().unwrap();
    let mut take = |name: &str| fields.remove(name).unwrap_or(Value::Null);
    let (scale, causal) = (take("scale"), take("causal") == true);
    take("mechanism");
    structure["kind"] = "clustered".into();
    serde_json::json!({
        "mechanism": "composed", "score": {"kind": "dot-exp", "scale": scale}, "structure": structure, "causal": causal
    })
}

#[test]
fn compositions_on_clusters_read_and_write_plans() {
    let sandbox = Sandbox::new();
    for (path, config) in cases() {
        let args = ["--grad", "--clusters"];
        let [preset, own] = [config.clone(), composed(&config)].map(|c| attend(&sandbox, &path, &c, &args, None));
        for name in ["out", "label_q", "edges", "edge_log_weight"] {
            assert_eq!(own.values(name), preset.values(name), "{path:?} {name}");
        }
        // The engine makes these, since a composition learns the score's scale, which the preset does not.
        let tolerance = if path.ends_with("large_norms.safetensors") { 3e-4 } else { 2e-5 };
        // All at once: those of a single token's query and key are 0 but for rounding.
        let gradients = |of: &Tensors| ["dq", "dk", "dv"].map(|name| of.values(name)).concat();
        let distance = relative_distance(&gradients(&own), &gradients(&preset));
        assert!(distance < tolerance, "{path:?}: {distance:.2e}");
        // Another score follows the same plan.
        let mut other = composed(&config);
        other["score"] = serde_json::json!({"kind": "student", "kappa": 2.0});
        let [fused, exact] =
            [&["--grad"][..], &["--grad", "--reference"]].map(|args| attend(&sandbox, &path, &other, args, None));
        let distances =
            [fused.values("out"), gradients(&fused)].into_iter().zip([exact.values("out"), gradients(&exact)]);
        for (fused, exact) in distances {
            let distance = relative_distance(&fused, &exact);
            assert!(distance < 1e-4, "{path:?}: {distance:.2e}");
        }
    }
}

#[test]
fn written_plans_are_those_stored() {
    let sandbox = Sandbox::new();
    for (path, config) in cases() {
        let got = attend(&sandbox, &path, &config, &["--clusters"], None);
        for name in ["label_q", "label_k", "exact_blocks", "edges", "edge_log_weight"] {
            assert_eq!(got.shape(name), Tensors::read(&path).shape(name), "{path:?} {name}");
            assert_eq!(got.values(name), Tensors::read(&path).values(name), "{path:?} {name}");
        }
    }
}

/// Tokens on a grid, which are as far from several means as f32 can tell: the two paths group them differently, and what
/// each writes must be what it followed.
#[test]
fn the_plan_that_is_written_made_the_output() {
    let sandbox = Sandbox::new();
    let config = serde_json::json!({"mechanism": "ssa", "clusters": 12, "balance": null});
    let (mut tensors, shape) = (Tensors::default(), [1, 2, 40, 3]);
    for (name, seed) in [("q", 6), ("k", 7), ("v", 8)] {
        let grid: Vec<f32> =
            tensors.noise(name, &shape, seed).values(name).iter().map(|x| (1.5 * x).round() as f32 * 0.1).collect();
        tensors.f32(name, &shape, &grid);
    }
    let input = sandbox.write("in.safetensors", tensors.file());
    let made = [&[][..], &["--reference"]].map(|path| {
        let made = attend(&sandbox, &input, &config, &[path, &["--clusters", "--weights"]].concat(), None);
        for name in ["label_q", "label_k", "exact_blocks", "edges", "edge_log_weight"] {
            tensors.raw(name, made.dtype(name), made.shape(name), made.bytes(name).to_vec());
        }
        let planned = sandbox.write("planned.safetensors", tensors.file());
        let again = attend(&sandbox, &planned, &config, &[path, &["--weights"]].concat(), None);
        assert_eq!((again.bytes("out"), again.bytes("weights")), (made.bytes("out"), made.bytes("weights")));
        made
    });
    assert_ne!(made[0].bytes("label_q"), made[1].bytes("label_q"), "nothing is told apart");
}

/// A file has -1 for every token without a cluster; the configuration tells global tokens from those that found none.
#[test]
fn plans_with_strays_are_read_as_they_were_written() {
    let sandbox = Sandbox::new();
    let config = serde_json::json!({
        "mechanism": "ssa", "clusters": 3, "causal": true, "estimator": "centroid", "global_tokens": [3]
    });
    // Tokens 0 and 1 have one side and no token before them has both.
    let keep = |masked: [usize; 2]| (0..20).map(|n| u8::from(!masked.contains(&n))).collect::<Vec<_>>();
    let mut tensors = Tensors::call(&[1, 1, 20, 4]);
    tensors.u8("key_mask", &[1, 20], &keep([0, 2])).u8("query_mask", &[1, 20], &keep([1, 2]));
    let input = sandbox.write("in.safetensors", tensors.file());
    let made = attend(&sandbox, &input, &config, &["--clusters"], None);
    for name in ["label_q", "label_k"] {
        assert_eq!(made.values(name)[..4], [-1.0; 4], "{name}");
    }
    for name in ["label_q", "label_k", "exact_blocks", "edges", "edge_log_weight"] {
        tensors.raw(name, made.dtype(name), made.shape(name), made.bytes(name).to_vec());
    }
    let planned = sandbox.write("planned.safetensors", tensors.file());
    let again = attend(&sandbox, &planned, &config, &[], None);
    assert!(made.values("lse")[0] == f64::NEG_INFINITY, "the stray sees more than global tokens");
    assert_eq!((again.bytes("out"), again.bytes("lse")), (made.bytes("out"), made.bytes("lse")));
}

/// A stored plan leaves nothing to centroids, which is told.
#[test]
fn centroids_beside_a_plan_are_not_used() {
    let sandbox = Sandbox::new();
    let (path, config) = cases().swap_remove(0);
    let mut tensors = Tensors::read(&path);
    let shape = tensors.shape("q").to_vec();
    let [heads, dim] = [shape[shape.len() - 3], shape[shape.len() - 1]];
    tensors.noise("codebook", &[heads, 2, dim], 1);
    let input = sandbox.write("in.safetensors", tensors.file());
    let config = sandbox.write("m.json", config.to_string());
    let mut command = resolvent();
    command
        .arg("attend")
        .arg("--config")
        .arg(config)
        .arg("--input")
        .arg(&input)
        .arg("--output")
        .arg(sandbox.path("out"));
    let stderr = Outcome::of(&mut command).success().stderr;
    assert!(stderr.contains("not used") && stderr.contains("codebook"), "{stderr}");
}

/// Bounds on what a row misses come beside the output, one per row, and know dense attention when they see it.
#[test]
fn certificates_bound_every_row() {
    let sandbox = Sandbox::new();
    let names = ["missed_mass", "total_variation", "output_error"];
    for (path, config) in cases() {
        let stored = Tensors::read(&path);
        for args in [&["--certificate"][..], &["--certificate", "--reference"]] {
            let got = attend(&sandbox, &path, &config, args, None);
            for name in names {
                assert_eq!(got.shape(name), stored.shape("lse"), "{path:?} {name}");
                let most = if name == "output_error" { f64::INFINITY } else { 1.0 };
                assert!(got.values(name).iter().all(|x| (0.0..=most).contains(x)), "{path:?} {name}");
            }
            let exact = path.ends_with("one_token.safetensors");
            assert!(!exact || names.iter().all(|name| got.values(name).iter().all(|&x| x == 0.0)), "{path:?}");
        }
    }
    let (input, softmax) = (cases()[0].0.clone(), sandbox.write("softmax.json", r#"{"mechanism": "softmax"}"#));
    let output = sandbox.path("none.safetensors");
    let mut command = resolvent();
    command.arg("attend").arg("--config").arg(softmax).arg("--input").arg(input).arg("--output").arg(&output);
    let refused = Outcome::of(command.arg("--certificate"));
    assert!(refused.failure(1).contains("only clustered mechanisms attend along clusters"));
}
