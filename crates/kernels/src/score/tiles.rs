//! What an engine does with tiles of pairs, `[key][query]`, once for every score: compiled where the score is defined, called by the tile.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use super::contract::{MOST_PARAMETERS, PairScore, Slopes, Term};
use crate::simd::{
    Level,
    math::exp2,
    product::{Left, Right, Sink, Size, combine, product, vectors, vectors_mut},
};

/// Some rows of numbers, whole vectors each: row `n` begins at `n * stride`.
pub(crate) struct Tile<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// The operands of a tile: rows of keys, and a panel of queries with one column for each.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub size: Size,
    pub keys: Left<'a>,
    pub queries: Right<'a>,
}

/// Who sees whom in a tile: a query sees the positions from `low` below `high`, and those below `sinks`.
#[derive(Clone, Copy)]
pub(crate) struct Visible<'a> {
    /// Of the keys.
    pub positions: &'a [u32],
    /// Of the queries, padded to whole vectors.
    pub low: &'a [u32],
    pub high: &'a [u32],
    pub sinks: &'a [u32],
}

impl Visible<'_> {
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
    pub visible: Option<Visible<'a>>,
}

/// Where values go: logarithms (`-inf` where a pair is not seen), or affinities times their counts (0).
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
    /// Takes the gradients of the terms.
    pub slopes: &'a mut [f32],
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

impl ParameterSums<'_> {
    #[inline(always)]
    fn add<S: Simd, T: PairScore>(&mut self, simd: S, sums: [S::f32s; MOST_PARAMETERS]) {
        for (to, sum) in self.sums.iter_mut().zip(sums).take(T::PARAMETERS) {
            *to += f64::from(simd.reduce_sum_f32s(sum));
        }
    }
}

/// A [`PairScore`] as the engines call it: tile by tile, so that they are compiled once for all scores.
pub(crate) trait TileScore: Send + Sync {
    fn term(&self) -> Term;
    fn is_log(&self) -> bool;
    fn is_positive_definite(&self) -> bool;
    fn is_non_negative(&self) -> bool;
    /// Writes the values of the pairs of `operands`.
    fn values(&self, level: Level, operands: Operands<'_>, known: Known<'_>, into: Values<'_>);
    /// Makes weights of the terms, and the gradients of the terms; `operands` are values and output gradients.
    fn backward(&self, level: Level, operands: Operands<'_>, known: Known<'_>, into: Backward<'_>);
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

    fn values(&self, level: Level, operands: Operands<'_>, known: Known<'_>, into: Values<'_>) {
        level.dispatch(Scored { score: self, operands, known, into });
    }

    fn backward(&self, level: Level, operands: Operands<'_>, known: Known<'_>, into: Backward<'_>) {
        level.dispatch(Differentiated { score: self, operands, known, into });
    }

    fn affinities(&self, level: Level, tile: Tile<'_>) {
        level.dispatch(Affinities { score: self, tile });
    }

    fn gradients(&self, level: Level, terms: &[f32], gradients: Tile<'_>, sums: ParameterSums<'_>) {
        level.dispatch(Gradients { score: self, terms, tile: gradients, sums });
    }
}

struct Scored<'a, T> {
    score: &'a T,
    operands: Operands<'a>,
    known: Known<'a>,
    into: Values<'a>,
}

impl<T: PairScore> WithSimd for Scored<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Operands { size, keys, queries } = self.operands;
        let mut sink = ValueSink { score: self.score, known: self.known, into: self.into };
        combine(simd, T::TERM, size, keys, queries, &mut sink);
    }
}

/// Makes values of terms in registers.
struct ValueSink<'a, T> {
    score: &'a T,
    known: Known<'a>,
    into: Values<'a>,
}

