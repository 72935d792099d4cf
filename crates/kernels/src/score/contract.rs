//! The contract of a score: what an engine needs to know of how two tokens relate. Anyone may implement it.
//!
//! An engine sums a [`Term`] over the channels of two rows, and hands tiles of these sums to the score while they are in the
//! caches. The functions of a score see one vector at a time and are compiled for every instruction set, where the score is defined.

pub use pulp::Simd;
use pulp::WithSimd;

use crate::simd::Level;
pub use crate::simd::product::Term;

/// Most parameters of a score that have gradients.
pub const MOST_PARAMETERS: usize = 2;

/// How two tokens relate, as a function of one number.
pub trait PairScore: Send + Sync {
    /// What is summed over the channels of a query and a key.
    const TERM: Term;
    /// Whether [`PairScore::value`] is the natural logarithm of the affinity (which is then positive), or the affinity itself.
    const LOG: bool;
    /// Parameters with gradients, at most [`MOST_PARAMETERS`]. A score from outside has none that calls may give.
    const PARAMETERS: usize = 0;
    /// Whether the affinities among any tokens are a positive definite matrix and at most 1, so that landmarks may stand for tokens
    /// and columns be whitened.
    const POSITIVE_DEFINITE: bool = false;
    /// Whether no affinity is negative. Always so where [`PairScore::LOG`].
    const NON_NEGATIVE: bool = Self::LOG;

    /// The affinity of pairs whose terms are `term`, or its logarithm.
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s;

    /// The derivatives of [`PairScore::value`].
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s>;
}

/// The derivatives of a score's value, of a vector of pairs.
#[derive(Debug, Clone, Copy)]
pub struct Slopes<V> {
    /// In the term.
    pub term: V,
    /// In each parameter; what lies beyond [`PairScore::PARAMETERS`] is not read.
    pub parameters: [V; MOST_PARAMETERS],
}

/// Some rows of numbers, whole vectors each: row `n` begins at `n * stride`.
pub(crate) struct Tile<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// A [`PairScore`] as the engines call it: tile by tile, so that they are compiled once for all scores.
pub(crate) trait TileScore: Send + Sync {
    fn term(&self) -> Term;
    fn is_log(&self) -> bool;
    fn is_positive_definite(&self) -> bool;
    fn is_non_negative(&self) -> bool;
    /// Makes values of the terms in `tile`.
    fn values(&self, level: Level, tile: Tile<'_>);
    /// Makes gradients of the terms of the gradients of the values in `gradients`; adds those of the parameters to the sums.
    fn gradients(&self, level: Level, terms: &[f32], gradients: Tile<'_>, sums: ParameterSums<'_>);
}

/// Where the gradients of parameters go. With `typical` terms, one for each place of a row, the derivatives are taken from those at
/// these on: where gradients add up to nothing they are free, and near the heaviest pair's little is lost of it.
pub(crate) struct ParameterSums<'a> {
    pub sums: &'a mut [f64; MOST_PARAMETERS],
    pub typical: Option<&'a [f32]>,
}

/// Widest row of a tile that has typical terms.
const WIDEST: usize = 64;

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

    fn values(&self, level: Level, tile: Tile<'_>) {
        level.dispatch(Values { score: self, tile });
    }

    fn gradients(&self, level: Level, terms: &[f32], gradients: Tile<'_>, sums: ParameterSums<'_>) {
        level.dispatch(Gradients { score: self, terms, tile: gradients, sums });
    }
}

struct Values<'a, T> {
    score: &'a T,
    tile: Tile<'a>,
}

impl<T: PairScore> WithSimd for Values<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tile { data, stride, rows, width } = self.tile;
        for row in data.chunks_mut(stride).take(rows) {
            for x in S::as_mut_simd_f32s(&mut row[..width]).0 {
                *x = self.score.value(simd, *x);
            }
        }
    }
}

struct Gradients<'a, T> {
    score: &'a T,
    terms: &'a [f32],
    tile: Tile<'a>,
    sums: ParameterSums<'a>,
}

impl<T: PairScore> WithSimd for Gradients<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tile { data, stride, rows, width } = self.tile;
        let zero = simd.splat_f32s(0.0);
        let mut centres = [[0.0_f32; WIDEST]; MOST_PARAMETERS];
        let [first, second] = &mut centres;
        let centres = [first, second].map(|row| S::as_mut_simd_f32s(&mut row[..width.min(WIDEST)]).0);
        if let Some(typical) = self.sums.typical {
            for (at, &term) in S::as_simd_f32s(&typical[..width]).0.iter().enumerate() {
                let slopes = self.score.slopes(simd, term).parameters;
                for n in 0..T::PARAMETERS {
                    centres[n][at] = slopes[n];
                }
            }
        }
        for (row, terms) in data.chunks_mut(stride).zip(self.terms.chunks(stride)).take(rows) {
            let mut sums = [zero; MOST_PARAMETERS];
            let terms = S::as_simd_f32s(&terms[..width]).0;
            for (at, (x, &term)) in S::as_mut_simd_f32s(&mut row[..width]).0.iter_mut().zip(terms).enumerate() {
                let slopes = self.score.slopes(simd, term);
                // Where nothing comes back, as from pairs that are not seen, an infinite slope is none.
                let none = simd.equal_f32s(*x, zero);
                for n in 0..T::PARAMETERS {
                    let centre = centres[n].get(at).copied().unwrap_or(zero);
                    let term = simd.mul_f32s(*x, simd.sub_f32s(slopes.parameters[n], centre));
                    sums[n] = simd.add_f32s(sums[n], simd.select_f32s(none, zero, term));
                }
                *x = simd.select_f32s(none, zero, simd.mul_f32s(*x, slopes.term));
            }
            #[allow(clippy::needless_range_loop)] // the same place in two arrays
            for n in 0..T::PARAMETERS {
                self.sums.sums[n] += f64::from(simd.reduce_sum_f32s(sums[n]));
            }
        }
    }
}
