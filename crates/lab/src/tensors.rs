//! The header of a safetensors file, read before any of its tensors.

use std::{fs::File, io::Read, path::Path};

use resolvent_kernels::mechanism::check_distinct;
use safetensors::tensor::Metadata;

use crate::{
    Error, Result,
    budget::{Held, TREE},
};

/// Bytes of the number that a file begins with: the length of the header's text.
const SIZE: u64 = 8;

/// Headers longer than this are damage: one has about 100 bytes per tensor.
const LONGEST: u64 = 100_000_000;

/// What a file says of its tensors.
#[derive(Debug)]
pub struct Header {
    /// Names, types, shapes and places of the tensors.
    pub metadata: Metadata,
    /// Where the data of the tensors begins.
    pub data: u64,
    /// CRC-32 of everything before.
    pub crc32: u32,
}

impl Header {
    /// Reads the header of `file`, which is at its beginning and lies in `path`; `remedy` says what to do about one that is damaged.
    ///
    /// # Errors
    /// As [`Header::of`]; [`Error::Io`].
    pub fn read(path: &Path, file: &File, remedy: &str) -> Result<Self> {
        let length = file.metadata().map_err(Error::io(path, "cannot read the tensors"))?.len();
        Self::of(path, file, length, remedy)
    }

    /// The same of `length` bytes from anywhere.
    ///
    /// # Errors
    /// [`Error::Damaged`] for what is no such file, is cut off, names a tensor twice, or has more or fewer bytes than its header says;
    /// [`Error::Data`] for a header beyond the budget.
    pub fn of(path: &Path, mut from: impl Read, length: u64, remedy: &str) -> Result<Self> {
        let failed = || Error::io(path, "cannot read the tensors");
        let damaged = |problem: String| Error::damaged(path, format!("{problem}; {remedy}"));
        if length < SIZE {
            return Err(damaged("is no valid safetensors file (too short)".into()));
        }
        let mut size = [0; SIZE as usize];
        from.read_exact(&mut size).map_err(failed())?;
        let text_bytes = u64::from_le_bytes(size);
        if text_bytes > LONGEST || text_bytes + SIZE > length {
            return Err(damaged("is no valid safetensors file, or cut off".into()));
        }
        let tree = Held::new();
        tree.add(path, TREE.saturating_mul(text_bytes))?;
        let mut text = vec![0; text_bytes as usize];
        from.read_exact(&mut text).map_err(failed())?;
        let metadata: Metadata = serde_json::from_slice(&text)
            .map_err(|e| damaged(format!("has a header that is no valid JSON of tensors ({e})")))?;
        check_distinct(&String::from_utf8_lossy(&text)).map_err(|e| damaged(format!("has a damaged header: {e}")))?;
        let data = SIZE + text_bytes;
        let expected = data + metadata.data_len() as u64;
        if length != expected {
            let problem = "is cut off or has something appended";
            return Err(damaged(format!("{problem}: it has {length} bytes, its header says {expected}")));
        }
        let mut crc32 = crc32fast::Hasher::new();
        crc32.update(&size);
        crc32.update(&text);
        Ok(Self { metadata, data, crc32: crc32.finalize() })
    }
}
