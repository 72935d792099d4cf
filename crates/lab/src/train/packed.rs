//! What the ternary weights of a model take.

use resolvent::models::Block;
use resolvent_layers::TernaryMatrix;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The ternary weights of a model's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedWeights {
    /// How many there are.
    pub weights: usize,
    /// Bytes that they take, five weights to a byte, with the scale of every matrix. As f32 they take four bytes each, which is
    /// what checkpoints hold, since training goes on from them.
    pub bytes: usize,
}

impl PackedWeights {
    /// Of some matrices; `None` of none.
    pub fn of(matrices: &[TernaryMatrix]) -> Option<Self> {
        let weights = matrices.iter().map(|matrix| matrix.shape().iter().product::<usize>()).sum();
        let bytes = matrices.iter().map(|matrix| TernaryMatrix::bytes(matrix.shape())).sum();
        (weights > 0).then_some(Self { weights, bytes })
    }

    /// The result in words.
    pub(super) fn line(&self) -> String {
        let kilobytes = |bytes: usize| bytes as f64 / 1e3;
        format!(
            "{} ternary weights: {:.1} kB if packed, {:.1} kB as f32",
            self.weights,
            kilobytes(self.bytes),
            kilobytes(4 * self.weights)
        )
    }
}

/// The ternary weights of some blocks; `None` where there are none.
///
/// # Errors
/// [`crate::Error::Model`] for weights that are not finite.
pub(crate) fn packed_weights<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Result<Option<PackedWeights>> {
    Ok(PackedWeights::of(&of_blocks(blocks)?))
}

/// The ternary matrices of some blocks.
pub(super) fn of_blocks<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Result<Vec<TernaryMatrix>> {
    let mut all = Vec::new();
    for block in blocks {
        all.extend(block.ternary_matrices()?);
    }
    Ok(all)
}
