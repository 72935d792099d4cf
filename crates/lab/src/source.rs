//! Opening and reading files, compressed or not, within the [budget].

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    ops::Deref,
    path::{Path, PathBuf},
};

use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use zip::ZipArchive;

use crate::{
    budget::{self, Held, TREE},
    error::data::{Error, Result},
};

/// Bytes read from disk at a time: large enough that system calls do not show.
const BUFFER: usize = 1 << 18;

/// Bytes that are first taken for what tells no length.
const FIRST: u64 = 1 << 14;

/// Opens `path`, which must be an ordinary file: a pipe would wait for its writer, a device may never end.
///
/// # Errors
/// [`Error::NotAFile`]; [`Error::Format`] for a folder; [`Error::Missing`], [`Error::Io`].
pub fn file(path: &Path) -> Result<File> {
    let found = path.metadata().map_err(|source| Error::io(path, source))?;
    if found.is_dir() {
        return Err(Error::Format { path: path.into(), problem: "is a folder, expected a file".into() });
    }
    if !found.is_file() {
        return Err(Error::NotAFile { path: path.into(), kind: kind(&found) });
    }
    File::open(path).map_err(|source| Error::io(path, source))
}

fn kind(found: &fs::Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = found.file_type();
        if kind.is_fifo() {
            return "a pipe";
        } else if kind.is_socket() {
            return "a socket";
        }
    }
    let _ = found;
    "a device"
}

/// Checks that `path` is a folder.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    if path.metadata().map_err(|source| Error::io(path, source))?.is_dir() {
        return Ok(());
    }
    Err(Error::Format { path: path.into(), problem: "is a file, expected a folder".into() })
}

/// What lies in `folder`, in the order of the names.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    let mut found = list().map_err(|source| Error::io(folder, source))?;
    found.sort();
    Ok(found)
}

/// Whether the file starts with `magic`.
pub(crate) fn starts_with(path: &Path, magic: &[u8]) -> Result<bool> {
    let mut start = Vec::new();
    file(path)?.take(magic.len() as u64).read_to_end(&mut start).map_err(|source| Error::io(path, source))?;
    Ok(start == magic)
}

/// The bytes of a file as it is.
///
/// # Errors
/// As [`file()`], and [`Error::Budget`].
pub fn read(path: &Path, held: &Held) -> Result<Vec<u8>> {
    let file = file(path)?;
    let length = file.metadata().map_err(|source| Error::io(path, source))?.len();
    read_all(path, file, length, held)
}

/// Everything that `reader` gives, which is likely `expected` bytes (0 where nobody knows).
///
/// # Errors
/// [`Error::Budget`]; that of the reader.
pub fn read_all(path: &Path, reader: impl Read, expected: u64, held: &Held) -> Result<Vec<u8>> {
    // One more than expected, so that the end shows.
    let first = if expected == 0 { FIRST } else { expected.saturating_add(1) };
    match grow(path, reader, first, held)? {
        (bytes, None) => Ok(bytes),
        (_, Some(source)) => Err(Error::io(path, source)),
    }
}

/// Reads exactly `expected` bytes and the end of the stream after them.
pub(crate) fn read_exactly(path: &Path, reader: impl Read, expected: u64, held: &Held) -> Result<Vec<u8>> {
    let (bytes, failure) = grow(path, reader.take(expected.saturating_add(1)), FIRST, held)?;
    let got = bytes.len() as u64;
    match failure {
        None if got == expected => Ok(bytes),
        Some(source) if source.kind() != io::ErrorKind::UnexpectedEof => Err(Error::io(path, source)),
        _ => Err(Error::Length { path: path.into(), expected, got }),
    }
}

