//! The model of a recipe: which one, and its sizes.

use resolvent::{
    attention::{CodebookConfig, GammaSchedule},
    models::{Activation, NormOrder, Pool},
};
use resolvent_kernels::Mechanism;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};
use serde_json::{Map, Value};

use super::{Check, DEEPEST, LanguageRecipe, MOST_WEIGHTS, PyramidRecipe, WIDEST, check, mechanism, share};
use crate::Error;

/// The model, by `kind`. What is trained on decides which kinds are possible: pictures, or texts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ModelRecipe {
    /// `vit`, the default: a vision transformer.
    Vit(VitRecipe),
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

    /// Height and width of the grid of tokens that every block sees of pictures of `image`, if it is one and the same. A class
    /// token has no place on it, and a pyramid's stages have a grid each.
    pub fn grid(&self, image: [usize; 2]) -> Option<[usize; 2]> {
        match self {
            Self::Vit(m) if m.pool == Pool::Mean => Some(image.map(|side| side / m.patch)),
            _ => None,
        }
    }

    /// The first field that changes how `ssa` clusters, which other mechanisms make no use of, if it is set.
    pub fn clustering(&self) -> Option<&'static str> {
        let (codebook, layers) = match self {
            Self::Vit(m) => (m.codebook.is_some(), m.plan_layers),
            Self::Text(m) => (m.codebook.is_some(), m.plan_layers),
            Self::Language(m) => (m.codebook.is_some(), 1),
            Self::Pyramid(_) | Self::Own(_) => (false, 1),
        };
        let plans = (layers > 1).then_some("model.plan_layers");
        codebook.then_some("model.codebook").or(plans)
    }

    /// Whether the weights of the blocks are rounded to three values.
    pub(super) fn is_ternary(&self) -> bool {
        match self {
            Self::Vit(m) => m.ternary,
            Self::Text(m) => m.ternary,
            Self::Language(m) => m.ternary,
            Self::Pyramid(_) | Self::Own(_) => false,
        }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        match self {
            Self::Vit(m) => m.checks(),
            Self::Pyramid(m) => m.checks(),
            Self::Text(m) => m.checks(),
            Self::Language(m) => m.checks(),
            Self::Own(_) => Vec::new(),
        }
    }
}

impl Default for ModelRecipe {
    fn default() -> Self {
        Self::Vit(VitRecipe::default())
    }
}

/// By `kind`, and with the field named in errors; a tagged enum would be read without knowing where it stands.
impl<'de> Deserialize<'de> for ModelRecipe {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        fn read<T: DeserializeOwned, E: serde::de::Error>(fields: Value) -> Result<T, E> {
            serde_path_to_error::deserialize(fields).map_err(|e| match e.path().to_string() {
                path if path == "." => E::custom(e.inner()),
                path => E::custom(format!("`model.{path}`: {}", e.inner())),
            })
        }
        let mut fields = Value::deserialize(d)?;
        let kind = fields.as_object_mut().and_then(|fields| fields.remove("kind"));
        match kind.as_ref().map_or(Some("vit"), Value::as_str) {
            Some("vit") => Ok(Self::Vit(read(fields)?)),
            Some("pyramid") => Ok(Self::Pyramid(read(fields)?)),
            Some("text") => Ok(Self::Text(read(fields)?)),
            Some("language") => Ok(Self::Language(read(fields)?)),
            Some("own") => Ok(Self::Own(read(fields)?)),
            _ => Err(D::Error::custom(format!(
                "unknown kind {}; give one of vit, pyramid, text, language, own",
                kind.unwrap_or_default()
            ))),
        }
    }
}

/// A vision transformer: patches, learned positions, pre-norm blocks. Picture size, channels and classes come from the
/// data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VitRecipe {
    /// Side of a patch in pixels; divides the picture's sides. Default 4.
    pub patch: usize,
    /// Width. Default 64.
    pub dim: usize,
    /// Number of blocks. Default 4.
    pub depth: usize,
    /// Heads; divides the width. Default 4.
    pub heads: usize,
    /// Hidden width of the MLP. Default 128.
    pub mlp_dim: usize,
    /// What the head reads: `mean` of the patches or `cls`, a learned token. Default `mean`.
    pub pool: Pool,
    /// One projection for queries and keys. Default: as the mechanism is published (`linear-infsa` true, others false).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tied: Option<bool>,
    /// Biases of the query, key and value projections. Default true.
    pub qkv_bias: bool,
    /// Learn gamma, per head and block. Default true.
    pub gamma_trainable: bool,
    /// `constant`: every block begins with the mechanism's gamma; `power`: block l with its l-th power. Default `constant`.
    pub gamma_schedule: GammaSchedule,
    /// Dropout after the attention and after the MLP. Default 0, in [0, 1).
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0, in [0, 1).
    pub weight_dropout: f64,
    /// Stochastic depth of the last block, rising linearly from 0 at the first. Default 0, in [0, 1).
    pub drop_path: f64,
    /// A further square layer after the attention's output projection. Default false.
    pub extra_proj: bool,
    /// A square layer with tanh before the head. Default false.
    pub pre_logits: bool,
    /// Centroids for `ssa` that follow the tokens while training: `{ every = 100, decay = 0.9 }`. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codebook: Option<CodebookConfig>,
    /// Blocks in turn that use one plan of clusters, where the mechanism is `ssa`. Default 1, in 1..=depth.
    pub plan_layers: usize,
    /// Weights of the blocks' projections in {-1, 0, 1} times a scale. Default false.
    pub ternary: bool,
}

