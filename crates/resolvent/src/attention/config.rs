//! How a [`MultiHeadAttention`] is built.

use burn::{
    config::Config,
    module::{Initializer, Param},
    nn::{DropoutConfig, Linear, LinearConfig},
    tensor::Device,
};
use resolvent_kernels::{self as kernels, Dropout};

use super::{
    Codebook, CodebookConfig, LandmarkParameters, MultiHeadAttention, OrthogonalMaps, ValueConv, ValueFilter, gamma,
    kernel,
    landmarks::{grid_of, with_grid},
};
use crate::{
    Error, Mechanism, Parameter, Shape, Strategy,
    mechanism::{GlobalTokens, Landmarks, Ssa, Structure},
    ops::projections,
    ternary::Packed,
};

/// What the decay of a layer is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GammaSchedule {
    /// Every layer uses `gamma`.
    #[default]
    Constant,
    /// Layer `l`, counted from 1, uses `gamma^l`: the residual stream then holds `sum_l gamma^l W_O Z^(l)`. "Infinite
    /// Self-Attention", eq. 12 and 23.
    Power,
}

/// Configuration of [`MultiHeadAttention`].
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Channels of a token.
    pub d_model: usize,
    /// Heads; they divide `d_model`.
    pub n_heads: usize,
    /// The mechanism. Its `tied` is replaced by the module's.
    pub mechanism: Mechanism,
    /// Heads of keys and values, each shared by `n_heads / kv_heads` neighbouring heads of queries ("GQA: Training Generalized
    /// Multi-Query Transformer Models from Multi-Head Checkpoints"). Default `None`: as many as `n_heads`. Refused where
    /// queries are keys.
    pub kv_heads: Option<usize>,
    /// One projection for queries and keys. Default `None`: true for `linear-infsa` ("Infinite Self-Attention",
    /// section 3.4), else as the mechanism says.
    pub tied: Option<bool>,
    /// Biases of the input projections. Default true.
    #[config(default = true)]
    pub qkv_bias: bool,
    /// Bias of the output projection. Default true.
    #[config(default = true)]
    pub output_bias: bool,
    /// A further `d_model x d_model` projection after the output projection. Default false. The published parameter
    /// counts of "Infinite Self-Attention", table 2, need it.
    #[config(default = false)]
    pub extra_proj: bool,
    /// Learn the decay: one logit per head, `gamma = sigmoid(logit)`, which starts at the mechanism's `gamma`. Default
    /// true; without effect where the mechanism has no decay. Section 3.2.
    #[config(default = true)]
    pub gamma_trainable: bool,
    /// Learn the order of the Levy kernel per head, from the mechanism's `alpha` on and within (1, 2). Default false; without
    /// effect where the mechanism has no such order.
    #[config(default = false)]
    pub alpha_trainable: bool,
    /// Learn the length scale of the kernel per head, from the mechanism's `kappa` on. Default false; without effect where
    /// the mechanism has none.
    #[config(default = false)]
    pub kappa_trainable: bool,
    /// Learn the bandwidth of the Laplacian kernel per head, from the mechanism's `lambda` on. Default false; without effect
    /// where the mechanism has none.
    #[config(default = false)]
    pub lambda_trainable: bool,
    /// Learn the Gaussian kernel's factor on squared distances per head, from the mechanism's `scale` on. Default false;
    /// without effect where the mechanism has none.
    #[config(default = false)]
    pub scale_trainable: bool,
    /// Query and key maps without bias that stay orthogonal all through training, see [`super::OrthogonalMaps`]. Default
    /// false. "Fractional neural attention for efficient multiscale sequence processing", Assumption 1 and A.3.
    #[config(default = false)]
    pub orthogonal: bool,
    /// What the decay of this layer is made of. Default constant.
    #[config(default = "GammaSchedule::Constant")]
    pub gamma_schedule: GammaSchedule,
    /// The layer's number, counted from 1; read by the power schedule. Default 1.
    #[config(default = 1)]
    pub layer: usize,
    /// Self-attention by `linear-infsa` pools the tokens first and projects the pooled row, which is exactly equal and
    /// needs neither value nor output projections per token. Default true; without effect for other mechanisms.
    #[config(default = true)]
    pub pool_first: bool,
    /// `[height, width]` of the tokens, row by row: windows, filters and rotations are two-dimensional, and a call may give
    /// another grid. Default null: the mechanism's own grid, else a sequence.
    pub grid: Option<[usize; 2]>,
    /// Turn queries and keys by their positions, by row and column on a grid ("RoFormer: Enhanced Transformer with Rotary
    /// Position Embedding"). Default false; without effect where there are neither.
    #[config(default = false)]
    pub rotary: bool,
    /// Tokens over which a causal `ssa` makes its clusters: their number and size follow from it and no longer from the
    /// length of the call, which may not be more, so that a token's output is the same however many follow. Default `None`:
    /// the length of the call. Without effect elsewhere.
    pub causal_span: Option<usize>,
    /// Centroids that `ssa` clusters by, which follow the tokens of the training passes. Default `None`: every call makes its own
    /// clusters. Self-attention alone; without effect for other mechanisms.
    pub codebook: Option<CodebookConfig>,
    /// Weights of all projections in {-1, 0, 1} times a scale, activations in eight bits, see [`crate::ternary`]. Default
    /// false.
    #[config(default = false)]
    pub ternary: bool,
    /// The filter over the values that is added to the heads' output. Default none.
    #[config(default = "ValueConv::None")]
    pub value_conv: ValueConv,
    /// Dropout on the output, after the projections. Default 0.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Probability with which a weight is dropped in training, the others divided by the share that stays. `softmax`, and `fna`
    /// without a density exponent.
    #[config(default = 0.0)]
    pub weight_dropout: f64,
    /// How the operator is applied. Default auto.
    #[config(default = "Strategy::Auto")]
    pub strategy: Strategy,
    /// Distribution of the initial weights. Default: uniform within `d_model^-0.5`, as in Burn's own module.
    #[config(default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }")]
    pub initializer: Initializer,
}

