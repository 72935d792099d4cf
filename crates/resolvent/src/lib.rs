//! Attention as an operator on the graph of tokens: differentiable operators, modules and models on Burn.
//!
//! [`attend`] applies any [`Mechanism`] to tensors, with gradients; [`attention::MultiHeadAttention`] is the module,
//! [`models::Vit`] the picture model built from it. On Burn's Flex backend the fused kernels of `resolvent-kernels` run
//! without a copy and with their own backward pass; every other backend runs the same operator composed of tensor
//! operations. [`plan`] says which, [`Strategy`] forces it, and a [`Calibration`] tells it what this machine does faster.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use resolvent::{Inputs, Mask, Mechanism, Strategy, attend};
//! let device = Device::flex();
//! let x = || Tensor::<4>::random([2, 4, 10, 8], Distribution::Default, &device);
//! let infsa = Mechanism::from_json(r#"{"mechanism": "infsa", "gamma": 0.9}"#)?;
//! let output = attend(&Inputs::new(x(), x(), x()), &infsa, &Mask::causal(), Strategy::Auto)?;
//! assert_eq!(output.out.dims(), [2, 4, 10, 8]);
//! # Ok::<(), resolvent::Error>(())
//! ```
//!
//! Programs of a page, in `examples/`: `attend` (this, with gradients), `swap_attention` (Burn's module replaced, its weights kept),
//! `long_sequence` (the memory that it takes), `cached_decoding` (token by token), `training_loop` (a model and a loop of your own).
//!
//! Features: `safetensors` (weights in files, the module `convert`) and `x86-v4` (AVX-512 in Burn's products) are on by default;
//! `wgpu`, `cuda`, `metal`, `rocm` and `vulkan` are Burn's devices beside the CPU.

pub mod attention;
#[cfg(feature = "safetensors")]
pub mod convert;
mod error;
pub mod models;
pub mod ops;
pub mod ternary;

pub use error::{Error, Result};
pub use ops::{
    Calibration, Extras, Inputs, Mask, Output, Plan, SharedClusters, Strategy, attend, attend_sequences, plan,
};
pub use resolvent_kernels::{
    ClusterPlan, Dropout, Dropped, Mechanism, Parameter, Precision, Sequences, Shape, mechanism,
};

/// The examples of the README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
