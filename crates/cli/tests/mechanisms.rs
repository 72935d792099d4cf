//! `resolvent mechanisms`: every preset and every combination, as a table and as JSON.

mod support;

use resolvent_kernels::{
    Mechanism,
    mechanism::{Normalisation, Score, Series, Structure},
};
use serde_json::Value;
use support::Sandbox;

#[test]
fn presets_are_listed_with_their_values() {
    let sandbox = Sandbox::new();
    let table = sandbox.run(&["mechanisms"]).success().stdout;
    assert_eq!(table.lines().count(), 1 + Mechanism::IDS.len());
    let row = |id: &str| table.lines().find(|line| line.starts_with(&format!("{id} "))).unwrap();
    for (id, values) in [
        ("softmax", "dot-exp dense row one-hop"),
        ("infsa-resolvent", "dot-relu dense frobenius resolvent"),
        ("performer", "dot-exp features row one-hop"),
        ("nystromformer", "dot-exp nystrom factors one-hop"),
        ("linformer", "dot-exp projected row one-hop"),
        ("relu", "dot-relu dense none one-hop"),
    ] {
        assert_eq!(row(id).split_whitespace().skip(1).collect::<Vec<_>>().join(" "), values);
    }
    let json = sandbox.run(&["mechanisms", "--json"]).success().stdout;
    let presets: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert!(presets.iter().map(|preset| preset["id"].as_str().unwrap()).eq(Mechanism::IDS));
    let local = presets.iter().find(|preset| preset["id"] == "local").unwrap();
    assert_eq!((&local["structure"]["window"], &local["score"]["kind"]), (&256.into(), &"dot-exp".into()));
}

#[test]
fn every_combination_runs_or_says_why_not() {
    let sandbox = Sandbox::new();
    let json = sandbox.run(&["mechanisms", "--matrix", "--json"]).success().stdout;
    let all: Vec<Value> = serde_json::from_str(&json).unwrap();
    let counts = [Score::KINDS.len(), Structure::KINDS.len(), Normalisation::KINDS.len(), Series::KINDS.len()];
    assert_eq!(all.len(), counts.into_iter().product::<usize>());
    for combination in &all {
        let says = |field: &str| combination[field].as_str().is_some_and(|text| !text.is_empty());
        let runs = combination["runs"].as_bool().unwrap();
        assert!(runs != says("what") && runs != says("why"), "{combination}");
    }
    let table = sandbox.run(&["mechanisms", "--matrix"]).success().stdout;
    let running = all.iter().filter(|combination| combination["runs"] == true).count();
    assert!(running > 100 && table.trim_end().ends_with(&format!("{running} of {} combinations run", all.len())));
    let line = |words: &str| {
        let is = |line: &&str| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(words);
        table.lines().find(is).unwrap_or_else(|| panic!("{words}"))
    };
    assert!(line("levy clustered row resolvent").ends_with(" runs"));
    assert!(line("dot-exp features row hops").ends_with(" runs"));
    assert!(line("dot-exp nystrom row one-hop").contains("refused: this score through landmarks: "));
    assert!(line("dot-relu dense whitened one-hop").contains("refused: whitened with this score: "));
}
