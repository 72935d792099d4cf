//! How the tokens of one head relate in pairs: what the streams leave open.

use std::ops::Range;

use pulp::Simd;

use super::{
    dropout::PanelDropout,
    forward::TILE_STRIDE,
    head::{Head, Rows, Visible, padded, transpose},
    normalise::{Normalisation, RowState, Tile},
};
use crate::{
    scratch::cut,
    simd::product::{
        InPlace, Left, Right, Sink, Size, Store, Term, product, store_sums, take_rows, vectors, vectors_mut,
    },
};

/// Which stream the tokens are laid out for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// Some tokens of a head as a [`Pairing`] laid them out; what it does not need is empty.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'t> {
    /// Queries for the scores, in panels (see [`transpose`]).
    pub panels: &'t [f32],
    /// The same before anything was rounded.
    pub exact_panels: &'t [f32],
    /// Keys for the scores; in the backward pass, the right operand of the products with the scores' gradients.
    pub rows: Rows<'t>,
    /// The same before anything was rounded.
    pub exact: Rows<'t>,
    /// One number per token, and two more.
    pub norms: &'t [f32],
    pub terms: [&'t [f32]; 2],
}

impl<'t> Tokens<'t> {
    pub const NONE: Self =
        Self { panels: &[], exact_panels: &[], rows: Rows::NONE, exact: Rows::NONE, norms: &[], terms: [&[]; 2] };

    /// The panel that starts at query `first`, of `width` columns.
    pub fn panel(panels: &'t [f32], dim: usize, columns: &Range<usize>) -> Right<'t> {
        Right { data: &panels[columns.start * dim..columns.end * dim], stride: columns.len() }
    }
}

/// One tile of the backward pass.
pub(super) struct PairTile<'a, 't> {
    pub head_dim: usize,
    pub value_dim: usize,
    pub queries: &'a Tokens<'t>,
    pub keys: &'a Tokens<'t>,
    /// The queries of the panel, among all that are kept; padded to whole vectors.
    pub columns: Range<usize>,
    pub values: Rows<'t>,
    pub gradients: Right<'t>,
    /// Per query of the panel.
    pub shift: &'a [f32],
    pub delta: &'a [f32],
    /// Positions of keys and limits of queries.
    pub visible: Visible<'a>,
    /// Whether every query of the panel sees every key.
    pub complete: bool,
    /// Factors on the weights.
    pub dropout: Option<PanelDropout<'a>>,
    /// Take the weights and the gradients of the products, `[key][query]`, rows [`TILE_STRIDE`] apart.
    pub weights: &'a mut [f32],
    pub slopes: &'a mut [f32],
    pub margins: Margins<'a>,
}

impl PairTile<'_, '_> {
    /// Multiplies weights or slopes by the draws' factors, if there are any.
    #[inline(always)]
    pub fn apply_dropout<S: Simd>(&mut self, simd: S, tile: fn(&mut Self) -> &mut [f32]) {
        if let Some(dropout) = self.dropout {
            let (keys, queries) = (self.visible.keys, self.columns.len());
            dropout.scale(simd, keys, &mut Tile { data: tile(self), stride: TILE_STRIDE, keys: keys.len(), queries });
        }
    }
}

/// What a pairing sums up beside the products.
pub(super) struct Margins<'a> {
    /// Over the keys, per query of the panel.
    pub query: &'a mut [f32],
    /// Over the queries, per key of the tile.
    pub key: &'a mut [f32],
    /// Gradients of keys and queries that no product makes: rows of `padded(head_dim)`.
    pub dk: &'a mut [f32],
    pub dq: &'a mut [f32],
    /// Over all pairs, per parameter.
    pub parameters: &'a mut [f64],
}

/// How the tokens of one head are laid out, what becomes of a tile of pairs, and how gradients come back.
pub(super) trait Pairing: Copy + Send + Sync {
    /// Numbers in [`Margins::parameters`].
    const PARAMETERS: usize = 0;
    /// Whether the tokens' gradients take [`Margins::query`] and [`Margins::key`].
    const MARGINS: bool = false;

