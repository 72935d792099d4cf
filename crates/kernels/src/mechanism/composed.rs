//! A mechanism as its four values, which anyone composes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    Bias, Landmarks, Normalisation, OneHop, Projected, Score, Series, Structure,
    named::{NAMED, named},
    parse::config,
    presets::is_false,
    structure::FeatureMap,
};
use crate::{Parameter, Result, Shape};

/// Four values, and how they are called. A part that is not given is `dot-exp`, `dense`, `row`, `one-hop`.
///
/// ```
/// use resolvent_kernels::mechanism::*;
/// let levy = Score::Levy(PowerLaw::default().with_alpha(1.5));
/// let m = Composed::new(levy).structure(Ssa::default().with_clusters(Some(16))).series(Resolvent::default());
/// assert_eq!(m.to_string(), "levy x clustered x row x resolvent");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Composed {
    /// How two tokens relate.
    pub score: Score,
    /// How the operator is held.
    pub structure: Structure,
    /// What makes weights of affinities.
    pub normalisation: Normalisation,
    /// How many hops.
    pub series: Series,
    /// What is added to the logits of pairs for where their tokens are. Default null, for nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias: Option<Bias>,
    /// The keys are the queries. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Query `i` sees keys `j <= i + seq_kv - seq_q`. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub causal: bool,
    /// The preset that the values were taken from; none of one's own.
    #[serde(skip)]
    pub(super) name: Option<&'static str>,
}

impl Composed {
    /// The names of the four values.
    pub const PARTS: [&'static str; 4] = ["score", "structure", "normalisation", "series"];
    /// What a configuration replaces of any preset: the four values, and the bias.
    pub(super) const REPLACED: [&'static str; 5] = ["score", "structure", "normalisation", "series", "bias"];

    /// `score`, densely, rows normalised, one hop.
    pub fn new(score: impl Into<Score>) -> Self {
        Self { score: score.into(), ..Self::default() }
    }

    /// The same with another structure.
    #[must_use]
    pub fn structure(self, structure: impl Into<Structure>) -> Self {
        Self { structure: structure.into(), ..self }
    }

    /// The same with another normalisation.
    #[must_use]
    pub fn normalisation(self, normalisation: impl Into<Normalisation>) -> Self {
        Self { normalisation: normalisation.into(), ..self }
    }

    /// The same with another series.
    #[must_use]
    pub fn series(self, series: impl Into<Series>) -> Self {
        Self { series: series.into(), ..self }
    }

    /// The same with a bias on the logits of pairs.
    #[must_use]
    pub fn bias(self, bias: impl Into<Bias>) -> Self {
        Self { bias: Some(bias.into()), ..self }
    }

    /// The same with keys that are the queries.
    #[must_use]
    pub fn tied(self, tied: bool) -> Self {
        Self { tied, ..self }
    }

    /// The same with queries that see no later key.
    #[must_use]
    pub fn causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The id, as in the JSON configuration: of the preset, or `composed`.
    pub const fn id(&self) -> &'static str {
        match self.name {
            Some(name) => name,
            None => "composed",
        }
    }

    /// The title of the paper that the values are of, where they are a preset's.
    pub fn paper(&self) -> Option<&'static str> {
        NAMED.into_iter().find(|preset| Some(preset.id) == self.name).map(|preset| preset.paper)
    }

    /// Whether the preset that it was made of has a window and this has none, which must then be written.
    pub(super) fn has_lost_its_window(&self) -> bool {
        let window = |m: &Self| match &m.structure {
            Structure::Dense(m) => m.window,
            _ => None,
        };
        let windowless = matches!(&self.structure, Structure::Dense(m) if m.window.is_none());
        windowless && self.name.and_then(named).is_some_and(|preset| window(&preset).is_some())
    }

    /// Whether each row depends on its own query alone, and on the keys that this sees.
    pub fn is_row_local(&self) -> bool {
        let alone = match &self.normalisation {
            Normalisation::Row(m) => m.density_exponent == 0.0,
            Normalisation::None(_) => true,
            _ => false,
        };
        let pairs = match &self.structure {
            Structure::Dense(_) | Structure::Features(_) => true,
            Structure::Clustered(structure) => structure.routes_queries(),
            _ => false,
        };
        // A bias of distances is the same for a query whatever queries there are beside it.
        let bias = matches!(self.bias, None | Some(Bias::Alibi(_) | Bias::Buckets(_)));
        alone && pairs && bias && matches!(self.series, Series::OneHop(_))
    }

    /// Whether rows have a log-sum-exp: one hop over pairs, divided by the sums of rows of positive affinities.
    pub fn has_row_sums(&self) -> bool {
        let pairs = matches!(self.structure, Structure::Dense(_) | Structure::Clustered(_));
        let rows = matches!(self.normalisation, Normalisation::Row(_)) && self.score.is_log();
        pairs && rows && matches!(self.series, Series::OneHop(_))
    }

    /// Whether it is one hop that nothing weighs, so that there is no decay to speak of.
    pub(super) const fn is_undamped(&self) -> bool {
        matches!(self.series, Series::OneHop(OneHop { gamma: 1.0 }))
    }

