//! How a call will be carried out, and what it costs, before it is made.

use crate::{
    Arithmetic, Result,
    memory::{self, check_memory},
};

/// How the `N x N` operator is applied. `Auto` lets the library choose; any other value is honoured or refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Strategy {
    /// The fused path where there is one, else the reference.
    #[default]
    Auto,
    /// Streamed tiles in f32, O(N) extra memory.
    Fused,
    /// The naive full-matrix f64 path of [`crate::reference`]: O(N^2) memory, for checking.
    Reference,
}

/// What a call will do and need. Obtained from [`crate::plan`] or [`crate::Operator::plan`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// What `Auto` became.
    pub strategy: Strategy,
    /// Why.
    pub reason: &'static str,
    /// In which precision, and by which instructions. [`crate::plan`] tells of [`crate::Precision::Full`]; see [`crate::Operator::with_precision`].
    pub arithmetic: Arithmetic,
    /// Query rows and key columns of one tile.
    pub tile: (usize, usize),
    /// Floating-point operations of the forward pass that are products and sums (a multiply-add counts two), those of iterations
    /// for the most steps that they may take ([`crate::Mechanism::iterates`]). What is done with a score counts in `exps_forward`.
    pub flops_forward: u64,
    /// Those of the backward pass.
    pub flops_backward: u64,
    /// Exponentials of the forward pass; a logarithm or a root counts as one.
    pub exps_forward: u64,
    /// Exponentials of the backward pass.
    pub exps_backward: u64,
    /// Bytes read and written from and to main memory by the forward pass, at f32.
    pub bytes_forward: u64,
    /// Bytes moved by the backward pass, at f32.
    pub bytes_backward: u64,
    /// f32 elements of [`crate::Scratch`] that the forward pass uses, all threads together.
    pub scratch_forward: usize,
    /// f32 elements of scratch that the backward pass uses.
    pub scratch_backward: usize,
    /// f32 elements saved by the forward pass for the backward pass (`stats`).
    pub stats: usize,
    /// Bytes that the forward pass allocates itself beside scratch and `stats`, and gives back: of `ssa`, whose clusters and
    /// edges are found in the call, as they are for as many clusters of equal size as are asked for; of compositions, and of the presets
    /// that run as such (`laplacian-exact`, `soft` and `soft-pp` with all tokens as landmarks), for the case that all rows are copied and,
    /// where products may be of bf16, that they are; of
    /// heads that share keys. 0 for other presets, and for the reference, whose matrices are not counted.
    pub allocated_forward: usize,
    /// Bytes that the backward pass allocates, likewise.
    pub allocated_backward: usize,
}

impl Plan {
    /// Whether the system gives what a forward pass needs beside its tensors, `stats` among it, and a backward pass where `backward`.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn check_memory(&self, backward: bool) -> Result<()> {
        let of = |scratch, allocated: usize| memory::bytes(scratch, size_of::<f32>()).saturating_add(allocated as u64);
        let forward = of(self.scratch_forward, self.allocated_forward);
        let backward = if backward { of(self.scratch_backward, self.allocated_backward) } else { 0 };
        let saved = memory::bytes(self.stats, size_of::<f32>());
        check_memory("attention", saved.saturating_add(forward.max(backward)))
    }
}
