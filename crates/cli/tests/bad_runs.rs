//! `train`, `eval` and `compare` on malformed recipes, data, folders and checkpoints: one error line that names the
//! thing, and every file as it was.

mod support;

use std::{fs, path::PathBuf};

use support::{
    Outcome, Sandbox,
    tiny::{self, DATA, idx, train},
};

/// Runs the program and checks that it fails with `code` and one line that `says` these things, without changing a file.
#[track_caller]
fn refused(sandbox: &Sandbox, code: i32, args: &[&str], says: &[&str]) {
    let before = sandbox.snapshot();
    let outcome = sandbox.run(args);
    let line = outcome.failure(code);
    for part in says {
        assert!(line.contains(part), "`{line}` does not say `{part}`");
    }
    assert!(outcome.stdout.is_empty(), "{}", outcome.stdout);
    let after = sandbox.snapshot();
    assert!(after == before, "files changed: {:?}", after.keys());
}

#[test]
fn malformed_recipes_are_named_with_file_and_field() {
    let cases: [(&str, &[&str]); 29] = [
        ("[model", &["line 1"]),
        ("name = 'a'\nname = 'b'", &["duplicate key"]),
        ("modle = 1", &["`modle`"]),
        ("[model]\nwidth = 8", &["width"]),
        ("[model]\ndim = 'wide'", &["`model.dim`"]),
        ("[model]\npatch = 0", &["`model.patch`", "1 to 65536"]),
        ("[model]\npatch = -4", &["`model.patch`"]),
        ("[model]\npatch = 5\n[schedule]\nbatch_size = 8", &["16", "5"]),
        ("[model]\nheads = 5", &["`model.heads`", "divisor"]),
        ("[model]\ndepth = 0", &["`model.depth`"]),
        ("[model]\nmlp_dim = 1000000000000", &["`model.mlp_dim`"]),
        ("[model]\ndim = 65536\ndepth = 4096", &["`model`", "2^33"]),
        ("[schedule]\nepochs = 9223372036854775807", &["`schedule.epochs`"]),
        ("[model]\npool = 'max'", &["`model.pool`", "max"]),
        ("[model]\ndropout = 1.0", &["`model.dropout`", "[0, 1)"]),
        ("[optimiser]\nlr = 0", &["`optimiser.lr`", "> 0"]),
        ("[optimiser]\nlr = nan", &["`optimiser.lr`"]),
        ("[optimiser]\nbetas = [0.9]", &["`optimiser.betas"]),
        ("[optimiser]\nweight_decay = -1.0", &["`optimiser.weight_decay`"]),
        ("[schedule]\nepochs = 0", &["`schedule.epochs`"]),
        ("[schedule]\nbatch_size = 0", &["`schedule.batch_size`"]),
        ("[schedule]\nwarmup_epochs = 99", &["`schedule.warmup_epochs`"]),
        ("[schedule]\nmax_minutes = -1.0", &["`schedule.max_minutes`"]),
        ("[regularisation]\nlabel_smoothing = 1.0", &["`regularisation.label_smoothing`"]),
        ("[regularisation]\npatience = 3", &["`regularisation.patience`", "hold_out"]),
        ("[log]\nevery = 0", &["`log.every`"]),
        ("mechanism = 'hyena'", &["`hyena`", "linear-infsa"]),
        ("mechanism = { mechanism = 'infsa', gamma = 2.0 }", &["gamma", "[1e-12, 1]"]),
        ("data = 'imagenet:DIR'", &["imagenet", "cifar10"]),
    ];
    for (recipe, says) in cases {
        let sandbox = Sandbox::new();
        sandbox.write("bad.toml", recipe);
        let data: &[&str] = if recipe.starts_with("data") { &[] } else { &["--data", DATA] };
        refused(&sandbox, 1, &[&["train", "--config", "bad.toml", "--out", "run"], data].concat(), says);
    }
    let sandbox = Sandbox::new();
    sandbox.write("latin1.toml", b"name = '\xe9'");
    refused(&sandbox, 1, &["train", "--config", "no.toml"], &["no.toml", "not found"]);
    refused(&sandbox, 1, &["train", "--config", "latin1.toml"], &["latin1.toml", "UTF-8"]);
    refused(&sandbox, 1, &["compare", "--config", "no.toml"], &["no.toml"]);
    refused(&sandbox, 1, &["train", "--config", "imdb-paper"], &["`data`", "--data text:PATH"]);
    refused(&sandbox, 1, &["compare", "--config", "language"], &["`data`", "--data corpus:PATH"]);
    sandbox.write("m.json", r#"{"mechanism": "infsa", "gama": 1}"#);
    refused(&sandbox, 1, &["train", "--attention", "m.json"], &["m.json", "`gama`"]);
    refused(&sandbox, 1, &["train", "--attention", "no.json"], &["no.json", "not found"]);
    refused(&sandbox, 1, &["train", "--epochs", "0"], &["`schedule.epochs`"]);
    refused(&sandbox, 1, &["train", "--seed", "18446744073709551615"], &["`seed`", "at most"]);
}

#[test]
fn arguments_that_name_nothing_are_wrong_usage() {
    let sandbox = tiny::sandbox();
    let cases: [(&[&str], &str); 9] = [
        (&["train", "--data", "imagenet:DIR"], "imagenet"),
        (&["train", "--data", "mnist"], "mnist:PATH"),
        (&["train", "--data", "idx:a"], "IMAGES,LABELS"),
        (&["train", "--data", "shapes:difficulty=3"], "difficulty"),
        (&["eval", "--data", "shapes:colour=1"], "colour"),
        (&["train", "--attention", "hyena"], "hyena"),
        (&["train", "--epochs", "-1"], "-1"),
        (&["compare", "--mechanisms", "softmax,hyena"], "hyena"),
        (&["compare", "--seeds", "a,b"], "a"),
    ];
    for (args, says) in cases {
        refused(&sandbox, 2, args, &[says]);
    }
}

#[test]
fn options_that_say_nothing_beside_others_are_refused() {
    let sandbox = tiny::sandbox();
    let cases: [(&[&str], &str); 6] = [
        (&["explain", "--show", "0", "--query", "1,1"], "--query"),
        (&["completions", "bash", "--json"], "--json"),
        (&["generate", "--temperature", "0", "--top-k", "3"], "--top-k"),
        (&["generate", "--temperature", "0", "--top-p", "0.5"], "--top-p"),
        (&["compare", "--config", "tiny.toml", "--data", DATA, "--seeds", "1,5", "--seed", "4"], "--seed"),
        (&["train", "--data", "multi30k:tiny.toml"], "is a file, expected a folder"),
    ];
    for (args, says) in cases {
        refused(&sandbox, 1, args, &[says]);
    }
}

#[test]
fn options_of_another_kind_of_call_are_wrong_usage() {
    let sandbox = tiny::sandbox();
    let cases: [&[&str]; 8] = [
        &["eval", "--max-tokens", "9", "--image-size", "9"],
        &["eval", "--ablate", "0.5", "--image-size", "9"],
        &["eval", "--max-tokens", "9", "--ablate", "0.5"],
        &["eval", "--ablate-pairs", "--attention", "fna"],
        &["bench", "--tokens", "64", "--pixels", "32"],
        &["bench", "--heads", "2", "--joules"],
        &["analyze", "--full", "--cost", "operations"],
        &["analyze", "--path", "0,1", "--budget", "0.5"],
    ];
    for args in cases {
        refused(&sandbox, 2, args, &["cannot be used with"]);
    }
}

/// Four idx files of 12 pictures each, of which `edit` spoils one.
fn mnist(edit: fn(&Sandbox)) -> Sandbox {
    let sandbox = tiny::sandbox();
    fs::create_dir(sandbox.path("digits")).unwrap();
    for prefix in ["train", "t10k"] {
        let pixels: Vec<u8> = (0..12 * 64).map(|n| (n * 37 % 256) as u8).collect();
        sandbox.write(&format!("digits/{prefix}-images-idx3-ubyte"), idx(&[12, 8, 8], &pixels));
        sandbox.write(&format!("digits/{prefix}-labels-idx1-ubyte"), idx(&[12], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]));
    }
    edit(&sandbox);
    sandbox
}

