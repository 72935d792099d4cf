//! Reading the four values from a configuration, field by field over those of a preset.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Bias, Mechanism, Normalisation, Score, Series, Structure, named::named, parse::config};
use crate::Result;

impl Mechanism {
    /// The names of the four values.
    pub const PARTS: [&'static str; 4] = ["score", "structure", "normalisation", "series"];
    /// What a configuration replaces of any preset: the four values, and the bias.
    pub(super) const REPLACED: [&'static str; 5] = ["score", "structure", "normalisation", "series", "bias"];

    /// Whether the preset that it was made of has a window and this has none, which must then be written.
    pub(super) fn has_lost_its_window(&self) -> bool {
        let window = |m: &Self| match &m.structure {
            Structure::Dense(m) => m.window,
            _ => None,
        };
        let windowless = matches!(&self.structure, Structure::Dense(m) if m.window.is_none());
        windowless && self.name.and_then(named).is_some_and(|preset| window(&preset).is_some())
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

impl From<super::Ssa> for Structure {
    fn from(m: super::Ssa) -> Self {
        Self::Clustered(m.into())
    }
}
