//! Compiles a package and its tests with all mutants at once, without those that do not compile.

use std::{
    collections::BTreeSet,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    Error,
    find::{self, Mutant},
    switch,
};

pub struct Build {
    /// Those that compile, by the number that switches them on.
    pub mutants: Vec<Mutant>,
    /// The test programs.
    pub binaries: Vec<Binary>,
    /// The folder that they are in.
    pub programs: PathBuf,
    /// How many mutants do not compile.
    pub uncompiled: usize,
}

pub struct Binary {
    pub name: String,
    pub path: PathBuf,
}

/// The workspace that holds the changed copy of the package.
struct Copy {
    root: PathBuf,
    /// Of the package, `kernels` for `resolvent-kernels`.
    name: String,
    sources: PathBuf,
    folder: PathBuf,
}

pub fn build(root: &Path, package: &str, mut mutants: Vec<Mutant>) -> Result<Build, Error> {
    let copy = Copy::create(root, package)?;
    let all = mutants.len();
    loop {
        let switched = copy.write(&mutants)?;
        let mut output = copy.cargo(&["--lib"])?;
        if output.errors.is_empty() {
            output = copy.cargo(&[])?;
        }
        if output.errors.is_empty() {
            let programs = copy.folder.join(format!("programs-{}", std::process::id()));
            let binaries = kept(output.binaries, &programs)?;
            return Ok(Build { uncompiled: all - mutants.len(), mutants, binaries, programs });
        }
        let failing = failing(&mutants, &switched, &output.errors);
        if failing.is_empty() {
            return Err(format!("the copy in {} does not compile", copy.folder.display()).into());
        }
        failing.iter().rev().for_each(|&id| drop(mutants.remove(id)));
    }
}

/// The same programs in a `folder` where no later build replaces them.
fn kept(binaries: Vec<Binary>, folder: &Path) -> Result<Vec<Binary>, Error> {
    fs::create_dir_all(folder)?;
    let kept = binaries.into_iter().map(|Binary { name, path }| {
        let kept = folder.join(&name);
        fs::copy(path, &kept)?;
        Ok(Binary { name, path: kept })
    });
    kept.collect()
}

/// The mutants that the compiler's errors are in, or else those of the files that they are in.
fn failing(mutants: &[Mutant], switched: &[(String, String)], errors: &[Place]) -> BTreeSet<usize> {
    let mut failing = BTreeSet::new();
    let mut places = BTreeSet::new();
    for Place { file, range } in errors {
        let Some((_, text)) = switched.iter().find(|(name, _)| name == file) else { continue };
        let of_file = (0..mutants.len()).filter(|&id| mutants[id].file == *file).collect::<Vec<_>>();
        match switch::around(text, range, &of_file) {
            Some(id) => drop(failing.insert(id)),
            None => places.extend(of_file),
        }
    }
    if failing.is_empty() { places } else { failing }
}

/// Bytes of a file of the copy.
struct Place {
    file: String,
    range: Range<usize>,
}

struct Output {
    errors: Vec<Place>,
    binaries: Vec<Binary>,
}

impl Copy {
    /// A workspace of the package alone, with the versions of this one, under `target`. What the package stands on is linked.
    fn create(root: &Path, name: &str) -> Result<Self, Error> {
        let folder = root.join("target/mutants").join(name);
        let original = root.join("crates").join(name);
        let package = folder.join("crates").join(name);
        fs::create_dir_all(package.join("src"))?;
        let kernels = folder.join("crates/kernels");
        if !kernels.exists() {
            std::os::unix::fs::symlink(root.join("crates/kernels"), kernels)?;
        }
        let workspace = fs::read_to_string(root.join("Cargo.toml"))?;
        let members = format!("members = [\"crates/{name}\"]");
        let workspace = workspace.lines().map(|line| if line.starts_with("members") { &members } else { line });
        let workspace = workspace.collect::<Vec<_>>().join("\n") + &profile(name);
        fs::write(folder.join("Cargo.toml"), workspace)?;
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
        let manifest = fs::read_to_string(original.join("Cargo.toml"))?;
        // Neither the benchmarks nor the lints.
        fs::write(package.join("Cargo.toml"), manifest.split("[[bench]]").next().unwrap_or_default())?;
        let tests = package.join("tests");
        if !tests.exists() {
            std::os::unix::fs::symlink(original.join("tests"), tests)?;
        }
        Ok(Self { root: root.into(), name: name.into(), sources: original.join("src"), folder })
    }

