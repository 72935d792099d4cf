//! The structure: how the operator on the graph of tokens is held. The second of the four values of a mechanism.

use derive_setters::Setters;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{
    Inverse, InverseGradient, Landmarks, LinearInfsa, NewtonInit, NormBias, PoolWindows, PowerOperator, Soft, Ssa,
    parse::{config, fields_of, kind_of, unknown_kind},
    valid::check,
};
use crate::{Parameter, Result, Shape, random_features};

/// How the `seq_q x seq_kv` operator is held.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Structure {
    /// Every pair, streamed in tiles and never stored.
    Dense(Dense),
    /// Clusters of tokens: exact within, sampled or averaged beyond. "Spectral Sparse Attention: Subquadratic Long-Context
    /// Modeling via Cluster-Based Sparsification with Provable Guarantees".
    Clustered(Clustered),
    /// Through landmarks: every token's affinity to them, and the inverse of theirs to each other. "Softmax-free Linear
    /// Transformers", "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel".
    Nystrom(Nystrom),
    /// `phi(Q) phi(K)^T` of feature maps, never multiplied out.
    Features(Features),
    /// Pairs of queries and of a fixed number of learned combinations of all keys. "Linformer: Self-Attention with Linear Complexity".
    Projected(Projected),
    /// One weight per token and one pooled value: rank one.
    Pooled(Pooled),
}

/// Fields of [`Structure::Dense`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Dense {
    /// Query `i` sees key `j` only if their positions differ by less, the last query and the last key being at one position.
    /// Default null = every key; at least 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// With a window: so many first keys are seen from everywhere, but for causality and masks. Default 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub sinks: usize,
}

fn is_zero(x: &usize) -> bool {
    *x == 0
}

/// Fields of [`Structure::Clustered`]: those of [`Ssa`] but for `scale` and `causal`, which are the score's and the mechanism's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Clustered(Box<Ssa>);

impl From<Ssa> for Clustered {
    fn from(m: Ssa) -> Self {
        Self(Box::new(Ssa { scale: None, causal: false, ..m }))
    }
}

impl Clustered {
    pub(super) const fn set_seed(&mut self, seed: u64) {
        self.0.seed = seed;
    }

    pub(super) const fn routes_queries(&self) -> bool {
        self.0.routes_queries()
    }

    /// The same fields, with what a score and a mechanism say.
    pub fn ssa(&self, scale: Option<f64>, causal: bool) -> Ssa {
        Ssa { scale, causal, ..(*self.0).clone() }
    }
}

impl Serialize for Clustered {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let value = serde_json::to_value(&self.0).map_err(serde::ser::Error::custom)?;
        let fields = value.as_object().into_iter().flatten();
        let own = fields.filter(|(name, _)| !["scale", "causal"].contains(&name.as_str()));
        // A null is an option that is none: formats without one leave it out.
        s.collect_map(own.map(|(name, value)| (name, Some(value).filter(|value| !value.is_null()))))
    }
}

/// Fields of [`Structure::Nystrom`], as [`Soft`] has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Nystrom {
    /// Where landmarks come from; made of the keys. Default `{"kind": "pool", "ratio": 4}`.
    pub landmarks: Landmarks,
    /// Height and width of the tokens. Default null: a sequence.
    pub grid: Option<[usize; 2]>,
    /// Layer norm and GELU on the landmarks. Default false.
    pub landmark_act: bool,
    /// Default newton-schulz.
    pub inverse: Inverse,
    /// Default 20; 1 to 64.
    pub newton_iterations: usize,
    /// Default scaled; null starts at `I / |M|_1`, as `laplacian` does.
    pub newton_init: Option<NewtonInit>,
    /// Added to the diagonal. Default 0.01; 0 or in [1e-12, 1e12].
    pub ridge: f64,
    /// Default implicit.
    pub gradient: InverseGradient,
    /// Default 1e-6; in [0, 1).
    pub eigen_cutoff: f64,
    /// Width of a filter over the values, added to the weights of a hop. Default 0: none; anything else needs as many queries as
    /// keys.
    pub value_conv: usize,
}

impl Default for Nystrom {
    fn default() -> Self {
        Self::from(Soft::default())
    }
}

impl From<Soft> for Nystrom {
    fn from(m: Soft) -> Self {
        let Soft { landmarks, grid, landmark_act, inverse, newton_iterations, newton_init, ridge, .. } = m;
        let Soft { gradient, eigen_cutoff, value_conv, .. } = m;
        let newton_init = Some(newton_init);
        Self {
            landmarks,
            grid,
            landmark_act,
            inverse,
            newton_iterations,
            newton_init,
            ridge,
            gradient,
            eigen_cutoff,
            value_conv,
        }
    }
}

