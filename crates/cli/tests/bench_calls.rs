//! `resolvent bench` of calls beside the usual: shared heads, layouts, sequences end to end, mechanisms with tensors of their own. No time is
//! asserted.

mod support;

use serde_json::Value;
use support::{Outcome, Sandbox};

/// A benchmark that takes as little time as any, into `out` of the sandbox.
fn bench(sandbox: &Sandbox, more: &[&str]) -> Outcome {
    let args = ["bench", "--head-dim", "4", "--rounds", "1", "--turn", "0", "--json", "--out", "out"];
    sandbox.run(&[&args[..], more].concat())
}

/// Whether everything of ours was found right and measured, both passes.
#[track_caller]
fn measured(json: &Value) -> &Vec<Value> {
    for check in json["checks"].as_array().unwrap() {
        assert!(check["passed"] == true && check["backward"].is_f64(), "{check}");
    }
    let points = json["points"].as_array().unwrap();
    let (ours, rivals): (Vec<_>, Vec<_>) = points.iter().partition(|point| point["rival_of"].is_null());
    assert!(rivals.iter().all(|point| point["skipped"].is_null()), "{rivals:?}");
    assert_eq!(ours.len(), json["checks"].as_array().unwrap().len());
    for point in ours {
        assert!(point["forward"]["median"].is_f64() && point["training"]["median"].is_f64(), "{point}");
        assert!(!point["plan"]["instructions"].as_str().unwrap().is_empty() && point["dtype"] == "float32", "{point}");
    }
    points
}

/// Presets that read and write in place, that gather, that pool, whose keys are queries, and that read values alone.
const KINDS: &str = "softmax,infsa,fna,linear-infsa,infsa-resolvent,ssa,soft,laplacian,uniform";

#[test]
fn shared_heads_and_layouts() {
    let sandbox = Sandbox::new();
    // Of tied presets every head of queries is one of keys.
    let untied = ["--mechanisms", "softmax,infsa,ssa,laplacian", "--heads", "4", "--kv-heads", "2"];
    let all = ["--mechanisms", KINDS, "--heads", "2"];
    for layout in ["heads", "tokens", "packed"] {
        for calls in [&untied[..], &all[..]] {
            let args = [calls, &["--tokens", "24", "--batch", "2", "--layout", layout]].concat();
            let outcome = bench(&sandbox, &args).success();
            let json = outcome.json();
            measured(&json);
            assert_eq!(json["arrangement"]["layout"], layout);
            // Burn's own attention is there where it takes such a call, else it is said why not.
            let plain = layout == "heads" && calls.len() == all.len();
            let burn = &json["rivals"].as_array().unwrap()[0];
            assert_eq!((&burn["label"], &burn["passed"]), (&"burn softmax".into(), &plain.into()), "{burn}");
            assert_eq!(outcome.stderr.contains("leave out --kv-heads, --layout and --sequences"), !plain);
        }
    }
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("layout `packed`") && !page.contains("heads of keys and values"));
}

/// Of several arrangements each is compared and measured as a mechanism is, under a name that says what it is.
#[test]
fn several_arrangements_are_measured() {
    let sandbox = Sandbox::new();
    let calls = ["--mechanisms", "softmax,infsa", "--heads", "4", "--tokens", "24"];
    let json =
        bench(&sandbox, &[&calls[..], &["--layout", "heads,packed", "--kv-heads", "4,2"]].concat()).success().json();
    let ours: Vec<&Value> = measured(&json).iter().filter(|point| point["rival_of"].is_null()).collect();
    assert_eq!(json["arrangement"], serde_json::json!({"kv_heads": null, "layout": "heads", "sequences": []}));
    let labels: Vec<&str> = ours.iter().map(|point| point["label"].as_str().unwrap()).collect();
    let of = |id: &str| {
        ["4 heads of keys and values", "2 heads of keys and values"]
            .iter()
            .map(|heads| format!("{id} ({heads})"))
            .chain([4, 2].iter().map(|n| format!("{id} ({n} heads of keys and values, layout `packed`)")))
            .collect::<Vec<_>>()
    };
    assert_eq!(labels, [of("softmax"), of("infsa")].concat());
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("softmax (2 heads of keys and values, layout `packed`)"));
    let twice = bench(&sandbox, &[&calls[..], &["--layout", "packed,packed"]].concat());
    assert!(twice.failure(1).contains("`packed` with 4 heads of keys and values twice"), "the same twice");
    let wrong = bench(&sandbox, &[&calls[..], &["--kv-heads", "4,3"]].concat());
    assert!(wrong.failure(1).contains("`kv-heads` is 3, must divide the 4 heads"));
}

#[test]
fn sequences_end_to_end() {
    let sandbox = Sandbox::new();
    let mechanisms = "softmax,fna,ssa,uniform,soft";
    for layout in ["heads", "tokens", "packed"] {
        let args = ["--mechanisms", mechanisms, "--heads", "2", "--sequences", "17,40,3", "--layout", layout];
        let json = bench(&sandbox, &args).success().json();
        let points = measured(&json);
        assert!(points.iter().all(|point| point["tokens"] == 60 && point["batch"] == 1), "{points:?}");
        assert_eq!(json["arrangement"]["sequences"], serde_json::json!([17, 40, 3]));
    }
    let shared = ["--mechanisms", "softmax", "--heads", "4", "--kv-heads", "1", "--sequences", "17,40"];
    measured(&bench(&sandbox, &shared).success().json());
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("1 head of keys and values, sequences of 17, 40 tokens end to end"));
}

