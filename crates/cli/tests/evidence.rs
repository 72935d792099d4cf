//! The commands that the page of evidence names: all of them are commands of this program, or examples that are there.

mod support;

use std::{collections::BTreeMap, fs, path::Path};

use support::Sandbox;

fn page() -> String {
    fs::read_to_string(root().join("docs/evidence.md")).unwrap()
}

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every command with its loops written out, in words.
fn commands(page: &str) -> Vec<Vec<String>> {
    let lines: Vec<_> = page.lines().filter_map(|line| Some(line.strip_prefix("    ")?.trim())).collect();
    let mut all = Vec::new();
    expand(&lines, &BTreeMap::new(), &mut all);
    all
}

/// Adds the commands of `lines`, which are whole loops or outside of all, with the values of the loops around them.
fn expand(lines: &[&str], values: &BTreeMap<&str, &str>, into: &mut Vec<Vec<String>>) {
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        at += 1;
        if let Some((name, of)) = line.strip_prefix("for ").and_then(|line| line.split_once(" in ")) {
            let end = end_of_loop(&lines[at..]).unwrap_or_else(|| panic!("`{line}` has no end"));
            // Seeds are numbers: the first stands for them.
            let values_of = if name == "seed" { 1 } else { usize::MAX };
            for value in of.trim_end_matches("; do").split(' ').take(values_of) {
                let values = values.iter().map(|(&name, &value)| (name, value)).chain([(name, value)]).collect();
                expand(&lines[at..at + end], &values, into);
            }
            at += end + 1;
        } else if line.starts_with("resolvent ") || line.starts_with("cargo ") {
            into.push(words(line, values));
        }
    }
}

/// How many lines a loop has that the first of them begins.
fn end_of_loop(lines: &[&str]) -> Option<usize> {
    let mut open = 1;
    lines.iter().position(|line| {
        open += i32::from(line.ends_with("; do")) - i32::from(*line == "done");
        open == 0
    })
}

fn words(line: &str, values: &BTreeMap<&str, &str>) -> Vec<String> {
    // Longer names first: `$m` begins `$mechanism`.
    let mut names: Vec<_> = values.keys().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    let line = names.into_iter().fold(line.to_owned(), |line, name| line.replace(&format!("${name}"), values[name]));
    assert!(!line.contains('$'), "{line}: a name that no loop sets");
    let word =
        |word: &str| word.strip_prefix("configs/").map_or(word, |name| name.trim_end_matches(".toml")).to_owned();
    // What is kept in a file is the shell's.
    line.split_whitespace().take_while(|word| *word != ">").map(word).collect()
}

/// Where nothing can be written and no data lie: what is wrong with a command's words is told before either is.
#[test]
fn every_command_is_one_of_the_program() {
    let sandbox = Sandbox::new();
    ["runs", "tokens"].iter().for_each(|folder| drop(sandbox.write(folder, "")));
    let commands = commands(&page());
    let own: Vec<_> = commands.iter().filter(|words| words[0] == "resolvent").collect();
    assert!(own.len() > 60, "{} commands", own.len());
    for words in own {
        let files = words.iter().flat_map(|word| word.split(',')).filter(|file| file.ends_with(".json"));
        files.for_each(|file| drop(sandbox.write(file, r#"{"mechanism": "fna"}"#)));
        let args: Vec<_> = words[1..].iter().map(String::as_str).collect();
        let outcome = sandbox.run(&args);
        assert_eq!(outcome.code, Some(1), "{}\n{}", words.join(" "), outcome.stderr);
        let error = outcome.failure(1);
        let of_files = ["runs", "tokens", "reviews", "DIR", ".txt"].iter().any(|name| error.contains(name));
        assert!(of_files, "{}\n{error}", words.join(" "));
    }
}

#[test]
fn every_example_is_there() {
    let examples: Vec<_> = commands(&page()).into_iter().filter(|words| words[0] == "cargo").collect();
    assert!(examples.len() >= 10, "{} examples", examples.len());
    for words in examples {
        let after = |flag: &str| words.iter().skip_while(|word| *word != flag).nth(1).expect(flag).clone();
        let name = after("--example");
        let crates = fs::read_dir(root().join("crates")).unwrap();
        let has = |folder: &Path| {
            [format!("{name}.rs"), format!("{name}/main.rs")].iter().any(|file| folder.join(file).is_file())
        };
        let folders: Vec<_> =
            crates.map(|at| at.unwrap().path().join("examples")).filter(|folder| has(folder)).collect();
        let [folder] = &folders[..] else { panic!("{}: {folders:?}", words.join(" ")) };
        // What it is asked for, it knows.
        for part in words.iter().skip_while(|word| *word != "--").skip(1).filter(|word| word.parse::<u64>().is_err()) {
            let source = sources(folder, &name);
            assert!(source.contains(&format!("\"{part}\"")), "{}: {part}", words.join(" "));
        }
    }
}

/// The text of an example, of one file or of a folder, with what examples share.
fn sources(folder: &Path, name: &str) -> String {
    let read = |file: &Path| fs::read_to_string(file).unwrap_or_default();
    let single = read(&folder.join(format!("{name}.rs")));
    let folders = [name, "draws"].into_iter().filter_map(|name| fs::read_dir(folder.join(name)).ok()).flatten();
    let several = folders.map(|file| read(&file.unwrap().path()));
    several.fold(single, |all, file| all + &file)
}
