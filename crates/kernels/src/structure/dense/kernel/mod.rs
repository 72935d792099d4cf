//! Kernels of a distance between every pair of tokens, without a running maximum: they are at most one. Each pass recomputes
//! its tiles of 64 rows by 128 columns; nothing but vectors of one number per token is kept.

mod affine;
mod affine_backward;
mod compact;
mod laplacian;
mod soft;

pub(crate) use laplacian::{laplacian_exact_backward, laplacian_exact_forward, laplacian_exact_plan};
pub(crate) use soft::{soft_all_backward, soft_all_forward, soft_all_plan};
