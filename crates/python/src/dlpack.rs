//! Tensors of other libraries, read in place through DLPack: <https://dmlc.github.io/dlpack/latest/>.

use std::{ffi::c_void, ptr::NonNull};

use half::{bf16, f16};
use pyo3::{
    exceptions::{PyBufferError, PyRuntimeError, PyTypeError},
    ffi, intern,
    prelude::*,
    types::PyCapsule,
};

use resolvent_kernels::Strided;

use crate::error::Failure;

/// Most axes of a tensor that a call takes.
const RANK: usize = 4;
const CPU: i32 = 1;
/// Memory of the CPU that a GPU may read, too.
const CPU_PINNED: [i32; 2] = [3, 11];
const READ_ONLY: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    _minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawTensor {
    data: *mut c_void,
    device_type: i32,
    _device_id: i32,
    rank: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: RawTensor,
    _context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    _context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: RawTensor,
}

/// What a library offers to readers in C, up to the function that is used here.
#[repr(C)]
struct ExchangeApi {
    version: Version,
    _previous: *const c_void,
    _allocate: *const c_void,
    _managed_from_object: *const c_void,
    _object_from_managed: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut RawTensor) -> i32>,
}

/// Who owns the memory.
enum Owner {
    /// The object, which the caller of the call keeps.
    Object,
    Managed(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the pointers came out of capsules that were renamed, so that they are ours alone, to be deleted once.
        unsafe {
            match self {
                Self::Object => {}
                Self::Managed(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Self::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Element types that calls know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    Bool,
    U8,
    I64,
}

impl Dtype {
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Bool => "bool",
            Self::U8 => "uint8",
            Self::I64 => "int64",
        }
    }
}

/// A type of elements in memory.
pub trait Stored: Copy {
    const DTYPES: &'static [Dtype];
}

impl Stored for f32 {
    const DTYPES: &'static [Dtype] = &[Dtype::F32];
}
impl Stored for f16 {
    const DTYPES: &'static [Dtype] = &[Dtype::F16];
}
impl Stored for bf16 {
    const DTYPES: &'static [Dtype] = &[Dtype::Bf16];
}
impl Stored for i64 {
    const DTYPES: &'static [Dtype] = &[Dtype::I64];
}
/// Masks are read as bytes: what is no 0 is kept.
impl Stored for u8 {
    const DTYPES: &'static [Dtype] = &[Dtype::Bool, Dtype::U8];
}

/// A tensor in memory of the CPU, of another library: dense and row-major, or rows of channels that lie anywhere.
pub struct Tensor {
    pub name: &'static str,
    pub dtype: Dtype,
    data: *mut u8,
    /// Elements from the first to the last, what lies between rows included; 0 of an empty tensor.
    len: usize,
    bytes: usize,
    shape: [usize; RANK],
    /// In elements.
    strides: [usize; RANK],
    rank: usize,
    read_only: bool,
    _owner: Owner,
}

impl Tensor {
    /// Reads `object`. The caller keeps the object until the tensor is dropped. `bf16_as_u16`: numbers of 16 bits without a
    /// sign stand for bf16, which DLPack cannot carry out of every library.
    pub fn read(object: &Bound<'_, PyAny>, name: &'static str, bf16_as_u16: bool) -> PyResult<Self> {
        let tensor = Self::read_rows(object, name, bf16_as_u16)?;
        if tensor.is_contiguous() {
            return Ok(tensor);
        }
        let remedy = "copy it with numpy.ascontiguousarray or Tensor.contiguous";
        Err(Failure::tensor("TensorError", "strides", name, "is not contiguous", remedy).into())
    }

    /// As [`Tensor::read`], of which only the channels, the last axis, have to lie side by side.
    pub fn read_rows(object: &Bound<'_, PyAny>, name: &'static str, bf16_as_u16: bool) -> PyResult<Self> {
        let (raw, read_only, owner) = raw(object, name)?;
        let refuse = |code, problem: &str, remedy: &str| -> PyResult<Self> {
            let class = match code {
                "device" => "DeviceError",
                "dtype" => "DTypeError",
                _ => "TensorError",
            };
            Err(Failure::tensor(class, code, name, problem, remedy).into())
        };
        if raw.device_type != CPU && !CPU_PINNED.contains(&raw.device_type) {
            return refuse("device", "is not in the CPU's memory", "move it there first");
        }
        let Ok(rank @ 0..=RANK) = usize::try_from(raw.rank) else {
            return refuse("shape", &format!("has {} axes", raw.rank), "expected at most 4");
        };
        let Some(dtype) = dtype(&raw, bf16_as_u16) else {
            let kind = ["int", "uint", "float", "handle", "bfloat", "complex", "bool"].get(usize::from(raw.code));
            let problem = format!("holds {}{}", kind.unwrap_or(&"other"), raw.bits);
            return refuse("dtype", &problem, "tensors are float32, float16 or bfloat16, masks bool, indices int64");
        };
        let (mut shape, mut len) = ([1; RANK], 1_usize);
        for (axis, size) in shape.iter_mut().enumerate().take(rank) {
            // SAFETY: DLPack's shape has as many elements as the tensor has axes.
            *size = unsafe { *raw.shape.add(axis) }.try_into().unwrap_or(usize::MAX);
            len = len.saturating_mul(*size);
        }
        let Some(strides) = strides(&raw, &shape[..rank]) else {
            let remedy = "copy it with numpy.ascontiguousarray or Tensor.contiguous";
            return refuse("strides", "has channels that do not lie side by side, or negative strides", remedy);
        };
        if len > 0 {
            let last = shape.iter().zip(strides).map(|(&n, stride)| (n - 1).saturating_mul(stride));
            len = last.fold(1, usize::saturating_add);
        }
        let width = usize::from(raw.bits / 8);
        let data = raw.data.cast::<u8>().wrapping_add(raw.byte_offset as usize);
        if len > 0 && (raw.data.is_null() || !(data as usize).is_multiple_of(width)) {
            return refuse("alignment", "has no memory, or memory that is not aligned to its elements", "copy it");
        }
        let bytes = len.saturating_mul(width);
        Ok(Self { name, dtype, data, len, bytes, shape, strides, rank, read_only, _owner: owner })
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    fn is_contiguous(&self) -> bool {
        let dense = dense_strides(self.shape());
        self.len == 0 || (0..self.rank).all(|axis| self.shape[axis] == 1 || self.strides[axis] == dense[axis])
    }

    /// The rows of a tensor `[batch, heads, tokens, channels]`, whose first axes may be missing.
    pub fn rows<T: Stored>(&self) -> PyResult<Strided<&[T]>> {
        let [batch_stride, head_stride, token_stride] = self.row_strides();
        Ok(Strided { data: self.values()?, batch_stride, head_stride, token_stride })
    }

    /// The same, to be written.
    pub fn rows_mut<T: Stored>(&mut self) -> PyResult<Strided<&mut [T]>> {
        let [batch_stride, head_stride, token_stride] = self.row_strides();
        Ok(Strided { data: self.values_mut()?, batch_stride, head_stride, token_stride })
    }

    fn row_strides(&self) -> [usize; 3] {
        [4, 3, 2].map(|from_last| self.rank.checked_sub(from_last).map_or(0, |axis| self.strides[axis]))
    }

    /// The elements, those between rows included.
    pub fn values<T: Stored>(&self) -> PyResult<&[T]> {
        self.check::<T>()?;
        if self.len == 0 {
            return Ok(&[]);
        }
        // SAFETY: `read` has checked the memory's place, alignment, strides and length, `check` the type; the owner lives as
        // long as `self`; every bit pattern is a value of the stored types. That nobody writes meanwhile is the caller's
        // part, as with every function that releases the interpreter lock.
        Ok(unsafe { std::slice::from_raw_parts(self.data.cast(), self.len) })
    }

    /// The elements, to be written.
    pub fn values_mut<T: Stored>(&mut self) -> PyResult<&mut [T]> {
        self.check::<T>()?;
        if self.read_only {
            return Err(
                Failure::tensor("TensorError", "read-only", self.name, "is read-only", "pass one to write to").into()
            );
        }
        if self.len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above; `call` has checked that outputs share no memory with other tensors.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.len) })
    }

