//! Blocks of keys and values, shared by reference count.

use std::ops::Range;

use super::super::{part, rows::Run};
use crate::{Error, Result};

/// All blocks; those that nobody refers to are free.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    /// Heads of keys and values.
    heads: usize,
    /// Tokens of a block.
    pub size: usize,
    /// Channels of a key and of a value.
    dims: [usize; 2],
    /// `[blocks, heads, size, dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Sequences that refer to a block.
    references: Vec<u32>,
    /// The next to be used last.
    free: Vec<u32>,
}

impl Blocks {
    /// # Errors
    /// [`Error::OutOfRange`] for more than memory can hold.
    pub fn new(count: usize, heads: usize, size: usize, dims: [usize; 2]) -> Result<Self> {
        let [keys, values] = dims.map(|dim| [count, heads, size, dim].into_iter().fold(1, usize::saturating_mul));
        // Asked for first: zeros that there is no memory for would end the process.
        if [keys, values].into_iter().any(|len| Vec::<f32>::new().try_reserve_exact(len).is_err()) {
            let expected = "as many as there is memory for";
            return Err(Error::OutOfRange { field: "blocks", got: count.to_string(), expected });
        }
        let (keys, values) = (vec![0.0; keys], vec![0.0; values]);
        let free = (0..count as u32).rev().collect();
        Ok(Self { heads, size, dims, keys, values, references: vec![0; count], free })
    }

    pub fn count(&self) -> usize {
        self.references.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (self.keys.len() + self.values.len())
    }

    pub fn references(&self, block: u32) -> usize {
        self.references[block as usize] as usize
    }

    /// A free block with one reference.
    ///
    /// # Panics
    /// If there is none.
    pub fn take(&mut self) -> u32 {
        let block = self.free.pop().expect("blocks are counted before they are taken");
        self.references[block as usize] = 1;
        block
    }

    pub fn share(&mut self, block: u32) {
        self.references[block as usize] += 1;
    }

    /// Gives a reference back.
    pub fn release(&mut self, block: u32) {
        let references = &mut self.references[block as usize];
        *references -= 1;
        if *references == 0 {
            self.free.push(block);
        }
    }

    /// The block in which its owner alone may write: itself, or a copy in its place.
    pub fn own(&mut self, block: u32) -> u32 {
        if self.references(block) == 1 {
            return block;
        }
        let copy = self.take();
        for (x, dim) in [(&mut self.keys, self.dims[0]), (&mut self.values, self.dims[1])] {
            let len = self.heads * self.size * dim;
            let from = block as usize * len;
            x.copy_within(from..from + len, copy as usize * len);
        }
        self.release(block);
        copy
    }

    /// The key and the value of a head at a slot of a block.
    pub fn token(&mut self, block: u32, head: usize, slot: usize) -> [&mut [f32]; 2] {
        let ([dim, value_dim], at) = (self.dims, (block as usize * self.heads + head) * self.size + slot);
        [&mut self.keys[at * dim..][..dim], &mut self.values[at * value_dim..][..value_dim]]
    }

    /// Those of a head at some slots of a block.
    pub fn run(&self, block: u32, head: usize, slots: Range<usize>) -> Run<'_> {
        let ([dim, value_dim], len) = (self.dims, slots.len());
        let at = (block as usize * self.heads + head) * self.size + slots.start;
        let (keys, values) =
            (part(&self.keys, at * dim, len * dim), part(&self.values, at * value_dim, len * value_dim));
        Run { keys, values, keep: None, len }
    }
}
