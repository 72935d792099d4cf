//! The folder that a command writes its results to: its own, and nobody else's at the same time.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use crate::{Error, Result};

/// The file that marks a folder as one of this program's; whoever writes to the folder holds its lock.
pub const MARK: &str = ".resolvent";

/// Holds a folder until it is dropped.
#[derive(Debug)]
pub struct Claim(#[allow(dead_code, reason = "held for its lock")] File);

impl Claim {
    /// Makes `folder` where there is none and takes it. `files` are what would be written to it; `known`, beside
    /// [`MARK`], is what tells one of ours.
    ///
    /// # Errors
    /// [`Error::Foreign`] where one of `files` is there but the folder is not one of this program's, [`Error::Busy`] while
    /// another process writes to it, [`Error::Io`].
    pub fn take(folder: &Path, files: &[&'static str], known: &str) -> Result<Self> {
        fs::create_dir_all(folder).map_err(Error::io(folder, "cannot make the folder"))?;
        let mark = folder.join(MARK);
        let ours = mark.exists() || folder.join(known).exists();
        if let Some(file) = files.iter().find(|file| !ours && folder.join(file).exists()) {
            return Err(Error::Foreign { path: folder.to_path_buf(), file });
        }
        let file = File::create(&mark).map_err(Error::io(&mark, "cannot mark the folder"))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(Error::Busy { path: folder.to_path_buf() }),
            // Some network file systems have no locks: no reason not to write there.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(Self(file)),
            Err(TryLockError::Error(e)) => Err(Error::io(&mark, "cannot lock the folder")(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_once_and_never_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let take = || Claim::take(folder.path(), &["report.html"], "checkpoints");
        fs::write(folder.path().join("report.html"), "mine").unwrap();
        assert!(matches!(take(), Err(Error::Foreign { file: "report.html", .. })));
        fs::create_dir(folder.path().join("checkpoints")).unwrap();
        let claim = take().unwrap();
        assert!(matches!(take(), Err(Error::Busy { .. })));
        drop(claim);
        fs::remove_dir(folder.path().join("checkpoints")).unwrap();
        assert!(take().is_ok(), "the mark stays");
    }
}
