//! The model of a recipe: which one, and its sizes.

use resolvent::models::{Pool, TextConfig, VitConfig};
use resolvent_kernels::Mechanism;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, Error as _},
    ser::{Error as _, SerializeMap},
};
use serde_json::{Map, Value};

use super::{
    Check, DEEPEST, LanguageRecipe, MOST_WEIGHTS, PyramidRecipe, WIDEST, check, mechanism,
    section::{Given, written},
    share,
};
use crate::Error;

/// The model, by `kind`. What is trained on decides which kinds are possible: pictures, or texts.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelRecipe {
    /// `vit`, the default: a vision transformer, of patches of 4 pixels by default. Of the library's configuration, image, channels, classes,
    /// mechanism, precision and strategy are of no account: they come from the data set and from the recipe as a whole.
    Vit(VitConfig),
    /// `pyramid`: four stages on ever coarser grids, as SOFT and LaplacianFormer are built.
    Pyramid(PyramidRecipe),
    /// `text`: a transformer over tokens, which classifies texts or translates them.
    Text(TextModelRecipe),
    /// `language`: a decoder over tokens, which continues text.
    Language(LanguageRecipe),
    /// `own`: a model of the program that trains it, with whatever fields it reads by [`ModelRecipe::own`].
    Own(Map<String, Value>),
}

impl ModelRecipe {
    /// The fields of a model of the kind `own`, as its program knows them.
    ///
    /// ```
    /// use resolvent_lab::Recipe;
    /// #[derive(serde::Deserialize)]
    /// #[serde(default, deny_unknown_fields)]
    /// struct Sizes {
    ///     width: usize,
    ///     depth: usize,
    /// }
    /// impl Default for Sizes {
    ///     fn default() -> Self {
    ///         Self { width: 64, depth: 2 }
    ///     }
    /// }
    /// let recipe = Recipe::from_toml("[model]\nkind = 'own'\nwidth = 32", "example")?;
    /// let sizes: Sizes = recipe.model.own()?;
    /// assert_eq!((sizes.width, sizes.depth), (32, 2));
    /// # Ok::<(), resolvent_lab::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Recipe`] for another kind of model, and for fields that do not fit, naming them.
    pub fn own<T: DeserializeOwned>(&self) -> crate::Result<T> {
        let fail = |field: String, problem| Error::Recipe { file: "recipe".into(), field, problem };
        let Self::Own(fields) = self else {
            return Err(fail("model.kind".into(), "is one of this library's models, must be `own`".into()));
        };
        serde_path_to_error::deserialize(Value::Object(fields.clone())).map_err(|e| match e.path().to_string() {
            path if path == "." => fail("model".into(), format!("is not valid: {}", e.inner())),
            path => fail(format!("model.{path}"), format!("is not valid: {}", e.inner())),
        })
    }

    /// The model of `kind` with the fields that are `given`.
    fn read(kind: Option<Value>, given: &mut Given) -> Result<Self, String> {
        Ok(match kind.as_ref().map_or(Some("vit"), Value::as_str) {
            Some("vit") => Self::Vit(given.over(&vit(), &OF_PICTURES)?),
            Some("pyramid") => {
                let own = given.over(&PyramidRecipe::default(), &[])?;
                Self::Pyramid(PyramidRecipe { config: given.over(&own.config, &OF_PYRAMIDS)?, ..own })
            }
            Some("text") => {
                let own = given.over(&TextModelRecipe::default(), &[])?;
                Self::Text(TextModelRecipe { config: given.over(&own.config, &OF_TEXTS)?, ..own })
            }
            Some("language") => {
                let own = given.over(&LanguageRecipe::default(), &[])?;
                Self::Language(LanguageRecipe { config: given.over(&own.config, &OF_LANGUAGE)?, ..own })
            }
            _ => {
                let kind = kind.unwrap_or_default();
                return Err(format!("unknown kind {kind}; give one of vit, pyramid, text, language, own"));
            }
        })
    }

    /// The kind, and the other fields: the recipe's own, and those of the library's configuration.
    pub(super) fn written(&self) -> serde_json::Result<(&'static str, Map<String, Value>)> {
        let (kind, own, config) = match self {
            Self::Vit(m) => ("vit", Map::new(), written(m, &OF_PICTURES)?),
            Self::Pyramid(m) => ("pyramid", written(m, &[])?, written(&m.config, &OF_PYRAMIDS)?),
            Self::Text(m) => ("text", written(m, &[])?, written(&m.config, &OF_TEXTS)?),
            Self::Language(m) => ("language", written(m, &[])?, written(&m.config, &OF_LANGUAGE)?),
            Self::Own(fields) => ("own", Map::new(), fields.clone()),
        };
        Ok((kind, own.into_iter().chain(config).collect()))
    }

    /// The configuration of a model of text.
    fn text(&self) -> Option<&TextConfig> {
        match self {
            Self::Text(m) => Some(&m.config),
            Self::Language(m) => Some(&m.config),
            Self::Vit(_) | Self::Pyramid(_) | Self::Own(_) => None,
        }
    }

