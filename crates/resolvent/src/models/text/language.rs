//! The language model: a decoder alone.

use burn::{
    module::{Module, Param},
    nn::{Dropout, Embedding},
    tensor::{Int, Tensor, TensorData},
};

use crate::{
    Result, Sequences,
    attention::{Past, field},
    models::{Block, LayerNorm, Visible},
};

/// Decoder-only transformer over tokens, in the shape of GPT-2 ("Language Models are Unsupervised Multitask Learners"): learned
/// positions (or rotary ones), pre-norm blocks of causal attention, the embedding as output layer. Every block has a mechanism
/// of its own. Built by [`super::LanguageConfig`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use resolvent::{Mechanism, models::LanguageConfig};
/// let device = Device::flex();
/// let layers = vec![Mechanism::preset("ssa")?, Mechanism::preset("softmax")?];
/// let model = LanguageConfig::new(50, 16, layers).try_init(&device)?;
/// let tokens = Tensor::<2, Int>::from_ints([[5, 7, 9]], &device);
/// let logits = model.try_forward(tokens.clone())?;
/// assert_eq!(logits.dims(), [1, 3, 50]);
/// let mut state = model.begin();
/// assert_eq!(model.next(tokens, &mut state)?.dims(), [1, 50]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct LanguageModel {
    /// `[vocabulary, dim]`; transposed, it makes the logits.
    pub embedding: Embedding,
    /// `[context, dim]`; `None` where positions are rotary.
    pub positions: Option<Param<Tensor<2>>>,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// After the last block, where blocks normalise what they read.
    pub norm: Option<LayerNorm>,
    /// Dropout on the embedded tokens.
    pub dropout: Dropout,
    /// Most tokens that it reads at once.
    pub context: usize,
}

/// What a [`LanguageModel`] keeps of the texts so far, `[batch]` of them side by side.
#[derive(Debug, Clone)]
pub struct LanguageState {
    blocks: Vec<Option<Past>>,
    len: usize,
}

impl LanguageState {
    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl LanguageModel {
    /// The logits of the token after each of `tokens [batch, seq]`, given those up to it: `[batch, seq, vocabulary]`.
    ///
    /// # Errors
    /// [`crate::Error::Field`] for more tokens than the context; whatever the attention refuses.
    pub fn try_forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        let x = self.embed(tokens, 0)?;
        self.forward_visible(x, &Visible { causal: true, ..Visible::default() })
    }

    /// As [`LanguageModel::try_forward`], for texts end to end in `tokens [1, seq]`, each read as if it were alone, without padding.
    ///
    /// # Errors
    /// As there; [`crate::Error::Field`] where `texts` and tokens differ in number.
    pub fn forward_sequences(&self, tokens: Tensor<2, Int>, texts: &Sequences) -> Result<Tensor<3>> {
        let [batch, seq] = tokens.dims();
        let fits = [batch, seq] == [1, texts.tokens()];
        let got = format!("{} tokens beside [{batch}, {seq}]", texts.tokens());
        field("sequences", got, fits, "as many tokens as there are, in a batch of one")?;
        let longest = (0..texts.len()).map(|n| texts.range(n).len()).max().unwrap_or(0);
        field("tokens", longest, longest <= self.context, "at most the model's context")?;
        let x = self.embedding.forward(tokens);
        let x = match &self.positions {
            Some(table) => {
                let places: Vec<i64> = texts.positions().map(|place| place as i64).collect();
                let places = Tensor::from_data(TensorData::new(places, [seq]), &x.device());
                x + table.val().select(0, places).unsqueeze()
            }
            None => x,
        };
        let visible = Visible { causal: true, sequences: Some(texts.clone()), ..Visible::default() };
        self.forward_visible(self.dropout.forward(x), &visible)
    }

    /// The logits of [`LanguageModel::try_forward`] at some places alone, `[places, vocabulary]`: `places` count through `tokens [batch, seq]`
    /// row by row, and one beyond them panics, as of `Tensor::select`. Where the vocabulary is large, the output layer is most of the work.
    ///
    /// # Errors
    /// As [`LanguageModel::try_forward`].
    pub fn forward_at(&self, tokens: Tensor<2, Int>, places: Tensor<1, Int>) -> Result<Tensor<2>> {
        let x = self.hidden(self.embed(tokens, 0)?, &Visible { causal: true, ..Visible::default() })?;
        let [batch, seq, dim] = x.dims();
        Ok(self.logits(x.reshape([1, batch * seq, dim]).select(1, places)).squeeze_dim(0))
    }

    /// The logits of embedded tokens.
    fn forward_visible(&self, x: Tensor<3>, visible: &Visible) -> Result<Tensor<3>> {
        Ok(self.logits(self.hidden(x, visible)?))
    }

    /// What the last block makes of embedded tokens.
    fn hidden(&self, x: Tensor<3>, visible: &Visible) -> Result<Tensor<3>> {
        self.blocks.iter().try_fold(x, |x, block| block.forward_visible(x, visible))
    }

    /// The state before the first token.
    pub fn begin(&self) -> LanguageState {
        LanguageState { blocks: vec![None; self.blocks.len()], len: 0 }
    }

    /// Reads the next `tokens [batch, seq]` of each text, at least one, and returns the logits of what follows,
    /// `[batch, vocabulary]`: the last that [`LanguageModel::try_forward`] gives on the whole. No past token is computed again but by
    /// the operators that [`crate::attention::MultiHeadAttention::attend_next`] names.
    ///
    /// # Errors
    /// As [`LanguageModel::try_forward`], the tokens so far counted. The state is then to be dropped.
    pub fn next(&self, tokens: Tensor<2, Int>, state: &mut LanguageState) -> Result<Tensor<2>> {
        let [_, seq] = tokens.dims();
        field("tokens", seq, seq >= 1, "at least 1")?;
        let mut x = self.embed(tokens, state.len)?;
        for (block, past) in self.blocks.iter().zip(&mut state.blocks) {
            x = block.forward_next(x, past)?;
        }
        state.len += seq;
        Ok(self.logits(x.narrow(1, seq - 1, 1)).squeeze_dim(1))
    }

    /// The model for running alone, without the real values of ternary weights: see
    /// [`MultiHeadAttention::into_packed`](crate::attention::MultiHeadAttention::into_packed).
    ///
    /// # Errors
    /// As there.
    pub fn into_packed(mut self) -> Result<Self> {
        self.blocks = self.blocks.into_iter().map(Block::into_packed).collect::<Result<_>>()?;
        Ok(self)
    }

    fn embed(&self, tokens: Tensor<2, Int>, first: usize) -> Result<Tensor<3>> {
        let [_, seq] = tokens.dims();
        field("tokens", first + seq, first + seq <= self.context, "at most the model's context")?;
        let x = self.embedding.forward(tokens);
        Ok(self.dropout.forward(match &self.positions {
            Some(positions) => x + positions.val().narrow(0, first, seq).unsqueeze(),
            None => x,
        }))
    }

    fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
        let ([batch, seq, dim], [vocabulary, _]) = (x.dims(), self.embedding.weight.dims());
        x.reshape([batch * seq, dim]).matmul(self.embedding.weight.val().transpose()).reshape([batch, seq, vocabulary])
    }
}
