//! The classifier of pairs of texts.

use burn::{
    module::Module,
    nn::Linear,
    tensor::{Bool, Int, Tensor, activation::relu},
};

use super::{TextEncoder, encoder::mean_of_tokens};
use crate::Result;

/// Class logits of a pair of texts: one encoder reads either text by itself, and an MLP reads both means over the tokens, their product and
/// their difference. Built by [`super::TextConfig::try_init_matcher`]. The task of "Long Range Arena", section 2.2.3, with the head that
/// "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention" and others compare with.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use resolvent::{Mechanism, models::TextConfig};
/// let device = Device::flex();
/// let model = TextConfig::new(100, Mechanism::preset("softmax")?).try_init_matcher(2, &device)?;
/// let first = Tensor::<2, Int>::from_ints([[5, 7, 9], [3, 4, 1]], &device);
/// let second = Tensor::<2, Int>::from_ints([[5, 0], [3, 4]], &device);
/// let padding = second.clone().equal_scalar(0);
/// assert_eq!(model.forward((first, None), (second, Some(padding))).dims(), [2, 2]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct TextMatcher {
    /// Reads either text.
    pub encoder: TextEncoder,
    /// `[4 dim, mlp_dim]`, before a ReLU.
    pub hidden: Linear,
    /// `[mlp_dim, classes]`.
    pub head: Linear,
}

/// Tokens `[texts, seq]`, and which places are padding, `[texts, seq]`, if any is.
type Text = (Tensor<2, Int>, Option<Tensor<2, Bool>>);

impl TextMatcher {
    /// Class logits `[pairs, classes]` of `first [pairs, seq_1]` and `second [pairs, seq_2]`, each with its padding, true where there is no
    /// token.
    ///
    /// # Panics
    /// Where [`TextMatcher::try_forward`] returns an error, with its message.
    pub fn forward(&self, first: Text, second: Text) -> Tensor<2> {
        self.try_forward(first, second).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`TextMatcher::forward`], with errors as values.
    ///
    /// # Errors
    /// Whatever the attention refuses.
    pub fn try_forward(&self, first: Text, second: Text) -> Result<Tensor<2>> {
        let (first, second) = (self.pooled(first)?, self.pooled(second)?);
        let (product, difference) = (first.clone() * second.clone(), first.clone() - second.clone());
        let both = Tensor::cat(vec![first, second, product, difference], 1);
        Ok(self.head.forward(relu(self.hidden.forward(both))))
    }

    /// The mean of a text's encoded tokens, `[texts, dim]`.
    fn pooled(&self, (tokens, padding): Text) -> Result<Tensor<2>> {
        Ok(mean_of_tokens(self.encoder.forward(tokens, padding.clone())?, padding))
    }
}
