//! Everything that can be wrong with a call, as typed data.

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a mechanism could not be configured or applied.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is no valid mechanism: not JSON, an unknown id or field, a wrong type.
    #[error("configuration{}: {problem}", if field == "." { String::new() } else { format!(" field `{field}`") })]
    Config {
        /// Dotted path of the offending field (`mechanism`, `gamma`, `landmarks.ratio` ...); `.` for the document.
        field: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A field has the right type but a value outside its range.
    #[error("configuration field `{field}` is {got}, must be {expected}")]
    OutOfRange {
        /// Name of the field as in the JSON configuration.
        field: &'static str,
        /// The value found.
        got: String,
        /// The valid range.
        expected: &'static str,
    },
    /// A tensor does not have the shape that the call gives it.
    #[error("{op}: `{tensor}` has {got} elements, expected {expected}; {remedy}")]
    Length {
        /// The operation.
        op: &'static str,
        /// The tensor's name.
        tensor: &'static str,
        /// Number of elements received.
        got: usize,
        /// Number of elements expected.
        expected: usize,
        /// How to mend the call.
        remedy: &'static str,
    },
    /// Two tensors of one call do not fit together.
    #[error("{op}: {left} {left_shape:?} does not fit {right} {right_shape:?}; {remedy}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Name of the first tensor.
        left: &'static str,
        /// Its shape.
        left_shape: Vec<usize>,
        /// Name of the second tensor.
        right: &'static str,
        /// Its shape.
        right_shape: Vec<usize>,
        /// How to mend the call.
        remedy: &'static str,
    },
    /// A tensor that the call needs is missing, or one is given that it must not have.
    #[error("{op}: tensor `{tensor}` {problem}")]
    Tensor {
        /// The operation.
        op: &'static str,
        /// The tensor's name.
        tensor: &'static str,
        /// `is missing ...` or `is given although ...`, with the remedy.
        problem: &'static str,
    },
    /// The mechanism is not defined for this request; nothing is ignored silently.
    #[error("`{mechanism}` does not support {what}: {why}")]
    Unsupported {
        /// The mechanism's id.
        mechanism: &'static str,
        /// The option, mask or shape asked for.
        what: &'static str,
        /// The reason, and the remedy where there is one.
        why: &'static str,
    },
    /// A tensor holds NaN or an infinity.
    #[error("tensor `{tensor}` holds {value} at flat index {index}; inputs must be finite")]
    NonFinite {
        /// The tensor's name.
        tensor: &'static str,
        /// Row-major position of the first such element.
        index: usize,
        /// The element.
        value: f64,
    },
    /// Queries or keys are too large, or too small, for f32 to give right results.
    #[error("the largest entry of tensor `{tensor}` is {largest:.1e}, f32 is right {bound} {limit:.1e} here; {remedy}")]
    Range {
        /// The tensor's name.
        tensor: &'static str,
        /// The magnitude of its largest entry.
        largest: f64,
        /// `up to` or `from`.
        bound: &'static str,
        /// The magnitude that is possible beside the other tensors and the configuration.
        limit: f64,
        /// How to mend the call.
        remedy: &'static str,
    },
    /// Tokens are too close to each other for f32 to tell what they differ by.
    #[error("tokens of tensor `{tensor}` are {apart:.1e} apart, f32 is right from {limit:.1e} here; {remedy}")]
    Close {
        /// The tensor's name.
        tensor: &'static str,
        /// The largest difference from the first in any channel; of landmarks, by how much the largest similarity is below one.
        apart: f64,
        /// The difference that is needed beside the configuration.
        limit: f64,
        /// How to mend the call.
        remedy: &'static str,
    },
    /// A result of finite inputs is no number in f32.
    #[error("result `{tensor}` leaves the range of f32 at flat index {index}; scale the inputs down")]
    Overflow {
        /// The result's name.
        tensor: &'static str,
        /// Row-major position of the first such element.
        index: usize,
    },
    /// The system does not give the memory that a call needs beside its tensors.
    #[error("{op} needs {:.1} GB of memory beside its tensors, more than the system gives; pass fewer tokens, or settings that need less", *bytes as f64 / 1e9)]
    Memory {
        /// The operation.
        op: &'static str,
        /// What it needs.
        bytes: u64,
    },
    /// A tensor of indices points beyond what it indexes.
    #[error("tensor `{tensor}` holds {value} at flat index {index}; expected an index below {limit}")]
    Index {
        /// The tensor's name.
        tensor: &'static str,
        /// Row-major position of the first such element.
        index: usize,
        /// The element.
        value: i64,
        /// Number of things that can be indexed.
        limit: usize,
    },
    /// An iterative solver reached the user's iteration limit before its tolerance.
    #[error(
        "`{mechanism}` did not converge in {iterations} iterations: error bound {residual:.3e}, asked for {tol:.1e}; raise `max_iter` or `tol`"
    )]
    NotConverged {
        /// The mechanism's id.
        mechanism: &'static str,
        /// Iterations spent.
        iterations: usize,
        /// The relative error bound reached.
        residual: f64,
        /// The relative error asked for.
        tol: f64,
    },
    /// The kernel matrix between the landmarks is not positive definite in f32: landmarks coincide.
    #[error("`{mechanism}`: the matrix between the landmarks is singular at landmark {landmark}; raise `ridge`")]
    Singular {
        /// The mechanism's id.
        mechanism: &'static str,
        /// The first kept landmark that depends on those before it.
        landmark: usize,
    },
    /// The inverse between the landmarks has entries that are not numbers.
    #[error(
        "`{mechanism}`: the inverse between the landmarks is not finite: Newton-Schulz diverges from this start, or tokens \
         are not finite; use inverse = cholesky with a ridge, or in `soft` newton_init = scaled"
    )]
    Diverged {
        /// The mechanism's id.
        mechanism: &'static str,
    },
    /// A paged cache has too few free blocks for new tokens.
    #[error(
        "the tokens need {needed} more blocks of {block_size} tokens, and {free} of {blocks} are free; free sequences, or make the cache with more blocks"
    )]
    OutOfBlocks {
        /// Blocks that the tokens need.
        needed: usize,
        /// Blocks that no sequence uses.
        free: usize,
        /// Blocks of the cache.
        blocks: usize,
        /// Tokens of a block.
        block_size: usize,
    },
    /// A paged cache has no such sequence.
    #[error("{op}: the cache has no sequence {id}; it was freed, or is another cache's")]
    UnknownSequence {
        /// The operation.
        op: &'static str,
        /// What was given for one.
        id: u64,
    },
    /// One of several sequences cannot be attended.
    #[error("sequence {sequence}: {error}")]
    Sequence {
        /// Its number, from 0.
        sequence: usize,
        /// Why.
        error: Box<Error>,
    },
}

impl Error {
    /// The error as that of one of several sequences.
    pub(crate) fn of_sequence(self, sequence: usize) -> Self {
        Self::Sequence { sequence, error: Box::new(self) }
    }

    /// What is wrong, in whichever sequence it is.
    pub fn cause(&self) -> &Self {
        match self {
            Self::Sequence { error, .. } => error.cause(),
            other => other,
        }
    }
}
