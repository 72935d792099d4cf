//! What a [`super::MultiHeadAttention`] takes and returns: the shapes of Burn's own module.
//!
//! A mask here names what is *absent*, as in Burn: true is padding, or hidden. [`Mask`], the kernels under it and the `key_mask` of files
//! name what is *present*. [`present`] turns the one into the other, and nothing else does.

use burn::tensor::{Bool, DType, Tensor};
use resolvent_kernels::{self as kernels, Dropout};

use super::MultiHeadAttention;
use crate::{Extras, Mask, Mechanism, Parameter, Result, Sequences, mechanism::BiasTensor, ops::SharedClusters};

/// Input of [`super::MultiHeadAttention::forward`], built as that of Burn's own module.
#[derive(Debug, Clone)]
pub struct MhaInput {
    pub(super) query: Tensor<3>,
    /// Keys and values of cross-attention; `None` in self-attention.
    pub(super) memory: Option<(Tensor<3>, Tensor<3>)>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) hidden: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) causal: bool,
    pub(super) grid: Option<[usize; 2]>,
    pub(super) dropout: Option<Dropout>,
    pub(super) sequences: Option<Sequences>,
    pub(super) clusters: Option<SharedClusters>,
}

impl MhaInput {
    /// Self-attention over `tokens [batch, seq, d_model]`.
    pub fn self_attn(tokens: Tensor<3>) -> Self {
        Self {
            query: tokens,
            memory: None,
            mask_pad: None,
            hidden: None,
            mask_attn: None,
            causal: false,
            grid: None,
            dropout: None,
            sequences: None,
            clusters: None,
        }
    }

    /// Attention of `query [batch, seq_q, d_model]` over `key` and `value`, both `[batch, seq_kv, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self { memory: Some((key, value)), ..Self::self_attn(query) }
    }

    /// Says which tokens are padding, `[batch, seq_kv]`, true = *padding*, as in Burn's own module (and unlike [`crate::Mask`], where
    /// true keeps). Padded keys are absent; in self-attention padded tokens are absent as queries too, and their output
    /// is zero.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Hides keys from every query, `[batch, seq_kv]`, true = hidden. Unlike padding, hidden tokens of self-attention still ask.
    pub fn hide_keys(mut self, hidden: Tensor<2, Bool>) -> Self {
        self.hidden = Some(hidden);
        self
    }

    /// Lays the tokens of self-attention on a grid of `[height, width]`, row by row, in place of the grid that the mechanism
    /// is configured with: one module serves pictures of any size. Whether filters are two-dimensional is decided by the
    /// configuration.
    pub fn grid(mut self, grid: [usize; 2]) -> Self {
        self.grid = Some(grid);
        self
    }

    /// Says that `tokens [1, seq, d_model]` of self-attention are several sequences end to end, each of which attends to itself
    /// alone: no padding.
    pub fn sequences(mut self, sequences: Sequences) -> Self {
        self.sequences = Some(sequences);
        self
    }

    /// Leaves pairs of query and key out at random, in place of the module's own dropout of weights. `softmax`, `fna`.
    pub fn dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Uses one plan of clusters with the other layers that are given the same `clusters`, for self-attention along clusters.
    pub fn share_clusters(mut self, clusters: SharedClusters) -> Self {
        self.clusters = Some(clusters);
        self
    }

    /// No token sees a later one.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Hides keys from single queries, `[batch, seq_q, seq_kv]`, true = hidden, as in Burn's own module. The causal mask is recognised,
    /// which takes a look at all of it; [`MhaInput::causal`] needs none. Any other is for mechanisms that form pairs.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    /// Takes the causal mask for what it is; checks that `mechanism` has pairs that any other could hide.
    pub(super) fn recognise_causal(&mut self, mechanism: &Mechanism) -> Result<()> {
        let Some(mask) = self.mask_attn.take() else { return Ok(()) };
        let [batch, queries, keys] = mask.dims();
        let seq_kv = self.memory.as_ref().map_or(&self.query, |(key, _)| key).dims()[1];
        let is_causal = || {
            let hidden = Tensor::<2, Bool>::tril_mask([queries, keys], keys as i64 - queries as i64, &mask.device());
            let other = mask.clone().not_equal(hidden.unsqueeze_dim::<3>(0).expand([batch, queries, keys]));
            !other.any().into_data().iter::<bool>().any(|other| other)
        };
        if [batch, queries] != [self.query.dims()[0], self.query.dims()[1]] || keys != seq_kv {
            let (left_shape, right_shape) = (mask.dims().to_vec(), self.query.dims().to_vec());
            let (op, left, right) = ("multi-head attention", "mask_attn", "query");
            let remedy = "the mask must be [batch, seq_q, seq_kv]";
            return Err(kernels::Error::Shape { op, left, left_shape, right, right_shape, remedy }.into());
        }
        if is_causal() {
            self.causal = true;
            return Ok(());
        }
        self.mask_attn = Some(mask);
        with_hidden_pairs(mechanism)?.validate().map_err(Into::into)
    }

    /// `mechanism` and `extras` with the pairs that a mask hides left out.
    pub(super) fn hide_pairs(&self, mechanism: Mechanism, extras: Extras) -> Result<(Mechanism, Extras)> {
        let Some(mask) = &self.mask_attn else { return Ok((mechanism, extras)) };
        let none = Tensor::<3>::zeros(mask.dims(), (&mask.device(), DType::F32));
        let bias = none.mask_fill(mask.clone(), f32::NEG_INFINITY).unsqueeze_dim::<4>(1);
        Ok((with_hidden_pairs(&mechanism)?, extras.with(Parameter::Bias, bias)))
    }

    /// Which tokens take part.
    pub(super) fn mask(&self) -> Mask {
        let query = self.mask_pad.clone().filter(|_| self.memory.is_none());
        let absent = match (self.mask_pad.clone(), self.hidden.clone()) {
            (Some(padding), Some(hidden)) => Some(padding.bool_or(hidden)),
            (padding, hidden) => padding.or(hidden),
        };
        Mask { causal: self.causal, key: absent.map(present), query: query.map(present) }
    }
}

