//! The module.

use burn::{
    module::Module,
    nn::{self, Linear},
    tensor::Tensor,
};
use resolvent_kernels::{self as kernels, Dropout};

use super::{
    BiasTable, Codebook, HeadGroup, LandmarkParameters, Learned, MhaInput, MhaOutput, Observed, Observer,
    OrthogonalMaps, ValueFilter,
    config::{clusters_a_span, field, reads_values_alone, with_tied},
    landmarks::{drawn_seed, redrawn},
    rotary::rotate,
    sharing::{lengthened, lengthened_mask},
};
use crate::{
    Extras, Inputs, Mask, Mechanism, Precision, Result, Sequences, Strategy, attend,
    ops::{
        Projected, attend_packed, attend_packed_sequences, draws, linear_in, map_sequences, merge_heads, plan_of_call,
        split_heads,
    },
    ternary::{self, Packed},
};

/// Multi-head attention with any mechanism: project, attend per head, project back.
///
/// Queries, keys and values come from one fused projection. `uniform` has a value projection only: it reads neither queries nor
/// keys. With `softmax` it is [Burn's own module](burn::nn::attention::MultiHeadAttention), which
/// [`MultiHeadAttention::from_burn`] turns into it, weights included. Calls stay as they are but for these lines:
///
/// | Burn | here |
/// |---|---|
/// | `MultiHeadAttentionConfig::new(d_model, n_heads)` | a third argument, the mechanism |
/// | `with_dropout(p)`, 0.1 by default: of the weights | `with_weight_dropout(p)`, 0 by default; `with_dropout` is that of the output |
/// | `with_query_bias`, `with_key_bias`, `with_value_bias` | `with_qkv_bias` |
/// | `with_min_float`, `with_quiet_softmax` | none: what is masked is left out exactly, and a query without keys gets zero |
/// | `mask_pad` in self-attention | padding does not ask either: its rows are zero |
/// | `mask_attn(mask)` | any mask for mechanisms that form pairs; the causal one [`MhaInput::causal`] says without a tensor |
/// | `forward(input).weights` | [`MultiHeadAttention::weights`], a call of its own, as no call forms them by the way |
/// | `forward_cache(input, &mut cache)` | [`MultiHeadAttention::attend_next`] |
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use resolvent::{Mechanism, attention::{MhaInput, MultiHeadAttentionConfig}};
/// let device = Device::flex();
/// let attention = MultiHeadAttentionConfig::new(32, 4, Mechanism::preset("infsa")?).init(&device);
/// let tokens = Tensor::<3>::zeros([2, 10, 32], &device);
/// assert_eq!(attention.forward(MhaInput::self_attn(tokens)).context.dims(), [2, 10, 32]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// Input projections side by side, `[d_model, widths]`: queries (`d_model` wide), keys, values (`kv_heads * head_dim`
    /// wide); queries, values when tied; values for `uniform`, and beside orthogonal maps.
    pub projection: Linear,
    /// Query and key maps that stay orthogonal, if configured.
    pub orthogonal: Option<OrthogonalMaps>,
    /// Output projection, `[d_model, d_model]`.
    pub output: Linear,
    /// The projection after it, if configured.
    pub extra: Option<Linear>,
    /// The mechanism's parameters that are learned per head.
    pub learned: Learned,
    /// What makes the landmarks and filters the values, where the mechanism has such tensors.
    pub landmarks: LandmarkParameters,
    /// What is added to logits by distance, where the mechanism has such a table.
    pub bias: BiasTable,
    /// The centroids of the clusters, where they are kept.
    pub codebook: Option<Codebook>,
    /// The filter over the values, if configured.
    pub value_filter: Option<ValueFilter>,
    /// Dropout on the output.
    pub dropout: nn::Dropout,
    /// Probability with which a weight is dropped in training.
    pub weight_dropout: f64,
    /// Number of heads.
    pub n_heads: usize,
    /// Heads of keys and values; they divide `n_heads`.
    pub kv_heads: usize,
    /// Pool tokens before projecting them where the mechanism pools: see [`super::MultiHeadAttentionConfig::pool_first`].
    pub pool_first: bool,
    /// Turn queries and keys by their positions.
    pub rotary: bool,
    /// Round the weights of the projections to three values, and what they are applied to to eight bits.
    pub ternary: bool,
    /// Of the products of projections and operator, and of the MLP beside the module: see [`super::MultiHeadAttentionConfig::precision`].
    #[module(skip)]
    pub precision: Precision,
    /// Where the rounded weights are kept between calls that do not learn: those of this module, and of the MLP beside it.
    #[module(skip)]
    pub packed: Packed,
    /// Tokens over which a causal call makes its clusters: see [`super::ClusterConfig::causal_span`].
    pub causal_span: Option<usize>,
    /// Height and width of the tokens' grid, where a call gives no other; `None`: a sequence.
    #[module(skip)]
    pub grid: Option<[usize; 2]>,
    /// The mechanism, tied or not as the module is.
    #[module(skip)]
    pub mechanism: Mechanism,
    /// Heads with mechanisms of their own; none: all have the module's. See [`MultiHeadAttention::with_head_groups`].
    #[module(skip)]
    pub head_groups: Vec<HeadGroup>,
    /// How the operator is applied.
    #[module(skip)]
    pub strategy: Strategy,
    /// Callback that receives queries, keys, values and mask of every call of self-attention. Default none.
    #[module(skip)]
    pub observer: Option<Observer>,
}

