//! What is done to a tile of pairs, `[key][query]`, between the score and the products: sums of rows, weights, gradients.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use crate::simd::{
    Level,
    math::exp2,
    product::{Left, Right, Size, Store, Term, combine},
};

/// Queries of a tile: whole vectors of every instruction set.
pub(super) const QUERIES: usize = 64;
/// Keys of a tile: with its queries and their products it stays in the second cache.
pub(super) const KEYS: usize = 128;
/// Distance of the rows of a tile: a cache line more than its width, so that they do not fall into the same sets.
pub(super) const STRIDE: usize = QUERIES + 16;

/// Writes the sums of a `term` over the channels of all pairs, `[key][query]`.
pub(super) fn terms(level: Level, term: Term, size: Size, keys: Left<'_>, queries: Right<'_>, out: &mut [f32]) {
    level.dispatch(Terms { term, size, keys, queries, out });
}

struct Terms<'a> {
    term: Term,
    size: Size,
    keys: Left<'a>,
    queries: Right<'a>,
    out: &'a mut [f32],
}

impl WithSimd for Terms<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut into = Store { data: self.out, stride: STRIDE };
        combine(simd, self.term, self.size, self.keys, self.queries, &mut into);
    }
}

/// Values of a tile's pairs, and who they are of.
pub(super) struct Pairs<'a> {
    /// Terms that the values are of.
    pub terms: &'a [f32],
    /// Values, `[keys][STRIDE]`: logarithms (`-inf` where a pair is not seen), or affinities (0).
    pub values: &'a mut [f32],
    pub keys: usize,
    /// Queries, padded to whole vectors.
    pub width: usize,
    pub log: bool,
    /// Of every key: equal entries that it stands for.
    pub counts: &'a [f32],
}

/// Sums of `|g|^p` over the keys so far, per query: for log scores in units of `exp(peak)`.
pub(super) struct Sums {
    pub peaks: Vec<f32>,
    /// The terms of the peaks.
    pub terms: Vec<f32>,
    pub totals: Vec<f64>,
}

impl Sums {
    pub fn new(log: bool) -> Self {
        let peak = if log { f32::NEG_INFINITY } else { 0.0 };
        Self { peaks: vec![peak; QUERIES], terms: vec![0.0; QUERIES], totals: vec![0.0; QUERIES] }
    }

    /// Adds a tile; `power` is 1 or 2. The values are overwritten.
    pub fn add(&mut self, level: Level, pairs: &mut Pairs<'_>, power: f32) {
        let before: Vec<f32> = self.peaks.clone();
        let mut part = [0.0; QUERIES];
        level.dispatch(AddSums { pairs, power, peaks: &mut self.peaks, terms: &mut self.terms, part: &mut part });
        for (n, &part) in part.iter().enumerate() {
            let (old, new) = (before[n], self.peaks[n]);
            if old < new && old > f32::NEG_INFINITY {
                self.totals[n] *= (f64::from(power) * (f64::from(old) - f64::from(new))).exp();
            }
            self.totals[n] += f64::from(part);
        }
    }

    /// Adds the first row of other sums to row `at`.
    pub fn merge(&mut self, at: usize, other: &Self, power: f32) {
        let peak = self.peaks[at].max(other.peaks[0]);
        if other.peaks[0] > self.peaks[at] {
            self.terms[at] = other.terms[0];
        }
        let share = |x: f32| if x == peak { 1.0 } else { (f64::from(power) * (f64::from(x) - f64::from(peak))).exp() };
        self.totals[at] = self.totals[at] * share(self.peaks[at]) + other.totals[0] * share(other.peaks[0]);
        self.peaks[at] = peak;
    }

    /// `ln sum |g|^p` of every query; `-inf` for none.
    pub fn logs(&self, log: bool, power: f64) -> impl Iterator<Item = f64> + '_ {
        let of = move |(&peak, &total): (&f32, &f64)| match (log, total > 0.0) {
            (_, false) => f64::NEG_INFINITY,
            (true, _) => power * f64::from(peak) + total.ln(),
            (false, _) => total.ln(),
        };
        self.peaks.iter().zip(&self.totals).map(of)
    }
}

struct AddSums<'a, 'p> {
    pairs: &'a mut Pairs<'p>,
    power: f32,
    peaks: &'a mut [f32],
    terms: &'a mut [f32],
    part: &'a mut [f32; QUERIES],
}

impl WithSimd for AddSums<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pairs, power, peaks, terms, part } = self;
        let Pairs { keys, width, log, counts, .. } = *pairs;
        let peaks = S::as_mut_simd_f32s(&mut peaks[..width]).0;
        if log {
            let of_peaks = S::as_mut_simd_f32s(&mut terms[..width]).0;
            for (row, terms) in pairs.values.chunks(STRIDE).zip(pairs.terms.chunks(STRIDE)).take(keys) {
                let pairs = S::as_simd_f32s(&row[..width]).0.iter().zip(S::as_simd_f32s(&terms[..width]).0);
                for ((peak, of_peak), (&x, &term)) in peaks.iter_mut().zip(&mut *of_peaks).zip(pairs) {
                    *of_peak = simd.select_f32s(simd.less_than_f32s(*peak, x), term, *of_peak);
                    *peak = simd.max_f32s(*peak, x);
                }
            }
        }
        let part = S::as_mut_simd_f32s(&mut part[..width]).0;
        let (rate, lowest) = (simd.splat_f32s(power * LOG2_E), simd.splat_f32s(f32::MIN));
        for (row, &count) in pairs.values.chunks(STRIDE).zip(counts).take(keys) {
            let count = simd.splat_f32s(count);
            for ((part, &x), &peak) in part.iter_mut().zip(S::as_simd_f32s(&row[..width]).0).zip(&*peaks) {
                let term = if log {
                    // A query that has seen nothing has no peak: what it has not seen stays nothing.
                    exp2(simd, simd.mul_f32s(rate, simd.sub_f32s(x, simd.max_f32s(peak, lowest))))
                } else if power == 1.0 {
                    simd.abs_f32s(x)
                } else {
                    simd.mul_f32s(x, x)
                };
                *part = simd.mul_add_e_f32s(term, count, *part);
            }
        }
    }
}

