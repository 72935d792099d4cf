//! `resolvent attend` on malformed input: one error line that names the thing, exit code 1, nothing written.

mod support;

use half::f16;
use safetensors::Dtype;
use support::{Outcome, Sandbox, Tensors, resolvent};

type Edit = fn(&mut Tensors) -> &mut Tensors;

/// A call that is right but for one thing.
struct Case {
    config: &'static str,
    edit: Edit,
    args: &'static [&'static str],
    /// What the error line must name.
    says: &'static [&'static str],
}

const INFSA: &str = r#"{"mechanism": "infsa"}"#;
const SOFTMAX: &str = r#"{"mechanism": "softmax"}"#;
const TIED: &str = r#"{"mechanism": "infsa", "tied": true}"#;
const RESOLVENT: &str = r#"{"mechanism": "infsa-resolvent"}"#;
const LINEAR: &str = r#"{"mechanism": "linear-infsa"}"#;
/// The shape of the tensors that each case starts from.
const SHAPE: [usize; 4] = [2, 3, 5, 4];

/// A configuration that is no mechanism.
fn config(config: &'static str, says: &'static [&'static str]) -> Case {
    Case { config, edit: |t| t, args: &[], says }
}

/// Tensors that make no call.
fn tensors(edit: Edit, says: &'static [&'static str]) -> Case {
    Case { config: INFSA, edit, args: &["--grad"], says }
}

/// A call that the mechanism does not define.
fn call(config: &'static str, edit: Edit, args: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case { config, edit, args, says }
}

/// Values of the size of `SHAPE`, one of which is `x`.
fn with(x: f32) -> Vec<f32> {
    let mut values = vec![0.5; SHAPE.iter().product()];
    values[7] = x;
    values
}

