//! What can be wrong with a graph.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a diagnostic could not be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mechanism refused the call.
    #[error(transparent)]
    Kernel(#[from] resolvent_kernels::Error),
    /// Something does not have one entry per token.
    #[error("`{what}` has {got} elements, expected {expected}")]
    Length {
        /// Its name.
        what: &'static str,
        /// Elements received.
        got: usize,
        /// Elements expected.
        expected: usize,
    },
    /// The h-transform divides by walk counts, which are at least 1 on a non-negative graph.
    #[error(
        "token {index} starts {value} discounted walks; the h-transform needs positive counts: use a non-negative score (relu, abs)"
    )]
    NotPositive {
        /// The first such token.
        index: usize,
        /// Its count.
        value: f64,
    },
    /// The solver used all its iterations.
    #[error(
        "the walks were not summed in {iterations} iterations: relative residual {residual:.1e}, asked for {tol:.1e}; raise `max_iter` or `tol`, or lower the decay"
    )]
    NotConverged {
        /// Products with the operator spent.
        iterations: usize,
        /// The relative residual reached.
        residual: f64,
        /// The one asked for.
        tol: f64,
    },
}

/// [`Error::Length`] unless `got == expected`.
pub(crate) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}