    /// f32 that [`Pairing::queries`] takes for `count` queries.
    fn query_buffer_len(count: usize, head_dim: usize, pass: Pass) -> usize;
    /// f32 that [`Pairing::keys`] takes for `count` keys.
    fn key_buffer_len(count: usize, head_dim: usize) -> usize;
    /// Lays out the queries at the positions `kept`.
    fn queries<'t>(self, head: &Head<'t>, kept: &[u32], pass: Pass, buffer: &'t mut [f32]) -> Tokens<'t>;
    /// Lays out the keys at the positions `kept`.
    fn keys<'t>(self, head: &Head<'t>, kept: &[u32], pass: Pass, buffer: &'t mut [f32]) -> Tokens<'t>;

    /// Forward: fills `tile` with the weights of `columns` of the queries, keeping their state. `visible` is given where
    /// not every pair is visible.
    #[allow(clippy::too_many_arguments)] // one tile's operands
    fn weigh<S: Simd>(
        self,
        simd: S,
        head_dim: usize,
        columns: Range<usize>,
        tokens: [&Tokens<'_>; 2],
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    );
    /// Forward, after the last tile, from a query's peak and total: the factor on its output, and the statistic to be saved.
    fn close(self, peak: f32, total: f64) -> (f32, f64);

    /// Backward: fills the weights and the gradients of the scores.
    fn pull_back<S: Simd>(self, simd: S, pairs: PairTile<'_, '_>);
    /// Backward: the gradient of token `n` of `tokens`, from the sums of the products and its margin.
    fn gradient(self, tokens: &Tokens<'_>, n: usize, margin: f32, sums: &[f32], out: &mut [f32]);
}

/// Pairs by their inner product.
#[derive(Clone, Copy)]
pub(super) struct Dot<'a, N> {
    pub norm: N,
    /// Factor on the product of query and key.
    pub logit: f32,
    /// One more for every query of the head; empty for none.
    pub rows: &'a [f32],
    /// Factor on the gradients of queries and keys.
    pub chain: f32,
}

impl<N> Dot<'_, N> {
    /// The factor on the products of the query at position `i`.
    pub fn row(&self, i: u32) -> f32 {
        self.rows.get(i as usize).copied().unwrap_or(1.0)
    }
}

