//! The encoder of texts, and the classifier on it.

use burn::{
    module::Module,
    nn::{Dropout, Embedding, Linear},
    tensor::{Bool, Int, Tensor},
};

use super::positions::sinusoids;
use crate::{
    Result, Sequences,
    attention::field,
    models::{Block, LayerNorm, Visible},
};

/// Token embeddings, sinusoidal positions, blocks. Built by [`super::TextConfig`].
#[derive(Module, Debug)]
pub struct TextEncoder {
    /// `[vocabulary, dim]`.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// After the last block, where blocks normalise what they read.
    pub norm: Option<LayerNorm>,
    /// Dropout on the embedded tokens.
    pub dropout: Dropout,
    /// Blocks in turn that use one plan of clusters.
    pub plan_layers: usize,
}

impl TextEncoder {
    /// The encoder for running alone: see [`TextClassifier::into_packed`].
    pub(super) fn into_packed(mut self) -> Result<Self> {
        self.blocks = self.blocks.into_iter().map(Block::into_packed).collect::<Result<_>>()?;
        Ok(self)
    }

    /// `tokens [batch, seq]` as `[batch, seq, dim]`. `padding [batch, seq]` is true where there is no token: what stands there
    /// changes nothing, and what comes out there means nothing.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn forward(&self, tokens: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>) -> Result<Tensor<3>> {
        self.forward_scaled(tokens, &Visible { padding, ..Default::default() }, 1.0)
    }

    /// As [`TextEncoder::forward`], with the embeddings times `scale`.
    pub(super) fn forward_scaled(&self, tokens: Tensor<2, Int>, visible: &Visible, scale: f64) -> Result<Tensor<3>> {
        let [_, seq] = tokens.dims();
        let positions: Vec<usize> = match &visible.sequences {
            Some(sequences) => sequences.positions().collect(),
            None => (0..seq).collect(),
        };
        field("sequences", positions.len(), positions.len() == seq, "as many tokens as there are")?;
        let mut x = embed(&self.embedding, &self.dropout, tokens, &positions, scale);
        let mut visible = visible.clone();
        for (index, block) in self.blocks.iter().enumerate() {
            visible = visible.sharing(index, self.plan_layers);
            x = block.forward_visible(x, &visible)?;
        }
        Ok(self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(x)))
    }
}

/// `tokens [batch, seq]`, which have these `positions` in their texts, with them: `[batch, seq, dim]`.
pub(super) fn embed(
    embedding: &Embedding,
    dropout: &Dropout,
    tokens: Tensor<2, Int>,
    positions: &[usize],
    scale: f64,
) -> Tensor<3> {
    let x = embedding.forward(tokens);
    let x = if scale == 1.0 { x } else { x * scale };
    let [_, _, dim] = x.dims();
    let positions = sinusoids(positions, dim, &x.device());
    dropout.forward(x + positions)
}

/// Class logits of a text: an encoder, the mean over the text's tokens, a linear layer. Built by
/// [`super::TextConfig::try_init_classifier`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use resolvent::{Mechanism, models::TextConfig};
/// let device = Device::flex();
/// let model = TextConfig::new(100, Mechanism::preset("fna")?).try_init_classifier(2, &device)?;
/// let tokens = Tensor::<2, Int>::from_ints([[5, 7, 9], [3, 0, 0]], &device);
/// let padding = tokens.clone().equal_scalar(0);
/// assert_eq!(model.forward(tokens, Some(padding)).dims(), [2, 2]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct TextClassifier {
    /// Reads the text.
    pub encoder: TextEncoder,
    /// `[dim, classes]`.
    pub head: Linear,
}

impl TextClassifier {
    /// The model for running alone, without the real values of ternary weights: see
    /// [`MultiHeadAttention::into_packed`](crate::attention::MultiHeadAttention::into_packed).
    ///
    /// # Errors
    /// As there.
    pub fn into_packed(mut self) -> Result<Self> {
        self.encoder = self.encoder.into_packed()?;
        Ok(self)
    }

    /// Class logits `[batch, classes]` of `tokens [batch, seq]`; `padding [batch, seq]` is true where there is no token.
    ///
    /// # Panics
    /// Where [`TextClassifier::try_forward`] returns an error, with its message.
    pub fn forward(&self, tokens: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>) -> Tensor<2> {
        self.try_forward(tokens, padding).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`TextClassifier::forward`], with errors as values.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn try_forward(&self, tokens: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>) -> Result<Tensor<2>> {
        self.forward_visible(tokens, &Visible { padding, ..Default::default() })
    }

    /// Class logits `[texts, classes]` of texts end to end, `tokens [1, seq]`: as [`TextClassifier::try_forward`] of each, without padding.
    ///
    /// # Errors
    /// [`crate::Error::Field`] where `texts` and tokens differ in number; whatever the attention refuses.
    pub fn forward_sequences(&self, tokens: Tensor<2, Int>, texts: &Sequences) -> Result<Tensor<2>> {
        let visible = Visible { sequences: Some(texts.clone()), ..Visible::default() };
        let encoded: Tensor<2> = self.encoder.forward_scaled(tokens, &visible, 1.0)?.squeeze_dim(0);
        let of_text = |n: usize| encoded.clone().slice([texts.range(n)]).mean_dim(0);
        Ok(self.head.forward(Tensor::cat((0..texts.len()).map(of_text).collect(), 0)))
    }

    /// As [`TextClassifier::try_forward`], with tokens hidden from the attention of others; the head still reads the mean of all.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn forward_visible(&self, tokens: Tensor<2, Int>, visible: &Visible) -> Result<Tensor<2>> {
        let encoded = self.encoder.forward_scaled(tokens, visible, 1.0)?;
        Ok(self.head.forward(mean_of_tokens(encoded, visible.padding.clone())))
    }
}

/// The mean of `x [batch, seq, dim]` over the tokens that are no padding, `[batch, dim]`.
pub(super) fn mean_of_tokens(x: Tensor<3>, padding: Option<Tensor<2, Bool>>) -> Tensor<2> {
    let Some(padding) = padding else { return x.mean_dim(1).squeeze_dim(1) };
    let count = padding.clone().bool_not().float().sum_dim(1).clamp_min(1.0);
    let shape = x.shape();
    let kept = x.mask_fill(padding.unsqueeze_dim::<3>(2).expand(shape), 0.0);
    kept.sum_dim(1).squeeze_dim::<2>(1) / count
}
