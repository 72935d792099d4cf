//! The files of a folder, a tar archive (plain, gzip, xz, zstd) or a zip archive, one after the other.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read},
    path::Path,
    sync::mpsc::SyncSender,
};

use crate::data::{
    Error, Result,
    source::{open, starts_with},
};

/// Most bytes of one encoded picture; more is a mistake or an attack.
const MAX_FILE: u64 = 256 << 20;

/// Depth of folders that is still looked into; also what ends a circle of links.
const MAX_DEPTH: usize = 16;

/// A tar archive ends with two blocks of zeros, this many bytes.
const TAR_END: u64 = 1024;

/// Where pictures go: their name within `path`, and their encoded bytes.
type Sink = SyncSender<(String, Vec<u8>)>;

/// Sends every picture, told by its name's ending, to `sink`; returns the names of all other files. Hidden files and what
/// desktop systems add are left out.
pub(super) fn read(path: &Path, sink: &Sink) -> Result<Vec<String>> {
    let mut reader = EntryReader { path, sink, others: Vec::new() };
    if path.is_dir() {
        reader.folder(path, "", 0)?;
    } else if starts_with(path, b"PK")? {
        reader.zip()?;
    } else {
        reader.tar()?;
    }
    Ok(reader.others)
}

struct EntryReader<'a> {
    path: &'a Path,
    sink: &'a Sink,
    others: Vec<String>,
}

impl EntryReader<'_> {
    fn folder(&mut self, folder: &Path, prefix: &str, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            let problem = format!("is nested deeper than {MAX_DEPTH} folders; is there a circle of links?");
            return Err(self.entry_error(prefix, &problem));
        }
        let list = || fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>();
        for entry in list().map_err(|source| Error::io(folder, source))? {
            let path = entry.path();
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if path.is_dir() {
                if !is_ignored(&name) {
                    self.folder(&path, &format!("{name}/"), depth + 1)?;
                }
            } else if self.wants(&name) {
                let file = File::open(&path).map_err(|source| Error::io(&path, source))?;
                self.send(name, file)?;
            }
        }
        Ok(())
    }

    fn zip(&mut self) -> Result<()> {
        let path = self.path;
        let damaged = |problem: zip::result::ZipError| Error::Format {
            path: path.into(),
            problem: format!("cannot be read as a zip archive ({problem}); fetch it again"),
        };
        let file = File::open(path).map_err(|source| Error::io(path, source))?;
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(damaged)?;
        for index in 0..archive.len() {
            let entry = archive.by_index(index).map_err(damaged)?;
            let name = entry.name().map_err(damaged)?.into_owned();
            if entry.is_file() && self.wants(&name) {
                self.send(name, entry)?;
            }
        }
        Ok(())
    }

    fn tar(&mut self) -> Result<()> {
        let path = self.path;
        let damaged = |source: io::Error| Error::Format {
            path: path.into(),
            problem: format!("is no folder and no intact .tar, .tar.gz, .tar.xz, .tar.zst or .zip archive ({source})"),
        };
        let mut archive = tar::Archive::new(ZeroTail { inner: open(path)?, zeros: 0 });
        for entry in archive.entries().map_err(damaged)? {
            let entry = entry.map_err(damaged)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let kind = entry.header().entry_type();
            if kind.is_dir() || !self.wants(&name) {
                continue;
            }
            if !kind.is_file() {
                return Err(self.entry_error(&name, "is a link or a device; pack the picture itself"));
            }
            self.send(name, entry)?;
        }
        let mut rest = archive.into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(damaged)?;
        if rest.zeros < TAR_END {
            return Err(damaged(io::Error::new(io::ErrorKind::UnexpectedEof, "its end is missing")));
        }
        Ok(())
    }

    /// Whether `name` is a picture; remembers what is none.
    fn wants(&mut self, name: &str) -> bool {
        let extension = Path::new(name).extension().map(|extension| extension.to_string_lossy().to_lowercase());
        let picture = extension.is_some_and(|extension| ["png", "jpg", "jpeg"].contains(&&*extension));
        let ignored = is_ignored(name);
        if !picture && !ignored {
            self.others.push(name.to_string());
        }
        picture && !ignored
    }

    fn send(&self, name: String, file: impl Read) -> Result<()> {
        let mut bytes = Vec::new();
        let read = file.take(MAX_FILE + 1).read_to_end(&mut bytes);
        read.map_err(|source| self.entry_error(&name, &format!("cannot be read ({source}); fetch the data again")))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(self.entry_error(&name, "has more than 256 MiB; is it a picture?"));
        }
        // The receiver outlives this thread, unless a decoder panicked, which is reported there.
        let _ = self.sink.send((name, bytes));
        Ok(())
    }

    fn entry_error(&self, name: &str, problem: &str) -> Error {
        Error::Entry { path: self.path.into(), entry: name.into(), problem: problem.into() }
    }
}

/// Whether a file is hidden or made by a desktop system.
fn is_ignored(name: &str) -> bool {
    let hidden = |part: &str| part.starts_with('.') && part != "." && part != "..";
    name.split('/').any(|part| hidden(part) || ["__MACOSX", "Thumbs.db", "desktop.ini"].contains(&part))
}

/// Counts the zeros at the end of what has been read.
struct ZeroTail<R> {
    inner: R,
    zeros: u64,
}

impl<R: Read> Read for ZeroTail<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        match buffer[..count].iter().rposition(|&byte| byte != 0) {
            Some(last) => self.zeros = (count - 1 - last) as u64,
            None => self.zeros += count as u64,
        }
        Ok(count)
    }
}
