//! What stands around the attention in a transformer block, computed on the CPU, on slices, without a framework: linear layers,
//! layer norms, the GELU, the MLP that is made of them, and linear layers with ternary weights, with their gradients. Composed
//! of a framework's operations they cost a training step more than its products.
//!
//! Instruction sets, threads and errors are those of [`resolvent_kernels`].

pub mod bf16;
mod gelu;
mod layer_norm;
mod linear;
mod mlp;
mod rows;
mod ternary;

pub use gelu::{gelu, gelu_backward};
pub use layer_norm::{LayerNormGradients, layer_norm, layer_norm_backward};
pub use linear::{LinearGradients, linear, linear_backward};
pub use mlp::{MlpGradients, MlpWeights, mlp, mlp_backward};
pub use resolvent_kernels::{Error, Result};
pub use ternary::TernaryMatrix;

/// The examples of the README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
