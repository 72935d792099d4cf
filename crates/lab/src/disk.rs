//! Files that are whole or not there, and on the disk when a function returns.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

use crate::{Error, Result};

/// Writes a new file and waits for the disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes the names in a folder durable, where folders can be synchronised at all.
pub(crate) fn sync_folder(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Removes a file, if it is there.
///
/// # Errors
/// [`Error::Io`].
pub fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, "cannot remove the file")(e)),
        _ => Ok(()),
    }
}

/// Writes a whole file or nothing: a temporary file beside it, renamed.
///
/// # Errors
/// [`Error::Io`]; a file that was there is then as it was.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes))
}

/// [`write_atomically`] for what is written piece by piece.
///
/// # Errors
/// As [`write_atomically`]; those of `write`.
pub fn write_atomically_with(path: &Path, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let failed = || Error::io(path, "cannot write");
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(failed())?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".resolvent-").suffix(".tmp");
    #[cfg(unix)] // as any new file: what the user's mask leaves of rw-rw-rw-
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder).map_err(failed())?;
    write(file.as_file_mut()).map_err(failed())?;
    file.as_file().sync_all().map_err(failed())?;
    file.persist(path).map_err(|e| failed()(e.error))?;
    sync_folder(folder).map_err(failed())
}
