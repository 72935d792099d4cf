//! Values and affinities of tiles.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use super::{Known, Operands, Tile, Values};
use crate::{
    score::contract::PairScore,
    simd::{
        math::exp2,
        product::{InPlace, Sink, combine, take_rows, vectors, vectors_mut},
    },
};

pub(super) struct Scored<'a, T> {
    pub score: &'a T,
    pub operands: Operands<'a>,
    pub known: Known<'a>,
    pub into: Values<'a>,
}

impl<T: PairScore> WithSimd for Scored<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Operands { size, keys, queries, made } = self.operands;
        let mut sink = ValueSink { score: self.score, known: self.known, into: self.into };
        if made {
            return take_rows::<S, 1>(simd, 0..size.rows, size.cols, &mut sink);
        }
        combine(simd, T::TERM, size, keys, queries, &mut sink);
    }
}

/// Makes values of terms in registers.
struct ValueSink<'a, T> {
    score: &'a T,
    known: Known<'a>,
    into: Values<'a>,
}

impl<T> InPlace for ValueSink<'_, T> {
    fn products(&self) -> (&[f32], usize) {
        (self.into.data, self.into.stride)
    }
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
            let values = Self::values(score, *known, simd, [key, key * into.stride + col, col], of_key);
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

impl<T: PairScore> ValueSink<'_, T> {
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
