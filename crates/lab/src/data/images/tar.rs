//! The entries of a tar archive.

use std::{
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    sync::Arc,
};

use tar::{Archive, Entries};

use super::entries::{Found, Kind, Location, Search, plain};
use crate::{
    data::{Error, Result},
    source,
};

/// Most bytes of what a tar archive says of one file beside its header, such as a long name.
const MAX_EXTENSION: u64 = 1 << 20;

/// A tar archive ends with two blocks of zeros, this many bytes.
const END: usize = 1024;

/// Adds the files of the archive to `found`.
pub(super) fn read(search: &Search<'_>, found: &mut Found) -> Result<()> {
    let damaged = |source: io::Error| damaged(search.path, &source);
    if source::is_compressed(search.path)? {
        let mut archive = Archive::new(ZeroTail { inner: source::open(search.path)?, zeros: 0 });
        entries(search, archive.entries().map_err(damaged)?, None, found)?;
        let mut rest = archive.into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(damaged)?;
        return if rest.zeros < END as u64 { Err(damaged(endless())) } else { Ok(()) };
    }
    let (mut file, length) = plain(search.path)?;
    let mut tail = [1; END];
    if length < END as u64 {
        return Err(damaged(endless()));
    }
    let ends = file.seek(SeekFrom::End(-(END as i64))).and_then(|_| file.read_exact(&mut tail));
    ends.and_then(|()| file.rewind()).map_err(damaged)?;
    let mut archive = Archive::new(file);
    entries(search, archive.entries_with_seek().map_err(damaged)?, Some((search.path.into(), length)), found)?;
    if tail.iter().any(|&byte| byte != 0) { Err(damaged(endless())) } else { Ok(()) }
}

fn endless() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "its end is missing")
}

fn damaged(path: &Path, source: &dyn std::fmt::Display) -> Error {
    let problem = format!("is no folder and no intact .tar, .tar.gz, .tar.xz, .tar.zst or .zip archive ({source})");
    Error::Format { path: path.into(), problem }
}

/// Goes through the archive; with its path and length, pictures are left where they are.
fn entries<R: Read>(
    search: &Search<'_>,
    entries: Entries<'_, R>,
    plain: Option<(Arc<Path>, u64)>,
    found: &mut Found,
) -> Result<()> {
    let damaged = |source: io::Error| damaged(search.path, &source);
    let mut long_name = None;
    // Raw: extensions of headers are read here, since the library reads them whatever their length.
    for entry in entries.raw(true) {
        let mut entry = entry.map_err(damaged)?;
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() || kind.is_gnu_longlink() {
            continue;
        }
        if kind.is_pax_local_extensions() || kind.is_gnu_longname() {
            let name = extended_name(&mut entry, kind.is_gnu_longname()).map_err(damaged)?;
            long_name = name.or(long_name);
            continue;
        }
        let name = long_name.take().unwrap_or_else(|| entry.path_bytes().into_owned());
        let name = String::from_utf8_lossy(&name).into_owned();
        let (is, size, offset) = ((search.kind)(&name), entry.size(), entry.raw_file_position());
        if kind.is_dir() {
            continue;
        }
        let wanted = matches!(is, Kind::Picture | Kind::Label);
        if wanted && !kind.is_file() {
            return Err(search.error(&name, "is a link or a device; pack the picture itself".into()));
        }
        let location = || match &plain {
            Some((_, length)) if offset.saturating_add(size) > *length => {
                Err(damaged(io::Error::new(io::ErrorKind::UnexpectedEof, format!("it ends within `{name}`"))))
            }
            Some((archive, _)) if is == Kind::Picture => {
                Ok(Location::Archive { archive: archive.clone(), offset, zipped: None })
            }
            _ => search.content(&name, size, &mut entry),
        };
        search.add(name.clone(), size, found, location)?;
    }
    match long_name {
        Some(_) => Err(damaged(io::Error::new(io::ErrorKind::UnexpectedEof, "the file after a long name is missing"))),
        None => Ok(()),
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
