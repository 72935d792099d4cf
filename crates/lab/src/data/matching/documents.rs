//! Generated documents: are both about the same topic?
//!
//! A topic has six words, drawn letter by letter. A document is made of words of its topic and of others that are drawn anew, letter by letter
//! as well, so that a letter says little and a word that comes again says all. One document alone says nothing of the label.

use std::path::Path;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::{MatchDataset, MatchSplit, dataset};
use crate::{
    budget::{Held, text_bytes},
    data::{
        Result,
        rng::{Purpose, stream},
        settings::{check, check_parts, generated},
    },
};

/// Letters of the words of a topic, and of the others.
const LENGTHS: [usize; 6] = [3, 3, 4, 4, 5, 5];
/// Letters that there are, from a on.
const LETTERS: u8 = 24;
const MOST_PAIRS: usize = 10_000_000;
const MOST_TOPICS: usize = 1000;

generated! {
    "documents",
    /// Settings of the generated data set. The same settings give the same documents, whatever the thread count, and a longer set begins with
    /// the shorter one. Half the pairs of every part are related.
    pub struct Documents {
        /// Seed of every topic and document. Default 0.
        seed: u64 = 0,
        /// Pairs to learn from. Default 8000, at least 1.
        train: usize = 8000,
        /// Pairs to watch while learning. Default 500, in [`Documents::parse`] as many as `test`; 0 for none.
        val: usize = 500,
        /// Pairs to test on, of the same topics. Default 500, at least 1.
        test: usize = 500,
        /// Topics that there are. Default 8, in 2..=1000.
        topics: usize = 8,
        /// Bytes of a document at most; it has at least half as many. Default 128, in 32..=1048576.
        bytes: usize = 128,
        /// Share of the words that are those of the topic. Default 0.5, in (0, 1].
        share: f64 = 0.5,
    }
}

/// The words of a topic.
type Topic = [String; LENGTHS.len()];

impl Documents {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::data::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        check_parts(self.train, self.val, self.test, MOST_PAIRS, "1 to 10000000, `val` perhaps 0")?;
        check("topics", self.topics, (2..=MOST_TOPICS).contains(&self.topics), "in 2..=1000")?;
        check("bytes", self.bytes, (32..=super::MOST_BYTES).contains(&self.bytes), "in 32..=1048576")?;
        check("share", self.share, self.share > 0.0 && self.share <= 1.0, "above 0 and at most 1")
    }

    /// Draws all parts.
    ///
    /// # Errors
    /// Those of [`Documents::validate`]; [`Error::Budget`](crate::data::Error::Budget) where they are more than the memory that data may take.
    pub fn generate(&self) -> Result<MatchDataset> {
        self.validate()?;
        let document = self.bytes as u64 + text_bytes("");
        Held::new().add(Path::new("documents"), 2 * document * (self.train + self.val + self.test) as u64)?;
        let topics: Vec<Topic> = (0..self.topics)
            .map(|topic| topical(&mut stream(Purpose::Documents, self.seed, 3, topic as u64)))
            .collect();
        let validation = (self.val > 0).then(|| self.split(2, self.val, &topics));
        let (train, test) = (self.split(0, self.train, &topics), self.split(1, self.test, &topics));
        Ok(dataset("documents", train, validation, test))
    }

    /// `part` keeps the random numbers of the splits apart.
    fn split(&self, part: u64, count: usize, topics: &[Topic]) -> MatchSplit {
        let pairs = (0..count).into_par_iter().map(|index| {
            let mut rng = stream(Purpose::Documents, self.seed, part, index as u64);
            let (first, label) = (rng.random_range(0..self.topics), index % 2);
            // A related one is of the same topic, another of one of the others.
            let second = if label == 1 { first } else { (first + rng.random_range(1..self.topics)) % self.topics };
            let [first, second] = [first, second].map(|topic| self.document(&topics[topic], &mut rng));
            ((first, second), label as u32)
        });
        let ((first, second), labels) = pairs.unzip();
        MatchSplit { texts: [first, second], labels }
    }

    /// Words, separated by spaces.
    fn document(&self, topic: &Topic, rng: &mut ChaCha8Rng) -> String {
        let length = rng.random_range(self.bytes / 2..=self.bytes);
        let mut text = String::with_capacity(length);
        loop {
            let own = rng.random_bool(self.share);
            let place = rng.random_range(0..LENGTHS.len());
            let word = if own { topic[place].clone() } else { word(rng, LENGTHS[place]) };
            if !text.is_empty() {
                if text.len() + 1 + word.len() > length {
                    return text;
                }
                text.push(' ');
            }
            text += &word;
        }
    }
}

