//! Many sequences in one memory: keys and values in blocks that sequences share.

mod blocks;
mod sequence;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use blocks::Blocks;
use sequence::{PagedHead, Sequence};

use super::{
    reach::{CHUNK, Reach, keeps_rows, sums_over_rows},
    rows::{BucketTable, Queries, Rows},
    support::{check_support, kept_dims, largest, map_of, new_tokens},
    tokens::Tokens,
};
use crate::{Error, Inputs, Mask, Mechanism, Result, Shape, check, mechanism::Form, range, simd::Level};

/// The past of many sequences of any lengths, for the mechanisms whose past is keys and values (`softmax`, `fna`, `infsa` and dense
/// compositions, as a [`Cache`](super::Cache) decodes them). "Efficient Memory Management for Large Language Model Serving with
/// PagedAttention".
///
/// Memory is `blocks` of `block_size` tokens, allocated once. Each sequence has a block table; a block is taken when a token needs it. A
/// fork ([`PagedCache::fork`]), such as a beam or a sample of a common prompt, shares the blocks of what it is forked from until one of both
/// writes into one that is partly full, which is then copied. Blocks that nobody refers to, or that have left the window of a mechanism
/// with one, are used again. Rows are made from keys and values where they lie, in the bits that a [`Cache`](super::Cache) gives.
///
/// ```
/// use resolvent_kernels::{Extras, Inputs, Mechanism, PagedCache};
/// let mut cache = PagedCache::new(&Mechanism::preset("softmax")?, 1, 2, 2, 16, 8)?;
/// let prompt = cache.add();
/// let x = [1.0; 6]; // three tokens of two channels
/// cache.append(&[prompt], &Inputs { q: &x, k: Some(&x), v: &x, extras: Extras::default() })?;
/// let beam = cache.fork(prompt)?;
/// assert_eq!((cache.len(beam)?, cache.free_blocks()), (3, 7)); // one block for both
/// let (x, mut out) = ([1.0; 4], [0.0; 4]);
/// cache.step(&[prompt, beam], &Inputs { q: &x, k: Some(&x), v: &x, extras: Extras::default() }, &mut out)?;
/// assert_eq!(cache.free_blocks(), 6); // each writes into its own now
/// # Ok::<(), resolvent_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedCache {
    mechanism: Mechanism,
    /// What carries it out.
    form: Form,
    /// One token of one sequence.
    token: Shape,
    level: Level,
    reach: Reach,
    /// Heads of queries to one of keys and values.
    sharing: usize,
    blocks: Blocks,
    sequences: BTreeMap<SequenceId, Sequence>,
    buckets: BucketTable,
}