impl MultiHeadAttention {
    /// Attention of every query over the keys.
    ///
    /// - query: `[batch, seq_q, d_model]`
    /// - key, value: `[batch, seq_kv, d_model]`
    /// - context: `[batch, seq_q, d_model]` (`[batch, 1, d_model]` for `linear-infsa` with `broadcast` off)
    ///
    /// # Panics
    /// Where [`MultiHeadAttention::try_forward`] returns an error, with its message.
    pub fn forward(&self, input: MhaInput) -> MhaOutput {
        self.try_forward(input).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`MultiHeadAttention::forward`], with errors as values.
    ///
    /// # Errors
    /// Tensors that do not fit, and whatever [`crate::attend`] refuses.
    pub fn try_forward(&self, mut input: MhaInput) -> Result<MhaOutput> {
        self.check_precision(&input.query)?;
        self.check(&input)?;
        input.recognise_causal(&self.mechanism)?;
        if let Some(sequences) = input.sequences.take() {
            return self.attend_each(input, &sequences);
        }
        let mask = input.mask();
        let padding = input.mask_pad.clone().filter(|_| input.memory.is_none());
        let context = match self.pooled(&input) {
            Some(m) => self.pool_first(input.query, &m, &mask)?,
            None => {
                let attended = self.attend(input, &mask)?;
                self.output(attended)
            }
        };
        let context = match padding {
            Some(padding) if context.dims()[1] == padding.dims()[1] => {
                let shape = context.shape();
                context.mask_fill(padding.unsqueeze_dim::<3>(2).expand(shape), 0.0)
            }
            _ => context,
        };
        Ok(MhaOutput { context: self.dropout.forward(context) })
    }

    /// Self-attention within each of several sequences that lie end to end.
    fn attend_each(&self, input: MhaInput, sequences: &Sequences) -> Result<MhaOutput> {
        let [batch, seq, _] = input.query.dims();
        let masked = input.mask_pad.is_some() || input.hidden.is_some();
        let alone = input.memory.is_none() && !masked && input.grid.is_none() && input.clusters.is_none();
        let expected = "on their own, in self-attention without padding";
        field("sequences", "beside keys, masks, a grid or a shared plan", alone, expected)?;
        let fits = batch == 1 && seq == sequences.tokens();
        let got = format!("{} tokens for a query of [{batch}, {seq}, ..]", sequences.tokens());
        field("sequences", got, fits, "as many tokens as the query, whose batch is 1")?;
        let (mechanism, mask) = (self.called(&input), input.mask());
        if self.mixes_by_sequence(&input) {
            let extras = self.dropped(&input, Extras::default())?;
            let draws = draws(&mechanism, &extras);
            let context = map_sequences(sequences, input.query.clone().squeeze_dim(0), draws, |n, query| {
                let dropout = input.dropout.map(|dropout| dropout.reseeded(n as u64));
                Ok(self.try_forward(MhaInput { query, dropout, ..input.clone() })?.context)
            })?;
            return Ok(MhaOutput { context: context.unsqueeze_dim(0) });
        }
        let extras = self.dropped(&input, self.extras())?;
        let packed = self.project(input.query, &sequences.positions().collect::<Vec<_>>(), None)?;
        let causal = mask.causal || mechanism.causal;
        let projected = self.projected(packed);
        let attended = attend_packed_sequences(projected, extras, &mechanism, sequences, causal, self.strategy)?;
        Ok(MhaOutput { context: self.dropout.forward(self.output(attended)) })
    }

    /// Whether the module does more with a sequence than its operator does.
    fn mixes_by_sequence(&self, input: &MhaInput) -> bool {
        self.value_filter.is_some()
            || self.codebook.is_some()
            || self.observer.is_some()
            || self.causal_span.is_some()
            || self.grid.is_some()
            || !self.head_groups.is_empty()
            || input.mask_attn.is_some()
            || self.pooled(input).is_some()
    }

