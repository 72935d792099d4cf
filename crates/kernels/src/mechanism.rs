//! What a mechanism is: four choices (score, structure, normalisation, series), and the published presets of them.
//!
//! A preset is read from JSON, `{"mechanism": "infsa", "gamma": 0.9}`: a missing field has its default, an unknown field,
//! a wrong type or a value out of range is an [`Error`] that names the field.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, Shape};

/// How two tokens relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Score {
    /// The same for every pair.
    Constant,
    /// `exp(scale * q.k)`.
    DotExp,
    /// `phi(scale * q.k)` with an [`Activation`].
    DotActivation,
}

/// How the `seq_q x seq_kv` operator is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Structure {
    /// Every pair, streamed in tiles and never stored.
    Dense,
    /// One weight per token and one pooled value: rank one.
    Pooled,
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

/// The function that turns a logit into an affinity. "Infinite Self-Attention", eq. 11 and table 4.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `max(x, 0)`; derivative 0 at 0.
    #[default]
    Relu,
    /// `|x|`; derivative 0 at 0.
    Abs,
    /// `x Phi(x)`, the exact erf form; signed and not homogeneous, so that `scale` matters.
    Gelu,
}

/// How one power step of [`LinearInfsa`] is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PowerOperator {
    /// Activation after the product with the weights: O(N d) per step. The paper's.
    #[default]
    Factored,
    /// Activation inside: a true power step with `phi(scale Q K^T)^T`; O(N^2 d) time, O(N) memory.
    Exact,
}

/// The weight of the rank-one positivity term of [`LinearInfsa`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormBias {
    /// A number >= 0.
    Value(f64),
    /// `E|t|`, `t` the cosine of two random directions: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`; JSON `"auto"`.
    Auto,
}

/// Softmax attention, the baseline.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Softmax {
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; finite, > 0.
    pub scale: Option<f64>,
    /// Query `i` sees keys `j <= i + seq_kv - seq_q`. Default false.
    pub causal: bool,
    /// The keys are the queries. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
}

/// The mean of the allowed values: the control that every comparison carries. `q` and `k` give sizes only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Uniform {
    /// A running mean. Default false.
    pub causal: bool,
}

/// Pure InfSA: activated affinities over their Frobenius norm. "Infinite Self-Attention", eq. 11 and 12.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Infsa {
    /// Decay. Default 0.7, in (0, 1]. Eq. 6.
    pub gamma: f64,
    /// Logit to affinity. Default relu. Eq. 11, table 4.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; finite, > 0.
    pub scale: Option<f64>,
    /// Added to the norm. Default 1e-6, finite, >= 0. Section 3.6.
    pub eps: f64,
    /// The keys are the queries. Default false. Section 3.4.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Row `i` sees keys `j <= i` and is divided by the norm of the leading block (prefix norm). Default false.
    pub causal: bool,
}

impl Default for Infsa {
    fn default() -> Self {
        Self { gamma: 0.7, activation: Activation::Relu, scale: None, eps: 1e-6, tied: false, causal: false }
    }
}

/// All hops of [`Infsa`] at once, `((I - gamma A)^-1 - I) V`: the limit that "Infinite Self-Attention" (eq. 7, 10, 15)
/// takes as its template, solved matrix-free.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InfsaResolvent {
    /// Decay per hop. Default 0.7, in (0, 1).
    pub gamma: f64,
    /// Logit to affinity. Default relu.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; finite, > 0.
    pub scale: Option<f64>,
    /// Added to the norm. Default 1e-6, finite, >= 0.
    pub eps: f64,
    /// The keys are the queries; the solver is then conjugate gradients. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Must be false: the operator is square and global.
    pub causal: bool,
    /// Relative error bound at which the solver stops. Default 1e-6, in (0, 1).
    pub tol: f64,
    /// Iterations allowed. Default null = the worst case of the guaranteed bound; >= 1.
    pub max_iter: Option<usize>,
}

impl Default for InfsaResolvent {
    fn default() -> Self {
        let Infsa { gamma, activation, scale, eps, tied, causal } = Infsa::default();
        Self { gamma, activation, scale, eps, tied, causal, tol: 1e-6, max_iter: None }
    }
}

impl InfsaResolvent {
    /// Iterations after which the Neumann series is within `tol` whatever the input:
    /// `ceil(ln(tol (1 - gamma)) / ln gamma)`.
    pub fn worst_case_iterations(gamma: f64, tol: f64) -> usize {
        ((tol * (1.0 - gamma)).ln() / gamma.ln()).ceil().max(1.0) as usize
    }

