//! One sequence of a paged cache: its block table, and what is carried along.

use std::{collections::VecDeque, ops::Range};

use super::{
    super::{
        reach::Reach,
        rows::{Past, Run},
    },
    blocks::Blocks,
};

/// Tokens so far, and the blocks of those that later ones see.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    pub len: usize,
    /// The blocks of the sinks, which stay.
    pinned: Vec<u32>,
    /// Those from number `first` on: all others, or those of the window.
    recent: VecDeque<u32>,
    first: usize,
    /// Of every head: squared norms so far.
    pub norms: Vec<f64>,
    /// Of every head of keys: their largest entry so far.
    pub largest: Vec<f32>,
    /// Whether all keys and values so far are numbers.
    pub is_finite: bool,
}

impl Sequence {
    /// Without tokens. `heads` of queries and of keys.
    pub fn new([heads, kv_heads]: [usize; 2], reach: Reach, block_size: usize) -> Self {
        Self {
            len: 0,
            pinned: Vec::new(),
            recent: VecDeque::new(),
            first: reach.sinks().div_ceil(block_size),
            norms: vec![0.0; heads],
            largest: vec![0.0; kv_heads],
            is_finite: true,
        }
    }

    /// Its blocks, in the order of their tokens.
    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.pinned.iter().chain(&self.recent).copied()
    }

    /// The block that the next token goes into, where that has some already.
    pub fn partial(&self, block_size: usize) -> Option<u32> {
        (!self.len.is_multiple_of(block_size)).then(|| self.block(self.len / block_size))
    }

    fn block(&self, n: usize) -> u32 {
        self.pinned.get(n).copied().unwrap_or_else(|| self.recent[n - self.first])
    }

    /// Makes the last block its own, and appends blocks for `new` tokens.
    pub fn reserve(&mut self, blocks: &mut Blocks, new: usize) {
        if self.partial(blocks.size).is_some()
            && let Some(last) = self.recent.back_mut().or(self.pinned.last_mut())
        {
            *last = blocks.own(*last);
        }
        for n in self.len.div_ceil(blocks.size)..(self.len + new).div_ceil(blocks.size) {
            let block = blocks.take();
            if n < self.first {
                self.pinned.push(block);
            } else {
                self.recent.push_back(block);
            }
        }
    }

    /// Gives back the blocks that no later query sees.
    pub fn forget(&mut self, blocks: &mut Blocks, reach: Reach) {
        let low = reach.low(self.len);
        while (self.first + 1) * blocks.size <= low
            && let Some(block) = self.recent.pop_front()
        {
            blocks.release(block);
            self.first += 1;
        }
    }

    /// Where the token at a position lies: the block, and the slot in it.
    pub fn place(&self, position: usize, block_size: usize) -> (u32, usize) {
        (self.block(position / block_size), position % block_size)
    }
}

/// One head of a sequence.
pub(super) struct PagedHead<'a> {
    pub blocks: &'a Blocks,
    pub sequence: &'a Sequence,
    pub head: usize,
}

impl Past for PagedHead<'_> {
    fn run(&self, positions: Range<usize>) -> Run<'_> {
        let size = self.blocks.size;
        let (block, slot) = self.sequence.place(positions.start, size);
        self.blocks.run(block, self.head, slot..size.min(slot + positions.len()))
    }
}
