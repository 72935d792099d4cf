//! `resolvent bench` on sizes that take no time: what it writes, and what it refuses. No time is asserted.

mod support;

use serde_json::Value;
use support::{Outcome, Sandbox, resolvent};

#[test]
fn measures_every_mechanism_and_compares_two_runs() {
    let sandbox = Sandbox::new();
    let run = |name: &str| {
        let out = sandbox.path(name);
        let mut command = resolvent();
        command.args(["bench", "--tokens", "16,24", "--heads", "2", "--head-dim", "8", "--rounds", "2", "--json"]);
        let text = Outcome::of(command.arg("--out").arg(&out)).success();
        let json: Value = serde_json::from_str(&text.stdout).unwrap();
        assert_eq!(std::fs::read_to_string(out.join("bench.json")).unwrap().trim(), text.stdout.trim());
        (out, json)
    };
    let (first, json) = run("first");
    let (second, _) = run("second");
    for check in json["checks"].as_array().unwrap() {
        assert_eq!(check["passed"], true, "{check}");
    }
    let points = json["points"].as_array().unwrap();
    let rival = points.iter().filter(|point| point["label"] == "burn softmax").count();
    assert_eq!((rival, points.len()), (2, 2 * (json["checks"].as_array().unwrap().len() + 1)));
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
fn refuses_what_it_cannot_measure() {
    let sandbox = Sandbox::new();
    let not_ours = sandbox.write("other.json", "{}");
    let cases: [(&[&str], &str); 6] = [
        (&["--tokens", "0"], "tokens"),
        (&["--heads", "0"], "heads"),
        (&["--rounds", "0"], "rounds"),
        (&["--max-seconds=-1"], "max-seconds"),
        (&["--tokens", "99999999999"], "tokens"),
        (&["--compare", not_ours.to_str().unwrap(), not_ours.to_str().unwrap()], "is no result of"),
    ];
    for (args, named) in cases {
        let mut command = resolvent();
        command.arg("bench").args(args).arg("--out").arg(sandbox.path("out"));
        let outcome = Outcome::of(&mut command);
        assert!(outcome.failure(1).contains(named), "{args:?}");
    }
}
