//! One head of a call: its tokens as features and values, chunk by chunk. Masks are settled here.

use std::ops::Range;

use super::{
    map::Map,
    product::Products,
    state::FLOOR,
    tile::{Sizes, Tile},
};
use crate::{call::Call, structure::dense::dot};

/// A side of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Queries,
    Keys,
}

/// What the forward pass found of every query: its row sum, in units of `2^level`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums<'a> {
    pub sums: &'a [f32],
    pub levels: &'a [f32],
}

/// The gradient that comes in, and what the forward pass wrote.
#[derive(Debug, Clone, Copy)]
pub(super) struct Incoming<'a> {
    pub dout: &'a [f32],
    /// Where gradients of features are wanted.
    pub out: Option<&'a [f32]>,
    pub rows: Sums<'a>,
}

/// One batch element and head.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub map: Map<'a>,
    pub sizes: Sizes,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    keep_query: Option<&'a [bool]>,
    keep_key: Option<&'a [bool]>,
    seq_q: usize,
    seq_kv: usize,
    pub causal: bool,
    pub gamma: f32,
    incoming: Option<Incoming<'a>>,
}

impl<'a> Head<'a> {
    /// The head `slice` of `call`, whose values are `v`.
    pub fn of(call: &Call<'a>, slice: usize, v: &'a [f32], (map, sizes): (Map<'a>, Sizes), gamma: f32) -> Self {
        let s = call.shape;
        let part = |x: &'a [f32], len: usize| &x[slice * len..][..len];
        let keep = |keep: Option<&'a [bool]>, seq: usize| keep.map(|keep| &keep[slice / s.heads * seq..][..seq]);
        Self {
            map,
            sizes,
            q: part(call.q.dense(), s.seq_q * s.head_dim),
            k: part(call.k.dense(), s.seq_kv * s.head_dim),
            v: part(v, s.seq_kv * s.value_dim),
            keep_query: keep(call.mask.query, s.seq_q),
            keep_key: keep(call.mask.key, s.seq_kv),
            seq_q: s.seq_q,
            seq_kv: s.seq_kv,
            causal: call.mask.causal,
            gamma,
            incoming: None,
        }
    }

    pub fn with_incoming(self, incoming: Incoming<'a>) -> Self {
        Self { incoming: Some(incoming), ..self }
    }

    /// Positions of a side. Causal, queries and keys have positions in common, the last of both being one.
    pub fn positions(&self, side: Side) -> usize {
        match side {
            Side::Queries if !self.causal => self.seq_q,
            _ => self.seq_kv,
        }
    }

    /// The tokens of a side at some positions.
    pub fn tokens(&self, side: Side, positions: &Range<usize>) -> Range<usize> {
        let before = if self.causal && side == Side::Queries { self.seq_kv - self.seq_q } else { 0 };
        positions.start.saturating_sub(before)..positions.end.saturating_sub(before)
    }

    /// Keys at some positions before that of the first query among them.
    pub fn shift(&self, positions: &Range<usize>) -> usize {
        (self.seq_kv - self.seq_q).saturating_sub(positions.start)
    }

    /// The rows of a side's tokens.
    pub fn rows(&self, side: Side, tokens: &Range<usize>) -> &'a [f32] {
        let x = if side == Side::Queries { self.q } else { self.k };
        &x[tokens.start * self.sizes.dim..tokens.end * self.sizes.dim]
    }

    /// Whether a token counts.
    pub fn keeps(&self, side: Side, token: usize) -> bool {
        let keep = if side == Side::Queries { self.keep_query } else { self.keep_key };
        keep.is_none_or(|keep| keep[token])
    }

    /// Loads tokens of a side: what is masked has no features, no values, and a level from which nothing comes.
    pub fn load(&self, products: &mut Products<'_>, side: Side, tokens: Range<usize>, tile: &mut Tile<'_>) {
        tile.rows = tokens.len();
        tile.poison[..tokens.len()].fill(0.0);
        self.map.features(products, self.rows(side, &tokens), side == Side::Keys, (tile.features, tile.levels));
        let absent = absent(side);
        for (row, token) in tokens.clone().enumerate() {
            let there = self.keeps(side, token) && self.load_values(side, token, row, tile);
            if !there {
                tile.absent(row, &self.sizes, absent);
            }
        }
        if self.causal && (side == Side::Keys || self.incoming.is_some()) {
            tile.settle(self.map.level, &self.sizes, absent);
        }
    }

    /// The value of a token, or what comes back to the weights of a query; whether there is any.
    fn load_values(&self, side: Side, token: usize, row: usize, tile: &mut Tile<'_>) -> bool {
        let (channels, stride) = (self.sizes.channels, self.sizes.stride());
        let part = |x: &'a [f32]| &x[token * channels..][..channels];
        let into = &mut tile.values[row * stride..][..stride];
        into[channels..].fill(0.0);
        match (side, &self.incoming) {
            (Side::Keys, _) => {
                into[..channels].copy_from_slice(part(self.v));
                into[channels] = 1.0;
                true
            }
            (Side::Queries, None) => {
                // A query's level is found with its row sum.
                tile.levels[row] = FLOOR;
                true
            }
            (Side::Queries, Some(Incoming { dout, out, rows })) => {
                tile.levels[row] = rows.levels[token];
                let sum = rows.sums[token];
                let dout = part(dout);
                // out = gamma y, and <gamma dout, y> = <dout, out>.
                into[channels] = out.map_or(0.0, |out| (-dot(dout, part(out)) / f64::from(sum)) as f32);
                into.iter_mut().zip(dout).for_each(|(into, x)| *into = self.gamma * x / sum);
                sum != 0.0
            }
        }
    }
}

/// The level of a token that is not there: keys have no part in any sum, and row sums no key in them.
pub(super) fn absent(side: Side) -> f32 {
    if side == Side::Keys { f32::NEG_INFINITY } else { f32::INFINITY }
}
