//! The additive bias: what is added to the logits of pairs for where their tokens are.

use derive_setters::Setters;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    parse::{fields_of, kind_of, unknown_kind},
    valid::check,
};
use crate::{Error, Result, Shape, parallel};

/// What is added to the logarithms of affinities, or, of scores that are no exponentials, to their logits before the activation. The
/// numbers are the parameter [`crate::Parameter::Bias`], which has a gradient; where one is `-inf` there is no pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Bias {
    /// A tensor that is broadcast over some axes.
    Tensor(BiasTensor),
    /// `-slope |i - j|`, a slope per head: `[heads]`. "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    /// Extrapolation", section 3.
    Alibi(Alibi),
    /// A number per head and bucket of distances: `[heads, count]`. "Exploring the Limits of Transfer Learning with a Unified
    /// Text-to-Text Transformer", section 2.1.
    Buckets(Buckets),
    /// A number per head and offset on a grid: `[heads, (2 height - 1) (2 width - 1)]`. "Swin Transformer: Hierarchical Vision
    /// Transformer using Shifted Windows", eq. 4.
    Grid(BiasGrid),
}

/// Fields of [`Bias::Tensor`]: which axes the tensor `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]` has; it is broadcast over
/// the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct BiasTensor {
    /// Default false.
    pub batch: bool,
    /// Default true.
    pub heads: bool,
    /// Default true.
    pub queries: bool,
    /// Default true.
    pub keys: bool,
}

impl Default for BiasTensor {
    fn default() -> Self {
        Self { batch: false, heads: true, queries: true, keys: true }
    }
}

/// Fields of [`Bias::Alibi`]: none. Slopes that a call does not give are the paper's, `2^(-8 h / heads)` for `h` from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alibi {}

/// Fields of [`Bias::Buckets`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Buckets {
    /// How many: half of a direction's are single distances, the others grow with the logarithm. Default 32, 2 to 65536.
    pub count: usize,
    /// From here on all distances are in the last bucket. Default 128, more than the single distances.
    pub max_distance: usize,
    /// Whether later keys have buckets of their own, half of all; else they are at distance 0. Default true.
    pub bidirectional: bool,
}

impl Default for Buckets {
    fn default() -> Self {
        Self { count: 32, max_distance: 128, bidirectional: true }
    }
}

impl Buckets {
    /// Buckets of a direction, and how many of them are single distances.
    const fn of_direction(&self) -> [usize; 2] {
        let all = if self.bidirectional { self.count / 2 } else { self.count };
        [all, all / 2]
    }

    /// The bucket of a key that is `ahead` of its query.
    fn bucket(&self, ahead: i64) -> usize {
        let [all, single] = self.of_direction();
        let (first, distance) = match (self.bidirectional, ahead > 0) {
            (true, true) => (all, ahead),
            (true, false) => (0, -ahead),
            (false, _) => (0, (-ahead).max(0)),
        };
        let distance = distance as usize;
        if distance < single {
            return first + distance;
        }
        let log = |x: usize| (x as f64 / single as f64).ln();
        // Rounding may not part a power from its bucket.
        let beyond = log(distance) / log(self.max_distance) * (all - single) as f64 + 1e-9;
        first + (single + beyond as usize).min(all - 1)
    }
}

/// Fields of [`Bias::Grid`]: tokens lie on it row by row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BiasGrid {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl BiasGrid {
    /// A grid of `height` rows and `width` columns.
    pub const fn new(height: usize, width: usize) -> Self {
        Self { height, width }
    }
}

/// The largest sides of a grid, beyond which offsets on it leave what counts them.
const MOST_SIDE: usize = 1 << 14;
/// From here on f32 rounds a logit by so much of it that keys whose scores are near each other are wrong.
const MOST: f32 = (1_u64 << 34) as f32;