impl VitRecipe {
    fn checks(&self) -> Vec<Check> {
        let mut checks = sizes(self.dim, self.depth, self.heads, self.mlp_dim);
        checks.extend([
            check("model.patch", self.patch, (1..=WIDEST).contains(&self.patch), "1 to 65536"),
            check("model.dropout", self.dropout, share(self.dropout), "in [0, 1)"),
            check("model.weight_dropout", self.weight_dropout, share(self.weight_dropout), "in [0, 1)"),
            check("model.drop_path", self.drop_path, share(self.drop_path), "in [0, 1)"),
            plan_layers(self.plan_layers, self.depth),
        ]);
        checks
    }
}

impl Default for VitRecipe {
    fn default() -> Self {
        Self {
            patch: 4,
            dim: 64,
            depth: 4,
            heads: 4,
            mlp_dim: 128,
            pool: Pool::Mean,
            tied: None,
            qkv_bias: true,
            gamma_trainable: true,
            gamma_schedule: GammaSchedule::Constant,
            dropout: 0.0,
            weight_dropout: 0.0,
            drop_path: 0.0,
            extra_proj: false,
            pre_logits: false,
            codebook: None,
            plan_layers: 1,
            ternary: false,
        }
    }
}

/// A transformer over tokens: embeddings, sinusoidal positions, blocks. Vocabulary and classes come from the data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextModelRecipe {
    /// Width. Default 8.
    pub dim: usize,
    /// Number of blocks; of a translator, in the encoder and in the decoder. Default 1.
    pub depth: usize,
    /// Heads; divides the width. Default 1.
    pub heads: usize,
    /// Hidden width of the MLP. Default 256.
    pub mlp_dim: usize,
    /// One projection for queries and keys. Default: as the mechanism is published (`linear-infsa` true, others false).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tied: Option<bool>,
    /// Biases of the query, key and value projections. Default false.
    pub qkv_bias: bool,
    /// Query and key maps that stay orthogonal all through training. Default false.
    pub orthogonal: bool,
    /// Learn gamma, per head and block, where the mechanism has one. Default true.
    pub gamma_trainable: bool,
    /// `constant`: every block begins with the mechanism's gamma; `power`: block l with its l-th power. Default `constant`.
    pub gamma_schedule: GammaSchedule,
    /// Learn the order of the Levy kernel per head, where the mechanism is `fna` with `alpha` below 2. Default false.
    pub alpha_trainable: bool,
    /// Learn the length scale per head, where the mechanism is `fna`. Default false.
    pub kappa_trainable: bool,
    /// Attention within a translation, as `mechanism` is given. Default: the recipe's mechanism.
    #[serde(with = "mechanism::optional", skip_serializing_if = "Option::is_none")]
    pub decoder: Option<Box<Mechanism>>,
    /// Attention from a translation to its source, as `mechanism` is given. Default: the recipe's mechanism.
    #[serde(with = "mechanism::optional", skip_serializing_if = "Option::is_none")]
    pub cross: Option<Box<Mechanism>>,
    /// Where blocks normalise: `post` or `pre`. Default `post`.
    pub norm: NormOrder,
    /// Inside the MLP: `relu` or `gelu`. Default `relu`.
    pub activation: Activation,
    /// Dropout on the embedded tokens, after the attention and after the MLP. Default 0, in [0, 1).
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0, in [0, 1).
    pub weight_dropout: f64,
    /// Centroids for `ssa` that follow the tokens while training: `{ every = 100, decay = 0.9 }`. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codebook: Option<CodebookConfig>,
    /// Blocks of an encoder in turn that use one plan of clusters, where the mechanism is `ssa`. Default 1, in 1..=depth.
    pub plan_layers: usize,
    /// Weights of the blocks' projections in {-1, 0, 1} times a scale. Default false.
    pub ternary: bool,
}

impl TextModelRecipe {
    fn checks(&self) -> Vec<Check> {
        let mut checks = sizes(self.dim, self.depth, self.heads, self.mlp_dim);
        checks.extend([
            check("model.dropout", self.dropout, share(self.dropout), "in [0, 1)"),
            check("model.weight_dropout", self.weight_dropout, share(self.weight_dropout), "in [0, 1)"),
            plan_layers(self.plan_layers, self.depth),
        ]);
        checks
    }
}

impl Default for TextModelRecipe {
    fn default() -> Self {
        Self {
            dim: 8,
            depth: 1,
            heads: 1,
            mlp_dim: 256,
            tied: None,
            qkv_bias: false,
            orthogonal: false,
            gamma_trainable: true,
            gamma_schedule: GammaSchedule::Constant,
            alpha_trainable: false,
            kappa_trainable: false,
            decoder: None,
            cross: None,
            norm: NormOrder::Post,
            activation: Activation::Relu,
            dropout: 0.0,
            weight_dropout: 0.0,
            codebook: None,
            plan_layers: 1,
            ternary: false,
        }
    }
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