/// A sequence of one [`PagedCache`]. No two of a process are the same, so that one that was freed, or is another cache's, is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl SequenceId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl PagedCache {
    /// A cache of `blocks` blocks of `block_size` tokens, without sequences. A block holds the keys and values of all heads.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a `block_size` that is no multiple of 16, no blocks, or more than memory can have; [`Error::Unsupported`] for a
    /// mechanism that has no [`Cache`](super::Cache), or one whose past is no keys and values by position: `uniform` and `features` keep
    /// sums, which need no blocks, `ssa` and `routed` clusters.
    pub fn new(
        mechanism: &Mechanism,
        heads: usize,
        head_dim: usize,
        value_dim: usize,
        block_size: usize,
        blocks: usize,
    ) -> Result<Self> {
        let token = Shape { batch: 1, heads, seq_q: 1, seq_kv: 1, head_dim, value_dim };
        if !block_size.is_multiple_of(CHUNK) || block_size == 0 {
            let expected = "a multiple of 16";
            return Err(Error::OutOfRange { field: "block_size", got: block_size.to_string(), expected });
        }
        let tokens = block_size.checked_mul(blocks).filter(|_| (1..=1 << 31).contains(&blocks));
        let Some(tokens) = tokens else {
            let expected = "1 to 2^31, of tokens that memory can hold";
            return Err(Error::OutOfRange { field: "blocks", got: blocks.to_string(), expected });
        };
        // The clusters of `ssa` are made for a length, whichever.
        check_support(mechanism, &token, if matches!(mechanism.own(), Some(Form::Ssa(_))) { 1 } else { tokens })?;
        if !keeps_rows(mechanism) {
            let clusters = mechanism.clustering().is_some();
            let why = if clusters {
                "its past is kept by cluster, not by position; use a `Cache` for each batch of sequences"
            } else {
                "its past is a sum of one size, which needs no blocks; use a `Cache`"
            };
            return Err(Error::Unsupported { mechanism: mechanism.id(), what: "a paged cache", why });
        }
        Ok(Self {
            mechanism: mechanism.clone(),
            form: mechanism.form(),
            token,
            level: Level::selected()?,
            reach: Reach::of(mechanism),
            sharing: 1,
            blocks: Blocks::new(blocks, heads, block_size, kept_dims(mechanism, &token))?,
            sequences: BTreeMap::new(),
            buckets: BucketTable::default(),
        })
    }

    /// The same cache, without sequences, with fewer heads of keys and values, each shared by as many neighbouring heads of queries:
    /// steps then take `k` and `v` of `kv_heads`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless `kv_heads` divides the heads; [`Error::Unsupported`] for fewer where queries are keys.
    pub fn with_kv_heads(mut self, kv_heads: usize) -> Result<Self> {
        self.sharing = check::sharing(&self.mechanism, self.token.heads, kv_heads)?;
        let dims = kept_dims(&self.mechanism, &self.token);
        self.blocks = Blocks::new(self.blocks.count(), kv_heads, self.blocks.size, dims)?;
        self.sequences.clear();
        Ok(self)
    }

    /// A new sequence, without tokens or blocks.
    pub fn add(&mut self) -> SequenceId {
        let heads = [self.token.heads, self.token.heads / self.sharing];
        self.insert(Sequence::new(heads, self.reach, self.blocks.size))
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId::new();
        self.sequences.insert(id, sequence);
        id
    }

    /// A new sequence with the tokens of another, whose blocks both share. It takes no block until one of both goes on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let copy = self.sequence("fork", sequence)?.clone();
        copy.blocks().for_each(|block| self.blocks.share(block));
        Ok(self.insert(copy))
    }

    /// Forgets a sequence; blocks that no other shares are free.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, sequence: SequenceId) -> Result<()> {
        self.sequence("free", sequence)?;
        if let Some(gone) = self.sequences.remove(&sequence) {
            gone.blocks().for_each(|block| self.blocks.release(block));
        }
        Ok(())
    }

    fn sequence(&self, op: &'static str, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence { op, id: id.0 })
    }

    /// Tokens of a sequence so far.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn len(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.sequence("len", sequence)?.len)
    }

    /// The numbers of a sequence's blocks, in the order of their tokens: with a window, of the sinks and of those that later tokens see.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn block_table(&self, sequence: SequenceId) -> Result<Vec<usize>> {
        Ok(self.sequence("block_table", sequence)?.blocks().map(|block| block as usize).collect())
    }

    /// Sequences that were added or forked, and not freed.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.keys().copied()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.blocks.size
    }

    /// All blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.count()
    }

    /// Blocks that no sequence refers to.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    /// Bytes of all blocks, which are allocated once.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes()
    }

    /// Takes `n >= 1` new tokens of each of some sequences, `q, k [sequences, heads, n, head_dim]`, `v [sequences, heads, n, value_dim]`
    /// (no `k` if tied), and writes their rows `out [sequences, heads, n, value_dim]`. `n` follows from the length of `q`; sequences are
    /// as long as they are.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfRange`] for one that is given twice, or none; [`Error::OutOfBlocks`]; [`Error::Length`],
    /// [`Error::Tensor`] for tensors that do not fit, [`Error::Range`] for scores that leave f32. The cache is then as before.
    /// [`Error::Overflow`] where rows leave f32 although no token does.
    pub fn step(&mut self, sequences: &[SequenceId], inputs: &Inputs<'_, f32>, out: &mut [f32]) -> Result<()> {
        let tokens = self.take("step", sequences, inputs, Some(out.len()))?;
        self.attend(sequences, &tokens, Some(out));
        let finite = |id| self.sequences.get(id).is_some_and(|sequence| sequence.is_finite);
        range::check_finite(self.level, "out", out, || tokens.is_finite() && sequences.iter().all(finite))
    }

    /// As [`PagedCache::step`], of tokens whose rows are known: those of a prompt, which one causal call gives faster than steps. For
    /// `infsa`, whose norm is a sum over all rows, no faster than a step.
    ///
    /// # Errors
    /// As [`PagedCache::step`].
    pub fn append(&mut self, sequences: &[SequenceId], inputs: &Inputs<'_, f32>) -> Result<()> {
        let tokens = self.take("append", sequences, inputs, None)?;
        if sums_over_rows(&self.mechanism) {
            let mut rows = vec![0.0; sequences.len() * tokens.new * self.token.out_len()];
            self.attend(sequences, &tokens, Some(&mut rows));
        } else {
            self.attend(sequences, &tokens, None);
        }
        Ok(())
    }

    /// The new tokens, which are checked, and for which there are blocks.
    fn take<'a>(
        &mut self,
        op: &'static str,
        sequences: &[SequenceId],
        inputs: &Inputs<'a, f32>,
        out: Option<usize>,
    ) -> Result<Tokens<'a>> {
        for (n, &id) in sequences.iter().enumerate() {
            self.sequence(op, id)?;
            if sequences[..n].contains(&id) {
                let got = format!("sequence {} twice", id.0);
                return Err(Error::OutOfRange { field: "sequences", got, expected: "each sequence once" });
            }
        }
        if sequences.is_empty() {
            return Err(Error::OutOfRange { field: "sequences", got: "none".into(), expected: "at least one" });
        }
        let all = Shape { batch: sequences.len(), ..self.token };
        let new = new_tokens(op, &self.mechanism, &all, self.sharing, inputs)?;
        let shape = Shape { seq_q: new, seq_kv: new, ..all };
        check::extras(op, &self.mechanism, &shape, &inputs.extras)?;
        let expected = new * all.out_len();
        check::length(op, "out", out.unwrap_or(expected), expected, "expected sequences * heads * n * value_dim")?;
        let tokens = Tokens::new(inputs, Mask::default(), &all, new, &vec![0; sequences.len()]);
        let before: Vec<f32> =
            sequences.iter().filter_map(|id| self.sequences.get(id)).flat_map(|s| s.largest.clone()).collect();
        let largest = largest(self.level, &tokens.k, &before);
        self.rows(&tokens).check(&tokens.q, new, &largest)?;
        self.check_blocks(sequences, new)?;
        for (id, largest) in sequences.iter().zip(largest.chunks_exact(largest.len() / sequences.len())) {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.largest.copy_from_slice(largest);
            }
        }
        Ok(tokens)
    }

    /// Whether there are blocks for `new` tokens of each sequence.
    fn check_blocks(&self, sequences: &[SequenceId], new: usize) -> Result<()> {
        let (size, mut needed) = (self.blocks.size, 0);
        // Who writes into a block that others share: all copy it, or all but the last where no other shares it.
        let mut writers = BTreeMap::<u32, usize>::new();
        for sequence in sequences.iter().filter_map(|id| self.sequences.get(id)) {
            needed += (sequence.len + new).div_ceil(size) - sequence.len.div_ceil(size);
            if let Some(block) = sequence.partial(size) {
                *writers.entry(block).or_default() += 1;
            }
        }
        needed += writers.iter().map(|(&block, &n)| n.min(self.blocks.references(block) - 1)).sum::<usize>();
        let free = self.free_blocks();
        if needed <= free {
            return Ok(());
        }
        Err(Error::OutOfBlocks { needed, free, blocks: self.blocks(), block_size: size })
    }

    /// What makes rows of keys and values.
    fn rows<'a>(&'a self, tokens: &Tokens<'a>) -> Rows<'a> {
        Rows::new((&self.mechanism, &self.form), tokens.extras, self.token, self.level, &self.buckets)
    }

    /// Keeps keys and values, makes the rows where they are asked for, and gives back the blocks that no later token sees.
    fn attend(&mut self, ids: &[SequenceId], tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        let new = tokens.new;
        let mut sequences: Vec<Sequence> = ids.iter().filter_map(|id| self.sequences.remove(id)).collect();
        for (n, sequence) in sequences.iter_mut().enumerate() {
            sequence.reserve(&mut self.blocks, new);
            self.write(n, sequence, tokens);
        }
        if let Some(out) = out {
            let longest = sequences.iter().map(|sequence| sequence.len).max().unwrap_or(0);
            self.buckets.extend(&self.mechanism, longest + new);
            let heads = self.token.heads;
            let mut norms: Vec<f64> = sequences.iter().flat_map(|sequence| sequence.norms.clone()).collect();
            let queries = Queries { q: &tokens.q, tokens: 0..new, all: new, keep: None };
            self.rows(tokens).attend(&queries, out, &mut norms, |slice| {
                let sequence = &sequences[slice / heads];
                let head = slice % heads / self.sharing;
                (PagedHead { blocks: &self.blocks, sequence, head }, sequence.len)
            });
            for (sequence, norms) in sequences.iter_mut().zip(norms.chunks_exact(heads)) {
                sequence.norms.copy_from_slice(norms);
            }
        }
        for (id, mut sequence) in ids.iter().zip(sequences) {
            sequence.len += new;
            sequence.forget(&mut self.blocks, self.reach);
            self.sequences.insert(*id, sequence);
        }
    }

    /// Writes the new tokens of a sequence, the `n`-th of a step, into its blocks.
    fn write(&mut self, n: usize, sequence: &mut Sequence, tokens: &Tokens<'_>) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let (map, new, kv_heads) = (map_of(&self.mechanism), tokens.new, heads / self.sharing);
        for token in 0..new {
            let (block, slot) = sequence.place(sequence.len + token, self.blocks.size);
            for head in 0..kv_heads {
                let at = (n * kv_heads + head) * new + token;
                let [key, value] = self.blocks.token(block, head, slot);
                map.apply(&tokens.k[at * head_dim..][..head_dim], false, 0.0, key);
                value.copy_from_slice(&tokens.v[at * value_dim..][..value_dim]);
                sequence.is_finite &= key.iter().chain(&*value).all(|x| x.is_finite());
            }
        }
    }
}
