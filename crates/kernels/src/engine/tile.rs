//! What is done to a tile of pairs, `[key][query]`, whatever the score: sums of terms, running sums of rows, weights.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use super::sums::RowSum;
use crate::{
    score::tiles::Factors,
    simd::{
        Level,
        math::exp2,
        product::{Left, Right, Size, Store, Term, sum_terms, vectors, vectors_mut},
    },
};

/// Queries of a tile: whole vectors of every instruction set.
pub(super) const QUERIES: usize = 64;
/// Keys of a tile: with its queries and their products it stays in the second cache.
pub(super) const KEYS: usize = 128;
/// Distance of the rows of a tile: a cache line more than its width, so that they do not fall into the same sets.
pub(super) const STRIDE: usize = QUERIES + 16;

/// Numbers of a panel's queries.
pub(super) type Lanes = [f32; QUERIES];

/// The operands of a tile: rows of keys, and a panel of queries with one column for each.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub size: Size,
    pub keys: Left<'a>,
    pub queries: Right<'a>,
}

/// Writes the sums of a `term` over the channels of all pairs.
pub(super) fn terms(level: Level, term: Term, Operands { size, keys, queries }: Operands<'_>, out: &mut [f32]) {
    sum_terms(level, term, size, keys, queries, Store { data: out, stride: STRIDE });
}

/// Sums over the keys so far, per query: of `|g|^p`, for log scores in units of `exp(p peak)`.
#[derive(Clone)]
pub(super) struct Running {
    log: bool,
    pub peaks: Lanes,
    /// The terms of the peaks.
    pub terms: Lanes,
    pub totals: [f64; QUERIES],
    /// Largest logarithms, or sums, that a tile's values lead to.
    pub next: Lanes,
    /// Factors that the last tile put on all that was summed in units of the peaks before it.
    pub rescale: Lanes,
}

impl Running {
    pub fn new(log: bool) -> Self {
        let peaks = [if log { f32::MIN } else { 0.0 }; QUERIES];
        let zeros = [0.0; QUERIES];
        Self { log, peaks, terms: zeros, totals: [0.0; QUERIES], next: zeros, rescale: [1.0; QUERIES] }
    }

    /// The sums of query `at` alone, as those of the first.
    pub fn alone(&self, at: usize) -> Self {
        let mut one = Self::new(self.log);
        (one.peaks[0], one.terms[0], one.totals[0]) = (self.peaks[at], self.terms[at], self.totals[at]);
        one
    }

    /// Puts the sums of the first query of `one` in the place of those of query `at`.
    pub fn replace(&mut self, at: usize, one: &Self) {
        (self.peaks[at], self.terms[at], self.totals[at]) = (one.peaks[0], one.terms[0], one.totals[0]);
    }

    /// Readies `next` for the values of a tile.
    pub fn open(&mut self) {
        self.next = if self.log { self.peaks } else { [0.0; QUERIES] };
    }

    /// Makes weights of the values of `keys`, whose largest are in `next`, times `counts`; adds them or their `squares` up. Affinities are weights as
    /// they are, and their sums are in `next`.
    pub fn settle(
        &mut self,
        level: Level,
        values: &mut [f32],
        [keys, width]: [usize; 2],
        counts: Option<&[f32]>,
        squares: bool,
    ) {
        if self.log {
            level.dispatch(Settle { running: self, values, keys, width, counts, squares });
        }
        let rescale = self.rescale.map(|x| if squares { f64::from(x) * f64::from(x) } else { x.into() });
        for ((total, rescale), &part) in self.totals.iter_mut().zip(rescale).zip(&self.next[..width]) {
            *total = *total * rescale + f64::from(part);
        }
    }

    /// The sums of a query.
    pub fn sum(&self, at: usize, squares: bool) -> RowSum {
        let power = if squares { 2.0 } else { 1.0 };
        RowSum { peak: power * f64::from(self.peaks[at]), total: self.totals[at], term: self.terms[at] }
    }
}

struct Settle<'a> {
    running: &'a mut Running,
    values: &'a mut [f32],
    keys: usize,
    width: usize,
    counts: Option<&'a [f32]>,
    squares: bool,
}

impl WithSimd for Settle<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // The common rows in a loop of their own: whether there is more is not asked at every entry.
        if self.counts.is_none() && !self.squares {
            self.all::<S, false>(simd);
        } else {
            self.all::<S, true>(simd);
        }
    }
}

