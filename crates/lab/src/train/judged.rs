//! Predicted tokens against those that should have been said.

use burn::tensor::{Bool, Int, Tensor, activation::log_softmax};

/// Log-probabilities of a batch under teacher forcing, with what should have been said.
pub(super) struct Judged {
    /// `[tokens, vocabulary]`.
    log_probabilities: Tensor<2>,
    /// `[tokens]`.
    answers: Tensor<1, Int>,
    /// `[tokens]`: 1 for a token, 0 for padding.
    weights: Tensor<1>,
    smoothing: f64,
}

impl Judged {
    /// Of `logits [batch, seq, vocabulary]` and `answers [batch, seq]`; `padding [batch, seq]` is true where there is no token. The share
    /// `smoothing` of the target is spread over the vocabulary.
    pub fn new(logits: Tensor<3>, answers: Tensor<2, Int>, padding: Option<Tensor<2, Bool>>, smoothing: f64) -> Self {
        let [batch, seq, vocabulary] = logits.dims();
        let (rows, device) = (batch * seq, logits.device());
        let weights = padding.map_or_else(|| Tensor::ones([rows], &device), |p| p.bool_not().float().reshape([rows]));
        let log_probabilities = log_softmax(logits.reshape([rows, vocabulary]), 1);
        Self { log_probabilities, answers: answers.reshape([rows]), weights, smoothing }
    }

    /// Mean cross-entropy over the tokens. `[1]`.
    pub fn loss(self) -> Tensor<1> {
        let kept = 1.0 - self.smoothing;
        let said = self.log_probabilities.clone().gather(1, self.answers.unsqueeze_dim(1)).squeeze_dim::<1>(1) * kept;
        let score = if self.smoothing > 0.0 {
            said + self.log_probabilities.mean_dim(1).squeeze_dim::<1>(1) * self.smoothing
        } else {
            said
        };
        -(score * self.weights.clone()).sum() / self.weights.sum()
    }

    /// Tokens whose probability is the highest.
    pub fn right(&self) -> f64 {
        let likeliest = self.log_probabilities.clone().argmax(1).squeeze_dim::<1>(1);
        let hits = likeliest.equal(self.answers.clone()).float() * self.weights.clone();
        f64::from(hits.sum().into_scalar::<f32>())
    }
}
