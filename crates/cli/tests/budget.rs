//! The budget of decoded data as a setting of the program, and pipes where files are expected.

mod support;

use support::{Outcome, Sandbox, Tensors, resolvent};

const LINES: &str = "a line of text\n";

#[test]
fn the_limit_is_a_flag_and_a_variable() {
    let sandbox = Sandbox::new();
    sandbox.write("text.txt", LINES.repeat(100_000));
    let args = ["train", "--data", "corpus:text.txt", "--out", "out"];
    let told = sandbox.run(&[&args[..], &["--decode-limit", "1MiB"]].concat());
    let message = told.failure(1);
    for part in ["text.txt", "1.0 MiB", "--decode-limit", "RESOLVENT_DECODE_LIMIT"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!sandbox.path("out").join("metrics.jsonl").exists());
    let mut command = resolvent();
    command.current_dir(sandbox.path("")).args(args).env("RESOLVENT_DECODE_LIMIT", "1MiB");
    assert!(Outcome::of(&mut command).failure(1).contains("text.txt"));
    sandbox.run(&[&args[..], &["--decode-limit", "two pounds"]].concat()).failure(2);
    assert!(sandbox.run(&["help", "train"]).success().stdout.contains("RESOLVENT_DECODE_LIMIT"));
}

#[test]
fn tensors_and_standard_input_count() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    for (seed, name) in ["q", "k", "v"].into_iter().enumerate() {
        tensors.noise(name, &[1, 1, 512, 32], seed as u32);
    }
    sandbox.write("in.safetensors", tensors.file());
    sandbox.write("m.json", "{\"mechanism\": \"softmax\"}");
    let attend = ["attend", "--config", "m.json", "--input", "in.safetensors", "--output", "out.safetensors"];
    let message = sandbox.run(&[&attend[..], &["--decode-limit", "100KiB"]].concat());
    assert!(message.failure(1).contains("in.safetensors"));
    assert!(!sandbox.path("out.safetensors").exists());
}

/// Pictures that are generated count as those that are read.
#[test]
fn generated_pictures_count() {
    let sandbox = Sandbox::new();
    let pictures = ["train", "--data", "shapes:size=64,train=1000", "--decode-limit", "1MiB", "--out", "out"];
    assert!(sandbox.run(&pictures).failure(1).contains("shapes"));
}

/// Within a limit of the address space a model is refused by what its weights take, before they are drawn.
#[cfg(target_os = "linux")]
#[test]
fn weights_beyond_the_address_space_are_refused() {
    let sandbox = Sandbox::new();
    let config = "[model]\npatch = 8\ndim = 8192\ndepth = 4\nheads = 4\nmlp_dim = 8192\n[schedule]\nbatch_size = 16\n";
    let config = sandbox.write("huge.toml", config);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", r#"ulimit -v 6000000 && exec "$@""#, "sh", env!("CARGO_BIN_EXE_resolvent"), "train"]);
    command.args(["--data", "shapes:size=16,train=64,test=32", "--config"]).arg(config).arg("--out");
    let outcome = Outcome::of(command.arg(sandbox.path("out")).env("RESOLVENT_CALIBRATION", "off"));
    let line = outcome.failure(1);
    assert!(line.contains("`model` has weights of 6.5 GB") && line.contains("make it smaller"), "{line}");
}

#[cfg(unix)]
#[test]
fn pipes_are_refused() {
    let sandbox = Sandbox::new();
    let pipe = sandbox.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let refused = |args: &[&str]| {
        let outcome = sandbox.run(args);
        assert!(outcome.failure(1).contains("pipe: is a pipe, expected an ordinary file"), "{}", outcome.stderr);
    };
    sandbox.write("m.json", "{\"mechanism\": \"softmax\"}");
    refused(&["attend", "--config", "pipe", "--input", "pipe", "--output", "out"]);
    refused(&["attend", "--config", "m.json", "--input", "pipe", "--output", "out"]);
    refused(&["analyze", "--input", "pipe", "--out", "out"]);
    refused(&["train", "--config", "./pipe", "--out", "out"]);
    refused(&["train", "--data", "images:pipe", "--out", "out"]);
}
