//! Generated expressions of nested lists, as in "Long Range Arena": what is the value of `[MAX 4 [MIN 8 2 ] 1 ]`?
//!
//! The grammar is that of the published generator: below the greatest depth a node is a list with probability 1/4 and
//! else a digit; a list has 2 to 10 items and one of four operators (minimum, maximum, median rounded down, sum modulo 10);
//! expressions count if their number of tokens lies strictly between the two bounds. The redundant brackets around every
//! pair, which its readers strip, are not written.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::{TextDataset, TextSplit};
use crate::data::{
    Result,
    rng::{Purpose, stream},
    settings::{check, check_parts, generated},
};

/// Every token, digits first.
const WORDS: [&str; 15] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "[MIN", "[MAX", "[MED", "[SM", "]"];
const DIGITS: usize = 10;
const OPERATORS: usize = 4;
const CLOSE: u8 = 14;
/// One in so many nodes above the greatest depth is a list.
const LIST_SHARE: f64 = 0.25;
const MOST_DEPTH: usize = 10;
const MOST_ITEMS: usize = 10;
const MOST_EXPRESSIONS: usize = 10_000_000;

generated! {
    "listops",
    /// Settings of the generated data set. The same settings give the same expressions, whatever the thread count, and a longer
    /// set begins with the shorter one.
    pub struct Listops {
        /// Seed of every expression. Default 0.
        seed: u64 = 0,
        /// Expressions to learn from. Default 96000, at least 1.
        train: usize = 96_000,
        /// Expressions to watch while learning. Default 2000, in [`Listops::parse`] as many as `test`; 0 for none.
        val: usize = 2_000,
        /// Expressions to test on. Default 2000, at least 1.
        test: usize = 2_000,
        /// Expressions have more tokens than this. Default 500.
        min: usize = 500,
        /// Expressions have fewer tokens than this. Default 2000, at least `min` + 5, at most 100000.
        max: usize = 2_000,
    }
}

impl Listops {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::data::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        check_parts(self.train, self.val, self.test, MOST_EXPRESSIONS, "1 to 10000000, `val` perhaps 0")?;
        // Longer expressions are so rare that finding one would take for ever.
        check("min", self.min, self.min <= 5_000, "at most 5000")?;
        let fits = (self.min + 5..=100_000).contains(&self.max);
        check("max", self.max, fits, "at least `min` + 5 and at most 100000")
    }

    /// Draws all parts.
    ///
    /// # Errors
    /// Those of [`Listops::validate`].
    pub fn generate(&self) -> Result<TextDataset> {
        self.validate()?;
        Ok(TextDataset {
            name: "listops".into(),
            classes: WORDS[..DIGITS].iter().map(|&word| word.into()).collect(),
            train: self.split(0, self.train),
            validation: (self.val > 0).then(|| self.split(2, self.val)),
            test: self.split(1, self.test),
            words: Some(WORDS.iter().map(|&word| word.into()).collect()),
        })
    }

    /// `part` keeps the random numbers of the splits apart.
    fn split(&self, part: u64, count: usize) -> TextSplit {
        let expressions = (0..count)
            .into_par_iter()
            .map(|index| self.expression(&mut stream(Purpose::Listops, self.seed, part, index as u64)));
        let (texts, labels) = expressions.unzip();
        TextSplit { texts: [texts], labels }
    }

    /// The first expression of an admissible length, and its value.
    fn expression(&self, rng: &mut ChaCha8Rng) -> (String, u32) {
        loop {
            let mut tree = Tree { tokens: Vec::new(), most: self.max };
            if let Some(value) = tree.node(rng, 1)
                && (self.min + 1..self.max).contains(&tree.tokens.len())
            {
                let words: Vec<_> = tree.tokens.iter().map(|&token| WORDS[token as usize]).collect();
                return (words.join(" "), value);
            }
        }
    }
}

/// An expression under construction.
struct Tree {
    tokens: Vec<u8>,
    most: usize,
}