/// Six different words.
fn topical(rng: &mut ChaCha8Rng) -> Topic {
    loop {
        let words = LENGTHS.map(|length| word(rng, length));
        if (1..words.len()).all(|place| !words[..place].contains(&words[place])) {
            return words;
        }
    }
}

fn word(rng: &mut ChaCha8Rng, length: usize) -> String {
    (0..length).map(|_| char::from(b'a' + rng.random_range(0..LETTERS))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn parse(text: &str) -> MatchDataset {
        Documents::parse(text).unwrap().generate().unwrap()
    }

    /// How often each word occurs.
    fn counts(text: &str) -> HashMap<&str, usize> {
        let mut counts = HashMap::new();
        text.split(' ').for_each(|word| *counts.entry(word).or_default() += 1);
        counts
    }

    #[test]
    fn related_documents_share_their_words_and_others_do_not() {
        let data = parse("train=60,test=2,topics=5,bytes=6000,share=0.5");
        let [first, second] = &data.train.texts;
        for ((first, second), label) in first.iter().zip(second).zip(&data.train.labels) {
            for text in [first, second] {
                assert!((2990..=6000).contains(&text.len()), "{}", text.len());
                assert!(text.split(' ').all(|word| (3..=5).contains(&word.len())));
            }
            // Six words of a topic make half of a document, of three hundred words at least: nothing else comes so often.
            let often = |text| -> Vec<String> {
                let mut words: Vec<_> = counts(text).into_iter().filter(|(_, count)| *count > 20).collect();
                words.sort_unstable();
                words.into_iter().map(|(word, _)| word.to_owned()).collect()
            };
            let (first, second) = (often(first), often(second));
            assert_eq!((first.len(), second.len()), (6, 6), "{first:?} {second:?}");
            assert_eq!(first == second, *label == 1);
        }
        assert_eq!(data.train.labels.iter().sum::<u32>(), 30);
    }

    #[test]
    fn seed_and_position_alone_decide() {
        let settings = Documents::parse("seed=3,train=20,test=4,bytes=64,topics=3").unwrap();
        let data = settings.generate().unwrap();
        let longer = Documents { train: 30, ..settings.clone() }.generate().unwrap();
        assert_eq!(data.train.texts[0], longer.train.texts[0][..20]);
        assert_eq!(data.test, longer.test);
        assert_eq!(data.validation.as_ref().unwrap().len(), 4, "as many as there are to test on");
        assert_ne!(data.validation.as_ref(), Some(&data.test));
        assert_ne!(data.train.texts[0][..4], data.test.texts[0][..]);
        assert_ne!(Documents { seed: 4, ..settings.clone() }.generate().unwrap().train, data.train);
        assert_eq!(Documents::parse(&settings.to_string()).unwrap(), settings);
    }

    #[test]
    fn settings_outside_their_range_are_named() {
        for (settings, field) in [
            ("train=0", "train"),
            ("val=99999999", "val"),
            ("topics=1", "topics"),
            ("bytes=8", "bytes"),
            ("bytes=x", "bytes"),
            ("share=0", "share"),
            ("share=nan", "share"),
            ("size=3", "documents"),
            ("seed=1,seed=2", "documents"),
        ] {
            let message = Documents::parse(settings).unwrap_err().to_string();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
    }
}