#[test]
fn mechanisms_with_tensors_of_their_own() {
    let sandbox = Sandbox::new();
    let files = [
        ("tensor", r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#),
        (
            "keys",
            r#"{"mechanism": "softmax", "bias": {"kind": "tensor", "batch": true, "heads": false, "queries": false}}"#,
        ),
        ("alibi", r#"{"mechanism": "softmax", "bias": {"kind": "alibi"}}"#),
        ("buckets", r#"{"mechanism": "softmax", "bias": {"kind": "buckets"}}"#),
        ("grid", r#"{"mechanism": "softmax", "bias": {"kind": "grid", "height": 4, "width": 8}}"#),
        ("conv", r#"{"mechanism": "soft", "grid": [4, 8], "landmarks": {"kind": "conv", "ratio": 2}}"#),
        ("linformer", r#"{"mechanism": "linformer", "count": 4}"#),
    ];
    let files = files.map(|(name, text)| sandbox.write(&format!("{name}.json"), text).display().to_string());
    let json = bench(&sandbox, &["--heads", "2", "--tokens", "32", "--mechanisms", &files.join(",")]).success().json();
    measured(&json);
    // A grid has one size, whichever it is of those that are asked for; at the others it is left out.
    let outcome = bench(&sandbox, &["--heads", "2", "--tokens", "32,40", "--mechanisms", &files[4]]).success();
    let points = outcome.json()["points"].clone();
    assert!(points[0]["forward"]["median"].is_f64() && points[1]["skipped"].is_string(), "{points}");
    // One that cannot run at any says why, and the others are measured.
    let both = format!("{},softmax", files[4]);
    let outcome = bench(&sandbox, &["--heads", "2", "--tokens", "40", "--mechanisms", &both]).success();
    let json = outcome.json();
    assert!(json["checks"][0]["refused"].is_string() && json["checks"][1]["passed"] == true, "{json}");
    assert!(outcome.stderr.contains("grid: not compared with the reference: "), "{}", outcome.stderr);
    assert_eq!(json["points"][0]["label"], "softmax");
    // A bias of all pairs is of no length that sequences share.
    let outcome = bench(&sandbox, &["--heads", "2", "--sequences", "20,32", "--mechanisms", &files[0]]);
    assert!(outcome.failure(1).contains("nothing was measured: tensor: not compared"), "{}", outcome.stderr);
    let outcome = bench(&sandbox, &["--tokens", "64", "--mechanisms", "softmax", "--max-seconds", "1e-12"]);
    assert!(outcome.failure(1).contains("nothing was measured: `softmax` "), "{}", outcome.stderr);
}

#[test]
fn calls_that_cannot_be_are_refused() {
    let sandbox = Sandbox::new();
    let cases: [(&[&str], i32, &str); 8] = [
        (&["--kv-heads", "3"], 1, "`kv-heads` is 3, must divide the 8 heads"),
        (&["--kv-heads", "0"], 1, "`kv-heads` is 0"),
        (&["--sequences", "5,0"], 1, "`sequences` is with a 0"),
        (&["--sequences", "99999999999,99999999999"], 1, "tokens"),
        (&["--sequences", "5", "--tokens", "5"], 2, "cannot be used with '--tokens"),
        (&["--sequences", "5", "--batch", "2"], 2, "cannot be used with '--batch"),
        (&["--layout", "rows"], 2, "expected one of `heads` `tokens` `packed`"),
        (&["--compare", "a.json", "b.json", "--layout", "packed"], 2, "cannot be used with"),
    ];
    for (args, code, named) in cases {
        let outcome = bench(&sandbox, args);
        assert_eq!(outcome.code, Some(code), "{args:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(named), "{args:?}: {}", outcome.stderr);
        assert!(!sandbox.path("out").exists(), "{args:?} leaves a folder");
    }
}

#[test]
fn other_calls_are_not_compared() {
    let sandbox = Sandbox::new();
    let softmax = ["--mechanisms", "softmax", "--no-rivals", "--heads", "2", "--tokens", "16", "--out"];
    bench_to(&sandbox, &softmax, "first", &[]);
    bench_to(&sandbox, &softmax, "second", &["--layout", "tokens"]);
    let compare = |after: &str| sandbox.run(&["bench", "--compare", "first/bench.json", after]);
    assert!(compare("second/bench.json").failure(1).contains("has no mechanism and size in common"));
    assert!(compare("first/bench.json").success().stdout.contains("softmax at 16 tokens"));
}

fn bench_to(sandbox: &Sandbox, args: &[&str], out: &str, more: &[&str]) {
    let brief = ["bench", "--head-dim", "4", "--rounds", "1", "--turn", "0"];
    sandbox.run(&[&brief[..], args, &[out], more].concat()).success();
}

/// What the system tells of its load is in the results, with a warning where it is much.
#[test]
fn the_load_is_told() {
    let sandbox = Sandbox::new();
    let outcome = bench(&sandbox, &["--mechanisms", "uniform", "--heads", "1", "--tokens", "16"]).success();
    let json = outcome.json();
    assert_eq!(json["load"].is_null(), !std::path::Path::new("/proc/loadavg").exists());
    let busy = json["load"]["average"].as_f64().unwrap_or(0.0) > 0.25 * json["load"]["cores"].as_f64().unwrap_or(1.0);
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert_eq!((outcome.stderr.contains("warning: the load average"), page.contains("Warning. ")), (busy, busy));
}
