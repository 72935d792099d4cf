//! Dropout in a panel of queries: [`Dropout`] as the streams draw it.

use std::ops::Range;

use pulp::Simd;

use super::normalise::Tile;
use crate::{
    Dropout,
    call::dropout::{Dropped, KEY, MULTIPLIERS},
    simd::product::{vectors, vectors_mut},
};

/// The draws of some queries.
#[derive(Clone, Copy)]
pub(in crate::structure) struct PanelDropout<'a> {
    /// The state of each query's draws.
    rows: &'a [u32],
    threshold: Option<u32>,
    factor: f32,
    pub dropped: Dropped,
}

impl<'a> PanelDropout<'a> {
    /// The draws of the queries at the positions `kept`; `buffer` takes a number per query and may be longer.
    pub fn new(dropout: &Dropout, slice: usize, kept: &[u32], buffer: &'a mut [f32]) -> Self {
        let rows: &mut [u32] = bytemuck::cast_slice_mut(buffer);
        rows.iter_mut().zip(kept).for_each(|(row, &query)| *row = dropout.row(slice, query as usize));
        rows[kept.len()..].fill(0);
        let (threshold, factor) = (dropout.threshold(), dropout.factor() as f32);
        Self { rows, threshold, factor, dropped: dropout.dropped() }
    }

    /// Those of a panel of queries.
    pub fn panel(self, columns: Range<usize>) -> Self {
        Self { rows: &self.rows[columns], ..self }
    }

    /// What the weights of the pairs of `N` vectors of queries with the key at the position `key` are multiplied by: 0 where
    /// they are left out.
    #[inline(always)]
    pub fn factors<S: Simd, const N: usize>(&self, simd: S, key: u32, col: usize) -> [S::f32s; N] {
        let mut factors = [simd.splat_f32s(0.0); N];
        let Some(threshold) = self.threshold else { return factors };
        let [first, second] = MULTIPLIERS.map(|m| simd.splat_u32s(m));
        let (key, threshold) = (simd.splat_u32s(key.wrapping_mul(KEY)), simd.splat_u32s(threshold));
        let rows = vectors::<S, N>(bytemuck::cast_slice(self.rows), col);
        for n in 0..N {
            let x = simd.xor_u32s(simd.transmute_u32s_f32s(rows[n]), key);
            let x = simd.widening_mul_u32s(folded(simd, x, 16), first).0;
            let x = simd.widening_mul_u32s(folded(simd, x, 15), second).0;
            let dropped = simd.less_than_u32s(folded(simd, x, 16), threshold);
            factors[n] = simd.select_f32s(dropped, factors[n], simd.splat_f32s(self.factor));
        }
        factors
    }

    /// Multiplies the entries of a tile, whose keys are at the positions `keys`.
    #[inline(always)]
    pub fn scale<S: Simd>(&self, simd: S, keys: &[u32], tile: &mut Tile<'_>) {
        for (row, &key) in tile.data.chunks_mut(tile.stride).zip(keys) {
            for col in (0..tile.queries).step_by(S::F32_LANES) {
                let [factor] = self.factors::<S, 1>(simd, key, col);
                let entry = &mut vectors_mut::<S, 1>(row, col)[0];
                *entry = simd.mul_f32s(*entry, factor);
            }
        }
    }
}

#[inline(always)]
fn folded<S: Simd>(simd: S, x: S::u32s, by: u32) -> S::u32s {
    simd.xor_u32s(x, simd.wrapping_dyn_shr_u32s(x, simd.splat_u32s(by)))
}