    /// Reads `{"score": {..}, "structure": {..}, "normalisation": {..}, "series": {..}, "tied": false, "causal": false}`. Of a
    /// `preset`, a part that is missing, or a field of it, is the preset's; a part of another kind replaces the preset's. Beside them
    /// there may be a `bias`.
    pub(super) fn with_fields(self, mut fields: Map<String, Value>, preset: bool) -> Result<Self> {
        if preset {
            self.sort_into_parts(&mut fields)?;
        }
        let mut part = |name: &str, own: Value| match fields.remove(name) {
            None => Ok(None),
            Some(Value::Object(part)) => Ok(Some(if preset { over(own, part) } else { part })),
            Some(Value::String(kind)) => Ok(Some(Map::from_iter([("kind".to_owned(), Value::String(kind))]))),
            Some(other) => Err(config(name, format!("expected an object like {{\"kind\": \"..\"}}, found {other}"))),
        };
        let score = part("score", json!(self.score))?.map_or(Ok(self.score), Score::from_fields)?;
        let structure = part("structure", json!(self.structure))?.map_or(Ok(self.structure), Structure::from_fields)?;
        let normalisation = part("normalisation", json!(self.normalisation))?;
        let normalisation = normalisation.map_or(Ok(self.normalisation), Normalisation::from_fields)?;
        let series = part("series", json!(self.series))?.map_or(Ok(self.series), Series::from_fields)?;
        let bias = part("bias", Value::Null)?.map_or(Ok(self.bias), |fields| Bias::from_fields(fields).map(Some))?;
        let Flags { tied, causal } = super::parse::fields_of("", fields)?;
        let (tied, causal) = (tied.unwrap_or(self.tied), causal.unwrap_or(self.causal));
        Ok(Self { score, structure, normalisation, series, bias, tied, causal, name: self.name })
    }

    /// Moves fields that stand beside a preset's name, and that its score or its structure has, into that part; refuses others.
    fn sort_into_parts(&self, fields: &mut Map<String, Value>) -> Result<()> {
        let names = |own: Value| match own {
            Value::Object(own) => own.into_iter().map(|(name, _)| name).filter(|name| name != "kind").collect(),
            _ => Vec::new(),
        };
        // Fields of a dense structure are not written where they are as by default.
        let of_structure = match &self.structure {
            Structure::Dense(_) => vec!["window".to_owned(), "sinks".to_owned()],
            other => names(json!(other)),
        };
        let known = [("score", names(json!(self.score))), ("structure", of_structure)];
        let others = Self::REPLACED.into_iter().chain(["tied", "causal"]);
        let all: Vec<&str> = known.iter().flat_map(|(_, names)| names).map(String::as_str).chain(others).collect();
        if let Some(unknown) = fields.keys().find(|field| !all.contains(&field.as_str())) {
            return Err(config(unknown, format!("unknown field, expected one of {}", all.join(", "))));
        }
        for (name, own) in &known {
            let (name, is_own) = (*name, |field: &String| own.contains(field));
            let (mut of_part, rest): (Map<_, _>, Map<_, _>) =
                std::mem::take(fields).into_iter().partition(|(field, _)| is_own(field));
            *fields = rest;
            if of_part.is_empty() {
                continue;
            }
            let given = match fields.remove(name) {
                Some(Value::Object(given)) => given,
                Some(kind) => Map::from_iter([("kind".to_owned(), kind)]),
                None => Map::new(),
            };
            if let Some(field) = of_part.keys().find(|field| given.contains_key(*field)) {
                return Err(config(field, format!("given twice: by itself, and in `{name}`")));
            }
            of_part.extend(given);
            fields.insert(name.into(), of_part.into());
        }
        Ok(())
    }

