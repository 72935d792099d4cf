//! The files of a checkpoint: written with checksums, and verified piece by piece as they are read.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use burn::{
    module::Module,
    store::{
        ModuleSnapshot,
        burn_pack::{Error as PackError, Reader, Tensor},
    },
    tensor::{BoolStore, Bytes, DType},
};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde::{Deserialize, Serialize};

use super::cannot_serialise;
use crate::{Error, Result, budget::Held, disk::write_synced, source, tensors::Header};

/// Bytes of a file that are written, or verified, at a time.
const BUFFER: usize = 1 << 20;

/// The entry of the header of weights that says which model they are of.
const ABOUT: &str = "resolvent";

/// What becomes one file of a checkpoint.
#[derive(Debug)]
pub enum Part {
    /// Bytes as they are.
    Bytes(Bytes),
    /// Weights, which are fetched from their device one by one as they are written.
    Weights(Weights),
}

/// The parameters of a module.
pub struct Weights(Vec<Tensor>);

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Weights").field(&self.0.len()).finish()
    }
}

impl Part {
    /// The weights of `module`.
    pub fn weights<M: Module>(module: &M) -> Self {
        Self::Weights(Weights(module.collect(None, None, false)))
    }

    /// Writes the file `path` and waits for the disk; `about` is told in the header of weights.
    pub(super) fn write(self, path: &Path, about: &str) -> Result<Fingerprint> {
        match self {
            Self::Bytes(bytes) => {
                write_synced(path, &bytes).map_err(Error::io(path, "cannot save the checkpoint"))?;
                let crc32 = crc32fast::hash(&bytes);
                Ok(Fingerprint { bytes: bytes.len() as u64, crc32, tensors: BTreeMap::new() })
            }
            Self::Weights(weights) => weights.write(path, about),
        }
    }
}

impl Weights {
    /// The header first, then the tensors in the order that safetensors asks for: the widest types first, then by name.
    fn write(mut self, path: &Path, about: &str) -> Result<Fingerprint> {
        let failed = || Error::io(path, "cannot save the checkpoint");
        self.0.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
        let header = self.header(about)?;
        let mut crc32 = crc32fast::Hasher::new();
        let mut file = BufWriter::with_capacity(BUFFER, File::create(path).map_err(failed())?);
        for bytes in [&(header.len() as u64).to_le_bytes()[..], &header] {
            crc32.update(bytes);
            file.write_all(bytes).map_err(failed())?;
        }
        let (mut tensors, mut bytes) = (BTreeMap::new(), 8 + header.len() as u64);
        for tensor in self.0 {
            let name = tensor.name.clone();
            let values = tensor.into_bytes().map_err(|e| cannot_serialise(e.to_string().into()))?;
            file.write_all(&values).map_err(failed())?;
            bytes += values.len() as u64;
            tensors.insert(name, crc32fast::hash(&values));
        }
        let file = file.into_inner().map_err(|e| failed()(e.into_error()))?;
        file.sync_all().map_err(failed())?;
        Ok(Fingerprint { bytes, crc32: crc32.finalize(), tensors })
    }

    /// The text of the header, which ends where the data are aligned.
    fn header(&self, about: &str) -> Result<Vec<u8>> {
        let mut infos = Vec::with_capacity(self.0.len());
        let mut start = 0;
        for tensor in &self.0 {
            let dtype = stored(tensor.dtype).ok_or_else(|| {
                let problem =
                    format!("`{}` has the type {:?}, which safetensors do not have", tensor.name, tensor.dtype);
                cannot_serialise(problem.into())
            })?;
            let data_offsets = (start, start + tensor.byte_len());
            start = data_offsets.1;
            infos.push((tensor.name.clone(), TensorInfo { dtype, shape: tensor.shape.to_vec(), data_offsets }));
        }
        // One entry: a map of several would be written in another order by every process.
        let about = HashMap::from([(ABOUT.to_owned(), about.to_owned())]);
        let metadata = Metadata::new(Some(about), infos).map_err(|e| cannot_serialise(e.into()))?;
        let mut text = serde_json::to_vec(&metadata).map_err(|e| cannot_serialise(e.into()))?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok(text)
    }
}

/// Burn's types and those of safetensors.
const TYPES: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U8, Dtype::U8),
    (DType::Bool(BoolStore::Native), Dtype::BOOL),
];

fn stored(dtype: DType) -> Option<Dtype> {
    TYPES.iter().find(|(burn, _)| *burn == dtype).map(|(_, stored)| *stored)
}

/// What a file was when it was written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Fingerprint {
    bytes: u64,
    /// Of the whole file; of weights, of their header.
    crc32: u32,
    /// Of each tensor, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tensors: BTreeMap<String, u32>,
}

/// A file of a checkpoint that is read. It is opened with the checkpoint: a run that goes on may remove its folder at any time.
#[derive(Debug)]
pub(super) struct Saved {
    pub path: PathBuf,
    opened: Option<File>,
    fingerprint: Fingerprint,
}

