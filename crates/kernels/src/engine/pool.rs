//! Working memory of a call, used again by task after task: the first touch of fresh pages costs more than what is done in them.

use std::{
    ops::{Deref, DerefMut, Range},
    sync::Mutex,
};

use super::{
    rounded, sight,
    tile::{KEYS, STRIDE},
};
use crate::scratch::Aligned;

/// Buffers of a task.
pub(super) struct Buffers {
    /// Images of the queries, `[stride][width]`.
    pub panel: Aligned,
    /// What the queries of a block's rows have as images and as output gradients, where it does not lie in their order.
    pub copies: [Aligned; 2],
    /// Output gradients, `[dim][width]`.
    pub dout: Aligned,
    /// Values or terms, then weights.
    pub values: Aligned,
    /// Gradients of the terms.
    pub slopes: Aligned,
    /// Terms where values are kept beside them.
    pub terms: Aligned,
    /// Sums of differences to the keys and to the queries of a tile, times the gradients.
    pub differences: [Aligned; 2],
    /// What is added to the logits, and the gradients of it.
    pub bias: Aligned,
    pub of_bias: Aligned,
    /// Operands of bf16.
    pub operands: rounded::Operands,
    pub lanes: sight::PanelSight,
    /// The rows in the panel, and its width.
    pub rows: Range<usize>,
    pub width: usize,
}

impl Buffers {
    fn new() -> Self {
        Self {
            panel: Aligned::default(),
            copies: Default::default(),
            dout: Aligned::default(),
            values: Aligned::new(KEYS * STRIDE),
            slopes: Aligned::default(),
            terms: Aligned::default(),
            differences: Default::default(),
            bias: Aligned::default(),
            of_bias: Aligned::default(),
            operands: rounded::Operands::default(),
            lanes: sight::PanelSight::ALL,
            rows: 0..0,
            width: 0,
        }
    }
}

/// Memory that waits for a task: as much as tasks have held at once.
#[derive(Default)]
pub(super) struct Pool {
    buffers: Mutex<Vec<Buffers>>,
    zeros: Mutex<Vec<Aligned>>,
}

/// Takes the last of those that wait.
fn take<T>(waiting: &Mutex<Vec<T>>) -> Option<T> {
    waiting.lock().ok().and_then(|mut waiting| waiting.pop())
}

/// Puts one to those that wait.
fn put<T>(waiting: &Mutex<Vec<T>>, x: T) {
    if let Ok(mut waiting) = waiting.lock() {
        waiting.push(x);
    }
}

impl Pool {
    /// Runs a task with buffers.
    pub fn with<R>(&self, task: impl FnOnce(&mut Buffers) -> R) -> R {
        let mut buffers = take(&self.buffers).unwrap_or_else(Buffers::new);
        // Whatever rows they hold are another head's.
        buffers.rows = 0..0;
        let result = task(&mut buffers);
        put(&self.buffers, buffers);
        result
    }

    /// `len` zeros.
    pub fn zeros(&self, len: usize) -> Zeros<'_> {
        let mut zeros = self.memory(len);
        zeros.fill(0.0);
        zeros
    }

    /// `x`, beginning at a cache line: a vector that lies across two costs two loads.
    pub fn aligned<'x>(&self, x: &'x [f32]) -> Lines<'_, 'x> {
        if x.as_ptr().addr().is_multiple_of(64) {
            return Lines::Lent(x);
        }
        let mut copy = self.memory(x.len());
        copy.copy_from_slice(x);
        Lines::Copied(copy)
    }

    /// `len` f32 of unspecified content.
    pub fn memory(&self, len: usize) -> Zeros<'_> {
        let mut data = if len > 0 { take(&self.zeros).unwrap_or_default() } else { Aligned::default() };
        data.resize(len);
        Zeros { pool: self, data }
    }
}

/// f32 that begin at a cache line: as they lie, or copied.
pub(super) enum Lines<'p, 'x> {
    Lent(&'x [f32]),
    Copied(Zeros<'p>),
}

impl Deref for Lines<'_, '_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Lent(x) => x,
            Self::Copied(x) => x,
        }
    }
}

/// Memory that goes back to its pool.
pub(super) struct Zeros<'p> {
    pool: &'p Pool,
    data: Aligned,
}

impl Deref for Zeros<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data
    }
}

impl DerefMut for Zeros<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

impl Drop for Zeros<'_> {
    fn drop(&mut self) {
        if !self.data.is_empty() {
            put(&self.pool.zeros, std::mem::take(&mut self.data));
        }
    }
}
