//! Mechanisms in recipes: by id or as tables, in a format that has no null.

use resolvent_kernels::Mechanism;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::Error as _};
use serde_json::Value;

/// Fields that have a default and may be null, which is something else: [`NULL`] in a recipe. None of their values has that name.
const NULLABLE: [&str; 3] = ["balance", "newton_init", "window"];

/// How a recipe spells null.
const NULL: &str = "none";

/// An id or a table.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Mechanism, D::Error> {
    read(Value::deserialize(d)?).map_err(D::Error::custom)
}

/// The table of `mechanism`.
pub(super) fn serialize<S: Serializer>(mechanism: &Mechanism, s: S) -> Result<S::Ok, S::Error> {
    let mut value = serde_json::to_value(mechanism).map_err(S::Error::custom)?;
    if spell(&mut value) { value.serialize(s) } else { mechanism.serialize(s) }
}

/// An id or a table.
pub(super) fn read(mut value: Value) -> resolvent_kernels::Result<Mechanism> {
    understand(&mut value);
    match value {
        Value::String(id) => Mechanism::preset(&id),
        table => Mechanism::from_value(table),
    }
}

/// Writes [`NULL`] where a field is null and would be something if it were left out; leaves out the other nulls. Whether there was such a
/// field.
pub(super) fn spell(value: &mut Value) -> bool {
    let fields = match value {
        Value::Object(fields) => fields,
        Value::Array(items) => return items.iter_mut().fold(false, |spelt, item| spell(item) | spelt),
        _ => return false,
    };
    let mut spelt = false;
    for (name, field) in fields.iter_mut() {
        if field.is_null() && NULLABLE.contains(&name.as_str()) {
            (*field, spelt) = (NULL.into(), true);
        }
        spelt |= spell(field);
    }
    fields.retain(|_, field| !field.is_null());
    spelt
}

/// Puts null where [`spell`] wrote it.
pub(super) fn understand(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(text) if text == NULL && NULLABLE.contains(&name.as_str()) => *field = Value::Null,
                    field => understand(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(understand),
        _ => {}
    }
}

/// As above, of a mechanism that may be absent.
pub(super) mod optional {
    use super::*;

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Box<Mechanism>>, D::Error> {
        let given = Option::<Value>::deserialize(d)?;
        given.map(|value| read(value).map(Box::new).map_err(D::Error::custom)).transpose()
    }

    pub fn serialize<S: Serializer>(mechanism: &Option<Box<Mechanism>>, s: S) -> Result<S::Ok, S::Error> {
        match mechanism {
            Some(mechanism) => super::serialize(mechanism, s),
            None => s.serialize_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    /// Every valid configuration that has a null in place of one of a preset's values.
    fn with_a_null() -> Vec<Mechanism> {
        fn paths(value: &Value, path: String, found: &mut Vec<String>) {
            for (name, field) in value.as_object().into_iter().flatten() {
                let path = format!("{path}/{name}");
                paths(field, path.clone(), found);
                found.push(path);
            }
        }
        let mut all = Vec::new();
        for id in Mechanism::IDS {
            let preset = serde_json::to_value(Mechanism::preset(id).unwrap()).unwrap();
            let mut places = Vec::new();
            paths(&preset, String::new(), &mut places);
            for place in places {
                let mut value = preset.clone();
                *value.pointer_mut(&place).unwrap() = Value::Null;
                all.extend(Mechanism::from_value(value).ok());
            }
        }
        all
    }

    /// TOML has no null: a field that is null survives, or it is one that is null where nothing is said of it.
    #[test]
    fn nulls_survive_toml() {
        let composed = [
            r#""gaussian"}, "structure": {"kind": "nystrom", "newton_init": null}, "normalisation": {"kind": "none"}"#,
            r#""gaussian"}, "structure": {"kind": "nystrom"}, "normalisation": {"kind": "symmetric", "degree": null}"#,
            r#""dot-exp"}, "structure": {"kind": "clustered", "balance": null}"#,
        ];
        let composed = composed.map(|values| {
            Mechanism::from_json(&format!(r#"{{"mechanism": "composed", "score": {{"kind": {values}}}"#)).unwrap()
        });
        let spelt = composed.each_ref().map(|mechanism| spell(&mut serde_json::to_value(mechanism).unwrap()));
        assert_eq!(spelt, [true, false, true]);
        for mechanism in with_a_null().into_iter().chain(composed) {
            let recipe = Recipe { mechanism, ..Recipe::default() };
            let written = recipe.to_toml().unwrap();
            assert_eq!(Recipe::from_toml(&written, "again").unwrap(), recipe, "{written}");
        }
    }

    #[test]
    fn none_is_null_in_every_place_of_a_mechanism() {
        let unbalanced = Mechanism::from_json(r#"{"mechanism": "ssa", "balance": null}"#).unwrap();
        let read = |text: &str| Recipe::from_toml(text, "r").unwrap();
        assert_eq!(read("mechanism = { mechanism = 'ssa', balance = 'none' }").mechanism, unbalanced);
        let set = read("mechanism = 'ssa'").with(&["mechanism.balance=none".parse().unwrap()]).unwrap();
        assert_eq!(set.mechanism, unbalanced);
        for model in [
            "kind = 'text'\ndecoder = { mechanism = 'ssa', balance = 'none' }",
            "kind = 'language'\nlayers = ['own', { mechanism = 'ssa', balance = 'none' }]",
        ] {
            let recipe = read(&format!("[model]\n{model}"));
            assert!(recipe.mechanisms().any(|mechanism| mechanism == unbalanced));
            assert_eq!(read(&recipe.to_toml().unwrap()), recipe);
        }
        let json = serde_json::to_string(&set).unwrap();
        assert_eq!(serde_json::from_str::<Recipe>(&json).unwrap(), set);
        let error = Recipe::from_toml("mechanism = { mechanism = 'ssa', clusters = 'none' }", "r").unwrap_err();
        assert!(error.to_string().contains("clusters"), "{error}");
    }
}
