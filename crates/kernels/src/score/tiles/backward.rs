//! Weights of tiles, and the gradients of terms and parameters.

use std::f32::consts::LOG2_E;

use pulp::{Simd, WithSimd};

use super::{Backward, Factors, Known, ParameterSums, Shares, Tile, forward::present};
use crate::{
    score::contract::{MOST_PARAMETERS, PairScore, Slopes},
    simd::{
        math::exp2,
        product::{vectors, vectors_mut},
    },
};

pub(super) struct Differentiated<'a, T> {
    pub score: &'a T,
    /// Keys and queries of the tile.
    pub size: [usize; 2],
    pub known: Known<'a>,
    pub into: Backward<'a>,
}

impl<T: PairScore> WithSimd for Differentiated<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut centres = [[0.0; WIDEST]; MOST_PARAMETERS];
        typical(simd, self.score, self.into.parameters.as_ref().and_then(|p| p.typical), &mut centres);
        for key in 0..self.size[0] {
            let mut col = 0;
            if const { S::F32_LANES > 1 } {
                while col + 4 * S::F32_LANES <= self.size[1] {
                    self.key::<S, 4>(simd, [key, col], &centres);
                    col += 4 * S::F32_LANES;
                }
            }
            while col < self.size[1] {
                self.key::<S, 1>(simd, [key, col], &centres);
                col += S::F32_LANES;
            }
        }
    }
}

impl<T: PairScore> Differentiated<'_, T> {
    /// The pairs of one key and the queries from `col` on.
    #[inline(always)]
    fn key<S: Simd, const N: usize>(
        &mut self,
        simd: S,
        [key, col]: [usize; 2],
        centres: &[[f32; WIDEST]; MOST_PARAMETERS],
    ) {
        let (known, at, zero) = (self.known, key * self.into.stride + col, simd.splat_f32s(0.0));
        let mut sums = self.into.parameters.is_some().then_some([zero; MOST_PARAMETERS]);
        let [mut products, mut terms, mut bias] = [[zero; N]; 3];
        products.copy_from_slice(vectors::<S, N>(self.into.slopes, at));
        terms.copy_from_slice(vectors::<S, N>(self.into.weights, at));
        if let Some(tile) = known.bias {
            bias.copy_from_slice(vectors::<S, N>(tile, at));
        }
        let [mut of_pairs, mut of_values] = self.weigh(simd, [key, col], terms, bias, &products);
        if let Some(counts) = known.counts {
            let count = simd.splat_f32s(counts[key]);
            for n in 0..N {
                of_pairs[n] = simd.mul_f32s(count, of_pairs[n]);
                of_values[n] = simd.mul_f32s(count, of_values[n]);
            }
        }
        if let Some(visible) = &known.visible {
            of_pairs = visible.show(simd, [key, col], of_pairs, 0.0);
            of_values = visible.show(simd, [key, col], of_values, 0.0);
        }
        for n in 0..N {
            let centres = [vectors::<S, N>(&centres[0], col)[n], vectors::<S, N>(&centres[1], col)[n]];
            if known.bias.is_some() {
                of_pairs[n] = present(simd, bias[n], of_pairs[n]);
                of_values[n] = present(simd, bias[n], of_values[n]);
                let slopes = self.score.biased_slopes(simd, terms[n], bias[n]);
                if let Some(of_bias) = &mut self.into.of_bias {
                    let none = simd.equal_f32s(of_values[n], zero);
                    let x = simd.select_f32s(none, zero, simd.mul_f32s(of_values[n], slopes.1));
                    vectors_mut::<S, N>(of_bias, at)[n] = x;
                }
                let term = if T::LOG { terms[n] } else { simd.add_f32s(terms[n], bias[n]) };
                of_values[n] = chain_rule(simd, self.score, (term, slopes.0), of_values[n], centres, &mut sums);
            } else {
                let slopes = self.score.slopes(simd, terms[n]);
                of_values[n] = chain_rule(simd, self.score, (terms[n], slopes), of_values[n], centres, &mut sums);
            }
        }
        if let (Some(to), Some(sums)) = (&mut self.into.parameters, sums) {
            to.add::<S, T>(simd, sums);
        }
        vectors_mut::<S, N>(self.into.weights, at).copy_from_slice(&of_pairs);
        vectors_mut::<S, N>(self.into.slopes, at).copy_from_slice(&of_values);
    }

    /// The weights, and the gradients of the values, of pairs that are seen once.
    #[inline(always)]
    fn weigh<S: Simd, const N: usize>(
        &self,
        simd: S,
        [key, col]: [usize; 2],
        terms: [S::f32s; N],
        bias: [S::f32s; N],
        products: &[S::f32s; N],
    ) -> [[S::f32s; N]; 2] {
        let Self { score, known, into: Backward { factors, projection, shares, .. }, .. } = self;
        let zero = simd.splat_f32s(0.0);
        let (rows, fine) = (vectors::<S, N>(factors.rows, col), vectors::<S, N>(factors.fine, col));
        let (a, c) = (vectors::<S, N>(projection.a, col), vectors::<S, N>(projection.c, col));
        let tau = vectors::<S, N>(projection.tau, col);
        let column = simd.splat_f32s(factors.columns[key]);
        let (p, d) = (simd.splat_f32s(projection.p[key]), simd.splat_f32s(projection.d[key]));
        let [mut of_pairs, mut of_values] = [[zero; N]; 2];
        for n in 0..N {
            let mut value = match known.bias {
                Some(_) => score.biased_value(simd, terms[n], bias[n]),
                None => score.value(simd, terms[n]),
            };
            let mut taken = simd.mul_add_e_f32s(a[n], p, simd.mul_f32s(c[n], d));
            let mut chain = simd.splat_f32s(1.0);
            if let Some(constants) = known.constants {
                let constant = simd.splat_f32s(constants[key]);
                if T::LOG {
                    value = simd.add_f32s(value, constant);
                } else {
                    chain = constant;
                }
            }
            let weight = if T::LOG {
                chain = Factors::weight(simd, true, value, [rows[n], fine[n], column]);
                chain
            } else {
                taken = simd.mul_f32s(taken, sign(simd, value));
                chain = simd.mul_f32s(chain, simd.mul_f32s(rows[n], column));
                simd.mul_f32s(value, chain)
            };
            let rest = simd.sub_f32s(simd.sub_f32s(products[n], taken), simd.mul_f32s(tau[n], weight));
            (of_pairs[n], of_values[n]) = (weight, simd.mul_f32s(chain, rest));
            if let Some(Shares { x, logs }) = shares {
                let share = if T::LOG {
                    let l = simd.sub_f32s(value, vectors::<S, N>(logs, col)[n]);
                    exp2(simd, simd.mul_f32s(simd.splat_f32s(LOG2_E), l))
                } else {
                    sign(simd, value)
                };
                of_values[n] = simd.sub_f32s(of_values[n], simd.mul_f32s(vectors::<S, N>(x, col)[n], share));
            }
        }
        [of_pairs, of_values]
    }
}

