//! What a call is of: its sizes, and where its tensors lie in memory.

use std::fmt;

use resolvent_kernels::{Mechanism, Sequences, Shape, Strided};
use serde::{Deserialize, Serialize};

use super::BenchOptions;
use crate::{Result, candidate::Candidate, columns::counted, named};

named! {
    /// Where heads and tokens of a call's tensors lie in memory. Ours read and write them there where the operator does
    /// ([`resolvent_kernels::Operator::reads_in_place`]).
    #[derive(Default)]
    pub enum TensorLayout {
        /// `[batch, heads, tokens, channels]`.
        #[default]
        Heads = "heads",
        /// `[batch, tokens, heads, channels]`.
        Tokens = "tokens",
        /// Queries, keys and values of a token side by side, as one layer projects them, and their gradients likewise; the output as
        /// in [`TensorLayout::Tokens`].
        Packed = "packed",
    }
}

/// How the tensors of every call of a benchmark are given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrangement {
    /// Heads of keys and values, each of which serves as many heads of queries in a row. Default: as many as of queries.
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Where heads and tokens lie. Default `heads`.
    #[serde(default)]
    pub layout: TensorLayout,
    /// Tokens of sequences that lie end to end and attend each to itself. Default none: every call has `batch` sequences of one
    /// length.
    #[serde(default)]
    pub sequences: Vec<usize>,
}

impl Arrangement {
    /// What some arrangements have in common; the default of the rest.
    pub(super) fn common(all: &[Self]) -> Self {
        let Some((first, others)) = all.split_first() else { return Self::default() };
        let one_layout = others.iter().all(|other| other.layout == first.layout);
        let one_number = others.iter().all(|other| other.kv_heads == first.kv_heads);
        Self {
            kv_heads: first.kv_heads.filter(|_| one_number),
            layout: if one_layout { first.layout } else { TensorLayout::default() },
            sequences: first.sequences.clone(),
        }
    }

    /// The candidate, called by how its calls are arranged too, beside others of it.
    pub(super) fn named(&self, candidate: &Candidate) -> Candidate {
        let own = Self { sequences: Vec::new(), ..self.clone() }.to_string();
        let name = if own.is_empty() { candidate.name.clone() } else { format!("{} ({own})", candidate.name) };
        Candidate { name, ..candidate.clone() }
    }
}

impl fmt::Display for Arrangement {
    /// What differs from the default, as parts of a sentence; nothing where nothing does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kv_heads = self.kv_heads.map(|n| format!("{} of keys and values", counted(n, "head")));
        let layout = (self.layout != TensorLayout::Heads).then(|| format!("layout `{}`", self.layout));
        let lengths: Vec<_> = self.sequences.iter().map(ToString::to_string).collect();
        let sequences = (!lengths.is_empty()).then(|| format!("sequences of {} tokens end to end", lengths.join(", ")));
        f.write_str(&[kv_heads, layout, sequences].into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

/// One call: sizes and arrangement.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// Of sequences end to end, one of all tokens.
    pub shape: Shape,
    pub kv_heads: usize,
    pub layout: TensorLayout,
    pub sequences: Option<Sequences>,
}

/// Sequences of a comparison with the reference, and most heads of keys and of queries for each of them.
const FEW: usize = 4;
const HEADS: usize = 2;

impl Call {
    /// The call of `tokens` tokens that is measured.
    ///
    /// # Errors
    /// [`crate::Error::Kernels`] for sequences without tokens.
    pub fn new(options: &BenchOptions, arrangement: &Arrangement, tokens: usize) -> Result<Self> {
        let heads = [options.heads, arrangement.kv_heads.unwrap_or(options.heads)];
        Self::of([options.batch, options.head_dim], heads, tokens, arrangement.layout, &arrangement.sequences)
    }

    /// A call like it of one batch element, few heads and `tokens` tokens, or a few sequences of between `least` tokens and the same share
    /// of these.
    pub fn small(options: &BenchOptions, arrangement: &Arrangement, tokens: usize, least: usize) -> Result<Self> {
        let kv_heads = arrangement.kv_heads.unwrap_or(options.heads);
        let (serves, kv_heads) = ((options.heads / kv_heads).min(HEADS), kv_heads.min(HEADS));
        let some = arrangement.sequences.iter().take(FEW);
        let sequences: Vec<_> = some.map(|&n| n.clamp(least, (tokens / FEW).max(least))).collect();
        Self::of([1, options.head_dim], [serves * kv_heads, kv_heads], tokens, arrangement.layout, &sequences)
    }