    fn check<T: Stored>(&self) -> PyResult<()> {
        if T::DTYPES.contains(&self.dtype) {
            return Ok(());
        }
        let problem = format!("is {}", self.dtype.name());
        let remedy = format!("expected {}", T::DTYPES[0].name());
        Err(Failure::tensor("DTypeError", "dtype", self.name, &problem, &remedy).into())
    }

    /// Whether two tensors share memory.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (start, other_start) = (self.data as usize, other.data as usize);
        self.len > 0
            && other.len > 0
            && start < other_start.saturating_add(other.bytes)
            && other_start < start.saturating_add(self.bytes)
    }
}

fn dtype(raw: &RawTensor, bf16_as_u16: bool) -> Option<Dtype> {
    match (raw.code, raw.bits, raw.lanes) {
        (2, 32, 1) => Some(Dtype::F32),
        (2, 16, 1) => Some(Dtype::F16),
        (4, 16, 1) => Some(Dtype::Bf16),
        (1, 16, 1) if bf16_as_u16 => Some(Dtype::Bf16),
        (6, 8, 1) => Some(Dtype::Bool),
        (1, 8, 1) => Some(Dtype::U8),
        (0, 64, 1) => Some(Dtype::I64),
        _ => None,
    }
}

/// Strides of rows in one piece.
fn dense_strides(shape: &[usize]) -> [usize; RANK] {
    let (mut strides, mut stride) = ([1; RANK], 1_usize);
    for (axis, &size) in shape.iter().enumerate().rev() {
        strides[axis] = stride;
        stride = stride.saturating_mul(size);
    }
    strides
}