impl Nystrom {
    /// The same fields of [`Soft`]. A start that it has no name for is its default's.
    pub(crate) fn soft(&self) -> Soft {
        let Self { landmarks, grid, landmark_act, inverse, newton_iterations, newton_init, ridge, .. } = *self;
        let Self { gradient, eigen_cutoff, value_conv, .. } = *self;
        let newton_init = newton_init.unwrap_or_default();
        let soft =
            Soft { landmarks, grid, landmark_act, inverse, newton_iterations, newton_init, ridge, ..Soft::default() };
        Soft { gradient, eigen_cutoff, value_conv, ..soft }
    }
}

/// The map of [`Features`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeatureMap {
    /// `elu(x) + 1`, channel by channel. "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", eq. 7.
    #[default]
    Elu,
    /// Positive orthogonal random features of `exp(q.k)`. "Rethinking Attention with Performers", eq. 5 and 6.
    Favor,
}

/// Fields of [`Structure::Features`]. Rows are multiplied by the root of the score's scale before they are mapped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Features {
    /// Default elu.
    pub map: FeatureMap,
    /// Random features of `favor`. Default null = `ceil(head_dim ln head_dim)`, at least 1; 1 to 65536.
    pub count: Option<usize>,
    /// Seed of `favor`'s draws. Default 0.
    pub seed: u64,
}

impl Features {
    /// Random features for a head of `head_dim` channels.
    pub fn count(&self, head_dim: usize) -> usize {
        let d = head_dim as f64;
        self.count.unwrap_or(((d * d.ln()).ceil() as usize).max(1))
    }

    /// The directions of `favor`'s features, `[count, head_dim]`, a constant of the configuration: blocks of orthogonal rows, each
    /// standard normal. "Rethinking Attention with Performers", section 3.2.
    pub fn directions(&self, head_dim: usize) -> Vec<f64> {
        random_features::directions(self.seed, self.count(head_dim), head_dim)
    }
}

/// Fields of [`Structure::Projected`]: `W = A F` with `A [seq_q, count]` the weights of the projected keys `E k` and `F v` the projected
/// values; the maps `E` and `F`, [`Parameter::KeyMap`](crate::Parameter::KeyMap) and
/// [`Parameter::ValueMap`](crate::Parameter::ValueMap), are a call's. "Linformer: Self-Attention with Linear Complexity", eq. 7.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Projected {
    /// Projected keys and values. Default 256; 1 to 65536. Section 5.1.
    pub count: usize,
    /// Whether every head has maps of its own, `[heads, count, tokens]`; else all share `[count, tokens]`. Default false. Section 4,
    /// headwise sharing.
    pub per_head: bool,
    /// Tokens that the maps have columns for: of fewer, the first columns are read, and more are refused. Default null: a call's maps are
    /// as wide as it has keys. A module needs it.
    pub max_tokens: Option<usize>,
    /// Seed of the maps where a call gives none: see [`Projected::map`]. Default 0.
    pub seed: u64,
}

impl Default for Projected {
    fn default() -> Self {
        Self { count: 256, per_head: false, max_tokens: None, seed: 0 }
    }
}

impl Projected {
    /// Columns of the maps of a call of `keys` tokens.
    pub(crate) fn columns(&self, keys: usize) -> usize {
        self.max_tokens.unwrap_or(keys)
    }

    /// Maps of a call of `heads` heads.
    pub(crate) const fn maps(&self, heads: usize) -> usize {
        if self.per_head { heads } else { 1 }
    }

    /// The map `[heads or 1, count, columns]` of keys, or of values, that stands for one that a call does not give, and that a module
    /// starts from: normal, of variance `1 / count`, as in theorem 2. More columns only add to it.
    pub fn map(&self, parameter: Parameter, heads: usize, columns: usize) -> Vec<f32> {
        let (maps, count) = (self.maps(heads), self.count);
        let mut map = vec![0.0; maps * count * columns];
        self.draw(parameter, heads, columns, &mut map);
        map
    }

    /// Writes [`Projected::map`].
    pub(crate) fn draw(&self, parameter: Parameter, heads: usize, columns: usize, map: &mut [f32]) {
        let rows = self.maps(heads) * self.count;
        let mut normal = random_features::Normal::new(self.seed, u64::from(parameter == Parameter::ValueMap));
        let deviation = (self.count as f64).powf(-0.5);
        for column in 0..columns {
            (0..rows).for_each(|row| map[row * columns + column] = (normal.next() * deviation) as f32);
        }
    }

