//! The modules of the crates above the operators form layers: none stands on one that stands on it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Every source file below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    entries.flat_map(of).filter(|path| path.extension().is_some_and(|ending| ending == "rs")).collect()
}

/// The code of a file: without its comments, and without its tests, which may use what they like.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The items of `{a::b, c::{d, e}}`, of which `braces` is the rest after the first brace.
fn items(braces: &str) -> Vec<&str> {
    let (mut depth, mut from, mut items) = (0, 0, Vec::new());
    for (at, c) in braces.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' if depth == 0 => {
                items.push(&braces[from..at]);
                from = at + 1;
            }
            '}' => {
                items.push(&braces[from..at]);
                break;
            }
            _ => {}
        }
    }
    items
}

/// The modules that code names by `crate::`; items of the crate's root stand for the modules that they come from.
fn named(code: &str) -> BTreeSet<String> {
    let path = |text: &str| text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let of = |rest: &str| match rest.strip_prefix('{') {
        Some(braces) => items(braces).into_iter().map(path).collect(),
        None => vec![path(rest)],
    };
    let root = |name: String| match name.as_str() {
        "Error" | "Result" => "error".to_owned(),
        "Recipe" => "recipe".to_owned(),
        "named" => "names".to_owned(),
        _ => name,
    };
    code.split("crate::").skip(1).flat_map(of).map(root).filter(|name| !name.is_empty()).collect()
}

/// What each top-level module of the crate in `folder` stands on.
fn modules(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in sources(folder) {
        let first = file.strip_prefix(folder).unwrap().iter().next().unwrap().to_string_lossy();
        let module = first.trim_end_matches(".rs").to_owned();
        let mut below = named(&code(&file));
        below.remove(&module);
        graph.entry(module).or_default().extend(below);
    }
    graph.remove("lib");
    graph
}

#[test]
fn no_module_looks_up() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (name, least) in [("lab", 25), ("probe", 4)] {
        let mut left = modules(&crates.join(name).join("src"));
        assert!(left.len() >= least && left.values().any(|below| !below.is_empty()), "{name}: {left:?}");
        // From below: whatever stands on nothing that is left is a layer.
        loop {
            let known: BTreeSet<String> = left.keys().cloned().collect();
            left.retain(|_, below| below.iter().any(|module| known.contains(module)));
            if left.len() == known.len() {
                break;
            }
        }
        assert!(left.is_empty(), "modules of {name} that stand on each other in a circle, or on one: {left:#?}");
    }
}

/// What is read off the sources is what they say.
#[test]
fn names_are_read_from_nested_braces() {
    let code =
        "use crate::{\n    Error, Recipe,\n    data::{self, Data},\n    train,\n};\nfn f() { crate::stop::check() }";
    assert_eq!(Vec::from_iter(named(code)), ["data", "error", "recipe", "stop", "train"]);
}