/// 1, 0 or -1.
#[inline(always)]
fn sign<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
    let falling = simd.select_f32s(simd.less_than_f32s(x, zero), simd.neg_f32s(one), zero);
    simd.select_f32s(simd.less_than_f32s(zero, x), one, falling)
}

/// The gradient of a term from that of its value; adds those of the parameters.
#[inline(always)]
fn chain_rule<S: Simd, T: PairScore>(
    simd: S,
    score: &T,
    (term, slopes): (S::f32s, Slopes<S::f32s>),
    of_value: S::f32s,
    centres: [S::f32s; MOST_PARAMETERS],
    sums: &mut Option<[S::f32s; MOST_PARAMETERS]>,
) -> S::f32s {
    let zero = simd.splat_f32s(0.0);
    // Where nothing comes back, as from pairs that are not seen, an infinite slope is none.
    let none = simd.equal_f32s(of_value, zero);
    if let Some(sums) = sums {
        let parameters = score.less_centre(simd, term, &slopes, centres);
        for n in 0..T::PARAMETERS {
            let part = simd.mul_f32s(of_value, parameters[n]);
            sums[n] = simd.add_f32s(sums[n], simd.select_f32s(none, zero, part));
        }
    }
    simd.select_f32s(none, zero, simd.mul_f32s(of_value, slopes.term))
}

/// Widest row of a tile that has typical terms.
pub(crate) const WIDEST: usize = 64;

/// What derivatives in the parameters are taken from, of typical terms.
#[inline(always)]
fn typical<S: Simd, T: PairScore>(
    simd: S,
    score: &T,
    terms: Option<&[f32]>,
    centres: &mut [[f32; WIDEST]; MOST_PARAMETERS],
) {
    let Some(terms) = terms else { return };
    for (at, &term) in S::as_simd_f32s(terms).0.iter().enumerate() {
        for (centres, centre) in centres.iter_mut().zip(score.centre(simd, term)).take(T::PARAMETERS) {
            S::as_mut_simd_f32s(centres).0[at] = centre;
        }
    }
}

pub(super) struct Gradients<'a, T> {
    pub score: &'a T,
    pub terms: &'a [f32],
    pub tile: Tile<'a>,
    pub sums: ParameterSums<'a>,
}

impl<T: PairScore> WithSimd for Gradients<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Tile { data, stride, rows, width } = self.tile;
        let zero = simd.splat_f32s(0.0);
        let mut centres = [[0.0_f32; WIDEST]; MOST_PARAMETERS];
        typical(simd, self.score, self.sums.typical, &mut centres);
        let centres = [S::as_simd_f32s(&centres[0]).0, S::as_simd_f32s(&centres[1]).0];
        for (row, terms) in data.chunks_mut(stride).zip(self.terms.chunks(stride)).take(rows) {
            let mut sums = Some([zero; MOST_PARAMETERS]);
            let terms = S::as_simd_f32s(&terms[..width]).0;
            for (at, (x, &term)) in S::as_mut_simd_f32s(&mut row[..width]).0.iter_mut().zip(terms).enumerate() {
                // Wider tiles have no typical terms.
                let centres = if at < centres[0].len() { [centres[0][at], centres[1][at]] } else { [zero; 2] };
                let slopes = self.score.slopes(simd, term);
                *x = chain_rule(simd, self.score, (term, slopes), *x, centres, &mut sums);
            }
            self.sums.add::<S, T>(simd, sums.unwrap_or([zero; MOST_PARAMETERS]));
        }
    }
}

impl ParameterSums<'_> {
    #[inline(always)]
    fn add<S: Simd, T: PairScore>(&mut self, simd: S, sums: [S::f32s; MOST_PARAMETERS]) {
        for (to, sum) in self.sums.iter_mut().zip(sums).take(T::PARAMETERS) {
            *to += f64::from(simd.reduce_sum_f32s(sum));
        }
    }
}
