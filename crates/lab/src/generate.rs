//! Text continued by a language model.

use std::{ops::ControlFlow, time::Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use resolvent::models::{LanguageModel, Sampling};
use serde::Serialize;

use crate::{
    Error, Result,
    data::{
        Vocabulary,
        rng::{Purpose, stream},
    },
};

/// A language model with its vocabulary.
#[derive(Debug)]
pub struct Generator {
    model: LanguageModel,
    vocabulary: Vocabulary,
    device: Device,
}

/// A text that was continued.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generated {
    /// What follows the prompt.
    pub text: String,
    /// Tokens written.
    pub tokens: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens at the beginning of the prompt that were not read, since the model reads no more than its context.
    pub dropped: usize,
    /// Times that the context was full: its second half was then read anew.
    pub slides: usize,
    /// Seconds until the prompt was read.
    pub prompt_seconds: f64,
    /// Tokens per second after the first, which the pass over the prompt gives; absent where there are no more.
    pub tokens_per_second: Option<f64>,
}

/// The last bytes of a character that is not whole yet; more broken bytes than this will not become one.
const BROKEN: usize = 4;

impl Generator {
    /// `model` on `device`.
    pub(crate) const fn new(model: LanguageModel, vocabulary: Vocabulary, device: Device) -> Self {
        Self { model, vocabulary, device }
    }

    /// The model.
    pub(crate) const fn model(&self) -> &LanguageModel {
        &self.model
    }

    /// Most tokens that the model reads at once.
    pub fn context(&self) -> usize {
        self.model.context
    }

    /// Continues `prompt` by `tokens` tokens. `said` gets the text as it is written, in whole characters, and may end it. The same seed
    /// gives the same text.
    ///
    /// Of a prompt longer than the context the last `context` tokens are read. When the context is full its second half
    /// is read anew and the text goes on from there.
    ///
    /// # Errors
    /// [`Error::Unfit`] for a prompt without text, [`Error::Model`] for impossible `sampling`.
    pub fn generate(
        &self,
        prompt: &str,
        tokens: usize,
        sampling: &Sampling,
        seed: u64,
        said: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let ids = self.vocabulary.encode_whole(prompt)?;
        if ids.is_empty() {
            let problem = "is empty; give at least one character to go on from".into();
            return Err(Error::Unfit { name: "prompt".into(), problem });
        }
        self.go_on(ids, tokens, sampling, seed, said)
    }

    /// [`Generator::generate`] from the tokens `ids`, of which there is at least one.
    pub(crate) fn go_on(
        &self,
        mut ids: Vec<u32>,
        tokens: usize,
        sampling: &Sampling,
        seed: u64,
        said: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated> {
        sampling.validate()?;
        let (prompt_tokens, context) = (ids.len(), self.context());
        let mut rng = stream(Purpose::Generation, seed, 0, 0);
        let (began, mut writer) = (Instant::now(), Writer { generator: self, text: String::new(), waiting: vec![] });
        let (mut state, mut slides) = (self.model.begin(), 0);
        let mut logits = self.read(&ids[prompt_tokens.saturating_sub(context)..], &mut state)?;
        let (read, written) = (began.elapsed().as_secs_f64(), self.vocabulary.written());
        for place in 0..tokens {
            let choices: Vec<f32> = written.iter().map(|&id| logits[id as usize]).collect();
            let id = written[sampling.choose(&choices, rng.random())];
            ids.push(id);
            if writer.write(id, said)?.is_break() || place + 1 == tokens {
                break;
            }
            let unread = if state.len() < context {
                1
            } else {
                (state, slides) = (self.model.begin(), slides + 1);
                context.div_ceil(2)
            };
            logits = self.read(&ids[ids.len() - unread.min(ids.len())..], &mut state)?;
        }
        let text = writer.finish(said)?;
        let written = ids.len() - prompt_tokens;
        let seconds = (began.elapsed().as_secs_f64() - read).max(f64::MIN_POSITIVE);
        Ok(Generated {
            text,
            tokens: written,
            prompt_tokens,
            dropped: prompt_tokens.saturating_sub(context),
            slides,
            prompt_seconds: read,
            tokens_per_second: (written > 1).then(|| (written - 1) as f64 / seconds),
        })
    }

    /// The logits of what follows `ids`.
    fn read(&self, ids: &[u32], state: &mut resolvent::models::LanguageState) -> Result<Vec<f32>> {
        let data = TensorData::new(ids.iter().map(|&id| id as i32).collect::<Vec<_>>(), [1, ids.len()]);
        let logits = self.model.next(Tensor::<2, Int>::from_data(data, &self.device), state)?;
        Ok(logits.into_data().iter().collect())
    }
}

/// Text out of tokens, which may end within a character.
struct Writer<'a> {
    generator: &'a Generator,
    text: String,
    waiting: Vec<u32>,
}

impl Writer<'_> {
    fn write(&mut self, id: u32, said: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<ControlFlow<()>> {
        self.waiting.push(id);
        let text = self.generator.vocabulary.decode(&self.waiting)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.waiting.len() < BROKEN {
            return Ok(ControlFlow::Continue(()));
        }
        self.waiting.clear();
        self.text.push_str(&text);
        Ok(said(&text))
    }

    fn finish(mut self, said: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<String> {
        let text = self.generator.vocabulary.decode(&self.waiting)?;
        if !text.is_empty() {
            // Whether more is wanted does not matter at the end.
            let _ = said(&text);
            self.text.push_str(&text);
        }
        Ok(self.text)
    }
}
