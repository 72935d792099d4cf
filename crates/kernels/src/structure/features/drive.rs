//! A pass over all heads: sums over the sources, then what the sinks take from them, by all threads.
//!
//! Where batch and heads are few, a head is cut into pieces: each piece's sums are made first, and those before it added up. Causal
//! tokens of a piece go through its sums once more. The pieces depend on the sizes alone.

use std::ops::Range;

use super::{
    head::{Head, Side},
    state::State,
    sweep::{Pass, Workspace, workspace},
    tile::{CHUNK, Sizes, Triangle},
};
use crate::{
    Shape,
    parallel::{for_each, for_each_item, workers},
};

/// Tasks that a pass is cut into where it can be.
const TASKS: usize = 32;
/// Chunks of a piece, at least: sums are worth adding up of many tokens.
const LEAST_CHUNKS: usize = 8;

/// How a pass over a call of one shape is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    pub sizes: Sizes,
    pub slices: usize,
    pub pieces: usize,
}

impl Cut {
    /// Of operands of so many `parts` of bf16, 0 in f32.
    pub fn of(shape: &Shape, features: usize, parts: usize) -> Self {
        let sizes = Sizes { dim: shape.head_dim, features, channels: shape.value_dim, parts };
        let slices = shape.slices();
        // So that the sums of a piece are no larger than its tokens.
        let least = LEAST_CHUNKS.max(features.div_ceil(CHUNK));
        let longest = shape.seq_q.max(shape.seq_kv).div_ceil(CHUNK);
        Self { sizes, slices, pieces: (TASKS / slices.min(TASKS)).min(longest / least).max(1) }
    }

    /// f32 of memory that a pass takes, for all threads.
    pub fn memory(&self, pass: Pass) -> usize {
        self.shared(pass) + workers(self.tasks()) * self.per_worker(pass)
    }

    fn tasks(&self) -> usize {
        self.slices * self.pieces
    }

    /// The sums of all pieces.
    fn shared(&self, pass: Pass) -> usize {
        if self.pieces > 1 { self.tasks() * pass.form(self.sizes).len() } else { 0 }
    }

    fn per_worker(&self, pass: Pass) -> usize {
        workspace(&self.sizes, pass) + pass.form(self.sizes).len()
    }

    /// The chunks of a piece, among `positions` of them.
    fn chunks(&self, piece: usize, positions: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let all = positions.div_ceil(CHUNK);
        let each = all.div_ceil(self.pieces);
        let chunks = (piece * each).min(all)..((piece + 1) * each).min(all);
        chunks.map(move |chunk| chunk * CHUNK..((chunk + 1) * CHUNK).min(positions))
    }
}

/// A pass over all heads of a call.
pub(super) struct Drive<'d, H, W> {
    pub cut: Cut,
    pub pass: Pass,
    /// The head of a slice.
    pub head: &'d H,
    /// What becomes of sinks: called with the slice, the tokens, and what they took.
    pub write: &'d W,
}

