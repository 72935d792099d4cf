//! `--device` and `resolvent devices`: what a build without GPUs says, and models on a GPU against the same on the CPU. Any adapter will
//! do, also a software one, as `scripts/gpu.sh` installs.

mod support;

use serde_json::Value;
use support::{Sandbox, resolvent, tiny};

/// Whether the program is built with a GPU.
const BUILT: bool =
    cfg!(any(feature = "cuda", feature = "metal", feature = "rocm", feature = "vulkan", feature = "wgpu"));

#[test]
fn the_cpu_is_listed_and_what_brings_gpus_is_named() {
    let sandbox = Sandbox::new();
    let listed = sandbox.run(&["devices"]).success().stdout;
    assert!(listed.starts_with("cpu ") && listed.contains("built"), "{listed}");
    assert_eq!(listed.contains("one of the features cuda, rocm, metal, vulkan, wgpu"), !BUILT, "{listed}");
    let json = sandbox.run(&["devices", "--json"]).success().json();
    assert_eq!(json["devices"][0]["device"], "cpu");
    assert!(json["devices"][0]["problem"].is_null() && json["devices"][0]["memory_bytes"].as_u64() > Some(0), "{json}");
    assert_eq!(json["features"].as_array().unwrap().is_empty(), !BUILT);
}

#[test]
fn a_device_that_is_not_there_is_refused_before_anything_is_done() {
    let sandbox = tiny::sandbox();
    let before = sandbox.snapshot();
    for number in ["gpu:77", "gpu:9999"] {
        let refused = sandbox.run(&tiny::train("run", &["--device", number]));
        let error = refused.failure(1);
        assert!(error.contains(&format!("device `{number}`")), "{error}");
        assert_eq!(error.contains("built for the CPU alone; build it with one of the features"), !BUILT, "{error}");
    }
    for wrong in ["tpu", "gpu:", "gpu:-1", "gpu:x", "cuda:0"] {
        let refused = sandbox.run(&["eval", "--device", wrong]);
        assert!(refused.failure(2).contains(wrong), "{wrong}");
    }
    let dump = sandbox.run(&["analyze", "--input", "dump.safetensors", "--device", "auto"]);
    assert!(dump.failure(1).contains("--device is for the model of --checkpoint"), "{dump:?}");
    assert_eq!(sandbox.snapshot(), before);
}

#[test]
fn without_a_gpu_the_automatic_device_is_the_cpu_to_the_bit() {
    let sandbox = tiny::sandbox();
    // Where there is a real GPU the results are its own.
    let gpus = sandbox.run(&["devices", "--json"]).success().json();
    if gpus["devices"].as_array().unwrap().iter().skip(1).any(|gpu| gpu["software"] == false) {
        return;
    }
    let automatic = sandbox.run(&tiny::train("auto", &["--device", "auto"])).success();
    assert!(automatic.stderr.contains("device: cpu ("), "{}", automatic.stderr);
    let usual = sandbox.run(&tiny::train("usual", &[])).success();
    assert!(!usual.stderr.contains("device:"), "{}", usual.stderr);
    let [automatic, usual] = ["auto", "usual"].map(|run| steps(&sandbox, run));
    assert!(usual.len() == 4 && automatic == usual, "{automatic:?} {usual:?}");
}

/// A model and data of a few steps, with what a step may consist of.
const RECIPE: &str = "
name = 'tiny'
[model]
patch = 8
dim = 8
depth = 1
heads = 2
mlp_dim = 16
[optimiser]
clip_norm = 0.5
[schedule]
epochs = 2
batch_size = 16
warmup_epochs = 0.5
[regularisation]
ema_decay = 0.9
[log]
every = 2
";
const DATA: &str = "shapes:seed=1,size=16,train=48,test=16";

/// Losses and norms of the gradients, step by step.
fn steps(sandbox: &Sandbox, run: &str) -> Vec<[f64; 2]> {
    let text = std::fs::read_to_string(sandbox.path(run).join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| Some([record["loss"].as_f64()?, record["grad_norm"].as_f64()?])).collect()
}

#[track_caller]
fn assert_near(what: &str, got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-3 * expected.abs(), "{what}: {got}, on the CPU {expected}");
}

