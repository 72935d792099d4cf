//! What an engine does with tiles of pairs, `[key][query]`, once for every score: compiled where the score is defined, called by the tile.

mod backward;
mod forward;
mod row;

use std::f32::consts::LOG2_E;

use pulp::Simd;

pub(crate) use backward::WIDEST;
use backward::{Differentiated, Gradients};
use forward::{Affinities, Scored};
use row::RowValues;

use super::contract::{MOST_PARAMETERS, PairScore, Term};
use crate::simd::{Level, math::exp2, product::vectors};

/// Some rows of numbers, whole vectors each: row `n` begins at `n * stride`.
pub(crate) struct Tile<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// Who sees whom in a tile: a query sees the positions from `low` below `high`, and those below `sinks`.
#[derive(Clone, Copy)]
pub(crate) struct VisibleIntervals<'a> {
    /// Of the keys.
    pub positions: &'a [u32],
    /// Of the queries, padded to whole vectors.
    pub low: &'a [u32],
    pub high: &'a [u32],
    pub sinks: &'a [u32],
}

impl VisibleIntervals<'_> {
    /// `entries` of key `row` and the queries from `col` on, and `absent` for those that do not see it.
    #[inline(always)]
    pub fn show<S: Simd, const N: usize>(
        &self,
        simd: S,
        [row, col]: [usize; 2],
        mut entries: [S::f32s; N],
        absent: f32,
    ) -> [S::f32s; N] {
        let low = vectors::<S, N>(bytemuck::cast_slice(self.low), col);
        let high = vectors::<S, N>(bytemuck::cast_slice(self.high), col);
        let sinks = vectors::<S, N>(bytemuck::cast_slice(self.sinks), col);
        let (key, absent) = (simd.splat_u32s(self.positions[row]), simd.splat_f32s(absent));
        for n in 0..N {
            let (low, high) = (simd.transmute_u32s_f32s(low[n]), simd.transmute_u32s_f32s(high[n]));
            let sinks = simd.transmute_u32s_f32s(sinks[n]);
            let inside = simd.select_f32s(simd.less_than_u32s(key, low), absent, entries[n]);
            let inside = simd.select_f32s(simd.less_than_u32s(key, high), inside, absent);
            entries[n] = simd.select_f32s(simd.less_than_u32s(key, sinks), entries[n], inside);
        }
        entries
    }
}

/// What is known of the pairs of a tile beside their tokens.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    /// Per key: added to logarithms of affinities, or multiplied with affinities.
    pub constants: Option<&'a [f32]>,
    /// Per key: equal entries that it stands for.
    pub counts: Option<&'a [f32]>,
    /// Where not every query sees every key.
    pub visible: Option<VisibleIntervals<'a>>,
    /// What is added to the logits: a tile like that of the values. A pair at `-inf` is absent.
    pub bias: Option<&'a [f32]>,
}

/// Where terms lie and values go: logarithms (`-inf` where a pair is not seen), or affinities times their counts (0).
pub(crate) struct Values<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    /// Per query: the largest logarithm so far, or the sum of magnitudes (of `squares`) of affinities, times counts.
    pub sums: &'a mut [f32],
    /// Per query: the term of the largest logarithm.
    pub terms: &'a mut [f32],
    pub squares: bool,
}

/// Numbers per query and key that weigh their pairs: `fine exp(l - row - column)`, or `row column g`.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a> {
    pub rows: &'a [f32],
    /// What a row's logarithm lost when it was rounded, as a factor: of large scores that is more than rounding.
    pub fine: &'a [f32],
    pub columns: &'a [f32],
}

impl Factors<'_> {
    /// The weight of a value, before counts.
    #[inline(always)]
    pub fn weight<S: Simd>(simd: S, log: bool, value: S::f32s, [row, fine, column]: [S::f32s; 3]) -> S::f32s {
        if log {
            let l = simd.sub_f32s(simd.sub_f32s(value, row), column);
            simd.mul_f32s(fine, exp2(simd, simd.mul_f32s(simd.splat_f32s(LOG2_E), l)))
        } else {
            simd.mul_f32s(simd.mul_f32s(value, row), column)
        }
    }
}