    /// Height and width of the grid of tokens that every block sees of pictures of `image`, if it is one and the same. A class
    /// token has no place on it, and a pyramid's stages have a grid each.
    pub fn grid(&self, image: [usize; 2]) -> Option<[usize; 2]> {
        match self {
            Self::Vit(m) if m.pool == Pool::Mean => Some(image.map(|side| side / m.patch)),
            _ => None,
        }
    }

    /// The first field that changes how `ssa` clusters, which other mechanisms make no use of, if it is set.
    pub(super) fn clustering(&self) -> Option<&'static str> {
        let (codebook, layers) = match self {
            Self::Vit(m) => (m.codebook.is_some(), m.plan_layers),
            other => other.text().map_or((false, 1), |m| (m.codebook.is_some(), m.plan_layers)),
        };
        let plans = (layers > 1).then_some("model.plan_layers");
        codebook.then_some("model.codebook").or(plans)
    }

    /// Whether the weights of the blocks are rounded to three values.
    pub(super) fn is_ternary(&self) -> bool {
        match self {
            Self::Vit(m) => m.ternary,
            other => other.text().is_some_and(|m| m.ternary),
        }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        match self {
            Self::Vit(m) => vit_checks(m),
            Self::Pyramid(m) => m.checks(),
            Self::Text(m) => m.checks(),
            Self::Language(m) => m.checks(),
            Self::Own(_) => Vec::new(),
        }
    }
}

impl Default for ModelRecipe {
    fn default() -> Self {
        Self::Vit(vit())
    }
}

/// By `kind`, and with the field named in errors; a tagged enum would be read without knowing where it stands.
impl<'de> Deserialize<'de> for ModelRecipe {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(d)?;
        let kind = fields.remove("kind");
        if kind.as_ref().and_then(Value::as_str) == Some("own") {
            return Ok(Self::Own(fields));
        }
        let mut given = Given::new(fields);
        let model = Self::read(kind, &mut given).map_err(D::Error::custom)?;
        given.finish().map_err(D::Error::custom)?;
        Ok(model)
    }
}

/// `kind` first, then the fields in alphabetical order.
impl Serialize for ModelRecipe {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let (kind, fields) = self.written().map_err(S::Error::custom)?;
        let mut map = s.serialize_map(Some(1 + fields.len()))?;
        map.serialize_entry("kind", kind)?;
        fields.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}

/// Fields of the library's configurations that are given elsewhere: by the data, by the recipe as a whole, by a pyramid's preset. A
/// language model has no use for the last two of its.
const OF_PICTURES: [&str; 6] = ["image", "channels", "classes", "mechanism", "precision", "strategy"];
const OF_PYRAMIDS: [&str; 11] = [
    "image",
    "channels",
    "classes",
    "mechanism",
    "precision",
    "strategy",
    "embedding",
    "stride",
    "stages",
    "positions",
    "pool",
];
const OF_TEXTS: [&str; 4] = ["vocabulary", "mechanism", "precision", "strategy"];
const OF_LANGUAGE: [&str; 6] = ["vocabulary", "mechanism", "precision", "strategy", "orthogonal", "plan_layers"];

/// The mechanism that stands in a configuration until the recipe's takes its place.
pub(super) fn any_mechanism() -> Mechanism {
    Mechanism::default()
}

fn vit() -> VitConfig {
    VitConfig::new([0, 0], 0, 4, 0, any_mechanism())
}

fn vit_checks(m: &VitConfig) -> Vec<Check> {
    let mut checks = sizes(m.dim, m.depth, m.heads, m.mlp_dim);
    checks.extend(dropouts(m.dropout, m.weight_dropout));
    checks.extend([
        check("model.patch", m.patch, (1..=WIDEST).contains(&m.patch), "1 to 65536"),
        check("model.drop_path", m.drop_path, share(m.drop_path), "in [0, 1)"),
        plan_layers(m.plan_layers, m.depth),
    ]);
    checks
}

/// A transformer over tokens: embeddings, sinusoidal positions, blocks. Vocabulary and classes come from the data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextModelRecipe {
    /// The library's configuration, whose fields stand beside these; vocabulary, mechanism, precision and strategy are of no account.
    #[serde(skip, default = "text_config")]
    pub config: TextConfig,
    /// Attention within a translation, as `mechanism` is given. Default: the recipe's mechanism.
    #[serde(with = "mechanism::optional")]
    pub decoder: Option<Box<Mechanism>>,
    /// Attention from a translation to its source, as `mechanism` is given. Default: the recipe's mechanism.
    #[serde(with = "mechanism::optional")]
    pub cross: Option<Box<Mechanism>>,
}

fn text_config() -> TextConfig {
    TextConfig::new(0, any_mechanism())
}

impl TextModelRecipe {
    fn checks(&self) -> Vec<Check> {
        let m = &self.config;
        let mut checks = sizes(m.dim, m.depth, m.heads, m.mlp_dim);
        checks.extend(dropouts(m.dropout, m.weight_dropout));
        checks.push(plan_layers(m.plan_layers, m.depth));
        checks
    }
}

