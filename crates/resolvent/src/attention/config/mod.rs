//! How a [`super::MultiHeadAttention`] is built.

use std::fmt;

use burn::{
    config::{Config, config_to_json},
    module::Initializer,
};
use serde::{Deserialize, Serialize};

use super::{CodebookConfig, Trained, ValueConv};
use crate::{Error, Mechanism, Precision, Strategy, mechanism::Bias};

mod build;
mod check;

/// What the decay of a layer is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GammaSchedule {
    /// Every layer uses `gamma`.
    #[default]
    Constant,
    /// Layer `l`, counted from 1, uses `gamma^l`: the residual stream then holds `sum_l gamma^l W_O Z^(l)`. "Infinite
    /// Self-Attention", eq. 12 and 23.
    Power,
}

/// Configuration of [`super::MultiHeadAttention`]. In files the fields of the groups lie side by side.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MultiHeadAttentionConfig {
    /// Channels of a token.
    pub d_model: usize,
    /// Heads; they divide `d_model`.
    pub n_heads: usize,
    /// The mechanism. Its `tied` is replaced by the module's.
    pub mechanism: Mechanism,
    /// The projections.
    #[serde(flatten)]
    pub projection: ProjectionConfig,
    /// Which of the mechanism's parameters are learned.
    #[serde(flatten)]
    pub trained: Trained,
    /// What the decay is made of.
    #[serde(flatten)]
    pub decay: DecayConfig,
    /// Where tokens are.
    #[serde(flatten)]
    pub positions: PositionConfig,
    /// The clusters of `ssa` and of compositions on clusters.
    #[serde(flatten)]
    pub clusters: ClusterConfig,
    /// Dropout.
    #[serde(flatten)]
    pub dropout: DropoutRates,
    /// Self-attention by `linear-infsa` pools the tokens first and projects the pooled row, which is exactly equal and
    /// needs neither value nor output projections per token. Default true; without effect for other mechanisms.
    #[serde(default = "yes")]
    pub pool_first: bool,
    /// Of the products of projections and operator, and of the MLP in a block around the module. In bf16 their operands are rounded and
    /// their sums f32, forward and backward, while weights, gradients and everything else stay f32: training in mixed precision. Operators
    /// of [`resolvent_kernels::Operator::with_precision`] are computed so, others in f32 between projections in bf16.
    /// [`Precision::Bf16x3`] is of the operator alone: projections and MLP are f32. On Flex, without ternary weights and with a
    /// strategy of auto or fused. Default full: f32.
    #[serde(default)]
    pub precision: Precision,
    /// How the operator is applied. Default auto.
    #[serde(default)]
    pub strategy: Strategy,
}

/// The projections of a [`MultiHeadAttentionConfig`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct ProjectionConfig {
    /// Heads of keys and values, each shared by `n_heads / kv_heads` neighbouring heads of queries ("GQA: Training Generalized
    /// Multi-Query Transformer Models from Multi-Head Checkpoints"). Default `None`: as many as `n_heads`. Refused where
    /// queries are keys.
    pub kv_heads: Option<usize>,
    /// One projection for queries and keys. Default `None`: true for `linear-infsa` ("Infinite Self-Attention",
    /// section 3.4), else as the mechanism says.
    pub tied: Option<bool>,
    /// Biases of the input projections. Default true.
    pub qkv_bias: bool,
    /// Bias of the output projection. Default true.
    pub output_bias: bool,
    /// A further `d_model x d_model` projection after the output projection. Default false. The published parameter
    /// counts of "Infinite Self-Attention", table 2, need it.
    pub extra_proj: bool,
    /// Query and key maps without bias that stay orthogonal all through training, see [`super::OrthogonalMaps`]. Default
    /// false. "Fractional neural attention for efficient multiscale sequence processing", Assumption 1 and A.3.
    pub orthogonal: bool,
    /// Weights of all projections in {-1, 0, 1} times a scale, activations in eight bits, see [`crate::ternary`]. Default
    /// false.
    pub ternary: bool,
    /// Distribution of the initial weights. Default: uniform within `d_model^-0.5`, as in Burn's own module.
    pub initializer: Initializer,
}

impl Default for ProjectionConfig {
    fn default() -> Self {
        Self {
            kv_heads: None,
            tied: None,
            qkv_bias: true,
            output_bias: true,
            extra_proj: false,
            orthogonal: false,
            ternary: false,
            initializer: Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false },
        }
    }
}

/// What the decay of a [`MultiHeadAttentionConfig`] is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecayConfig {
    /// How it follows from the mechanism's `gamma`. Default constant.
    #[serde(rename = "gamma_schedule")]
    pub schedule: GammaSchedule,
    /// The layer's number, counted from 1; read by the power schedule. Default 1.
    pub layer: usize,
}

impl Default for DecayConfig {
    fn default() -> Self {
        Self { schedule: GammaSchedule::Constant, layer: 1 }
    }
}

/// Where the tokens of a [`MultiHeadAttentionConfig`] are, and what reads it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PositionConfig {
    /// `[height, width]` of the tokens, row by row: windows, filters and rotations are two-dimensional, and a call may give
    /// another grid. Default null: the mechanism's own grid, else a sequence.
    pub grid: Option<[usize; 2]>,
    /// Turn queries and keys by their positions, by row and column on a grid ("RoFormer: Enhanced Transformer with Rotary
    /// Position Embedding"). Default false; without effect where there are neither.
    pub rotary: bool,
    /// The filter over the values that is added to the heads' output. Default none.
    pub value_conv: ValueConv,
}

