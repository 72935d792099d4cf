//! A module from its configuration.

use burn::{
    nn::{DropoutConfig, Linear, LinearConfig},
    tensor::Device,
};

use super::{GammaSchedule, MultiHeadAttentionConfig, ProjectionConfig, with_tied};
use crate::{
    Error, Mechanism, Parameter, Shape,
    attention::{BiasTable, Codebook, LandmarkParameters, Learned, MultiHeadAttention, OrthogonalMaps, ValueFilter},
    ternary::Packed,
};

impl MultiHeadAttentionConfig {
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
        let (d_model, heads, head_dim) = (self.d_model, self.n_heads, self.d_model / self.n_heads);
        let (mechanism, weights, positions) = (self.operator(), &self.projection, &self.positions);
        let (tied, grid) = (mechanism.tied, positions.grid.or(mechanism.grid()));
        let gamma_power = if self.decay.schedule == GammaSchedule::Power { self.decay.layer } else { 1 };
        let width = if weights.orthogonal { d_model } else { self.input_width(&mechanism) };
        Ok(MultiHeadAttention {
            projection: self.linear(width, weights.qkv_bias, device),
            orthogonal: weights.orthogonal.then(|| OrthogonalMaps::init(d_model, heads, tied, device)),
            output: self.linear(d_model, weights.output_bias, device),
            extra: weights.extra_proj.then(|| self.linear(d_model, true, device)),
            learned: Learned::init(self.starts(&mechanism), gamma_power, device),
            landmarks: LandmarkParameters::init(&mechanism, heads, head_dim, device),
            bias: BiasTable::init(&mechanism, heads, device),
            codebook: self.codebook(&mechanism, device)?,
            value_filter: ValueFilter::init(positions.value_conv, heads, d_model, grid.is_some(), device),
            dropout: DropoutConfig::new(self.dropout.output).init(),
            weight_dropout: self.dropout.weights,
            n_heads: heads,
            kv_heads: self.kv_heads(),
            pool_first: self.pool_first,
            rotary: positions.rotary,
            ternary: weights.ternary,
            precision: self.precision,
            packed: Packed::default(),
            causal_span: self.clusters.causal_span,
            grid,
            mechanism: mechanism.with_gamma(|gamma| gamma.powi(gamma_power as i32)),
            strategy: self.strategy,
            head_groups: Vec::new(),
            observer: None,
        })
    }

    fn linear(&self, width: usize, bias: bool, device: &Device) -> Linear {
        let config = LinearConfig::new(self.d_model, width).with_bias(bias);
        config.with_initializer(self.projection.initializer.clone()).init(device)
    }

    fn codebook(&self, mechanism: &Mechanism, device: &Device) -> Result<Option<Codebook>, Error> {
        let Some(config) = self.clusters.codebook else { return Ok(None) };
        let clusters = config.validate(mechanism)?;
        let shape = |clusters| [self.n_heads, clusters, self.d_model / self.n_heads];
        Ok(clusters.map(|clusters| Codebook::init(config, shape(clusters), device)))
    }

    /// Where the parameters that are to be learned start per head, as far as the mechanism has them.
    pub(super) fn starts(&self, mechanism: &Mechanism) -> Vec<(Parameter, Vec<f64>)> {
        let shape = Shape::square(1, self.n_heads, 1, self.d_model / self.n_heads);
        let start = |parameter: &Parameter| {
            let start = match parameter {
                // Every series of hops has the parameter; where the configuration gives it no effect, it stays fixed.
                Parameter::Gamma => vec![mechanism.gamma()?; self.n_heads],
                // A table of its own holds what is not per head.
                Parameter::Bias if mechanism.requires(*parameter, &shape) => return None,
                _ => mechanism.parameter_default(*parameter, &shape).into_iter().map(f64::from).collect(),
            };
            Some((*parameter, start))
        };
        let parameters = mechanism.parameters();
        parameters.iter().filter(|parameter| self.trained.contains(**parameter)).filter_map(start).collect()
    }

    /// Parameters of the module with free query and key maps, without those of [`Trained`](crate::attention::Trained).
    pub fn parameter_count(&self) -> usize {
        let d_model = self.d_model;
        let ProjectionConfig { qkv_bias, output_bias, extra_proj, .. } = self.projection;
        let (matrix, mechanism) = (d_model * d_model, self.operator());
        self.input_width(&mechanism) * (d_model + usize::from(qkv_bias))
            + matrix
            + if output_bias { d_model } else { 0 }
            + if extra_proj { matrix + d_model } else { 0 }
            + LandmarkParameters::count(&mechanism, self.n_heads, d_model / self.n_heads)
            + BiasTable::count(&mechanism, self.n_heads)
            + self.positions.value_conv.count(self.n_heads, d_model, self.positions.grid.or(mechanism.grid()).is_some())
    }

    /// How many landmarks a head has for `tokens` tokens, where tokens meet through landmarks: [`Mechanism::landmarks`].
    pub fn landmarks(&self, tokens: usize) -> Option<usize> {
        self.operator().landmarks(&Shape::square(1, self.n_heads, tokens, self.d_model / self.n_heads))
    }

    /// Heads of keys and values.
    pub(super) fn kv_heads(&self) -> usize {
        self.projection.kv_heads.unwrap_or(self.n_heads)
    }

    /// Columns of all input projections together.
    fn input_width(&self, mechanism: &Mechanism) -> usize {
        let keys = self.kv_heads() * (self.d_model / self.n_heads);
        match mechanism.projections() {
            1 => keys,
            parts => self.d_model + (parts - 1) * keys,
        }
    }

    /// The mechanism as this module applies it: tied or not, on the module's grid.
    pub(crate) fn operator(&self) -> Mechanism {
        let mechanism = self.mechanism.clone().with_grid(self.positions.grid);
        let tied = self.projection.tied.unwrap_or(mechanism.tied || mechanism.pooling().is_some());
        with_tied(mechanism, tied)
    }
}
