//! What a file says of its tensors before one of them is read.

use std::{
    io::{Read, Seek},
    path::Path,
};

use resolvent_lab::{Error, Result, budget::Held, source, tensors::Header};

use super::{Contents, Entry, Part, numpy};

/// The tensors of a file or a folder, told by what they begin with.
pub(super) fn read(path: &Path, held: &Held) -> Result<Contents> {
    if path.is_dir() {
        return numpy::folder(path);
    }
    let mut file = source::file(path)?;
    let mut first = [0; 8];
    let known = file.read(&mut first).and_then(|known| file.rewind().map(|()| known));
    match &first[..known.map_err(Error::io(path, "cannot read the dump"))?] {
        start if start.starts_with(numpy::MAGIC) => {
            let mut contents = Contents::default();
            numpy::array(path, "q", &mut contents)?;
            Ok(contents)
        }
        start if start.starts_with(b"PK") => numpy::archive(path, held),
        _ => safetensors(Part { path: path.into(), file }),
    }
}

fn safetensors(part: Part) -> Result<Contents> {
    let remedy = "write it with safetensors.torch.save_file, numpy.save or numpy.savez";
    let header = Header::read(&part.path, &part.file, remedy)?;
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| Entry {
        name,
        dtype: Ok(info.dtype),
        shape: info.shape.clone(),
        file: 0,
        start: header.data + info.data_offsets.0 as u64,
    };
    let tensors = header.metadata.tensors().into_iter().map(entry).collect();
    Ok(Contents { files: vec![part], tensors })
}
