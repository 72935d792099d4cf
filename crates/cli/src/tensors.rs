//! Named tensors in safetensors files.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use resolvent_kernels as kernels;
use resolvent_lab::{budget::Held, source, tensors::Header};
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

use crate::{Error, error::Result};

/// A floating-point type that a file is read to and written from.
pub trait Real: Copy + From<f32> + Into<f64> {
    /// Its name in a file.
    const DTYPE: Dtype;
    /// `x`, or `None` when the type cannot hold it exactly.
    fn of_f64(x: f64) -> Option<Self>;
    /// Appends the little-endian bytes.
    fn write(self, bytes: &mut Vec<u8>);
    /// What little-endian `bytes`, as many as it has, hold.
    fn read(bytes: &[u8]) -> Self;
}

impl Real for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn of_f64(_: f64) -> Option<Self> {
        None
    }
    fn write(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("as many bytes as the number has"))
    }
}

impl Real for f64 {
    const DTYPE: Dtype = Dtype::F64;
    fn of_f64(x: f64) -> Option<Self> {
        Some(x)
    }
    fn write(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("as many bytes as the number has"))
    }
}

/// A safetensors file, read and checked as a whole.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: Vec<u8>,
    header: Header,
    /// What the names of its tensors begin with.
    prefix: String,
    _held: Held,
}

impl TensorFile {
    /// Reads `path`.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, is cut off or is no safetensors file.
    pub fn read(path: &Path) -> Result<Self> {
        let held = Held::new();
        let bytes = source::read(path, &held)?;
        let remedy = "write it again, for instance with safetensors.torch";
        let header = Header::of(path, &bytes[..], bytes.len() as u64, remedy)?;
        Ok(Self { path: path.to_owned(), bytes, header, prefix: String::new(), _held: held })
    }

    /// The tensors of one layer by their last names, where the file names them so; else the file as it is.
    #[must_use]
    pub fn of_layer(mut self, layer: Option<&str>) -> Self {
        let prefixes = layer.into_iter().flat_map(|layer| [format!("{layer}."), format!("{layer}/")]);
        let mut tensors = prefixes.filter(|prefix| self.header.metadata.info(&format!("{prefix}q")).is_some());
        self.prefix = tensors.next().unwrap_or_default();
        self
    }

