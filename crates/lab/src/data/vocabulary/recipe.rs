//! How texts become tokens, as recipes have it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a text is cut into.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tokens {
    /// Words, and punctuation marks one by one. A word that was not learnt is unknown.
    #[default]
    Words,
    /// The pieces that occur most, by byte-pair encoding ("Neural Machine Translation of Rare Words with Subword
    /// Units"). Decoding gives the text back.
    Bpe,
    /// As `bpe`, of bytes: nothing is unknown, and every text comes back to the byte ("Language Models are Unsupervised
    /// Multitask Learners", section 2.2).
    ByteBpe,
    /// The 256 bytes; nothing is learnt.
    Bytes,
}

/// How texts become tokens, and how many of them are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextRecipe {
    /// What a text is cut into: `words`, `bpe`, `byte-bpe` or `bytes`. Default `words`.
    pub tokens: Tokens,
    /// Most tokens in the vocabulary, which is learnt from the training texts; the four special ones come on top. Default
    /// 20000, in 1..=1000000, for `byte-bpe` at least 256; of no account for `bytes`.
    pub vocabulary: usize,
    /// Times that a word, or a pair of pieces, must occur. Default 1, >= 1.
    pub min_count: usize,
    /// Lower-case everything. Default true.
    pub lowercase: bool,
    /// Tokens kept of a text; what is longer is cut, and how many were is reported. Default 512, >= 1.
    pub max_tokens: usize,
    /// A `tokenizer.json` of Hugging Face's tokenizers to use as it is: nothing is learnt, and the fields above but `max_tokens` are of
    /// no account. A run keeps it. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
}

impl Default for TextRecipe {
    fn default() -> Self {
        Self {
            tokens: Tokens::Words,
            vocabulary: 20_000,
            min_count: 1,
            lowercase: true,
            max_tokens: 512,
            tokenizer: None,
        }
    }
}

impl TextRecipe {
    /// Whether texts are lower-cased, which a tokenizer of the user's decides by itself.
    pub fn lowers(&self) -> bool {
        self.lowercase && self.tokenizer.is_none()
    }
}
