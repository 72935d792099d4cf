//! The four choices that make a mechanism.

use serde::Serialize;

/// How two tokens relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Score {
    /// The same for every pair.
    Constant,
    /// `exp(scale * q.k)`.
    DotExp,
    /// `phi(scale * q.k)` with an [`super::Activation`].
    DotActivation,
    /// A power of the distance: `(1 + r/kappa)^-p` or `(1 + (r/kappa)^2)^(-p/2)`.
    PowerLaw,
    /// `exp(-(r/kappa)^2)` or `exp(-scale r^2)` of the distance.
    Gaussian,
    /// `exp(-|q - k|_1 / lambda)`.
    Laplacian,
}

/// How the `seq_q x seq_kv` operator is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Structure {
    /// Every pair, streamed in tiles and never stored.
    Dense,
    /// Clusters of tokens: exact within, sampled or averaged beyond.
    Clustered,
    /// One weight per token and one pooled value: rank one.
    Pooled,
    /// Through landmarks: every token's similarity to them, and the inverse of theirs to each other.
    Nystrom,
}

/// What makes the operator an average.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Normalisation {
    /// Every row sums to one.
    Row,
    /// The whole matrix has Frobenius norm one.
    Frobenius,
    /// The token weights have l1 norm one.
    L1,
    /// Rows and columns are divided by the square roots of their degrees.
    Symmetric,
    /// Columns are centred and divided by their standard deviation, or one of the two.
    Whitened,
    /// Nothing: rows do not sum to one.
    Unnormalised,
}

/// How many hops over the token graph one layer takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Series {
    /// One application of the operator.
    OneHop,
    /// All of them: `(I - gamma A)^-1 - I`.
    Resolvent,
    /// The dominant direction that many hops tend to.
    Limit,
}

/// The four choices that a preset makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Choices {
    /// How two tokens relate.
    pub score: Score,
    /// How the operator is held.
    pub structure: Structure,
    /// What makes it an average.
    pub normalisation: Normalisation,
    /// How many hops.
    pub series: Series,
}