#[test]
fn damaged_data_is_named() {
    const IMAGES: &str = "digits/train-images-idx3-ubyte";
    const LABELS: &str = "digits/t10k-labels-idx1-ubyte";
    let digits = |edit: fn(&Sandbox), says: &[&str]| {
        let args = ["train", "--config", "tiny.toml", "--data", "mnist:digits", "--out", "run"];
        refused(&mnist(edit), 1, &args, says);
    };
    digits(|s| fs::remove_file(s.path(IMAGES)).unwrap(), &["train-images", "not found"]);
    digits(|s| drop(s.write(IMAGES, b"")), &["train-images"]);
    digits(|s| drop(s.write(IMAGES, b"GIF89a, not idx")), &["train-images", "idx"]);
    digits(|s| drop(s.write(IMAGES, idx(&[12, 8, 8], &[0; 700]))), &["train-images", "768", "700"]);
    digits(|s| drop(s.write(IMAGES, idx(&[12, 8, 8], &[0; 769]))), &["train-images", "768"]);
    digits(|s| drop(s.write(IMAGES, idx(&[u32::MAX; 3], &[0; 99]))), &["train-images"]);
    digits(|s| drop(s.write(IMAGES, idx(&[11, 8, 8], &[0; 704]))), &["11 pictures", "12 labels"]);
    digits(|s| drop(s.write(IMAGES, [0x1f, 0x8b, 8, 0, 1, 2, 3])), &["train-images"]);
    digits(|s| drop(s.write(LABELS, idx(&[12], &[10; 12]))), &["t10k-labels", "label 10"]);
    digits(
        |s| {
            s.write(IMAGES, idx(&[0, 8, 8], &[]));
            s.write("digits/train-labels-idx1-ubyte", idx(&[0], &[]));
        },
        &["train-images", "no pictures"],
    );
    digits(|s| fs::write(s.path("tiny.toml"), "[model]\npatch = 3\n[schedule]\nbatch_size = 4").unwrap(), &["8", "3"]);

    let sandbox = mnist(|_| {});
    for data in
        ["mnist:nowhere", "fashion-mnist:tiny.toml", "cifar10:nowhere", "cifar10:digits", "idx:tiny.toml,tiny.toml"]
    {
        let path = data.split([':', ',']).nth(1).unwrap();
        refused(&sandbox, 1, &["train", "--data", data, "--out", "run"], &[path]);
    }
}