    /// The single hop that the series repeats.
    pub fn hop(&self) -> Infsa {
        let Self { gamma, activation, scale, eps, tied, .. } = *self;
        Infsa { gamma, activation, scale, eps, tied, causal: false }
    }
}

/// Linear InfSA: one weight per token, one pooled value per head, broadcast. "Infinite Self-Attention", eq. 16 to 21.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinearInfsa {
    /// Factor on the pooled value. Default 0.7, in (0, 1]. Eq. 21.
    pub gamma: f64,
    /// Logit to score. Default relu.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; finite, > 0.
    pub scale: Option<f64>,
    /// Added to both sums that are divided by. Default 1e-6, finite, >= 0.
    pub eps: f64,
    /// The keys are the queries. Default false (the module's default is true). Section 3.4.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Must be false: every position would need all scores anew.
    pub causal: bool,
    /// Power steps. Default 1 (the paper's), 1 to 64; more than 1 needs queries and keys over one token set.
    pub iterations: usize,
    /// How a step is taken. Default factored.
    pub operator: PowerOperator,
    /// Weight of the rank-one term `|q_i| |k_j|` added to `q_i.k_j`. Default 0; >= 0 or `"auto"`.
    pub norm_bias: NormBias,
    /// Give every query the pooled value; false returns it once, `[batch, heads, 1, value_dim]`. Default true.
    pub broadcast: bool,
}

impl Default for LinearInfsa {
    fn default() -> Self {
        let Infsa { gamma, activation, scale, eps, tied, causal } = Infsa::default();
        let (operator, norm_bias) = (PowerOperator::Factored, NormBias::Value(0.0));
        Self { gamma, activation, scale, eps, tied, causal, iterations: 1, operator, norm_bias, broadcast: true }
    }
}

/// A preset with its parameters. The serialised form is the JSON configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "mechanism", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mechanism {
    /// Dense softmax.
    Softmax(Softmax),
    /// The mean of the values.
    Uniform(Uniform),
    /// Pure InfSA.
    Infsa(Infsa),
    /// The resolvent of Pure InfSA.
    InfsaResolvent(InfsaResolvent),
    /// Linear InfSA.
    LinearInfsa(LinearInfsa),
}

fn is_false(x: &bool) -> bool {
    !x
}

impl Serialize for NormBias {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            NormBias::Value(x) => s.serialize_f64(*x),
            NormBias::Auto => s.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for NormBias {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = NormBias;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number >= 0 or \"auto\"")
            }
            fn visit_f64<E>(self, x: f64) -> std::result::Result<NormBias, E> {
                Ok(NormBias::Value(x))
            }
            fn visit_i64<E>(self, x: i64) -> std::result::Result<NormBias, E> {
                Ok(NormBias::Value(x as f64))
            }
            fn visit_u64<E>(self, x: u64) -> std::result::Result<NormBias, E> {
                Ok(NormBias::Value(x as f64))
            }
            fn visit_str<E: serde::de::Error>(self, x: &str) -> std::result::Result<NormBias, E> {
                if x == "auto" {
                    Ok(NormBias::Auto)
                } else {
                    Err(E::invalid_value(serde::de::Unexpected::Str(x), &self))
                }
            }
        }
        d.deserialize_any(Visitor)
    }
}

impl NormBias {
    /// The number, for `head_dim` channels.
    pub fn value(&self, head_dim: usize) -> f64 {
        match *self {
            NormBias::Value(x) => x,
            // E|t| obeys r(d) r(d+1) = 2 / (pi d) with r(1) = 1: exact and without a gamma function.
            NormBias::Auto => (1..head_dim).fold(1.0, |r, d| 2.0 / (std::f64::consts::PI * d as f64) / r),
        }
    }
}

