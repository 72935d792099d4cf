//! Opening files, compressed or not.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use super::{Error, Result};

/// Bytes read from disk at a time: large enough that system calls do not show.
const BUFFER: usize = 1 << 18;

/// Checks that `path` is a folder.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    if path.metadata().map_err(|source| Error::io(path, source))?.is_dir() {
        return Ok(());
    }
    Err(Error::Format { path: path.into(), problem: "is a file, expected a folder".into() })
}

/// Whether the file starts with `magic`.
pub(crate) fn starts_with(path: &Path, magic: &[u8]) -> Result<bool> {
    let mut start = Vec::new();
    let file = File::open(path).map_err(|source| Error::io(path, source))?;
    file.take(magic.len() as u64).read_to_end(&mut start).map_err(|source| Error::io(path, source))?;
    Ok(start == magic)
}

/// Opens `path` and undoes gzip, xz or zstd compression, told by the first bytes and not by the name.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Read>> {
    let fail = |source| Error::io(path, source);
    let file = File::open(path).map_err(fail)?;
    if file.metadata().map_err(fail)?.is_dir() {
        return Err(Error::Format { path: path.into(), problem: "is a folder, expected a file".into() });
    }
    let mut file = BufReader::with_capacity(BUFFER, file);
    let start = file.fill_buf().map_err(fail)?;
    Ok(match start {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Box::new(lzma_rust2::XzReader::new(file, true)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(file);
            Box::new(decoder.map_err(|problem| fail(io::Error::new(io::ErrorKind::InvalidData, problem)))?)
        }
        _ => Box::new(file),
    })
}

/// Reads exactly `expected` bytes and the end of the stream after them.
pub(crate) fn read_exactly(path: &Path, reader: impl Read, expected: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let outcome = reader.take(expected.saturating_add(1)).read_to_end(&mut bytes);
    let got = bytes.len() as u64;
    match outcome {
        Ok(_) if got == expected => Ok(bytes),
        Ok(_) => Err(Error::Length { path: path.into(), expected, got }),
        Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            Err(Error::Length { path: path.into(), expected, got })
        }
        Err(source) => Err(Error::io(path, source)),
    }
}
