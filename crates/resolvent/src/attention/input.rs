//! What a [`super::MultiHeadAttention`] takes and returns: the shapes of Burn's own module.

use burn::tensor::{Bool, Tensor};
use resolvent_kernels::Dropout;

use crate::{Sequences, ops::SharedClusters};

/// Input of [`super::MultiHeadAttention::forward`], built as that of Burn's own module.
#[derive(Debug, Clone)]
pub struct MhaInput {
    pub(super) query: Tensor<3>,
    /// Keys and values of cross-attention; `None` in self-attention.
    pub(super) memory: Option<(Tensor<3>, Tensor<3>)>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) hidden: Option<Tensor<2, Bool>>,
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

    /// Marks padding, `[batch, seq_kv]`, true = *padding*, as in Burn's own module (and unlike [`crate::Mask`], where
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

    /// Uses one plan of clusters with the other layers that are given the same `clusters`, for self-attention by `ssa`.
    pub fn share_clusters(mut self, clusters: SharedClusters) -> Self {
        self.clusters = Some(clusters);
        self
    }

    /// No token sees a later one. (Burn's `mask_attn` takes arbitrary masks, which not every mechanism is defined for.)
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }
}

/// Output of [`super::MultiHeadAttention::forward`]. The weights that Burn's own module also returns are never formed.
#[derive(Debug, Clone)]
pub struct MhaOutput {
    /// `[batch, seq_q, d_model]`.
    pub context: Tensor<3>,
}