impl<S: Simd, T: PairScore> Sink<S> for ValueSink<'_, T> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let Self { score, known, into } = self;
        // Copied out and back: in memory, the running values would be a chain of stores and loads.
        let [mut sums, mut terms] = [[simd.splat_f32s(0.0); N]; 2];
        sums.copy_from_slice(vectors::<S, N>(into.sums, col));
        terms.copy_from_slice(vectors::<S, N>(into.terms, col));
        for (m, of_key) in block.iter().enumerate() {
            let key = row + m;
            // Loops, not closures, which would be compiled without the instruction set.
            let mut values = [simd.splat_f32s(0.0); N];
            for n in 0..N {
                values[n] = score.value(simd, of_key[n]);
            }
            if let Some(constants) = known.constants {
                let constant = simd.splat_f32s(constants[key]);
                for x in &mut values {
                    *x = if T::LOG { simd.add_f32s(*x, constant) } else { simd.mul_f32s(*x, constant) };
                }
            }
            if let Some(visible) = &known.visible {
                values = visible.show(simd, [key, col], values, if T::LOG { f32::NEG_INFINITY } else { 0.0 });
            }
            let mut entries = values;
            if T::LOG {
                for n in 0..N {
                    if T::PARAMETERS > 0 {
                        let larger = simd.less_than_f32s(sums[n], values[n]);
                        terms[n] = simd.select_f32s(larger, of_key[n], terms[n]);
                    }
                    sums[n] = simd.max_f32s(sums[n], values[n]);
                }
            } else {
                if let Some(counts) = known.counts {
                    let count = simd.splat_f32s(counts[key]);
                    for x in &mut entries {
                        *x = simd.mul_f32s(count, *x);
                    }
                }
                for n in 0..N {
                    sums[n] = if into.squares {
                        simd.mul_add_e_f32s(entries[n], values[n], sums[n])
                    } else {
                        simd.add_f32s(sums[n], simd.abs_f32s(entries[n]))
                    };
                }
            }
            vectors_mut::<S, N>(into.data, key * into.stride + col).copy_from_slice(&entries);
        }
        vectors_mut::<S, N>(into.sums, col).copy_from_slice(&sums);
        vectors_mut::<S, N>(into.terms, col).copy_from_slice(&terms);
    }
}

struct Differentiated<'a, T> {
    score: &'a T,
    operands: Operands<'a>,
    known: Known<'a>,
    into: Backward<'a>,
}

impl<T: PairScore> WithSimd for Differentiated<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Operands { size, keys, queries } = self.operands;
        let mut centres = [[0.0; WIDEST]; MOST_PARAMETERS];
        typical(simd, self.score, self.into.parameters.as_ref().and_then(|p| p.typical), &mut centres);
        let mut sink = BackwardSink { score: self.score, known: self.known, into: self.into, centres: &centres };
        product(simd, size, keys, queries, &mut sink);
    }
}

/// Makes weights of terms and gradients of the products of values and output gradients, which are in registers.
struct BackwardSink<'a, T> {
    score: &'a T,
    known: Known<'a>,
    into: Backward<'a>,
    /// Typical derivatives in the parameters, per query.
    centres: &'a [[f32; WIDEST]; MOST_PARAMETERS],
}

impl<S: Simd, T: PairScore> Sink<S> for BackwardSink<'_, T> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let Self { score, known, into, centres } = self;
        let Backward { factors, projection, shares, weights, slopes, stride, parameters } = into;
        let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
        let (rows, fine) = (vectors::<S, N>(factors.rows, col), vectors::<S, N>(factors.fine, col));
        let (a, c) = (vectors::<S, N>(projection.a, col), vectors::<S, N>(projection.c, col));
        let tau = vectors::<S, N>(projection.tau, col);
        let mut sums = parameters.is_some().then_some([zero; MOST_PARAMETERS]);
        // Loops, not closures, which would be compiled without the instruction set.
        for (m, products) in block.iter().enumerate() {
            let (key, at) = (row + m, (row + m) * *stride + col);
            let column = simd.splat_f32s(factors.columns[key]);
            let (p, d) = (simd.splat_f32s(projection.p[key]), simd.splat_f32s(projection.d[key]));
            let mut terms = [zero; N];
            terms.copy_from_slice(vectors::<S, N>(weights, at));
            let [mut of_pairs, mut of_values] = [[zero; N]; 2];
            for n in 0..N {
                let mut value = score.value(simd, terms[n]);
                let mut taken = simd.mul_add_e_f32s(a[n], p, simd.mul_f32s(c[n], d));
                let mut chain = one;
                if let Some(constants) = known.constants {
                    let constant = simd.splat_f32s(constants[key]);
                    if T::LOG {
                        value = simd.add_f32s(value, constant);
                    } else {
                        chain = constant;
                    }
                }
                let weight = if T::LOG {
                    chain = Factors::weight(simd, true, value, [rows[n], fine[n], column]);
                    chain
                } else {
                    taken = simd.mul_f32s(taken, sign(simd, value));
                    chain = simd.mul_f32s(chain, simd.mul_f32s(rows[n], column));
                    simd.mul_f32s(value, chain)
                };
                let rest = simd.sub_f32s(simd.sub_f32s(products[n], taken), simd.mul_f32s(tau[n], weight));
                (of_pairs[n], of_values[n]) = (weight, simd.mul_f32s(chain, rest));
                if let Some(Shares { x, logs }) = shares {
                    let share = if T::LOG {
                        let l = simd.sub_f32s(value, vectors::<S, N>(logs, col)[n]);
                        exp2(simd, simd.mul_f32s(simd.splat_f32s(LOG2_E), l))
                    } else {
                        sign(simd, value)
                    };
                    of_values[n] = simd.sub_f32s(of_values[n], simd.mul_f32s(vectors::<S, N>(x, col)[n], share));
                }
            }
            if let Some(counts) = known.counts {
                let count = simd.splat_f32s(counts[key]);
                for n in 0..N {
                    of_pairs[n] = simd.mul_f32s(count, of_pairs[n]);
                    of_values[n] = simd.mul_f32s(count, of_values[n]);
                }
            }
            if let Some(visible) = &known.visible {
                of_pairs = visible.show(simd, [key, col], of_pairs, 0.0);
                of_values = visible.show(simd, [key, col], of_values, 0.0);
            }
            for n in 0..N {
                let centres = [vectors::<S, N>(&centres[0], col)[n], vectors::<S, N>(&centres[1], col)[n]];
                of_values[n] = chain_rule(simd, *score, terms[n], of_values[n], centres, &mut sums);
            }
            vectors_mut::<S, N>(weights, at).copy_from_slice(&of_pairs);
            vectors_mut::<S, N>(slopes, at).copy_from_slice(&of_values);
        }
        if let (Some(to), Some(sums)) = (parameters, sums) {
            to.add::<S, T>(simd, sums);
        }
    }
}