impl MultiHeadAttentionConfig {
    /// Checks every field, and that the mechanism is defined for self-attention.
    ///
    /// # Errors
    /// [`Error::Heads`], [`Error::Field`], [`Error::Mechanism`].
    pub fn validate(&self) -> Result<(), Error> {
        let Self { d_model, n_heads, dropout, layer, .. } = *self;
        field("d_model", d_model, d_model >= 1, "at least 1")?;
        field("n_heads", n_heads, n_heads >= 1, "at least 1")?;
        if !d_model.is_multiple_of(n_heads) {
            return Err(Error::Heads { d_model, n_heads });
        }
        field("dropout", dropout, (0.0..1.0).contains(&dropout), "in [0, 1)")?;
        field("layer", layer, layer >= 1, "at least 1: layers are counted from 1")?;
        let thins = self.weight_dropout;
        field("weight_dropout", thins, (0.0..1.0).contains(&thins), "in [0, 1)")?;
        if thins > 0.0 {
            Dropout::weights(thins, 0)?.check(&self.mechanism)?;
        }
        let mechanism = self.operator();
        self.check_tied(&mechanism)?;
        if mechanism.parameters().contains(&Parameter::GivenLandmarks) {
            let (what, why) = ("given landmarks in a module", "they come with a call; use `attend`");
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        self.check_groups(&mechanism)?;
        field("causal_span", self.causal_span.unwrap_or(1), self.causal_span != Some(0), "null or at least 1")?;
        self.codebook.map_or(Ok(None), |codebook| codebook.validate(&mechanism))?;
        field("orthogonal", self.orthogonal, !(self.orthogonal && self.ternary), "false with ternary weights")?;
        mechanism.check(&Shape::square(1, n_heads, least_tokens(&mechanism), d_model / n_heads), false)?;
        let (planar, head_dim) = (grid_of(&mechanism).or(self.grid).is_some(), d_model / n_heads);
        let whole = head_dim.is_multiple_of(if planar { 4 } else { 2 });
        let expected = "a multiple of 4 with `rotary` on a grid, even with `rotary` in a sequence";
        field("head_dim", head_dim, whole || !self.rotary, expected)?;
        let side = self.value_conv.side();
        field("value_conv.side", side.unwrap_or(0), side.is_none_or(|side| side % 2 == 1), "odd")?;
        let with_queries = projections(&mechanism) > 1;
        field("orthogonal", self.orthogonal, with_queries || !self.orthogonal, "false: there are no queries to map")?;
        if let Some(&[alpha, ..]) = self.trained(&mechanism, Parameter::Alpha).as_deref() {
            field("alpha", alpha, alpha > 1.0 && alpha < 2.0, "inside (1, 2) when alpha_trainable")?;
        }
        match mechanism.gamma() {
            Some(gamma) if self.gamma_trainable => {
                field("gamma", gamma, gamma < 1.0, "below 1 when gamma_trainable, as sigmoid of a finite logit")
            }
            _ => Ok(()),
        }
    }

    /// `tied` must be what the mechanism is; without queries and keys it says nothing, so that a control may have any.
    fn check_tied(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let (is, control) = (mechanism.tied(), matches!(mechanism, Mechanism::Uniform(_)));
        let expected =
            if is { "true or absent: keys are queries here" } else { "false or absent: keys are not queries here" };
        field("tied", !is, control || self.tied.is_none_or(|tied| tied == is), expected)
    }

    /// Builds the module on `device`.
    ///
    /// # Panics
    /// Where [`MultiHeadAttentionConfig::try_init`] returns an error, with its message.
    pub fn init(&self, device: &Device) -> MultiHeadAttention {
        self.try_init(device).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Builds the module on `device`.
    ///
    /// # Errors
    /// As [`MultiHeadAttentionConfig::validate`].
    pub fn try_init(&self, device: &Device) -> Result<MultiHeadAttention, Error> {
        self.validate()?;
        let d_model = self.d_model;
        let mechanism = self.operator();
        let linear = |width: usize, bias: bool| -> Linear {
            let initializer = self.initializer.clone();
            LinearConfig::new(d_model, width).with_bias(bias).with_initializer(initializer).init(device)
        };
        let trainable = mechanism.gamma().filter(|_| self.gamma_trainable);
        let (heads, head_dim) = (self.n_heads, d_model / self.n_heads);
        let logs = |parameter| Some(kernel::logs(&self.trained(&mechanism, parameter)?, device));
        let (tied, grid) = (mechanism.tied(), self.grid.or(grid_of(&mechanism)));
        let codebook = self.codebook.map_or(Ok(None), |codebook| codebook.validate(&mechanism))?;
        let power = if self.gamma_schedule == GammaSchedule::Power { self.layer } else { 1 };
        Ok(MultiHeadAttention {
            projection: linear(if self.orthogonal { d_model } else { self.input_width(&mechanism) }, self.qkv_bias),
            orthogonal: self.orthogonal.then(|| OrthogonalMaps::init(d_model, heads, tied, device)),
            output: linear(d_model, self.output_bias),
            extra: self.extra_proj.then(|| linear(d_model, true)),
            gamma_logit: trainable.map(|gamma| Param::from_tensor(gamma::logits(gamma, self.n_heads, device))),
            alpha_logit: self.trained(&mechanism, Parameter::Alpha).map(|alpha| kernel::alpha_logits(&alpha, device)),
            kappa_log: logs(Parameter::Kappa),
            lambda_log: logs(Parameter::Lambda),
            scale_log: logs(Parameter::Scale),
            landmarks: LandmarkParameters::init(&mechanism, heads, head_dim, device),
            codebook: self
                .codebook
                .zip(codebook)
                .map(|(config, clusters)| Codebook::init(config, [heads, clusters, head_dim], device)),
            ternary: self.ternary,
            packed: Packed::default(),
            value_filter: ValueFilter::init(self.value_conv, heads, d_model, grid.is_some(), device),
            dropout: DropoutConfig::new(self.dropout).init(),
            weight_dropout: self.weight_dropout,
            n_heads: self.n_heads,
            kv_heads: self.key_heads(),
            gamma_power: power,
            pool_first: self.pool_first,
            rotary: self.rotary,
            causal_span: self.causal_span,
            grid,
            mechanism: gamma::with_gamma(mechanism, |gamma| gamma.powi(power as i32)),
            strategy: self.strategy,
            observer: None,
        })
    }

    /// Where a parameter of the kernel starts per head, if it is to be learned and the mechanism has it.
    fn trained(&self, mechanism: &Mechanism, parameter: Parameter) -> Option<Vec<f32>> {
        let wanted = match parameter {
            Parameter::Alpha => self.alpha_trainable,
            Parameter::Kappa => self.kappa_trainable,
            Parameter::Lambda => self.lambda_trainable,
            Parameter::Scale => self.scale_trainable,
            _ => false,
        };
        let shape = Shape::square(1, self.n_heads, 1, self.d_model / self.n_heads);
        let has = wanted && mechanism.parameters().contains(&parameter);
        has.then(|| mechanism.parameter_default(parameter, &shape))
    }

    /// Parameters of the module with free query and key maps, without those of the decay and of the kernel's width.
    pub fn parameter_count(&self) -> usize {
        let Self { d_model, qkv_bias, output_bias, extra_proj, .. } = *self;
        let (matrix, mechanism) = (d_model * d_model, self.operator());
        self.input_width(&mechanism) * (d_model + usize::from(qkv_bias))
            + matrix
            + if output_bias { d_model } else { 0 }
            + if extra_proj { matrix + d_model } else { 0 }
            + LandmarkParameters::count(&mechanism, self.n_heads, d_model / self.n_heads)
            + self.value_conv.count(self.n_heads, d_model, self.grid.or(grid_of(&mechanism)).is_some())
    }

    /// How many landmarks a head has for `tokens` tokens, where tokens meet through landmarks: [`Mechanism::landmarks`].
    pub fn landmarks(&self, tokens: usize) -> Option<usize> {
        self.operator().landmarks(&Shape::square(1, self.n_heads, tokens, self.d_model / self.n_heads))
    }

    /// Heads of keys and values.
    fn key_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.n_heads)
    }