/// Removes what a run wrote after its first epoch.
fn forget_second_epoch(sandbox: &Sandbox, run: &str) {
    std::fs::remove_file(sandbox.path(run).join("summary.json")).unwrap();
    std::fs::remove_dir_all(sandbox.path(run).join("checkpoints/step-000000006")).unwrap();
}

#[test]
#[ignore = "needs an adapter and a build with its feature"]
fn a_model_is_trained_on_a_gpu_as_on_the_cpu_and_moves_between_them() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", RECIPE);
    let train = |device: &str, run: &str, more: &[&str]| {
        let args = ["train", "--config", "tiny.toml", "--data", DATA, "--device", device, "--out", run, "--json"];
        let trained = sandbox.run(&[&args[..], more].concat()).success();
        assert_eq!(trained.stderr.contains("device: gpu:0 ("), device == "gpu:0", "{}", trained.stderr);
        trained.json()["test"]["loss"].as_f64().unwrap()
    };
    let evaluated = |device: &str, run: &str| {
        let args = ["eval", "--checkpoint", run, "--device", device, "--json"];
        sandbox.run(&args).success().json()["evaluation"].clone()
    };
    let (on_cpu, on_gpu) = (train("cpu", "cpu", &[]), train("gpu:0", "gpu", &[]));
    assert_near("test loss", on_gpu, on_cpu);
    let compare = |what: &str| {
        let (cpu, gpu) = (steps(&sandbox, "cpu"), steps(&sandbox, "gpu"));
        assert_eq!((cpu.len(), gpu.len()), (3, 3), "{what}");
        for (line, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
            assert_near(&format!("{what}, loss of line {line}"), gpu[0], cpu[0]);
            assert_near(&format!("{what}, norm of line {line}"), gpu[1], cpu[1]);
        }
    };
    compare("trained on each");
    // Trained on one, judged on the other.
    for (device, run, loss) in [("cpu", "gpu", on_gpu), ("gpu:0", "cpu", on_cpu)] {
        let found = evaluated(device, run);
        assert_near(&format!("{run}'s model on {device}"), found["loss"].as_f64().unwrap(), loss);
    }
    // Begun on one, ended on the other: weights, average and moments move.
    ["cpu", "gpu"].iter().for_each(|run| forget_second_epoch(&sandbox, run));
    assert_near("begun on the CPU", train("gpu:0", "cpu", &["--resume"]), on_cpu);
    assert_near("begun on the GPU", train("cpu", "gpu", &["--resume"]), on_gpu);
    compare("ended on the other");
    let probability = |device: &str| {
        let args = ["explain", "--checkpoint", "cpu", "--examples", "1", "--device", device, "--json"];
        sandbox.run(&args).success().json()["answers"][0]["probability"].as_f64().unwrap()
    };
    let (gpu, cpu) = (probability("gpu"), probability("cpu"));
    assert_near("probability", gpu, cpu);
}

#[test]
#[ignore = "needs an adapter and a build with its feature"]
fn a_language_model_writes_the_same_on_a_gpu() {
    let recipe = "
name = 'tiny-language'
[model]
kind = 'language'
context = 12
dim = 16
depth = 1
heads = 2
kv_heads = 1
mlp_dim = 16";
    let sandbox = Sandbox::of_letters(recipe);
    sandbox.run(&["train", "--config", "tiny.toml", "--data", "corpus:text.txt", "--out", "run"]).success();
    let said = |device: &str| {
        let args =
            ["generate", "run", "--greedy", "--tokens", "4", "--prompt", "abcdefg", "--device", device, "--quiet"];
        sandbox.run(&args).success().stdout
    };
    assert_eq!((said("gpu"), said("cpu")), ("hijk\n".into(), "hijk\n".into()));
}

#[test]
#[ignore = "needs a build with a GPU's feature"]
fn a_machine_without_drivers_says_so() {
    let sandbox = tiny::sandbox();
    let mut without = resolvent();
    // Nothing is left for the Vulkan loader to find.
    without.current_dir(sandbox.path(".")).env("VK_DRIVER_FILES", "/none").env("VK_ICD_FILENAMES", "/none");
    without.env("LIBGL_DRIVERS_PATH", "/none").env("__EGL_VENDOR_LIBRARY_FILENAMES", "/none");
    let refused = support::Outcome::of(without.args(tiny::train("run", &["--device", "gpu"])));
    assert!(refused.failure(1).contains("no adapter was found ("), "{refused:?}");
}