fn configs() -> Vec<Case> {
    vec![
        config("", &["bad.json", "not valid JSON"]),
        config(r#"{"mechanism": "infsa", "gamma": 0.5, "gamma": 0.9}"#, &["bad.json", "`gamma` is given twice"]),
        config("{\"mechanism\": ", &["bad.json", "not valid JSON"]),
        config("[1, 2]", &["bad.json", "expected an object"]),
        config("{}", &["`mechanism`", "missing"]),
        config(r#"{"mechanism": 3}"#, &["`mechanism`", "3"]),
        config(r#"{"mechanism": "hyena"}"#, &["`hyena`", "linear-infsa"]),
        config(r#"{"mechanism": "infsa", "gama": 0.9}"#, &["`gama`"]),
        config(r#"{"mechanism": "uniform", "scale": 1.0}"#, &["`scale`"]),
        config(r#"{"mechanism": "infsa", "gamma": "high"}"#, &["`gamma`", "high"]),
        config(r#"{"mechanism": "infsa", "gamma": null}"#, &["`gamma`"]),
        config(r#"{"mechanism": "infsa", "gamma": 0}"#, &["`gamma`", "[1e-12, 1]"]),
        config(r#"{"mechanism": "infsa", "gamma": 1.5}"#, &["`gamma`", "1.5", "[1e-12, 1]"]),
        config(r#"{"mechanism": "infsa-resolvent", "gamma": 1}"#, &["`gamma`", "[1e-12, 0.99999]"]),
        config(r#"{"mechanism": "infsa", "activation": "swish"}"#, &["`activation`", "swish", "gelu"]),
        config(r#"{"mechanism": "softmax", "scale": 0}"#, &["`scale`", "[1e-18, 1e18]"]),
        config(r#"{"mechanism": "softmax", "scale": -2}"#, &["`scale`", "-2"]),
        config(r#"{"mechanism": "infsa", "eps": -1e-6}"#, &["`eps`", "[1e-30, 1e30]"]),
        config(r#"{"mechanism": "infsa", "tied": 1}"#, &["`tied`"]),
        config(r#"{"mechanism": "infsa", "causal": "yes"}"#, &["`causal`"]),
        config(r#"{"mechanism": "infsa-resolvent", "tol": 0}"#, &["`tol`", "(0, 1)"]),
        config(r#"{"mechanism": "infsa-resolvent", "tol": 1}"#, &["`tol`", "(0, 1)"]),
        config(r#"{"mechanism": "infsa-resolvent", "max_iter": 0}"#, &["`max_iter`"]),
        config(r#"{"mechanism": "infsa-resolvent", "max_iter": -3}"#, &["`max_iter`"]),
        config(r#"{"mechanism": "linear-infsa", "iterations": 0}"#, &["`iterations`", "1 to 64"]),
        config(r#"{"mechanism": "linear-infsa", "iterations": 65}"#, &["`iterations`", "65"]),
        config(r#"{"mechanism": "linear-infsa", "operator": "dense"}"#, &["`operator`", "dense"]),
        config(r#"{"mechanism": "linear-infsa", "norm_bias": -0.1}"#, &["`norm_bias`"]),
        config(r#"{"mechanism": "linear-infsa", "norm_bias": "none"}"#, &["`norm_bias`", "auto"]),
        config(r#"{"mechanism": "linear-infsa", "broadcast": 0}"#, &["`broadcast`"]),
    ]
}

fn missing_and_misshapen() -> Vec<Case> {
    vec![
        tensors(|t| t.remove("q"), &["`q`", "missing"]),
        tensors(|t| t.remove("k"), &["`k`", "missing"]),
        tensors(|t| t.remove("v"), &["`v`", "missing"]),
        tensors(|t| t.remove("dout"), &["`dout`", "missing", "--grad"]),
        tensors(|t| t.noise("q", &[60, 2, 1, 1, 1], 0), &["`q`", "[60, 2, 1, 1, 1]"]),
        tensors(|t| t.noise("q", &[120], 0), &["`q`", "[120]"]),
        tensors(|t| t.noise("q", &[2, 3, 0, 4], 0), &["`q`", "[2, 3, 0, 4]", "empty"]),
        tensors(|t| t.noise("v", &[2, 0, 5, 4], 0), &["`v`", "[2, 0, 5, 4]", "empty"]),
        tensors(|t| t.noise("k", &[1, 3, 5, 4], 0), &["k [1, 3, 5, 4]", "q [2, 3, 5, 4]"]),
        tensors(|t| t.noise("k", &[2, 1, 5, 4], 0), &["k [2, 1, 5, 4]", "v [2, 3, 5, 4]"]),
        tensors(|t| t.noise("k", &[2, 3, 5, 8], 0), &["k [2, 3, 5, 8]", "head_dim"]),
        tensors(|t| t.noise("k", &[2, 3, 6, 4], 0), &["k [2, 3, 6, 4]", "seq_kv"]),
        tensors(|t| t.noise("k", &[3, 5, 4], 0), &["k [3, 5, 4]", "q [2, 3, 5, 4]"]),
        tensors(|t| t.noise("v", &[2, 2, 5, 4], 0), &["v [2, 2, 5, 4]", "q [2, 3, 5, 4]"]),
        tensors(|t| t.noise("dout", &[2, 3, 5, 3], 0), &["`dout`", "[2, 3, 5, 3]", "[2, 3, 5, 4]"]),
        tensors(|t| t.noise("dout", &[3, 5, 4], 0), &["`dout`", "[3, 5, 4]"]),
        tensors(|t| t.f32("gamma", &[2], &[0.5; 2]), &["`gamma`", "[2]", "[3]"]),
        tensors(|t| t.f32("gamma", &[3, 1], &[0.5; 3]), &["`gamma`", "[3, 1]"]),
        tensors(|t| t.u8("key_mask", &[2, 4], &[1; 8]), &["`key_mask`", "[2, 4]", "[2, 5]"]),
        tensors(|t| t.u8("key_mask", &[5], &[1; 5]), &["`key_mask`", "[5]", "[2, 5]"]),
        tensors(|t| t.u8("query_mask", &[1, 5], &[1; 5]), &["`query_mask`", "[1, 5]", "[2, 5]"]),
        tensors(|t| t.u8("query_mask", &[2, 5, 1], &[1; 10]), &["`query_mask`", "[2, 5, 1]"]),
    ]
}

fn bad_values() -> Vec<Case> {
    vec![
        tensors(|t| t.f32("q", &SHAPE, &with(f32::NAN)), &["`q`", "NaN", "index 7"]),
        tensors(|t| t.f32("k", &SHAPE, &with(f32::INFINITY)), &["`k`", "inf", "index 7"]),
        tensors(|t| t.f32("v", &SHAPE, &with(f32::NEG_INFINITY)), &["`v`", "-inf", "index 7"]),
        tensors(|t| t.f32("dout", &SHAPE, &with(f32::NAN)), &["`dout`", "NaN", "index 7"]),
        tensors(
            |t| t.u8("key_mask", &[2, 5], &[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]).f32("v", &SHAPE, &with(f32::NAN)),
            &["`v`", "NaN"], // a mask does not hide it
        ),
        tensors(
            |t| {
                t.raw(
                    "q",
                    Dtype::F16,
                    &SHAPE,
                    with(1e30).iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
                )
            },
            &["`q`", "inf", "index 7"],
        ),
        tensors(|t| t.f32("gamma", &[3], &[0.5, f32::NAN, 0.5]), &["`gamma`", "NaN", "index 1"]),
        tensors(|t| t.f32("gamma", &[3], &[0.5, 1.25, 0.5]), &["`gamma`", "1.25", "[1e-12, 1]"]),
        tensors(|t| t.f32("gamma", &[3], &[0.0; 3]), &["`gamma`", "[1e-12, 1]"]),
        tensors(|t| t.u8("key_mask", &[2, 5], &[1, 1, 1, 2, 1, 1, 1, 1, 1, 1]), &["`key_mask`", "2", "index 3"]),
        tensors(|t| t.u8("query_mask", &[2, 5], &[255; 10]), &["`query_mask`", "255", "index 0"]),
        tensors(|t| t.f32("key_mask", &[2, 5], &[1.0; 10]), &["`key_mask`", "F32", "U8"]),
        tensors(|t| t.raw("q", Dtype::F64, &SHAPE, vec![0; 960]), &["`q`", "F64", "--reference"]),
        tensors(|t| t.raw("k", Dtype::I32, &SHAPE, vec![0; 480]), &["`k`", "I32", "F32"]),
        tensors(|t| t.raw("gamma", Dtype::F64, &[3], vec![0; 24]), &["`gamma`", "F64"]),
    ]
}

fn undefined_calls() -> Vec<Case> {
    let cross: Edit = |t| t.noise("q", &[2, 3, 4, 4], 9).noise("dout", &[2, 3, 4, 4], 9);
    // Terabytes, that no machine gives: of what is drawn, and of gradients.
    const LARGE: &str = r#"{"mechanism": "linformer", "count": 65536, "per_head": true, "max_tokens": 16777216}"#;
    vec![
        call(LARGE, |t| t, &[], &["GB of memory", "fewer tokens"]),
        call(LARGE, |t| t, &["--grad"], &["GB of memory"]),
        call(LARGE, |t| t, &["--reference"], &["GB of memory"]),
        call(TIED, |t| t, &[], &["`k`", "tied"]),
        call(
            TIED,
            |t| t.remove("k").noise("v", &[2, 1, 5, 4], 3),
            &[],
            &["the mechanism is tied", "heads and tokens of q"],
        ),
        call(TIED, |t| t.remove("k").noise("v", &[2, 3, 6, 4], 0), &[], &["v [2, 3, 6, 4]", "q [2, 3, 5, 4]"]),
        call(RESOLVENT, |t| t, &["--causal"], &["`infsa-resolvent`", "causal"]),
        call(LINEAR, |t| t, &["--causal"], &["`linear-infsa`", "causal"]),
        call(r#"{"mechanism": "linear-infsa", "causal": true}"#, |t| t, &[], &["`linear-infsa`", "causal"]),
        call(RESOLVENT, cross, &[], &["`infsa-resolvent`", "cross-attention"]),
        call(r#"{"mechanism": "linear-infsa", "iterations": 2}"#, cross, &[], &["`linear-infsa`", "iterations"]),
        call(INFSA, cross, &["--causal"], &["`infsa`", "causal", "seq_q != seq_kv"]),
        call(RESOLVENT, |t| t.f32("gamma", &[3], &[0.5, 1.0, 0.5]), &[], &["`gamma`", "[1e-12, 0.99999]"]),
        call(
            r#"{"mechanism": "infsa-resolvent", "gamma": 0.99, "max_iter": 1}"#,
            |t| t,
            &[],
            &["`infsa-resolvent`", "did not converge", "max_iter"],
        ),
    ]
}

/// Sequences that are none, or not of these tokens. A case's tensors are a batch of two: where the bounds are right, that is wrong.
fn sequences() -> Vec<Case> {
    fn bounds<'a>(t: &'a mut Tensors, name: &str, x: &[i64]) -> &'a mut Tensors {
        t.raw(name, Dtype::I64, &[x.len()], x.iter().flat_map(|x| x.to_le_bytes()).collect())
    }
    fn one(t: &mut Tensors) -> &mut Tensors {
        let shape = [1, 3, 5, 4];
        t.noise("q", &shape, 1).noise("k", &shape, 2).noise("v", &shape, 3)
    }
    let plain = |edit: Edit, says| Case { config: SOFTMAX, edit, args: &[], says };
    vec![
        plain(|t| bounds(t, "cu_seqlens", &[0, 2, 5]), &["cu_seqlens", "2 batch entries"]),
        plain(|t| bounds(one(t), "cu_seqlens", &[0, 2, 4]), &["cu_seqlens", "4 queries"]),
        plain(|t| bounds(one(t), "cu_seqlens", &[0, 2, 2, 5]), &["tensor `cu_seqlens` is", "ever larger"]),
        plain(|t| bounds(one(t), "cu_seqlens", &[1, 5]), &["tensor `cu_seqlens` is", "ever larger"]),
        plain(|t| bounds(one(t), "cu_seqlens", &[0, -2, 5]), &["`cu_seqlens`", "-2"]),
        plain(|t| bounds(one(t), "cu_seqlens", &[]), &["tensor `cu_seqlens` is"]),
        plain(|t| bounds(one(t), "cu_seqlens_k", &[0, 5]), &["`cu_seqlens`", "missing"]),
        plain(
            |t| bounds(bounds(one(t), "cu_seqlens", &[0, 2, 5]), "cu_seqlens_k", &[0, 5]),
            &["tensor `cu_seqlens_k` is", "1 sequences"],
        ),
        plain(|t| one(t).f32("cu_seqlens", &[2], &[0.0, 5.0]), &["`cu_seqlens`", "I64 or I32"]),
        Case {
            args: &["--weights"],
            ..plain(|t| bounds(one(t), "cu_seqlens", &[0, 2, 5]), &["cu_seqlens", "--weights"])
        },
        Case {
            config: r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#,
            ..plain(
                |t| bounds(one(t), "cu_seqlens", &[0, 2, 5]).f32("bias", &[1, 3, 5, 5], &[0.0; 75]),
                &["bias tensor", "alibi"],
            )
        },
        Case {
            args: &["--reference"],
            config: r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#,
            ..plain(
                |t| bounds(one(t), "cu_seqlens", &[0, 2, 5]).f32("bias", &[1, 3, 5, 5], &[0.0; 75]),
                &["bias tensor", "alibi"],
            )
        },
        Case {
            config: r#"{"mechanism": "softmax", "bias": {"kind": "grid", "height": 1, "width": 2}}"#,
            ..plain(|t| bounds(one(t), "cu_seqlens", &[0, 2, 5]), &["sequence 1", "grid"])
        },
        Case {
            config: r#"{"mechanism": "linear-infsa", "broadcast": false}"#,
            ..plain(|t| bounds(one(t), "cu_seqlens", &[0, 2, 5]), &["broadcast"])
        },
    ]
}

#[test]
fn every_malformed_call_is_refused_and_named() {
    let cases = [configs(), missing_and_misshapen(), bad_values(), undefined_calls(), sequences()];
    for Case { config, edit, args, says } in cases.into_iter().flatten() {
        let sandbox = Sandbox::new();
        let mut tensors = Tensors::call(&SHAPE);
        edit(&mut tensors);
        sandbox.write("bad.json", config);
        sandbox.write("bad.safetensors", tensors.file());
        sandbox.write("out.safetensors", "precious");
        let mut command = vec!["attend", "--config", "bad.json", "--input", "bad.safetensors"];
        command.extend(["--output", "out.safetensors"]);
        command.extend(args);
        refused(&sandbox, &command, says);
    }
}

/// Runs the program and checks that it fails with one line that `says` these things, and that no file has changed.
#[track_caller]
fn refused(sandbox: &Sandbox, args: &[&str], says: &[&str]) {
    let before = sandbox.snapshot();
    let outcome = sandbox.run(args);
    let line = outcome.failure(1);
    for part in says {
        assert!(line.contains(part), "`{line}` does not say `{part}`");
    }
    assert!(outcome.stdout.is_empty(), "{}", outcome.stdout);
    assert!(sandbox.snapshot() == before, "files changed: {:?}", sandbox.snapshot().keys());
}

/// A folder with a right `m.json` and `in.safetensors`.
fn ready() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("m.json", SOFTMAX);
    sandbox.write("in.safetensors", Tensors::call(&SHAPE).file());
    sandbox
}

fn attend<'a>(config: &'a str, input: &'a str, output: &'a str) -> [&'a str; 7] {
    ["attend", "--config", config, "--input", input, "--output", output]
}

#[test]
fn damaged_and_missing_files_are_named() {
    let whole = Tensors::call(&SHAPE).file();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut text = whole.clone();
    text[8] = b'x';
    let mut long_header = whole.clone();
    long_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let files: [(&[u8], &str); 8] = [
        (b"", "no valid safetensors"),
        (b"PK\x03\x04", "no valid safetensors"),
        (b"PK\x03\x04 a zip archive, or anything else", "no valid safetensors"),
        (&whole[..whole.len() - 1], "cut off"),
        (&whole[..header], "cut off"),
        (&[&whole[..], b"more"].concat(), "appended"),
        (&text, "JSON"),
        (&long_header, "no valid safetensors"),
    ];
    for (bytes, says) in files {
        let sandbox = ready();
        sandbox.write("bad.safetensors", bytes);
        refused(&sandbox, &attend("m.json", "bad.safetensors", "out.safetensors"), &["bad.safetensors", says]);
    }
    let sandbox = ready();
    sandbox.write("latin1.json", b"{\"mechanism\": \"\xe9\"}");
    refused(&sandbox, &attend("no.json", "in.safetensors", "out"), &["no.json", "not found"]);
    refused(&sandbox, &attend("latin1.json", "in.safetensors", "out"), &["latin1.json", "UTF-8"]);
    refused(&sandbox, &attend("m.json", "no.safetensors", "out"), &["no.safetensors", "not found"]);
    refused(&sandbox, &attend("m.json", ".", "out"), &["expected a file"]);
}

#[test]
fn an_output_that_cannot_be_is_refused_before_the_work() {
    let sandbox = ready();
    std::fs::create_dir(sandbox.path("folder")).unwrap();
    refused(&sandbox, &attend("m.json", "in.safetensors", "no/out.safetensors"), &["no/out", "`no`", "create"]);
    refused(&sandbox, &attend("m.json", "in.safetensors", "folder"), &["folder", "is a folder"]);
    refused(&sandbox, &attend("m.json", "in.safetensors", "m.json/out"), &["m.json/out"]);
    refused(&sandbox, &attend("m.json", "in.safetensors", "in.safetensors"), &["also an input"]);
    refused(&sandbox, &attend("m.json", "in.safetensors", "./folder/../m.json"), &["also an input"]);
    if cfg!(target_os = "linux") {
        refused(&sandbox, &attend("m.json", "in.safetensors", "/dev/full"), &["/dev/full", "no ordinary file"]);
        refused(&sandbox, &attend("m.json", "in.safetensors", "/proc/out"), &["/proc/out", "cannot write"]);
    }
}

#[cfg(unix)]
#[test]
fn a_link_to_an_input_is_the_input() {
    let sandbox = ready();
    std::os::unix::fs::symlink("in.safetensors", sandbox.path("link")).unwrap();
    refused(&sandbox, &attend("m.json", "in.safetensors", "link"), &["link", "also an input"]);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs root, to mount a small file system"]
fn a_full_disk_leaves_nothing_behind() {
    let sandbox = ready();
    let disk = sandbox.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount =
        Outcome::of(std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=4k", "tmpfs"]).arg(&disk));
    assert_eq!(mount.code, Some(0), "the small file system that this test fills is not mounted: {}", mount.stderr);
    sandbox.write("disk/precious", "earlier file");
    let outcome = sandbox.run(&attend("m.json", "in.safetensors", "disk/out.safetensors"));
    let left: Vec<_> = std::fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    Outcome::of(std::process::Command::new("umount").arg(&disk)).success();
    let line = outcome.failure(1);
    assert!(line.contains("disk/out.safetensors") && line.contains("No space left"), "{line}");
    assert_eq!(left, ["precious"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_an_error_and_a_closed_one_is_not() {
    use std::process::Stdio;
    let sandbox = ready();
    let attend = |out: Stdio| {
        let args = attend("m.json", "in.safetensors", "out.safetensors");
        Outcome::of(resolvent().current_dir(sandbox.path(".")).args(args).stdout(out).stderr(Stdio::piped()))
    };
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    assert!(attend(full.into()).failure(1).contains("standard output"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    attend(writer.into()).success();
}

#[test]
fn an_unknown_instruction_set_is_named() {
    let sandbox = ready();
    let args = attend("m.json", "in.safetensors", "out.safetensors");
    let outcome = Outcome::of(resolvent().env("RESOLVENT_SIMD", "mmx").current_dir(sandbox.path(".")).args(args));
    assert!(outcome.failure(1).contains("RESOLVENT_SIMD"));
    assert!(!sandbox.path("out.safetensors").exists());
}
