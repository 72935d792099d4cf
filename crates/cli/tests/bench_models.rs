//! `resolvent bench --model` on models that take no time: what it writes, and what it refuses. No time is asserted.

mod support;

use serde_json::Value;
use support::{Outcome, Sandbox};

/// On two turns of the recipe `shapes`, into `out` of the sandbox.
fn bench(sandbox: &Sandbox, more: &[&str]) -> Outcome {
    let args = ["bench", "--model", "shapes", "--rounds", "2", "--turn", "5", "--out", "out"];
    sandbox.run(&[&args[..], more].concat())
}

#[test]
fn whole_models_are_measured_at_every_size() {
    let sandbox = Sandbox::new();
    let asked = ["--mechanisms", "softmax,infsa", "--pixels", "64,32", "--batch", "2", "--json"];
    let outcome = bench(&sandbox, &asked).success();
    let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(std::fs::read_to_string(sandbox.path("out/models.json")).unwrap().trim(), outcome.stdout.trim());
    let points = json["points"].as_array().unwrap();
    let of = |point: &Value| (point["name"].as_str().unwrap().to_owned(), point["pixels"].as_u64().unwrap());
    let expected = [("softmax", 32), ("infsa", 32), ("softmax", 64), ("infsa", 64)];
    assert_eq!(points.iter().map(of).collect::<Vec<_>>(), expected.map(|(name, pixels)| (name.to_owned(), pixels)));
    for point in points {
        for pass in ["inference", "training"] {
            assert!(
                point[pass]["seconds"].as_f64().unwrap() > 0.0 && point[pass]["peak_bytes"].as_u64().unwrap() > 0,
                "{point}"
            );
        }
        assert!(point["parameters"].as_u64().unwrap() > 1000 && point["skipped"].is_null(), "{point}");
    }
    let work = |at: usize| points[at]["multiply_adds"].as_u64().unwrap();
    assert!(work(2) > 4 * work(0) && work(2) < 16 * work(0));
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("training, ms") && !page.contains("NaN") && !page.contains("http"));
}

#[test]
fn a_field_of_the_recipe_is_set_and_the_rest_is_told() {
    let sandbox = Sandbox::new();
    let outcome = bench(&sandbox, &["--pixels", "32", "--set", "model.depth=2", "--max-seconds", "1e-9"]).success();
    assert!(outcome.stdout.contains("a training step would take about"), "{}", outcome.stdout);
    let read =
        || -> Value { serde_json::from_slice(&std::fs::read(sandbox.path("out/models.json")).unwrap()).unwrap() };
    let shallow = read();
    let points = shallow["points"].as_array().unwrap();
    let [point] = &points[..] else { panic!("one point: {shallow}") };
    assert!(point["training"].is_null() && point["left_out"].is_string() && point["inference"].is_object());
    // What measures nothing leaves it as it is.
    bench(&sandbox, &["--pixels", "30"]).failure(1);
    assert_eq!((read(), read()["recipe"]["model"]["depth"].as_u64()), (shallow.clone(), Some(2)));
    bench(&sandbox, &["--pixels", "32"]).success();
    assert!(read()["points"][0]["parameters"].as_u64() > point["parameters"].as_u64());
}

#[test]
fn refuses_what_it_cannot_measure() {
    let cases: [(&[&str], i32, &str); 10] = [
        (&["--pixels", "0"], 1, "`pixels` is empty or has a 0"),
        (&["--pixels", "30"], 1, "nothing was measured: data set `generated`: its pictures are 30 x 30"),
        (&["--pixels", "32", "--batch", "6148914691236517206"], 1, "its pictures take"),
        (&["--set", "schedule.batch_size=8"], 1, "`schedule.batch_size` is not read by a benchmark; give --batch"),
        (&["--set", "mechanism.mechanism=infsa"], 1, "give --mechanisms"),
        (&["--peer-timeout", "5"], 2, "cannot be used with"),
        (&["--batch", "0"], 1, "`batch` is 0"),
        (&["--max-seconds", "nan"], 1, "`max-seconds` is NaN"),
        (&["--mechanisms", "fna,fna"], 1, "`fna` twice"),
        (&["--tokens", "5"], 2, "cannot be used with"),
    ];
    for (args, code, named) in cases {
        let sandbox = Sandbox::new();
        let outcome = bench(&sandbox, args);
        let line = outcome.failure(code);
        assert!(line.contains(named), "{args:?}: {line}");
        assert!(!sandbox.path("out").exists(), "{args:?} leaves a folder");
    }
    let sandbox = Sandbox::new();
    let alone = sandbox.run(&["bench", "--pixels", "32", "--out", "out"]);
    assert!(alone.failure(2).contains("required") && alone.stderr.contains("--model"), "{}", alone.stderr);
    let of_texts = sandbox.run(&["bench", "--model", "language", "--out", "out"]);
    assert!(of_texts.failure(1).contains("neither a vision transformer nor a pyramid"), "{}", of_texts.stderr);
    sandbox.write("report.html", "of operators");
    let outcome = sandbox.run(&["bench", "--model", "shapes", "--out", "."]);
    let line = outcome.failure(1);
    assert!(line.contains("is the report of another command"), "{line}");
}

/// Where the processor has no counters that this user may read, the option is refused, and nothing is left; else there are joules.
#[test]
fn joules_are_told_or_refused() {
    let sandbox = Sandbox::new();
    let outcome = bench(&sandbox, &["--pixels", "32", "--joules", "--json"]);
    if outcome.code == Some(0) {
        let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert!(json["points"][0]["inference"]["joules"].as_f64().unwrap() >= 0.0, "{json}");
    } else {
        assert!(outcome.failure(1).contains("`joules` cannot be told on this machine"));
        assert!(!sandbox.path("out").exists());
    }
}