/// 1, 0 or -1.
#[inline(always)]
fn sign<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
    let falling = simd.select_f32s(simd.less_than_f32s(x, zero), simd.neg_f32s(one), zero);
    simd.select_f32s(simd.less_than_f32s(zero, x), one, falling)
}

/// The gradient of a term from that of its value; adds those of the parameters.
#[inline(always)]
fn chain_rule<S: Simd, T: PairScore>(
    simd: S,
    score: &T,
    term: S::f32s,
    of_value: S::f32s,
    centres: [S::f32s; MOST_PARAMETERS],
    sums: &mut Option<[S::f32s; MOST_PARAMETERS]>,
) -> S::f32s {
    let (zero, slopes) = (simd.splat_f32s(0.0), score.slopes(simd, term));
    // Where nothing comes back, as from pairs that are not seen, an infinite slope is none.
    let none = simd.equal_f32s(of_value, zero);
    if let Some(sums) = sums {
        for n in 0..T::PARAMETERS {
            let part = simd.mul_f32s(of_value, simd.sub_f32s(slopes.parameters[n], centres[n]));
            sums[n] = simd.add_f32s(sums[n], simd.select_f32s(none, zero, part));
        }
    }
    simd.select_f32s(none, zero, simd.mul_f32s(of_value, slopes.term))
}

/// Widest row of a tile that has typical terms.
const WIDEST: usize = 64;

/// The derivatives in the parameters at typical terms.
#[inline(always)]
fn typical<S: Simd, T: PairScore>(
    simd: S,
    score: &T,
    terms: Option<&[f32]>,
    centres: &mut [[f32; WIDEST]; MOST_PARAMETERS],
) {
    let Some(terms) = terms else { return };
    for (at, &term) in S::as_simd_f32s(terms).0.iter().enumerate() {
        let Slopes { parameters, .. } = score.slopes(simd, term);
        for (centres, slope) in centres.iter_mut().zip(parameters).take(T::PARAMETERS) {
            S::as_mut_simd_f32s(centres).0[at] = slope;
        }
    }
}

struct Affinities<'a, T> {
    score: &'a T,
    tile: Tile<'a>,
}

impl<T: PairScore> WithSimd for Affinities<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tile { data, stride, rows, width } = self.tile;
        let rate = simd.splat_f32s(LOG2_E);
        for row in data.chunks_mut(stride).take(rows) {
            for x in S::as_mut_simd_f32s(&mut row[..width]).0 {
                let value = self.score.value(simd, *x);
                *x = if T::LOG { exp2(simd, simd.mul_f32s(rate, value)) } else { value };
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
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Tile { data, stride, rows, width } = self.tile;
        let zero = simd.splat_f32s(0.0);
        let mut centres = [[0.0_f32; WIDEST]; MOST_PARAMETERS];
        typical(simd, self.score, self.sums.typical, &mut centres);
        let centres = [S::as_simd_f32s(&centres[0]).0, S::as_simd_f32s(&centres[1]).0];
        for (row, terms) in data.chunks_mut(stride).zip(self.terms.chunks(stride)).take(rows) {
            let mut sums = Some([zero; MOST_PARAMETERS]);
            let terms = S::as_simd_f32s(&terms[..width]).0;
            for (at, (x, &term)) in S::as_mut_simd_f32s(&mut row[..width]).0.iter_mut().zip(terms).enumerate() {
                // Wider tiles have no typical terms.
                let centres = if at < centres[0].len() { [centres[0][at], centres[1][at]] } else { [zero; 2] };
                *x = chain_rule(simd, self.score, term, *x, centres, &mut sums);
            }
            self.sums.add::<S, T>(simd, sums.unwrap_or([zero; MOST_PARAMETERS]));
        }
    }
}
