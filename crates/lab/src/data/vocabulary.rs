//! From texts to token ids and back, by Hugging Face's tokenizers: whole words, pieces of words by byte-pair encoding, or bytes.

mod learn;
mod parts;
mod recipe;
mod special;

use std::{collections::BTreeSet, path::Path};

use rayon::prelude::*;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, Tokenizer};
use xxhash_rust::xxh3::xxh3_64;

pub use self::recipe::{TextRecipe, Tokens};
use self::special::{NAMES as SPECIAL, Special};
use super::{Encoded, Error, Result, encoded::Marks};
use crate::budget::{Passing, TREE};

/// Most tokens that a tokenizer may have.
const MOST_TOKENS: usize = 1 << 20;

/// A vocabulary and the rules that apply it.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    special: Special,
    /// Ids are below it.
    len: usize,
}

/// Which bytes of a text a token is: the first, and the one after the last.
pub type Span = (usize, usize);

impl Vocabulary {
    fn new(mut tokenizer: Tokenizer) -> Result<Self> {
        let special = Special::of(&mut tokenizer).map_err(failed)?;
        let len = tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        // A text that spells a special token does not contain it.
        tokenizer.set_encode_special_tokens(true);
        Ok(Self { tokenizer, special, len })
    }

    /// The id of whatever was not learnt.
    pub fn unknown(&self) -> u32 {
        self.special.unknown
    }

    /// The id of a sentence's beginning.
    pub fn begin(&self) -> u32 {
        self.special.begin
    }

    /// The id of a sentence's end.
    pub fn end(&self) -> u32 {
        self.special.end
    }

    /// The ids that stand for text, in their order.
    pub fn written(&self) -> Vec<u32> {
        (0..self.len as u32).filter(|id| !self.special.all.contains(id)).collect()
    }

