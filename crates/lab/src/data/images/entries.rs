//! The files of a folder, a tar archive (plain, gzip, xz, zstd) or a zip archive, one after the other.

use std::{
    io::{self, Read},
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::SyncSender,
    },
};

use super::Encoded;
use crate::{
    budget::{Held, text_bytes},
    data::{Error, Result},
    source,
};

/// Most bytes of one encoded picture; more is a mistake or an attack.
const MAX_FILE: u64 = 256 << 20;

/// Most bytes of what a tar archive says of one file beside its header, such as a long name.
const MAX_EXTENSION: u64 = 1 << 20;

/// Depth of folders that is still looked into; also what ends a circle of links.
const MAX_DEPTH: usize = 16;

/// A tar archive ends with two blocks of zeros, this many bytes.
const TAR_END: u64 = 1024;

/// Sends every picture, told by its name's ending, to `sink`; returns the names of all other files. Hidden files and what
/// desktop systems add are left out. Ends early once `full` says that what is sent is no longer decoded.
pub(super) fn read(path: &Path, sink: SyncSender<Encoded>, held: &Held, full: &AtomicBool) -> Result<Vec<String>> {
    let mut reader = EntryReader { path, sink, held, full, others: Vec::new() };
    if path.is_dir() {
        reader.folder(path, "", 0)?;
    } else if source::starts_with(path, b"PK")? {
        reader.zip()?;
    } else {
        reader.tar()?;
    }
    Ok(reader.others)
}

struct EntryReader<'a> {
    path: &'a Path,
    sink: SyncSender<Encoded>,
    held: &'a Held,
    full: &'a AtomicBool,
    others: Vec<String>,
}

impl EntryReader<'_> {
    fn folder(&mut self, folder: &Path, prefix: &str, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            let problem = format!("is nested deeper than {MAX_DEPTH} folders; is there a circle of links?");
            return Err(self.entry_error(prefix, &problem));
        }
        for path in source::entries(folder)? {
            let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
            if path.is_dir() {
                if !is_ignored(&name) {
                    self.folder(&path, &format!("{name}/"), depth + 1)?;
                }
            } else if self.wants(&name)? {
                let file = source::file(&path)?;
                let length = file.metadata().map_err(|source| Error::io(&path, source))?.len();
                self.send(name, file, length)?;
            }
        }
        Ok(())
    }

    fn zip(&mut self) -> Result<()> {
        let path = self.path;
        let damaged = |problem: &dyn std::fmt::Display| Error::Format {
            path: path.into(),
            problem: format!("cannot be read as a zip archive ({problem}); fetch it again"),
        };
        let mut archive = source::zip(path, damaged)?;
        for index in 0..archive.len() {
            let entry = archive.by_index(index).map_err(|e| damaged(&e))?;
            let name = entry.name().map_err(|e| damaged(&e))?.into_owned();
            if entry.is_file() && self.wants(&name)? {
                let size = entry.size();
                self.send(name, entry, size)?;
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
        let mut archive = tar::Archive::new(ZeroTail { inner: source::open(path)?, zeros: 0 });
        let mut long_name = None;
        // Raw: extensions of headers are read here, since the library reads them whatever their length.
        for entry in archive.entries().map_err(damaged)?.raw(true) {
            let mut entry = entry.map_err(damaged)?;
            let kind = entry.header().entry_type();
            if kind.is_pax_global_extensions() || kind.is_gnu_longlink() {
                continue;
            }
            if kind.is_pax_local_extensions() || kind.is_gnu_longname() {
                let found = extended_name(&mut entry, kind.is_gnu_longname()).map_err(damaged)?;
                long_name = found.or(long_name);
                continue;
            }
            let name = long_name.take().unwrap_or_else(|| entry.path_bytes().into_owned());
            let name = String::from_utf8_lossy(&name).into_owned();
            if kind.is_dir() || !self.wants(&name)? {
                continue;
            }
            if !kind.is_file() {
                return Err(self.entry_error(&name, "is a link or a device; pack the picture itself"));
            }
            let size = entry.size();
            self.send(name, entry, size)?;
        }
        if long_name.is_some() {
            return Err(damaged(io::Error::new(io::ErrorKind::UnexpectedEof, "the file after a long name is missing")));
        }
        let mut rest = archive.into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(damaged)?;
        if rest.zeros < TAR_END {
            return Err(damaged(io::Error::new(io::ErrorKind::UnexpectedEof, "its end is missing")));
        }
        Ok(())
    }

    /// Whether `name` is a picture; remembers what is none.
    fn wants(&mut self, name: &str) -> Result<bool> {
        let extension = Path::new(name).extension().map(|extension| extension.to_string_lossy().to_lowercase());
        let picture = extension.is_some_and(|extension| ["png", "jpg", "jpeg"].contains(&&*extension));
        let ignored = is_ignored(name);
        if !picture && !ignored {
            self.held.add(self.path, text_bytes(name))?;
            self.others.push(name.to_string());
        }
        Ok(picture && !ignored && !self.full.load(Relaxed))
    }

    /// Sends the picture `name` of `length` bytes.
    fn send(&self, name: String, file: impl Read, length: u64) -> Result<()> {
        if length > MAX_FILE {
            return Err(self.entry_error(&name, "has more than 256 MiB; is it a picture?"));
        }
        let held = Held::waiting(&self.path.join(&name), length + text_bytes(&name))?;
        let mut bytes = Vec::with_capacity(length as usize + 1);
        let read = file.take(length + 1).read_to_end(&mut bytes);
        read.map_err(|source| self.entry_error(&name, &format!("cannot be read ({source}); fetch the data again")))?;
        if bytes.len() as u64 != length {
            let problem = format!("has not the {length} bytes that it should have; fetch the data again");
            return Err(self.entry_error(&name, &problem));
        }
        // The receiver outlives this thread, unless a decoder panicked, which is reported there.
        let _ = self.sink.send(Encoded { name, bytes, held });
        Ok(())
    }

    fn entry_error(&self, name: &str, problem: &str) -> Error {
        Error::Entry { path: self.path.into(), entry: name.into(), problem: problem.into() }
    }
}

/// The name that a header's extension gives to the file after it, if it does.
fn extended_name(entry: &mut tar::Entry<'_, impl Read>, is_name: bool) -> io::Result<Option<Vec<u8>>> {
    let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
    if entry.size() > MAX_EXTENSION {
        return Err(invalid("a header of more than 1 MiB"));
    }
    let mut text = Vec::new();
    entry.read_to_end(&mut text)?;
    if is_name {
        text.truncate(text.iter().position(|&byte| byte == 0).unwrap_or(text.len()));
        return Ok(Some(text));
    }
    let mut name = None;
    for extension in tar::PaxExtensions::new(&text) {
        let extension = extension?;
        match extension.key_bytes() {
            b"path" => name = Some(extension.value_bytes().to_vec()),
            b"size" => return Err(invalid("a file of more than 8 GiB")),
            _ => {}
        }
    }
    Ok(name)
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