    /// The shape of a map, and 1s beyond the last axis; how many axes there are.
    pub(super) fn axes(&self, shape: &Shape) -> ([usize; 4], usize) {
        let (count, columns) = (self.count, self.columns(shape.seq_kv));
        if self.per_head { ([shape.heads, count, columns, 1], 3) } else { ([count, columns, 1, 1], 2) }
    }

    pub(super) fn check_support(&self, shape: &Shape) -> Result<()> {
        let most = self.columns(shape.seq_kv);
        check("structure.max_tokens", most, shape.seq_kv <= most, "at least the number of key tokens, or null")
    }
}

/// Fields of [`Structure::Pooled`], as [`LinearInfsa`] has them; with the constant score, the mean of the values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Pooled {
    /// Steps of the power method. Default 1; 1 to 64.
    pub iterations: usize,
    /// Default factored.
    pub operator: PowerOperator,
    /// Default 0.
    pub norm_bias: NormBias,
    /// Whether every query gets the pooled value. Default true.
    pub broadcast: bool,
    /// Added to norms. Default 1e-6.
    pub eps: f64,
}

impl Default for Pooled {
    fn default() -> Self {
        let LinearInfsa { iterations, operator, norm_bias, broadcast, eps, .. } = LinearInfsa::default();
        Self { iterations, operator, norm_bias, broadcast, eps }
    }
}

impl Default for Structure {
    fn default() -> Self {
        Self::Dense(Dense::default())
    }
}

impl Structure {
    /// Every kind, in the order of the tables.
    pub const KINDS: [&'static str; 6] = ["dense", "clustered", "nystrom", "features", "projected", "pooled"];

    /// The kind, as in the JSON configuration.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Dense(_) => "dense",
            Self::Clustered(_) => "clustered",
            Self::Nystrom(_) => "nystrom",
            Self::Features(_) => "features",
            Self::Projected(_) => "projected",
            Self::Pooled(_) => "pooled",
        }
    }

    /// Reads `{"kind": "<kind>", ...fields}`.
    pub(super) fn from_fields(mut fields: Map<String, Value>) -> Result<Self> {
        const PART: &str = "structure";
        Ok(match &*kind_of(PART, &mut fields)? {
            "dense" => Self::Dense(fields_of(PART, fields)?),
            "clustered" => {
                if let Some(name) = ["scale", "causal"].into_iter().find(|name| fields.contains_key(*name)) {
                    let problem = "belongs to the score (`scale`) or the mechanism (`causal`), not to its structure";
                    return Err(config(format!("structure.{name}"), problem));
                }
                Self::Clustered(Clustered(fields_of(PART, fields)?))
            }
            "nystrom" => Self::Nystrom(fields_of(PART, fields)?),
            "features" => Self::Features(fields_of(PART, fields)?),
            "projected" => Self::Projected(fields_of(PART, fields)?),
            "pooled" => Self::Pooled(fields_of(PART, fields)?),
            other => return Err(unknown_kind(PART, other, &Self::KINDS)),
        })
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::Dense(m) => {
                check("structure.window", 0, m.window != Some(0), "null or at least 1")?;
                check("structure.sinks", m.sinks, m.sinks == 0 || m.window.is_some(), "0 unless there is a window")
            }
            Self::Clustered(Clustered(m)) => m.validate(),
            Self::Nystrom(m) => {
                let all = m.landmarks == Landmarks::All;
                check(
                    "structure.landmarks.kind",
                    "all",
                    !all,
                    "another kind; the structure `dense` is all tokens, and has no `value_conv`",
                )?;
                // What `soft` has no use for, and what is left is checked as its fields.
                let landmarks = match m.landmarks {
                    Landmarks::Stride { ratio } => Landmarks::Pool(PoolWindows::Ratio(ratio)),
                    other => other,
                };
                let inverse = if m.inverse == Inverse::Cg { Inverse::Cholesky } else { m.inverse };
                Soft { landmarks, inverse, ..m.soft() }.validate(false)
            }
            Self::Features(m) => {
                let count = m.count.unwrap_or(1);
                check("structure.count", count, (1..=1 << 16).contains(&count), "null or 1 to 65536")?;
                let given = m.map == FeatureMap::Elu && m.count.is_some();
                check("structure.count", count, !given, "null with map elu, which has one feature per channel")
            }
            Self::Projected(m) => {
                let (sizes, most) = (1..=1 << 16, m.max_tokens.unwrap_or(1));
                check("structure.count", m.count, sizes.contains(&m.count), "1 to 65536")?;
                check("structure.max_tokens", most, (1..=1 << 24).contains(&most), "null or 1 to 16777216")
            }
            Self::Pooled(_) => Ok(()),
        }
    }
}
