//! NumPy's files: one array (.npy), and archives of them (.npz).
//!
//! An array is a magic number, a header that is the text of a Python dictionary, and the elements. An archive is a zip of
//! arrays; where it is compressed, an array is unpacked to a temporary file, so that sequences can be read one by one.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use safetensors::Dtype;
use serde::Deserialize;
use zip::{CompressionMethod, ZipArchive};

use super::{Contents, Entry, Part, header::open};
use crate::{Error, Result};

/// What every array begins with.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// The arrays of a folder, `layers.3.q.npy` as `layers.3.q`.
pub(super) fn folder(path: &Path) -> Result<Contents> {
    let mut contents = Contents::default();
    let reading = || Error::io(path, "cannot list the folder");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(reading())? {
        names.push(entry.map_err(reading())?.path());
    }
    names.sort();
    for file in names.iter().filter(|file| file.extension().is_some_and(|e| e == "npy")) {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        array(file, &name, &mut contents)?;
    }
    if contents.files.is_empty() {
        return Err(Error::damaged(
            path,
            "is a folder without .npy files; name the dump, or a folder of q.npy, k.npy, v.npy",
        ));
    }
    Ok(contents)
}

/// Adds the array of a file.
pub(super) fn array(path: &Path, name: &str, contents: &mut Contents) -> Result<()> {
    let mut file = open(path)?;
    let length = file.metadata().map_err(Error::io(path, "cannot open the dump"))?.len();
    let entry = entry(path, name, &mut file, (0, length), contents.files.len())?;
    contents.tensors.push(entry);
    contents.files.push(Part { path: path.into(), file });
    Ok(())
}

/// The arrays of an archive.
pub(super) fn archive(path: &Path) -> Result<Contents> {
    let damaged = |e: &dyn std::fmt::Display| {
        Error::damaged(path, format!("is no whole NumPy archive ({e}); write it again with numpy.savez"))
    };
    let mut zip = ZipArchive::new(open(path)?).map_err(|e| damaged(&e))?;
    let mut contents = Contents { files: vec![Part { path: path.into(), file: open(path)? }], tensors: Vec::new() };
    for index in 0..zip.len() {
        let mut member = zip.by_index(index).map_err(|e| damaged(&e))?;
        let name = member.name().map_err(|e| damaged(&e))?.into_owned();
        let Some(name) = name.strip_suffix(".npy") else { continue };
        let size = member.size();
        let stored = member.data_start().filter(|_| member.compression() == CompressionMethod::Stored);
        let (file, from) = match stored {
            Some(start) => (0, start),
            None => {
                let mut unpacked = tempfile::tempfile().map_err(Error::io(path, "cannot unpack an array"))?;
                io::copy(&mut member, &mut unpacked).map_err(|e| damaged(&format!("{name}: {e}")))?;
                contents.files.push(Part { path: path.into(), file: unpacked });
                (contents.files.len() - 1, 0)
            }
        };
        let entry = entry(path, name, &mut contents.files[file].file, (from, size), file)?;
        contents.tensors.push(entry);
    }
    Ok(contents)
}

/// The array of `length` bytes from `start` of a file on.
fn entry(path: &Path, name: &str, file: &mut File, (start, length): (u64, u64), index: usize) -> Result<Entry> {
    let problem = |problem: String| Error::damaged(path, format!("array `{name}` {problem}"));
    let cut = |_| problem("is no whole NumPy array; write it again with numpy.save".into());
    file.seek(SeekFrom::Start(start)).map_err(cut)?;
    let mut fixed = [0; 8];
    file.read_exact(&mut fixed).map_err(cut)?;
    if &fixed[..6] != MAGIC || !(1..=3).contains(&fixed[6]) {
        return Err(problem("is no NumPy array of version 1 to 3; write it again with numpy.save".into()));
    }
    let mut size = [0; 4];
    let digits = if fixed[6] == 1 { 2 } else { 4 };
    file.read_exact(&mut size[..digits]).map_err(cut)?;
    let size = u32::from_le_bytes(size);
    let mut text = Vec::new();
    file.take(size.into()).read_to_end(&mut text).map_err(cut)?;
    let dictionary = dictionary(&text).map_err(|e| problem(format!("has a damaged header ({e}); write it again")))?;
    let Dictionary { descr, fortran_order, shape } = dictionary;
    if fortran_order && shape.len() > 1 {
        return Err(problem("is stored column by column; save numpy.ascontiguousarray(x)".into()));
    }
    let begin = 8 + digits as u64 + u64::from(size);
    let dtype = dtype(&descr);
    if let Ok(dtype) = dtype {
        let elements = shape.iter().try_fold(1_u64, |all, &n| all.checked_mul(n as u64));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64 / 8)).and_then(|n| n.checked_add(begin));
        if bytes != Some(length) {
            return Err(problem(format!("of shape {shape:?} does not fit the {length} bytes it has; write it again")));
        }
    }
    Ok(Entry { name: name.into(), dtype, shape, file: index, start: start + begin })
}

