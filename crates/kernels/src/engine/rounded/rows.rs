//! Operands that all blocks of a slice share.

use super::super::{columns::Columns, pool::Zeros};
use crate::{
    simd::bf16::{Left, PAIRS, ROWS, Right, pairs},
    structure::dense::padded,
};

/// Operands of columns that all blocks of a slice share: rows of images and of values, and pairs of these rows; empty where a pass
/// does not take them.
pub(in crate::engine) struct Shared<'p> {
    pub(super) columns: usize,
    pub(super) parts: usize,
    pub keys: Zeros<'p>,
    pub key_pairs: Zeros<'p>,
    pub values: Zeros<'p>,
    pub value_pairs: Zeros<'p>,
}

/// f32 of [`Shared`] in either pass, of each part.
pub(in crate::engine) fn shared_len(columns: usize, [dim, value_dim]: [usize; 2]) -> [usize; 2] {
    let [rows, woven] = [rows_len(columns), pairs_len(columns)];
    let forward = rows * pairs(dim) + woven * padded(value_dim);
    [forward, rows * (pairs(dim) + pairs(value_dim)) + woven * padded(dim)]
}

/// Rows that a tile of columns, wherever it begins, may read.
pub(super) fn rows_len(columns: usize) -> usize {
    (columns + ROWS).next_multiple_of(ROWS)
}

/// The same of pairs.
pub(super) fn pairs_len(columns: usize) -> usize {
    pairs(columns) + PAIRS
}

impl Shared<'_> {
    /// The rows of a tile's columns.
    pub fn rows<'x>(&self, of: &'x [f32], columns: &Columns<'_>, channels: usize) -> Option<Left<'x>> {
        let Columns::Run(range) = columns else { return None };
        let (data, second) = (bytemuck::cast_slice(of), pairs(channels));
        let stride = self.parts * second;
        (!data.is_empty()).then(|| Left { data: &data[range.start * stride..], stride, second })
    }

    /// The pairs of a tile's columns, where these begin with a pair and nothing but zeros is read behind them.
    pub fn pairs<'x>(&self, of: &'x [f32], columns: &Columns<'_>, channels: usize) -> Option<Right<'x>> {
        let Columns::Run(range) = columns else { return None };
        let (data, second) = (bytemuck::cast_slice(of), padded(channels));
        let stride = self.parts * second;
        let whole = range.len().is_multiple_of(2 * PAIRS) || range.end == self.columns;
        let fits = !data.is_empty() && range.start.is_multiple_of(2) && whole;
        fits.then(|| Right { data: &data[range.start / 2 * stride..], stride, second })
    }
}