/// What is taken out of the products of values and output gradients, `P`: `P - sign(g) (a p + c d) - tau W`, with `a`, `c`,
/// `tau` per query and `p`, `d` per key.
#[derive(Clone, Copy)]
pub(crate) struct Projection<'a> {
    pub a: &'a [f32],
    pub c: &'a [f32],
    pub tau: &'a [f32],
    pub p: &'a [f32],
    pub d: &'a [f32],
}

/// What flows back through the sums of rows by which columns are divided: `x exp(l - log)` is taken out of the gradients of logarithms,
/// `x sign(g)` of those of affinities, with `x` and `log` per query.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    pub x: &'a [f32],
    pub logs: &'a [f32],
}

/// Where gradients go.
pub(crate) struct Backward<'a> {
    pub factors: Factors<'a>,
    pub projection: Projection<'a>,
    pub shares: Option<Shares<'a>>,
    /// Holds the terms, and then the weights, times counts.
    pub weights: &'a mut [f32],
    /// Holds the products of values and output gradients, and then the gradients of the terms.
    pub slopes: &'a mut [f32],
    /// Takes those of the bias, where they are wanted.
    pub of_bias: Option<&'a mut [f32]>,
    pub stride: usize,
    /// Where those of the parameters are wanted.
    pub parameters: Option<ParameterSums<'a>>,
}

/// Where the gradients of parameters go. With `typical` terms, one for each place of a row, the derivatives are taken from those at
/// these on: where gradients add up to nothing they are free, and near the heaviest pair's little is lost of it.
pub(crate) struct ParameterSums<'a> {
    pub sums: &'a mut [f64; MOST_PARAMETERS],
    pub typical: Option<&'a [f32]>,
}

/// A [`PairScore`] as the engines call it: tile by tile, so that they are compiled once for all scores.
pub(crate) trait TileScore: Send + Sync {
    fn term(&self) -> Term;
    fn is_log(&self) -> bool;
    fn is_positive_definite(&self) -> bool;
    fn is_non_negative(&self) -> bool;
    /// Makes values of the terms of so many keys and queries, in place.
    fn values(&self, level: Level, size: [usize; 2], known: Known<'_>, into: Values<'_>);
    /// Makes weights of the terms of so many keys and queries, and of the products of values and output gradients the gradients of the terms.
    fn backward(&self, level: Level, size: [usize; 2], known: Known<'_>, into: Backward<'_>);
    /// Makes values of the terms of one query, in place, with what is added to their logits.
    fn row(&self, level: Level, terms: &mut [f32], bias: Option<&[f32]>);
    /// Makes affinities of the terms in `tile`.
    fn affinities(&self, level: Level, tile: Tile<'_>);
    /// Makes gradients of the terms of the gradients of the values in `gradients`; adds those of the parameters to the sums.
    fn gradients(&self, level: Level, terms: &[f32], gradients: Tile<'_>, sums: ParameterSums<'_>);
}

impl<T: PairScore> TileScore for T {
    fn term(&self) -> Term {
        T::TERM
    }

    fn is_log(&self) -> bool {
        T::LOG
    }

    fn is_positive_definite(&self) -> bool {
        T::POSITIVE_DEFINITE
    }

    fn is_non_negative(&self) -> bool {
        T::NON_NEGATIVE
    }

    fn values(&self, level: Level, size: [usize; 2], known: Known<'_>, into: Values<'_>) {
        level.dispatch(Scored { score: self, size, known, into });
    }

    fn backward(&self, level: Level, size: [usize; 2], known: Known<'_>, into: Backward<'_>) {
        level.dispatch(Differentiated { score: self, size, known, into });
    }

    fn row(&self, level: Level, terms: &mut [f32], bias: Option<&[f32]>) {
        level.dispatch(RowValues { score: self, terms, bias });
    }

    fn affinities(&self, level: Level, tile: Tile<'_>) {
        level.dispatch(Affinities { score: self, tile });
    }

    fn gradients(&self, level: Level, terms: &[f32], gradients: Tile<'_>, sums: ParameterSums<'_>) {
        level.dispatch(Gradients { score: self, terms, tile: gradients, sums });
    }
}
