//! A classifier of texts whose attention loses tokens.

use burn::tensor::{Bool, Device, Tensor, TensorData};
use rand::RngExt;
use resolvent::{
    Dropout,
    models::{TextClassifier, Visible},
};

use super::{Part, Texts, device_of, token_inputs};
use crate::{
    Result,
    data::{
        Padded,
        rng::{Purpose, stream},
    },
    evaluation::Evaluation,
    named,
};

named! {
    /// What an attention loses at random. "Fractional neural attention for efficient multiscale sequence processing", figure 4,
    /// whose caption says tokens where its text says pairs.
    pub enum Lost {
        /// Keys, each once per text and for all of its queries.
        Tokens = "tokens",
        /// Pairs of a query and a key, each by itself in every head.
        Pairs = "pairs",
    }
}

/// An attention that loses each token or pair with the probability `share`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ablation {
    pub lost: Lost,
    pub share: f64,
    pub seed: u64,
}

impl Ablation {
    /// Hides what the `texts` with these numbers lose.
    fn hide(self, texts: &[usize], tokens: &Padded, visible: &mut Visible, device: &Device) -> Result<()> {
        match self.lost {
            Lost::Tokens => visible.hidden = Some(self.hidden(texts, tokens, device)),
            // A batch draws by the places of its texts: the first of them makes it another draw than the next batch's.
            Lost::Pairs => {
                let seed = stream(Purpose::Ablation, self.seed, texts[0] as u64, 1).random();
                visible.dropout = Some(Dropout::pairs(self.share, seed)?);
            }
        }
        Ok(())
    }

    /// `[batch, seq]`, true = lost.
    fn hidden(self, texts: &[usize], tokens: &Padded, device: &Device) -> Tensor<2, Bool> {
        let mut hidden = Vec::with_capacity(tokens.ids.len());
        for &text in texts {
            let mut rng = stream(Purpose::Ablation, self.seed, text as u64, 0);
            hidden.extend((0..tokens.width).map(|_| rng.random_bool(self.share)));
        }
        Tensor::from_data(TensorData::new(hidden, [texts.len(), tokens.width]), device)
    }
}

impl Texts {
    /// The judgement of `model` on the test part, with tokens left out of its attention.
    pub(crate) fn ablated(&self, model: &TextClassifier, ablation: Ablation) -> Result<Evaluation> {
        let device = device_of(model);
        let answer = |texts: &[usize], [tokens]: [Padded; 1]| {
            let mut visible = Visible::default();
            ablation.hide(texts, &tokens, &mut visible, &device)?;
            let (tokens, padding) = token_inputs(tokens, &device);
            Ok(model.forward_visible(tokens, &Visible { padding, ..visible })?)
        };
        Ok(self.judge_by(Part::Test, answer)?.finish())
    }
}