    /// Writes the sources with `mutants`; returns them by their paths below the folder of sources.
    fn write(&self, mutants: &[Mutant]) -> Result<Vec<(String, String)>, Error> {
        let target = self.folder.join("crates").join(&self.name).join("src");
        // Files that have been moved since the last time would be modules twice.
        for path in find::files(&target)? {
            if !self.sources.join(path.strip_prefix(&target)?).exists() {
                fs::remove_file(path)?;
            }
        }
        let mut switched = Vec::new();
        for path in find::files(&self.sources)? {
            let name = path.strip_prefix(&self.sources)?.to_string_lossy().into_owned();
            let of_file = mutants.iter().enumerate().filter(|(_, mutant)| mutant.file == name).collect::<Vec<_>>();
            let mut text = switch::switched(&fs::read_to_string(&path)?, &of_file);
            if name == "lib.rs" {
                text = format!("#![allow(warnings)]\n{text}\npub mod mutant;\n");
            }
            write_changed(&target.join(&name), &text)?;
            switched.push((name, text));
        }
        let module = switch::MODULE.replace("COUNT", &mutants.len().max(1).to_string());
        write_changed(&target.join("mutant.rs"), &module)?;
        Ok(switched)
    }

    /// Compiles the tests, printing what is being compiled.
    fn cargo(&self, which: &[&str]) -> Result<Output, Error> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| self.root.join("target"), PathBuf::from);
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["test", "--release", "--no-run", "--message-format", "json"])
            .args(which)
            .current_dir(&self.folder)
            .env("CARGO_TARGET_DIR", self.root.join(target))
            .stderr(Stdio::inherit())
            .output()?;
        let messages = String::from_utf8_lossy(&output.stdout);
        let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>();
        let errors: Vec<_> = messages.iter().flat_map(|message| places(&self.name, message)).collect();
        if !output.status.success() && errors.is_empty() {
            return Err("cargo failed".into());
        }
        Ok(Output { errors, binaries: messages.iter().filter_map(binary).collect() })
    }
}

/// The package, and the kernels where it stands on them, are compiled with less effort than the rest: it takes longer than to test them.
fn profile(name: &str) -> String {
    let packages = BTreeSet::from(["kernels", name]);
    packages.iter().map(|name| format!("\n[profile.release.package.resolvent-{name}]\nopt-level = 1\n")).collect()
}

/// Leaves a file as it is that holds `text` already, so that it is not compiled again.
fn write_changed(path: &Path, text: &str) -> Result<(), Error> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().ok_or("a file lies in a folder")?)?;
    Ok(fs::write(path, text)?)
}

/// Where the error that cargo tells of is, in files of the copy.
fn places(package: &str, message: &Value) -> Vec<Place> {
    let diagnostic = &message["message"];
    if message["reason"] != "compiler-message" || diagnostic["level"] != "error" {
        return Vec::new();
    }
    let spans = diagnostic["spans"].as_array().into_iter().flatten();
    let place = |span: &Value| {
        let (_, file) = span["file_name"].as_str()?.split_once(&format!("{package}/src/"))?;
        let at = |name: &str| span[name].as_u64().map(|at| at as usize);
        Some(Place { file: file.into(), range: at("byte_start")?..at("byte_end")? })
    };
    spans.filter_map(place).collect()
}

fn binary(message: &Value) -> Option<Binary> {
    let path = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
    Some(Binary { name: message["target"]["name"].as_str()?.into(), path: path.into() })
}
