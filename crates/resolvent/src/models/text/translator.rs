//! The encoder-decoder.

use burn::{
    module::{Initializer, Module},
    nn::{Dropout, DropoutConfig, EmbeddingConfig, Linear, LinearConfig},
    tensor::{Bool, Device, Int, Tensor},
};

use super::{TextConfig, TextEncoder, encoder::embed};
use crate::{
    Mechanism, Result,
    attention::{KeyValues, MhaInput, MultiHeadAttention, Past, check_row_local, field},
    models::{Block, LayerNorm, NormOrder, Visible, block::residual},
};

/// A block of the decoder: causal self-attention, attention over the encoder's tokens, MLP.
#[derive(Module, Debug)]
pub struct DecoderBlock {
    /// Self-attention and MLP.
    pub block: Block,
    /// Before the attention over the encoder's tokens, or after it.
    pub cross_norm: LayerNorm,
    /// The attention over the encoder's tokens.
    pub cross: MultiHeadAttention,
}

/// What a block keeps of the tokens so far, and of the source.
#[derive(Debug, Clone)]
struct BlockState {
    past: Option<Past>,
    source: KeyValues,
}

/// The state of a translation that is being written, `[batch]` sentences side by side.
#[derive(Debug, Clone)]
pub struct DecoderState {
    blocks: Vec<BlockState>,
    padding: Option<Tensor<2, Bool>>,
    len: usize,
}

impl DecoderState {
    /// Tokens written so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is written yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The sentences at `rows` of the batch, which may repeat: how a beam search goes on with its best.
    pub fn select(self, rows: Tensor<1, Int>) -> Self {
        let select = |state: BlockState| BlockState {
            past: state.past.map(|past| past.select(rows.clone())),
            source: state.source.select(rows.clone()),
        };
        Self {
            blocks: self.blocks.into_iter().map(select).collect(),
            padding: self.padding.map(|padding| padding.int().select(0, rows.clone()).equal_scalar(1)),
            len: self.len,
        }
    }
}

impl DecoderBlock {
    /// All target tokens at once: `tokens [batch, seq_q, dim]`, `source [batch, seq_kv, dim]`.
    fn forward(
        &self,
        tokens: Tensor<3>,
        visible: &Visible,
        source: &Tensor<3>,
        padding: &Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>> {
        let tokens = self.block.attend(tokens, visible)?;
        let tokens = residual(self.block.order, &self.cross_norm, tokens, |tokens| {
            let mut input = MhaInput::new(tokens, source.clone(), source.clone());
            if let Some(padding) = padding {
                input = input.mask_pad(padding.clone());
            }
            Ok(self.cross.try_forward(input)?.context)
        })?;
        self.block.mlp(tokens)
    }

    /// One further token of each sentence, `[batch, 1, dim]`.
    fn step(&self, token: Tensor<3>, state: &mut BlockState, padding: &Option<Tensor<2, Bool>>) -> Result<Tensor<3>> {
        let token = self.block.attend_next(token, &mut state.past)?;
        let token = residual(self.block.order, &self.cross_norm, token, |token| {
            self.cross.attend_over(token, &state.source, padding.clone())
        })?;
        self.block.mlp(token)
    }
}

/// Encoder-decoder transformer over one vocabulary for both languages: the embeddings are shared, and scaled by the root of the
/// width. "Attention Is All You Need". Built by [`TextConfig::try_init_translator`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use resolvent::{Mechanism, models::TextConfig};
/// let device = Device::flex();
/// let fna = Mechanism::preset("fna")?;
/// let model = TextConfig::new(50, fna.clone()).try_init_translator(&fna, &fna, &device)?;
/// let source = Tensor::<2, Int>::from_ints([[5, 7, 9]], &device);
/// let written = Tensor::<2, Int>::from_ints([[2, 11]], &device);
/// assert_eq!(model.try_forward(source, None, written, None)?.dims(), [1, 2, 50]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Translator {
    /// Reads the source; its embeddings are the decoder's too.
    pub encoder: TextEncoder,
    /// Writes the target.
    pub blocks: Vec<DecoderBlock>,
    /// After the last block, where blocks normalise what they read.
    pub norm: Option<LayerNorm>,
    /// `[dim, vocabulary]`.
    pub head: Linear,
    /// Dropout on the embedded tokens.
    pub dropout: Dropout,
}