impl Settle<'_> {
    #[inline(always)]
    fn all<S: Simd, const MORE: bool>(mut self, simd: S) {
        let (mut col, lanes) = (0, S::F32_LANES);
        while col + 4 * lanes <= self.width {
            self.columns::<S, 4, MORE>(simd, col);
            col += 4 * lanes;
        }
        while col < self.width {
            self.columns::<S, 1, MORE>(simd, col);
            col += lanes;
        }
    }

    /// `N` columns of vectors, with counts or squares where there are `MORE` than sums.
    #[inline(always)]
    fn columns<S: Simd, const N: usize, const MORE: bool>(&mut self, simd: S, col: usize) {
        let Self { running, values, counts, squares, .. } = self;
        let rate = simd.splat_f32s(LOG2_E);
        let mut peaks = [simd.splat_f32s(0.0); N];
        peaks.copy_from_slice(vectors::<S, N>(&running.next, col));
        let old = vectors_mut::<S, N>(&mut running.peaks, col);
        for ((rescale, old), &peak) in vectors_mut::<S, N>(&mut running.rescale, col).iter_mut().zip(old).zip(&peaks) {
            *rescale = exp2(simd, simd.mul_f32s(rate, simd.sub_f32s(*old, peak)));
            *old = peak;
        }
        let mut sums = [simd.splat_f32s(0.0); N];
        for key in 0..self.keys {
            let entries = vectors_mut::<S, N>(values, key * STRIDE + col);
            let count = if let (true, Some(counts)) = (MORE, *counts) { counts[key] } else { 1.0 };
            let count = simd.splat_f32s(count);
            for ((entry, sum), &peak) in entries.iter_mut().zip(&mut sums).zip(&peaks) {
                let weight = exp2(simd, simd.mul_f32s(rate, simd.sub_f32s(*entry, peak)));
                *entry = if MORE { simd.mul_f32s(count, weight) } else { weight };
                *sum = if MORE && *squares {
                    simd.mul_add_e_f32s(*entry, weight, *sum)
                } else {
                    simd.add_f32s(*sum, *entry)
                };
            }
        }
        vectors_mut::<S, N>(&mut running.next, col).copy_from_slice(&sums);
    }
}

/// Makes weights of the values of `keys` in place, times `counts` for logarithms (affinities have theirs).
pub(super) fn weigh(
    level: Level,
    log: bool,
    values: &mut [f32],
    [keys, width]: [usize; 2],
    factors: Factors<'_>,
    counts: Option<&[f32]>,
) {
    level.dispatch(Weigh { log, values, keys, width, factors, counts });
}

struct Weigh<'a> {
    log: bool,
    values: &'a mut [f32],
    keys: usize,
    width: usize,
    factors: Factors<'a>,
    counts: Option<&'a [f32]>,
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { log, values, keys, width, factors, counts } = self;
        let (rows, fine) = (S::as_simd_f32s(&factors.rows[..width]).0, S::as_simd_f32s(&factors.fine[..width]).0);
        for (key, row) in values.chunks_mut(STRIDE).enumerate().take(keys) {
            let column = simd.splat_f32s(factors.columns[key]);
            let count = match counts {
                Some(counts) if log => counts[key],
                _ => 1.0,
            };
            let count = simd.splat_f32s(count);
            for ((x, &row), &fine) in S::as_mut_simd_f32s(&mut row[..width]).0.iter_mut().zip(rows).zip(fine) {
                *x = simd.mul_f32s(count, Factors::weight(simd, log, *x, [row, fine, column]));
            }
        }
    }
}

/// Multiplies the rows of a panel, `stride` apart, by `factors`.
pub(super) fn rescale(rows: &mut [f32], stride: usize, factors: &[f32]) {
    for (row, &factor) in rows.chunks_exact_mut(stride.max(1)).zip(factors) {
        if factor != 1.0 {
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One query's sums go on apart from its tile's, and come back to their place.
    #[test]
    fn a_query_is_summed_alone_from_where_it_was() {
        let mut all = Running::new(true);
        for n in 0..QUERIES {
            (all.peaks[n], all.terms[n], all.totals[n]) = (n as f32, 100.0 + n as f32, 200.0 + n as f64);
        }
        let mut one = all.alone(5);
        assert_eq!((one.peaks[0], one.terms[0], one.totals[0]), (5.0, 105.0, 205.0));
        (one.peaks[0], one.terms[0], one.totals[0]) = (-1.0, -2.0, -3.0);
        all.replace(5, &one);
        assert_eq!((all.peaks[5], all.terms[5], all.totals[5]), (-1.0, -2.0, -3.0));
        assert_eq!((all.peaks[0], all.terms[1], all.totals[6]), (0.0, 101.0, 206.0));
    }
}
