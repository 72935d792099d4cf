//! Tells the program the commit that it is built from, for the results that name it: `RESOLVENT_COMMIT` where that is set, else
//! what git says, with `-dirty` where sources differ from it. Without either it has none.

use std::{path::Path, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RESOLVENT_COMMIT");
    let named = std::env::var("RESOLVENT_COMMIT").ok().filter(|commit| !commit.is_empty());
    if let Some(commit) = named.or_else(commit) {
        println!("cargo:rustc-env=RESOLVENT_COMMIT={commit}");
    }
}

fn commit() -> Option<String> {
    // An unpacked archive may lie within the repository of something else.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let hash = git(&["rev-parse", "--short=12", "HEAD"])?;
    // Both would otherwise be what they were at the first build.
    let moves = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    let sources = ["kernels", "layers", "graph", "resolvent", "lab", "cli"].map(|name| format!("../{name}/src"));
    for path in sources.iter().chain([&moves]).filter(|path| Path::new(path).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
    let changed = git(&[&["status", "--porcelain", "--"], &sources.each_ref().map(String::as_str)[..]].concat())?;
    Some(if changed.is_empty() { hash } else { hash + "-dirty" })
}

/// What git prints, if it can.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
