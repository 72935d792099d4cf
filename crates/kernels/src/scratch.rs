//! Working memory that is sized by the plan, passed in and reused.

use crate::{
    Result,
    memory::{self, check_memory},
};

/// One cache line of f32: buffers cut at multiples of it never share a line between threads.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// f32 in a cache line.
const LINE: usize = 16;

/// Reusable working memory. It grows when a call needs more than it holds and never shrinks: after the first call
/// nothing is allocated. (The first touch of a fresh page can cost more than the arithmetic done on it.)
#[derive(Debug, Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Memory for `len` f32.
    pub fn new(len: usize) -> Self {
        Self { lines: vec![Line::default(); len.div_ceil(LINE)] }
    }

    /// Number of f32 held.
    pub fn len(&self) -> usize {
        self.lines.len() * LINE
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The same as [`Scratch::take`], where the system gives what of it is not held yet, and `beside` bytes that the call allocates.
    pub(crate) fn take_for(&mut self, op: &'static str, len: usize, beside: usize) -> Result<&mut [f32]> {
        let more = if len > self.len() { memory::bytes(len, size_of::<f32>()) } else { 0 };
        check_memory(op, more.saturating_add(beside as u64))?;
        Ok(self.take(len))
    }

    /// `len` f32 of unspecified content, aligned to a cache line.
    pub fn take(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(LINE);
        if self.lines.len() < lines {
            // What is too small goes first: nothing of it is kept, and both together would be more than was planned.
            self.lines = Vec::new();
            self.lines = vec![Line::default(); lines];
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }
}

/// f32 that begin at a cache line, so that no vector of them lies across two: such a vector costs two loads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Aligned {
    lines: Vec<Line>,
    len: usize,
}

impl Aligned {
    /// `len` zeros.
    pub fn new(len: usize) -> Self {
        Self { lines: vec![Line::default(); len.div_ceil(LINE)], len }
    }

    /// Makes it hold `len` f32 of unspecified content.
    pub fn resize(&mut self, len: usize) {
        if self.lines.len() * LINE < len {
            *self = Self::new(len);
        }
        self.len = len;
    }

    /// Appends `x`.
    pub fn extend(&mut self, x: &[f32]) {
        let from = self.len;
        self.len += x.len();
        self.lines.resize(self.len.div_ceil(LINE), Line::default());
        self[from..].copy_from_slice(x);
    }
}

impl std::ops::Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// f32 that [`cut`] takes for buffers of `sizes`.
pub(crate) fn scratch_len<const N: usize>(sizes: [usize; N]) -> usize {
    sizes.iter().map(|len| len.next_multiple_of(LINE)).sum()
}

/// Cuts `N` buffers off the front of `memory`, each from a fresh cache line; the rest is the last result.
pub(crate) fn cut<const N: usize>(mut memory: &mut [f32], sizes: [usize; N]) -> ([&mut [f32]; N], &mut [f32]) {
    let parts = sizes.map(|len| {
        let (part, rest) = std::mem::take(&mut memory).split_at_mut(len.next_multiple_of(LINE));
        memory = rest;
        &mut part[..len]
    });
    (parts, memory)
}

/// As [`cut`], to read what was written to its buffers.
pub(crate) fn parts<const N: usize>(mut memory: &[f32], sizes: [usize; N]) -> [&[f32]; N] {
    sizes.map(|len| {
        let (part, rest) = memory.split_at(len.next_multiple_of(LINE));
        memory = rest;
        &part[..len]
    })
}
