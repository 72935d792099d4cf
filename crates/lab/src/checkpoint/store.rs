//! The checkpoints of a run on the disk: saved whole, listed, and removed when there are too many.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{FORMAT, Manifest, Part, STATE, State, to_json};
use crate::{
    Error, Result,
    disk::{sync_folder, write_atomically, write_synced},
    folder::CHECKPOINTS,
};

/// How the folder of a checkpoint begins that is not yet whole.
const UNFINISHED: &str = ".saving-";

/// The checkpoints of one run.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    keep: usize,
}

impl Store {
    /// The store of the run in `run`, which keeps the newest `keep` checkpoints and the best.
    pub fn new(run: &Path, keep: usize) -> Self {
        Self { folder: run.join(CHECKPOINTS), keep }
    }

    /// Where the best weights of step `step` lie.
    pub fn best_path(&self, step: usize) -> PathBuf {
        self.folder.join(format!("best-{step:09}"))
    }

    /// The newest checkpoint's folder.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        Ok(self.list("step-")?.pop())
    }

    /// Saves `parts` as the checkpoint of `state`, then removes those that are too many, and every best that none of those left names. Of a
    /// checkpoint that is there the state alone is written anew: one step of one run has one set of weights, but may be judged later.
    ///
    /// # Errors
    /// [`Error::Io`]; earlier checkpoints are then as they were.
    pub fn save(&self, state: &State, parts: Vec<(&str, Part)>) -> Result<()> {
        self.write(&format!("step-{:09}", state.step), state, parts)?;
        let mut old = self.list("step-")?;
        let kept = old.split_off(old.len().saturating_sub(self.keep));
        // A best that an old checkpoint names goes last.
        for folder in old.into_iter().chain(self.unnamed(&kept)?) {
            fs::remove_dir_all(&folder).map_err(Error::io(&folder, "cannot remove an old checkpoint"))?;
        }
        Ok(())
    }

    /// Saves `parts` as the best weights so far; to be followed by [`Store::save`] with a state that names them.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn save_best(&self, state: &State, parts: Vec<(&str, Part)>) -> Result<()> {
        self.write(&format!("best-{:09}", state.step), state, parts)
    }

    /// Removes the best weights of a run whose checkpoints are gone: they are not those of the run that begins here.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn forget_best(&self) -> Result<()> {
        for folder in self.list("best-")? {
            fs::remove_dir_all(&folder).map_err(Error::io(&folder, "cannot remove the best of an earlier run"))?;
        }
        Ok(())
    }

    /// The best weights that none of the checkpoints `kept` names. What cannot be read names nothing.
    fn unnamed(&self, kept: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let named = kept.iter().filter_map(|path| Manifest::read(path).ok()?.state.best);
        let named: Vec<PathBuf> = named.map(|best| self.best_path(best.step)).collect();
        Ok(self.list("best-")?.into_iter().filter(|path| !named.contains(path)).collect())
    }

    /// Writes the state of the checkpoint that `state` is of anew, as where a run is extended.
    ///
    /// # Errors
    /// As [`Store::save`]; [`Error::Damaged`] where it cannot be read.
    pub fn renew(&self, state: &State) -> Result<()> {
        restate(&self.folder.join(format!("step-{:09}", state.step)), state)
    }

    /// Removes what a crash left half-written or half-removed, and best weights that no checkpoint has come to name: an extended run may have
    /// others after as many steps.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn clean(&self) -> Result<()> {
        let steps = self.list("step-")?;
        let cut = steps.iter().filter(|folder| !folder.join(STATE).exists()).cloned();
        for folder in self.list(UNFINISHED)?.into_iter().chain(cut).chain(self.unnamed(&steps)?) {
            fs::remove_dir_all(&folder).map_err(Error::io(&folder, "cannot remove an unfinished checkpoint"))?;
        }
        Ok(())
    }

    fn write(&self, name: &str, state: &State, parts: Vec<(&str, Part)>) -> Result<()> {
        let target = self.folder.join(name);
        if target.is_dir() {
            return restate(&target, state);
        }
        let failed = || Error::io(&target, "cannot save the checkpoint");
        fs::create_dir_all(&self.folder).map_err(failed())?;
        let unfinished = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&self.folder).map_err(failed())?;
        let mut files = BTreeMap::new();
        let State { step, recipe, data, expects, .. } = state;
        let about = json!({ "recipe": recipe, "step": step, "data": data, "expects": expects }).to_string();
        for (name, part) in parts {
            files.insert(name.to_string(), part.write(&unfinished.path().join(name), &about)?);
        }
        let manifest = Manifest { format: FORMAT, files, state: state.clone() };
        write_synced(&unfinished.path().join(STATE), &to_json(&manifest)?).map_err(failed())?;
        sync_folder(unfinished.path()).map_err(failed())?;
        fs::rename(unfinished.path(), &target).map_err(failed())?;
        // The folder has its final name: there is nothing temporary left to remove.
        let _ = unfinished.keep();
        sync_folder(&self.folder).map_err(failed())
    }

    /// The folders whose name begins with `prefix`, in order.
    fn list(&self, prefix: &str) -> Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io(&self.folder, "cannot list the checkpoints")(e)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(&self.folder, "cannot list the checkpoints"))?;
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)) {
                found.push(entry.path());
            }
        }
        found.sort();
        Ok(found)
    }
}

/// Writes the state of the checkpoint in `folder` anew; its tensors stay.
fn restate(folder: &Path, state: &State) -> Result<()> {
    let manifest = Manifest { state: state.clone(), ..Manifest::read(folder)? };
    write_atomically(&folder.join(STATE), &to_json(&manifest)?)
}