    fn of(
        [batch, head_dim]: [usize; 2],
        [heads, kv_heads]: [usize; 2],
        tokens: usize,
        layout: TensorLayout,
        lengths: &[usize],
    ) -> Result<Self> {
        let ends = lengths.iter().scan(0, |end, n| {
            *end += n;
            Some(*end)
        });
        let bounds: Vec<_> = std::iter::once(0).chain(ends).collect();
        let sequences = (!lengths.is_empty()).then(|| Sequences::new(&bounds)).transpose()?;
        let tokens = sequences.as_ref().map_or(tokens, Sequences::tokens);
        let shape = Shape::square(batch, heads, tokens, head_dim);
        Ok(Self { shape, kv_heads, layout, sequences })
    }

    /// Whether it is one that everybody takes: tensors `[batch, heads, tokens, channels]`, all of one size.
    pub fn is_plain(&self) -> bool {
        self.kv_heads == self.shape.heads && self.layout == TensorLayout::Heads && self.sequences.is_none()
    }

    /// Whether the tensors of a call of the same size lie as this one's.
    pub fn lies_as(&self, other: &Self) -> bool {
        self.kv_heads == other.kv_heads && self.layout == other.layout
    }

    /// The same on tensors `[batch, heads, tokens, channels]`.
    pub fn heads_first(&self) -> Self {
        Self { layout: TensorLayout::Heads, ..self.clone() }
    }

    /// The sizes of the first sequence.
    pub fn first(&self) -> Shape {
        let tokens = self.sequences.as_ref().map_or(self.shape.seq_q, |sequences| sequences.range(0).len());
        Shape { seq_q: tokens, seq_kv: tokens, ..self.shape }
    }

    /// Elements of a tensor of `heads` heads.
    pub fn len(&self, heads: usize) -> usize {
        Shape { heads, ..self.shape }.q_len()
    }

    /// Elements of queries, keys and values side by side, as far as `mechanism` reads them.
    pub fn packed_len(&self, mechanism: &Mechanism) -> usize {
        let parts = mechanism.projections();
        let [queries, keys] = [(parts > 1, self.shape.heads), (parts > 2, self.kv_heads)];
        let of = |(is_there, heads): (bool, usize)| if is_there { self.len(heads) } else { 0 };
        of(queries) + of(keys) + self.len(self.kv_heads)
    }

    /// A tensor of `heads` heads of `rows` rows as this layout has it; of side by side, the output.
    pub fn strided<D>(&self, data: D, heads: usize, rows: usize) -> Strided<D> {
        let sizes = [heads, rows, self.shape.head_dim];
        match self.layout {
            TensorLayout::Heads => Strided::heads_first(data, sizes),
            TensorLayout::Tokens | TensorLayout::Packed => Strided::tokens_first(data, sizes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> BenchOptions {
        BenchOptions { batch: 3, heads: 8, head_dim: 4, ..BenchOptions::default() }
    }

    #[test]
    fn a_call_has_the_tokens_of_all_its_sequences() {
        let arrangement = Arrangement { sequences: vec![5, 700, 30], ..Arrangement::default() };
        let options = BenchOptions { batch: 1, ..options() };
        let call = Call::new(&options, &arrangement, 1).unwrap();
        assert_eq!((call.shape.seq_q, call.first().seq_q, call.is_plain()), (735, 5, false));
        let small = Call::small(&options, &arrangement, 192, 16).unwrap();
        assert_eq!((small.shape.seq_q, small.shape.heads), (16 + 48 + 30, 2));
    }

    #[test]
    fn few_heads_are_shared_as_many_are() {
        let arrangement = Arrangement { kv_heads: Some(2), layout: TensorLayout::Packed, ..Arrangement::default() };
        let small = Call::small(&options(), &arrangement, 20, 16).unwrap();
        assert_eq!((small.shape.batch, small.shape.heads, small.kv_heads, small.shape.seq_q), (1, 4, 2, 20));
        let softmax = Mechanism::preset("softmax").unwrap();
        assert_eq!(small.packed_len(&softmax), 20 * 4 * (4 + 2 + 2));
        assert_eq!(arrangement.to_string(), "2 heads of keys and values, layout `packed`");
        let own = Call::small(&options(), &Arrangement::default(), 20, 16).unwrap();
        assert_eq!((own.shape.heads, own.kv_heads, own.is_plain()), (2, 2, true));
    }
}