    /// Whether its tensors are those of one layer of several.
    pub fn is_layer(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, in order of their names.
    pub fn names(&self) -> Vec<String> {
        let all = self.header.metadata.tensors().into_keys();
        let mut names: Vec<_> = all.filter_map(|name| Some(name.strip_prefix(&self.prefix)?.to_owned())).collect();
        names.sort();
        names
    }

    /// The tensor `name`, if there is one.
    pub fn get(&self, name: &'static str) -> Option<Stored<'_>> {
        let info = self.header.metadata.info(&format!("{}{name}", self.prefix))?;
        let (start, end) = info.data_offsets;
        let bytes = &self.bytes[self.header.data as usize..][start..end];
        Some(Stored { file: self, name, dtype: info.dtype, shape: &info.shape, bytes })
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`Error::File`] when there is none; `why` says what it is needed for.
    pub fn require(&self, name: &'static str, why: &str) -> Result<Stored<'_>> {
        self.get(name).ok_or_else(|| {
            let there = self.names();
            let layer = there.iter().find_map(|tensor| tensor.strip_suffix(name)?.strip_suffix(['.', '/']));
            let why = layer.map_or_else(|| why.to_owned(), |layer| format!("name a layer, such as --layer {layer}"));
            let there = there.join(", ");
            Error::file(&self.path, format!("tensor `{name}` is missing; {why} (the file holds: {there})"))
        })
    }
}

/// One tensor of a [`TensorFile`].
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    file: &'a TensorFile,
    name: &'static str,
    dtype: Dtype,
    /// Its shape.
    pub shape: &'a [usize],
    bytes: &'a [u8],
}

impl Stored<'_> {
    /// A problem with this tensor.
    pub fn error(&self, problem: impl std::fmt::Display) -> Error {
        Error::file(&self.file.path, format!("tensor `{}` {problem}", self.name))
    }

    /// The elements of a floating-point tensor.
    ///
    /// # Errors
    /// [`Error::File`] for a type that `R` cannot hold exactly, [`kernels::Error::NonFinite`] for a NaN or an infinity,
    /// also where a mask would hide it.
    pub fn reals<R: Real>(&self) -> Result<Vec<R>> {
        self.numbers(|x| x.is_finite())
    }

    /// What is added to logits: as [`Stored::reals`], but minus infinity leaves a pair out; or a mask, as [`Stored::mask`].
    ///
    /// # Errors
    /// As those.
    pub fn added(&self) -> Result<Vec<f32>> {
        match self.dtype {
            Dtype::U8 | Dtype::BOOL => {
                let added = |keep: bool| if keep { 0.0 } else { f32::NEG_INFINITY };
                Ok(self.mask()?.into_iter().map(added).collect())
            }
            _ => self.numbers(|x| x.is_finite() || x == f64::NEG_INFINITY),
        }
    }

    /// The elements of a floating-point tensor, all of which `fit`.
    fn numbers<R: Real>(&self, fits: impl Fn(f64) -> bool) -> Result<Vec<R>> {
        let values: Option<Vec<R>> = match self.dtype {
            Dtype::F32 => Some(self.elements(|x| R::from(f32::from_le_bytes(x)))),
            Dtype::F16 => Some(self.elements(|x| R::from(f16::from_le_bytes(x).to_f32()))),
            Dtype::BF16 => Some(self.elements(|x| R::from(bf16::from_le_bytes(x).to_f32()))),
            Dtype::F64 => self.elements(|x| R::of_f64(f64::from_le_bytes(x))).into_iter().collect(),
            _ => None,
        };
        let values = values.ok_or_else(|| {
            let remedy = "store it as F32, F16 or BF16 (F64 is for q, k, v and dout with --reference)";
            self.error(format!("has type {}; {remedy}", self.dtype))
        })?;
        let found = values.iter().map(|&x| x.into()).enumerate().find(|&(_, x): &(usize, f64)| !fits(x));
        match found {
            Some((index, value)) => {
                let error = kernels::Error::NonFinite { tensor: self.name, index, value };
                Err(Error::kernels(&self.file.path)(error))
            }
            None => Ok(values),
        }
    }

    /// The elements of a tensor of indices.
    ///
    /// # Errors
    /// [`Error::File`] unless they are of type I64 or I32.
    pub fn integers(&self) -> Result<Vec<i64>> {
        match self.dtype {
            Dtype::I64 => Ok(self.elements(i64::from_le_bytes)),
            Dtype::I32 => Ok(self.elements(|x| i32::from_le_bytes(x).into())),
            _ => Err(self.error(format!("has type {}; indices are I64 or I32", self.dtype))),
        }
    }

    /// The elements of a mask: true = keep.
    ///
    /// # Errors
    /// [`Error::File`] unless they are of type U8 or BOOL, each 0 or 1.
    pub fn mask(&self) -> Result<Vec<bool>> {
        if !matches!(self.dtype, Dtype::U8 | Dtype::BOOL) {
            return Err(self.error(format!("has type {}; masks are U8 or BOOL, 1 = keep", self.dtype)));
        }
        match self.bytes.iter().position(|&x| x > 1) {
            Some(i) => {
                let found = self.bytes[i];
                Err(self.error(format!("holds {found} at flat index {i}; a mask holds 0 (absent) and 1 (keep) only")))
            }
            None => Ok(self.bytes.iter().map(|&x| x == 1).collect()),
        }
    }

    fn elements<const N: usize, R>(&self, read: impl Fn([u8; N]) -> R) -> Vec<R> {
        let (elements, _) = self.bytes.as_chunks::<N>();
        elements.iter().map(|&x| read(x)).collect()
    }
}

/// A tensor to be written.
#[derive(Debug)]
pub struct Named {
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Named {
    /// `values` under `name`.
    pub fn new<R: Real>(name: &'static str, shape: Vec<usize>, values: &[R]) -> Self {
        let mut bytes = Vec::with_capacity(size_of_val(values));
        values.iter().for_each(|x| x.write(&mut bytes));
        Self { name, shape, dtype: R::DTYPE, bytes }
    }

    /// The values again.
    pub fn values<R: Real>(&self) -> Vec<R> {
        debug_assert_eq!(self.dtype, R::DTYPE);
        self.bytes.chunks_exact(size_of::<R>()).map(R::read).collect()
    }

    /// Room for as much of each of `heads` heads as this holds of each of `own`.
    pub fn spread(&self, batch: usize, heads: usize, own: usize) -> Self {
        let mut shape = self.shape.clone();
        let after = if self.name == "lse" { 1 } else { 2 };
        if let Some(axis) = shape.len().checked_sub(after + 1) {
            shape[axis] = heads;
        }
        let bytes = vec![0; self.bytes.len() / (batch * own) * batch * heads];
        Self { name: self.name, shape, dtype: self.dtype, bytes }
    }

    /// Writes what `part` holds of some heads to the places of these among `heads`.
    pub fn put_heads(&mut self, part: &Self, batch: usize, heads: usize, of: &[usize]) {
        let one = self.bytes.len() / (batch * heads);
        for (at, bytes) in part.bytes.chunks(one.max(1)).enumerate() {
            let head = (at / of.len()) * heads + of[at % of.len()];
            self.bytes[head * one..][..one].copy_from_slice(bytes);
        }
    }

    /// Room for `tokens` of every head, where this holds fewer.
    pub fn lengthened(&self, tokens: usize) -> Self {
        let mut shape = self.shape.clone();
        let axis = shape.len() - if self.name == "lse" { 1 } else { 2 };
        let bytes = vec![0; self.bytes.len() / shape[axis] * tokens];
        shape[axis] = tokens;
        Self { name: self.name, shape, dtype: self.dtype, bytes }
    }

    /// Writes the rows of `part` to those from `first` on of each of `heads` heads of `tokens` rows.
    pub fn put_rows(&mut self, part: &Self, heads: usize, first: usize, tokens: usize) {
        let row = self.bytes.len() / (heads * tokens);
        let own = part.bytes.len() / heads;
        for (head, rows) in part.bytes.chunks(own.max(1)).enumerate() {
            self.bytes[(head * tokens + first) * row..][..rows.len()].copy_from_slice(rows);
        }
    }

    /// Adds what `part` holds.
    pub fn add<R: Real>(&mut self, part: &Self) {
        let sums = self.values::<R>().into_iter().zip(part.values::<R>()).map(|(a, b)| a.into() + b.into());
        let sums: Vec<R> = sums.map(|x: f64| R::of_f64(x).unwrap_or_else(|| R::from(x as f32))).collect();
        *self = Self::new(self.name, self.shape.clone(), &sums);
    }

    /// Indices under `name`.
    pub fn integers(name: &'static str, shape: Vec<usize>, values: &[i64]) -> Self {
        Self { name, shape, dtype: Dtype::I64, bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }
}

/// The bytes of a safetensors file that holds `tensors`; `about` is its metadata entry `resolvent`.
///
/// # Errors
/// When a tensor's shape does not fit its number of elements.
pub fn serialise(tensors: &[Named], about: String) -> std::result::Result<Vec<u8>, SafeTensorError> {
    let views = tensors
        .iter()
        .map(|t| Ok((t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?)))
        .collect::<std::result::Result<Vec<_>, SafeTensorError>>()?;
    safetensors::serialize(views, Some(HashMap::from([("resolvent".to_owned(), about)])))
}
