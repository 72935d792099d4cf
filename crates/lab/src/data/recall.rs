//! Generated associative recall with many queries (MQAR): which value stood behind this key?
//!
//! "Zoology: Measuring and Improving Recall in Efficient Language Models", section 3.2, by the procedure of its published code: pairs of a
//! key and a value, then every key once more, each at a place that a power law draws; the answer to such a query is the value of its
//! key. Keys come from the lower half of the vocabulary without 0, values from the upper half, and neither comes twice in a sequence.

use std::path::Path;

use rand::{RngExt, seq::index::sample};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::{
    Result,
    rng::{Purpose, stream},
    settings::{check, check_parts, generated},
};
use crate::{budget::Held, named};

/// What stands where there is neither a pair nor a query, and as the answer where nothing is asked.
const BLANK: u32 = 0;
const MOST_SEQUENCES: usize = 10_000_000;

/// Sequences of tokens with questions in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecallDataset {
    /// The data set's kind, `mqar`.
    pub name: String,
    /// Tokens are below it.
    pub vocabulary: usize,
    /// Tokens of every sequence.
    pub tokens: usize,
    /// What is learnt from.
    pub train: RecallSplit,
    /// What is looked at after each epoch.
    pub validation: Option<RecallSplit>,
    /// What accuracy is reported on.
    pub test: RecallSplit,
}

/// Sequences, and what is asked in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecallSplit {
    /// `[sequences, tokens]`.
    pub ids: Vec<u32>,
    /// `[sequences, tokens]`: the answer to the token that is a query, 0 elsewhere.
    pub answers: Vec<u32>,
}

impl RecallDataset {
    /// Hash of everything that training and testing see.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for extent in [self.vocabulary, self.tokens] {
            hash.update(&(extent as u64).to_le_bytes());
        }
        for split in [Some(&self.train), self.validation.as_ref(), Some(&self.test)].into_iter().flatten() {
            hash.update(&(split.ids.len() as u64).to_le_bytes());
            split.ids.iter().chain(&split.answers).for_each(|id| hash.update(&id.to_le_bytes()));
        }
        hash.digest()
    }
}

named! {
    /// What stands between the queries.
    #[derive(Default)]
    pub enum Filler {
        /// The token 0, as in the paper's figure 2.
        #[default]
        Blank = "blank",
        /// Tokens drawn from the whole vocabulary, which may be keys.
        Random = "random",
    }
}

generated! {
    "mqar",
    /// Settings of the generated data set. The same settings give the same sequences, whatever the thread count, and a longer set begins with
    /// the shorter one.
    pub struct Mqar {
        /// Seed of every sequence. Default 0.
        seed: u64 = 0,
        /// Sequences to learn from. Default 100000, at least 1.
        train: usize = 100_000,
        /// Sequences to watch while learning. Default 3000, in [`Mqar::parse`] as many as `test`; 0 for none.
        val: usize = 3_000,
        /// Sequences to test on. Default 3000, at least 1.
        test: usize = 3_000,
        /// Tokens of a sequence. Default 64, even, at most 65536; the paper has 64 to 512.
        tokens: usize = 64,
        /// Pairs of a key and a value, and queries. Default 4, at least 1, at most a quarter of `tokens`; the paper has 4 to 64.
        pairs: usize = 4,
        /// Tokens that there are. Default 8192, more than `tokens`, at most 1000000.
        vocabulary: usize = 8192,
        /// The `n`-th place for a query after the pairs is drawn with a probability in proportion to `n^(power - 1)`: the least power
        /// asks soon, 1 anywhere alike. Default 0.01, in (0, 1].
        power: f64 = 0.01,
        /// What stands between the queries. Default blank.
        fill: Filler = Filler::Blank,
    }
}

