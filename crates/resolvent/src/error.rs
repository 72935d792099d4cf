//! Everything that can be wrong with a call, a configuration or a file, as typed data.

use std::path::PathBuf;

use resolvent_kernels::Precision;

use crate::Strategy;

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operator, a module or a file could not be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mechanism, its sizes or its masks: see [`resolvent_kernels::Error`].
    #[error(transparent)]
    Mechanism(#[from] resolvent_kernels::Error),
    /// The forced strategy does not exist for these tensors.
    #[error("{op}: strategy `{strategy}` does not serve {what}; {remedy}")]
    Strategy {
        /// The operation.
        op: &'static str,
        /// What was asked for.
        strategy: Strategy,
        /// The device or storage type it was asked for.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// No products of that precision exist for these tensors, or by the forced strategy.
    #[error("{op}: precision `{precision}` does not serve {what}; {remedy}", precision = precision.name())]
    Precision {
        /// The operation.
        op: &'static str,
        /// What was asked for.
        precision: Precision,
        /// The device, storage type or strategy it was asked for.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// Two tensors of one call differ in storage type or device.
    #[error("{op}: `{tensor}` has {property} {got}, `q` has {expected}; {remedy}")]
    Mixed {
        /// The operation.
        op: &'static str,
        /// Name of the tensor that differs from `q`.
        tensor: &'static str,
        /// `storage type` or `device`.
        property: &'static str,
        /// The tensor's.
        got: String,
        /// That of `q`.
        expected: String,
        /// How to mend the call.
        remedy: &'static str,
    },
    /// The heads do not divide the width.
    #[error("d_model = {d_model} is not a multiple of n_heads = {n_heads}; choose a head count that divides the width")]
    Heads {
        /// Width of the module.
        d_model: usize,
        /// Number of heads.
        n_heads: usize,
    },
    /// A field of a module's or model's configuration is out of range.
    #[error("field `{field}` is {got}, must be {expected}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// The value found.
        got: String,
        /// The valid range.
        expected: &'static str,
    },
    /// A stage of a pyramid cannot be built.
    #[error("stage {stage}: {error}")]
    Stage {
        /// Which, counted from 1.
        stage: usize,
        /// Why.
        error: Box<Error>,
    },
    /// Weights could not be read or written.
    #[error("{path}: {problem}", path = path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, naming the tensors concerned.
        problem: String,
    },
}