#[test]
fn damaged_pictures_are_named() {
    let sandbox = tiny::sandbox();
    fs::create_dir_all(sandbox.path("empty/cats")).unwrap();
    fs::create_dir_all(sandbox.path("pets/cats")).unwrap();
    fs::create_dir_all(sandbox.path("pets/dogs")).unwrap();
    for name in ["pets/cats/a.png", "pets/dogs/b.png", "pets/cats/c.png", "pets/dogs/d.png"] {
        sandbox.write(name, b"\x89PNG\r\n\x1a\n and then nothing");
    }
    sandbox.write("broken.zip", b"PK\x03\x04 and then nothing");
    sandbox.write("broken.tar.gz", [0x1f, 0x8b, 8, 0, 0, 0]);
    let train = |data: &str, says: &[&str]| {
        refused(&sandbox, 1, &["train", "--config", "tiny.toml", "--data", data, "--out", "run"], says);
    };
    train("images:nowhere", &["nowhere"]);
    train("images:empty", &["empty"]);
    train("images:pets", &["pets", ".png"]);
    train("images:broken.zip", &["broken.zip"]);
    train("images:broken.tar.gz", &["broken.tar.gz"]);
}

#[test]
fn folders_that_cannot_take_a_run_are_refused() {
    let sandbox = tiny::sandbox();
    sandbox.write("file", "precious");
    refused(&sandbox, 1, &train("file", &[]), &["file: is a file"]);
    refused(&sandbox, 1, &train("file/run", &[]), &["file: is a file"]);
    refused(&sandbox, 1, &train("run", &["--resume"]), &["run", "no checkpoint"]);
    refused(&sandbox, 1, &["eval", "--checkpoint", "run"], &["run", "no checkpoint"]);
    refused(&sandbox, 1, &["eval", "--checkpoint", "run", "--data", DATA], &["run", "no checkpoint"]);
    if cfg!(target_os = "linux") {
        refused(&sandbox, 1, &train("/proc/run", &[]), &["/proc/run"]);
    }
    for seeds in ["1,1", "0", "1000000000000", "18446744073709551615"] {
        let args = ["compare", "--config", "tiny.toml", "--data", DATA, "--out", "all", "--seeds", seeds];
        refused(&sandbox, 1, &args, &["seeds"]);
    }
    let args = ["compare", "--config", "tiny.toml", "--data", DATA, "--out", "all", "--mechanisms", "infsa,infsa"];
    refused(&sandbox, 1, &args, &["infsa"]);
}

