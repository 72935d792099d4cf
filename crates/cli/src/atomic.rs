//! Files that are either whole or not there.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use tempfile::Builder;

use crate::{Error, error::Result, interrupt::Deferred};

/// A place that a file can be written to, checked before the work that fills it.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
    folder: PathBuf,
}

impl Destination {
    /// Checks that `path` names a file, new or to be replaced, in a folder that exists, and none of `inputs`.
    ///
    /// # Errors
    /// [`Error::File`] saying which of these does not hold.
    pub fn new(path: &Path, inputs: &[&Path]) -> Result<Self> {
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
        Ok(Self { path: target, folder })
    }

    /// Writes `bytes` to a temporary file beside the destination, then renames it.
    ///
    /// # Errors
    /// [`Error::File`]; the destination is then as it was before, and the temporary file is gone.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let deferred = Deferred::begin();
        let failed = |e: std::io::Error| {
            Error::file(&self.path, format!("cannot be written: {e}; nothing was changed, mend that or name another"))
        };
        let mut builder = Builder::new();
        builder.prefix(".resolvent-").suffix(".tmp");
        #[cfg(unix)] // as any new file: what the user's mask leaves of rw-rw-rw-
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(&self.folder).map_err(failed)?;
        file.write_all(bytes).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        if deferred.interrupted() {
            return Err(Error::Interrupted(format!("{} was not written", self.path.display())));
        }
        file.persist(&self.path).map_err(|e| failed(e.error))?;
        #[cfg(unix)] // the new name is on the disk only when its folder is
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    }
}