impl Bias {
    const KINDS: [&'static str; 4] = ["tensor", "alibi", "buckets", "grid"];

    /// The name in a configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Tensor(_) => Self::KINDS[0],
            Self::Alibi(_) => Self::KINDS[1],
            Self::Buckets(_) => Self::KINDS[2],
            Self::Grid(_) => Self::KINDS[3],
        }
    }

    pub(super) fn from_fields(mut fields: Map<String, Value>) -> Result<Self> {
        const PART: &str = "bias";
        let kind = kind_of(PART, &mut fields)?;
        Ok(match &*kind {
            "tensor" => Self::Tensor(fields_of(PART, fields)?),
            "alibi" => Self::Alibi(fields_of(PART, fields)?),
            "buckets" => Self::Buckets(fields_of(PART, fields)?),
            "grid" => Self::Grid(fields_of(PART, fields)?),
            _ => return Err(unknown_kind(PART, &kind, &Self::KINDS)),
        })
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::Tensor(_) | Self::Alibi(_) => Ok(()),
            Self::Buckets(m) => {
                let even = !m.bidirectional || m.count.is_multiple_of(2);
                let fits = even && (2 + 2 * usize::from(m.bidirectional)..=1 << 16).contains(&m.count);
                check("bias.count", m.count, fits, "2 to 65536; bidirectional: even, from 4 on")?;
                let fits = m.max_distance > m.of_direction()[1] && m.max_distance as u64 <= 1 << 32;
                check("bias.max_distance", m.max_distance, fits, "more than the single distances, up to 2^32")
            }
            Self::Grid(m) => {
                let sides = format!("{} x {}", m.height, m.width);
                let fits = [m.height, m.width].iter().all(|side| (1..=MOST_SIDE).contains(side));
                check("bias.height, width", sides, fits, "1 to 16384 each")
            }
        }
    }

    /// Whether there is such a bias for the tokens of a call.
    pub(super) fn check_support(&self, mechanism: &'static str, shape: &Shape) -> Result<()> {
        match self {
            Self::Grid(m) if [shape.seq_q, shape.seq_kv] != [m.height * m.width; 2] => Err(Error::Unsupported {
                mechanism,
                what: "a bias of a grid that the tokens are not on",
                why: "queries and keys have to be bias.height * bias.width tokens",
            }),
            _ => Ok(()),
        }
    }

    /// Whether numbers are ones to be added to logits.
    pub(super) fn check_values(&self, values: &[f32]) -> Result<()> {
        let (least, expected) = match self {
            Self::Tensor(_) => (f32::NEG_INFINITY, "up to 2^34, or -inf for a pair that is absent"),
            _ => (-MOST, "at most 2^34 in magnitude"),
        };
        let range = least..=MOST;
        // Without a way out, so that the compiler makes vectors of it: there may be a number for every pair.
        let fits = |x: &[f32]| x.iter().fold(true, |fits, x| fits & range.contains(x));
        let fit = parallel::all(values.chunks(1 << 14), fits);
        let misfit = if fit { None } else { values.iter().find(|x| !range.contains(x)) };
        misfit.map_or(Ok(()), |x| check("bias", x, false, expected))
    }

    /// The axes of the parameter, and 1s beyond the last; how many there are.
    pub(crate) fn axes(&self, shape: &Shape) -> ([usize; 4], usize) {
        match self {
            Self::Tensor(m) => {
                let axis = |has: bool, len: usize| if has { len } else { 1 };
                let rows = [axis(m.batch, shape.batch), axis(m.heads, shape.heads)];
                ([rows[0], rows[1], axis(m.queries, shape.seq_q), axis(m.keys, shape.seq_kv)], 4)
            }
            Self::Alibi(_) => ([shape.heads, 1, 1, 1], 1),
            Self::Buckets(m) => ([shape.heads, m.count, 1, 1], 2),
            Self::Grid(m) => ([shape.heads, (2 * m.height - 1) * (2 * m.width - 1), 1, 1], 2),
        }
    }

    /// Where the numbers of a batch element and head begin, and how many there are.
    pub(crate) fn part(&self, shape: &Shape, slice: usize) -> std::ops::Range<usize> {
        let [batch, heads] = [slice / shape.heads, slice % shape.heads];
        let (axes, _) = self.axes(shape);
        let (n, len) = match self {
            Self::Tensor(m) => {
                (usize::from(m.batch) * batch * axes[1] + usize::from(m.heads) * heads, axes[2] * axes[3])
            }
            _ => (heads, axes[1]),
        };
        n * len..(n + 1) * len
    }

    /// The values that stand for those of a call; none where a call has to give them.
    pub(crate) fn default_values(&self, shape: &Shape) -> Option<Vec<f32>> {
        let Self::Alibi(_) = self else { return None };
        let heads = shape.heads;
        // Of heads that are no power of two: those of the power below, and every second one of the power above.
        let power = 1 << heads.ilog2();
        let slope = |h: usize, of: usize| (-8.0 * h as f64 / of as f64).exp2() as f32;
        let more = (0..heads - power).map(|h| slope(2 * h + 1, 2 * power));
        Some((1..=power).map(|h| slope(h, power)).chain(more).collect())
    }

    /// Where among the numbers of its head that of query `i` and key `j` is, and the factor on it.
    pub(crate) fn entry(&self, shape: &Shape, i: usize, j: usize) -> (usize, f64) {
        let ahead = (j + shape.seq_q) as i64 - (i + shape.seq_kv) as i64;
        match self {
            Self::Tensor(m) => {
                let row = if m.keys { shape.seq_kv } else { 1 };
                (usize::from(m.queries) * i * row + usize::from(m.keys) * j, 1.0)
            }
            Self::Alibi(_) => (0, -(ahead.unsigned_abs() as f64)),
            Self::Buckets(m) => (m.bucket(ahead), 1.0),
            Self::Grid(m) => {
                let w = m.width;
                let [rows, columns] = [i / w + m.height - 1 - j / w, i % w + w - 1 - j % w];
                (rows * (2 * w - 1) + columns, 1.0)
            }
        }
    }
}