/// The same mechanism with a bias per batch element, query and key, which leaves pairs out.
fn with_hidden_pairs(mechanism: &Mechanism) -> Result<Mechanism> {
    if mechanism.bias.is_some() {
        let (what, why) = ("mask_attn beside a bias", "add minus infinity to a bias of kind tensor, and call `attend`");
        return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
    }
    Ok(mechanism.clone().bias(BiasTensor::default().with_batch(true).with_heads(false)))
}

/// What takes part, as [`Mask`] says it, where `absent` does not, as this module is told it.
pub(super) fn present(absent: Tensor<2, Bool>) -> Tensor<2, Bool> {
    absent.bool_not()
}

impl MultiHeadAttention {
    /// Refuses cross-attention where something is defined on a sequence's own tokens alone.
    pub(super) fn check_cross(&self, mechanism: &Mechanism) -> Result<()> {
        let why = if mechanism.masks_tokens_once() {
            "queries are keys here: it makes the kernel a Gram matrix"
        } else if self.rotary {
            "rotary positions are those of one sequence"
        } else if self.value_filter.is_some() {
            "the filter over the values adds them to the tokens that they are of"
        } else {
            return Ok(());
        };
        Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what: "cross-attention", why }.into())
    }

    /// Checks that the tensors of `input` fit the projections and each other.
    pub(super) fn check(&self, input: &MhaInput) -> Result<()> {
        let [d_model, width] = self.output.weight.dims();
        let [batch, _, channels] = input.query.dims();
        let error = |left, left_shape: &[usize], right, right_shape: &[usize], remedy| {
            let (left_shape, right_shape) = (left_shape.to_vec(), right_shape.to_vec());
            let op = "multi-head attention";
            Err(kernels::Error::Shape { op, left, left_shape, right, right_shape, remedy }.into())
        };
        if channels != d_model {
            let remedy = "the last axis must be d_model";
            return error("query", &input.query.dims(), "weights", &[d_model, width], remedy);
        }
        let Some((key, value)) = &input.memory else { return Ok(()) };
        if key.dims() != value.dims() || key.dims()[0] != batch {
            return error("key", &key.dims(), "value", &value.dims(), "both must be [batch, seq_kv, d_model]");
        }
        if key.dims()[2] != d_model {
            return error("key", &key.dims(), "weights", &[d_model, width], "the last axis must be d_model");
        }
        Ok(())
    }
}

/// Output of [`super::MultiHeadAttention::forward`]. The weights that Burn's own module also returns are not formed: see
/// [`super::MultiHeadAttention::weights`].
#[derive(Debug, Clone)]
pub struct MhaOutput {
    /// `[batch, seq_q, d_model]`.
    pub context: Tensor<3>,
}