    /// Reads what [`Vocabulary::to_bytes`] wrote to `file`.
    ///
    /// # Errors
    /// [`Error::Format`] naming the file, also for a tokenizer of parts that are never written; [`Error::Budget`].
    pub fn from_bytes(bytes: &[u8], file: &Path) -> Result<Self> {
        let _tree = Passing::take(file, TREE.saturating_mul(bytes.len() as u64))?;
        let refuse = |problem: String| Error::Format { path: file.into(), problem };
        parts::check(bytes).map_err(|problem| refuse(format!("is no tokenizer of this program ({problem})")))?;
        let tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| refuse(format!("is no tokenizer ({e})")))?;
        let vocabulary = Self::new(tokenizer)?;
        let ids: BTreeSet<u32> = vocabulary.tokenizer.get_vocab(true).into_values().collect();
        if ids.len() != vocabulary.len || ids.len() > MOST_TOKENS {
            return Err(refuse("has tokens whose ids are not 0, 1, 2 and so on, below 1048576; restore it".into()));
        }
        Ok(vocabulary)
    }

    /// Reads the tokenizer in `file`, a `tokenizer.json` of any parts. Its special tokens are found by their usual names, and those
    /// that it lacks are added; what it adds around a text, cuts or pads is left out.
    ///
    /// # Errors
    /// [`Error::Format`] naming the file; [`Error::Budget`].
    pub fn of_user(bytes: &[u8], file: &Path) -> Result<Self> {
        let _tree = Passing::take(file, TREE.saturating_mul(bytes.len() as u64))?;
        let refuse = |problem: String| Error::Format { path: file.into(), problem };
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| {
            let e = e.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            refuse(format!("is no tokenizer.json of Hugging Face's tokenizers ({e}); save it with `save_pretrained`"))
        })?;
        tokenizer.with_truncation(None).map_err(failed)?;
        tokenizer.with_padding(None).with_post_processor(None::<PostProcessorWrapper>);
        let vocabulary = Self::new(tokenizer)?;
        if vocabulary.len > MOST_TOKENS {
            return Err(refuse(format!(
                "has ids up to {}, at most 1048575 are read; is it a tokenizer?",
                vocabulary.len - 1
            )));
        }
        Ok(vocabulary)
    }

    /// The JSON of Hugging Face's tokenizers.
    ///
    /// # Errors
    /// [`Error::Format`] when it cannot be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        Ok(self.tokenizer.to_string(false).map_err(failed)?.into_bytes())
    }

    /// Number of ids, those of special tokens included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hash of all tokens in the order of their ids.
    pub fn fingerprint(&self) -> u64 {
        let mut words: Vec<_> = self.tokenizer.get_vocab(true).into_iter().collect();
        words.sort_by(|a, b| (a.1, &a.0).cmp(&(b.1, &b.0)));
        let lines: String = words.into_iter().map(|(word, _)| word + "\n").collect();
        xxh3_64(lines.as_bytes())
    }

    /// The first `max_tokens` tokens of each text. A text without any, such as one of spaces, is a single unknown token.
    ///
    /// # Errors
    /// [`Error::Format`] when the tokenizer fails.
    pub fn encode(&self, texts: &[String], max_tokens: usize) -> Result<Encoded> {
        let ids = texts.par_iter().map(|text| {
            let encoding = self.tokenizer.encode_fast(text.as_str(), false).map_err(failed)?;
            let ids: Vec<u32> = encoding.get_ids().iter().take(max_tokens).copied().collect();
            Ok((if ids.is_empty() { vec![self.unknown()] } else { ids }, encoding.len()))
        });
        let marks = Marks { unknown: self.unknown(), space: self.tokenizer.token_to_id("▁") };
        Ok(Encoded::new(ids.collect::<Result<Vec<_>>>()?, marks))
    }

    /// All of `text` as it stands, line breaks included. Lines are cut into tokens each by itself.
    ///
    /// # Errors
    /// [`Error::Format`] when the tokenizer fails.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let lines: Vec<&str> = text.split_inclusive('\n').flat_map(pieces).collect();
        let ids = lines.par_iter().map(|line| {
            let encoding = self.tokenizer.encode_fast(*line, false).map_err(failed)?;
            Ok(encoding.get_ids().to_vec())
        });
        Ok(ids.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Whether texts are taken as they are, and not in small letters or without accents. Composed characters (NFC) are the same text.
    pub fn keeps_text(&self) -> bool {
        let normalizer = self.tokenizer.get_normalizer();
        matches!(normalizer, None | Some(NormalizerWrapper::NFC(_) | NormalizerWrapper::ByteLevel(_)))
    }

    /// Bytes of every token, in the order of the ids, where tokens are made of bytes, so that every text comes back; `None` elsewhere.
    pub fn bytes_of_tokens(&self) -> Option<Vec<usize>> {
        let of_bytes = matches!(self.tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let added = self.tokenizer.get_added_tokens_decoder();
        let bytes = |id| match (self.special.all.contains(&id), added.get(&id)) {
            (true, _) => 0,
            (false, Some(token)) => token.content.len(),
            // A byte is written as one character.
            (false, None) => self.tokenizer.id_to_token(id).map_or(0, |token| token.chars().count()),
        };
        of_bytes.then(|| (0..self.len as u32).map(bytes).collect())
    }

    /// Number of special tokens of a vocabulary that is learnt, whose ids come first.
    pub const fn special() -> usize {
        SPECIAL.len()
    }

    /// The first `max_tokens` tokens of a text, as [`Vocabulary::encode`] finds them, and which bytes of it each is.
    ///
    /// # Errors
    /// [`Error::Format`] when the tokenizer fails.
    pub fn spans(&self, text: &str, max_tokens: usize) -> Result<(Vec<u32>, Vec<Span>)> {
        let encoding = self.tokenizer.encode(text, false).map_err(failed)?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets()).take(max_tokens);
        let found: (Vec<u32>, Vec<_>) = tokens.map(|(&id, &span)| (id, span)).unzip();
        Ok(if found.0.is_empty() { (vec![self.unknown()], vec![(0, text.len())]) } else { found })
    }

    /// The text of `ids`, special tokens left out. Words are joined by spaces, punctuation marks set as is usual.
    ///
    /// # Errors
    /// [`Error::Format`] when the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let text = self.tokenizer.decode(ids, true).map_err(failed)?;
        Ok(if self.tokenizer.get_decoder().is_some() { text } else { set_punctuation(&text) })
    }
}

/// Bytes that are cut into tokens at once, at most: a text may be a single line.
const PIECE: usize = 1 << 16;

/// `line` in pieces of whole characters.
fn pieces(line: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = line;
    while rest.len() > PIECE {
        let (piece, tail) = rest.split_at(rest.floor_char_boundary(PIECE));
        pieces.push(piece);
        rest = tail;
    }
    pieces.push(rest);
    pieces
}

/// Closes the gaps that cutting at punctuation left: `a dog , black .` becomes `a dog, black.`
fn set_punctuation(text: &str) -> String {
    let mut set = text.to_owned();
    for mark in [".", ",", "!", "?", ";", ":", ")", "'"] {
        set = set.replace(&format!(" {mark}"), mark);
    }
    for mark in ["(", "'"] {
        set = set.replace(&format!("{mark} "), mark);
    }
    set.replace(" - ", "-")
}

