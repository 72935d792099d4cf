//! Single fields of a recipe that are set.

use std::str::FromStr;

use toml::{Table, Value};

use super::document::invalid;
use crate::{Error, Result};

/// Fields that may be `none`, as where nothing is said of them.
const OPTIONAL: [&str; 19] = [
    "data",
    "fit",
    "model.tied",
    "model.kv_heads",
    "model.codebook",
    "model.stages",
    "model.landmark_count",
    "model.decoder",
    "model.cross",
    "schedule.max_steps",
    "schedule.max_minutes",
    "augment.resized_crop",
    "augment.colour_jitter",
    "augment.rand_augment",
    "augment.erasing",
    "augment.mix",
    "augment.fill",
    "regularisation.patience",
    "text.tokenizer",
];

/// What errors call the settings of [`Recipe::with`].
pub(super) const SETTINGS: &str = "--set";

/// One field, by its dotted name, and the value that it is to have: `optimiser.lr=3e-4`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub(super) key: String,
    pub(super) value: String,
}

impl FromStr for Setting {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let (key, value) = (key.trim(), value.trim());
        if value.is_empty() || key.split('.').any(str::is_empty) {
            return Err(invalid(SETTINGS, key, "needs a field and a value, as in optimiser.lr=3e-4".into()));
        }
        Ok(Self { key: key.into(), value: value.into() })
    }
}

impl Setting {
    /// The dotted name of the field.
    pub fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn is_none(&self) -> bool {
        self.value == "none" && OPTIONAL.contains(&self.key.as_str())
    }

    /// The value as TOML, where it is some, else as the text that it is.
    pub(super) fn parsed(&self) -> Value {
        let text = || Value::String(self.value.clone());
        let Ok(mut table) = format!("value = {}", self.value).parse::<Table>() else { return text() };
        let value = table.remove("value");
        value.filter(|_| table.is_empty()).unwrap_or_else(text)
    }
}

/// Settings as they are laid over a recipe: a mechanism's id beside fields of the mechanism is one of these.
pub(super) fn spelt_out(settings: &[Setting]) -> Vec<Setting> {
    let has_fields = settings.iter().any(|setting| setting.key.starts_with("mechanism."));
    let spelt = |setting: &Setting| match setting.key.as_str() {
        "mechanism" if has_fields && !setting.value.starts_with('{') => {
            Setting { key: "mechanism.mechanism".into(), ..setting.clone() }
        }
        _ => setting.clone(),
    };
    settings.iter().map(spelt).collect()
}

/// Checks that no field is set twice, by itself or as one of a table: neither value would be more meant than the other.
pub(super) fn check_distinct(settings: &[Setting]) -> Result<()> {
    let within = |inner: &str, outer: &str| Some(inner.strip_prefix(outer)?.strip_prefix('.')?.to_owned());
    for (at, Setting { key, .. }) in settings.iter().enumerate() {
        for Setting { key: other, .. } in &settings[..at] {
            let inner = within(key, other).map(|field| (other, field));
            if let Some((outer, field)) = inner.or_else(|| within(other, key).map(|field| (key, field))) {
                return Err(invalid(
                    SETTINGS,
                    outer,
                    format!("is given a value and a field `{field}`; give one of them"),
                ));
            }
            if key == other {
                return Err(invalid(SETTINGS, key, "is set twice; give it once".into()));
            }
        }
    }
    Ok(())
}