    /// The projections after the operator.
    pub(super) fn output(&self, attended: Tensor<3>) -> Tensor<3> {
        let context = ternary::layer(&self.output, attended, self.products());
        match &self.extra {
            Some(extra) => ternary::layer(extra, context, self.products()),
            None => context,
        }
    }

    /// Projects and attends: `[batch, seq_q, d_model]`.
    fn attend(&self, input: MhaInput, mask: &Mask) -> Result<Tensor<3>> {
        let (mechanism, extras) = input.hide_pairs(self.called(&input), self.dropped(&input, self.extras())?)?;
        let mechanism = &mechanism;
        let Some((key, value)) = input.memory else {
            let grid = input.grid.or(self.grid);
            let extras = input.clusters.into_iter().fold(extras, Extras::with_shared_clusters);
            let packed = self.project_alone(input.query, grid)?;
            return self.attend_projected(packed, grid, mechanism, extras, mask);
        };
        self.check_one_mechanism()?;
        let mut inputs = self.cross_inputs(input.query, key, value, mechanism)?;
        inputs.extras = extras;
        // Tied, one projection makes queries and keys, but of different tokens.
        let mechanism = with_tied(mechanism.clone(), false);
        Ok(merge_heads(attend(&inputs, &mechanism, mask, self.strategy)?.out))
    }

    /// Queries of some tokens, keys and values of others.
    pub(super) fn cross_inputs(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        mechanism: &Mechanism,
    ) -> Result<Inputs> {
        self.check_cross(mechanism)?;
        let project = |x, part| self.heads(self.project_part(x, part));
        let v = project(value, mechanism.projections() - 1);
        Ok(if reads_values_alone(mechanism) {
            // Only the shapes of queries and keys are read.
            Inputs::new(self.heads(query), v.clone(), v)
        } else {
            let k = project(key, usize::from(!mechanism.tied));
            Inputs::new(self.heads(self.project_part(query, 0)), k, v)
        })
    }

    /// As [`Self::project`], for all tokens of a sequence.
    pub(super) fn project_alone(&self, tokens: Tensor<3>, grid: Option<[usize; 2]>) -> Result<Tensor<3>> {
        let places = (0..tokens.dims()[1]).collect::<Vec<_>>();
        self.project(tokens, &places, grid)
    }

    /// The projections of tokens, which have these `places` in their sequences, side by side and turned by their positions.
    pub(super) fn project(&self, tokens: Tensor<3>, places: &[usize], grid: Option<[usize; 2]>) -> Result<Tensor<3>> {
        let [_, seq, _] = tokens.dims();
        let fits = grid.is_none_or(|[height, width]| height.checked_mul(width) == Some(seq));
        field(
            "grid",
            format_args!("{grid:?} for {seq} tokens"),
            fits,
            "[height, width] with as many places as tokens",
        )?;
        let packed = match self.packed() {
            Some(packed) => self.ternary_inputs(packed, &self.input_widths()).forward(tokens),
            None => {
                let (weight, bias) = self.input_maps();
                linear_in(self.precision, tokens, weight, bias)
            }
        };
        let [_, _, width] = packed.dims();
        let values = self.key_width();
        if !self.rotary || width == values {
            return Ok(packed);
        }
        let turned = rotate(packed.clone().narrow(2, 0, width - values), self.head_dim(), places, grid);
        Ok(Tensor::cat(vec![turned, packed.narrow(2, width - values, values)], 2))
    }