    /// Columns of all input projections together.
    fn input_width(&self, mechanism: &Mechanism) -> usize {
        let keys = self.key_heads() * (self.d_model / self.n_heads);
        match projections(mechanism) {
            1 => keys,
            parts => self.d_model + (parts - 1) * keys,
        }
    }

    /// Whether queries can share keys and values as configured.
    fn check_groups(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let heads = self.key_heads();
        field("kv_heads", heads, heads >= 1 && self.n_heads.is_multiple_of(heads), "a divisor of `n_heads`")?;
        if heads == self.n_heads {
            return Ok(());
        }
        if mechanism.tied() {
            let (what, why) = (
                "kv_heads below n_heads",
                "queries are keys here, so that there are as many; set tied to false where it can be",
            );
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        field("orthogonal", self.orthogonal, !self.orthogonal, "false with grouped keys, whose map is no square")
    }

    /// The mechanism as this module applies it: tied or not, on the module's grid.
    pub(crate) fn operator(&self) -> Mechanism {
        let mechanism = with_grid(self.mechanism.clone(), self.grid);
        let tied = self.tied.unwrap_or(mechanism.tied() || matches!(mechanism, Mechanism::LinearInfsa(_)));
        with_tied(mechanism, tied)
    }
}

/// Tokens that a sequence needs for the positions, grids and landmarks that the configuration names.
fn least_tokens(mechanism: &Mechanism) -> usize {
    match mechanism {
        Mechanism::Soft(m) | Mechanism::SoftPp(m) => least_for_landmarks(m.grid, m.landmarks),
        Mechanism::Laplacian(m) => m.grid.map_or(1, |[height, width]| height.saturating_mul(width)),
        Mechanism::Ssa(m) => least_for_clusters(m),
        Mechanism::Composed(m) => match &m.structure {
            Structure::Nystrom(m) => least_for_landmarks(m.grid, m.landmarks),
            Structure::Clustered(m) => least_for_clusters(&m.ssa(None, false)),
            _ => 1,
        },
        _ => 1,
    }
}

fn least_for_landmarks(grid: Option<[usize; 2]>, landmarks: Landmarks) -> usize {
    match (grid, landmarks) {
        (Some([height, width]), _) => height.saturating_mul(width),
        (None, Landmarks::Random { count, .. } | Landmarks::First { count }) => count,
        (None, Landmarks::Conv { ratio }) => ratio,
        _ => 1,
    }
}

fn least_for_clusters(m: &Ssa) -> usize {
    match &m.global_tokens {
        Some(GlobalTokens::At(positions)) => positions.iter().max().map_or(1, |&last| last.saturating_add(1)),
        _ => 1,
    }
}

/// The mechanism, tied or not.
pub(super) fn with_tied(mut mechanism: Mechanism, tied: bool) -> Mechanism {
    match &mut mechanism {
        Mechanism::Softmax(m) => m.tied = tied,
        Mechanism::Infsa(m) => m.tied = tied,
        Mechanism::InfsaResolvent(m) => m.tied = tied,
        Mechanism::LinearInfsa(m) => m.tied = tied,
        Mechanism::Fna(m) => m.tied = tied,
        Mechanism::Laplacian(m) => m.tied = tied,
        Mechanism::LaplacianExact(m) => m.tied = tied,
        Mechanism::Composed(m) => m.tied = tied,
        _ => {}
    }
    mechanism
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
