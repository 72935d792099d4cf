//! Which tokens stand for all the others in a Nystrom approximation, and how the matrix between them is inverted.

use serde::{Deserialize, Serialize};

/// Where the landmarks come from; tagged by `kind` in JSON: `{"kind": "pool", "ratio": 4}`. A window is `ratio` tokens of
/// a sequence, or `ratio x ratio` of a grid. A window without kept tokens, or a masked pick, is no landmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "kebab-case",
    deny_unknown_fields,
    expecting = r#"an object like `{"kind": "pool", "ratio": 8}`"#
)]
pub enum Landmarks {
    /// The mean of the kept tokens of a window; the last window of an axis may be smaller.
    Pool {
        /// Side of a window, at least 1.
        ratio: usize,
    },
    /// A learned filter over a window, the input `landmark_weight`, which masked tokens enter as zeros. `soft`: all channels
    /// to all, `[head_dim, head_dim, window]`, what does not fill a window is dropped; `laplacian`: channel by channel,
    /// `[head_dim, window]`, windows may be partial.
    Conv {
        /// Side of a window, at least 1.
        ratio: usize,
    },
    /// The kept token nearest the centre of a window, by its place in the window. `laplacian`.
    Stride {
        /// Side of a window, at least 1.
        ratio: usize,
    },
    /// Distinct tokens drawn at random, the same for all heads; the input `landmark_indices` replaces the draw. `soft`.
    Random {
        /// How many, 1 to the number of tokens.
        count: usize,
        /// Seed of the draw.
        seed: u64,
    },
    /// The first tokens. `soft`; a control.
    First {
        /// How many, 1 to the number of tokens.
        count: usize,
    },
    /// The input `given_landmarks [batch, heads, count, head_dim]`. `soft`.
    Given {
        /// How many, 1 to the number of tokens, or to 1024 where those are fewer; null until the input is known ([`crate::Mechanism::with_given_landmarks`]).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<usize>,
    },
    /// Every token: the kernel itself, unapproximated. `soft`.
    All,
}

impl Landmarks {
    /// The `kind` of the configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Pool { .. } => "pool",
            Self::Conv { .. } => "conv",
            Self::Stride { .. } => "stride",
            Self::Random { .. } => "random",
            Self::First { .. } => "first",
            Self::Given { .. } => "given",
            Self::All => "all",
        }
    }
}

/// How the matrix between the landmarks is inverted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inverse {
    /// `X <- 2X - X M X`, a fixed number of times: products only.
    #[default]
    NewtonSchulz,
    /// By the Cholesky factor, exactly.
    Cholesky,
    /// By eigenvalues, of which those near zero are dropped: the pseudo-inverse. `soft`.
    Eigen,
    /// Conjugate gradients, column by column. `laplacian`.
    Cg,
}

/// What [`Inverse::NewtonSchulz`] starts from: `alpha M`, or `alpha I`. `|.|_1` is the largest absolute column sum, `M` the
/// kernel matrix `A` with the ridge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NewtonInit {
    /// `alpha = 1.8 / |M|_1^2`, which always converges.
    #[default]
    Scaled,
    /// `alpha = 2 / |M|_1^2`. "Softmax-free Linear Transformers", algorithm 2; loses the directions with eigenvalue `|M|_1`.
    Paper,
    /// `paper`, halved while `|I - alpha M^2|_1 > 1.01`, ten times at most.
    Backtrack,
    /// `alpha = 1.8 / |A|_1^2`, as in the authors' code.
    Official,
    /// `X = alpha I` with `alpha = 1.8 / |M|_1`: half as many steps. Needs a ridge.
    Identity,
}

/// What is differentiated where [`Inverse::NewtonSchulz`] has stopped short of the inverse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InverseGradient {
    /// `dA = -Y dY Y`, as if `Y` were the inverse. "Softmax-free Linear Transformers", eq. 12.
    #[default]
    Implicit,
    /// The steps that were taken, the start's factor held constant. For comparison: it keeps every iterate.
    Unrolled,
}