/// What makes weights of values: `fine exp(l - row - column)`, or `row column g`.
pub(super) struct Factors<'a> {
    pub rows: &'a [f32],
    /// What a row's logarithm lost when it was rounded, as a factor: of large scores that is more than rounding.
    pub fine: &'a [f32],
    pub columns: &'a [f32],
}

/// Makes weights of the values in place, times the keys' counts.
pub(super) fn weigh(level: Level, pairs: &mut Pairs<'_>, factors: Factors<'_>) {
    level.dispatch(Weigh { pairs, factors });
}

struct Weigh<'a, 'p> {
    pairs: &'a mut Pairs<'p>,
    factors: Factors<'a>,
}

/// The weight of one entry.
#[inline(always)]
fn weight<S: Simd>(simd: S, log: bool, value: S::f32s, [row, fine, column]: [S::f32s; 3]) -> S::f32s {
    if log {
        let l = simd.sub_f32s(simd.sub_f32s(value, row), column);
        simd.mul_f32s(fine, exp2(simd, simd.mul_f32s(simd.splat_f32s(LOG2_E), l)))
    } else {
        simd.mul_f32s(simd.mul_f32s(value, row), column)
    }
}

impl WithSimd for Weigh<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pairs, factors } = self;
        let Pairs { keys, width, log, counts, .. } = *pairs;
        let rows = S::as_simd_f32s(&factors.rows[..width]).0;
        let fine = S::as_simd_f32s(&factors.fine[..width]).0;
        for ((row, &count), &column) in pairs.values.chunks_mut(STRIDE).zip(counts).zip(factors.columns).take(keys) {
            let (count, column) = (simd.splat_f32s(count), simd.splat_f32s(column));
            let rows = rows.iter().zip(fine);
            for (x, (&factor, &fine)) in S::as_mut_simd_f32s(&mut row[..width]).0.iter_mut().zip(rows) {
                *x = simd.mul_f32s(weight(simd, log, *x, [factor, fine, column]), count);
            }
        }
    }
}

/// What is taken out of the products of values and output gradients, `P`: `P - sign(g) (a p + c d) - tau W`, with `a`, `c`,
/// `tau` per query and `p`, `d` per key.
pub(super) struct Projection<'a> {
    pub a: &'a [f32],
    pub c: &'a [f32],
    pub tau: &'a [f32],
    pub p: &'a [f32],
    pub d: &'a [f32],
}

/// Makes weights of the values (times the keys' counts), and gradients of the values of the products.
pub(super) fn differentiate(
    level: Level,
    pairs: &mut Pairs<'_>,
    factors: Factors<'_>,
    projection: Projection<'_>,
    products: &mut [f32],
) {
    level.dispatch(Differentiate { pairs, factors, projection, products });
}

struct Differentiate<'a, 'p> {
    pairs: &'a mut Pairs<'p>,
    factors: Factors<'a>,
    projection: Projection<'a>,
    products: &'a mut [f32],
}

impl WithSimd for Differentiate<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pairs, factors, projection, products } = self;
        let Pairs { keys, width, log, counts, .. } = *pairs;
        let vectors = width * size_of::<f32>() / size_of::<S::f32s>();
        let rows = S::as_simd_f32s(&factors.rows[..width]).0;
        let fine = S::as_simd_f32s(&factors.fine[..width]).0;
        let a = S::as_simd_f32s(&projection.a[..width]).0;
        let c = S::as_simd_f32s(&projection.c[..width]).0;
        let tau = S::as_simd_f32s(&projection.tau[..width]).0;
        let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
        #[allow(clippy::needless_range_loop)] // one key's place in six slices
        for key in 0..keys {
            let range = key * STRIDE..key * STRIDE + width;
            let values = S::as_mut_simd_f32s(&mut pairs.values[range.clone()]).0;
            let products = S::as_mut_simd_f32s(&mut products[range]).0;
            let (count, column) = (simd.splat_f32s(counts[key]), simd.splat_f32s(factors.columns[key]));
            let (p, d) = (simd.splat_f32s(projection.p[key]), simd.splat_f32s(projection.d[key]));
            for n in 0..vectors {
                let w = weight(simd, log, values[n], [rows[n], fine[n], column]);
                let mut taken = simd.mul_add_e_f32s(a[n], p, simd.mul_f32s(c[n], d));
                let mut chain = w;
                if !log {
                    let falling = simd.select_f32s(simd.less_than_f32s(values[n], zero), simd.neg_f32s(one), zero);
                    let sign = simd.select_f32s(simd.less_than_f32s(zero, values[n]), one, falling);
                    taken = simd.mul_f32s(sign, taken);
                    chain = simd.mul_f32s(rows[n], column);
                }
                let rest = simd.sub_f32s(simd.sub_f32s(products[n], taken), simd.mul_f32s(tau[n], w));
                products[n] = simd.mul_f32s(count, simd.mul_f32s(chain, rest));
                values[n] = simd.mul_f32s(count, w);
            }
        }
    }
}
