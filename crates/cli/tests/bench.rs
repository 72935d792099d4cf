//! `resolvent bench` on sizes that take no time: what it writes, and what it refuses. No time is asserted.

mod support;

#[cfg(unix)]
use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
};

use serde_json::Value;
use support::{Outcome, Sandbox, resolvent};

/// `resolvent bench` on calls of one head of 4 channels, run once, into `out` of the sandbox; with `more` arguments.
fn bench(sandbox: &Sandbox, tokens: &str, more: &[&str]) -> Outcome {
    let args = ["bench", "--tokens", tokens, "--heads", "1", "--head-dim", "4", "--rounds", "1", "--out", "out"];
    sandbox.run(&[&args[..], more].concat())
}

#[test]
fn measures_every_mechanism_and_compares_two_runs() {
    let sandbox = Sandbox::new();
    let run = |name: &str| {
        let out = sandbox.path(name);
        let mut command = resolvent();
        command.args([
            "bench",
            "--tokens",
            "16,24",
            "--heads",
            "2",
            "--head-dim",
            "8",
            "--rounds",
            "2",
            "--turn",
            "0",
            "--json",
        ]);
        let text = Outcome::of(command.arg("--out").arg(&out)).success();
        let json: Value = serde_json::from_str(&text.stdout).unwrap();
        assert_eq!(std::fs::read_to_string(out.join("bench.json")).unwrap().trim(), text.stdout.trim());
        (out, json)
    };
    let (first, json) = run("first");
    let (second, _) = run("second");
    for check in json["checks"].as_array().unwrap().iter().chain(json["rivals"].as_array().unwrap()) {
        assert_eq!(check["passed"], true, "{check}");
    }
    let points = json["points"].as_array().unwrap();
    let rivals = points.iter().filter(|point| point["rival_of"] == "softmax" && point["label"] == "burn softmax");
    assert_eq!(rivals.count(), 2);
    let all = ["checks", "rivals"].map(|kind| json[kind].as_array().unwrap().len()).iter().sum::<usize>();
    assert_eq!(points.len(), 2 * all);
    for point in points {
        assert!(point["training"]["median"].as_f64().unwrap() > 0.0, "{point}");
        assert!(point["forward"]["peak_bytes"].is_u64(), "{point}");
    }
    let page = std::fs::read_to_string(first.join("report.html")).unwrap();
    assert!(page.contains("linear-infsa") && !page.contains("NaN") && !page.contains("http"));

    let mut compare = resolvent();
    compare.args(["bench", "--compare"]).arg(first.join("bench.json")).arg(second.join("bench.json"));
    let text = Outcome::of(&mut compare).success().stdout;
    assert!(text.contains("softmax at 16 tokens, forward + backward: "), "{text}");
}

#[test]
fn rows_say_what_precision_ran_and_by_which_instructions() {
    let sandbox = Sandbox::new();
    let args =
        ["bench", "--tokens", "16", "--heads", "1", "--head-dim", "8", "--rounds", "1", "--turn", "0", "--out", "out"];
    let more = ["--mechanisms", "softmax,linear", "--no-rivals", "--precision", "bf16"];
    let text = sandbox.run(&[&args[..], &more].concat()).success().stdout;
    assert!(text.contains("; bf16 precision by "), "{text}");
    assert!(text.contains("; full precision by ") && text.contains("(sums over as many features"), "{text}");
    let json: Value = serde_json::from_slice(&std::fs::read(sandbox.path("out/bench.json")).unwrap()).unwrap();
    let plans: Vec<_> = json["points"].as_array().unwrap().iter().map(|point| &point["plan"]).collect();
    assert_eq!((&plans[0]["precision"], &plans[1]["precision"]), (&"bf16".into(), &"full".into()), "{json}");
    assert!(plans.iter().all(|plan| !plan["instructions"].as_str().unwrap().is_empty()), "{json}");
    // What ran in another precision is another call.
    sandbox.run(&[&args[..args.len() - 1], &["full"], &more[..3]].concat()).success();
    let told = sandbox.run(&["bench", "--compare", "full/bench.json", "out/bench.json"]).success().stdout;
    assert!(told.contains("softmax at 16 tokens is only in the one before"), "{told}");
    assert!(!told.contains("softmax at 16 tokens, forward") && told.contains("linear at 16 tokens, forward"), "{told}");
}

