//! What a Nystrom operator rests on: kernels between tokens, their matrices, and how far an inverse is one.
//!
//! "Softmax-free Linear Transformers" (Fig. 5 and 6) and "LaplacianFormer: Rethinking Linear Attention with Laplacian
//! Kernel" (Fig. 6) measure these on the matrices among landmarks; everything here is dense and f64, for a few hundred
//! landmarks or a sample of the tokens.

mod inverse;
mod kernel;

pub use inverse::{InverseNorms, InverseStep, Start, conjugate_gradient_curve, newton_curve, one_norm, residual_bound};
pub use kernel::{Kernel, NystromError, nystrom_error};