impl<T: Normalisation> Pairing for Dot<'_, T> {
    fn query_buffer_len(count: usize, head_dim: usize, pass: Pass) -> usize {
        let rows = if pass == Pass::Backward { padded(count * padded(head_dim)) + padded(count) } else { 0 };
        padded(padded(count) * head_dim) + rows
    }

    fn key_buffer_len(count: usize, head_dim: usize) -> usize {
        count * padded(head_dim)
    }

    fn queries<'t>(self, head: &Head<'t>, kept: &[u32], pass: Pass, buffer: &'t mut [f32]) -> Tokens<'t> {
        let ([panels], buffer) = cut(buffer, [padded(kept.len()) * head.head_dim]);
        transpose(head.q, kept, |n| self.logit * self.row(kept[n]), panels);
        if pass == Pass::Forward {
            return Tokens { panels, ..Tokens::NONE };
        }
        if self.rows.is_empty() {
            return Tokens { panels, rows: Rows::gather(head.q, kept, true, buffer), ..Tokens::NONE };
        }
        let ([norms], buffer) = cut(buffer, [kept.len()]);
        norms.iter_mut().zip(kept).for_each(|(norm, &i)| *norm = self.row(i));
        let rows = Rows::copy(head.q, kept, |n| self.row(kept[n]), buffer);
        Tokens { panels, rows, norms, ..Tokens::NONE }
    }

    fn keys<'t>(self, head: &Head<'t>, kept: &[u32], pass: Pass, buffer: &'t mut [f32]) -> Tokens<'t> {
        let rows = Rows::gather(head.k, kept, pass == Pass::Backward, buffer);
        Tokens { rows, ..Tokens::NONE }
    }

    #[inline(always)]
    fn weigh<S: Simd>(
        self,
        simd: S,
        head_dim: usize,
        columns: Range<usize>,
        [queries, keys]: [&Tokens<'_>; 2],
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    ) {
        let panel = Tokens::panel(queries.panels, head_dim, &columns);
        score(simd, self.norm, (panel, head_dim), keys.rows, visible, tile, state);
    }

    fn close(self, peak: f32, total: f64) -> (f32, f64) {
        self.norm.close(peak, total)
    }

    #[inline(always)]
    fn pull_back<S: Simd>(self, simd: S, tile: PairTile<'_, '_>) {
        let PairTile { head_dim, value_dim, ref columns, visible, .. } = tile;
        let size = |depth| Size { rows: visible.keys.len(), cols: columns.len(), depth };
        let panel = Tokens::panel(tile.queries.panels, head_dim, columns);
        let mut logits = Store { data: &mut *tile.weights, stride: TILE_STRIDE };
        product(simd, size(head_dim), tile.keys.rows.as_left(), panel, &mut logits);
        let PairTile { weights, slopes, shift, delta, complete, dropout, .. } = tile;
        let pairs = Pairs { norm: self.norm, weights, slopes, shift, delta, visible, complete, dropout };
        pairs.differentiate(simd, size(value_dim), tile.values.as_left(), tile.gradients);
    }

    fn gradient(self, tokens: &Tokens<'_>, n: usize, _: f32, sums: &[f32], out: &mut [f32]) {
        let factor = tokens.norms.get(n).map_or(self.chain, |row| self.chain * row);
        out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor);
    }
}

/// Fills `tile` with the weights of a panel of queries and the keys `k`, by their products. `visible` is given where not
/// every pair is visible.
#[inline(always)]
pub(super) fn score<S: Simd, N: Normalisation>(
    simd: S,
    norm: N,
    (panel, depth): (Right<'_>, usize),
    k: Rows<'_>,
    visible: Option<Visible<'_>>,
    tile: &mut Tile<'_>,
    state: &mut RowState<'_>,
) {
    norm.open(state);
    let size = Size { rows: tile.keys, cols: tile.queries, depth };
    let part = &mut *state.part;
    if visible.is_none() {
        product(simd, size, k.as_left(), panel, &mut Entries::<_, true> { norm, tile: &mut *tile, part, visible });
    } else {
        let mut entries = Entries::<_, false> { norm, tile: &mut *tile, part, visible };
        store_sums(simd, Term::Product, size, k.as_left(), panel, entries.products());
        take_rows::<S, 1>(simd, 0..size.rows, size.cols, &mut entries);
    }
    norm.settle(simd, tile, state);
}

/// Makes entries of a product's logits. Of `PLAIN` tiles, where all pairs are seen, it takes the product's blocks out of their registers, and is compiled for
/// each of their shapes; others are given stored ones ([`store_sums`]), with the same bits.
pub(super) struct Entries<'a, 't, N, const PLAIN: bool> {
    pub norm: N,
    pub tile: &'a mut Tile<'t>,
    pub part: &'a mut [f32],
    pub visible: Option<Visible<'a>>,
}

impl<N, const PLAIN: bool> InPlace for Entries<'_, '_, N, PLAIN> {
    fn products(&mut self) -> Store<'_> {
        Store { data: self.tile.data, stride: self.tile.stride }
    }
}