/// Where readers leave their errors, of which Burn knows the sentences only.
#[derive(Clone, Default)]
pub(super) struct Failure(Arc<Mutex<Option<Error>>>);

impl Failure {
    fn leave(&self, error: Error) -> PackError {
        let told = PackError::ValidationError(error.to_string());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        told
    }

    pub fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Saved {
    pub fn new(path: PathBuf, fingerprint: Fingerprint) -> Self {
        Self { opened: source::file(&path).ok(), path, fingerprint }
    }

    fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        damaged(&self.path, problem)
    }

    /// The file at its beginning, as long as it was written.
    fn open(&self) -> Result<File> {
        let failed = || Error::io(&self.path, "cannot read the checkpoint");
        let mut file = match (source::file(&self.path), &self.opened) {
            (Err(_), Some(opened)) => opened.try_clone().map_err(failed())?,
            (found, _) => found?,
        };
        file.rewind().map_err(failed())?;
        let (bytes, written) = (file.metadata().map_err(failed())?.len(), self.fingerprint.bytes);
        if bytes != written {
            return Err(self.damaged(format!("has {bytes} bytes, {written} were written: it is cut off or another")));
        }
        Ok(file)
    }

    /// All of it.
    pub fn bytes(&self, held: &Held) -> Result<Vec<u8>> {
        let bytes = source::read_all(&self.path, self.open()?, self.fingerprint.bytes, held)?;
        self.verify(crc32fast::hash(&bytes))?;
        Ok(bytes)
    }

    fn verify(&self, crc32: u32) -> Result<()> {
        if crc32 == self.fingerprint.crc32 { Ok(()) } else { Err(self.damaged("has a wrong checksum")) }
    }

    /// Its tensors, which are read and verified when they are asked for, and what went wrong then. Those in Burn's own format, in which
    /// weights were written before, are read at once. None has the number of a parameter: a model has its own.
    pub fn tensors(&self, held: &Held) -> Result<(Vec<Tensor>, Failure)> {
        let failure = Failure::default();
        if self.path.extension().is_some_and(|extension| extension == super::parts::PACK) {
            let reader = Reader::from_bytes(Bytes::from_bytes_vec(self.bytes(held)?));
            let tensors = reader.and_then(Reader::into_tensors);
            let mut tensors = tensors.map_err(|e| self.damaged(format!("does not hold a model ({e})")))?;
            tensors.iter_mut().for_each(|tensor| tensor.param_id = None);
            return Ok((tensors, failure));
        }
        let file = self.open()?;
        let header = Header::read(&self.path, &file, &again(&self.path))?;
        self.verify(header.crc32)?;
        let file = Arc::new(Mutex::new(file));
        let tensors = header.metadata.tensors().into_iter().map(|(name, info)| {
            let piece = Piece {
                path: self.path.clone(),
                name: name.clone(),
                file: Arc::clone(&file),
                start: header.data + info.data_offsets.0 as u64,
                bytes: info.data_offsets.1 - info.data_offsets.0,
                crc32: self.fingerprint.tensors.get(&name).copied(),
            };
            let found = TYPES.iter().find(|(_, stored)| *stored == info.dtype);
            let (dtype, _) = found.ok_or_else(|| self.damaged(format!("has `{name}` of type {}", info.dtype)))?;
            let (bytes, failure) = (piece.bytes, failure.clone());
            let read = move || piece.read().map_err(|error| failure.leave(error));
            Ok(Tensor::deferred(name, *dtype, info.shape.clone(), None, bytes, read))
        });
        Ok((tensors.collect::<Result<_>>()?, failure))
    }
}

/// One tensor of a file.
struct Piece {
    path: PathBuf,
    name: String,
    file: Arc<Mutex<File>>,
    start: u64,
    bytes: usize,
    crc32: Option<u32>,
}

impl Piece {
    /// Its bytes, verified.
    fn read(&self) -> Result<Bytes> {
        let held = Held::new();
        held.add(&self.path, self.bytes as u64)?;
        let mut values = vec![0; self.bytes];
        {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            let read = file.seek(SeekFrom::Start(self.start)).and_then(|_| file.read_exact(&mut values));
            read.map_err(Error::io(&self.path, "cannot read the checkpoint"))?;
        }
        if self.crc32 != Some(crc32fast::hash(&values)) {
            return Err(damaged(&self.path, format_args!("has a wrong checksum in the tensor `{}`", self.name)));
        }
        Ok(Bytes::from_bytes_vec(values))
    }
}

fn damaged(file: &Path, problem: impl std::fmt::Display) -> Error {
    Error::damaged(file, format!("{problem}; {}", again(file)))
}

/// What to do about a damaged `file` of a checkpoint.
pub(super) fn again(file: &Path) -> String {
    let folder = file.parent().unwrap_or(file);
    format!("delete the folder {} to fall back on an earlier checkpoint", folder.display())
}

/// The first of `names`, and how many more there are.
pub(super) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
