//! Weights that are packed once.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use burn::{
    backend::flex::{Flex, FlexTensor, Layout},
    tensor::{Bytes, Tensor},
};
use resolvent_layers::TernaryMatrix;

use crate::{Result, ops::is_flex};

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
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.iter().find(same) {
            return Ok(entry.matrices.clone());
        }
        drop(entries);
        let matrices: Arc<[_]> = pack()?;
        self.keep(&tensor, matrices.clone());
        Ok(matrices)
    }

    /// Packs `weight` and gives what can stand in its place where nothing learns: a tensor of the same sizes, NaN everywhere and
    /// stored as one number, by whose memory the packed weights are found. On devices other than Flex, which multiply with the
    /// real weights, these themselves.
    ///
    /// # Errors
    /// As [`super::matrices`].
    pub fn only(&self, weight: Tensor<2>, widths: &[usize]) -> Result<Tensor<2>> {
        if !is_flex(&weight.device()) || weight.device().is_autodiff() {
            return Ok(weight);
        }
        let matrices = self.matrices(&weight, widths)?;
        let stand_in = Tensor::<2>::full([1, 1], f32::NAN, &weight.device()).expand(weight.shape());
        drop(weight);
        if let Ok(tensor) = stand_in.clone().try_into_primitive::<Flex>() {
            self.keep(&tensor, matrices);
        }
        Ok(stand_in)
    }

    /// Keeps what was packed of `tensor`, and nothing of tensors that are no more.
    fn keep(&self, tensor: &FlexTensor, matrices: Arc<[TernaryMatrix]>) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.memory.strong_count() > 0);
        let memory = Arc::downgrade(&tensor.data_arc());
        entries.push(Entry { memory, layout: tensor.layout().clone(), matrices });
    }

    /// Bytes that the packed weights take now.
    pub fn bytes(&self) -> usize {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = entries.iter().filter(|entry| entry.memory.strong_count() > 0);
        alive.flat_map(|entry| entry.matrices.iter()).map(|matrix| TernaryMatrix::bytes(matrix.shape())).sum()
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed {{ {} bytes }}", self.bytes())
    }
}
