//! What the README's commands leave out because the workspace says it.

use std::process::Command;

use serde_json::Value;

/// `cargo run` names no binary: of the members that it looks at, one has one, and that is the program.
#[test]
fn cargo_run_is_the_program() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline", "--manifest-path", manifest])
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let members = metadata["workspace_default_members"].as_array().unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter().filter(|package| members.contains(&package["id"]));
    let targets = packages.flat_map(|package| package["targets"].as_array().unwrap());
    let binaries: Vec<_> = targets.filter(|target| target["kind"][0] == "bin").map(|target| &target["name"]).collect();
    assert_eq!(binaries, ["resolvent"]);
}
