//! Opening and reading files, compressed or not, within the [budget].

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
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
    check_folder(folder)?;
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

/// Everything that the file at `path` holds, unpacked. What is compressed is unpacked twice, at first to count its bytes, so that they are
/// allocated once and never moved.
///
/// # Errors
/// As [`file()`]; [`Error::Budget`]; [`Error::Format`] for a damaged file.
pub fn unpack(path: &Path, held: &Held) -> Result<Vec<u8>> {
    if !is_compressed(path)? {
        return read(path, held);
    }
    let (length, failure) = counted(open(path)?, budget::limit());
    match failure {
        Some(source) => Err(Error::io(path, source)),
        None => read_all(path, open(path)?, length, held),
    }
}

/// How many bytes `reader` gives, at most one more than `most`, and why it ended where it failed.
fn counted(reader: impl Read, most: u64) -> (u64, Option<io::Error>) {
    let mut count = 0;
    let mut reader = BufReader::with_capacity(BUFFER, reader.take(most.saturating_add(1)));
    loop {
        match reader.fill_buf().map(<[u8]>::len) {
            Ok(0) => return (count, None),
            Ok(got) => {
                count += got as u64;
                reader.consume(got);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (count, Some(e)),
        }
    }
}

/// Reads exactly `expected` bytes and the end of the stream after them.
///
/// # Errors
/// [`Error::Length`] where there are more or fewer; [`Error::Budget`] where there are as many, and too many; that of the reader.
pub(crate) fn read_exactly(path: &Path, mut reader: impl Read, expected: u64, held: &Held) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let room = held.add(path, expected).and_then(|()| {
        let reserved = bytes.try_reserve_exact(expected as usize);
        reserved.map_err(|_| Error::Budget { path: path.into(), needed: expected, used: 0, limit: budget::limit() })
    });
    let kept = if room.is_ok() { reader.by_ref().take(expected).read_to_end(&mut bytes).err() } else { None };
    let (behind, failure) = match kept {
        Some(failure) => (0, Some(failure)),
        None => counted(reader, expected - bytes.len() as u64),
    };
    match failure {
        Some(source) if source.kind() != io::ErrorKind::UnexpectedEof => Err(Error::io(path, source)),
        None if bytes.len() as u64 + behind == expected => room.map(|()| bytes),
        _ => Err(Error::Length { path: path.into(), expected, got: bytes.len() as u64 + behind }),
    }
}

/// What `reader` gives until it ends or fails. Bytes are taken before they are allocated: `room` at first, then as many as
/// there are. While they move to a larger place, both count.
fn grow(path: &Path, mut reader: impl Read, mut room: u64, held: &Held) -> Result<(Vec<u8>, Option<io::Error>)> {
    let mut bytes = Vec::new();
    loop {
        let moved = bytes.len() as u64;
        held.add(path, moved.saturating_add(room))?;
        bytes.reserve_exact(room as usize);
        held.give_back(moved);
        let outcome = reader.by_ref().take(room).read_to_end(&mut bytes);
        if !matches!(outcome, Ok(got) if got as u64 == room) {
            shrink(path, &mut bytes, held);
            return Ok((bytes, outcome.err()));
        }
        room = bytes.len() as u64;
    }
}

/// Gives back what `bytes` have to spare, where it is much and there is room to move them.
fn shrink(path: &Path, bytes: &mut Vec<u8>, held: &Held) {
    let (length, spare) = (bytes.len() as u64, (bytes.capacity() - bytes.len()) as u64);
    if spare > FIRST / 4 && held.add(path, length).is_ok() {
        bytes.shrink_to_fit();
        held.give_back(length + spare);
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

/// Opens a zip archive whose members do not share their bytes (a small file could hold any number of them), and are called alike in both places
/// that name them. `damaged` makes
/// the error of one that is none.
pub fn zip<E: From<Error>>(
    path: &Path,
    damaged: impl Fn(&dyn std::fmt::Display) -> E,
) -> std::result::Result<ZipArchive<BufReader<File>>, E> {
    let mut archive = ZipArchive::new(BufReader::new(file(path)?)).map_err(|e| damaged(&e))?;
    if archive.has_overlapping_files().map_err(|e| damaged(&e))? {
        return Err(damaged(&"its members overlap"));
    }
    match misnamed(&mut archive, file(path)?) {
        Ok(None) => Ok(archive),
        Ok(Some(name)) => Err(damaged(&format!("`{name}` has another name where it begins"))),
        Err(e) => Err(damaged(&e)),
    }
}

/// The name of a member that is called otherwise where its bytes begin: no checksum is of the directory at an archive's end.
fn misnamed(archive: &mut ZipArchive<BufReader<File>>, mut file: File) -> io::Result<Option<String>> {
    /// Bytes of a member's header before its name, whose length is at `LENGTH`.
    const HEADER: usize = 30;
    const LENGTH: usize = 26;
    for index in 0..archive.len() {
        let member = archive.by_index_raw(index)?;
        let mut header = [0; HEADER];
        file.seek(SeekFrom::Start(member.header_start()))?;
        file.read_exact(&mut header)?;
        let mut name = vec![0; usize::from(u16::from_le_bytes([header[LENGTH], header[LENGTH + 1]]))];
        file.read_exact(&mut name)?;
        if name != member.name_raw() {
            return Ok(Some(String::from_utf8_lossy(member.name_raw()).into_owned()));
        }
    }
    Ok(None)
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
