//! Values and affinities of tiles.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use super::{Known, Tile, Values};
use crate::{
    score::contract::PairScore,
    simd::{
        math::exp2,
        product::{vectors, vectors_mut},
    },
};

pub(super) struct Scored<'a, T> {
    pub score: &'a T,
    /// Keys and queries of the tile.
    pub size: [usize; 2],
    pub known: Known<'a>,
    pub into: Values<'a>,
}

impl<T: PairScore> WithSimd for Scored<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut col = 0;
        if const { S::F32_LANES > 1 } {
            while col + 4 * S::F32_LANES <= self.size[1] {
                self.columns::<S, 4>(simd, col);
                col += 4 * S::F32_LANES;
            }
        }
        while col < self.size[1] {
            self.columns::<S, 1>(simd, col);
            col += S::F32_LANES;
        }
    }
}

impl<T: PairScore> Scored<'_, T> {
    /// The pairs of all keys and the queries of `N` vectors from `col` on.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, col: usize) {
        let Self { score, size, known, into } = self;
        // Copied out and back: in memory, the running values would be a chain of stores and loads.
        let [mut sums, mut terms] = [[simd.splat_f32s(0.0); N]; 2];
        sums.copy_from_slice(vectors::<S, N>(into.sums, col));
        terms.copy_from_slice(vectors::<S, N>(into.terms, col));
        for key in 0..size[0] {
            let at = key * into.stride + col;
            let mut of_key = [simd.splat_f32s(0.0); N];
            of_key.copy_from_slice(vectors::<S, N>(into.data, at));
            let values = Self::values(score, *known, simd, [key, at, col], &of_key);
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
            vectors_mut::<S, N>(into.data, at).copy_from_slice(&entries);
        }
        vectors_mut::<S, N>(into.sums, col).copy_from_slice(&sums);
        vectors_mut::<S, N>(into.terms, col).copy_from_slice(&terms);
    }

    /// The values of the pairs of `key` and the queries from `col` on, whose place in a tile is `at`.
    #[inline(always)]
    fn values<S: Simd, const N: usize>(
        score: &T,
        known: Known<'_>,
        simd: S,
        [key, at, col]: [usize; 3],
        of_key: &[S::f32s; N],
    ) -> [S::f32s; N] {
        // Loops, not closures, which would be compiled without the instruction set.
        let mut values = [simd.splat_f32s(0.0); N];
        if let Some(bias) = known.bias {
            let bias = vectors::<S, N>(bias, at);
            for n in 0..N {
                let value = score.biased_value(simd, of_key[n], bias[n]);
                values[n] = if T::LOG { value } else { present(simd, bias[n], value) };
            }
        } else {
            for n in 0..N {
                values[n] = score.value(simd, of_key[n]);
            }
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
        values
    }
}

/// `x`, and 0 where a pair is absent.
#[inline(always)]
pub(super) fn present<S: Simd>(simd: S, bias: S::f32s, x: S::f32s) -> S::f32s {
    let absent = simd.equal_f32s(bias, simd.splat_f32s(f32::NEG_INFINITY));
    simd.select_f32s(absent, simd.splat_f32s(0.0), x)
}

pub(super) struct Affinities<'a, T> {
    pub score: &'a T,
    pub tile: Tile<'a>,
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