impl Mqar {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](super::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        let Self { tokens, pairs, vocabulary, power, .. } = *self;
        check_parts(self.train, self.val, self.test, MOST_SEQUENCES, "1 to 10000000, `val` perhaps 0")?;
        check("tokens", tokens, tokens.is_multiple_of(2) && tokens <= 1 << 16, "even and at most 65536")?;
        let expected = "at least 1 and at most a quarter of `tokens`";
        check("pairs", pairs, (1..=tokens / 4).contains(&pairs), expected)?;
        let expected = "more than `tokens` and at most 1000000";
        check("vocabulary", vocabulary, vocabulary > tokens && vocabulary <= 1_000_000, expected)?;
        check("power", power, power > 0.0 && power <= 1.0, "above 0 and at most 1")
    }

    /// Draws all parts.
    ///
    /// # Errors
    /// Those of [`Mqar::validate`]; [`Error::Budget`](super::Error::Budget) where they are more than the memory that data may take.
    pub fn generate(&self) -> Result<RecallDataset> {
        self.validate()?;
        let sequences = (self.train + self.val + self.test) as u64;
        Held::new().add(Path::new("mqar"), sequences * (self.tokens * 2 * size_of::<u32>()) as u64)?;
        Ok(RecallDataset {
            name: "mqar".into(),
            vocabulary: self.vocabulary,
            tokens: self.tokens,
            train: self.split(0, self.train),
            validation: (self.val > 0).then(|| self.split(2, self.val)),
            test: self.split(1, self.test),
        })
    }

    /// `part` keeps the random numbers of the splits apart.
    fn split(&self, part: u64, count: usize) -> RecallSplit {
        let mut ids = vec![BLANK; count * self.tokens];
        let mut answers = ids.clone();
        let weights: Vec<f64> =
            (1..=self.tokens / 2 - self.pairs).map(|place| (place as f64).powf(self.power - 1.0)).collect();
        ids.par_chunks_mut(self.tokens).zip(answers.par_chunks_mut(self.tokens)).enumerate().for_each(
            |(index, (ids, answers))| {
                let mut rng = stream(Purpose::Recall, self.seed, part, index as u64);
                self.sequence(&weights, &mut rng, ids, answers);
            },
        );
        RecallSplit { ids, answers }
    }

    /// Draws one sequence; `weights` are those of the places for queries.
    fn sequence(&self, weights: &[f64], rng: &mut ChaCha8Rng, ids: &mut [u32], answers: &mut [u32]) {
        let (half, pairs) = (self.vocabulary / 2, self.pairs);
        let keys = sample(rng, half - 1, pairs).into_iter().map(|key| key as u32 + 1);
        let keys: Vec<u32> = keys.collect();
        let values = sample(rng, self.vocabulary - half, pairs).into_iter().map(|value| (value + half) as u32);
        let values: Vec<u32> = values.collect();
        if self.fill == Filler::Random {
            ids.fill_with(|| rng.random_range(0..self.vocabulary as u32));
        }
        // The place whose exponential waiting time is over first is drawn first: one after the other without putting back.
        let mut places: Vec<(f64, usize)> = weights
            .iter()
            .enumerate()
            .map(|(place, weight)| (-(1.0 - rng.random::<f64>()).ln() / weight, place))
            .collect();
        places.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        for (pair, ((key, value), (_, place))) in keys.into_iter().zip(values).zip(places).enumerate() {
            (ids[2 * pair], ids[2 * pair + 1]) = (key, value);
            let query = 2 * (pairs + place);
            (ids[query], answers[query]) = (key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> RecallDataset {
        Mqar::parse(text).unwrap().generate().unwrap()
    }

    #[test]
    fn every_key_is_asked_for_once_and_answered_by_its_value() {
        for fill in ["blank", "random"] {
            let data = parse(&format!("train=50,test=5,tokens=32,pairs=6,vocabulary=90,fill={fill}"));
            for (ids, answers) in data.train.ids.chunks(32).zip(data.train.answers.chunks(32)) {
                let pairs: Vec<(u32, u32)> = ids[..12].chunks(2).map(|pair| (pair[0], pair[1])).collect();
                assert!(pairs.iter().all(|&(key, value)| (1..45).contains(&key) && (45..90).contains(&value)));
                let mut asked: Vec<(u32, u32)> = ids
                    .iter()
                    .zip(answers)
                    .filter(|(_, answer)| **answer > 0)
                    .map(|(key, value)| (*key, *value))
                    .collect();
                asked.sort_unstable();
                let mut known = pairs.clone();
                known.sort_unstable();
                known.dedup_by_key(|pair| pair.0);
                assert_eq!((known.len(), asked), (6, known), "six keys, each asked for once");
                assert!(answers[..12].iter().all(|&answer| answer == 0));
                let others = ids[12..].iter().zip(&answers[12..]).filter(|(_, answer)| **answer == 0);
                assert_eq!(others.map(|(id, _)| id).all(|&id| id == 0), fill == "blank");
            }
        }
    }

    #[test]
    fn the_power_says_how_soon_queries_come() {
        let mean = |power: f64| {
            let data = parse(&format!("train=2000,test=1,tokens=64,pairs=2,vocabulary=100,power={power}"));
            let asked = data.train.answers.iter().enumerate().filter(|(_, answer)| **answer > 0);
            let places: Vec<f64> = asked.map(|(at, _)| ((at % 64 - 4) / 2) as f64).collect();
            places.iter().sum::<f64>() / places.len() as f64
        };
        // 30 places: alike their mean is 14.5.
        let (soon, alike) = (mean(0.01), mean(1.0));
        assert!((14.0..15.0).contains(&alike) && soon < 9.0, "{soon}, {alike}");
    }

    #[test]
    fn seed_and_position_alone_decide() {
        let settings = Mqar::parse("seed=3,train=20,test=4,tokens=16,pairs=2,vocabulary=40").unwrap();
        let data = settings.generate().unwrap();
        let longer = Mqar { train: 30, ..settings.clone() }.generate().unwrap();
        assert_eq!(data.train.ids, longer.train.ids[..20 * 16]);
        assert_eq!(data.test, longer.test);
        assert_ne!(data.validation.as_ref(), Some(&data.test));
        assert_ne!(data.train.ids[..4 * 16], data.test.ids[..]);
        assert_ne!(Mqar { seed: 4, ..settings.clone() }.generate().unwrap().train, data.train);
        assert_ne!(Mqar { seed: 4, ..settings.clone() }.generate().unwrap().fingerprint(), data.fingerprint());
        assert_eq!(Mqar::parse(&settings.to_string()).unwrap(), settings);
    }

    #[test]
    fn settings_outside_their_range_are_named() {
        for (settings, field) in [
            ("tokens=63", "tokens"),
            ("pairs=17", "pairs"),
            ("pairs=0", "pairs"),
            ("vocabulary=64", "vocabulary"),
            ("power=0", "power"),
            ("power=nan", "power"),
            ("train=0", "train"),
            ("fill=zero", "fill"),
            ("size=3", "mqar"),
            ("seed=1,seed=2", "mqar"),
        ] {
            let message = Mqar::parse(settings).unwrap_err().to_string();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
    }
}
