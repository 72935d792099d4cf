//! The folder that a command writes its results to: its own, and nobody else's at the same time.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// The file that marks a folder as one of this program's; whoever writes to the folder holds its lock.
pub const MARK: &str = ".resolvent";

/// The folder in a run's that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// The file in a comparison's folder that holds what all its runs share.
pub const COMPARISON: &str = "comparison.json";
/// The name of a report in its folder.
pub const REPORT: &str = "report.html";

/// What a folder holds the results of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// A training run.
    Run,
    /// A comparison of runs.
    Comparison,
    /// An analysis of queries and keys.
    Analysis,
    /// An explanation of answers.
    Explanation,
    /// A benchmark.
    Bench,
}

impl Contents {
    const ALL: [Self; 5] = [Self::Run, Self::Comparison, Self::Analysis, Self::Explanation, Self::Bench];

    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Run => "a training run",
            Self::Comparison => "a comparison",
            Self::Analysis => "an analysis",
            Self::Explanation => "an explanation",
            Self::Bench => "a benchmark",
        }
    }

    /// What tells such a folder beside the mark.
    const fn known(self) -> Option<&'static str> {
        match self {
            Self::Run => Some(CHECKPOINTS),
            Self::Comparison => Some(COMPARISON),
            _ => None,
        }
    }

    /// What `folder` holds, by its mark, or by what tells it where the mark says nothing.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        let told = fs::read_to_string(folder.join(MARK)).unwrap_or_default();
        let known = |own: &&Self| own.known().is_some_and(|known| folder.join(known).exists());
        Self::ALL.into_iter().find(|own| told == own.words()).or_else(|| Self::ALL.iter().find(known).copied())
    }
}

/// Holds a folder until it is dropped. One that is then as empty as it was taken is left as it was found, also not there at all: who refuses
/// its arguments leaves nothing behind.
#[derive(Debug)]
pub struct Claim {
    #[allow(dead_code, reason = "held for its lock")]
    file: File,
    /// The folder, where this put the mark into it.
    marked: Option<PathBuf>,
    /// The folders that this made, the innermost first.
    made: Vec<PathBuf>,
}

impl Claim {
    /// Makes `folder` where there is none and takes it for `contents`. `files` are what would be written to it.
    ///
    /// # Errors
    /// [`Error::Foreign`] where one of `files` is there but the folder is not one of this program's, [`Error::Taken`] where it holds
    /// other contents, [`Error::Busy`] while another process writes to it, [`Error::Io`].
    pub fn take(folder: &Path, files: &[&'static str], contents: Contents) -> Result<Self> {
        let made = folder.ancestors().take_while(|path| !path.exists()).map(Path::to_path_buf).collect();
        fs::create_dir_all(folder).map_err(Error::io(folder, "cannot make the folder"))?;
        let (mark, holds) = (folder.join(MARK), Contents::of(folder));
        let ours = mark.exists() || holds.is_some();
        let marked = (!mark.exists()).then(|| folder.to_path_buf());
        let written = files.iter().find(|file| folder.join(file).exists());
        let told = |other: &Contents| other.known().is_some_and(|known| folder.join(known).exists());
        match (holds, written) {
            (Some(other), _) if other != contents && (written.is_some() || told(&other)) => {
                let (holds, wanted) = (other.words(), contents.words());
                return Err(Error::Taken { path: folder.to_path_buf(), holds, wanted });
            }
            (_, Some(file)) if !ours => return Err(Error::Foreign { path: folder.to_path_buf(), file }),
            _ => {}
        }
        // Not emptied before it is locked: another process may hold it.
        let file = File::options().create(true).truncate(false).write(true).open(&mark);
        let mut file = file.map_err(Error::io(&mark, "cannot mark the folder"))?;
        let locked = file.try_lock();
        if matches!(locked, Ok(()) | Err(TryLockError::Error(_))) {
            let words = contents.words().as_bytes();
            let written = file.set_len(0).and_then(|()| file.write_all(words));
            written.map_err(Error::io(&mark, "cannot mark the folder"))?;
        }
        match locked {
            Ok(()) => Ok(Self { file, marked, made }),
            Err(TryLockError::WouldBlock) => Err(Error::Busy { path: folder.to_path_buf() }),
            // Some network file systems have no locks: no reason not to write there.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(Self { file, marked, made }),
            Err(TryLockError::Error(e)) => Err(Error::io(&mark, "cannot lock the folder")(e)),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(folder) = &self.marked else { return };
        let alone = |entries: fs::ReadDir| entries.flatten().all(|entry| entry.file_name() == MARK);
        if fs::read_dir(folder).is_ok_and(alone) {
            // What cannot be removed stays, and says nothing wrong.
            let _ = fs::remove_file(folder.join(MARK));
            self.made.iter().for_each(|made| drop(fs::remove_dir(made)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_once_and_never_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let take = || Claim::take(folder.path(), &["report.html"], Contents::Run);
        fs::write(folder.path().join("report.html"), "mine").unwrap();
        assert!(matches!(take(), Err(Error::Foreign { file: "report.html", .. })));
        fs::create_dir(folder.path().join("checkpoints")).unwrap();
        let claim = take().unwrap();
        assert!(matches!(take(), Err(Error::Busy { .. })));
        drop(claim);
        fs::remove_dir(folder.path().join("checkpoints")).unwrap();
        assert!(take().is_ok(), "the mark stays");
    }

    /// Nothing is left of a claim under which nothing was written.
    #[test]
    fn an_unused_folder_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, outer) = (folder.path().join("runs/bench"), folder.path().join("runs"));
        let take = |folder: &Path| Claim::take(folder, &["report.html"], Contents::Bench).unwrap();
        drop(take(&inner));
        assert!(!outer.exists());
        fs::create_dir(&outer).unwrap();
        drop(take(&outer));
        assert_eq!(fs::read_dir(&outer).unwrap().count(), 0, "the folder was there before");
        let claim = take(&inner);
        fs::write(inner.join("report.html"), "a bench").unwrap();
        drop(claim);
        drop(take(&inner));
        assert!(inner.join(MARK).exists());
        fs::remove_file(inner.join("report.html")).unwrap();
        drop(take(&inner));
        assert!(inner.exists(), "it was marked before");
    }

    /// The report of a run is not overwritten by that of an analysis, with a mark that says what it is of or an empty one.
    #[test]
    fn a_folder_keeps_what_it_is_of() {
        for told in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let take = |contents| Claim::take(folder.path(), &["report.html"], contents);
            drop(take(Contents::Run).unwrap());
            fs::create_dir(folder.path().join(CHECKPOINTS)).unwrap();
            fs::write(folder.path().join("report.html"), "a run").unwrap();
            if !told {
                fs::write(folder.path().join(MARK), "").unwrap();
            }
            let error = take(Contents::Analysis).unwrap_err().to_string();
            assert!(error.contains("holds a training run") && error.contains("an analysis"), "{error}");
            assert!(take(Contents::Run).is_ok());
            // Nor is the folder of a run that has no report yet.
            fs::remove_file(folder.path().join("report.html")).unwrap();
            assert!(take(Contents::Comparison).is_err() && take(Contents::Run).is_ok());
        }
    }
}
