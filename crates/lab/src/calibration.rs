//! The calibration of this machine, measured once and kept in the user's cache.

use std::{
    env, fs,
    io::Read,
    path::{Path, PathBuf},
};

use resolvent::Calibration;
use serde::{Deserialize, Serialize};

use crate::{Result, disk::write_atomically, environment::Environment};

/// The environment variable that names another file for it, or is `off`.
pub const VARIABLE: &str = "RESOLVENT_CALIBRATION";
/// More bytes than a calibration has.
const LIMIT: u64 = 1 << 20;

/// The file holds one for every machine that asked.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    machine: Machine,
    calibration: Calibration,
}

/// What the measurement depends on. The number of threads is not part of it: results must not depend on it.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    cpu: Option<String>,
    level: String,
    version: String,
}

impl Machine {
    fn this() -> Self {
        let Environment { cpu, level, version, .. } = Environment::current();
        Self { cpu, level, version }
    }
}

/// Where the calibration is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Nothing is measured: the kernels are used wherever there are some.
    Off,
    /// In the user's cache.
    Cache(PathBuf),
    /// Where the environment variable says.
    Named(PathBuf),
    /// The system names no folder for it.
    Nowhere,
}

impl Place {
    /// As the environment says: `RESOLVENT_CALIBRATION` (a file, or `off`), else `resolvent/calibration.json` in
    /// `XDG_CACHE_HOME`, else in `.cache` of the home folder.
    pub fn of_environment() -> Self {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty());
        match set(VARIABLE) {
            Some(value) if value == "off" => return Self::Off,
            Some(value) => return Self::Named(value.into()),
            None => {}
        }
        // A relative path there is to be ignored: XDG Base Directory Specification.
        let xdg = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = || env::home_dir().filter(|path| path.is_absolute()).map(|home| home.join(".cache"));
        xdg.or_else(home).map_or(Self::Nowhere, |cache| Self::Cache(cache.join("resolvent").join("calibration.json")))
    }
}

/// The calibration of this machine, read from its place, or measured and kept there; `None` when it is off. `note` is told
/// what happens, and why if it cannot be kept.
///
/// A file that the user named and that is no calibration is left alone; one in the cache is replaced.
///
/// # Errors
/// As [`Calibration::measure`].
pub fn calibration(place: &Place, note: &dyn Fn(&str)) -> Result<Option<Calibration>> {
    let (path, named) = match place {
        Place::Off => return Ok(None),
        Place::Nowhere => {
            note(&format!("calibration: there is no folder to keep it in; name a file in {VARIABLE}, or `off`"));
            return Ok(Some(Calibration::measure()?));
        }
        Place::Cache(path) => (path, false),
        Place::Named(path) => (path, true),
    };
    let found = read(path);
    let known = found.iter().flatten().find(|kept| kept.machine == Machine::this());
    if let Some(Kept { calibration, .. }) = known {
        return Ok(Some(calibration.clone()));
    }
    note("calibration: timing fused kernels against tensor operations on this machine, once");
    let kept = Kept { machine: Machine::this(), calibration: Calibration::measure()? };
    match found {
        Err(problem) if named => {
            let remedy = format!("name another file in {VARIABLE}, or `off`");
            note(&format!("calibration: {} {problem}, and is left as it is; {remedy}", path.display()));
        }
        found => {
            // Another instruction set or another version has its own, and may come back.
            let mut all = found.unwrap_or_default();
            all.push(kept.clone());
            keep(path, &all, note);
        }
    }
    Ok(Some(kept.calibration))
}

fn keep(path: &Path, kept: &[Kept], note: &dyn Fn(&str)) {
    let text = serde_json::to_string_pretty(kept).expect("numbers and strings");
    if let Err(why) = write_atomically(path, format!("{text}\n").as_bytes()) {
        note(&format!(
            "calibration: not kept, so that it is measured every time ({VARIABLE} names another file): {why}"
        ));
    }
}

/// What a file holds: calibrations, none if there is no file, or what is wrong with it.
fn read(path: &Path) -> std::result::Result<Vec<Kept>, String> {
    let unreadable = |e: std::io::Error| format!("cannot be read ({e})");
    match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unreadable(e)),
        // A pipe would wait for its writer.
        Ok(found) if !found.is_file() => return Err("is not a file".into()),
        Ok(_) => {}
    }
    let mut text = String::new();
    fs::File::open(path).and_then(|file| file.take(LIMIT).read_to_string(&mut text)).map_err(unreadable)?;
    serde_json::from_str(&text).map_err(|_| "is no calibration".into())
}