/// The clusters of a [`MultiHeadAttentionConfig`] whose mechanism attends along clusters, as `ssa` and compositions do; without effect
/// for others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterConfig {
    /// Tokens over which a causal call makes its clusters (`routed` makes them of segments of a fixed length): their number and size
    /// follow from it and no longer from the length of the call, which may not be more, so that a token's output is the same however
    /// many follow. Default `None`: the length of the call.
    pub causal_span: Option<usize>,
    /// Centroids of the clusters, which follow the tokens of the training passes. Default `None`: every call makes its own
    /// clusters. Self-attention alone.
    pub codebook: Option<CodebookConfig>,
}

/// The probabilities of dropout of a [`MultiHeadAttentionConfig`], in [0, 1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DropoutRates {
    /// Of the output, after the projections. Default 0.
    #[serde(rename = "dropout")]
    pub output: f64,
    /// Of a weight, in training; the others are divided by the share that stays. Default 0. `softmax`, and `fna` without a density
    /// exponent.
    #[serde(rename = "weight_dropout")]
    pub weights: f64,
}

/// The default of a field that is on.
fn yes() -> bool {
    true
}

impl Config for MultiHeadAttentionConfig {}

impl fmt::Display for MultiHeadAttentionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&config_to_json(self))
    }
}

impl MultiHeadAttentionConfig {
    /// `n_heads` heads, which divide `d_model`, of `mechanism`; all else by default.
    pub fn new(d_model: usize, n_heads: usize, mechanism: Mechanism) -> Self {
        Self {
            d_model,
            n_heads,
            mechanism,
            projection: ProjectionConfig::default(),
            trained: Trained::default(),
            decay: DecayConfig::default(),
            positions: PositionConfig::default(),
            clusters: ClusterConfig::default(),
            dropout: DropoutRates::default(),
            pool_first: true,
            precision: Precision::Full,
            strategy: Strategy::Auto,
        }
    }

    /// Which of the mechanism's parameters are learned: [`Trained`].
    #[must_use]
    pub fn with_trained(self, trained: impl Into<Trained>) -> Self {
        Self { trained: trained.into(), ..self }
    }
}

/// A method for every field that replaces it.
macro_rules! builders {
    ($($name:ident: $($field:ident).+ = $type:ty, $group:literal;)*) => {
        impl MultiHeadAttentionConfig {
            $(
                #[doc = concat!("The same configuration with another `", stringify!($($field).+), "`: see ", $group, ".")]
                #[must_use]
                pub fn $name(mut self, value: $type) -> Self {
                    self.$($field).+ = value;
                    self
                }
            )*
        }
    };
}

builders! {
    with_kv_heads: projection.kv_heads = Option<usize>, "[`ProjectionConfig`]";
    with_tied: projection.tied = Option<bool>, "[`ProjectionConfig`]";
    with_qkv_bias: projection.qkv_bias = bool, "[`ProjectionConfig`]";
    with_output_bias: projection.output_bias = bool, "[`ProjectionConfig`]";
    with_extra_proj: projection.extra_proj = bool, "[`ProjectionConfig`]";
    with_orthogonal: projection.orthogonal = bool, "[`ProjectionConfig`]";
    with_ternary: projection.ternary = bool, "[`ProjectionConfig`]";
    with_initializer: projection.initializer = Initializer, "[`ProjectionConfig`]";
    with_gamma_schedule: decay.schedule = GammaSchedule, "[`DecayConfig`]";
    with_layer: decay.layer = usize, "[`DecayConfig`]";
    with_grid: positions.grid = Option<[usize; 2]>, "[`PositionConfig`]";
    with_rotary: positions.rotary = bool, "[`PositionConfig`]";
    with_value_conv: positions.value_conv = ValueConv, "[`PositionConfig`]";
    with_causal_span: clusters.causal_span = Option<usize>, "[`ClusterConfig`]";
    with_codebook: clusters.codebook = Option<CodebookConfig>, "[`ClusterConfig`]";
    with_dropout: dropout.output = f64, "[`DropoutRates`]";
    with_weight_dropout: dropout.weights = f64, "[`DropoutRates`]";
    with_pool_first: pool_first = bool, "[`MultiHeadAttentionConfig`]";
    with_precision: precision = Precision, "[`MultiHeadAttentionConfig`]";
    with_strategy: strategy = Strategy, "[`MultiHeadAttentionConfig`]";
}

/// The mechanism, tied or not; presets that are only one of the two stay what they are.
pub(in crate::attention) fn with_tied(mechanism: Mechanism, tied: bool) -> Mechanism {
    if mechanism.fixes_tying() { mechanism } else { mechanism.with_tied(tied) }
}

/// Whether it is a preset whose queries and keys are not read, and not projected.
pub(in crate::attention) fn reads_values_alone(mechanism: &Mechanism) -> bool {
    mechanism.projections() == 1
}

/// Whether a causal call clusters all its tokens at once, so that how many clusters there are depends on how many tokens, and may be made
/// longer. Clusters that queries choose are of segments of a fixed length, and a bias by pair is of the call's own.
pub(in crate::attention) fn clusters_a_span(mechanism: &Mechanism) -> bool {
    let any_length = matches!(mechanism.bias, None | Some(Bias::Alibi(_) | Bias::Buckets(_)));
    any_length && mechanism.clustering().is_some_and(|clusters| !clusters.routes_queries())
}

/// An error naming `field` unless `ok`.
pub(crate) fn field(
    field: &'static str,
    got: impl std::fmt::Display,
    ok: bool,
    expected: &'static str,
) -> Result<(), Error> {
    if ok { Ok(()) } else { Err(Error::Field { field, got: got.to_string(), expected }) }
}
