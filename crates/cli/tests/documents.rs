//! Tables in the documents are what the program prints, and the documents agree with each other.
//!
//! `RESOLVENT_WRITE_DOCUMENTS=1 cargo test --release --workspace --test documents` writes the tables anew.

mod support;

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use resolvent_lab::Recipe;
use serde_json::Value;
use support::Sandbox;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// What the program prints as JSON.
fn printed(args: &[&str]) -> Vec<Value> {
    serde_json::from_str(&Sandbox::new().run(args).success().stdout).unwrap()
}

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// The text between the marks of the table `name`, and where it lies.
fn table(file: &str, name: &str) -> (String, String, String) {
    let text = read(file);
    let mark = format!("<!-- {name}: made by crates/cli/tests/documents.rs -->\n");
    let (before, rest) = text.split_once(&mark).unwrap_or_else(|| panic!("{file} lacks the mark of `{name}`"));
    let (table, after) = rest.split_once("<!-- end -->").unwrap_or_else(|| panic!("{file}: `{name}` has no end"));
    (format!("{before}{mark}"), table.into(), format!("<!-- end -->{after}"))
}

/// Compares the table with what it should be, or writes that.
fn check(file: &str, name: &str, expected: &str) {
    let (before, found, after) = table(file, name);
    if found == expected {
        return;
    }
    if std::env::var_os("RESOLVENT_WRITE_DOCUMENTS").is_some() {
        return fs::write(Path::new(ROOT).join(file), before + expected + &after).unwrap();
    }
    panic!("{file} is not what the program prints; RESOLVENT_WRITE_DOCUMENTS=1 writes it. Expected:\n{expected}");
}

/// Rows of Markdown under a heading, in columns.
fn markdown(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap()).collect();
    let mut text = String::new();
    for (n, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            write!(text, "| {cell:width$} ").unwrap();
        }
        text += "|\n";
        if n == 0 {
            widths.iter().for_each(|width| write!(text, "|{}", "-".repeat(width + 2)).unwrap());
            text += "|\n";
        }
    }
    text
}

/// The README's presets have the values that the program prints; what a preset is, the last column, is written by hand.
#[test]
fn presets_of_the_readme_are_those_of_the_program() {
    let (_, found, _) = table("README.md", "presets");
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let written: BTreeMap<String, String> =
        found.lines().map(cells).map(|cells| (cells[1].clone(), cells[cells.len() - 2].clone())).collect();
    let describe = |id: &str| written.get(id).cloned().unwrap_or_else(|| panic!("README.md says nothing of {id}"));
    let heading = ["`mechanism`", "score", "structure", "normalisation", "series"].map(String::from);
    let mut rows = vec![[&heading[..], &["what it is".into()]].concat()];
    for preset in printed(&["mechanisms", "--json"]) {
        let id = format!("`{}`", preset["id"].as_str().unwrap());
        let kind = |part: &str| preset[part]["kind"].as_str().unwrap().to_owned();
        let mut row = vec![id.clone()];
        row.extend(["score", "structure", "normalisation", "series"].map(kind));
        row.push(describe(&id));
        rows.push(row);
    }
    let id = "`composed`".to_owned();
    rows.push([vec![id.clone()], vec!["any".into(); 4], vec![describe(&id)]].concat());
    check("README.md", "presets", &markdown(&rows));
}

/// Scores that go together with the same values are a row.
#[test]
fn combinations_of_the_algebra_are_those_of_the_program() {
    let all = printed(&["mechanisms", "--matrix", "--json"]);
    let kinds = |part: &str| {
        let mut kinds: Vec<&str> = Vec::new();
        all.iter().map(|one| one[part].as_str().unwrap()).for_each(|kind| {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        });
        kinds
    };
    let (scores, normalisations) = (kinds("score"), kinds("normalisation"));
    let heading = ["structure", "scores"].into_iter().chain(normalisations.iter().copied());
    let mut rows = vec![heading.map(String::from).collect::<Vec<_>>()];
    for structure in kinds("structure") {
        let first = rows.len();
        for score in &scores {
            let series = |normalisation: &&str| {
                let of = |one: &&Value| {
                    one["structure"] == structure && one["score"] == **score && one["normalisation"] == **normalisation
                };
                let running = all.iter().filter(of).filter(|one| one["runs"] == true);
                let names = running.map(|one| one["series"].as_str().unwrap()).collect::<Vec<_>>();
                if names.is_empty() { "-".into() } else { names.join(", ") }
            };
            let cells: Vec<String> = normalisations.iter().map(series).collect();
            match rows[first..].iter_mut().find(|row| row[2..] == cells[..]) {
                Some(row) => row[1] += &format!(", {score}"),
                None => rows.push([vec![structure.to_owned(), (*score).to_owned()], cells].concat()),
            }
        }
        if let [only] = &mut rows[first..] {
            only[1] = "all".into();
        }
    }
    let running = all.iter().filter(|one| one["runs"] == true).count();
    check("docs/algebra.md", "combinations", &format!("{}\n{running} of {} run.\n", markdown(&rows), all.len()));
}