    /// The learnable tensors of all four values.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut all = match self.structure {
            // A map of features knows the score's scale alone, and one of pooled weights the activation.
            Structure::Pooled(_) => Vec::new(),
            _ => self.score.parameters(),
        };
        if let Structure::Nystrom(m) = &self.structure {
            let of_landmarks = m.soft().parameters().iter().copied().filter(|&p| p != Parameter::Scale);
            all.extend(of_landmarks);
        }
        if let Structure::Projected(_) = &self.structure {
            all.extend([Parameter::KeyMap, Parameter::ValueMap]);
        }
        all.extend(self.bias.map(|_| Parameter::Bias));
        all.push(Parameter::Gamma);
        all
    }

    /// The axes of a parameter, and 1s beyond the last; how many there are.
    pub(super) fn parameter_axes(&self, parameter: Parameter, shape: &Shape) -> ([usize; 4], usize) {
        match &self.structure {
            _ if parameter == Parameter::Bias => self.bias.map_or(([0; 4], 1), |bias| bias.axes(shape)),
            Structure::Nystrom(m) if !self.score.parameters().contains(&parameter) => {
                m.soft().parameter_axes(parameter, shape)
            }
            Structure::Projected(m) if parameter.is_map() => m.axes(shape),
            _ => ([shape.heads, 1, 1, 1], 1),
        }
    }

    /// The values that stand for a parameter where a call does not give it.
    pub(super) fn parameter_default(&self, parameter: Parameter, shape: &Shape) -> Vec<f32> {
        let value = match (parameter, &self.structure) {
            (Parameter::Gamma, _) => self.series.gamma(),
            (Parameter::Bias, _) => {
                let zeros = || vec![0.0; self.parameter_axes(parameter, shape).0.iter().product()];
                return self.bias.and_then(|bias| bias.default_values(shape)).unwrap_or_else(zeros);
            }
            (_, Structure::Nystrom(m)) if !self.score.parameters().contains(&parameter) => {
                return m.soft().parameter_default(parameter, shape);
            }
            (_, Structure::Projected(m)) if parameter.is_map() => {
                return m.map(parameter, shape.heads, m.columns(shape.seq_kv));
            }
            _ => self.score.value(parameter, shape.head_dim, shape.heads),
        };
        vec![value as f32; shape.heads]
    }

    /// The scale of the products by which a planner ranks clusters and draws edges: the score's where it has one, else the default.
    pub(crate) const fn planned_scale(&self) -> Option<f64> {
        match &self.score {
            Score::DotExp(m) => m.scale,
            Score::DotSigmoid(m) => m.scale,
            Score::DotRelu(m) | Score::DotAbs(m) | Score::DotGelu(m) | Score::DotSquaredRelu(m) => m.scale,
            _ => None,
        }
    }

    /// What is allowed and likely a mistake, with the remedy.
    pub(super) fn caution(&self) -> Option<&'static str> {
        match &self.structure {
            Structure::Nystrom(m) => m.soft().caution(),
            _ => None,
        }
    }

    /// Whether it ends an iteration early where that has converged.
    pub(super) fn iterates(&self) -> bool {
        let steps =
            matches!(&self.structure, Structure::Nystrom(m) if m.landmarks != Landmarks::All && m.inverse.iterates());
        steps || matches!(self.series, Series::Resolvent(_))
    }

    /// The projected structure, and the same values over the projected keys and values, where there are such.
    pub(crate) fn over_projections(&self) -> Option<(&Projected, Self)> {
        let Structure::Projected(projected) = &self.structure else { return None };
        Some((projected, Self { structure: Structure::default(), tied: false, name: None, ..self.clone() }))
    }

    /// The map of features, where the structure is one.
    pub fn feature_map(&self) -> Option<FeatureMap> {
        if let Structure::Features(m) = &self.structure { Some(m.map) } else { None }
    }
}

/// The fields of a preset's `own` part with those that are given in their place, if they are of its kind.
fn over(own: Value, given: Map<String, Value>) -> Map<String, Value> {
    match own {
        Value::Object(mut own) if given.get("kind").is_none_or(|kind| own.get("kind") == Some(kind)) => {
            own.extend(given);
            own
        }
        _ => given,
    }
}

/// What a configuration says beside the values.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Flags {
    tied: Option<bool>,
    causal: Option<bool>,
}

impl std::fmt::Display for Composed {
    /// The kinds of the four values, and of the bias.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let score = if let Score::Custom(custom) = &self.score { custom.name() } else { self.score.kind() };
        let structure = self.structure.kind();
        write!(f, "{score} x {structure} x {} x {}", self.normalisation.kind(), self.series.kind())?;
        self.bias.map_or(Ok(()), |bias| write!(f, " + {}", bias.kind()))
    }
}

/// Values from their fields.
macro_rules! values {
    ($($value:ident: $($fields:ident($type:ty)),+;)+) => {
        $($(impl From<$type> for $value {
            fn from(fields: $type) -> Self {
                Self::$fields(fields)
            }
        })+)+
    };
}

values! {
    Score: DotExp(super::DotExp), CosineExp(super::CosineExp), DotSigmoid(super::DotSigmoid), Gaussian(super::Gaussian),
        Laplacian(super::Bandwidth), Constant(super::Constant);
    Structure: Dense(super::Dense), Clustered(super::Clustered), Nystrom(super::Nystrom), Features(super::Features),
        Projected(super::Projected), Pooled(super::Pooled);
    Normalisation: Row(super::Row), Frobenius(super::Frobenius), Symmetric(super::Symmetric), Whitened(super::Whitened),
        Factors(super::Factors), None(super::Unnormalised);
    Bias: Tensor(super::BiasTensor), Alibi(super::Alibi), Buckets(super::Buckets), Grid(super::BiasGrid);
    Series: OneHop(super::OneHop), Hops(super::Hops), Resolvent(super::Resolvent), Limit(super::Limit);
}

impl From<Composed> for super::Mechanism {
    /// Checked where it is bound to sizes.
    fn from(composed: Composed) -> Self {
        Self::Composed(Box::new(composed))
    }
}

impl From<super::Ssa> for Structure {
    fn from(m: super::Ssa) -> Self {
        Self::Clustered(m.into())
    }
}