impl<'de> Deserialize<'de> for Mechanism {
    /// From any self-describing format (TOML recipes); the error names the field, as [`Mechanism::from_json`] does.
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        Self::from_value(serde_json::Value::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

impl Mechanism {
    /// Every id, in the order of the tables.
    pub const IDS: [&'static str; 5] = ["softmax", "uniform", "infsa", "infsa-resolvent", "linear-infsa"];

    /// The preset `id` with its defaults.
    ///
    /// # Errors
    /// [`Error::Config`] listing the known ids.
    pub fn preset(id: &str) -> Result<Self> {
        Ok(match id {
            "softmax" => Self::Softmax(Softmax::default()),
            "uniform" => Self::Uniform(Uniform::default()),
            "infsa" => Self::Infsa(Infsa::default()),
            "infsa-resolvent" => Self::InfsaResolvent(InfsaResolvent::default()),
            "linear-infsa" => Self::LinearInfsa(LinearInfsa::default()),
            _ => {
                let problem = format!("unknown mechanism `{id}`, expected one of: {}", Self::IDS.join(", "));
                return Err(Error::Config { field: "mechanism".into(), problem });
            }
        })
    }

    /// Reads and validates `{"mechanism": "<id>", ...fields}`.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::OutOfRange`], naming the field.
    pub fn from_json(text: &str) -> Result<Self> {
        let value = serde_json::from_str(text)
            .map_err(|e| Error::Config { field: ".".into(), problem: format!("not valid JSON: {e}") })?;
        Self::from_value(value)
    }

    /// Reads and validates a parsed configuration object.
    ///
    /// # Errors
    /// As [`Mechanism::from_json`].
    pub fn from_value(value: serde_json::Value) -> Result<Self> {
        let config = |field: &str, problem: String| Error::Config { field: field.into(), problem };
        let serde_json::Value::Object(mut fields) = value else {
            return Err(config(".", "expected an object like {\"mechanism\": \"softmax\"}".into()));
        };
        let id = match fields.remove("mechanism") {
            Some(serde_json::Value::String(id)) => id,
            Some(other) => return Err(config("mechanism", format!("expected a string, found {other}"))),
            None => return Err(config("mechanism", format!("missing; one of: {}", Self::IDS.join(", ")))),
        };
        let mechanism = match Self::preset(&id)? {
            Self::Softmax(_) => Self::Softmax(fields_of(fields)?),
            Self::Uniform(_) => Self::Uniform(fields_of(fields)?),
            Self::Infsa(_) => Self::Infsa(fields_of(fields)?),
            Self::InfsaResolvent(_) => Self::InfsaResolvent(fields_of(fields)?),
            Self::LinearInfsa(_) => Self::LinearInfsa(fields_of(fields)?),
        };
        mechanism.validate()?;
        Ok(mechanism)
    }

    /// The id, as in the JSON configuration.
    pub const fn id(&self) -> &'static str {
        match self {
            Self::Softmax(_) => "softmax",
            Self::Uniform(_) => "uniform",
            Self::Infsa(_) => "infsa",
            Self::InfsaResolvent(_) => "infsa-resolvent",
            Self::LinearInfsa(_) => "linear-infsa",
        }
    }

    /// The four choices behind the preset.
    pub const fn choices(&self) -> Choices {
        use {Normalisation::*, Score::*, Series::*, Structure::*};
        let (score, structure, normalisation, series) = match self {
            Self::Softmax(_) => (DotExp, Dense, Row, OneHop),
            Self::Uniform(_) => (Constant, Pooled, Row, OneHop),
            Self::Infsa(_) => (DotActivation, Dense, Frobenius, OneHop),
            Self::InfsaResolvent(_) => (DotActivation, Dense, Frobenius, Resolvent),
            Self::LinearInfsa(_) => (DotActivation, Pooled, L1, Limit),
        };
        Choices { score, structure, normalisation, series }
    }

    /// Whether the keys are the queries, so that a call has no `k`.
    pub const fn tied(&self) -> bool {
        match self {
            Self::Softmax(m) => m.tied,
            Self::Uniform(_) => false,
            Self::Infsa(m) => m.tied,
            Self::InfsaResolvent(m) => m.tied,
            Self::LinearInfsa(m) => m.tied,
        }
    }

    /// Whether the configuration asks for causality (a call's mask may add it).
    pub const fn causal(&self) -> bool {
        match self {
            Self::Softmax(m) => m.causal,
            Self::Uniform(m) => m.causal,
            Self::Infsa(m) => m.causal,
            Self::InfsaResolvent(m) => m.causal,
            Self::LinearInfsa(m) => m.causal,
        }
    }

    /// The configured decay, where the mechanism has one.
    pub const fn gamma(&self) -> Option<f64> {
        match self {
            Self::Softmax(_) | Self::Uniform(_) => None,
            Self::Infsa(m) => Some(m.gamma),
            Self::InfsaResolvent(m) => Some(m.gamma),
            Self::LinearInfsa(m) => Some(m.gamma),
        }
    }

    /// Rows of `out` per head: `seq_q`, or 1 where the mechanism returns its pooled value once.
    pub const fn out_seq(&self, shape: &Shape) -> usize {
        match self {
            Self::LinearInfsa(m) if !m.broadcast => 1,
            _ => shape.seq_q,
        }
    }

    /// Whether the mechanism is valid, and defined for these sizes and for causality (OR-ed with its own).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a field, [`Error::Unsupported`] for the combination.
    pub fn check(&self, shape: &Shape, causal: bool) -> Result<()> {
        self.validate()?;
        check_support(self, shape, causal || self.causal())
    }

    /// Checks decays that replace the configured one, as [`crate::Extras::gamma`] does.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn check_gamma(&self, gamma: &[f32]) -> Result<()> {
        let one_allowed = !matches!(self, Self::InfsaResolvent(_));
        gamma.iter().try_for_each(|&x| check_gamma(x.into(), one_allowed))
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first field outside its range.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Softmax(m) => check_scale(m.scale),
            Self::Uniform(_) => Ok(()),
            Self::Infsa(m) => check_affinity(m.gamma, true, m.scale, m.eps),
            Self::InfsaResolvent(m) => {
                check_affinity(m.gamma, false, m.scale, m.eps)?;
                check("tol", m.tol, m.tol > 0.0 && m.tol < 1.0, "in (0, 1)")?;
                let limit = m.max_iter.unwrap_or(1);
                check("max_iter", limit, limit >= 1, "null or at least 1")
            }
            Self::LinearInfsa(m) => {
                check_affinity(m.gamma, true, m.scale, m.eps)?;
                check("iterations", m.iterations, (1..=64).contains(&m.iterations), "1 to 64")?;
                let bias = if let NormBias::Value(x) = m.norm_bias { x } else { 0.0 };
                check("norm_bias", bias, bias.is_finite() && bias >= 0.0, "finite and >= 0, or \"auto\"")
            }
        }
    }
}