impl Translator {
    /// The model for running alone, without the real values of ternary weights: see
    /// [`MultiHeadAttention::into_packed`](crate::attention::MultiHeadAttention::into_packed).
    ///
    /// # Errors
    /// As there.
    pub fn into_packed(mut self) -> Result<Self> {
        self.encoder = self.encoder.into_packed()?;
        for block in &mut self.blocks {
            (block.block, block.cross) = (block.block.clone().into_packed()?, block.cross.clone().into_packed()?);
        }
        Ok(self)
    }

    /// The logits of the token after each of `target [batch, seq_q]`, given what stands before it: `[batch, seq_q, vocabulary]`. The
    /// paddings, `[batch, seq]`, are true where there is no token.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn try_forward(
        &self,
        source: Tensor<2, Int>,
        source_padding: Option<Tensor<2, Bool>>,
        target: Tensor<2, Int>,
        target_padding: Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>> {
        let source = self.encode(source, source_padding.clone())?;
        let visible = Visible { padding: target_padding, causal: true, ..Visible::default() };
        let places: Vec<usize> = (0..target.dims()[1]).collect();
        let mut x = embed(&self.encoder.embedding, &self.dropout, target, &places, self.scale());
        for block in &self.blocks {
            x = block.forward(x, &visible, &source, &source_padding)?;
        }
        Ok(self.logits(x))
    }

    /// The state before the first token of a translation of `source [batch, seq]`.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn begin(&self, source: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>) -> Result<DecoderState> {
        let source = self.encode(source, padding.clone())?;
        let state = |block: &DecoderBlock| BlockState { past: None, source: block.cross.key_values(source.clone()) };
        Ok(DecoderState { blocks: self.blocks.iter().map(state).collect(), padding, len: 0 })
    }

    /// Writes one token of each sentence, `[batch]`, and returns the logits of the next, `[batch, vocabulary]`. Costs O(N) for
    /// N tokens so far: keys and values are kept.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn step(&self, token: Tensor<1, Int>, state: &mut DecoderState) -> Result<Tensor<2>> {
        let mut x = embed(&self.encoder.embedding, &self.dropout, token.unsqueeze_dim(1), &[state.len], self.scale());
        let DecoderState { blocks, padding, len } = state;
        for (block, state) in self.blocks.iter().zip(blocks) {
            x = block.step(x, state, padding)?;
        }
        *len += 1;
        Ok(self.logits(x).squeeze_dim(1))
    }

    fn encode(&self, source: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>) -> Result<Tensor<3>> {
        self.encoder.forward_scaled(source, &Visible { padding, ..Default::default() }, self.scale())
    }

    fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        self.head.forward(self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(x)))
    }

    /// What embeddings are multiplied by.
    fn scale(&self) -> f64 {
        let [_, dim] = self.encoder.embedding.weight.dims();
        (dim as f64).sqrt()
    }
}

impl TextConfig {
    /// Builds a translator on `device`: the configuration's mechanism in the encoder, `decoder` (causal) in the decoder's
    /// self-attention, `cross` from the decoder to the encoder.
    ///
    /// # Errors
    /// As [`TextConfig::try_init`], and [`check_row_local`] of the decoder's mechanisms.
    pub fn try_init_translator(&self, decoder: &Mechanism, cross: &Mechanism, device: &Device) -> Result<Translator> {
        let (dim, vocabulary) = (self.dim, self.vocabulary);
        let encoder = self.try_init(device)?;
        for (name, mechanism) in [("decoder", decoder), ("cross", cross)] {
            check_row_local(mechanism)?;
            self.attention(mechanism, 1).validate()?;
            field(name, "causal", !mechanism.causal, "without `causal`, which follows from its place")?;
        }
        let blocks = (1..=self.depth).map(|layer| {
            Ok(DecoderBlock {
                block: self.block(decoder, layer, device)?,
                cross_norm: self.layer_norm(device),
                cross: self.attention(cross, layer).try_init(device)?,
            })
        });
        let blocks = blocks.collect::<Result<_>>()?;
        let std = (dim as f64).powf(-0.5);
        let embedding = EmbeddingConfig::new(vocabulary, dim);
        let embedding = embedding.with_initializer(Initializer::Normal { mean: 0.0, std }).init(device);
        Ok(Translator {
            encoder: TextEncoder { embedding, ..encoder },
            blocks,
            norm: (self.norm == NormOrder::Pre).then(|| self.layer_norm(device)),
            head: LinearConfig::new(dim, vocabulary).init(device),
            dropout: DropoutConfig::new(self.dropout).init(),
        })
    }
}
