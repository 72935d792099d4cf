//! Eigenvalues: all of a stored matrix, or the outermost of an operator that is only known by its products.

mod arnoldi;
pub(crate) mod dense;
mod lanczos;
mod parts;
mod tall;

pub use arnoldi::{Arnoldi, RitzValue};
pub use dense::{Complex, SymmetricEigen, eigenvalues, singular_values, spectral_gap, symmetric_eigen};
pub use lanczos::{Eigenpairs, Lanczos};

/// Orders up to which a dense decomposition is the sensible choice: 2048 needs 32 MiB a matrix and, in f64 on one core,
/// about ten seconds.
pub const DENSE_MAX: usize = 2048;
