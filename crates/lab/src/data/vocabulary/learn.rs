//! Vocabularies that are learnt from texts, or made of what needs no learning.

use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer, Vocab},
        wordlevel::{WordLevel, WordLevelTrainer},
    },
    normalizers::utils::Lowercase,
    pre_tokenizers::{
        bert::BertPreTokenizer,
        byte_level::ByteLevel,
        metaspace::{Metaspace, PrependScheme},
        whitespace::WhitespaceSplit,
    },
};

use super::{TextRecipe, Tokens, Vocabulary, failed, special::NAMES as SPECIAL};
use crate::{
    budget::Held,
    data::{Error, Result},
    source,
};

impl Vocabulary {
    /// Learns the vocabulary of `texts`, the same of the same texts; or reads that of the recipe's own tokenizer.
    ///
    /// # Errors
    /// [`Error::Setting`] where nothing can be learnt: `min_count` is more than any token occurs; as [`Vocabulary::of_user`].
    pub fn learn<'a>(texts: impl Iterator<Item = &'a str> + Send, recipe: &TextRecipe) -> Result<Self> {
        if let Some(file) = &recipe.tokenizer {
            return Self::of_user(&source::read(file, &Held::new())?, file);
        }
        let (size, min_count) = (recipe.vocabulary + SPECIAL.len(), recipe.min_count as u64);
        let special = SPECIAL.map(|token| AddedToken::from(token, true)).to_vec();
        let (model, pre_tokenizer, mut trainer): (ModelWrapper, PreTokenizerWrapper, TrainerWrapper) =
            match recipe.tokens {
                Tokens::Words => {
                    let trainer = WordLevelTrainer::builder()
                        .vocab_size(size)
                        .min_frequency(min_count)
                        .show_progress(false)
                        .special_tokens(special)
                        .build();
                    (word_level(std::iter::empty())?.into(), BertPreTokenizer.into(), trainer.map_err(failed)?.into())
                }
                Tokens::Bpe => {
                    let model = BPE::builder().unk_token(SPECIAL[1].into()).fuse_unk(true).build().map_err(failed)?;
                    let trainer = BpeTrainer::builder()
                        .vocab_size(size)
                        .limit_alphabet(recipe.vocabulary)
                        .min_frequency(min_count)
                        .show_progress(false)
                        .special_tokens(special)
                        .build();
                    (model.into(), metaspace().into(), trainer.into())
                }
                Tokens::ByteBpe => {
                    let trainer = BpeTrainer::builder()
                        .vocab_size(size)
                        .min_frequency(min_count)
                        .show_progress(false)
                        .special_tokens(special)
                        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                        .build();
                    (BPE::default().into(), byte_level(true).into(), trainer.into())
                }
                Tokens::Bytes => return Self::of_bytes(recipe.lowercase),
            };
        let mut tokenizer = assembled(model, pre_tokenizer, recipe.lowercase)?;
        match recipe.tokens {
            Tokens::Bpe => tokenizer.with_decoder(Some(DecoderWrapper::from(metaspace()))),
            Tokens::ByteBpe => tokenizer.with_decoder(Some(DecoderWrapper::from(byte_level(true)))),
            Tokens::Words | Tokens::Bytes => &mut tokenizer,
        };
        tokenizer.train(&mut trainer, texts).map_err(failed)?;
        let vocabulary = Self::new(tokenizer)?;
        if vocabulary.len() <= SPECIAL.len() {
            let got = recipe.min_count.to_string();
            return Err(Error::Setting { field: "text.min_count", got, expected: "at most the count of some token" });
        }
        Ok(vocabulary)
    }

    /// The 256 bytes.
    fn of_bytes(lowercase: bool) -> Result<Self> {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        alphabet.sort();
        let tokens = SPECIAL.iter().map(|&token| token.to_owned()).chain(alphabet);
        let model = BPE::builder().vocab_and_merges(tokens.zip(0..).collect::<Vocab>(), vec![]);
        let mut tokenizer = assembled(model.build().map_err(failed)?.into(), byte_level(false).into(), lowercase)?;
        tokenizer.with_decoder(Some(DecoderWrapper::from(byte_level(false))));
        Self::new(tokenizer)
    }

    /// The vocabulary of `words`, which are separated by spaces.
    ///
    /// # Errors
    /// [`Error::Format`] for an impossible list of words.
    pub fn of_words(words: &[String]) -> Result<Self> {
        let all = SPECIAL.iter().map(|&token| token.to_owned()).chain(words.iter().cloned());
        let model = word_level(all)?;
        Self::new(assembled(model.into(), WhitespaceSplit.into(), false)?)
    }
}

fn metaspace() -> Metaspace {
    Metaspace::new('▁', PrependScheme::Always, true)
}

/// Texts as bytes, cut into words before pieces are looked for or not.
fn byte_level(words: bool) -> ByteLevel {
    ByteLevel::new(false, false, words)
}

/// `words` with their places as ids.
fn word_level(words: impl Iterator<Item = String>) -> Result<WordLevel> {
    let vocabulary = words.enumerate().map(|(id, word)| (word, id as u32)).collect();
    WordLevel::builder().vocab(vocabulary).unk_token(SPECIAL[1].into()).build().map_err(failed)
}

fn assembled(model: ModelWrapper, pre_tokenizer: PreTokenizerWrapper, lowercase: bool) -> Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(lowercase.then(|| NormalizerWrapper::from(Lowercase))).map_err(failed)?;
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer.add_special_tokens(SPECIAL.map(|token| AddedToken::from(token, true))).map_err(failed)?;
    Ok(tokenizer)
}