impl<S: Simd, T: Normalisation, const PLAIN: bool> Sink<S> for Entries<'_, '_, T, PLAIN> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        // Copied out and back: in memory, the running values would be a chain of stores and loads.
        let mut part = [simd.splat_f32s(0.0); N];
        part.copy_from_slice(vectors::<S, N>(self.part, col));
        for (m, logits) in block.iter().enumerate() {
            let entries = vectors_mut::<S, N>(self.tile.data, (row + m) * self.tile.stride + col);
            for n in 0..N {
                entries[n] = self.norm.entry(simd, logits[n]);
            }
            if let (false, Some(visible)) = (PLAIN, &self.visible) {
                let mut seen = [simd.splat_f32s(0.0); N];
                seen.copy_from_slice(entries);
                entries.copy_from_slice(&visible.show(simd, [row + m, col], seen, T::ABSENT));
            }
            for n in 0..N {
                part[n] = self.norm.gather(simd, part[n], entries[n]);
            }
        }
        vectors_mut::<S, N>(self.part, col).copy_from_slice(&part);
    }
}

/// Makes weights and gradients of the logits and of the products of values and output gradients: of `PLAIN` ones, all seen and none dropped,
/// out of registers, of others as they are stored, as [`Entries`].
pub(in crate::structure) struct Pairs<'a, N, const PLAIN: bool = false> {
    pub norm: N,
    /// Holds the logits, and then the weights.
    pub weights: &'a mut [f32],
    /// Takes the gradients, of products that may be stored there.
    pub slopes: &'a mut [f32],
    pub shift: &'a [f32],
    pub delta: &'a [f32],
    pub visible: Visible<'a>,
    pub complete: bool,
    /// Factors on the weights.
    pub dropout: Option<PanelDropout<'a>>,
}

impl<N, const PLAIN: bool> InPlace for Pairs<'_, N, PLAIN> {
    fn products(&mut self) -> Store<'_> {
        Store { data: self.slopes, stride: TILE_STRIDE }
    }
}

impl<'a, T: Normalisation> Pairs<'a, T> {
    /// Of the product of `values` and a panel of output gradients.
    #[inline(always)]
    pub fn differentiate<S: Simd>(mut self, simd: S, size: Size, values: Left<'_>, gradients: Right<'_>) {
        if self.complete && self.dropout.is_none() {
            product(simd, size, values, gradients, &mut self.plain());
        } else {
            store_sums(simd, Term::Product, size, values, gradients, self.products());
            take_rows::<S, 1>(simd, 0..size.rows, size.cols, &mut self);
        }
    }

    fn plain(self) -> Pairs<'a, T, true> {
        let Self { norm, weights, slopes, shift, delta, visible, complete, dropout } = self;
        Pairs { norm, weights, slopes, shift, delta, visible, complete, dropout }
    }
}

impl<S: Simd, T: Normalisation, const PLAIN: bool> Sink<S> for Pairs<'_, T, PLAIN> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let mut rows = [[simd.splat_f32s(0.0); 2]; N];
        for (n, row) in rows.iter_mut().enumerate() {
            *row = [vectors::<S, N>(self.shift, col)[n], vectors::<S, N>(self.delta, col)[n]];
        }
        for (m, products) in block.iter().enumerate() {
            let at = (row + m) * TILE_STRIDE + col;
            let (weights, slopes) = (vectors_mut::<S, N>(self.weights, at), vectors_mut::<S, N>(self.slopes, at));
            let mut pairs = [[simd.splat_f32s(0.0); N]; 2];
            if let (false, Some(dropout)) = (PLAIN, &self.dropout) {
                let factors = dropout.factors::<S, N>(simd, self.visible.keys[row + m], col);
                for n in 0..N {
                    let product = simd.mul_f32s(products[n], factors[n]);
                    (pairs[0][n], pairs[1][n]) = self.norm.pair(simd, weights[n], product, rows[n]);
                    pairs[0][n] = simd.mul_f32s(pairs[0][n], factors[n]);
                }
            } else {
                for n in 0..N {
                    (pairs[0][n], pairs[1][n]) = self.norm.pair(simd, weights[n], products[n], rows[n]);
                }
            }
            if !PLAIN && !self.complete {
                pairs = pairs.map(|entries| self.visible.show(simd, [row + m, col], entries, 0.0));
            }
            weights.copy_from_slice(&pairs[0]);
            slopes.copy_from_slice(&pairs[1]);
        }
    }
}
