//! How large the tokens of a call are, those alone that its masks keep.

use super::{Call, Shape, TokenRows, View};
use crate::simd::{Level, rows};

/// Tokens and their mask: which of them count.
#[derive(Clone, Copy)]
pub(crate) struct Masked<'a> {
    x: View<'a>,
    /// `[batch, seq]`; `None` keeps all.
    keep: Option<&'a [bool]>,
    heads: usize,
}

impl<'a> Masked<'a> {
    /// The queries.
    pub fn queries(call: &Call<'a>) -> Self {
        Self::of_queries(call, call.q)
    }

    /// The keys.
    pub fn keys(call: &Call<'a>) -> Self {
        Self::of_keys(call, call.k)
    }

    /// The values.
    pub fn values(call: &Call<'a>) -> Self {
        Self::of_keys(call, call.v)
    }

    /// `x`, which has a row for every query.
    pub fn of_queries(call: &Call<'a>, x: View<'a>) -> Self {
        Self { x, keep: call.mask.query, heads: call.shape.heads }
    }

    /// `x`, which has a row for every key.
    pub fn of_keys(call: &Call<'a>, x: View<'a>) -> Self {
        Self { x, keep: call.mask.key, heads: call.shape.heads }
    }

    /// Number of slices, `batch * heads`; 0 of an empty tensor.
    pub fn slices(self) -> usize {
        if self.x.layout().len() == 0 { 0 } else { self.x.layout().slices() }
    }

    fn keeps(self, slice: usize, token: usize) -> bool {
        self.keep.is_none_or(|keep| keep[slice / self.heads * self.x.layout().tokens + token])
    }

    fn slice(self, slice: usize) -> TokenRows<'a> {
        self.x.slice(slice)
    }

    /// The tokens of one slice that count.
    pub fn rows(self, slice: usize) -> impl DoubleEndedIterator<Item = &'a [f32]> {
        let rows = self.slice(slice).rows().enumerate();
        rows.filter(move |&(token, _)| self.keeps(slice, token)).map(|(_, row)| row)
    }

    /// The largest magnitude of one slice; 0 of no token.
    pub fn largest(self, level: Level, slice: usize) -> f32 {
        let tokens = self.slice(slice);
        if let Some(all) = tokens.as_slice(0..tokens.tokens).filter(|_| self.keep.is_none()) {
            return rows::max_abs(level, all);
        }
        self.sizes(level, slice).fold(0.0, f32::max)
    }

    /// The largest magnitude of every token of one slice that counts.
    pub fn sizes(self, level: Level, slice: usize) -> impl Iterator<Item = f32> {
        self.rows(slice).map(move |row| rows::max_abs(level, row))
    }

    /// How many times the largest of the first `tokens` of one slice is as large as the smallest that is not zero.
    pub fn spread(self, level: Level, slice: usize, tokens: usize) -> f64 {
        let first = self.slice(slice).rows().take(tokens).enumerate();
        let kept = first.filter(|&(token, _)| self.keeps(slice, token));
        let sizes = kept.map(|(_, row)| rows::max_abs(level, row)).filter(|&size| size > 0.0);
        let [least, most] = sizes.fold([f32::INFINITY, 0.0], |[least, most], x| [least.min(x), most.max(x)]);
        if most > 0.0 { f64::from(most) / f64::from(least) } else { 1.0 }
    }

    /// Whether a token of one slice is `least` from `origin` in some channel: of ordinary tokens one of the first is.
    pub fn leaves(self, slice: usize, origin: &'a [f32], least: f64) -> bool {
        self.differences(slice, origin).any(|x| x >= least)
    }

    /// The largest difference of the tokens of one slice from `origin` in any channel.
    pub fn extent(self, slice: usize, origin: &'a [f32]) -> f64 {
        self.differences(slice, origin).fold(0.0, f64::max)
    }

    fn differences(self, slice: usize, origin: &'a [f32]) -> impl Iterator<Item = f64> {
        let pairs = self.rows(slice).flat_map(move |row| row.iter().zip(origin));
        pairs.map(|(&x, &y)| (f64::from(x) - f64::from(y)).abs())
    }

    /// The exponents of the first token of one slice that is not zero, and of the largest.
    pub fn first_and_largest(self, level: Level, slice: usize) -> [i32; 2] {
        let first = self.sizes(level, slice).find(|&size| size > 0.0).unwrap_or(0.0);
        [first, self.largest(level, slice)].map(exponent_of)
    }
}

/// The power of two that is at most `x`; that of 1 for 0.
pub(crate) fn exponent_of(x: f32) -> i32 {
    if x == 0.0 { 0 } else { f64::from(x).log2().floor() as i32 }
}

/// The largest magnitudes among one slice's queries and among its keys.
pub(crate) fn largest(call: &Call<'_>, slice: usize) -> [f32; 2] {
    [Masked::queries(call), Masked::keys(call)].map(|tokens| tokens.largest(call.level, slice))
}

/// For every query the exponent of the largest product with a key that it, or one before it, could have, as far as magnitudes
/// tell: what a causal row is computed in units of.
pub(crate) fn row_exponents(call: &Call<'_>, slice: usize) -> impl Iterator<Item = i32> {
    let (sides, level) = ([Masked::queries(call), Masked::keys(call)], call.level);
    let Shape { seq_q, .. } = call.shape;
    (0..seq_q).scan([0_f32; 2], move |most, token| {
        for (most, side) in most.iter_mut().zip(sides) {
            if side.keeps(slice, token) {
                *most = most.max(rows::max_abs(level, side.x.row(slice, token)));
            }
        }
        Some((exponent_of(most[0]) + exponent_of(most[1])).clamp(-126, 126))
    })
}
