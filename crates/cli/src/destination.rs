//! Where a result goes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use resolvent_lab::disk::write_atomically;

use crate::{Error, error::Result, interrupt::Deferred};

/// Checks that `path` may be a folder of results, to be made where there is none.
///
/// # Errors
/// [`Error::File`] where it, or what it would lie in, is a file.
pub fn folder(path: &Path) -> Result<()> {
    let file = path.ancestors().find(|part| part.exists() && !part.is_dir());
    file.map_or(Ok(()), |file| Err(Error::file(file, "is a file; name a folder")))
}

/// A place that a file can be written to, checked before the work that fills it.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
}

impl Destination {
    /// Checks that `path` names a file, new or to be replaced, in a folder that exists, and none of `inputs`.
    ///
    /// # Errors
    /// [`Error::File`] saying which of these does not hold.
    pub fn new(path: &Path, inputs: &[&Path]) -> Result<Self> {
        if path.is_symlink() && !path.exists() {
            return Err(Error::file(path, "is a symbolic link to nothing; remove it, or name another file"));
        }
        // A symbolic link stays one: what it points to is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if inputs.iter().any(|input| fs::canonicalize(input).is_ok_and(|input| input == target)) {
            return Err(Error::file(path, "is also an input and would be overwritten; name another file"));
        }
        match fs::metadata(&target) {
            Ok(found) if found.is_dir() => {
                return Err(Error::file(path, "is a folder; name a file in it"));
            }
            Ok(found) if !found.is_file() => {
                return Err(Error::file(path, "is no ordinary file and cannot be replaced; name another"));
            }
            _ => {}
        }
        let folder = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        if target.file_name().is_none() || !folder.is_dir() {
            return Err(Error::file(path, format!("there is no folder `{}`; create it first", folder.display())));
        }
        Ok(Self { path: target })
    }

    /// Writes `bytes` to a temporary file beside the destination, then renames it. A signal waits until that is done.
    ///
    /// # Errors
    /// The destination is then as it was before, and the temporary file is gone.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let _deferred = Deferred::begin();
        Ok(write_atomically(&self.path, bytes)?)
    }
}
