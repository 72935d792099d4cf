//! Sums over the tokens of one side: of products of features and values, and of features alone. They stand for all of them.

use super::{
    product::Products,
    tile::{Sizes, Tile, power, scale_rows},
};
use crate::{
    scratch::{cut, scratch_len},
    simd::{
        Level,
        product::{Left, Right, Size},
    },
};

/// Below every level.
pub(super) const FLOOR: f32 = -1e30;

/// What is summed, in units of `2^unit`, over tokens `t` with features `psi_t` and values `x_t` of level `l_t`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    pub sizes: Sizes,
    /// `sum_t 2^l_t psi_t x_t^T`, `[features][columns]`.
    pub plain: bool,
    /// Its transpose, and below it the sum with the last column of the values, `[channels + 1][width]`; else that sum alone.
    pub across: bool,
}

impl Form {
    fn lens(&self) -> [usize; 3] {
        let Self { sizes, plain, .. } = *self;
        [1, if plain { sizes.features * sizes.columns() } else { 0 }, self.across().len() * sizes.width()]
    }

    /// The columns of the values that `across` holds.
    fn across(&self) -> std::ops::Range<usize> {
        let channels = self.sizes.channels;
        if self.across { 0..channels + 1 } else { channels..channels + 1 }
    }

    /// f32 of a [`State`].
    pub fn len(&self) -> usize {
        scratch_len(self.lens())
    }
}

/// The sums.
pub(super) struct State<'m> {
    form: Form,
    pub unit: &'m mut f32,
    pub plain: &'m mut [f32],
    pub across: &'m mut [f32],
}

impl<'m> State<'m> {
    pub fn cut(memory: &'m mut [f32], form: Form) -> (Self, &'m mut [f32]) {
        let ([unit, plain, across], rest) = cut(memory, form.lens());
        (Self { form, unit: &mut unit[0], plain, across }, rest)
    }

    pub fn clear(&mut self) {
        *self.unit = FLOOR;
        self.plain.fill(0.0);
        self.across.fill(0.0);
    }

    /// Counts in units of at least `2^unit`.
    fn raise(&mut self, level: Level, unit: f32) {
        let new = self.unit.max(unit);
        let by = power(*self.unit - new);
        if by != 1.0 {
            for sums in [&mut *self.plain, &mut *self.across] {
                level.dispatch(|| sums.iter_mut().for_each(|x| *x *= by));
            }
        }
        *self.unit = new;
    }

    /// Adds the tokens of a tile, whose features may be scaled.
    pub fn add(&mut self, level: Level, products: &mut Products<'_>, tile: &mut Tile<'_>) {
        let Form { sizes, plain, .. } = self.form;
        let (rows, width, stride) = (tile.rows, sizes.width(), sizes.stride());
        self.raise(level, tile.levels[..rows].iter().copied().fold(FLOOR, f32::max));
        let unit = *self.unit;
        scale_rows(level, tile.features, width, tile.levels[..rows].iter().map(|level| level - unit));
        if plain {
            let size = Size { rows: sizes.features, cols: sizes.columns(), depth: rows };
            let left = Left { data: tile.features, row_stride: 1, depth_stride: width };
            let right = Right { data: tile.values, stride };
            products.multiply(size, left, right, (self.plain, sizes.columns()), true);
        }
        let across = self.form.across();
        let right = Right { data: &tile.features[..], stride: width };
        let left = |column: usize| Left { data: &tile.values[column..], row_stride: 1, depth_stride: stride };
        // The sums with the last column of the values are not rounded: see `Products::multiply_and_take_out`, which reads them.
        let rows_of_values = if products.rounds() { across.len() - 1 } else { across.len() };
        let size = |of_values| Size { rows: of_values, cols: width, depth: rows };
        products.multiply(size(rows_of_values), left(across.start), right, (self.across, width), true);
        if rows_of_values < across.len() {
            let into = (&mut self.across[rows_of_values * width..], width);
            Products::full(level).multiply(size(1), left(across.end - 1), right, into, true);
        }
        if tile.is_poisoned() {
            self.plain.fill(f32::NAN);
            self.across.fill(f32::NAN);
        }
    }

    /// Adds other sums.
    pub fn merge(&mut self, level: Level, other: &State<'_>) {
        self.raise(level, *other.unit);
        let by = power(*other.unit - *self.unit);
        for (sums, others) in [(&mut *self.plain, &*other.plain), (&mut *self.across, &*other.across)] {
            level.dispatch(|| sums.iter_mut().zip(others).for_each(|(x, y)| *x += by * y));
        }
    }

    /// Becomes a copy of sums of one form.
    pub fn copy(&mut self, other: &State<'_>) {
        *self.unit = *other.unit;
        self.plain.copy_from_slice(other.plain);
        self.across.copy_from_slice(other.across);
    }

    /// Exchanges two sums of one form.
    pub fn swap(&mut self, other: &mut State<'_>) {
        std::mem::swap(self.unit, other.unit);
        self.plain.swap_with_slice(other.plain);
        self.across.swap_with_slice(other.across);
    }
}
