//! Keys and values of all sequences and heads, each head's in a piece: all of them, or the sinks and a ring of the last.

use std::ops::Range;

use super::{
    chosen, part,
    reach::{Reach, Slots},
    rows::{Past, Run},
    tokens::Tokens,
};
use crate::{memory, score::map::Map};

/// Keys (what the score makes of them before they meet queries), values, and which tokens are masked.
#[derive(Debug, Clone)]
pub(super) struct Store {
    /// Heads of keys and values of a sequence.
    heads: usize,
    /// Channels of a key and of a value.
    dims: [usize; 2],
    /// With a window.
    slots: Option<Slots>,
    /// Slots of a head.
    capacity: usize,
    /// `[batch, heads, capacity, dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[batch, capacity]`; empty while no token was masked.
    keep: Vec<bool>,
}

/// One head of one sequence.
pub(super) struct StoredHead<'a> {
    store: &'a Store,
    slice: usize,
}

impl Store {
    pub fn new(heads: usize, dims: [usize; 2], reach: Reach) -> Self {
        let slots = reach.slots();
        Self { heads, dims, slots, capacity: 0, keys: Vec::new(), values: Vec::new(), keep: Vec::new() }
    }

    /// Most tokens that are held, where there is a window.
    pub fn most(&self) -> Option<usize> {
        self.slots.map(|slots| slots.all())
    }

    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (self.keys.len() + self.values.len()) + self.keep.len()
    }

    /// No token is masked any more.
    pub fn clear(&mut self) {
        self.keep.clear();
    }

    pub fn is_finite(&self) -> bool {
        [&self.keys, &self.values].iter().all(|x| x.iter().all(|x| x.is_finite()))
    }

    /// Tokens that may be pushed behind `len` before the first of them is a query.
    pub fn at_once(&self, len: usize) -> usize {
        self.slots.map_or(usize::MAX, |slots| slots.at_once(len))
    }

    /// Room for `tokens` of each of `batch` sequences, of which there are `len`; no more than is ever needed.
    pub fn grow(&mut self, batch: usize, len: usize, tokens: usize) {
        let capacity = self.most().map_or(tokens, |most| tokens.min(most));
        // Until it has as many slots as are ever needed, positions are slots.
        let (len, old) = (len.min(self.capacity), self.capacity);
        for (kept, dim) in [(&mut self.keys, self.dims[0]), (&mut self.values, self.dims[1])] {
            *kept = moved(kept, [batch * self.heads, old * dim, capacity * dim], len * dim, 0.0);
        }
        if !self.keep.is_empty() {
            self.keep = moved(&self.keep, [batch, old, capacity], len, true);
        }
        self.capacity = capacity;
    }

    /// Bytes that are taken for `end` tokens of each of `batch` sequences, where there is no room for them yet.
    pub fn growth(&self, batch: usize, end: usize) -> u64 {
        let capacity = self.grown(end).map_or(0, |capacity| self.most().map_or(capacity, |most| capacity.min(most)));
        let channels = (batch * self.heads).saturating_mul(self.dims[0] + self.dims[1]);
        memory::bytes(capacity.saturating_mul(channels), size_of::<f32>())
    }

    /// The slots of a head that are made for `end` tokens; none where there are enough.
    fn grown(&self, end: usize) -> Option<usize> {
        let needed = self.most().map_or(end, |most| end.min(most));
        (needed > self.capacity).then(|| needed.max(2 * self.capacity))
    }

    /// Writes some `new` tokens of a step behind the `len` before it; of those that later ones take the place of, none.
    pub fn push(&mut self, map: Map, tokens: &Tokens<'_>, new: Range<usize>, batch: usize, len: usize) {
        let end = len + new.end;
        if let Some(capacity) = self.grown(end) {
            self.grow(batch, len + new.start, capacity);
        }
        if self.keep.is_empty() && tokens.masks_keys() {
            self.keep = vec![true; batch * self.capacity];
        }
        let Self { heads, dims: [dim, value_dim], slots, capacity, .. } = *self;
        let [k_dim, all] = [tokens.k.len() / (batch * heads * tokens.new), tokens.new];
        for n in new.filter(|n| slots.is_none_or(|slots| slots.outlasts(len + n, end))) {
            let slot = self.slot(len + n);
            for slice in 0..batch * heads {
                let key = &mut self.keys[(slice * capacity + slot) * dim..][..dim];
                map.apply(part(&tokens.k, (slice * all + n) * k_dim, k_dim), false, 0.0, key);
                let value = part(&tokens.v, (slice * all + n) * value_dim, value_dim);
                self.values[(slice * capacity + slot) * value_dim..][..value_dim].copy_from_slice(value);
            }
            for (sequence, keep) in self.keep.chunks_exact_mut(capacity).enumerate() {
                keep[slot] = tokens.keeps_key(sequence, n);
            }
        }
    }

    fn slot(&self, position: usize) -> usize {
        self.slots.map_or(position, |slots| slots.of(position))
    }

    pub fn head(&self, slice: usize) -> StoredHead<'_> {
        StoredHead { store: self, slice }
    }

    /// Of some of `batch` sequences.
    pub fn select(&self, batch: usize, rows: &[usize]) -> Self {
        let (keys, values) = (chosen(&self.keys, batch, rows), chosen(&self.values, batch, rows));
        Self { keys, values, keep: chosen(&self.keep, batch, rows), ..*self }
    }
}

/// The first `len` of each of `count` parts, which are made `to` long.
fn moved<T: Copy>(x: &[T], [count, from, to]: [usize; 3], len: usize, empty: T) -> Vec<T> {
    let mut all = vec![empty; count * to];
    for n in 0..count {
        all[n * to..][..len].copy_from_slice(&x[n * from..][..len]);
    }
    all
}

impl Past for StoredHead<'_> {
    fn run(&self, positions: Range<usize>) -> Run<'_> {
        let Store { heads, dims: [dim, value_dim], slots, capacity, keys, values, keep } = self.store;
        let (slot, wanted) = (self.store.slot(positions.start), positions.len());
        let len = match slots {
            // Nothing has been overwritten where all positions are slots.
            Some(slots) if positions.end > slots.all() => {
                let end = if positions.start < slots.pinned { slots.pinned } else { slots.all() };
                wanted.min(end - slot)
            }
            _ => wanted,
        };
        let at = self.slice * capacity + slot;
        let keep = (!keep.is_empty()).then(|| &keep[self.slice / heads * capacity + slot..][..len]);
        Run { keys: part(keys, at * dim, len * dim), values: part(values, at * value_dim, len * value_dim), keep, len }
    }
}
