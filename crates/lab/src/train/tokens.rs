//! The texts of a run as tokens: batches of nearly the same length, and what a model's vocabulary knows of them.

use burn::tensor::{Bool, Bytes, Device, Int, Tensor, TensorData};

use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, parts},
    data::{self, BatchPlan, Batches, Encoded, Padded, Vocabulary, by_length},
};

/// Tokens per batch of an evaluation, padding included. Accuracy does not depend on it, but of mechanisms that draw by the place in a batch.
pub(crate) const BATCH_TOKENS: usize = 16_384;

/// Share of unknown tokens above which a data set is not one that the vocabulary was made for.
const MOST_UNKNOWN: f64 = 0.5;

/// Token ids `[batch, seq]`, and where there is padding, if anywhere.
pub type TokenInputs = (Tensor<2, Int>, Option<Tensor<2, Bool>>);

/// Examples of `N` texts each, as tokens of one vocabulary.
#[derive(Debug)]
pub(super) struct Sides<const N: usize> {
    /// The first text of every example, then the second of every example, and so on.
    pub texts: [Encoded; N],
    /// Tokens of the longest text of each example.
    pub lengths: Vec<usize>,
}

impl<const N: usize> Sides<N> {
    /// Of texts that are as many for every place in an example, of each the first `max_tokens` tokens.
    pub fn new(texts: [&Vec<String>; N], vocabulary: &Vocabulary, max_tokens: usize) -> Result<Self> {
        let texts = texts.map(|texts| vocabulary.encode(texts, max_tokens));
        let texts = texts.into_iter().collect::<data::Result<Vec<_>>>()?;
        let texts: [Encoded; N] = texts.try_into().expect("one for each");
        let longest = |index| texts.iter().map(|texts| texts.tokens(index)).max().unwrap_or_default();
        let lengths = (0..texts[0].len()).map(longest).collect();
        Ok(Self { texts, lengths })
    }

    /// The texts of the examples with these numbers.
    pub fn padded(&self, indices: &[usize]) -> [Padded; N] {
        let of = |texts: &Encoded| Padded::new(&indices.iter().map(|&index| texts.ids(index)).collect::<Vec<_>>());
        self.texts.each_ref().map(of)
    }

    /// Texts that were longer than what was kept of them.
    pub fn cut(&self) -> usize {
        self.texts.iter().map(Encoded::cut).sum()
    }

    /// What the user should know of how the texts, `called` so, were read.
    pub fn notes<S: AsRef<str>>(&self, called: [S; N], max_tokens: usize) -> Vec<String> {
        self.texts.iter().zip(called).filter_map(|(texts, what)| texts.note(what.as_ref(), max_tokens)).collect()
    }

    /// The training batches of `epoch` from `first` on, made by `make` of the numbers of their examples.
    pub fn epoch<B: Send + 'static>(
        &self,
        recipe: &Recipe,
        epoch: u64,
        first: usize,
        make: impl Fn(&[usize]) -> B + Send + 'static,
    ) -> Batches<B> {
        let batches = by_length(&self.lengths, &BatchPlan::training(recipe.schedule.batch_size, recipe.seed), epoch);
        Batches::new(first..batches.len(), move |position| Ok(make(&batches[position])))
    }
}

/// Checks that the vocabulary of `checkpoint` knows most of the `texts` of `data`, unless it was learnt from that very data.
///
/// # Errors
/// [`Error::Unfit`].
pub(super) fn check_known<const N: usize>(
    checkpoint: &Checkpoint,
    data: &DataIdentity,
    texts: &Sides<N>,
) -> Result<()> {
    let unknown = texts.texts.iter().map(Encoded::unknown).fold(0.0, f64::max);
    if unknown <= MOST_UNKNOWN || checkpoint.state.data == *data {
        return Ok(());
    }
    let problem = format!(
        "{:.0} % of its tokens are not in the model's vocabulary; evaluate it on texts like those it was trained on",
        unknown * 100.0
    );
    Err(Error::Unfit { name: data.name.clone(), problem })
}

/// The part of a checkpoint that is the vocabulary.
pub(super) fn vocabulary_part(vocabulary: &Vocabulary) -> Result<Vec<(&'static str, Bytes)>> {
    Ok(vec![(parts::VOCABULARY, Bytes::from_bytes_vec(vocabulary.to_bytes()?))])
}

/// A batch of texts as tensors.
pub(crate) fn token_inputs(tokens: Padded, device: &Device) -> TokenInputs {
    let shape = [tokens.lengths.len(), tokens.width];
    let padding = tokens.padding().map(|padding| Tensor::from_data(TensorData::new(padding, shape), device));
    (Tensor::from_data(TensorData::new(tokens.ids, shape), device), padding)
}
