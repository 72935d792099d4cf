//! Sequences that lie end to end, without padding.

use std::ops::Range;

use crate::{Error, Result};

/// Where sequences that lie end to end begin and end: their cumulative lengths, `cu_seqlens`.
///
/// ```
/// use resolvent_kernels::Sequences;
/// let reviews = Sequences::new(&[0, 3, 8, 11])?; // of 3, 5 and 3 tokens
/// assert_eq!((reviews.len(), reviews.tokens(), reviews.range(1)), (3, 11, 3..8));
/// # Ok::<(), resolvent_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    queries: Vec<usize>,
    /// Of cross-attention.
    keys: Option<Vec<usize>>,
}

impl Sequences {
    /// The sequences between `cu_seqlens`, cumulative lengths from 0: self-attention.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless they start with 0 and ascend: no sequence may be empty.
    pub fn new(cu_seqlens: &[usize]) -> Result<Self> {
        Ok(Self { queries: ascending("cu_seqlens", cu_seqlens)?, keys: None })
    }

    /// The sequences of queries between `queries`, each with the sequence of keys at the same place between `keys`.
    ///
    /// # Errors
    /// As [`Sequences::new`]; [`Error::OutOfRange`] unless there are as many.
    pub fn cross(queries: &[usize], keys: &[usize]) -> Result<Self> {
        let (queries, keys) = (ascending("queries", queries)?, ascending("keys", keys)?);
        if queries.len() != keys.len() {
            let got = format!("{} sequences beside {} of queries", keys.len() - 1, queries.len() - 1);
            let expected = "one sequence of keys per sequence of queries";
            return Err(Error::OutOfRange { field: "keys", got, expected });
        }
        let keys = (keys != queries).then_some(keys);
        Ok(Self { queries, keys })
    }

    /// How many sequences there are.
    pub fn len(&self) -> usize {
        self.queries.len() - 1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of all sequences; of cross-attention, queries.
    pub fn tokens(&self) -> usize {
        self.queries[self.len()]
    }

    /// Keys of all sequences.
    pub fn keys(&self) -> usize {
        self.key_bounds()[self.len()]
    }

    /// The tokens of sequence `n`; of cross-attention, the queries.
    pub fn range(&self, n: usize) -> Range<usize> {
        self.queries[n]..self.queries[n + 1]
    }

    /// The keys of sequence `n`.
    pub fn key_range(&self, n: usize) -> Range<usize> {
        self.key_bounds()[n]..self.key_bounds()[n + 1]
    }

    /// The place of every token in its sequence, from 0; of cross-attention, of every query.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).flat_map(|n| 0..self.range(n).len())
    }

    fn key_bounds(&self) -> &[usize] {
        self.keys.as_ref().unwrap_or(&self.queries)
    }
}

fn ascending(field: &'static str, bounds: &[usize]) -> Result<Vec<usize>> {
    let ok = bounds.len() > 1 && bounds[0] == 0 && bounds.windows(2).all(|pair| pair[0] < pair[1]);
    if ok {
        return Ok(bounds.to_vec());
    }
    // There may be as many as tokens.
    let few = &bounds[..bounds.len().min(8)];
    let got = if few.len() < bounds.len() { format!("{few:?} and more") } else { format!("{few:?}") };
    Err(Error::OutOfRange { field, got, expected: "cumulative lengths: 0, then ever larger numbers" })
}
