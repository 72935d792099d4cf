//! The language model of a recipe.

use resolvent::models::{LanguageConfig, Positions, TextConfig};
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

use super::{
    Check, LONGEST, check, mechanism,
    model::{any_mechanism, dropouts, sizes},
};

/// A decoder alone, which continues text: learned or rotary positions, a mechanism per block, the embedding as output layer. The
/// vocabulary comes from the text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LanguageRecipe {
    /// The library's configuration, whose fields stand beside these; vocabulary, mechanism, precision and strategy are of no account, nor are
    /// `orthogonal` and `plan_layers`, which a decoder alone does not have.
    #[serde(skip, default = "config")]
    pub config: TextConfig,
    /// Tokens that are read at once. Default 256.
    pub context: usize,
    /// Heads of keys and values, each shared by `heads / kv_heads` heads of queries. Default: as many as `heads`.
    pub kv_heads: Option<usize>,
    /// `learned`: an embedding per place; `rotary`: queries and keys are turned. Default `learned`.
    pub positions: Positions,
    /// The blocks' mechanisms, in turn and again from the first: `own` is the recipe's, others are given as `mechanism` is.
    /// `["own", "softmax"]` alternates. Default `["own"]`; `own` must be there.
    pub layers: Vec<Layer>,
}

fn config() -> TextConfig {
    LanguageConfig::new(0, 0, vec![any_mechanism()]).text
}

/// The mechanism of a block.
#[derive(Debug, Clone, PartialEq)]
pub enum Layer {
    /// The recipe's.
    Own,
    /// Another.
    Other(Box<Mechanism>),
}

const OWN: &str = "own";

impl Serialize for Layer {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Own => s.serialize_str(OWN),
            Self::Other(own) => mechanism::serialize(own, s),
        }
    }
}

impl<'de> Deserialize<'de> for Layer {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match Value::deserialize(d)? {
            Value::String(name) if name == OWN => Ok(Self::Own),
            other => Ok(Self::Other(Box::new(mechanism::read(other).map_err(D::Error::custom)?))),
        }
    }
}

impl LanguageRecipe {
    /// The blocks' mechanisms, `own` being the recipe's.
    pub fn mechanisms(&self, own: &Mechanism) -> Vec<Mechanism> {
        let mechanism = |layer: &Layer| match layer {
            Layer::Own => own.clone(),
            Layer::Other(mechanism) => (**mechanism).clone(),
        };
        self.layers.iter().map(mechanism).collect()
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let TextConfig { dim, depth, heads, mlp_dim, dropout, weight_dropout, .. } = self.config;
        let mut checks = sizes(dim, depth, heads, mlp_dim);
        checks.extend(dropouts(dropout, weight_dropout));
        let groups = self.kv_heads.is_none_or(|shared| shared >= 1 && heads.is_multiple_of(shared));
        checks.extend([
            check("model.context", self.context, (1..=LONGEST).contains(&self.context), "1 to 1000000"),
            check("model.kv_heads", self.kv_heads.unwrap_or(heads), groups, "absent or a divisor of `model.heads`"),
            check(
                "model.layers",
                self.layers.len(),
                (1..=depth).contains(&self.layers.len()),
                "1 to `model.depth` mechanisms",
            ),
            check(
                "model.layers",
                format_args!("without `own`"),
                self.layers.contains(&Layer::Own),
                "a list that names `own`, the recipe's mechanism",
            ),
        ]);
        checks
    }
}

impl Default for LanguageRecipe {
    fn default() -> Self {
        let layers = vec![Layer::Own];
        Self { config: config(), context: 256, kv_heads: None, positions: Positions::default(), layers }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Recipe;
    use super::*;

    #[test]
    fn layers_are_read_and_written() {
        let text = "mechanism = 'infsa'\n[model]\nkind = 'language'\nlayers = ['own', {mechanism = 'ssa', estimator = 'centroid'}, 'softmax']";
        let recipe = Recipe::from_toml(text, "r").unwrap();
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        let super::super::ModelRecipe::Language(model) = &recipe.model else { panic!() };
        let ids: Vec<_> = model.mechanisms(&recipe.mechanism).iter().map(Mechanism::id).collect();
        assert_eq!(ids, ["infsa", "ssa", "softmax"]);
        for (text, part) in [
            ("layers = []", "model.layers"),
            ("layers = ['softmacs']", "softmacs"),
            ("layers = ['softmax']", "`own`"),
            ("layers = ['own', 'own', 'own']\ndepth = 2", "model.layers"),
            ("kv_heads = 3", "model.kv_heads"),
            ("context = 0", "model.context"),
            ("positions = 'none'", "positions"),
        ] {
            let message =
                Recipe::from_toml(&format!("[model]\nkind = 'language'\n{text}"), "r").unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