impl Tree {
    /// Appends a random node; its value, or `None` when the expression has become too long.
    fn node(&mut self, rng: &mut ChaCha8Rng, depth: usize) -> Option<u32> {
        if self.tokens.len() >= self.most {
            return None;
        }
        if depth >= MOST_DEPTH || !rng.random_bool(LIST_SHARE) {
            let digit = rng.random_range(0..DIGITS as u32);
            self.tokens.push(digit as u8);
            return Some(digit);
        }
        let operator = rng.random_range(0..OPERATORS);
        self.tokens.push((DIGITS + operator) as u8);
        let items = rng.random_range(2..=MOST_ITEMS);
        let values = (0..items).map(|_| self.node(rng, depth + 1)).collect::<Option<Vec<_>>>()?;
        self.tokens.push(CLOSE);
        Some(apply(operator, values))
    }
}

/// The value of a list: minimum, maximum, median rounded down, sum modulo 10.
fn apply(operator: usize, mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    let n = values.len();
    match operator {
        0 => values[0],
        1 => values[n - 1],
        2 => (values[(n - 1) / 2] + values[n / 2]) / 2,
        _ => values.iter().sum::<u32>() % 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of an expression, by its definition and from its text alone.
    fn evaluate<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<u32> {
        let word = words.next()?;
        if let Ok(digit) = word.parse() {
            return Some(digit);
        }
        if word == "]" {
            return None;
        }
        let mut items = Vec::new();
        while let Some(item) = evaluate(words) {
            items.push(item);
        }
        Some(match word {
            "[MIN" => *items.iter().min()?,
            "[MAX" => *items.iter().max()?,
            "[MED" => {
                items.sort_unstable();
                let (low, high) = (items[(items.len() - 1) / 2], items[items.len() / 2]);
                (f64::from(low + high) / 2.0) as u32
            }
            "[SM" => items.iter().sum::<u32>() % 10,
            other => panic!("{other}"),
        })
    }

    #[test]
    fn expressions_have_their_length_and_their_value() {
        let data = Listops { train: 40, val: 10, test: 10, ..Default::default() }.generate().unwrap();
        for split in [&data.train, data.validation.as_ref().unwrap(), &data.test] {
            for (text, &label) in split.texts[0].iter().zip(&split.labels) {
                let count = text.split(' ').count();
                assert!((501..2000).contains(&count), "{count}");
                let mut words = text.split(' ');
                assert_eq!((evaluate(&mut words), words.next()), (Some(label), None), "{text}");
            }
        }
    }

    #[test]
    fn operators_are_those_of_the_definition() {
        let values = || vec![7, 2, 9, 4];
        assert_eq!([0, 1, 2, 3].map(|operator| apply(operator, values())), [2, 9, 5, 2], "median 5.5 is rounded down");
    }

    #[test]
    fn seed_and_position_alone_decide() {
        let settings = Listops::parse("seed=3,train=20,test=4,min=3,max=40").unwrap();
        let data = settings.generate().unwrap();
        let longer = Listops { train: 30, ..settings.clone() }.generate().unwrap();
        assert_eq!(data.train.texts[0], longer.train.texts[0][..20]);
        assert_eq!(data.test, longer.test);
        let validation = data.validation.as_ref().unwrap();
        assert_eq!(validation.len(), 4, "as many as there are to test on");
        assert_ne!(data.train.texts[0][..4], data.test.texts[0][..]);
        assert_ne!(validation.texts, data.test.texts);
        assert_ne!(data.train.texts[0][..4], validation.texts[0][..]);
        let alone = Listops { val: 0, ..settings.clone() }.generate().unwrap();
        assert_eq!((&alone.train, &alone.validation, &alone.test), (&data.train, &None, &data.test));
        assert_ne!(Listops { seed: 4, ..settings.clone() }.generate().unwrap().train, data.train);
        assert_eq!(Listops::parse(&settings.to_string()).unwrap(), settings);
    }

    #[test]
    fn settings_outside_their_range_are_named() {
        for (settings, field) in [
            ("min=9000", "min"),
            ("min=10,max=12", "max"),
            ("train=0", "train"),
            ("val=99999999", "val"),
            ("size=3", "listops"),
            ("seed=1,seed=2", "listops"),
        ] {
            let message = Listops::parse(settings).unwrap_err().to_string();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
    }
}