impl Default for TextModelRecipe {
    fn default() -> Self {
        Self { config: text_config(), decoder: None, cross: None }
    }
}

/// The probabilities of dropout that every model has.
pub(super) fn dropouts(dropout: f64, weight_dropout: f64) -> [Check; 2] {
    [("model.dropout", dropout), ("model.weight_dropout", weight_dropout)]
        .map(|(field, probability)| check(field, probability, share(probability), "in [0, 1)"))
}

/// Plans are shared by blocks that there are.
fn plan_layers(layers: usize, depth: usize) -> Check {
    check("model.plan_layers", layers, (1..=depth).contains(&layers), "1 to `model.depth`")
}

/// What every transformer's sizes must be.
pub(super) fn sizes(dim: usize, depth: usize, heads: usize, mlp_dim: usize) -> Vec<Check> {
    let [width, blocks, hidden] = [dim, depth, mlp_dim].map(|n| n as u64);
    let block = width.saturating_mul(4 * width).saturating_add(width.saturating_mul(2 * hidden));
    let weights = blocks.saturating_mul(block);
    vec![
        check("model.dim", dim, (1..=WIDEST).contains(&dim), "1 to 65536"),
        check("model.depth", depth, (1..=DEEPEST).contains(&depth), "1 to 4096"),
        check("model.heads", heads, heads >= 1 && dim.is_multiple_of(heads), "a divisor of `model.dim`"),
        check("model.mlp_dim", mlp_dim, (1..=WIDEST).contains(&mlp_dim), "1 to 65536"),
        check("model", weights, weights <= MOST_WEIGHTS, "at most 2^33 weights in the blocks (32 GiB)"),
    ]
}

#[cfg(test)]
mod tests {
    use resolvent::models::{LanguageConfig, PyramidConfig};

    use super::super::Recipe;
    use super::*;

    fn model(text: &str) -> ModelRecipe {
        let recipe = Recipe::from_toml(&format!("[model]\n{text}"), "r").unwrap();
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        let json = serde_json::to_string(&recipe).unwrap();
        assert_eq!(serde_json::from_str::<Recipe>(&json).unwrap(), recipe);
        recipe.model
    }

    #[test]
    fn defaults_are_those_of_the_library() {
        let softmax = any_mechanism;
        assert_eq!(model(""), ModelRecipe::Vit(VitConfig::new([0, 0], 0, 4, 0, softmax())));
        let ModelRecipe::Text(text) = model("kind = 'text'") else { panic!() };
        assert_eq!((text.config, text.decoder, text.cross), (TextConfig::new(0, softmax()), None, None));
        let ModelRecipe::Language(language) = model("kind = 'language'") else { panic!() };
        let library = LanguageConfig::new(0, language.context, vec![softmax()]);
        assert_eq!((language.config.dim, language.context, language.positions), (128, 256, library.positions));
        assert_eq!((&language.config, language.kv_heads), (&library.text, library.kv_heads));
        let ModelRecipe::Pyramid(pyramid) = model("kind = 'pyramid'") else { panic!() };
        let preset = PyramidConfig::preset("soft-mini").unwrap();
        assert_eq!(pyramid.config(&preset.mechanism, preset.image, 3, 10).unwrap(), preset);
    }

    #[test]
    fn fields_that_the_data_decide_are_unknown() {
        for (text, unknown) in [
            ("image = [8, 8]", "image"),
            ("strategy = 'auto'", "strategy"),
            ("kind = 'text'\nvocabulary = 3", "vocabulary"),
            ("kind = 'language'\nplan_layers = 2", "plan_layers"),
            ("kind = 'pyramid'\npool = 'cls'", "pool"),
        ] {
            let message = Recipe::from_toml(&format!("[model]\n{text}"), "r").unwrap_err().to_string();
            let (said, known) = message.split_once("expected one of").unwrap();
            assert!(said.contains(&format!("unknown field `{unknown}`")) && known.contains("`dropout`"), "{message}");
            assert!(!known.contains(&format!("`{unknown}`")), "{message}");
        }
    }

    #[test]
    fn stages_are_written_as_they_are_read() {
        let stage = "dim = 8\nheads = 2\ndepth = 1\nmechanism = { mechanism = 'ssa', balance = 'none' }";
        let stages = format!("[[model.stages]]\n{stage}\n").repeat(4);
        let ModelRecipe::Pyramid(pyramid) = model(&format!("kind = 'pyramid'\ntied = true\n{stages}")) else {
            panic!()
        };
        let config = pyramid.config(&any_mechanism(), [32, 32], 3, 10).unwrap();
        let unbalanced = Mechanism::from_json(r#"{"mechanism": "ssa", "balance": null}"#).unwrap();
        assert_eq!(config.stages.map(|stage| stage.mechanism), [(); 4].map(|()| Some(unbalanced.clone())));
        assert_eq!(config.tied, Some(true));
    }
}