fn failed(e: impl std::fmt::Display) -> Error {
    Error::Format { path: "vocabulary".into(), problem: format!("cannot be made or applied: {e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 4] = ["A dog runs.", "A black dog, a white dog!", "Two dogs (small) run", "a cat"];

    fn learn(recipe: TextRecipe) -> Vocabulary {
        Vocabulary::learn(TEXTS.into_iter(), &recipe).unwrap()
    }

    fn ids(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
        vocabulary.encode(&[text.to_owned()], 100).unwrap().ids(0).to_vec()
    }

    #[test]
    fn words_are_learnt_by_count_and_others_are_unknown() {
        let vocabulary = learn(TextRecipe { vocabulary: 2, ..Default::default() });
        assert_eq!(vocabulary.len(), 6, "four special tokens");
        // `a` occurs four times, `dog` three times.
        assert_eq!(ids(&vocabulary, "a DOG cat"), [4, 5, vocabulary.unknown()]);
        assert_eq!(ids(&vocabulary, "  "), [vocabulary.unknown()], "no text is without tokens");
        let all = learn(TextRecipe::default());
        assert_eq!(all.decode(&ids(&all, "a black dog, (small).")).unwrap(), "a black dog, (small).");
        let is_special = |id: &u32| *id != all.unknown() && all.special.all.contains(id);
        assert!(!ids(&all, "[PAD] [EOS]").iter().any(is_special));
    }

    #[test]
    fn spans_are_the_text_of_the_tokens() {
        for tokens in [Tokens::Words, Tokens::Bpe] {
            let vocabulary = learn(TextRecipe { tokens, vocabulary: 60, ..Default::default() });
            let text = "A  Ünknown white DOG!";
            let (found, spans) = vocabulary.spans(text, 100).unwrap();
            assert_eq!(found, ids(&vocabulary, text));
            let parts: String = spans.iter().map(|&(from, to)| text[from..to].trim()).collect();
            assert_eq!(parts, "AÜnknownwhiteDOG!");
            assert_eq!(vocabulary.spans(text, 2).unwrap().1.len(), 2);
            assert_eq!(vocabulary.spans(" ", 2).unwrap(), (ids(&vocabulary, " "), vec![(0, 1)]));
        }
    }

    #[test]
    fn pieces_give_the_text_back() {
        let vocabulary =
            learn(TextRecipe { tokens: Tokens::Bpe, vocabulary: 60, lowercase: false, ..Default::default() });
        for text in TEXTS {
            let ids = ids(&vocabulary, text);
            assert!(!ids.contains(&vocabulary.unknown()));
            assert_eq!(vocabulary.decode(&ids).unwrap(), text);
        }
        assert!(ids(&vocabulary, "dog").len() < 4, "pieces, not letters");
        assert!(ids(&vocabulary, "dög").contains(&vocabulary.unknown()));
        let foreign = vocabulary.encode(&["Две собаки.".into(), "two dogs".into()], 100).unwrap();
        assert!(foreign.is_mostly_unknown(0) && !foreign.is_mostly_unknown(1), "{:?}", foreign.ids(0));
        for size in [1, 5, 60] {
            let pieces = learn(TextRecipe { tokens: Tokens::Bpe, vocabulary: size, ..Default::default() }).len();
            assert!(pieces <= size + Vocabulary::special(), "{pieces} for {size}");
        }
    }

    #[test]
    fn it_survives_being_written_and_learns_the_same_again() {
        for tokens in [Tokens::Words, Tokens::Bpe] {
            let recipe = TextRecipe { tokens, vocabulary: 50, ..Default::default() };
            let vocabulary = learn(recipe.clone());
            let again = Vocabulary::from_bytes(&vocabulary.to_bytes().unwrap(), Path::new("f")).unwrap();
            assert_eq!(again.fingerprint(), vocabulary.fingerprint());
            assert_eq!(learn(recipe).fingerprint(), vocabulary.fingerprint());
            let text = "Two [PAD] black cats.";
            assert_eq!(ids(&again, text), ids(&vocabulary, text));
        }
        assert!(Vocabulary::from_bytes(b"{}", Path::new("f.json")).unwrap_err().to_string().contains("f.json"));
    }

    #[test]
    fn a_count_that_nothing_reaches_is_an_error() {
        let recipe = TextRecipe { min_count: 50, ..Default::default() };
        assert!(Vocabulary::learn(TEXTS.into_iter(), &recipe).unwrap_err().to_string().contains("min_count"));
    }
}
