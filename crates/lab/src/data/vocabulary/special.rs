//! Tokens that stand for no text.

use std::collections::BTreeSet;

use tokenizers::{AddedToken, Tokenizer};

/// The special tokens of vocabularies that are learnt here, in the order of their ids.
pub(super) const NAMES: [&str; 4] = ["[PAD]", "[UNK]", "[BOS]", "[EOS]"];

/// What others call them, the likeliest first.
const ALIASES: [&[&str]; 4] = [
    &["[PAD]", "<pad>", "<|pad|>", "<|padding|>"],
    &["[UNK]", "<unk>", "<|unk|>"],
    &["[BOS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]"],
    &["[EOS]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"],
];

/// The ids of special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Special {
    pub unknown: u32,
    pub begin: u32,
    pub end: u32,
    /// All of them, padding and what else the tokenizer calls special included.
    pub all: BTreeSet<u32>,
}

impl Special {
    /// Those of `tokenizer`, by the names that are usual; one that it lacks is added to it.
    pub(super) fn of(tokenizer: &mut Tokenizer) -> Result<Self, tokenizers::Error> {
        let mut ids = [0; 4];
        for ((id, name), aliases) in ids.iter_mut().zip(NAMES).zip(ALIASES) {
            let found = aliases.iter().find_map(|alias| tokenizer.token_to_id(alias));
            *id = match found {
                Some(found) => found,
                None => {
                    tokenizer.add_special_tokens([AddedToken::from(name, true)])?;
                    tokenizer.token_to_id(name).ok_or("a special token cannot be added")?
                }
            };
        }
        let named = tokenizer.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let all = named.map(|(id, _)| id).chain(ids).collect();
        let [_, unknown, begin, end] = ids;
        Ok(Self { unknown, begin, end, all })
    }
}