/// The strides, if none is negative and the last axis is in one piece. Those of axes with one element are not looked at.
fn strides(raw: &RawTensor, shape: &[usize]) -> Option<[usize; RANK]> {
    let mut strides = dense_strides(shape);
    if raw.strides.is_null() || shape.contains(&0) {
        return Some(strides);
    }
    for (axis, _) in shape.iter().enumerate().filter(|(_, size)| **size > 1) {
        // SAFETY: DLPack's strides, where there are any, have as many elements as the tensor has axes.
        strides[axis] = unsafe { *raw.strides.add(axis) }.try_into().ok()?;
    }
    (shape.is_empty() || strides[shape.len() - 1] == 1).then_some(strides)
}

/// The tensor of `object`, whether it may only be read, and who owns it.
fn raw(object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<(RawTensor, bool, Owner)> {
    let py = object.py();
    if let Some(capsule) = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?
        && let Ok(capsule) = capsule.cast::<PyCapsule>()
        && let Some(raw) = exchanged(object, capsule).map_err(|error| exported(py, name, error))?
    {
        return Ok((raw, false, Owner::Object));
    }
    let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
        let problem = format!("is {}, which is no tensor", object.get_type().name()?);
        let remedy = "pass a NumPy array or anything that speaks DLPack";
        return Err(Failure::tensor("DTypeError", "type", name, &problem, remedy).into());
    };
    let kwargs = pyo3::types::PyDict::new(py);
    kwargs.set_item(intern!(py, "max_version"), (1, 0))?;
    let capsule = match export.call((), Some(&kwargs)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
        other => other,
    };
    let capsule = capsule.map_err(|error| exported(py, name, error))?;
    managed(capsule.cast::<PyCapsule>()?, name)
}

/// Why a library did not hand out its tensor.
fn exported(py: Python<'_>, name: &'static str, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyBufferError>(py) && !error.is_instance_of::<PyRuntimeError>(py) {
        return error;
    }
    // Some libraries add where in their sources it was found.
    let message = error.value(py).to_string();
    let problem = format!("is not handed out: {}", message.lines().next().unwrap_or_default());
    Failure::tensor("TensorError", "export", name, &problem, "pass one that DLPack can carry").into()
}

/// The tensor by way of the library's functions in C, which cost less than its methods in Python.
fn exchanged(object: &Bound<'_, PyAny>, capsule: &Bound<'_, PyCapsule>) -> PyResult<Option<RawTensor>> {
    let api = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?.cast::<ExchangeApi>();
    // SAFETY: the capsule has the name that DLPack gives to pointers to this struct, of which the header never changes.
    if unsafe { (*api.as_ptr()).version.major } != 1 {
        return Ok(None);
    }
    // SAFETY: of version 1, which has this field.
    let Some(read) = (unsafe { (*api.as_ptr()).tensor_from_object }) else { return Ok(None) };
    let mut raw = std::mem::MaybeUninit::<RawTensor>::uninit();
    // SAFETY: the function is for objects of the type that it was found at, and writes the tensor where it returns 0. What it
    // writes borrows from the object, which the caller keeps.
    match unsafe { read(object.as_ptr(), raw.as_mut_ptr()) } {
        // SAFETY: written.
        0 => Ok(Some(unsafe { raw.assume_init() })),
        _ => Err(PyErr::take(object.py()).unwrap_or_else(|| PyBufferError::new_err("the tensor is not handed out"))),
    }
}

/// The tensor in a capsule, which is consumed.
fn managed(capsule: &Bound<'_, PyCapsule>, name: &'static str) -> PyResult<(RawTensor, bool, Owner)> {
    let rename = |used: &'static std::ffi::CStr| {
        // SAFETY: the capsule is alive and the name static. A capsule that is so named is left alone by its destructor.
        unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) };
    };
    if let Ok(pointer) = capsule.pointer_checked(Some(c"dltensor_versioned")) {
        let pointer = pointer.cast::<ManagedVersioned>();
        rename(c"used_dltensor_versioned");
        let owner = Owner::Versioned(pointer);
        // SAFETY: the name says what the pointer is to; version and deleter have the same place in every version.
        let major = unsafe { (*pointer.as_ptr()).version.major };
        if major != 1 {
            let problem = format!("speaks version {major} of DLPack");
            return Err(Failure::tensor("TensorError", "export", name, &problem, "version 1 is read").into());
        }
        // SAFETY: of version 1.
        let managed = unsafe { pointer.as_ref() };
        return Ok((managed.tensor, managed.flags & READ_ONLY != 0, owner));
    }
    let pointer = capsule.pointer_checked(Some(c"dltensor"))?.cast::<Managed>();
    rename(c"used_dltensor");
    // SAFETY: the name says what the pointer is to.
    Ok((unsafe { pointer.as_ref().tensor }, false, Owner::Managed(pointer)))
}
