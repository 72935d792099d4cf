//! What the streams with products of bf16 leave open: which operands a pairing multiplies, and what it makes of the products.

use std::ops::Range;

use pulp::Simd;

use super::Scaled;
use crate::{
    simd::{
        bf16::{Left, Multiplier, Output, Right, Size},
        product::take_rows,
    },
    structure::dense::{
        distance::Distances,
        forward::TILE_STRIDE,
        head::Visible,
        normalise::{Normalisation, RowState, Tile},
        pairing::{Dot, Entries, PairTile, Pairing, Pairs, Pass, Tokens},
    },
};

/// Rows of a left and panel of a right operand, and their pairs along the depth.
pub(in crate::structure::dense) type Operands<'a> = (Left<'a>, Right<'a>, usize);

/// Some queries and keys of a head.
pub(in crate::structure::dense) struct PlacedPanel<'a, 't> {
    pub head_dim: usize,
    pub columns: Range<usize>,
    pub tokens: [&'a Tokens<'t>; 2],
}

/// A pairing by products of bf16.
pub(in crate::structure::dense) trait Rounded: Pairing {
    /// Whether [`Pairing::queries`] and [`Pairing::keys`] lay tokens out before they are rounded; else they are rounded as they lie.
    const PLACED: bool;

    /// f32 that queries take where they are laid out.
    fn placed_queries_len(count: usize, head_dim: usize, pass: Pass) -> usize {
        if Self::PLACED { Self::query_buffer_len(count, head_dim, pass) } else { 0 }
    }

    /// The same of keys.
    fn placed_keys_len(count: usize, head_dim: usize) -> usize {
        if Self::PLACED { Self::key_buffer_len(count, head_dim) } else { 0 }
    }

    /// The factor on the query at position `i` wherever it is multiplied.
    fn query_factor(self, i: u32) -> f32;
    /// One more on queries in the products that become scores: a power of two.
    fn score_factor(self) -> f32;

    /// Forward: fills `tile` with the weights of the pairs of `operands`, as [`Pairing::weigh`].
    #[allow(clippy::too_many_arguments)] // one tile's operands
    fn weigh_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        operands: Operands<'_>,
        panel: PlacedPanel<'_, '_>,
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    );

    /// Backward: fills the weights and the gradients of the scores, as [`Pairing::pull_back`], from the operands of the scores, and of
    /// the products of values and output gradients.
    fn pull_back_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        operands: [Operands<'_>; 2],
        pairs: PairTile<'_, '_>,
    );

    /// Backward: the gradient of a token, from its place in `tokens` and, of a query, its position, as [`Pairing::gradient`].
    fn rounded_gradient(
        self,
        tokens: &Tokens<'_>,
        at: (usize, Option<u32>),
        margin: f32,
        sums: &[f32],
        out: &mut [f32],
    );
}

impl<T: Normalisation> Rounded for Dot<'_, T> {
    const PLACED: bool = false;

    fn query_factor(self, i: u32) -> f32 {
        self.row(i)
    }

    fn score_factor(self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn weigh_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        operands: Operands<'_>,
        _: PlacedPanel<'_, '_>,
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    ) {
        let norm = Scaled::of(&self, tiles);
        norm.open(state);
        for from in (0..tile.keys).step_by(tiles.band()) {
            let rows = from..(from + tiles.band()).min(tile.keys);
            let (stride, cols) = (tile.stride, tile.queries);
            multiply(simd, tiles, operands, (rows.clone(), false), (&mut *tile.data, stride));
            let mut entries = Entries::<_, false> { norm, tile: &mut *tile, part: state.part, visible };
            take_rows::<S, 4>(simd, rows, cols, &mut entries);
        }
        norm.settle(simd, tile, state);
    }

    #[inline(always)]
    fn pull_back_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        [scores, products]: [Operands<'_>; 2],
        pairs: PairTile<'_, '_>,
    ) {
        let PairTile { weights, slopes, shift, delta, visible, complete, dropout, .. } = pairs;
        let norm = Scaled::of(&self, tiles);
        let mut pairs: Pairs<'_, _> = Pairs { norm, weights, slopes, shift, delta, visible, complete, dropout };
        let (rows, cols) = (visible.keys.len(), scores.1.stride);
        for from in (0..rows).step_by(tiles.band()) {
            let band = from..(from + tiles.band()).min(rows);
            multiply(simd, tiles, scores, (band.clone(), false), (&mut *pairs.weights, TILE_STRIDE));
            // `<dout, out>` is taken of these: both read the same.
            multiply(simd, tiles, products, (band.clone(), true), (&mut *pairs.slopes, TILE_STRIDE));
            take_rows::<S, 2>(simd, band, cols, &mut pairs);
        }
    }

    fn rounded_gradient(
        self,
        _: &Tokens<'_>,
        (_, position): (usize, Option<u32>),
        _: f32,
        sums: &[f32],
        out: &mut [f32],
    ) {
        let factor = self.chain * position.map_or(1.0, |i| self.row(i));
        out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}

impl Rounded for Distances<'_> {
    const PLACED: bool = true;

    fn query_factor(self, _: u32) -> f32 {
        1.0
    }

    fn score_factor(self) -> f32 {
        self.product_factor()
    }

    #[inline(always)]
    fn weigh_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        operands: Operands<'_>,
        PlacedPanel { head_dim, columns, tokens }: PlacedPanel<'_, '_>,
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    ) {
        let (keys, stride) = (tile.keys, tile.stride);
        multiply(simd, tiles, operands, (0..keys, false), (&mut *tile.data, stride));
        self.weights(simd, self.panel(head_dim, columns, tokens), visible, tile, state);
    }

    #[inline(always)]
    fn pull_back_rounded<S: Simd>(
        self,
        simd: S,
        tiles: &Multiplier,
        [scores, products]: [Operands<'_>; 2],
        mut pairs: PairTile<'_, '_>,
    ) {
        let keys = pairs.visible.keys.len();
        multiply(simd, tiles, scores, (0..keys, false), (&mut *pairs.weights, TILE_STRIDE));
        multiply(simd, tiles, products, (0..keys, true), (&mut *pairs.slopes, TILE_STRIDE));
        let panel = self.panel(pairs.head_dim, pairs.columns.clone(), [pairs.queries, pairs.keys]);
        self.slopes(simd, panel, &mut pairs);
    }

    fn rounded_gradient(
        self,
        tokens: &Tokens<'_>,
        (n, _): (usize, Option<u32>),
        margin: f32,
        sums: &[f32],
        out: &mut [f32],
    ) {
        self.gradient(tokens, n, margin, sums, out);
    }
}

/// Writes some rows of a product to those of a tile; `all` of it as [`Multiplier::multiply_parts`].
#[inline(always)]
fn multiply<S: Simd>(
    simd: S,
    tiles: &Multiplier,
    (left, right, pairs): Operands<'_>,
    (rows, all): (Range<usize>, bool),
    (tile, stride): (&mut [f32], usize),
) {
    let size = Size { rows: rows.len(), cols: right.stride, pairs };
    let into = Output { data: &mut tile[rows.start * stride..], stride, add: false };
    tiles.multiply_parts(simd, size, (left.from(rows.start), right), all, into);
}