/// Deserialises one preset's fields; the error carries the path of the field.
fn fields_of<T: serde::de::DeserializeOwned>(fields: serde_json::Map<String, serde_json::Value>) -> Result<T> {
    serde_path_to_error::deserialize(serde_json::Value::Object(fields)).map_err(|e| {
        let (mut field, problem) = (e.path().to_string(), e.inner().to_string());
        // An unknown field is reported at its parent: take its name from the message, which quotes it.
        if let Some(name) = problem.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next()) {
            if !field.ends_with(name) {
                field = if field == "." { name.into() } else { format!("{field}.{name}") };
            }
        }
        Error::Config { field, problem }
    })
}

fn check(field: &'static str, got: impl std::fmt::Display, ok: bool, expected: &'static str) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::OutOfRange { field, got: got.to_string(), expected }) }
}

fn check_scale(scale: Option<f64>) -> Result<()> {
    let x = scale.unwrap_or(1.0);
    check("scale", x, x.is_finite() && x > 0.0, "null or finite and > 0")
}

/// `gamma` within (0, 1], or (0, 1) where the series of hops has to converge.
fn check_gamma(gamma: f64, one_allowed: bool) -> Result<()> {
    let expected = if one_allowed { "in (0, 1]" } else { "in (0, 1)" };
    check("gamma", gamma, gamma > 0.0 && (gamma < 1.0 || one_allowed && gamma == 1.0), expected)
}

fn check_affinity(gamma: f64, one_allowed: bool, scale: Option<f64>, eps: f64) -> Result<()> {
    check_gamma(gamma, one_allowed)?;
    check_scale(scale)?;
    check("eps", eps, eps.is_finite() && eps >= 0.0, "finite and >= 0")
}

/// Whether `mechanism` is defined for these sizes and for causality.
pub(crate) fn check_support(mechanism: &Mechanism, shape: &Shape, causal: bool) -> Result<()> {
    let Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim } = *shape;
    let axes = [batch, heads, seq_q, seq_kv, head_dim, value_dim];
    let unsupported = |what, why| Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
    if axes.contains(&0) {
        return unsupported("an empty axis", "batch, heads, sequence lengths and channels must all be at least 1");
    }
    let cross = seq_q != seq_kv;
    if cross && mechanism.tied() {
        return unsupported(
            "tied = true with seq_q != seq_kv",
            "tied keys are the queries; pass k and set tied to false",
        );
    }
    match mechanism {
        Mechanism::Infsa(_) if causal && cross => {
            unsupported("causal with seq_q != seq_kv", "the prefix norm needs every earlier row; decode with a `Cache`")
        }
        Mechanism::InfsaResolvent(_) if causal => unsupported(
            "causal",
            "the Frobenius norm and the series are global; use `infsa` with causal, which has a prefix norm",
        ),
        Mechanism::InfsaResolvent(_) if cross => {
            unsupported("cross-attention", "the series repeats a square operator; use `infsa`, which takes one hop")
        }
        Mechanism::LinearInfsa(_) if causal => unsupported(
            "causal",
            "every position would need the pooled query and all scores anew; use `infsa` with causal",
        ),
        Mechanism::LinearInfsa(m) if cross && m.iterations > 1 => unsupported(
            "cross-attention with iterations > 1",
            "a further power step needs queries and keys over one token set; set iterations to 1",
        ),
        _ => Ok(()),
    }
}
