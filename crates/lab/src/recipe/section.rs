//! Sections of a recipe whose fields are those of a configuration of the library's and some of the recipe's own, side by side.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
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
        Err(format!("`model.{unknown}`: unknown field `{unknown}`, expected one of `{}`", self.known.join("`, `")))
    }
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
