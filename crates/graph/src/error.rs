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
    /// An entry of a stored graph is NaN or infinite.
    #[error("the weight of {row} -> {column} is {value}; a graph's weights are finite")]
    NotFinite {
        /// Token the edge leaves.
        row: usize,
        /// Token it goes to.
        column: usize,
        /// Its weight.
        value: f64,
    },
    /// A product with an operator is NaN or infinite.
    #[error("the product with the operator is {value} at token {index}; its weights are not all finite, or overflow")]
    Product {
        /// The first such token.
        index: usize,
        /// Its value.
        value: f64,
    },
    /// Walks of all lengths have no finite weight.
    #[error(
        "the weights of longer walks grow: the spectral radius is {radius:.4}; lower the decay until it is below 1"
    )]
    Diverges {
        /// The spectral radius.
        radius: f64,
    },
    /// Degrees, probabilities and path lengths need weights without sign.
    #[error(
        "the weight of {row} -> {column} is {value}; {what} is defined for non-negative weights: use a non-negative score \
         (relu, abs), or no whitening"
    )]
    Negative {
        /// What was asked for.
        what: &'static str,
        /// Token the edge leaves.
        row: usize,
        /// Token it goes to.
        column: usize,
        /// Its weight.
        value: f64,
    },
    /// A degree that cannot be divided by.
    #[error("token {index} has degree {degree:e} (the largest is 1); {remedy}")]
    Degree {
        /// The token.
        index: usize,
        /// Its degree, relative to the largest by size.
        degree: f64,
        /// What to do.
        remedy: &'static str,
    },
    /// A kernel matrix has no inverse.
    #[error("the matrix has the eigenvalue {value:e}, with {ridge} on its diagonal no inverse; raise the ridge")]
    Singular {
        /// Its eigenvalue.
        value: f64,
        /// What is added to it.
        ridge: f64,
    },
    /// A parameter is out of its range.
    #[error("`{what}` is {value}, must be {expected}")]
    Range {
        /// Its name.
        what: &'static str,
        /// What it is.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// An eigenvalue iteration used all its products.
    #[error(
        "{converged} of {wanted} eigenpairs converged in {products} products; the worst residual is {residual:.1e}, asked \
         for {tol:.1e}; raise `max_products` or `tol`, or ask for fewer"
    )]
    Eigen {
        /// Pairs that met the tolerance.
        converged: usize,
        /// Pairs asked for.
        wanted: usize,
        /// Products with the operator spent.
        products: usize,
        /// The worst relative residual of the wanted pairs.
        residual: f64,
        /// The one asked for.
        tol: f64,
    },
    /// A dense decomposition did not converge.
    #[error("the {what} of {tokens} tokens did not converge; its entries may span too many magnitudes")]
    Decomposition {
        /// Which.
        what: &'static str,
        /// Order of the matrix.
        tokens: usize,
    },
}

/// [`Error::Length`] unless `got == expected`.
pub(crate) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}
