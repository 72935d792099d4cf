//! The columns that the rows of a block see, tile by tile.

use std::{borrow::Cow, ops::Range};

use super::tile::KEYS;

/// Some rows of queries and the columns that they may see.
pub(super) struct Block {
    pub rows: Range<usize>,
    pub columns: Vec<Range<usize>>,
    pub edges: Vec<Edges>,
}

/// Single columns of one row, with constants added to the logarithms of their affinities.
pub(super) struct Edges {
    pub row: usize,
    pub columns: Vec<u32>,
    pub weights: Vec<f32>,
}

/// The columns of a tile: as they lie, or gathered.
#[derive(Clone)]
pub(super) enum Columns<'a> {
    Run(Range<usize>),
    List(&'a [u32]),
}

impl Columns<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::Run(range) => range.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Where the `n`-th is among all.
    pub fn at(&self, n: usize) -> usize {
        match self {
            Self::Run(range) => range.start + n,
            Self::List(list) => list[n] as usize,
        }
    }

    /// Their rows of `x`, of `width` numbers each.
    pub fn of<'x, T: Copy>(&self, x: &'x [T], width: usize) -> Cow<'x, [T]> {
        match self {
            Self::Run(range) => Cow::Borrowed(&x[range.start * width..range.end * width]),
            Self::List(list) => {
                // Row by row, not number by number: an iterator over all of them copies each by itself.
                let mut rows = Vec::with_capacity(list.len() * width);
                list.iter().for_each(|&n| rows.extend_from_slice(&x[n as usize * width..][..width]));
                Cow::Owned(rows)
            }
        }
    }
}

impl Block {
    /// Calls `visit` with every tile whose columns are in `span`: its rows, its columns, and what is added to the logarithms of
    /// affinities with these. Edges, wherever they lead, are of the span that begins with the first column.
    pub fn tiles<'b>(
        &'b self,
        span: &Range<usize>,
        mut visit: impl FnMut(Range<usize>, Columns<'b>, Option<&'b [f32]>),
    ) {
        for run in &self.columns {
            let (start, end) = (run.start.max(span.start), run.end.min(span.end));
            for first in (start..end).step_by(KEYS) {
                visit(self.rows.clone(), Columns::Run(first..(first + KEYS).min(end)), None);
            }
        }
        for edges in self.edges.iter().filter(|_| span.start == 0) {
            for (list, constants) in edges.columns.chunks(KEYS).zip(edges.weights.chunks(KEYS)) {
                visit(edges.row..edges.row + 1, Columns::List(list), Some(constants));
            }
        }
    }
}

/// All columns.
pub(super) const ALL: Range<usize> = 0..usize::MAX;

/// Adds a range to others, joined with the last where it begins at its end.
pub(super) fn push(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
