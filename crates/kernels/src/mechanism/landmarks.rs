//! Which tokens stand for all the others in a Nystrom approximation, and how the matrix between them is inverted.

use serde::{Deserialize, Serialize};

use super::{Dense, Form, Mechanism, Normalisation, Row, Structure, Symmetric};
use crate::Shape;

/// Where the landmarks come from; tagged by `kind` in JSON: `{"kind": "pool", "ratio": 4}`. A window is `ratio` tokens of
/// a sequence, or `ratio x ratio` of a grid, or as wide as [`PoolWindows::Count`] makes it. A window without kept tokens, or a
/// masked pick, is no landmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "kebab-case",
    deny_unknown_fields,
    expecting = r#"an object like `{"kind": "pool", "ratio": 8}`"#
)]
pub enum Landmarks {
    /// The mean of the kept tokens of a window.
    Pool(PoolWindows),
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

/// How many windows [`Landmarks::Pool`] takes its means over: a field beside `kind` in JSON, `ratio` or `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "PoolFields", into = "PoolFields")]
pub enum PoolWindows {
    /// `{"kind": "pool", "ratio": 4}`: windows of so many tokens a side, 1 to 65536, of which the last of an axis may be smaller.
    /// More tokens make more landmarks, so that the cost is not linear in the tokens.
    Ratio(usize),
    /// `{"kind": "pool", "count": 49}`: so many landmarks, 1 to 65536, of any length or grid, so that the cost is linear in the
    /// tokens. Window `i` of `m` over `n` tokens of an axis is `floor(i n / m)` to `floor((i + 1) n / m)`, masked ones counted. A
    /// grid has `a x b` windows: of the pairs with `a b = m` that it has room for, the one whose aspect is nearest to the grid's
    /// on a logarithmic scale, and of two as near the one with fewer rows; without any it is an error. Where there are no more
    /// tokens than that, each is a landmark.
    Count(usize),
}

/// What [`PoolWindows`] is written as.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ratio: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<usize>,
}

impl TryFrom<PoolFields> for PoolWindows {
    type Error = &'static str;

    fn try_from(PoolFields { ratio, count }: PoolFields) -> Result<Self, Self::Error> {
        match (ratio, count) {
            (Some(ratio), None) => Ok(Self::Ratio(ratio)),
            (None, Some(count)) => Ok(Self::Count(count)),
            (Some(_), Some(_)) => Err("`ratio` and `count` exclude each other: leave one of them out"),
            (None, None) => Err("landmarks of kind pool need `ratio`, the side of a window, or `count`, their number"),
        }
    }
}

impl From<PoolWindows> for PoolFields {
    fn from(windows: PoolWindows) -> Self {
        match windows {
            PoolWindows::Ratio(ratio) => Self { ratio: Some(ratio), count: None },
            PoolWindows::Count(count) => Self { ratio: None, count: Some(count) },
        }
    }
}

impl Landmarks {
    /// The `kind` of the configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Pool(_) => "pool",
            Self::Conv { .. } => "conv",
            Self::Stride { .. } => "stride",
            Self::Random { .. } => "random",
            Self::First { .. } => "first",
            Self::Given { .. } => "given",
            Self::All => "all",
        }
    }

    /// Whether more tokens make more landmarks.
    pub(crate) const fn grow(self) -> bool {
        matches!(self, Self::Pool(PoolWindows::Ratio(_)) | Self::Conv { .. } | Self::Stride { .. } | Self::All)
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

/// Landmarks of whatever mechanism has them, and their grid.
impl Mechanism {
    const fn landmark_fields(&self) -> Option<(Landmarks, Option<[usize; 2]>)> {
        if let Structure::Nystrom(m) = &self.structure { Some((m.landmarks, m.grid)) } else { None }
    }

    /// Where the landmarks come from, of a mechanism that is configured with some; [`Landmarks::All`] says that there are none.
    pub const fn landmark_kind(&self) -> Option<Landmarks> {
        match self.landmark_fields() {
            Some((landmarks, _)) => Some(landmarks),
            None => None,
        }
    }

    /// Height and width of the tokens that landmarks and filters over values are made on; none of a sequence.
    pub const fn grid(&self) -> Option<[usize; 2]> {
        match self.landmark_fields() {
            Some((_, grid)) => grid,
            None => None,
        }
    }

    /// Width of the filter over the values that is added to the operator; 0 without one.
    pub const fn value_conv(&self) -> usize {
        if let Structure::Nystrom(m) = &self.structure { m.value_conv } else { 0 }
    }

    /// The same mechanism with `change` applied to its landmarks, where it has any.
    #[must_use]
    pub fn with_landmarks(mut self, change: impl FnOnce(Landmarks) -> Landmarks) -> Self {
        if let Structure::Nystrom(m) = &mut self.structure {
            m.landmarks = change(m.landmarks);
        }
        self
    }

    /// The same mechanism with its tokens on `grid`, if one is given; a mechanism that knows no grid as it is.
    #[must_use]
    pub fn with_grid(mut self, grid: Option<[usize; 2]>) -> Self {
        if let Structure::Nystrom(m) = &mut self.structure {
            m.grid = grid.or(m.grid);
        }
        self
    }

    /// The same kernel of every pair, where landmarks stand for tokens; a mechanism without landmarks, and a composition that filters its
    /// values, as it is.
    #[must_use]
    pub fn without_landmarks(self) -> Self {
        match (self.own(), &self.structure) {
            (Some(Form::Soft(m) | Form::SoftPp(m)), _) => {
                m.with_landmarks(Landmarks::All).with_landmark_act(false).into()
            }
            (Some(Form::Laplacian(m)), _) => m.exact().into(),
            (None, Structure::Nystrom(own)) if own.value_conv == 0 => {
                let normalisation = match self.normalisation {
                    // Each of the factors is softmax, as the whole is.
                    Normalisation::Factors(_) => Row::default().into(),
                    // Degrees of landmarks are those of all tokens.
                    Normalisation::Symmetric(_) => Symmetric::default().into(),
                    other => other,
                };
                Self { structure: Dense::default().into(), normalisation, name: None, ..self }
            }
            _ => self,
        }
    }

    /// How many landmarks a head of sizes `shape` has, where tokens attend through landmarks; masks may leave some of them out. 0 for
    /// [`PoolWindows::Count`] on a grid that it does not fit and for [`Landmarks::Given`] of which the number is not known.
    pub fn landmarks(&self, shape: &Shape) -> Option<usize> {
        let landmarks = self.landmark_kind().filter(|landmarks| *landmarks != Landmarks::All)?;
        // Filters of `laplacian` take windows that they do not fill.
        Some(landmarks.count(shape.seq_kv, self.grid(), self.filters_by_channel()))
    }

    /// How many landmarks are drawn at random, where they are.
    pub const fn drawn_landmarks(&self) -> Option<usize> {
        match self.landmark_kind() {
            Some(Landmarks::Random { count, .. }) => Some(count),
            _ => None,
        }
    }

    /// The same mechanism, told how many landmarks a call gives it; one whose configuration says how many, or has landmarks of
    /// another kind than `given`, is unchanged.
    #[must_use]
    pub fn with_given_landmarks(self, number: usize) -> Self {
        self.with_landmarks(|landmarks| match landmarks {
            Landmarks::Given { count: None } => Landmarks::Given { count: Some(number) },
            other => other,
        })
    }
}