/// The newest checkpoint below `run`.
fn newest(sandbox: &Sandbox, run: &str) -> PathBuf {
    let folders = fs::read_dir(sandbox.path(run).join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    folders.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("step-")).max().unwrap()
}

#[test]
fn foreign_and_damaged_checkpoints_are_refused() {
    let sandbox = tiny::sandbox();
    sandbox.run(&train("run", &[])).success();
    refused(&sandbox, 1, &train("run", &[]), &["run", "already holds a run"]);
    let resume = |more: &[&'static str], says: &[&str]| {
        refused(&sandbox, 1, &train("run", &[&["--resume"], more].concat()), says)
    };
    resume(&["--seed", "7"], &["seed", "7"]);
    resume(&["--attention", "infsa"], &["mechanism", "infsa"]);
    resume(&["--epochs", "1"], &["schedule.epochs", "1"]);
    let other = ["train", "--out", "run", "--resume", "--data", "shapes:seed=2,size=16,train=64,test=32"];
    refused(&sandbox, 1, &other, &["data"]);
    let eval = |more: &[&'static str], says: &[&str]| {
        refused(&sandbox, 1, &[&["eval", "--checkpoint", "run"], more].concat(), says)
    };
    eval(&["--max-tokens", "9"], &["pictures", "texts"]);
    eval(&["--data", "shapes:seed=1,size=32,train=8,test=8"], &["shapes"]);

    for entry in fs::read_dir(newest(&sandbox, "run")).unwrap() {
        let path = entry.unwrap().path();
        let (whole, name) = (fs::read(&path).unwrap(), path.file_name().unwrap().to_string_lossy().into_owned());
        // A run that is extended needs all of it, an evaluation the weights.
        let read = |says: &[&str]| {
            resume(&["--epochs", "9"], says);
            if name == "optimiser.bpk" {
                sandbox.run(&["eval", "--checkpoint", "run"]).success();
            } else {
                eval(&[], says);
            }
        };
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        read(&[&name]);
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 0x10;
        if name != "state.json" {
            fs::write(&path, &flipped).unwrap();
            read(&[&name, "checksum"]);
        }
        fs::remove_file(&path).unwrap();
        read(&[]);
        fs::write(&path, whole).unwrap();
    }
    sandbox.run(&["eval", "--checkpoint", "run"]).success();
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs root, to mount a small file system"]
fn a_full_disk_ends_a_run_and_keeps_its_checkpoints() {
    let sandbox = tiny::sandbox();
    let disk = sandbox.path("disk");
    fs::create_dir(&disk).unwrap();
    let mount =
        Outcome::of(std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&disk));
    assert_eq!(mount.code, Some(0), "the small file system that this test fills is not mounted: {}", mount.stderr);
    let outcome = sandbox.run(&train("disk/run", &["--epochs", "40"]));
    let unfinished = sandbox
        .snapshot()
        .into_keys()
        .filter(|path| path.strip_prefix(&disk).is_ok_and(|path| path.to_string_lossy().contains(".tmp")))
        .count();
    Outcome::of(std::process::Command::new("umount").arg(&disk)).success();
    let line = outcome.failure(1);
    assert!(line.contains("disk/run") && line.contains("No space left"), "{line}");
    assert_eq!(unfinished, 0, "a temporary file is left");
}
