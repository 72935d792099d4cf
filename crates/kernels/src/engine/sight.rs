//! Which keys a query may see, masks aside.

use std::ops::Range;

use super::{columns::push, tile::QUERIES};
use crate::{Shape, mechanism::Dense, score::tiles::VisibleIntervals};

/// The position of a mean token, which is seen from everywhere.
pub(super) const EVERYWHERE: u32 = u32::MAX;

/// Which keys a query may see.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub causal: bool,
    /// Tokens that become visible together.
    pub block: usize,
    pub window: Option<usize>,
    pub sinks: usize,
    /// `seq_kv - seq_q`.
    pub shift: i64,
    /// Whether rows are the keys and columns the queries.
    pub transposed: bool,
}

/// What a row sees: positions from `low` below `high`, and those below `sinks`.
#[derive(Clone, Copy)]
pub(super) struct Interval {
    pub low: u32,
    pub high: u32,
    pub sinks: u32,
}

impl Interval {
    pub fn holds(&self, position: u32) -> bool {
        position < self.sinks || (self.low..self.high).contains(&position)
    }

    /// How many of ascending positions it holds.
    pub fn count(&self, positions: &[u32]) -> usize {
        let below = |end: u32| positions.partition_point(|&position| position < end);
        let low = self.low.max(self.sinks);
        below(self.sinks) + below(self.high).saturating_sub(below(low))
    }
}

impl Sight {
    pub fn dense(m: &Dense, shape: &Shape, causal: bool) -> Self {
        let shift = shape.seq_kv as i64 - shape.seq_q as i64;
        Self { causal, block: 1, window: m.window, sinks: m.sinks, shift, transposed: false }
    }

    /// Whether all see all.
    pub fn is_complete(&self) -> bool {
        !self.causal && self.window.is_none()
    }

    /// What the row at a position sees.
    pub fn of(&self, row: u32) -> Interval {
        let (row, block) = (i64::from(row), self.block as i64);
        let position = |x: i64| x.clamp(0, EVERYWHERE.into()) as u32;
        let window = self.window.map(|w| w.min(1 << 40) as i64);
        if self.transposed {
            let first = if self.causal { row.div_euclid(block) * block - self.shift } else { 0 };
            let window = window.filter(|_| row >= self.sinks as i64);
            let low = window.map_or(first, |w| first.max(row - w + 1 - self.shift));
            let high = window.map_or(i64::MAX, |w| row + w - self.shift);
            return Interval { low: position(low), high: position(high), sinks: 0 };
        }
        let row = row + self.shift;
        let end = if self.causal { (row.div_euclid(block) + 1) * block } else { i64::MAX };
        let high = window.map_or(end, |w| end.min(row + w));
        let low = window.map_or(0, |w| row - w + 1);
        let sinks = if window.is_some() { end.min(self.sinks as i64) } else { 0 };
        Interval { low: position(low), high: position(high), sinks: position(sinks) }
    }

    /// Whether row `i` sees column `j`.
    pub fn sees(&self, i: u32, j: u32) -> bool {
        i == EVERYWHERE || j == EVERYWHERE || self.of(i).holds(j)
    }

    /// The columns, ascending in position, that any of some rows may see.
    pub fn columns(&self, rows: &[u32], keys: &[u32]) -> Vec<Range<usize>> {
        let of = rows.iter().map(|&row| self.of(row));
        let Some(of) =
            of.reduce(|a, b| Interval { low: a.low.min(b.low), high: a.high.max(b.high), sinks: a.sinks.max(b.sinks) })
        else {
            return Vec::new();
        };
        let until = |position: u32| keys.partition_point(|&j| j < position);
        let (start, end, sinks) = (until(of.low), until(of.high), until(of.sinks));
        let mut ranges = Vec::new();
        push(&mut ranges, 0..sinks);
        push(&mut ranges, sinks.max(start)..end);
        ranges
    }
}

/// What the queries of a panel see.
pub(super) struct PanelSight {
    low: [u32; QUERIES],
    high: [u32; QUERIES],
    sinks: [u32; QUERIES],
    rows: usize,
}

impl PanelSight {
    pub const ALL: Self = Self { low: [0; QUERIES], high: [0; QUERIES], sinks: [0; QUERIES], rows: 0 };

    /// Of rows at some positions; none where all see all.
    pub fn set(&mut self, sight: &Sight, rows: &[u32]) {
        *self = Self::ALL;
        if sight.is_complete() {
            return;
        }
        self.rows = rows.len();
        for (n, &row) in rows.iter().enumerate() {
            let Interval { low, high, sinks } = sight.of(row);
            (self.low[n], self.high[n], self.sinks[n]) = (low, high, sinks);
        }
    }

    /// Whom the queries see of the keys at some positions; none where all see all.
    pub fn visible<'a>(&'a self, positions: &'a [u32]) -> Option<VisibleIntervals<'a>> {
        let (least, most) = positions.iter().fold((EVERYWHERE, 0), |(a, b), &x| (a.min(x), b.max(x)));
        let sees = |n: usize| self.low[n] <= least && most < self.high[n] || most < self.sinks[n];
        let Self { low, high, sinks, rows } = self;
        (!(0..*rows).all(sees)).then_some(VisibleIntervals { positions, low, high, sinks })
    }
}