impl<'a, H, W> Drive<'_, H, W>
where
    H: Fn(usize) -> Head<'a> + Sync,
    W: Fn(usize, &Head<'a>, Range<usize>, &mut Workspace<'_>) + Sync,
{
    /// Runs it in [`Cut::memory`] f32 of `work`, or more.
    pub fn run(&self, work: &mut [f32]) {
        let Self { cut, pass, .. } = *self;
        let (form, pieces) = (pass.form(cut.sizes), cut.pieces);
        let (states, work) = work.split_at_mut(cut.shared(pass));
        if pieces == 1 {
            return for_each(cut.slices, work, cut.per_worker(pass), |slice, memory| {
                let head = (self.head)(slice);
                let (mut workspace, memory) = Workspace::cut(memory, &cut.sizes, pass, &head.map);
                let mut state = State::cut(memory, form).0;
                state.clear();
                if !head.causal {
                    self.gather(&head, 0, &mut workspace, &mut state);
                }
                self.give(slice, &head, 0, &mut workspace, &mut state);
            });
        }
        let len = form.len();
        let tasks = states.chunks_exact_mut(len).take(cut.tasks()).enumerate();
        for_each_item(tasks, work, cut.per_worker(pass), |(task, state), memory| {
            let mut state = State::cut(state, form).0;
            state.clear();
            let head = (self.head)(task / pieces);
            let mut workspace = Workspace::cut(memory, &cut.sizes, pass, &head.map).0;
            self.gather(&head, task % pieces, &mut workspace, &mut state);
        });
        let slices = states.chunks_exact_mut(pieces * len).take(cut.slices).enumerate();
        for_each_item(slices, work, cut.per_worker(pass), |(slice, states), memory| {
            self.add_up(&(self.head)(slice), states, State::cut(memory, form).0);
        });
        let tasks = states.chunks_exact_mut(len).take(cut.tasks()).enumerate();
        for_each_item(tasks, work, cut.per_worker(pass), |(task, state), memory| {
            let mut state = State::cut(state, form).0;
            let head = (self.head)(task / pieces);
            let mut workspace = Workspace::cut(memory, &cut.sizes, pass, &head.map).0;
            self.give(task / pieces, &head, task % pieces, &mut workspace, &mut state);
        });
    }

    /// Adds a piece's sources to `state`.
    fn gather(&self, head: &Head<'a>, piece: usize, workspace: &mut Workspace<'_>, state: &mut State<'_>) {
        let side = self.pass.sources();
        let chunk = |positions: Range<usize>| {
            workspace.load(head, self.pass, side, &positions);
            state.add(head.map.level, &mut workspace.products, &mut workspace.source);
        };
        let chunks = self.cut.chunks(piece, head.positions(side));
        // In the order in which they are met again.
        if self.backwards() { chunks.rev().for_each(chunk) } else { chunks.for_each(chunk) }
    }

    /// Gives every piece the sums of all, or causal those of the pieces before it.
    fn add_up(&self, head: &Head<'a>, states: &mut [f32], mut total: State<'_>) {
        let (form, pieces) = (self.pass.form(self.cut.sizes), self.cut.pieces);
        let len = form.len();
        total.clear();
        for n in 0..pieces {
            let n = if self.backwards() { pieces - 1 - n } else { n };
            let mut state = State::cut(&mut states[n * len..(n + 1) * len], form).0;
            if head.causal {
                total.swap(&mut state);
            }
            total.merge(head.map.level, &state);
        }
        if !head.causal {
            states.chunks_exact_mut(len).for_each(|state| State::cut(state, form).0.copy(&total));
        }
    }

    /// Gives a piece's sinks what they take, and causal adds its sources to `state` on the way.
    fn give(&self, slice: usize, head: &Head<'a>, piece: usize, workspace: &mut Workspace<'_>, state: &mut State<'_>) {
        let pass = self.pass;
        let chunk = |positions: Range<usize>| {
            let tokens = head.tokens(pass.sinks, &positions);
            let shift = if head.causal { head.shift(&positions) } else { 0 };
            if head.causal {
                workspace.load(head, pass, pass.sources(), &positions);
            }
            if !tokens.is_empty() {
                workspace.load(head, pass, pass.sinks, &positions);
                if pass.finds_sums() {
                    workspace.find_levels(head, *state.unit, shift);
                }
                workspace.take(head, pass, state);
                if head.causal {
                    workspace.attend(head, pass, Triangle { shift, keys: pass.sinks == Side::Keys });
                }
                (self.write)(slice, head, tokens, workspace);
            }
            if head.causal {
                state.add(head.map.level, &mut workspace.products, &mut workspace.source);
            }
        };
        let chunks = self.cut.chunks(piece, head.positions(pass.sinks));
        if self.backwards() { chunks.rev().for_each(chunk) } else { chunks.for_each(chunk) }
    }

    /// Whether the last tokens come first: what keys take from queries.
    fn backwards(&self) -> bool {
        self.pass.sinks == Side::Keys
    }
}
