//! Weights that are packed once.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use burn::{
    backend::flex::{Flex, Layout},
    tensor::{Bytes, Tensor},
};
use resolvent_kernels::TernaryMatrix;

use crate::Result;

/// The packed weights of a module's ternary layers: packed when they are first multiplied with, and again once they have
/// changed. Copies of the module share them.
///
/// What was packed is known by the memory that the weights lie in, and cannot be stale: Flex writes to memory in place only
/// where nothing else refers to it, and the weak reference kept here makes Rust move what it holds elsewhere first. Weights in
/// the same memory are the same weights. Nothing is kept of weights that are no more, and no memory of them.
#[derive(Clone, Default)]
pub struct Packed(Arc<Mutex<Vec<Entry>>>);

struct Entry {
    memory: Weak<Bytes>,
    layout: Layout,
    matrices: Arc<[TernaryMatrix]>,
}

impl Packed {
    /// What [`super::matrices`] makes of weights on Flex.
    ///
    /// # Errors
    /// As [`super::matrices`].
    pub fn matrices(&self, weight: &Tensor<2>, widths: &[usize]) -> Result<Arc<[TernaryMatrix]>> {
        let pack = || Ok(super::matrices(weight.clone(), widths)?.into());
        let Ok(tensor) = weight.clone().try_into_primitive::<Flex>() else { return pack() };
        let (memory, layout) = (tensor.data_arc(), tensor.layout());
        let same = |entry: &&Entry| {
            let shapes = entry.matrices.iter().map(|matrix| matrix.shape()[0]);
            entry.memory.as_ptr() == Arc::as_ptr(&memory)
                && entry.layout == *layout
                && shapes.eq(widths.iter().copied())
        };
        // A thread that failed while it held the lock left whole entries.
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.iter().find(same) {
            return Ok(entry.matrices.clone());
        }
        let matrices: Arc<[_]> = pack()?;
        entries.retain(|entry| entry.memory.strong_count() > 0);
        entries.push(Entry { memory: Arc::downgrade(&memory), layout: layout.clone(), matrices: matrices.clone() });
        Ok(matrices)
    }

    /// Bytes that the packed weights take now.
    pub fn bytes(&self) -> usize {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().flat_map(|entry| entry.matrices.iter()).map(|matrix| TernaryMatrix::bytes(matrix.shape())).sum()
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed {{ {} bytes }}", self.bytes())
    }
}