/// A benchmark of seven sizes that got a signal when it had measured two: how it ended, its result and its report.
#[cfg(unix)]
fn stopped(signal: &str) -> (Outcome, Value, String) {
    let sandbox = Sandbox::new();
    let mut command = resolvent();
    command.args(["bench", "--tokens", "8,12,16,20,24,28,32", "--heads", "1", "--head-dim", "4", "--turn", "100"]);
    command.args(["--mechanisms", "uniform", "--no-rivals", "--out"]).arg(sandbox.path("out"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut lines, mut stderr) = (BufReader::new(child.stderr.take().unwrap()), String::new());
    while !stderr.contains("uniform at 12 tokens") {
        assert_ne!(lines.read_line(&mut stderr).unwrap(), 0, "ended before it was stopped: {stderr}");
    }
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
    lines.read_to_string(&mut stderr).unwrap();
    let outcome = Outcome { code: child.wait().unwrap().code(), stdout: String::new(), stderr };
    let json = serde_json::from_slice(&std::fs::read(sandbox.path("out/bench.json")).unwrap()).unwrap();
    (outcome, json, std::fs::read_to_string(sandbox.path("out/report.html")).unwrap())
}

#[cfg(unix)]
#[test]
fn what_was_measured_before_the_end_is_kept() {
    let (outcome, json, report) = stopped("-INT");
    let line = outcome.failure(130);
    assert!(line.contains("bench.json has the first"), "{line}");
    let measured = json["points"].as_array().unwrap().len();
    assert!(json["interrupted"] == true && (2..7).contains(&measured), "{json}");
    assert!(report.contains("Stopped before"));
    // Killed, it had no time to write anything: the first size was written when it was measured.
    let (outcome, json, report) = stopped("-KILL");
    let measured = json["points"].as_array().unwrap().len();
    assert!(outcome.code.is_none() && json["interrupted"] == true && (1..7).contains(&measured), "{json}");
    assert!(report.contains("Stopped before"));
}

/// A stand-in for an interpreter, which answers as told.
#[cfg(unix)]
fn peer(sandbox: &Sandbox, name: &str, script: &str) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = sandbox.write(name, format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A benchmark of softmax beside a peer: its result, and what it said.
#[cfg(unix)]
fn beside(sandbox: &Sandbox, python: &std::path::Path) -> (Value, String) {
    let python = python.to_str().unwrap();
    let more = ["--mechanisms", "softmax", "--no-rivals", "--json", "--peer-timeout", "1", "--peers", python];
    let outcome = bench(sandbox, "8", &more).success();
    (outcome.json(), outcome.stderr)
}

#[cfg(unix)]
#[test]
fn a_peer_that_fails_is_told_of_and_ours_is_measured() {
    let sandbox = Sandbox::new();
    let way = r#"{"way": "eager", "label": "torch eager", "dtype": "float32", "trains": true}"#;
    let hello = format!(r#"read x; echo '{{"versions": {{"torch": "9"}}, "ways": {{"softmax": [{way}]}}}}'"#);
    let cases = [
        (sandbox.path("nowhere"), "cannot be started"),
        (peer(&sandbox, "lacks", "echo 'ModuleNotFoundError: torch' >&2; exit 1"), "ModuleNotFoundError: torch"),
        (peer(&sandbox, "silent", "exec sleep 100"), "did not answer within 1 s"),
        (peer(&sandbox, "other", "while read x; do echo hello; done"), "not JSON"),
        (peer(&sandbox, "echo", "exec cat"), "not as expected"),
        (peer(&sandbox, "crash", &format!("{hello}; read x; kill -9 $$")), "ended (signal: 9"),
        (
            peer(&sandbox, "refuses", &format!("{hello}; while read x; do echo '{{\"error\": \"no formula\"}}'; done")),
            "no formula",
        ),
        (
            peer(
                &sandbox,
                "wrong",
                &format!("{hello}; while read x; do echo '{{\"out\": \"\", \"dq\": \"\", \"dv\": \"\"}}'; done"),
            ),
            "its tensors are not of this size",
        ),
    ];
    for (python, expected) in cases {
        let (json, said) = beside(&sandbox, &python);
        assert!(said.contains(expected) && !said.contains("panicked"), "{}: {said}", python.display());
        assert_eq!((json["rivals"].as_array().unwrap().len(), json["rivals"][0]["passed"].as_bool()), (1, Some(false)));
        assert!(json["points"][0]["training"]["median"].as_f64().unwrap() > 0.0);
        assert_eq!(json["points"].as_array().unwrap().len(), 1, "what differs is not timed");
    }
    // Refused checks have no distances; what was written can be read again.
    let file = sandbox.path("out").join("bench.json");
    Outcome::of(resolvent().args(["bench", "--compare"]).arg(&file).arg(&file)).success();
}

#[test]
fn the_calibration_is_kept_and_told() {
    let sandbox = Sandbox::new();
    let run = |cache: &std::path::Path| {
        let mut command = resolvent();
        command.args(["bench", "--tokens", "8", "--heads", "1", "--head-dim", "4", "--rounds", "1", "--json"]);
        command.args(["--mechanisms", "uniform"]).env_remove("RESOLVENT_CALIBRATION").env("XDG_CACHE_HOME", cache);
        let outcome = Outcome::of(command.arg("--out").arg(sandbox.path("out"))).success();
        (outcome.json()["calibration"].clone(), outcome.stderr)
    };
    let (first, said) = run(&sandbox.path("cache"));
    assert!(said.contains("calibration: ") && said.contains("auto: "), "{said}");
    assert!(first["crossings"]["infsa-resolvent"]["sizes"][0]["fused"][0].as_f64().unwrap() > 0.0);
    let (second, said) = run(&sandbox.path("cache"));
    assert!(first == second && !said.contains("calibration: "), "{said}");
    assert!(sandbox.path("cache/resolvent/calibration.json").is_file());
    let file = sandbox.write("file", "");
    let (measured, said) = run(&file);
    assert!(measured["crossings"].is_object() && said.contains("not kept"), "{said}");
}

#[test]
fn refuses_what_it_cannot_measure() {
    let sandbox = Sandbox::new();
    let not_ours = sandbox.write("other.json", "{}");
    let cases: [(&[&str], &str); 8] = [
        (&["--mechanisms", "fna,softmax,fna"], "`fna` twice"),
        (&["--tokens", "0"], "tokens"),
        (&["--heads", "0"], "heads"),
        (&["--rounds", "0"], "rounds"),
        (&["--max-seconds=-1"], "max-seconds"),
        (&["--max-seconds", "-1"], "`max-seconds` is -1, must be above 0"),
        (
            &["--tokens", "256", "--head-dim", "100000000"],
            "`tokens x batch x heads x head-dim` is 256 x 1 x 8 x 100000000",
        ),
        (&["--tokens", "99999999999"], "tokens"),
    ];
    for (args, named) in cases {
        let mut command = resolvent();
        command.arg("bench").args(args).arg("--out").arg(sandbox.path("out"));
        let outcome = Outcome::of(&mut command);
        assert!(outcome.failure(1).contains(named), "{args:?}");
        assert!(!sandbox.path("out").exists(), "{args:?} leaves a folder");
    }
    std::fs::create_dir(sandbox.path("out")).unwrap();
    let compare = |more: &[&str]| {
        let mut command = resolvent();
        command.args(["bench", "--compare"]).arg(&not_ours).arg(&not_ours).args(more);
        Outcome::of(&mut command)
    };
    assert!(compare(&[]).failure(1).contains("is no bench.json of operators"));
    assert!(compare(&["--tokens", "5"]).failure(2).contains("cannot be used with '--tokens"));
    let page = sandbox.write("out/report.html", "of a training run");
    let mut command = resolvent();
    command.args(["bench", "--tokens", "16", "--out"]).arg(sandbox.path("out"));
    assert!(Outcome::of(&mut command).failure(1).contains("is the report of another command"));
    assert_eq!(std::fs::read_to_string(page).unwrap(), "of a training run");
}

/// What no machine holds is refused with what it takes, before anything is allocated.
#[test]
fn sizes_beyond_the_memory_are_refused() {
    let sandbox = Sandbox::new();
    let wide = ["--mechanisms", "softmax,infsa", "--tokens", "16", "--head-dim", "100000000", "--no-rivals"];
    let outcome = sandbox.run(&[&["bench", "--out", "out"], &wide[..]].concat());
    let line = outcome.failure(1);
    assert!(line.contains("the comparison with the reference takes 729.6 GB") && line.contains("--head-dim"), "{line}");
}

/// One mechanism in several configurations, each by its file's name, in tables and report.
#[test]
fn configurations_have_their_names() {
    let sandbox = Sandbox::new();
    let narrow = sandbox.write("narrow.json", r#"{"mechanism": "fna", "alpha": 1.2}"#);
    let wide = sandbox.write("wide.json", r#"{"mechanism": "fna", "alpha": 1.6}"#);
    let named = format!("softmax,{},{}", narrow.display(), wide.display());
    let text = bench(&sandbox, "16", &["--turn", "0", "--no-rivals", "--mechanisms", &named]).success().stdout;
    assert!(text.contains("narrow") && text.contains("wide") && text.contains("At 16 tokens "), "{text}");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(sandbox.path("out/bench.json")).unwrap()).unwrap();
    let alphas: Vec<_> =
        json["points"].as_array().unwrap().iter().map(|p| (&p["label"], &p["mechanism"]["alpha"])).collect();
    assert_eq!(alphas[1..], [(&"narrow".into(), &1.2.into()), (&"wide".into(), &1.6.into())]);
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("class=\"verdict\">At 16 tokens "));
}
