//! The language model of a recipe.

use resolvent::{
    attention::{CodebookConfig, GammaSchedule},
    models::{Activation, NormOrder, Positions},
};
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

use super::{Check, LONGEST, check, mechanism, model::sizes, share};

/// A decoder alone, which continues text: learned or rotary positions, a mechanism per block, the embedding as output layer. The
/// vocabulary comes from the text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LanguageRecipe {
    /// Tokens that are read at once. Default 256.
    pub context: usize,
    /// Width. Default 128.
    pub dim: usize,
    /// Number of blocks. Default 4.
    pub depth: usize,
    /// Heads; divides the width. Default 4.
    pub heads: usize,
    /// Heads of keys and values, each shared by `heads / kv_heads` heads of queries. Default: as many as `heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Hidden width of the MLP. Default 512.
    pub mlp_dim: usize,
    /// `learned`: an embedding per place; `rotary`: queries and keys are turned. Default `learned`.
    pub positions: Positions,
    /// The blocks' mechanisms, in turn and again from the first: `own` is the recipe's, others are given as `mechanism` is.
    /// `["own", "softmax"]` alternates. Default `["own"]`; `own` must be there.
    pub layers: Vec<Layer>,
    /// One projection for queries and keys. Default: as the mechanism is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tied: Option<bool>,
    /// Biases of the query, key and value projections. Default true.
    pub qkv_bias: bool,
    /// Learn gamma, per head and block, where the mechanism has one. Default true.
    pub gamma_trainable: bool,
    /// `constant`: every block begins with the mechanism's gamma; `power`: block l with its l-th power. Default `constant`.
    pub gamma_schedule: GammaSchedule,
    /// Learn the order of the Levy kernel per head, where the mechanism is `fna` with `alpha` below 2. Default false.
    pub alpha_trainable: bool,
    /// Learn the length scale per head, where the mechanism is `fna`. Default false.
    pub kappa_trainable: bool,
    /// Where blocks normalise: `pre` or `post`. Default `pre`.
    pub norm: NormOrder,
    /// Inside the MLP: `gelu` or `relu`. Default `gelu`.
    pub activation: Activation,
    /// Dropout on the embedded tokens, after the attention and after the MLP. Default 0, in [0, 1).
    pub dropout: f64,
    /// Probability with which an attention weight is dropped while training, where the mechanism has such weights. Default 0, in
    /// [0, 1).
    pub weight_dropout: f64,
    /// Centroids for `ssa` that follow the tokens while training: `{ every = 100, decay = 0.9 }`. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codebook: Option<CodebookConfig>,
    /// Weights of the blocks' projections in {-1, 0, 1} times a scale. Default false.
    pub ternary: bool,
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
        let mut checks = sizes(self.dim, self.depth, self.heads, self.mlp_dim);
        let groups = self.kv_heads.is_none_or(|heads| heads >= 1 && self.heads.is_multiple_of(heads));
        checks.extend([
            check("model.context", self.context, (1..=LONGEST).contains(&self.context), "1 to 1000000"),
            check(
                "model.kv_heads",
                self.kv_heads.unwrap_or(self.heads),
                groups,
                "absent or a divisor of `model.heads`",
            ),
            check(
                "model.layers",
                self.layers.len(),
                (1..=self.depth).contains(&self.layers.len()),
                "1 to `model.depth` mechanisms",
            ),
            check(
                "model.layers",
                format_args!("without `own`"),
                self.layers.contains(&Layer::Own),
                "a list that names `own`, the recipe's mechanism",
            ),
            check("model.dropout", self.dropout, share(self.dropout), "in [0, 1)"),
            check("model.weight_dropout", self.weight_dropout, share(self.weight_dropout), "in [0, 1)"),
        ]);
        checks
    }
}

impl Default for LanguageRecipe {
    fn default() -> Self {
        Self {
            context: 256,
            dim: 128,
            depth: 4,
            heads: 4,
            kv_heads: None,
            mlp_dim: 512,
            positions: Positions::Learned,
            layers: vec![Layer::Own],
            tied: None,
            qkv_bias: true,
            gamma_trainable: true,
            gamma_schedule: GammaSchedule::Constant,
            alpha_trainable: false,
            kappa_trainable: false,
            norm: NormOrder::Pre,
            activation: Activation::Gelu,
            dropout: 0.0,
            weight_dropout: 0.0,
            codebook: None,
            ternary: false,
        }
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
