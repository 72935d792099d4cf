//! Sections of a recipe: fields of a configuration of the library's and of the recipe's own side by side, and kinds with fields of their own.

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned, de::Error as _};
use serde_json::{Map, Value};

use super::mechanism::{spell, understand};

/// The fields of a section as they are given; its parts take theirs.
pub(super) struct Given {
    fields: Map<String, Value>,
    known: Vec<String>,
}

impl Given {
    pub fn new(mut fields: Map<String, Value>) -> Self {
        fields.values_mut().for_each(understand);
        Self { fields, known: Vec::new() }
    }

    /// `base` with those of its fields that are given, but for the fields `elsewhere`, which no recipe gives.
    ///
    /// # Errors
    /// In words, for a value that does not fit its field.
    pub fn over<T: Serialize + DeserializeOwned>(&mut self, base: &T, elsewhere: &[&str]) -> Result<T, String> {
        let mut all = fields(base).map_err(|e| e.to_string())?;
        for (name, value) in all.iter_mut().filter(|(name, _)| !elsewhere.contains(&name.as_str())) {
            if let Some(given) = self.fields.remove(name) {
                *value = given;
            }
            self.known.push(name.clone());
        }
        serde_path_to_error::deserialize(Value::Object(all)).map_err(|e| format!("`model.{}`: {}", e.path(), e.inner()))
    }

    /// That no field is left which none of the parts knows.
    ///
    /// # Errors
    /// In words, as serde's: with the fields that there are.
    pub fn finish(self) -> Result<(), String> {
        let Some(unknown) = self.fields.keys().next() else { return Ok(()) };
        let known = listed(self.known.iter().map(String::as_str));
        Err(format!("`model.{unknown}`: unknown field `{unknown}`, expected one of {known}"))
    }
}

/// A section whose kinds have fields of their own: the one of `kinds`, of which the first is the default, that `kind` names, with the fields
/// that are given. `optional` are fields that a value may lack.
///
/// # Errors
/// Naming the field, and for one that only other kinds have these.
pub(super) fn by_kind<'de, T: Serialize + DeserializeOwned, D: Deserializer<'de>>(
    d: D,
    section: &str,
    kinds: &[T],
    optional: &[&str],
) -> Result<T, D::Error> {
    let given = Map::deserialize(d)?;
    let kinds = kinds.iter().map(fields).collect::<Result<Vec<_>, _>>().map_err(D::Error::custom)?;
    let named = given.get("kind").unwrap_or(&kinds[0]["kind"]);
    let own = kinds.iter().find(|kind| kind["kind"] == *named);
    let own = own.ok_or_else(|| D::Error::custom(format!("`{section}.kind`: {}", no_kind(named, &kinds))))?;
    let mut whole = own.clone();
    for (name, value) in given {
        if !own.contains_key(&name) && !optional.contains(&&*name) {
            return Err(D::Error::custom(stranger(section, &name, own, &kinds)));
        }
        // What a number becomes on its way that is infinite or none: a document has no null.
        if value.is_null() {
            return Err(D::Error::custom(format!("`{section}.{name}` must be a finite number")));
        }
        // Alone, so that an error is known to be its.
        let mut alone = own.clone();
        alone.insert(name.clone(), value.clone());
        T::deserialize(Value::Object(alone)).map_err(|e| D::Error::custom(format!("`{section}.{name}`: {e}")))?;
        whole.insert(name, value);
    }
    T::deserialize(Value::Object(whole)).map_err(D::Error::custom)
}

fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn kind_of(kind: &Map<String, Value>) -> &str {
    kind["kind"].as_str().unwrap_or_default()
}

/// What is said of a kind that there is not, as serde says it.
fn no_kind(named: &Value, kinds: &[Map<String, Value>]) -> String {
    let named = named.as_str().map_or_else(|| named.to_string(), str::to_owned);
    format!("unknown variant `{named}`, expected one of {}", listed(kinds.iter().map(kind_of)))
}

/// What is said of a field that the kind `own` has not, while others may have it.
fn stranger(section: &str, field: &str, own: &Map<String, Value>, kinds: &[Map<String, Value>]) -> String {
    let others = kinds.iter().filter(|kind| kind.contains_key(field)).map(kind_of);
    let others = listed(others);
    if others.is_empty() {
        let known = listed(own.keys().map(String::as_str));
        return format!("`{section}.{field}`: unknown field `{field}`, expected one of {known}");
    }
    let alone = own.keys().filter(|name| !kinds.iter().all(|kind| kind.contains_key(*name)));
    let alone = alone.map(String::as_str).collect::<Vec<_>>().join(", ");
    let alone = if alone.is_empty() { "none" } else { &alone };
    let kind = kind_of(own);
    format!("`{field}` is no field of the kind `{kind}`, whose own fields are: {alone}; it is one of {others}")
}

/// The fields of `part`, but for those `elsewhere`; of TOML, which has no null.
pub(super) fn written<T: Serialize>(part: &T, elsewhere: &[&str]) -> serde_json::Result<Map<String, Value>> {
    let mut fields =
        Value::Object(fields(part)?.into_iter().filter(|(name, _)| !elsewhere.contains(&&**name)).collect());
    spell(&mut fields);
    Map::deserialize(fields)
}

fn fields<T: Serialize>(part: &T) -> serde_json::Result<Map<String, Value>> {
    Map::deserialize(serde_json::to_value(part)?)
}
