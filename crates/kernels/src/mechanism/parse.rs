//! Reading a mechanism from JSON, or through serde from a recipe.

use serde::{Deserialize, Serialize};

use serde_json::{Map, Value};

use super::{
    Bias, DotExp, Form, Mechanism, NormBias, Normalisation, Score, Series, Soft, Structure, named, presets::is_false,
};
use crate::{Error, Result};

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
                f.write_str("0, a number in [1e-12, 1e3] or \"auto\"")
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

/// A configuration as it is written.
#[derive(Serialize)]
struct Tagged<'a, T> {
    mechanism: &'static str,
    #[serde(flatten)]
    fields: &'a T,
}

/// The fields of a composition as they are written.
#[derive(Serialize)]
struct Values<'a> {
    score: &'a Score,
    structure: &'a Structure,
    normalisation: &'a Normalisation,
    series: &'a Series,
    #[serde(skip_serializing_if = "Option::is_none")]
    bias: &'a Option<Bias>,
    #[serde(skip_serializing_if = "is_false")]
    tied: bool,
    #[serde(skip_serializing_if = "is_false")]
    causal: bool,
}

impl Serialize for Mechanism {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        macro_rules! tagged {
            ($($variant:ident),+) => {
                match self.own() {
                    $(Some(Form::$variant(m)) => return Tagged { mechanism: self.id(), fields: &m }.serialize(s),)+
                    _ => {}
                }
            };
        }
        tagged!(
            Softmax,
            Uniform,
            Infsa,
            InfsaResolvent,
            LinearInfsa,
            Soft,
            SoftPp,
            Laplacian,
            LaplacianExact,
            Ssa,
            Fna
        );
        let composed = self.clone().composed();
        let Self { score, structure, normalisation, series, bias, tied, causal, .. } = &composed;
        let values = Values { score, structure, normalisation, series, bias, tied: *tied, causal: *causal };
        if self.has_lost_its_window() {
            let mut fields = serde_json::to_value(values).map_err(serde::ser::Error::custom)?;
            fields["structure"]["window"] = serde_json::Value::Null;
            return Tagged { mechanism: self.id(), fields: &fields }.serialize(s);
        }
        Tagged { mechanism: self.id(), fields: &values }.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Mechanism {
    /// From any self-describing format (TOML recipes); the error names the field, as [`Mechanism::from_json`] does.
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        Self::from_value(serde_json::Value::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// Whether no object of the JSON `text` names a field twice: a parser keeps the last of two and drops the other in
/// silence.
///
/// # Errors
/// The field and its place, in words.
pub fn check_distinct(text: &str) -> std::result::Result<(), String> {
    serde_json::from_str::<Distinct>(text).map(drop).map_err(|e| e.to_string())
}

/// Any JSON whose objects name no field twice.
struct Distinct;

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        d.deserialize_any(DistinctVisitor)
    }
}

struct DistinctVisitor;

macro_rules! scalars {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, _: $type) -> std::result::Result<Distinct, E> {
            Ok(Distinct)
        })*
    };
}

impl<'de> serde::de::Visitor<'de> for DistinctVisitor {
    type Value = Distinct;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any value")
    }

    scalars!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> std::result::Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Distinct, A::Error> {
        while seq.next_element::<Distinct>()?.is_some() {}
        Ok(Distinct)
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> std::result::Result<Distinct, A::Error> {
        let mut names = std::collections::BTreeSet::new();
        while let Some((name, Distinct)) = map.next_entry::<String, Distinct>()? {
            if let Some(name) = names.replace(name) {
                return Err(serde::de::Error::custom(format!("field `{name}` is given twice")));
            }
        }
        Ok(Distinct)
    }
}