/// What an array's header says.
#[derive(Debug, Deserialize)]
struct Dictionary {
    /// A type's name; a list for records.
    descr: serde_json::Value,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`: JSON but for its signs.
fn dictionary(text: &[u8]) -> std::result::Result<Dictionary, String> {
    let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
    let json = text.replace('\'', "\"").replace('(', "[").replace(')', "]");
    let json = json.replace("False", "false").replace("True", "true");
    let kept = |(at, c): (usize, char)| (c != ',' || !json[at + 1..].trim_start().starts_with([']', '}'])).then_some(c);
    let json: String = json.char_indices().filter_map(kept).collect();
    serde_json::from_str(json.trim()).map_err(|e| e.to_string())
}

/// The type of that name, little-endian or of one byte.
fn dtype(descr: &serde_json::Value) -> std::result::Result<Dtype, String> {
    let named = descr.as_str().ok_or_else(|| "record".to_owned())?;
    match named {
        "<f2" => Ok(Dtype::F16),
        "<f4" => Ok(Dtype::F32),
        "<f8" => Ok(Dtype::F64),
        "|u1" => Ok(Dtype::U8),
        "|b1" => Ok(Dtype::BOOL),
        other if other.starts_with('>') => Err(format!("{other} (big-endian)")),
        other => Err(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::analyze::Dump;

    /// An array as NumPy writes it.
    fn npy(descr: &str, fortran: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let mut header = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}");
        header += &" ".repeat(63 - (10 + header.len()) % 64);
        header.push('\n');
        let size = (header.len() as u16).to_le_bytes();
        [MAGIC, &[1, 0], &size, header.as_bytes(), data].concat()
    }

    fn floats(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
    }

    fn opened(name: &str, bytes: &[u8]) -> Result<Dump> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Dump::open(&path)
    }

    fn zipped(method: CompressionMethod, members: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        for (name, bytes) in members {
            zip.start_file(*name, options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    #[test]
    fn one_array_is_tied_queries() {
        let mut dump = opened("q.npy", &npy("<f4", "False", "(2, 3)", &floats(6))).unwrap();
        assert!(dump.layers()[0].tied());
        assert_eq!(dump.sequence(0, 0).unwrap().q, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let half: Vec<u8> = [1.5, -2.0].iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(
            opened("q.npy", &npy("<f2", "False", "(1, 2)", &half)).unwrap().sequence(0, 0).unwrap().q,
            [1.5, -2.0]
        );
    }

    #[test]
    fn archives_stored_and_compressed() {
        let members = [
            ("layers.0.q.npy", npy("<f4", "False", "(2, 1, 3, 2)", &floats(12))),
            (
                "layers.0.v.npy",
                npy("<f8", "False", "(2, 1, 3, 1)", &[1.0_f64, 2., 3., 4., 5., 6.].map(f64::to_le_bytes).concat()),
            ),
            ("layers.0.key_mask.npy", npy("|b1", "False", "(2, 3)", &[1, 1, 1, 1, 0, 1])),
            ("readme.txt", b"not an array".to_vec()),
        ];
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let mut dump = opened("d.npz", &zipped(method, &members)).unwrap();
            assert_eq!(dump.sequence(0, 0).unwrap().shape.seq_q, 3);
            let masked = dump.sequence(0, 1).unwrap();
            assert_eq!((masked.shape.seq_q, masked.shape.seq_kv), (2, 2));
            assert_eq!((masked.q, masked.v), (vec![6.0, 7.0, 10.0, 11.0], Some(vec![4.0, 6.0])));
        }
    }

    #[test]
    fn what_is_no_array_is_named() {
        let refused = |bytes: &[u8]| opened("q.npy", bytes).unwrap_err().to_string();
        let good = npy("<f4", "False", "(2, 3)", &floats(6));
        assert!(refused(&good[..good.len() - 1]).contains("does not fit"));
        assert!(refused(&good[..9]).contains("no whole NumPy array"));
        assert!(refused(&npy("<f4", "True", "(2, 3)", &floats(6))).contains("ascontiguousarray"));
        assert!(refused(&npy(">f4", "False", "(2, 3)", &floats(6))).contains(">f4 (big-endian)"));
        assert!(refused(&npy("<i8", "False", "(2, 3)", &[0; 48])).contains("has type <i8"));
        assert!(refused(&npy("<f4", "Maybe", "(2, 3)", &floats(6))).contains("damaged header"));
        assert!(refused(&npy("<f4", "False", "(99999999999, 99999999999)", &[])).contains("does not fit"));
        let zip = zipped(CompressionMethod::Deflated, &[("q.npy", good)]);
        assert!(refused(&zip[..zip.len() - 9]).contains("no whole NumPy archive"));
    }
}