/// What `reader` gives until it ends or fails. Bytes are taken before they are allocated: `room` at first, then as many as
/// there are.
fn grow(path: &Path, mut reader: impl Read, mut room: u64, held: &Held) -> Result<(Vec<u8>, Option<io::Error>)> {
    let mut bytes = Vec::new();
    loop {
        held.add(path, room)?;
        bytes.reserve_exact(room as usize);
        let outcome = reader.by_ref().take(room).read_to_end(&mut bytes);
        if !matches!(outcome, Ok(got) if got as u64 == room) {
            let spare = bytes.capacity() - bytes.len();
            bytes.shrink_to_fit();
            held.give_back(spare as u64);
            return Ok((bytes, outcome.err()));
        }
        room = bytes.len() as u64;
    }
}

/// The text of a document that is parsed into a tree: a recipe, a mechanism, an annotation. Holds bytes for both.
#[derive(Debug)]
pub struct Document {
    text: String,
    _held: Held,
}

impl Document {
    /// Reads the document in `path`.
    ///
    /// # Errors
    /// As [`read`], and [`Error::Format`] for what is not UTF-8.
    pub fn read(path: &Path) -> Result<Self> {
        let held = Held::new();
        let bytes = read(path, &held)?;
        held.add(path, TREE.saturating_mul(bytes.len() as u64))?;
        let problem = |_| Error::Format { path: path.into(), problem: "is no text in UTF-8; write it again".into() };
        Ok(Self { text: String::from_utf8(bytes).map_err(problem)?, _held: held })
    }
}

impl Deref for Document {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

/// The first bytes of compressed files.
const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Opens `path` and undoes gzip, xz or zstd compression, told by the first bytes and not by the name.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Read>> {
    let fail = |source| Error::io(path, source);
    let mut file = BufReader::with_capacity(BUFFER, file(path)?);
    let start = file.fill_buf().map_err(fail)?;
    if start.starts_with(GZIP) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(file)));
    }
    if start.starts_with(XZ) {
        let kibibytes = u32::try_from(budget::limit() >> 10).unwrap_or(u32::MAX);
        return Ok(Box::new(lzma_rust2::XzReader::new_mem_limit(file, true, kibibytes)));
    }
    Ok(if start.starts_with(ZSTD) { Box::new(Frames::new(file).map_err(fail)?) } else { Box::new(file) })
}

/// Whether [`open`] undoes a compression of `path`.
pub(crate) fn is_compressed(path: &Path) -> Result<bool> {
    let magic: [&[u8]; 3] = [GZIP, XZ, ZSTD];
    magic.into_iter().try_fold(false, |found, magic| Ok(found || starts_with(path, magic)?))
}

/// Opens a zip archive whose members do not share their bytes: a small file could hold any number of them. `damaged` makes
/// the error of one that is none.
pub fn zip<E: From<Error>>(
    path: &Path,
    damaged: impl Fn(&dyn std::fmt::Display) -> E,
) -> std::result::Result<ZipArchive<BufReader<File>>, E> {
    let mut archive = ZipArchive::new(BufReader::new(file(path)?)).map_err(|e| damaged(&e))?;
    match archive.has_overlapping_files() {
        Ok(false) => Ok(archive),
        Ok(true) => Err(damaged(&"its members overlap")),
        Err(e) => Err(damaged(&e)),
    }
}

/// A zstd file: frames one after the other, of which the decoder knows the first only, and whose checksums it leaves to others.
struct Frames {
    decoder: Option<StreamingDecoder<BufReader<File>, FrameDecoder>>,
}

impl Frames {
    fn new(file: BufReader<File>) -> io::Result<Self> {
        let damaged = |problem| io::Error::new(io::ErrorKind::InvalidData, problem);
        Ok(Self { decoder: Some(StreamingDecoder::new(file).map_err(damaged)?) })
    }
}

impl Read for Frames {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            match decoder.read(buffer)? {
                0 if !buffer.is_empty() => {}
                count => return Ok(count),
            }
            let Some((mut rest, frame)) = self.decoder.take().map(StreamingDecoder::into_parts) else { break };
            let stated = frame.get_checksum_from_data();
            if stated.is_some() && stated != frame.get_calculated_checksum() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "wrong checksum"));
            }
            if !rest.fill_buf()?.is_empty() {
                *self = Self::new(rest)?;
            }
        }
        Ok(0)
    }
}
