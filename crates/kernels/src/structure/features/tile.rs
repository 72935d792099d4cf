//! A chunk of tokens on one side of the operator, and the products between two of them.

use crate::{
    scratch::{cut, scratch_len},
    simd::Level,
    structure::dense::padded,
};

/// Tokens of a chunk. Causal, pairs within a chunk are met one by one: two products of `CHUNK` per token beside those with the sums
/// over all earlier tokens, of which there are as many as features.
pub(super) const CHUNK: usize = 64;

/// Sizes of one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub dim: usize,
    pub features: usize,
    pub channels: usize,
    /// Parts of bf16 that operands of products have; 0 in f32.
    pub parts: usize,
}

impl Sizes {
    /// Distance of rows of features.
    pub fn width(&self) -> usize {
        padded(self.features)
    }

    /// Distance of rows of values: their channels, and one more.
    pub fn stride(&self) -> usize {
        padded(self.channels + 1)
    }

    /// Columns of a product with values.
    pub fn columns(&self) -> usize {
        padded(self.channels)
    }

    /// f32 of a [`Tile`].
    pub fn tile(&self) -> usize {
        scratch_len([CHUNK * self.width(), CHUNK * self.stride(), CHUNK, CHUNK])
    }
}

/// Tokens of one side.
pub(super) struct Tile<'m> {
    pub rows: usize,
    /// `[rows][width]`.
    pub features: &'m mut [f32],
    /// `[rows][stride]`: of a key its value and 1; of a query what comes back to its weights.
    pub values: &'m mut [f32],
    /// Of a key the exponent of its features; of a query that of its row sum.
    pub levels: &'m mut [f32],
    /// 0, or NaN for a token that is no number: it must reach only those that see it.
    pub poison: &'m mut [f32],
}

impl<'m> Tile<'m> {
    pub fn cut(memory: &'m mut [f32], sizes: &Sizes) -> (Self, &'m mut [f32]) {
        let lens = [CHUNK * sizes.width(), CHUNK * sizes.stride(), CHUNK, CHUNK];
        let ([features, values, levels, poison], rest) = cut(memory, lens);
        (Self { rows: 0, features, values, levels, poison }, rest)
    }

    /// Takes a token out.
    pub fn absent(&mut self, row: usize, sizes: &Sizes, level: f32) {
        self.features[row * sizes.width()..][..sizes.width()].fill(0.0);
        self.values[row * sizes.stride()..][..sizes.stride()].fill(0.0);
        self.levels[row] = level;
    }

    /// Takes out the tokens that are no numbers, and notes them: zero times what they hold would be no number either, and reach rows
    /// that do not see them.
    pub fn settle(&mut self, level: Level, sizes: &Sizes, absent: f32) {
        for row in 0..self.rows {
            let features = &self.features[row * sizes.width()..][..sizes.width()];
            let values = &self.values[row * sizes.stride()..][..sizes.stride()];
            let largest = |x: &[f32]| x.iter().fold(0_u32, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
            let finite = level.dispatch(|| largest(features).max(largest(values))) < f32::INFINITY.to_bits();
            self.poison[row] = if finite { 0.0 } else { f32::NAN };
            if !finite {
                self.absent(row, sizes, absent);
            }
        }
    }

    /// Whether a token is no number.
    pub fn is_poisoned(&self) -> bool {
        self.poison[..self.rows].iter().any(|x| x.is_nan())
    }
}

/// Which pairs within a chunk meet: queries see keys up to `shift` behind their own position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Triangle {
    /// Keys of the chunk before the first query's own.
    pub shift: usize,
    /// Whether rows are keys and columns queries.
    pub keys: bool,
}

impl Triangle {
    /// The columns that a row meets, of `columns`.
    fn of(&self, row: usize, columns: usize) -> [usize; 2] {
        if self.keys {
            [row.saturating_sub(self.shift).min(columns), columns]
        } else {
            [0, (row + self.shift + 1).min(columns)]
        }
    }
}

/// What pairs of a chunk weigh, from their products `pairs [rows][CHUNK]`: in units of the row's level, and 0 where they do not meet.
pub(super) fn settle_pairs(level: Level, pairs: &mut [f32], rows: &Tile<'_>, columns: &Tile<'_>, seen: Triangle) {
    let levels = &columns.levels[..columns.rows];
    let one = |row: f32| levels.iter().all(|&x| x == row);
    level.dispatch(|| {
        for (n, pairs) in pairs.chunks_exact_mut(CHUNK).enumerate().take(rows.rows) {
            let [from, to] = seen.of(n, columns.rows);
            pairs[..from].fill(0.0);
            pairs[to..].fill(0.0);
            if !one(rows.levels[n]) {
                for (x, column) in pairs[from..to].iter_mut().zip(&levels[from..to]) {
                    *x *= power(column - rows.levels[n]);
                }
            }
            for (x, poison) in pairs[from..to].iter_mut().zip(&columns.poison[from..to]) {
                *x += poison + rows.poison[n];
            }
        }
    });
}

/// `2^x` of a whole number that is at most 0; 0 where that is no normal f32.
#[inline(always)]
pub(super) fn power(x: f32) -> f32 {
    if x < -126.0 { 0.0 } else { f32::from_bits(((x.min(0.0) as i32 + 127) as u32) << 23) }
}

/// Multiplies rows of `x` by powers of two.
pub(super) fn scale_rows(level: Level, x: &mut [f32], stride: usize, exponents: impl Iterator<Item = f32>) {
    for (row, exponent) in x.chunks_exact_mut(stride).zip(exponents) {
        if exponent != 0.0 {
            let by = power(exponent);
            level.dispatch(|| row.iter_mut().for_each(|x| *x *= by));
        }
    }
}

/// Writes `columns` columns of `rows` rows of `x`, `stride` apart, as rows of [`CHUNK`], zero where there are no more.
pub(super) fn transpose(x: &[f32], rows: usize, stride: usize, columns: usize, out: &mut [f32]) {
    const SIDE: usize = 8;
    if rows < CHUNK {
        out[..columns * CHUNK].fill(0.0);
    }
    for column in (0..columns).step_by(SIDE) {
        for row in (0..rows).step_by(SIDE) {
            for c in column..(column + SIDE).min(columns) {
                for r in row..(row + SIDE).min(rows) {
                    out[c * CHUNK + r] = x[r * stride + c];
                }
            }
        }
    }
}
