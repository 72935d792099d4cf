//! NumPy's files: one array (.npy), and archives of them (.npz).
//!
//! An array is a magic number, a header that is the text of a Python dictionary, and the elements. An archive is a zip of
//! arrays; where it is compressed, an array is unpacked to a temporary
//! file, so that sequences can be read one by one.

use std::{
    io::{self, Read},
    path::Path,
};

use resolvent_lab::{Error, Result, budget::Held, source};
use safetensors::Dtype;
use serde::Deserialize;
use zip::CompressionMethod;

use super::{Contents, Entry, Part, layer::NAMES};

/// What every array begins with.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Longer headers are damage: NumPy itself reads 10,000 bytes.
const LONGEST: u32 = 1 << 20;

/// The arrays of a folder, `layers.3.q.npy` as `layers.3.q`.
pub(super) fn folder(path: &Path) -> Result<Contents> {
    let mut contents = Contents::default();
    let names = source::entries(path)?;
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
    let mut file = source::file(path)?;
    let length = file.metadata().map_err(Error::io(path, "cannot open the dump"))?.len();
    let entry = Entry { file: contents.files.len(), ..entry(path, name, &mut file, length)? };
    contents.tensors.push(entry);
    contents.files.push(Part { path: path.into(), file });
    Ok(())
}

/// The arrays of an archive, whose checksums are checked. Those that are compressed are unpacked if they are of a layer;
/// `held` has their bytes.
pub(super) fn archive(path: &Path, held: &Held) -> Result<Contents> {
    let damaged = |e: &dyn std::fmt::Display| {
        Error::damaged(path, format!("is no whole NumPy archive ({e}); write it again with numpy.savez"))
    };
    let mut zip = source::zip(path, damaged)?;
    let part = Part { path: path.into(), file: source::file(path)? };
    let mut contents = Contents { files: vec![part], tensors: Vec::new() };
    for index in 0..zip.len() {
        let mut member = zip.by_index(index).map_err(|e| damaged(&e))?;
        let name = member.name().map_err(|e| damaged(&e))?.into_owned();
        let Some(name) = name.strip_suffix(".npy") else { continue };
        let size = member.size();
        // Before anything is unpacked: a header that its array does not fit costs nothing.
        let mut entry = entry(path, name, &mut member, size)?;
        drop(member);
        let mut member = zip.by_index(index).map_err(|e| damaged(&e))?;
        let whole = |copied: io::Result<u64>| match copied {
            Ok(copied) if copied == size => Ok(()),
            Ok(_) => Err(damaged(&format!("{name} has not the {size} bytes that are announced"))),
            Err(e) => Err(damaged(&format!("{name}: {e}"))),
        };
        let of_layer = NAMES.contains(&name.rsplit(['.', '/']).next().unwrap_or_default());
        match member.data_start().filter(|_| member.compression() == CompressionMethod::Stored) {
            Some(start) => {
                whole(io::copy(&mut member, &mut io::sink()))?;
                entry.start += start;
            }
            None if of_layer => {
                held.add(&path.join(format!("{name}.npy")), size)?;
                let mut unpacked = tempfile::tempfile().map_err(Error::io(path, "cannot unpack an array"))?;
                whole(io::copy(&mut member.take(size.saturating_add(1)), &mut unpacked))?;
                entry.file = contents.files.len();
                contents.files.push(Part { path: path.into(), file: unpacked });
            }
            None => {}
        }
        contents.tensors.push(entry);
    }
    Ok(contents)
}

/// The array `name` of `length` bytes that `bytes` begin with, its elements counted from the first of them.
fn entry(path: &Path, name: &str, bytes: &mut impl Read, length: u64) -> Result<Entry> {
    let problem = |problem: String| Error::damaged(path, format!("array `{name}` {problem}"));
    let cut = |_| problem("is no whole NumPy array; write it again with numpy.save".into());
    let mut fixed = [0; 8];
    bytes.read_exact(&mut fixed).map_err(cut)?;
    if &fixed[..6] != MAGIC || !(1..=3).contains(&fixed[6]) {
        return Err(problem("is no NumPy array of version 1 to 3; write it again with numpy.save".into()));
    }
    let mut size = [0; 4];
    let digits = if fixed[6] == 1 { 2 } else { 4 };
    bytes.read_exact(&mut size[..digits]).map_err(cut)?;
    let size = u32::from_le_bytes(size);
    if size > LONGEST {
        return Err(problem(format!("has a header of {size} bytes; write it again with numpy.save")));
    }
    let mut text = vec![0; size as usize];
    bytes.read_exact(&mut text).map_err(cut)?;
    let dictionary = dictionary(&text).map_err(|e| problem(format!("has a damaged header ({e}); write it again")))?;
    let Dictionary { descr, fortran_order, shape } = dictionary;
    if fortran_order && shape.len() > 1 {
        return Err(problem("is stored column by column; save numpy.ascontiguousarray(x)".into()));
    }
    let begin = 8 + digits as u64 + u64::from(size);
    let dtype = dtype(&descr);
    if let Ok(dtype) = dtype {
        let elements = shape.iter().try_fold(1_u64, |all, &n| all.checked_mul(n as u64));
        let whole = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64 / 8)).and_then(|n| n.checked_add(begin));
        if whole != Some(length) {
            return Err(problem(format!("of shape {shape:?} does not fit the {length} bytes it has; write it again")));
        }
    }
    Ok(Entry { name: name.into(), dtype, shape, file: 0, start: begin })
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

    /// The directory at the end says which array is which, and has no checksum.
    #[test]
    fn arrays_have_one_name() {
        let array = npy("<f4", "False", "(2, 3)", &floats(6));
        let whole = zipped(CompressionMethod::Stored, &[("q.npy", array.clone()), ("k.npy", array)]);
        assert!(!opened("x.npz", &whole).unwrap().layers()[0].tied());
        let at = whole.windows(5).rposition(|name| name == b"k.npy").unwrap();
        let mut flipped = whole;
        flipped[at] ^= 1;
        let error = opened("x.npz", &flipped).unwrap_err().to_string();
        assert!(error.contains("`j.npy` has another name"), "{error}");
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
            ("layers.0.key_mask.npy", npy("|b1", "False", "(2, 3)", &[1, 1, 1, 0, 1, 1])),
            ("readme.txt", b"not an array".to_vec()),
        ];
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let mut dump = opened("d.npz", &zipped(method, &members)).unwrap();
            assert_eq!(dump.sequence(0, 0).unwrap().shape.seq_q, 3);
            let masked = dump.sequence(0, 1).unwrap();
            assert_eq!((masked.shape.seq_q, masked.shape.seq_kv), (2, 2));
            assert_eq!((masked.q, masked.v), (vec![8.0, 9.0, 10.0, 11.0], Some(vec![5.0, 6.0])));
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