impl Mechanism {
    /// Reads and validates `{"mechanism": "<id>", ...fields}`.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::OutOfRange`], naming the field.
    pub fn from_json(text: &str) -> Result<Self> {
        let config = |problem| Error::Config { field: ".".into(), problem };
        let value = serde_json::from_str(text).map_err(|e| config(format!("not valid JSON: {e}")))?;
        check_distinct(text).map_err(config)?;
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
            None => {
                let problem = format!("missing; one of: {}, or {} of parts", Self::IDS.join(", "), Self::COMPOSED);
                return Err(config("mechanism", problem));
            }
        };
        let values = if id == Self::COMPOSED { Some(Self::new(DotExp::default())) } else { named::named(&id) };
        if let Some(values) = values {
            let composed = values.with_fields(fields, id != Self::COMPOSED)?;
            composed.validate()?;
            return Ok(composed);
        }
        if Self::REPLACED.iter().any(|part| fields.contains_key(*part)) {
            return Self::with_parts(id, fields);
        }
        let form = match Self::preset(&id)?.form() {
            Form::Softmax(_) => Form::Softmax(fields_of("", fields)?),
            Form::Uniform(_) => Form::Uniform(fields_of("", fields)?),
            Form::Infsa(_) => Form::Infsa(fields_of("", fields)?),
            Form::InfsaResolvent(_) => Form::InfsaResolvent(fields_of("", fields)?),
            Form::LinearInfsa(_) => Form::LinearInfsa(fields_of("", fields)?),
            Form::Ssa(_) => Form::Ssa(fields_of("", fields)?),
            Form::Fna(_) => Form::Fna(fields_of("", fields)?),
            Form::Soft(_) => Form::Soft(fields_of("", fields)?),
            Form::SoftPp(_) => Form::SoftPp(fields_of::<Soft>("", fields)?.with_default_degree()),
            Form::Laplacian(_) => Form::Laplacian(fields_of("", fields)?),
            Form::LaplacianExact(_) => Form::LaplacianExact(fields_of("", fields)?),
            composed @ Form::Composed(_) => composed,
        };
        form.validate()?;
        Ok(form.into())
    }
}

impl Mechanism {
    /// The preset `id` with its own fields, and some of its four values replaced, or fields of these, or with a bias.
    fn with_parts(id: String, fields: Map<String, Value>) -> Result<Self> {
        let is_part = |name: &String| Self::REPLACED.contains(&name.as_str());
        let (parts, mut own): (Map<_, _>, Map<_, _>) = fields.into_iter().partition(|(name, _)| is_part(name));
        own.insert("mechanism".into(), id.into());
        let read = |own: Map<String, Value>| {
            let preset = Self::from_value(own.into())?.composed();
            Ok((preset.clone(), preset.with_fields(parts.clone(), true)?))
        };
        let (preset, composed): (Self, Self) = read(own.clone())?;
        for (name, value) in own.iter().filter(|(name, _)| *name != "mechanism") {
            // With another value, or without, the preset is another, and what the parts make of it the same.
            let says_nothing = |other: Option<Value>| {
                let mut own = own.clone();
                match other {
                    Some(value) => own.insert(name.clone(), value),
                    None => own.remove(name),
                };
                read(own).is_ok_and(|(other, replaced)| other != preset && replaced == composed)
            };
            if says_nothing(altered(value)) || says_nothing(None) {
                return Err(config(name, "says nothing beside a part that replaces it; leave it out"));
            }
        }
        composed.validate()?;
        Ok(composed)
    }
}

/// Another value of the same kind, where it is one of many.
fn altered(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(x) => Some(Value::Bool(!x)),
        Value::Number(x) => match x.as_u64() {
            Some(x) => Some((x + 1).into()),
            None => x.as_f64().map(|x| (0.9 * x).into()),
        },
        _ => None,
    }
}

/// Deserialises the fields of a preset, or of a `part` of a composition; the error carries the path of the field.
pub(super) fn fields_of<T: serde::de::DeserializeOwned>(part: &str, fields: Map<String, Value>) -> Result<T> {
    // Serde looks for unknown fields only where a kind has fields.
    if let Some(Value::Object(landmarks)) = fields.get("landmarks")
        && landmarks.get("kind").is_some_and(|kind| kind == "all")
        && let Some(name) = landmarks.keys().find(|name| *name != "kind")
    {
        return Err(config(format!("landmarks.{name}"), "unknown field; landmarks of kind all have none"));
    }
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|e| {
        let path = e.path().to_string();
        let field = match (part, &*path) {
            ("", _) => path,
            (_, ".") => part.to_owned(),
            _ => format!("{part}.{path}"),
        };
        config(field, e.inner().to_string())
    })
}

pub(super) fn config(field: impl Into<String>, problem: impl Into<String>) -> Error {
    Error::Config { field: field.into(), problem: problem.into() }
}

/// Takes the kind of a `part` out of its fields.
pub(super) fn kind_of(part: &str, fields: &mut Map<String, Value>) -> Result<String> {
    match fields.remove("kind") {
        Some(Value::String(kind)) => Ok(kind),
        Some(other) => Err(config(format!("{part}.kind"), format!("expected a string, found {other}"))),
        None => Err(config(format!("{part}.kind"), "missing")),
    }
}

pub(super) fn unknown_kind(part: &str, kind: &str, known: &[&str]) -> Error {
    config(format!("{part}.kind"), format!("unknown kind `{kind}`, expected one of: {}", known.join(", ")))
}