/// The README's example is compiled as the crate's, and every program in `examples/` is told of.
#[test]
fn the_readmes_agree() {
    let (readme, of_crate) = (read("README.md"), read("crates/resolvent/README.md"));
    let (_, code) = readme.split_once("```rust\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    assert!(of_crate.contains(code), "crates/resolvent/README.md lacks the README's example:\n{code}");
    let examples: Vec<PathBuf> = fs::read_dir(Path::new(ROOT).join("crates/resolvent/examples"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(examples.len() >= 5, "{examples:?}");
    for example in examples {
        let row = format!("| `{}` |", example.file_stem().unwrap().to_string_lossy());
        assert!(readme.contains(&row) && of_crate.contains(&row), "the READMEs say nothing of {row}");
    }
}

/// The page of the architecture tells what every crate stands on, as their manifests do, and its picture has all of them.
#[test]
fn the_architecture_is_that_of_the_manifests() {
    let (page, picture) = (read("docs/architecture.md"), read("docs/architecture.svg"));
    for folder in ["kernels", "layers", "graph", "resolvent", "lab", "probe", "cli", "python"] {
        let manifest = read(&format!("crates/{folder}/Cargo.toml"));
        let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
        let names =
            dependencies.lines().take_while(|line| !line.starts_with('[')).filter(|l| l.starts_with("resolvent"));
        let mut stands_on: Vec<&str> = names.map(|line| line.split(['.', ' ', '=']).next().unwrap()).collect();
        stands_on.iter_mut().for_each(|name| *name = name.trim_start_matches("resolvent-"));
        stands_on.sort_unstable();
        let name = manifest.split_once("name = \"").and_then(|(_, rest)| rest.split('"').next()).unwrap();
        let row =
            page.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(row.split('|').nth(2).unwrap().trim(), stands_on.join(", "), "{name}");
        assert!(picture.contains(&format!(">{name}<")), "the picture lacks {name}");
    }
    for (file, link) in [("README.md", "docs/architecture.md"), ("CONTRIBUTING.md", "docs/architecture.md")] {
        assert!(read(file).contains(link), "{file}");
    }
}

/// The recipes of the page are valid, and it names every field of every kind.
#[test]
fn the_page_of_recipes_knows_every_field() {
    let page = read("docs/recipes.md");
    let examples: Vec<&str> = page.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(!examples.is_empty());
    for example in examples {
        Recipe::from_toml(example, "docs/recipes.md").unwrap();
    }
    let kinds = [
        ("model", &["vit", "pyramid", "text", "language"][..]),
        ("optimiser", &["adamw", "adam", "sgd", "lion", "muon"]),
        ("schedule", &["cosine", "linear", "constant", "step", "plateau"]),
    ];
    for (section, kinds) in kinds {
        for kind in kinds {
            let more = if *kind == "step" { "milestones = [1]" } else { "" };
            let recipe = Recipe::from_toml(&format!("[{section}]\nkind = '{kind}'\n{more}"), "kind").unwrap();
            let Value::Object(sections) = serde_json::to_value(recipe).unwrap() else { panic!() };
            for (name, value) in sections {
                assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("`[{name}]`")), "{name}");
                let fields = value.as_object().filter(|_| name != "mechanism").into_iter().flatten();
                for (field, _) in fields {
                    let told = [format!("`{field}`"), format!("`{field} =")].iter().any(|text| page.contains(text));
                    assert!(told, "docs/recipes.md says nothing of {name}.{field} of {kind}");
                }
            }
        }
    }
}
