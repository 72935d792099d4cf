//! What a file says of its tensors before one of them is read.

use std::{io::Read, path::Path};

use resolvent_kernels::mechanism::check_distinct;
use safetensors::tensor::Metadata;

use super::{Contents, Entry, Part, numpy};
use crate::{
    Error, Result,
    budget::{Held, TREE},
    source,
};

/// Headers longer than this are damage: one has about 100 bytes per tensor.
const LONGEST: u64 = 100_000_000;

/// The tensors of a file or a folder, told by what they begin with.
pub(super) fn read(path: &Path, held: &Held) -> Result<Contents> {
    if path.is_dir() {
        return numpy::folder(path);
    }
    let mut file = source::file(path)?;
    let mut first = [0; 8];
    let known = file.read(&mut first).map_err(Error::io(path, "cannot read the dump"))?;
    match &first[..known] {
        start if start.starts_with(numpy::MAGIC) => {
            let mut contents = Contents::default();
            numpy::array(path, "q", &mut contents)?;
            Ok(contents)
        }
        start if start.starts_with(b"PK") => numpy::archive(path, held),
        _ => safetensors(path, first),
    }
}

fn safetensors(path: &Path, size: [u8; 8]) -> Result<Contents> {
    let mut file = source::file(path)?;
    let length = file.metadata().map_err(Error::io(path, "cannot open the dump"))?.len();
    let damaged = |problem: String| Error::damaged(path, problem);
    let advice = "write it with safetensors.torch.save_file, numpy.save or numpy.savez";
    if length < 8 {
        return Err(damaged(format!("is no safetensors file (too short); {advice}")));
    }
    let header = u64::from_le_bytes(size);
    if header > LONGEST || header + 8 > length {
        return Err(damaged(format!("is no safetensors file, or cut off; {advice}")));
    }
    let tree = Held::new();
    tree.add(path, TREE.saturating_mul(header))?;
    let mut text = vec![0; 8 + header as usize];
    file.read_exact(&mut text).map_err(Error::io(path, "cannot read the dump"))?;
    let text = &text[8..];
    check_distinct(&String::from_utf8_lossy(text)).map_err(|e| damaged(format!("has a damaged header: {e}")))?;
    let metadata: Metadata =
        serde_json::from_slice(text).map_err(|e| damaged(format!("has no safetensors header ({e}); {advice}")))?;
    let expected = 8 + header + metadata.data_len() as u64;
    if length != expected {
        return Err(damaged(format!("has {length} bytes, its header says {expected}; write it again")));
    }
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| Entry {
        name,
        dtype: Ok(info.dtype),
        shape: info.shape.clone(),
        file: 0,
        start: 8 + header + info.data_offsets.0 as u64,
    };
    let tensors = metadata.tensors().into_iter().map(entry).collect();
    Ok(Contents { files: vec![Part { path: path.into(), file }], tensors })
}