    /// Self-attention from projections side by side.
    pub(super) fn attend_projected(
        &self,
        packed: Tensor<3>,
        grid: Option<[usize; 2]>,
        mechanism: &Mechanism,
        extras: Extras,
        mask: &Mask,
    ) -> Result<Tensor<3>> {
        let causal = mask.causal || mechanism.causal;
        if self.value_filter.is_some() && causal {
            let why = "the filter over the values reads later tokens; use value_conv none";
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what: "causal", why }.into());
        }
        if self.reads_shared_heads() {
            return attend_packed(self.projected(packed), extras, mechanism, mask, self.strategy);
        }
        let projected = self.shared_packed(packed);
        let packed = projected.packed.clone();
        let extras = self.with_codebook(extras, &packed, mechanism, mask);
        let [_, seq, width] = packed.dims();
        let by_head = !self.head_groups.is_empty();
        let span = self.causal_span.filter(|_| causal && clusters_a_span(mechanism) && !by_head);
        if let Some(span) = span {
            field("seq", seq, seq <= span, "at most `causal_span`")?;
        }
        if let Some(observer) = &self.observer {
            let of = |packed: Tensor<3>| {
                let mut inputs = split_heads(packed, self.n_heads, mechanism);
                inputs.extras = extras.clone();
                inputs
            };
            let rows = span.unwrap_or(seq);
            let whole = (of(lengthened(packed.clone(), rows)), lengthened_mask(mask, rows));
            let clusters = if by_head { None } else { plan_of_call(&whole.0, mechanism, &whole.1)? };
            let (inputs, mechanism, mask) = (of(packed.clone()), mechanism.clone(), mask.clone());
            observer.show(Observed { inputs, mechanism, mask, grid, span, clusters });
        }
        if by_head {
            return self.attend_by_head(packed, &extras, mask);
        }
        if let Some(span) = span {
            let (packed, mask) = (lengthened(packed, span), lengthened_mask(mask, span));
            let projected = Projected { packed, ..projected };
            let attended = attend_packed(projected, extras, mechanism, &mask, self.strategy)?;
            return Ok(attended.narrow(1, 0, seq));
        }
        let d_model = width / mechanism.projections();
        let v = self.value_filter.as_ref().map(|filter| (filter, packed.clone().narrow(2, width - d_model, d_model)));
        let attended = attend_packed(projected, extras, mechanism, mask, self.strategy)?;
        match v {
            Some((filter, v)) => Ok(attended + filter.forward(v, grid, mask.key.as_ref())?),
            None => Ok(attended),
        }
    }

    /// Whether nothing but the operator reads the projections, which takes heads of keys as they are shared.
    fn reads_shared_heads(&self) -> bool {
        let alone = self.codebook.is_none() && self.observer.is_none() && self.value_filter.is_none();
        alone && self.head_groups.is_empty() && self.causal_span.is_none()
    }

    /// The mechanism for this call: on the input's grid, and, on a device with autodiff, with landmarks drawn anew.
    pub(super) fn called(&self, input: &MhaInput) -> Mechanism {
        let mechanism = self.mechanism.clone();
        let mechanism = mechanism.with_grid(input.grid);
        let device = input.query.device();
        if device.is_autodiff() { redrawn(mechanism, &device) } else { mechanism }
    }

    /// `extras` with the pairs that this call leaves out: the input's, or on a device with autodiff a new draw of the weights.
    fn dropped(&self, input: &MhaInput, extras: Extras) -> Result<Extras> {
        let device = input.query.device();
        Ok(match input.dropout {
            Some(dropout) => extras.with_dropout(dropout),
            None if self.weight_dropout > 0.0 && device.is_autodiff() => {
                extras.with_dropout(Dropout::weights(self.weight_dropout, drawn_seed(&device))?)
            }
            None => extras,
        })
    }

    /// The mechanism's own tensors that this layer has learned.
    pub(super) fn extras(&self) -> Extras {
        let extras =
            self.learned.values().fold(Extras::default(), |extras, (parameter, values)| extras.with(parameter, values));
        let extras = extras.with_precision(self.precision);
        let [d_model, _] = self.output.weight.dims();
        let extras = self.bias.add_to(extras);
        self.landmarks.add_to(extras, &self.mechanism, self.n_heads, d_model / self.n_heads)
    }

    /// One of the projections that lie side by side.
    pub(super) fn project_part(&self, x: Tensor<3>, part: usize) -> Tensor<3> {
        let widths = self.input_widths();
        if let Some(packed) = self.packed() {
            return self.ternary_inputs(packed, &widths).forward_some(x, part..part + 1);
        }
        let (first, width) = (widths[..part].iter().sum(), widths[part]);
        let (weight, bias) = self.input_maps();
        let bias = bias.map(|bias| bias.narrow(0, first, width));
        linear_in(self.precision, x, weight.narrow(1, first, width), bias)
    }

    /// Columns of each input projection.
    pub(super) fn input_widths(&self) -> Vec<usize> {
        let keys = self.key_width();
        match self.mechanism.projections() {
            1 => vec![keys],
            parts => [self.n_heads * self.head_dim()].into_iter().chain(vec![keys; parts - 1]).collect(),
        }
    }

    /// Weights and biases of all input projections side by side.
    pub(super) fn input_maps(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = (self.projection.weight.val(), self.projection.bias.as_ref().map(|bias| bias.val()));
        let Some(maps) = &self.orthogonal else { return (weight, bias) };
        let device = weight.device();
        let maps = maps.weights(&device);
        let bias = bias.map(|bias| Tensor::cat(vec![Tensor::zeros([maps.dims()[1]], &device), bias], 0));
        (Tensor::cat(vec![maps, weight], 1), bias)
    }

    /// `[batch, seq, heads * head_dim]` as `[batch, heads, seq, head_dim]`.
    pub(super) fn heads(&self, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, width] = x.dims();
        x.reshape([batch, seq, width / self.head_dim(), self.head_dim()]).swap_dims(1, 2)
    }
}
